r"""Say why chunks are not found where a prompt holds them as a Python string.

Some pipelines format a list of texts, or whole documents, straight into the prompt. What the model then reads is
`["The mill\nof Arden ..."]`, with a backslash and an n where the chunk has a line break: other tokens, whose KV
nobody has. Only the pipeline can change that, so its owner is told, once.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence

from speccache_rag.types import ChunkMatch

logger = logging.getLogger(__name__)

_ESCAPE = re.compile(r"\\(?:[\\'\"nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U(?:000[0-9a-f]|0010)[0-9a-f]{4})")
"""What `repr` writes for a character; JSON writes a part of the same. Beyond U+10FFFF there is none to decode."""


class EscapedChunks:
    """Looks for escaped chunks in prompts until it has found one. Any thread may use it."""

    def __init__(self, find: Callable[[str], list[ChunkMatch]]) -> None:
        self._find = find
        self._found = False

    def look(self, prompt: str, matches: Sequence[ChunkMatch]) -> None:
        """Log one warning if known chunks stand in `prompt` escaped; `matches` are those found in it as they are.

        Cheap where there is nothing to see: only text outside whole matches is looked at, and only where it holds an
        escape sequence is it searched again.
        """
        if self._found:
            return
        n_chunks = sum(self._hidden(gap) for gap in _gaps(prompt, matches))
        if n_chunks and not self._found:
            self._found = True
            logger.warning(
                "Known chunks (%d) stand in a prompt as escaped strings: a Python list or Document was formatted into "
                "it. They cannot be reused and are computed like any other text. Put the texts themselves into the "
                "prompt: in LlamaIndex use another response mode than simple_summarize; in LangChain join them first, "
                '"\\n\\n".join(d.page_content for d in documents). This is said once.',
                n_chunks,
            )

    def _hidden(self, text: str) -> int:
        """How many chunks, whole or cut, appear once the escapes are undone."""
        if not _ESCAPE.search(text):
            return 0
        plain = _ESCAPE.sub(lambda match: match[0].encode("ascii").decode("unicode_escape"), text)
        # A chunk that was cut, and not escaped, is in the text both before and after.
        return sum(plain[match.char_start : match.char_end] not in text for match in self._find(plain))


def _gaps(prompt: str, matches: Sequence[ChunkMatch]) -> list[str]:
    """The text between whole matches. A cut match stays in: it may end at the chunk's first line break."""
    edges = [0]
    for match in matches:
        if match.whole:
            edges += match.char_start, match.char_end
    edges.append(len(prompt))
    return [prompt[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
