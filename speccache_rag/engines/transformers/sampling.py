"""`Sampler`: chooses the next token from logits. Option names and defaults are vLLM's, the filters Transformers'."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

GREEDY = 1e-5
"""Temperatures below this take the most likely token, as in vLLM."""

StopString = Annotated[str, StringConstraints(min_length=1)]


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class SamplingOptions(BaseModel):
    """How to generate: the part of vLLM's `SamplingParams` that this engine knows.

    The same seed gives the same answer again on this engine; vLLM draws other random numbers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: int | None = Field(default=None, ge=1, description="None: what the context leaves.")
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, description="0 and -1: all tokens.")
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Annotated[tuple[StopString, ...], BeforeValidator(_as_tuple)] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = Field(default=None, ge=0, description="So many top tokens, and the chosen one.")


class Sampler:
    """Chooses one request's tokens, on the CPU, with random numbers of its own."""

    def __init__(self, options: SamplingOptions, stop_ids: set[int]) -> None:
        """`stop_ids` are held back until `min_tokens` tokens are there."""
        self._options = options
        self._greedy = options.temperature < GREEDY
        self._processors: Any = _processors(options, stop_ids, greedy=self._greedy)
        self._random = torch.Generator()
        if options.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(options.seed)

    def choose(self, logits: torch.Tensor, so_far: list[int]) -> tuple[int, dict[int, float] | None]:
        """The next token after the new tokens `so_far`, from logits [V]; and its logprobs if they were asked for.

        Logprobs are those of the model, before any option changed them (vLLM's `raw_logprobs`).
        """
        raw = logits.float().cpu()
        scores: torch.Tensor = self._processors(torch.tensor([so_far], dtype=torch.int64), raw[None].clone())[0]
        if self._greedy:
            token = int(scores.argmax())
        else:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self._random))
        return token, self._logprobs(raw, token)

    def _logprobs(self, raw: torch.Tensor, token: int) -> dict[int, float] | None:
        if self._options.logprobs is None:
            return None
        logprobs = raw.log_softmax(-1)
        top = logprobs.topk(min(self._options.logprobs, len(logprobs)))
        found = {token: float(logprobs[token])}
        return found | dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def _processors(options: SamplingOptions, stop_ids: set[int], *, greedy: bool) -> LogitsProcessorList:
    """In vLLM's order: temperature, min_p, top_k, top_p."""
    processors = LogitsProcessorList()
    if options.min_tokens and stop_ids:
        processors.append(MinNewTokensLengthLogitsProcessor(0, options.min_tokens, sorted(stop_ids)))
    if greedy:
        return processors
    processors.append(TemperatureLogitsWarper(options.temperature))
    if options.min_p > 0.0:
        processors.append(MinPLogitsWarper(options.min_p))
    if options.top_k > 0:
        processors.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1.0:
        processors.append(TopPLogitsWarper(options.top_p))
    return processors
