"""The loaded target model: three ways to run tokens through it, and what is known about its KV."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from speccache_rag.engines.reuse.attention import QUERY_TOKENS
from speccache_rag.engines.transformers.cache import CacheShape, ReuseCache
from speccache_rag.engines.transformers.support import check_model, kv_shape, rope_table
from speccache_rag.engines.transformers.watching import watching
from speccache_rag.errors import ConfigurationError, EngineStartError, UnsupportedModel
from speccache_rag.prompt.loading import load_tokenizer, remote_code_error


class TargetModel:
    """A causal language model on its device. Not thread-safe: the engine gives it one thread."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, max_model_len: int) -> None:
        """Find out what its KV looks like, and how its keys are rotated.

        Raises:
            UnsupportedModel: its KV cannot be reused; the message gives the reason.
        """
        name = type(model).__name__
        check_model(name, model)
        self.tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self.eos_ids = _eos_ids(model, tokenizer)
        self.max_model_len = max_model_len
        text: Any = model.config.get_text_config(decoder=True)
        self.vocab_size = int(text.vocab_size)
        self._model = model
        # Few logits are needed, and the LM head over a whole prompt is expensive.
        self._can_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.rope = rope_table(model, max_model_len)
        cache, _ = self.prefill([0, 0])
        self.shape: CacheShape = kv_shape(name, cache, int(text.num_hidden_layers), n_tokens=2)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int,
        attn_implementation: str,
        tokenizer: PreTrainedTokenizerBase | None = None,
        trust_remote_code: bool = False,
    ) -> TargetModel:
        """Load weights from a folder, and the tokenizer where none is given.

        Raises:
            EngineStartError: they cannot be loaded, or are not all there.
            ConfigurationError: the tokenizer is not a fast one.
            UnsupportedModel: see `__init__`.
        """
        try:
            tokenizer = tokenizer or load_tokenizer(path, {"trust_remote_code": trust_remote_code})
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=attn_implementation,
                output_loading_info=True,
                trust_remote_code=trust_remote_code,
            )
            model, info = loaded
            model = model.to(device).eval()
        except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
            raise remote_code_error(path, error) or EngineStartError(
                f"Transformers cannot load {str(path)!r} on {device}: {error}", hint=""
            ) from error
        if info["missing_keys"]:
            # Transformers would fill them with random numbers and go on.
            missing = sorted(info["missing_keys"])
            raise EngineStartError(
                f"{len(missing)} weights are missing in {str(path)!r}, {missing[0]} among them.",
                hint="Fetch the model again.",
            )
        if not tokenizer.is_fast:
            raise ConfigurationError(
                f"The tokenizer of {str(path)!r} is not a fast one.",
                hint="Use a model whose folder holds a tokenizer.json.",
            )
        return cls(model, tokenizer, max_model_len)

    def prefill(self, token_ids: Sequence[int]) -> tuple[DynamicCache, torch.Tensor]:
        """Plain prefill, as Transformers does it: the cache, and the logits [V] of the last token."""
        cache = DynamicCache()
        return cache, self.extend(token_ids, 0, cache)

    def extend(self, token_ids: Sequence[int], start: int, cache: Cache) -> torch.Tensor:
        """Run tokens that follow the `start` ones in `cache`; returns the logits [V] of the last."""
        logits: torch.Tensor = self._output(token_ids, start, cache).logits[0, -1]
        return logits

    def extend_all(self, token_ids: Sequence[int], start: int, cache: Cache) -> torch.Tensor:
        """Like `extend`, and returns the logits of every token, [S, V]."""
        logits: torch.Tensor = self._output(token_ids, start, cache, n_logits=len(token_ids)).logits[0]
        return logits

    def recompute(
        self, token_ids: Sequence[int], positions: np.ndarray, cache: ReuseCache, *, rope_offset: int = 0
    ) -> None:
        """Sparse prefill: compute `positions` (sorted, unique) of a region anew, over what `cache` holds for the rest.

        In every layer all fresh rows are in their places before any query looks, so a token at position p sees exactly
        the keys 0 .. p, fresh where they are recomputed and reused where they are not (design section 5).
        `rope_offset` shifts only the angles of RoPE.
        """
        if len(positions):
            self._sparse(token_ids, positions, cache, rope_offset)

    def attend(
        self, token_ids: Sequence[int], positions: np.ndarray, cache: ReuseCache, first: int, layers: Collection[int]
    ) -> torch.Tensor:
        """Like `recompute`, and watches the rows of positions `first` to the end, which must be among `positions`.

        Returns:
            float32 [Q, T]: the maximum over heads and `layers` of their attention probabilities on each key, for the
            last `QUERY_TOKENS` of those rows at most.
        """
        first = max(first, len(token_ids) - QUERY_TOKENS)
        with watching(self._model, layers, len(token_ids) - first, first) as watch:
            self._sparse(token_ids, positions, cache)
        if watch.most is None:
            raise UnsupportedModel(
                f"What {type(self._model).__name__} attends to cannot be watched: it does not call its attention "
                "through Transformers' AttentionInterface."
            )
        return watch.most

    def synchronize(self) -> None:
        """Wait for the device, so that the clock can be read."""
        if self.shape.device.type != "cpu":
            torch.accelerator.synchronize()

    @torch.no_grad()
    def _sparse(
        self,
        token_ids: Sequence[int],
        positions: np.ndarray,
        cache: ReuseCache,
        rope_offset: int = 0,
    ) -> None:
        """The decoder over `positions`; nobody needs their logits, and a large vocabulary's head takes its time."""
        device = self._model.device
        chosen = torch.from_numpy(positions)
        mask = causal_rows(chosen, len(token_ids)).to(device)
        if self._model.config._attn_implementation == "eager":  # which adds the mask to its logits
            lowest = torch.finfo(self._model.dtype).min
            mask = torch.zeros(mask.shape, dtype=self._model.dtype, device=device).masked_fill(~mask, lowest)
        with cache.scattering(chosen.to(device)):
            self._model.base_model(
                input_ids=torch.tensor([[token_ids[p] for p in positions.tolist()]], device=device),
                position_ids=(chosen + rope_offset)[None].to(device),
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            )

    @torch.no_grad()
    def _output(self, token_ids: Sequence[int], start: int, cache: Cache, *, n_logits: int = 1) -> Any:
        device = self._model.device
        return self._model(
            input_ids=torch.tensor([list(token_ids)], device=device),
            position_ids=torch.arange(start, start + len(token_ids))[None].to(device),
            past_key_values=cache,
            use_cache=True,
            **({"logits_to_keep": n_logits} if self._can_keep else {}),
        )


def causal_rows(positions: torch.Tensor, length: int) -> torch.Tensor:
    """bool [1, 1, S, T]: the token at position p sees keys 0 .. p of `length`, and no other."""
    return (torch.arange(length) <= positions[:, None])[None, None]


def _eos_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """What ends an answer: the tokenizer's EOS, and those of the generation config (chat models have several)."""
    configured: Any = getattr(model.generation_config, "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in (*several, tokenizer.eos_token_id) if i is not None)
