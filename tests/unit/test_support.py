from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.attention.backend import AttentionType

from speccache_rag.engines.vllm.frontend.engine import VllmEngine
from speccache_rag.engines.vllm.support import attention_layers, check_config, rope_tables
from speccache_rag.errors import ConfigurationError, EngineClosed, EngineStartError, UnsupportedModel
from tests.tiny import tiny_model

STORE: dict[str, Any] = {"path": None, "ram_bytes": 1 << 20}


# Configurations, before anything is loaded.


def config_with(
    *,
    text: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    window: int | None = None,
    cache_dtype: str = "auto",
    lora: object = None,
    speculative: object = None,
    v2: bool = False,
) -> Any:
    """A vLLM configuration of a plain decoder, with the given changes."""
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1, **(parallel or {})}
    facts = {
        "use_mla": False,
        "is_encoder_decoder": False,
        "runner_type": "generate",
        "using_transformers_backend": lambda: False,
        **(model or {}),
    }
    hf = SimpleNamespace(**{"rope_parameters": {"rope_type": "default"}, "layer_types": None, **(text or {})})
    return SimpleNamespace(
        model_config=SimpleNamespace(model="a-model", hf_text_config=hf, get_sliding_window=lambda: window, **facts),
        parallel_config=SimpleNamespace(**sizes),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        use_v2_model_runner=v2,
        lora_config=lora,
        speculative_config=speculative,
    )


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"text": {"layer_types": ["full_attention"] * 4}},
        {"text": {"rope_parameters": None}},
        {"text": rope("linear", factor=2.0)},
        {"text": rope("llama3", factor=8.0)},
        {"text": rope("yarn", factor=4.0)},
    ],
    ids=str,
)
def test_plain_decoders_are_accepted(changes: dict[str, Any]) -> None:
    check_config(config_with(**changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": {"use_mla": True}}, "multi-head latent attention"),
        ({"window": 4096}, "sliding-window attention (window 4096)"),
        ({"text": {"layer_types": ["full_attention", "sliding_attention"]}}, "sliding_attention"),
        ({"text": {"layer_types": ["linear_attention", "full_attention"]}}, "linear_attention"),
        ({"text": rope("dynamic", factor=2.0)}, "its RoPE is of kind 'dynamic'"),
        ({"text": rope("longrope")}, "its RoPE is of kind 'longrope'"),
        ({"text": rope("default", mrope_section=[8, 12, 12])}, "sections (multimodal)"),
        ({"model": {"is_encoder_decoder": True}}, "encoder-decoder"),
        ({"model": {"runner_type": "pooling"}}, "does not generate text"),
        ({"model": {"using_transformers_backend": lambda: True}}, "its Transformers backend does not show its RoPE"),
        ({"parallel": {"pipeline_parallel_size": 3}}, "pipeline_parallel_size is 3"),
        ({"parallel": {"data_parallel_size": 4}}, "data_parallel_size is 4"),
        ({"cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'"),
        ({"lora": object()}, "LoRA"),
        ({"speculative": object()}, "speculative decoding"),
        ({"v2": True}, "V2 model runner is on"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_everything_else_is_refused_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        check_config(config_with(**changes))
    assert reason in str(caught.value)
    assert str(caught.value).startswith("a-model is not supported: ")
    # One reason, not a list of everything.
    assert ";" not in caught.value.message.replace(f"{reason};", "")


def test_all_reasons_are_given_at_once() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        check_config(config_with(model={"use_mla": True}, cache_dtype="fp8", lora=object()))
    assert all(part in str(caught.value) for part in ("MLA", "fp8", "LoRA"))


# Attention layers of a loaded model.


class PlainImpl:
    alibi_slopes = None

    def do_kv_cache_update(self) -> None: ...


def attention(**changes: Any) -> Attention:
    layer = Attention.__new__(Attention)
    nn.Module.__init__(layer)
    backend = SimpleNamespace(get_name=lambda: "PLAIN", forward_includes_kv_cache_update=False)
    facts = {
        "impl": PlainImpl(),
        "attn_backend": backend,
        "sliding_window": None,
        "attn_type": AttentionType.DECODER,
        "kv_sharing_target_layer_name": None,
        **changes,
    }
    for name, value in facts.items():
        setattr(layer, name, value)
    return layer


class Recurrent(nn.Module, AttentionLayerBase):
    """Keeps state that is not KV, as Mamba does."""

    get_attn_backend = get_kv_cache_spec = None  # type: ignore[assignment]


def runner_with(layers: dict[str, Any], groups: int = 1) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers), attn_groups=[object()] * groups
    )


def test_plain_attention_layers_are_found_in_order() -> None:
    layers = {f"layers.{i}": attention() for i in (2, 0, 1)}
    experts = {"layers.0.experts": nn.Linear(1, 1)}  # vLLM lists them too; they keep nothing
    found = attention_layers(runner_with({**layers, **experts}))
    assert list(found.items()) == list(layers.items())


UPDATING = SimpleNamespace(get_name=lambda: "EAGER", forward_includes_kv_cache_update=True)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Recurrent(), "it is a Recurrent, not attention with KV"),
        (attention(sliding_window=64), "sliding-window attention (window 64)"),
        (attention(attn_type=AttentionType.ENCODER_ONLY), "encoder_only"),
        (attention(kv_sharing_target_layer_name="layers.0"), "shares another layer's KV cache"),
        (attention(impl=SimpleNamespace(alibi_slopes=[1.0], do_kv_cache_update=print)), "ALiBi"),
        (attention(attn_backend=UPDATING), "its backend EAGER writes the KV cache inside attention"),
        (attention(impl=SimpleNamespace()), "its backend PLAIN writes the KV cache inside attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_layers_are_refused_by_name(layer: nn.Module, reason: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        attention_layers(runner_with({"layers.0": attention(), "layers.1": layer}))
    assert reason in str(caught.value)
    assert str(caught.value).startswith("layers.1 is not supported: ")


@pytest.mark.parametrize(
    ("runner", "reason"),
    [
        (runner_with({}), "no attention layers"),
        (runner_with({"layers.0": attention()}, groups=2), "its KV cache has 2 groups"),
    ],
    ids=["none", "groups"],
)
def test_the_layers_together_must_be_one_kv_cache(runner: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        attention_layers(runner)


# RoPE tables of a loaded model.


class Block(nn.Module):
    """An attention module as vLLM's models build it."""

    def __init__(self, rotary: nn.Module | None) -> None:
        super().__init__()
        self.attn = nn.Identity()
        if rotary is not None:
            self.rotary_emb = rotary


def vllm_rope(dtype: torch.dtype, kind: str = "default", neox: bool = True, **more: Any) -> Any:
    with set_current_vllm_config(VllmConfig()):
        return get_rope(32, 256, neox, rope(kind, **more)["rope_parameters"], dtype)


def tables_of(*blocks: Block) -> list[Any]:
    model = nn.ModuleList(blocks)
    layers: dict[str, Any] = {f"layers.{i}": block.attn for i, block in enumerate(blocks)}
    return rope_tables(model, layers)


def test_layers_that_share_a_rotary_embedding_share_a_table() -> None:
    shared, other = vllm_rope(torch.float32), vllm_rope(torch.float32, neox=False)
    first, second, third, none = tables_of(Block(shared), Block(shared), Block(other), Block(None))
    assert first is second
    assert (first.neox, third.neox) == (True, False)
    assert none is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("default", {}),
        ("linear", {"factor": 2.0}),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 64}),
    ],
)
def test_rounded_tables_are_computed_again_in_float32(dtype: torch.dtype, kind: str, more: dict[str, Any]) -> None:
    (rounded,) = tables_of(Block(vllm_rope(dtype, kind, **more)))
    (exact,) = tables_of(Block(vllm_rope(torch.float32, kind, **more)))
    assert rounded.cos.dtype == torch.float32
    assert rounded.cos.equal(exact.cos) and rounded.sin.equal(exact.sin)


