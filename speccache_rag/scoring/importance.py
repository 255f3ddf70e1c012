"""Importance scores from a small causal language model (SpecCache paper, section 2.2)."""

from __future__ import annotations

import hashlib
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from speccache_rag.errors import ConfigurationError, UnsupportedModel
from speccache_rag.fingerprint import model_fingerprint
from speccache_rag.scoring.layers import LayerRange, counted_layers
from speccache_rag.types import Offsets

_MAX_HEADER_TOKENS = 64


class SpeculativeScorer:
    """Scores every token of a text: I_i = mean over deep layers l of ||h_i^(l)||_2.

    h^(l) is the residual stream after layer l and before the final norm. Of S layers the deep ones are the last
    floor(S / 3), at least one; `layers` widens or narrows that: "all", "last_two_thirds", "last_third", "last".

    Scores come with the offsets of the speculative model's own tokens, each covering at least one character: a BOS
    that the tokenizer adds is seen by the model and left out of the result. Control tokens spelled in a text are not
    defused as they are for the target: only offsets and norms leave here, never ids, so they do no harm.

    A text longer than the model's context is scored in windows of nearly equal length. Each starts anew behind the
    header: the first tokens of the text in `score`, the prefix in `score_after`. A token near the start of a window
    so sees less of what precedes it than in one pass; importance is local enough to bear that.

    The model is loaded at the first score. Threads may share a scorer; they take turns.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        layers: LayerRange = "last_third",
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """`dtype` None takes bfloat16, or float32 on a CPU that computes it sooner.

        `trust_remote_code` runs code that comes with the model.

        Raises:
            ConfigurationError: `layers` is unknown.
        """
        counted_layers(1, layers)  # refuses an unknown name before anything is loaded
        self.model_path = model_path
        self.layers = layers
        self.device = device
        self.dtype = dtype or _fast_dtype(device)
        self.trust_remote_code = trust_remote_code
        self._lock = threading.Lock()
        self._loaded: _Loaded | None = None

    @cached_property
    def identity(self) -> str:
        """64 hex digits naming model and layers: scores of equal identity may be mixed, others may not.

        Raises:
            ConfigurationError: the model folder is not one.
        """
        facts = f"importance/1 {model_fingerprint(self.model_path)} {self.layers}"
        return hashlib.blake2b(facts.encode(), digest_size=32).hexdigest()

    def score(self, text: str) -> tuple[Offsets, np.ndarray]:
        """Score a whole prompt: offsets int32 [S, 2] in characters of `text`, importance float32 [S].

        Raises:
            ConfigurationError: the model cannot be loaded.
            UnsupportedModel: it has no decoder layers to look at.
        """
        with self._lock:
            loaded = self._load()
            ids, offsets = loaded.tokenize(text, with_special=True)
            if len(ids) <= loaded.max_tokens:
                scores = loaded.norms(ids)
            else:
                header = min(_MAX_HEADER_TOKENS, loaded.max_tokens // 2)
                scores = loaded.norms_behind(ids[:header], ids[header:])
            covering = offsets[:, 1] > offsets[:, 0]
            return offsets[covering], scores[covering]

    def score_after(self, prefix: str, text: str) -> tuple[Offsets, np.ndarray]:
        """Score one chunk behind `prefix` (the anchor text): as `score`, over `text` and in characters of it alone.

        Prefix and text are tokenized apart, so no token lies across the boundary.

        Raises:
            ConfigurationError, UnsupportedModel: as for `score`.
        """
        with self._lock:
            loaded = self._load()
            header, _ = loaded.tokenize(prefix, with_special=True)
            header = header[: loaded.max_tokens // 2]
            ids, offsets = loaded.tokenize(text, with_special=False)
            scores = loaded.norms_behind(header, ids)[len(header) :]
            covering = offsets[:, 1] > offsets[:, 0]
            return offsets[covering], scores[covering]

    def _load(self) -> _Loaded:
        """The model, loaded once; the caller holds the lock."""
        if self._loaded is None:
            self._loaded = _load(self.model_path, self.layers, self.device, self.dtype, self.trust_remote_code)
        return self._loaded


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model without LM head, its tokenizer, and the deep layers among its own."""

    model: Any
    tokenizer: Any
    deep_layers: list[nn.Module]
    max_tokens: int

    def tokenize(self, text: str, *, with_special: bool) -> tuple[list[int], Offsets]:
        """Token ids, and their offsets int32 [S, 2]. A rendered chat prompt may bring its BOS along: no second one."""
        bos = self.tokenizer.bos_token
        with_special = with_special and not (bos and text.startswith(bos))
        encoding = self.tokenizer(text, add_special_tokens=with_special, return_offsets_mapping=True, verbose=False)
        return encoding["input_ids"], np.array(encoding["offset_mapping"], dtype=np.int32).reshape(-1, 2)

    def norms_behind(self, header: list[int], body: list[int]) -> np.ndarray:
        """Importance float32 [len(header) + len(body)], in as many windows as it takes to fit, each behind `header`."""
        n_windows = max(1, math.ceil(len(body) / (self.max_tokens - len(header))))
        windows = np.array_split(np.array(body, dtype=np.int64), n_windows)
        parts = [self.norms([*header, *window.tolist()]) for window in windows]
        return np.concatenate([parts[0], *(part[len(header) :] for part in parts[1:])])

    def norms(self, ids: list[int]) -> np.ndarray:
        """Mean L2 norm of the residual stream after the deep layers, float32 [len(ids)]; one forward pass."""
        if not ids:
            return np.empty(0, dtype=np.float32)
        with torch.inference_mode(), _summed_norms(self.deep_layers) as total:
            self.model(input_ids=torch.tensor([ids], device=self.model.device), use_cache=False)
        mean = total[0] / len(self.deep_layers)
        return mean[0].float().cpu().numpy()


