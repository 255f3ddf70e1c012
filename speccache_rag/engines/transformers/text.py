"""New tokens as text, piece by piece, held back while it may begin a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class AnswerText:
    """The text of one answer.

    Control tokens have no text, unless `skip_special` is False. A character whose bytes come in several tokens appears
    with the last of them.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str], *, skip_special: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # The prompt decides how the first new token is spelled (a leading space or none).
        self._stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=skip_special)
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False
        """Whether a stop string was found; nothing from it on is ever given out."""

    def add(self, token_id: int, *, may_stop: bool = True) -> str:
        """Text that is certain after one more token. Where `may_stop` is False, a stop string does not end it yet."""
        self._held += self._decode(token_id)
        if may_stop and (found := [at for s in self._stop if (at := self._held.find(s)) >= 0]):
            self.stopped = True
            self._held = self._held[: min(found)]
            return self.finish()
        certain = len(self._held) - self._n_uncertain()
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def finish(self) -> str:
        """What was held back."""
        text, self._held = self._held, ""
        return text

    def _decode(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:  # tokenizers raises nothing more special
            # Bytes that are no UTF-8 can make earlier text come out differently, and the stream refuses to go on.
            if not str(error).startswith("Invalid prefix"):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._skip_special)
            return self._stream.step(self._tokenizer, token_id) or ""

    def _n_uncertain(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=0) - 1
        for n in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-n:]) for s in self._stop):
                return n
        return 0
