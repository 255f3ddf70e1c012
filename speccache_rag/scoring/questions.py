"""The questions a selection policy may ask about a prompt; each is answered by one float32 [T] over prompt tokens.

Tokens outside chunks may be NaN in an answer. A question is a value: the same question about the same prompt has the
same answer, so that it is asked once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from speccache_rag.scoring.layers import LayerRange


@dataclass(frozen=True, slots=True)
class Importance:
    """The speculative model's importance score I_i (paper section 2.2)."""

    layers: LayerRange = "last_third"
    """Layers whose hidden norms are averaged."""


@dataclass(frozen=True, slots=True)
class KVDeviation:
    """Squared L2 distance between stored and true KV in one layer of the target; 0 in chunks without stored KV.

    True KV is that of a full prefill of this prompt. Costs the target's first `layer + 1` layers over the whole reuse
    region; layer 0 never deviates.
    """

    of: Literal["value", "key"] = "value"
    layer: int = 1
    """Layer index, from 0."""


@dataclass(frozen=True, slots=True)
class QueryAttention:
    """Attention that the query pays each token in some layers of the scoring model.

    The mean over query tokens of the maximum over heads and counted layers of the attention probability, where the
    scorer reuses its own chunk KV and runs only what is in no chunk. The query is what follows the reuse region; where
    the prompt ends inside its last chunk, the last token stands for it.
    """

    scorer: Literal["speculative", "target"] = "speculative"
    layers: LayerRange = "last_third"


TargetQuestion = KVDeviation | QueryAttention
"""A question an engine answers (`Engine.ask`); the scorer of `QueryAttention` is then the engine's own model."""

Question = Importance | TargetQuestion
