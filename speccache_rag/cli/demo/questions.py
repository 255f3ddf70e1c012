"""What the demo asks, and the packages whose READMEs hold the answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and the package to read for it."""

    text: str
    package: str


QUESTIONS = (
    Question("What is Typer, and what are its key features?", "typer"),
    Question("What is HTTPX, and which HTTP versions does it support?", "httpx"),
    Question("What is einops used for, and which frameworks does it support?", "einops"),
    Question("What can the Rich library print in the terminal?", "rich"),
    Question("How fast is tiktoken compared with other tokenizers?", "tiktoken"),
)
"""Packages that this project itself depends on, so that they are in every environment it runs in."""
