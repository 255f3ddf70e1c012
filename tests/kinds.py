"""The architectures the laws are run on, and what each engine is to make of them; docs/models.md prints it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

EQUAL = "equal"
NOT_RUN = "not run"
REFUSED = "refused: "

NO_CLASS = f"{REFUSED}vLLM has no model class of its own for it"
SLIDING = f"{REFUSED}its layers are of kinds ['full_attention', 'sliding_attention']"
WINDOW = f"{REFUSED}it has sliding-window attention"

THETA = {"rope_theta": 10000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    **THETA,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN_ROPE = {"rope_type": "yarn", **THETA, "factor": 4.0, "original_max_position_embeddings": 1024}
LINEAR_ROPE = {"rope_type": "linear", **THETA, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    **THETA,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "factor": 2.0,
    "original_max_position_embeddings": 2048,
}
QUARTER_ROPE = {"rope_type": "default", **THETA, "partial_rotary_factor": 0.25}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}


@dataclass(frozen=True, slots=True)
class Kind:
    """An architecture with its settings."""

    architecture: str
    exercises: str
    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]
    options: dict[str, Any] = field(default_factory=dict)
    transformers: str = EQUAL
    """`EQUAL`, or `REFUSED` and words of the reason, as that engine gives it."""
    vllm: str = EQUAL
    """The same for vLLM on a CPU, or `NOT_RUN`."""
    always: bool = False
    """Whether every run of the tests takes it on vLLM."""


def _llama(architecture: str, exercises: str, outcome: str = EQUAL, always: bool = False, **options: Any) -> Kind:
    return Kind(architecture, exercises, LlamaConfig, LlamaForCausalLM, options, outcome, outcome, always)


KINDS = {
    "llama": _llama("Llama", "grouped-query attention", always=True),
    "llama-multi-head": _llama("Llama", "multi-head attention", num_key_value_heads=4),
    "llama-multi-query": _llama("Llama", "multi-query attention", num_key_value_heads=1),
    "llama3": _llama("Llama 3", "RoPE scaled as Llama 3.1 does", always=True, rope_parameters=LLAMA3_ROPE),
    "linear": _llama("Llama", "linear RoPE scaling", rope_parameters=LINEAR_ROPE),
    "yi": _llama("Yi (Llama)", "a large RoPE base", rope_parameters={"rope_type": "default", "rope_theta": 5e6}),
    "mistral": Kind(
        "Mistral",
        "no window, as since v0.2",
        MistralConfig,
        MistralForCausalLM,
        {"sliding_window": None},
    ),
    "qwen2": Kind("Qwen2, Qwen2.5", "biases in query, key and value", Qwen2Config, Qwen2ForCausalLM),
    "yarn": Kind("Qwen2.5", "YaRN scaling", Qwen2Config, Qwen2ForCausalLM, {"rope_parameters": YARN_ROPE}, always=True),
    "qwen3": Kind("Qwen3", "norms of query and key", Qwen3Config, Qwen3ForCausalLM, always=True),
    "qwen2-moe": Kind(
        "Qwen2-MoE", "experts, one of them shared", Qwen2MoeConfig, Qwen2MoeForCausalLM, {"num_experts": 4, **EXPERTS}
    ),
    "mixtral": Kind("Mixtral", "experts", MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4}),
    "phi3": Kind("Phi-3", "query, key and value in one matrix", Phi3Config, Phi3ForCausalLM, {"sliding_window": None}),
    "gemma": Kind("Gemma", "scaled embeddings, norms around one", GemmaConfig, GemmaForCausalLM),
    "olmo2": Kind("OLMo 2", "norms after attention, over all heads", Olmo2Config, Olmo2ForCausalLM, vllm=NO_CLASS),
    "stablelm": Kind(
        "StableLM",
        "a quarter of the head rotates",
        StableLmConfig,
        StableLmForCausalLM,
        {"rope_parameters": QUARTER_ROPE},
    ),
    "gpt-neox": Kind(
        "GPT-NeoX, Pythia",
        "a quarter of the head rotates; parallel layers",
        GPTNeoXConfig,
        GPTNeoXForCausalLM,
        {"rope_parameters": QUARTER_ROPE},
        vllm=NO_CLASS,
    ),
    "cohere": Kind("Command R", "RoPE pairs neighbours", CohereConfig, CohereForCausalLM),
    "glm": Kind(
        "GLM-4-9B (Glm)",
        "RoPE pairs neighbours, in part of the head",
        GlmConfig,
        GlmForCausalLM,
        {"rope_parameters": {**QUARTER_ROPE, "partial_rotary_factor": 0.5}},
        vllm=NO_CLASS,
    ),
    "ernie": Kind("ERNIE 4.5", "RoPE pairs neighbours", Ernie4_5Config, Ernie4_5ForCausalLM, vllm=NOT_RUN),
    "helium": Kind("Helium", "RoPE pairs neighbours", HeliumConfig, HeliumForCausalLM, vllm=NO_CLASS),
    "mistral-window": Kind(
        "Mistral v0.1",
        "a sliding window",
        MistralConfig,
        MistralForCausalLM,
        {"sliding_window": 64},
        transformers=WINDOW,
        vllm=WINDOW,
    ),
    "gemma2": Kind(
        "Gemma 2",
        "sliding layers, soft caps",
        Gemma2Config,
        Gemma2ForCausalLM,
        transformers=SLIDING,
        vllm=SLIDING,
    ),
    "gemma3": Kind(
        "Gemma 3",
        "sliding layers, a RoPE of their own",
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"rope_parameters": None, "num_hidden_layers": 6},
        transformers=SLIDING,
        vllm=SLIDING,
    ),
    "dynamic": _llama(
        "Llama",
        "dynamic NTK scaling",
        f"{REFUSED}its RoPE is of kind 'dynamic'",
        rope_parameters={"rope_type": "dynamic", **THETA, "factor": 2.0},
    ),
    "longrope": Kind(
        "Phi-3 128k",
        "longrope scaling",
        Phi3Config,
        Phi3ForCausalLM,
        {"rope_parameters": LONGROPE, "sliding_window": None},
        transformers=f"{REFUSED}its RoPE is of kind 'longrope'",
        vllm=f"{REFUSED}its RoPE is of kind 'longrope'",
    ),
}
