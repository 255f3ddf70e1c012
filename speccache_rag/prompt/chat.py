"""`Chat`: a conversation to continue, with the tools and the template variables that belong to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from speccache_rag.errors import ConfigurationError

CHOICES = ("auto", "none", "required")
"""What `tool_choice` may be, beside the name of a tool."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, and what the chat template makes of them beyond their texts.

    `SpecCache` takes one wherever it takes a prompt; options `tools`, `tool_choice`, `parallel_tool_calls` and
    `chat_template_kwargs` of a call make one of plain messages.
    """

    messages: Sequence[Mapping[str, Any]]
    """{"role", "content"} each; an assistant's may hold "tool_calls" in OpenAI's shape and "reasoning_content"."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """{"type": "function", "function": {"name", "description", "parameters"}} each, as OpenAI's clients send them."""
    tool_choice: str = "auto"
    """One of `CHOICES`, or the name of the tool that must be called."""
    parallel_tool_calls: bool = True
    """Whether one answer may call several tools."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template, such as enable_thinking."""

    def __post_init__(self) -> None:
        """Check that the choice names a tool.

        Raises:
            ConfigurationError: it does not, or there are no tools to choose from.
        """
        names = self.tool_names
        if self.tool_choice in ("auto", "none") or self.tool_choice in names or (self.forced and names):
            return
        raise ConfigurationError(
            f"tool_choice is {self.tool_choice!r}; the call's tools are {', '.join(names) or 'none'}.",
            hint=f"Choose {', '.join(CHOICES)} or the name of a tool, and pass tools=[...].",
        )

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Names of the tools."""
        return tuple(str(tool["function"]["name"]) for tool in self.tools)

    @property
    def forced(self) -> bool:
        """Whether the answer must be a tool call."""
        return self.tool_choice == "required" or self.tool_choice in self.tool_names

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]], options: dict[str, Any], variables: Mapping[str, Any]) -> Chat:
        """A chat made of messages and the options of a call; takes its own out of `options`.

        Args:
            messages: as above.
            options: of the call; `variables` stand behind its `chat_template_kwargs`.
            variables: the model's own template variables.

        Raises:
            ConfigurationError: an option has a shape that is none of the known ones.
        """
        tools = tuple(_tool(tool) for tool in options.pop("tools", None) or ())
        choice = _choice(options.pop("tool_choice", None))
        parallel = options.pop("parallel_tool_calls", None)
        given = options.pop("chat_template_kwargs", None) or {}
        if not isinstance(given, Mapping):
            raise ConfigurationError(
                f"chat_template_kwargs is {given!r}.", hint='Pass a dict, such as {"enable_thinking": False}.'
            )
        return cls(messages, tools, choice, parallel is not False, {**variables, **given})


def _tool(tool: Any) -> Mapping[str, Any]:
    """A tool in OpenAI's shape, of one that is, or of its inner part alone."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigurationError(
            f"A tool is {str(tool)[:80]!r}.",
            hint='Pass {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}.',
        )
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"description": "", **function, "parameters": parameters}}


def _choice(choice: Any) -> str:
    if choice is None:
        return "auto"
    if isinstance(choice, Mapping):
        choice = (choice.get("function") or {}).get("name")
    if isinstance(choice, str):
        return choice
    raise ConfigurationError(f"tool_choice is {choice!r}.", hint=f"Choose {', '.join(CHOICES)} or the name of a tool.")
