"""The notation in which a model writes tool calls and reasoning, told from its chat template.

Notations carry the names of vLLM's parsers, which read them (`vllm serve --tool-call-parser`, `--reasoning-parser`).
"""

from __future__ import annotations

TOOL_NOTATIONS = {
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json",
    '{"name": function name, "parameters": dictionary': "llama3_json",  # Llama 3.2
    "<minimax:tool_call>": "minimax_m2",
    "<seed:tool_call>": "seed_oss",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<start_function_call>": "functiongemma",
    "<|tool_call_start|>": "lfm2",
    "<arg_key>": "glm45",
    "functools[": "phi4_mini_json",
    "<|start_of_role|>": "granite",
    "<function=": "qwen3_coder",
    "<tool_call>": "hermes",
}
"""What a template holds to parser. The first that is found counts: some stand inside others' templates."""

REASONING_NOTATIONS = {
    "[THINK]": "mistral",
    "<seed:think>": "seed_oss",
    "enable_thinking": "qwen3",
    "</think>": "deepseek_r1",
}
"""Likewise."""

NONE = "none"
"""Given as a parser's name, it switches reading off."""


def tool_notation(template: str, chosen: str | None = None) -> str | None:
    """The tool parser: the chosen one, else the template's, None where neither names one."""
    return _notation(TOOL_NOTATIONS, template, chosen)


def reasoning_notation(template: str, chosen: str | None = None) -> str | None:
    """The reasoning parser: the chosen one, else the template's, None where neither names one."""
    return _notation(REASONING_NOTATIONS, template, chosen)


def _notation(known: dict[str, str], template: str, chosen: str | None) -> str | None:
    if chosen is not None:
        return None if chosen == NONE else chosen
    return next((name for mark, name in known.items() if mark in template), None)
