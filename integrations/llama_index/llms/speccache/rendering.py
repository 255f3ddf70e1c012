"""From LlamaIndex messages and templates to what the target model reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.chat_prompts import CHAT_TEXT_QA_PROMPT
from llama_index.core.prompts.default_prompts import DEFAULT_TEXT_QA_PROMPT
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore
from llama_index.llms.speccache.tools import arguments

from speccache_rag.errors import PromptError
from speccache_rag.prompt.templates import CONTEXT_MARK, ChatTemplate, Turn, article, text_before

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HasText = BaseNode | NodeWithScore | str
"""Whatever holds a chunk's text."""


def bare_texts(chunks: Iterable[HasText]) -> Iterable[str]:
    """The texts alone, without the metadata that prompts show above them: that differs, the text does not."""
    if isinstance(chunks, str):
        return chunks  # one text is not a list of letters: `SpecCache` refuses it
    return [c if isinstance(c, str) else c.get_content(metadata_mode=MetadataMode.NONE) for c in chunks]


def as_turns(messages: Sequence[ChatMessage]) -> list[Turn]:
    """Messages as turns for a chat template; text blocks of one message are joined by a newline.

    Tool calls and reasoning stand beside the text, for the chat template to show or to leave out; cache points mean
    something to other services only, and are left out.

    Raises:
        PromptError: a message holds an image or another medium.
    """
    return [_turn(message) for message in messages]


def _turn(message: ChatMessage) -> Turn:
    texts: list[str] = []
    calls: list[Mapping[str, Any]] = []
    thoughts: list[str] = []
    for block in message.blocks:
        match block:
            case ThinkingBlock():
                thoughts.append(block.content or "")
            case ToolCallBlock():
                calls.append(_call(block.tool_call_id, block.tool_name, block.tool_kwargs))
            case CachePoint():
                pass
            case _:
                texts += _texts(block, message.role.value)
    turn: Turn = {"role": message.role.value, "content": "\n".join(texts)}
    calls = calls or _older_calls(message.additional_kwargs.get("tool_calls"))
    turn |= {"tool_calls": calls} if calls else {}
    turn |= {"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {}
    call_id = message.additional_kwargs.get("tool_call_id")
    return turn | ({"tool_call_id": str(call_id)} if call_id and turn["role"] == "tool" else {})


def _texts(block: Any, role: str) -> list[str]:
    match block:
        case TextBlock():
            return [block.text]
        case CitableBlock():
            return [text for inner in block.content for text in _texts(inner, role)]
        case CitationBlock():
            return _texts(block.cited_content, role)
    raise PromptError(
        f"{article(role)} {role} message holds a {type(block).__name__}; SpecCacheLLM reads text only.",
        hint="Drop the block, or turn it into text first.",
    )


def _older_calls(calls: Any) -> list[Mapping[str, Any]]:
    """Tool calls in OpenAI's shape, where LlamaIndex kept them before it had blocks for them."""
    found = [call for call in calls or () if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)]
    return [_call(call.get("id"), call["function"].get("name"), call["function"].get("arguments")) for call in found]


def _call(call_id: str | None, name: Any, written: Any) -> Mapping[str, Any]:
    """The call in OpenAI's shape, its arguments as values: templates write them down themselves."""
    values = arguments(written) if isinstance(written, dict | str) else {}
    function = {"name": str(name or ""), "arguments": values or (written or {})}
    return {"id": call_id or "", "type": "function", "function": function}


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
