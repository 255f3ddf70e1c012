"""From LlamaIndex messages and templates to what the target model reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.chat_prompts import CHAT_TEXT_QA_PROMPT
from llama_index.core.prompts.default_prompts import DEFAULT_TEXT_QA_PROMPT
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from speccache_rag.errors import PromptError
from speccache_rag.prompt.templates import CONTEXT_MARK, ChatTemplate, text_before

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HasText = BaseNode | NodeWithScore | str
"""Whatever holds a chunk's text."""


def bare_texts(chunks: Iterable[HasText]) -> Iterable[str]:
    """The texts alone, without the metadata that prompts show above them: that differs, the text does not."""
    if isinstance(chunks, str):
        return chunks  # one text is not a list of letters: `SpecCache` refuses it
    return [c if isinstance(c, str) else c.get_content(metadata_mode=MetadataMode.NONE) for c in chunks]


def as_turns(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Messages as `{"role", "content"}` for a chat template; text blocks of one message are joined by a newline.

    Raises:
        PromptError: a message holds something other than text.
    """
    for message in messages:
        for block in message.blocks:
            if not isinstance(block, TextBlock):
                raise PromptError(
                    f"A {message.role.value} message holds a {type(block).__name__}; SpecCacheLLM reads text only.",
                    hint="Drop the block, or turn it into text first.",
                )
    return [{"role": message.role.value, "content": message.content or ""} for message in messages]


def anchor_for(tokenizer: PreTrainedTokenizerBase, text_qa_template: BasePromptTemplate | None = None) -> str:
    """What a query engine's prompt holds in front of the retrieved context: the `anchor` of a `SpecCacheConfig`.

    Chunks captured behind the header that they are served behind are closest to a full prefill.

    Args:
        tokenizer: The target model's tokenizer; its chat template is applied where it has one.
        text_qa_template: The template given to the query engine (a selector must be resolved first, with
            `select(llm)`); None takes LlamaIndex's own for this kind of model.

    Raises:
        PromptError: the template has no `{context_str}`.
    """
    is_chat = bool(tokenizer.chat_template)
    template = text_qa_template or (CHAT_TEXT_QA_PROMPT if is_chat else DEFAULT_TEXT_QA_PROMPT)
    if is_chat:
        messages = template.format_messages(context_str=CONTEXT_MARK, query_str="")
        prompt = ChatTemplate(tokenizer).render(as_turns(messages))
    else:
        prompt = template.format(context_str=CONTEXT_MARK, query_str="")
    header = text_before(prompt, CONTEXT_MARK)
    if header is None:
        raise PromptError(
            "The question-answering template does not place the retrieved context.",
            hint="Put {context_str} where the context belongs.",
        )
    return header
