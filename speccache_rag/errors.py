"""Every error a caller can meet.

    SpecCacheError
    ├── ConfigurationError          an option is wrong: unknown name, value out of range
    │   ├── UnsupportedModel        the model has a layer or RoPE kind whose KV cannot be moved
    │   └── UnsupportedVersion      an installed package is outside the supported window
    ├── PromptError                 this prompt or chunk cannot be served
    │   ├── EmptyChunk              a chunk without text
    │   ├── ChunkTooLong            a chunk that does not fit in the model's context
    │   └── ContextOverflow         a prompt that does not fit in the model's context
    ├── StoreError                  the chunk store
    │   ├── StoreUnavailable        it cannot be opened, read or written
    │   ├── StoreBusy               a capture was dropped because too many wait to be written
    │   └── ChunkCorrupted          stored bytes do not verify
    └── EngineError                 the inference engine
        ├── EngineStartError        it did not start
        ├── EngineForked            it runs in the process that this one was forked from
        ├── SelfCheckFailed         it started, and reuse was found to be wrong on it
        ├── RequestTimeout          an answer took longer than the call allowed
        └── EngineClosed            it was closed

The message names the value and the limit; `hint` names the remedy and is part of `str(error)`.
A miss in the store is no error: it is a value (see `speccache_rag.store.base`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class SpecCacheError(Exception):
    """Root of the tree. `hint` says what to do about it."""

    hint: str = ""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message
        if hint is not None:
            self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, tuple[type[SpecCacheError], str, str]]:
        # Keyword-only arguments need help to survive pickling.
        return _rebuild, (type(self), self.message, self.hint)

    def to_dict(self) -> dict[str, str]:
        """As plain values, to cross a process boundary."""
        return {"type": type(self).__name__, "message": self.message, "hint": self.hint}

    @staticmethod
    def from_dict(values: dict[str, str]) -> SpecCacheError:
        """The error that `to_dict` described."""
        cls = globals()[values["type"]]
        assert issubclass(cls, SpecCacheError)
        return _rebuild(cls, values["message"], values["hint"])


def _rebuild(cls: type[SpecCacheError], message: str, hint: str) -> SpecCacheError:
    return cls(message, hint=hint)


class ConfigurationError(SpecCacheError):
    """An option is unknown or out of range."""

    hint = "See SpecCacheConfig for the known options and their limits."


class UnsupportedModel(ConfigurationError):
    """The model has layers or a RoPE kind for which reuse is not proved."""

    hint = "Use a decoder-only model with full attention and a RoPE that does not depend on the prompt length."


class UnsupportedVersion(ConfigurationError):
    """An installed package is outside the supported window."""


class PromptError(SpecCacheError):
    """This prompt or chunk cannot be served; the next one can."""


class EmptyChunk(PromptError):
    """A chunk without text."""

    hint = "Drop empty texts before warming; retrieval never returns anything useful from them."


class ChunkTooLong(PromptError):
    """A chunk longer than the model's context."""

    hint = "Split the text into smaller chunks."


class ContextOverflow(PromptError):
    """A prompt longer than the model's context."""

    hint = (
        "Retrieve fewer chunks, shorten the prompt, or raise max_model_len in engine_options. LlamaIndex packs prompts "
        "by its own count: warm the nodes, or call set_global_tokenizer(llm.runtime.tokenizer.encode)."
    )


class StoreError(SpecCacheError):
    """The chunk store."""


class StoreUnavailable(StoreError):
    """The store cannot be opened, read or written."""

    hint = "Check the path, its permissions and free space, or pass store=None to keep chunk KV in RAM."


class StoreBusy(StoreError):
    """A capture was dropped because too many wait to be written; trying again later is right."""

    hint = "Warm fewer chunks at once, or use a faster disk."


class ChunkCorrupted(StoreError):
    """Stored bytes do not verify; the file is quarantined and the chunk counts as a miss."""

    hint = "Nothing to do: the chunk is recomputed and captured again."


class EngineError(SpecCacheError):
    """The inference engine."""


class EngineStartError(EngineError):
    """The engine did not start."""


class EngineForked(EngineError):
    """An engine was started before this process was forked; its threads and device memory stayed behind."""

    hint = (
        "Start engines behind the fork: gunicorn without --preload, or SpecCache made in its post_fork hook; "
        'multiprocessing with the "spawn" or "forkserver" start method.'
    )


class SelfCheckFailed(EngineError):
    """The engine started, but reused KV was not equal to prefilled KV on it."""

    hint = "Reuse would give wrong answers here, so it is refused. Please report the model and the versions."


class RequestTimeout(EngineError, TimeoutError):
    """An answer took longer than the call's `timeout`; its request was freed."""

    hint = "Raise timeout, or ask for fewer tokens with max_tokens."


class EngineClosed(EngineError):
    """The engine was closed."""

    hint = "Create a new SpecCache."


def refuse_unknown(owner: str, options: Collection[str], known: Sequence[str]) -> None:
    """Refuse option names that `owner` does not have.

    Raises:
        ConfigurationError: the message names the unknown ones and those there are.
    """
    if unknown := sorted(set(options) - set(known)):
        raise ConfigurationError(
            f"Unknown options of {owner}: {', '.join(unknown)}.", hint=f"Known: {', '.join(known) or 'none'}."
        )
