"""The text that a chain's prompt puts in front of retrieved context: the `anchor` of a `SpecCacheConfig`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, MessagesPlaceholder

from langchain_speccache.messages import as_turns
from langchain_speccache.templates import fit
from speccache_rag.errors import PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT_MARK = "\u2063context\u2063"
"""Stands for the retrieved context while a prompt is rendered; no prompt holds it."""


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
        PromptError: the prompt does not place that variable.
    """
    parts = prompt.messages if isinstance(prompt, ChatPromptTemplate) else []
    histories = {part.variable_name for part in parts if isinstance(part, MessagesPlaceholder)}
    empty: dict[str, object] = {name: [] if name in histories else "" for name in prompt.input_variables}
    value = prompt.format_prompt(**{**empty, variable: CONTEXT_MARK})
    if isinstance(prompt, ChatPromptTemplate):
        turns = fit(as_turns(value.to_messages()), tokenizer)
        text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    else:
        text = value.to_string()
    header, mark, _ = text.partition(CONTEXT_MARK)
    if not mark:
        raise PromptError(
            f"The prompt does not place {variable!r}; its variables are {sorted(prompt.input_variables)}.",
            hint="Name the variable that receives the retrieved texts.",
        )
    return header
