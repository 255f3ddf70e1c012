"""Error texts as the command line speaks: its flags in the place of Python's arguments."""

from __future__ import annotations

import re

from speccache_rag.cli.options import FLAGS
from speccache_rag.config import SpecCacheConfig

OPTIONS = (*SpecCacheConfig.model_fields, "max_tokens", "temperature")
"""What Python takes by name and the command line by flag."""

PHRASES = {
    r"or pass store=None to keep chunk KV in RAM": "or name another folder with --store",
    r"Pass a folder, or None for RAM": "Name a folder with --store",
    r"See SpecCacheConfig for the known options and their limits": "See --help for the options and their limits",
    r"(\w+) in engine_options": r"--engine-option \1",
    r"engine_options=\{'(\w+)': True\}": r"--engine-option \1=true",
    r"engine_options(?:\['(\w+)'\])?": "--engine-option",
    r"chat_template_kwargs": "--chat-template-kwarg",
}
"""Turns of speech that hold more than one name, as patterns."""


def as_flags(text: str) -> str:
    """The same advice for somebody at a command line."""
    for pattern, spoken in PHRASES.items():
        text = re.sub(pattern, spoken, text)
    for name in OPTIONS:
        flag = FLAGS.get(name, (f"--{name.replace('_', '-')}",))[0]
        text = re.sub(rf"option '{name}'", flag, text)
        text = re.sub(rf"(?<![\w-]){name}='([^']*)'", rf"{flag} \1", text)
        text = re.sub(rf"(?<![\w-]){name}=", f"{flag} ", text)
        if "_" in name:  # a plain word, such as model, is a word
            text = re.sub(rf"(?<![\w-]){name}(?![\w])", flag, text)
    return text
