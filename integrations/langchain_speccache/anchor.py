"""The text that a chain's prompt puts in front of retrieved context: the `anchor` of a `SpecCacheConfig`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, MessagesPlaceholder

from langchain_speccache.messages import as_turns
from speccache_rag.errors import PromptError
from speccache_rag.prompt.templates import CONTEXT_MARK, ChatTemplate, text_before

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def anchor_for(
    tokenizer: PreTrainedTokenizerBase, prompt: BasePromptTemplate[object], variable: str = "context"
) -> str:
    """What `prompt` holds in front of the retrieved context, chat template and all.

    Chunks captured behind the header that they are served behind are closest to a full prefill.

    Args:
        tokenizer: The target model's tokenizer.
        prompt: The chain's prompt. A chat prompt goes through the tokenizer's chat template; history is left empty.
        variable: The prompt's variable that receives the retrieved texts.

    Raises:
        PromptError: the prompt does not place that variable, or is a chat prompt where there is no chat template.
    """
    parts = prompt.messages if isinstance(prompt, ChatPromptTemplate) else []
    histories = {part.variable_name for part in parts if isinstance(part, MessagesPlaceholder)}
    empty: dict[str, object] = {name: [] if name in histories else "" for name in prompt.input_variables}
    value = prompt.format_prompt(**{**empty, variable: CONTEXT_MARK})
    if isinstance(prompt, ChatPromptTemplate):
        text = ChatTemplate(tokenizer).render(as_turns(value.to_messages()))
    else:
        text = value.to_string()
    header = text_before(text, CONTEXT_MARK)
    if header is None:
        raise PromptError(
            f"The prompt does not place {variable!r}; its variables are {sorted(prompt.input_variables)}.",
            hint="Name the variable that receives the retrieved texts.",
        )
    return header