def test_a_table_that_is_not_what_its_class_computes_is_taken_as_it_is() -> None:
    rotary = vllm_rope(torch.bfloat16)
    changed = rotary.cos_sin_cache.clone()
    changed[5] = 0.5
    rotary = _copy_with(rotary, changed)
    (table,) = tables_of(Block(rotary))
    assert table.cos[5].eq(0.5).all()


def _copy_with(rotary: Any, cache: torch.Tensor) -> Any:
    """vLLM keeps and hands out one object for equal arguments; ours must not change it for other tests."""
    copy = type(rotary).__new__(type(rotary))
    nn.Module.__init__(copy)
    for name, value in vars(rotary).items():
        if not name.startswith("_"):
            setattr(copy, name, value)
    copy.register_buffer("cos_sin_cache", cache)
    return copy


def test_an_unknown_rope_class_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"layers\.0 is not supported: its RoPE is a Identity"):
        tables_of(Block(nn.Identity()))


# Real model folders: refused by the constructor, which starts no process.


def edit_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    return tiny_model(tmp_path_factory.mktemp("support") / "plain", "llama", **sizes)


def copy_of(folder: Path, target: Path, **changes: Any) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return edit_config(target, **changes)


def test_a_supported_folder_is_taken_and_its_facts_are_known(plain: Path) -> None:
    engine = VllmEngine(plain, {"dtype": "float32", "max_model_len": 512}, STORE)
    assert (engine.facts.dtype, engine.facts.max_model_len) == ("float32", 512)
    assert json.loads(engine.facts.rope)["rope_type"] == "default"
    engine.close()
    engine.close()


async def test_an_engine_that_was_not_started_or_was_closed_says_so(plain: Path) -> None:
    engine = VllmEngine(plain, {"max_model_len": 512}, STORE)
    with pytest.raises(EngineClosed, match="was not started"):
        await engine.reset_prefix_cache()
    engine.close()
    with pytest.raises(EngineClosed, match="was closed"):
        await engine.reset_prefix_cache()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        # A Mistral with its window; vLLM need not know more architectures than Llama for it.
        ({"model_type": "mistral", "sliding_window": 64}, r"sliding-window attention \(window 64\)"),
        (rope("dynamic", factor=2.0), "its RoPE is of kind 'dynamic'"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 64}, "sliding"),
    ],
    ids=["window", "dynamic", "mixed"],
)
def test_unsupported_folders_are_refused(plain: Path, tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        VllmEngine(copy_of(plain, tmp_path / "model", **changes), {}, STORE)


def test_settings_that_change_kv_are_refused(plain: Path) -> None:
    with pytest.raises(UnsupportedModel, match="LoRA"):
        VllmEngine(plain, {"enable_lora": True}, STORE)


def test_a_context_the_model_does_not_have_is_refused_by_vllm(plain: Path) -> None:
    with pytest.raises(EngineStartError, match="max_model_len"):
        VllmEngine(plain, {"max_model_len": 1 << 20}, STORE)


def test_an_unknown_engine_option_is_refused(plain: Path) -> None:
    with pytest.raises(ConfigurationError, match="'max_modle_len'"):
        VllmEngine(plain, {"max_modle_len": 512}, STORE)


def test_a_model_of_unknown_kind_is_refused_by_vllm(plain: Path, tmp_path: Path) -> None:
    changes = {"model_type": "no-such-model", "architectures": ["NoSuchModel"]}
    with pytest.raises(EngineStartError):
        VllmEngine(copy_of(plain, tmp_path / "model", **changes), {}, STORE)