@contextmanager
def _summed_norms(layers: list[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """While open, a forward pass leaves one tensor [1, T] in the list: the sum of the norms after each layer.

    Only norms are kept: the states themselves would take hidden-size times the memory.
    """
    total: list[torch.Tensor] = []

    def add(_module: nn.Module, _inputs: Any, output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output
        norm = state.float().norm(dim=-1)
        total[:] = [total[0] + norm] if total else [norm]

    handles = [layer.register_forward_hook(add) for layer in layers]
    try:
        yield total
    finally:
        for handle in handles:
            handle.remove()


def _load(path: Path, layers: LayerRange, device: str, dtype: torch.dtype, trusted: bool) -> _Loaded:
    # Imported here: transformers takes seconds to import, and cached scores need no model.
    from transformers import AutoModel, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, use_fast=True, trust_remote_code=trusted)
        model = AutoModel.from_pretrained(path, dtype=dtype, trust_remote_code=trusted).to(device).eval()
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"Speculative model {str(path)!r} could not be loaded: {error}",
            hint="Pass a folder with a causal language model, its tokenizer and its weights.",
        ) from error
    if not tokenizer.is_fast:
        raise ConfigurationError(
            f"Speculative model {str(path)!r} has no fast tokenizer, which character offsets need.",
            hint="Pass a model folder with a tokenizer.json.",
        )
    decoder = _decoder_layers(model)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return _Loaded(model, tokenizer, [decoder[i] for i in counted_layers(len(decoder), layers)], limit or sys.maxsize)


def _decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers, whatever they are called (`layers`, `h`, `decoder.layers`).

    They are the outermost list as long as the config says; a list of experts inside a layer may be longer.

    Raises:
        UnsupportedModel: an encoder-decoder model, or no list of layers at all.
    """
    config: Any = model.config
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if getattr(config, "is_encoder_decoder", False) or not lists:
        raise UnsupportedModel(
            f"{type(model).__name__} has no decoder layers to score with.",
            hint="Use a decoder-only speculative model.",
        )
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    return next((found for found in lists if len(found) == depth), max(lists, key=len))


def _fast_dtype(device: str) -> torch.dtype:
    """bfloat16 on a device; on a CPU whichever multiplies sooner: without native bfloat16 it is ten times as slow."""
    if device != "cpu":
        return torch.bfloat16
    return min((torch.float32, torch.bfloat16), key=_product_seconds)


def _product_seconds(dtype: torch.dtype) -> float:
    """Seconds of a product as scoring has many of; the first one, which sets kernels up, is not counted."""
    rows, weights = torch.ones(64, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    _ = rows @ weights
    started = time.perf_counter()
    _ = rows @ weights
    return time.perf_counter() - started
