"""One request's answer, one token a step."""

from __future__ import annotations

from speccache_rag.engines.base import EngineDelta
from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.engines.transformers.model import TargetModel
from speccache_rag.engines.transformers.prefill import Prefilled, prefill
from speccache_rag.engines.transformers.sampling import Sampler, SamplingOptions
from speccache_rag.engines.transformers.text import AnswerText
from speccache_rag.errors import ContextOverflow, PromptError
from speccache_rag.store.base import ChunkStore


class Generation:
    """Steps of one request: the first prefills the prompt, each gives one token."""

    def __init__(self, target: TargetModel, store: ChunkStore, plan: ReusePlan, options: SamplingOptions) -> None:
        """Nothing runs before the first step.

        Raises:
            PromptError: the prompt is empty, or leaves no room for an answer.
        """
        n = len(plan.token_ids)
        if n == 0:
            raise PromptError("The prompt has no tokens.", hint="Pass some text.")
        if n >= target.max_model_len:
            raise ContextOverflow(f"The prompt has {n} tokens; the model's context is {target.max_model_len}.")
        self._target, self._store, self._plan, self._options = target, store, plan, options
        room = target.max_model_len - n
        self._limit = room if options.max_tokens is None else min(options.max_tokens, room)
        self._stop_ids = {*options.stop_token_ids, *(() if options.ignore_eos else target.eos_ids)}
        self._sampler = Sampler(options, self._stop_ids)
        self._text = AnswerText(
            target.tokenizer, plan.token_ids, options.stop, skip_special=options.skip_special_tokens
        )
        self._prefilled: Prefilled | None = None
        self._new: list[int] = []

    def step(self) -> EngineDelta:
        """The next token's delta. Not to be called after a finished one."""
        prefilled = self._prefilled
        if prefilled is None:
            self._prefilled = prefilled = prefill(self._target, self._store, self._plan)
            logits = prefilled.logits
        else:
            at = len(self._plan.token_ids) + len(self._new) - 1
            logits = self._target.extend(self._new[-1:], at, prefilled.cache)
        token, logprobs = self._sampler.choose(logits, self._new)
        text, reason = self._take(token)
        return EngineDelta(
            text,
            n_new_tokens=1,
            finished=reason is not None,
            finish_reason=reason,
            outcome=prefilled.outcome if reason is not None else None,
            logprobs=None if logprobs is None else [logprobs],
            token_ids=(token,),
        )

    def _take(self, token: int) -> tuple[str, str | None]:
        """The text a token makes certain, and why the answer ends with it, if it does."""
        self._new.append(token)
        if token in self._stop_ids:
            return self._text.finish(), "stop"
        text = self._text.add(token, may_stop=len(self._new) > self._options.min_tokens)
        if self._text.stopped:
            return text, "stop"
        if len(self._new) >= self._limit:
            return text + self._text.finish(), "length"
        return text, None
