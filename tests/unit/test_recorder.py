from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from speccache_rag.engines.reuse.fill import Stretch
from speccache_rag.engines.reuse.rope import RopeTable
from speccache_rag.engines.vllm.worker import paging
from speccache_rag.engines.vllm.worker.paging import KVWriter, slots_of
from speccache_rag.engines.vllm.worker.recorder import CaptureBuffer, KVRecorder
from speccache_rag.types import ChunkKV

CPU = torch.device("cpu")
N_LAYERS, H, D = 3, 2, 4
BLOCK_SIZE = 4


class FakeImpl:
    """An attention implementation over a flat cache: one row a slot."""

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        live = slots >= 0
        kv_cache[0, slots[live]] = key[: len(slots)][live]
        kv_cache[1, slots[live]] = value[: len(slots)][live]


class BrokenImpl(FakeImpl):
    def do_kv_cache_update(self, *args: Any) -> None:
        raise RuntimeError("the kernel failed")


def fake_layers(impl: type[FakeImpl] = FakeImpl, n_slots: int = 64) -> dict[str, Any]:
    return {f"layer.{i}": SimpleNamespace(impl=impl(), kv_cache=torch.zeros(2, n_slots, H, D)) for i in range(N_LAYERS)}


def update(layer: Any, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)


def random_kv(n_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, N_LAYERS, n_tokens, H, D, generator=generator)
    return keys, values


# Recorder.


def test_sinks_see_every_update_and_the_cache_is_written() -> None:
    layers, seen = fake_layers(), []
    recorder = KVRecorder(layers)
    recorder.attach([lambda *args: seen.append(("a", *args)), lambda *args: seen.append(("b", *args))])
    keys, values = random_kv(2)
    slots = torch.tensor([5, 3])
    for i, layer in enumerate(layers.values()):
        update(layer, keys[i], values[i], slots)
    recorder.detach()
    assert [(name, index) for name, index, *_ in seen] == [(name, i) for i in range(N_LAYERS) for name in "ab"]
    for _, index, key, value, mapping in seen:
        assert key.equal(keys[index]) and value.equal(values[index]) and mapping.equal(slots)
    for i, layer in enumerate(layers.values()):
        torch.testing.assert_close(layer.kv_cache[:, slots], torch.stack((keys[i], values[i])), rtol=0, atol=0)


def test_detaching_restores_the_method_of_the_class() -> None:
    layers, seen = fake_layers(), []
    recorder = KVRecorder(layers)
    recorder.detach()  # fine before any attach
    recorder.attach([lambda *args: seen.append(args)])
    assert all("do_kv_cache_update" in vars(layer.impl) for layer in layers.values())
    recorder.detach()
    recorder.detach()
    for layer in layers.values():
        assert vars(layer.impl) == {}
        assert layer.impl.do_kv_cache_update.__func__ is FakeImpl.do_kv_cache_update
        update(layer, torch.ones(1, H, D), torch.ones(1, H, D), torch.tensor([0]))
    assert seen == []


def test_attaching_again_replaces_the_sinks() -> None:
    layers, first, second = fake_layers(), [], []
    recorder = KVRecorder(layers)
    recorder.attach([lambda *args: first.append(args)])
    recorder.attach([lambda *args: second.append(args)])
    for layer in layers.values():
        update(layer, torch.ones(1, H, D), torch.ones(1, H, D), torch.tensor([0]))
    assert (len(first), len(second)) == (0, N_LAYERS)
    recorder.detach()
    assert vars(layers["layer.0"].impl) == {}


def test_errors_of_kernel_and_sink_pass_through() -> None:
    row, slot = torch.ones(1, H, D), torch.tensor([0])
    broken = fake_layers(BrokenImpl)
    recorder = KVRecorder(broken)
    recorder.attach([lambda *_: None])
    with pytest.raises(RuntimeError, match="the kernel failed"):
        update(broken["layer.0"], row, row, slot)
    recorder.detach()
    assert vars(broken["layer.0"].impl) == {}

    def refuse(*_: Any) -> None:
        raise ValueError("no room")

    layers = fake_layers()
    KVRecorder(layers).attach([refuse])
    with pytest.raises(ValueError, match="no room"):
        update(layers["layer.0"], row, row, slot)


# Buffer.


@settings(deadline=None)
@given(data=st.data())
def test_rows_are_found_wherever_they_stand(data: st.DataObject) -> None:
    """Steps of random size, each a shuffled batch with rows of other requests and padding in between."""
    n = data.draw(st.integers(1, 14))
    position = data.draw(st.integers(0, 5))
    seed = data.draw(st.integers(0, 1 << 16))
    keys, values = random_kv(n, seed)
    n_blocks = -(-(position + n) // BLOCK_SIZE)
    blocks = data.draw(st.permutations(range(n_blocks + 3)))
    table, others = blocks[:n_blocks], blocks[n_blocks:]
    all_slots = slots_of(table, BLOCK_SIZE, position + n)[position:]
    foreign = slots_of(others, BLOCK_SIZE, len(others) * BLOCK_SIZE)

    buffer = CaptureBuffer(list(range(50, 50 + n)), position, N_LAYERS)
    cuts = sorted(data.draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
    for start, end in zip([0, *cuts], [*cuts, n], strict=True):
        assert not buffer.complete
        with pytest.raises(ValueError, match=f"{N_LAYERS * (n - start)} of {N_LAYERS * n} rows were not recorded"):
            buffer.chunk_kv()
        visible = data.draw(st.integers(end, n))  # later slots are not allocated yet
        buffer.expect(all_slots[:visible])
        rows = [("ours", i) for i in range(start, end)] + [("other", i) for i in range(3)] + [("padding", 0)] * 2
        rows = data.draw(st.permutations(rows))
        slots = torch.tensor([{"ours": all_slots, "other": foreign}[k][i] if k != "padding" else -1 for k, i in rows])
        for layer in range(N_LAYERS):
            step_keys = torch.stack([keys[layer, i] if k == "ours" else torch.full((H, D), 9e9) for k, i in rows])
            step_values = torch.stack([values[layer, i] if k == "ours" else torch.full((H, D), 9e9) for k, i in rows])
            buffer.record(layer, step_keys, step_values, slots)
    assert buffer.complete
    kv = buffer.chunk_kv()
    assert kv.token_ids == tuple(range(50, 50 + n))
    assert kv.position == position
    assert kv.keys.equal(keys) and kv.values.equal(values)


def test_padded_rows_beyond_the_slot_mapping_and_slots_beyond_the_rows() -> None:
    keys, values = random_kv(3)
    for n_rows, n_slots in ((5, 3), (3, 5)):
        buffer = CaptureBuffer([1, 2, 3], 0, N_LAYERS)
        buffer.expect(torch.tensor([8, 9, 10]))
        slots = torch.tensor([8, 9, 10, 8, 9])[:n_slots]
        for layer in range(N_LAYERS):
            padded = [torch.cat((kv[layer], torch.full((n_rows - 3, H, D), 9e9))) for kv in (keys, values)]
            buffer.record(layer, *padded, slots)
        assert buffer.chunk_kv().keys.equal(keys)


def test_a_layer_left_out_is_not_complete_and_its_poison_stays_inside() -> None:
    keys, values = random_kv(3)
    buffer = CaptureBuffer([1, 2, 3], 0, N_LAYERS)
    buffer.expect(torch.arange(3))
    for layer in (0, 2):
        buffer.record(layer, keys[layer], values[layer], torch.arange(3))
    assert not buffer.complete
    with pytest.raises(ValueError, match="3 of 9 rows were not recorded"):
        buffer.chunk_kv()
    assert buffer.partial().keys[1].isnan().all()
    buffer.record(1, keys[1], values[1], torch.arange(3))
    assert not buffer.chunk_kv().keys.isnan().any()


def test_rows_written_again_after_a_preemption_are_taken_again() -> None:
    (old, _), (new, values) = random_kv(2, seed=1), random_kv(2, seed=2)
    buffer = CaptureBuffer([1, 2], 0, N_LAYERS)
    for keys, slots in ((old, torch.tensor([4, 5])), (new, torch.tensor([0, 1]))):
        buffer.expect(slots)
        for layer in range(N_LAYERS):
            buffer.record(layer, keys[layer], values[layer], slots)
    assert buffer.chunk_kv().keys.equal(new)


def test_nothing_recorded_has_no_kv() -> None:
    buffer = CaptureBuffer([1], 0, N_LAYERS)
    keys, values = random_kv(2)
    buffer.record(0, keys[0], values[0], torch.tensor([0, 1]))  # nothing was expected yet
    buffer.expect(torch.tensor([7]))
    buffer.record(0, keys[0], values[0], torch.tensor([0, -1]))  # only others
    assert not buffer.complete
    with pytest.raises(ValueError, match="no row was recorded"):
        buffer.partial()


def test_keys_and_values_keep_their_dtype() -> None:
    buffer = CaptureBuffer([1], 0, 1)
    buffer.expect(torch.tensor([2]))
    row = torch.ones(1, H, D, dtype=torch.bfloat16)
    buffer.record(0, row, row, torch.tensor([2]))
    assert buffer.chunk_kv().keys.dtype == buffer.chunk_kv().values.dtype == torch.bfloat16


# Writer: what was recorded goes back through the same door.

ANGLES = torch.outer(torch.arange(64.0), torch.tensor([1.0, 0.1]))
ROPE = RopeTable(ANGLES.cos(), ANGLES.sin(), neox=True)
SLOTS = slots_of([3, 1, 7, 10, 2, 5], BLOCK_SIZE, 24)


def stored(n_tokens: int, position: int, seed: int = 0) -> ChunkKV:
    return ChunkKV(*random_kv(n_tokens, seed), tuple(range(n_tokens)), position)


def assert_written(layers: dict[str, Any], stretches: list[Stretch], ropes: list[RopeTable | None]) -> None:
    """The cache holds exactly these tokens, each key moved by itself."""
    for i, (layer, rope) in enumerate(zip(layers.values(), ropes, strict=True)):
        untouched = torch.ones(64, dtype=torch.bool)
        for s in stretches:
            keys = s.kv.keys[i] if rope is None else rope.move(s.kv.keys[i], s.start - s.kv.position)
            target = SLOTS[s.start + s.skip : s.start + s.length]
            torch.testing.assert_close(layer.kv_cache[0, target], keys[s.skip : s.length])
            assert layer.kv_cache[1, target].equal(s.kv.values[i, s.skip : s.length])
            untouched[target] = False
        assert not layer.kv_cache[:, untouched].any()


@pytest.mark.parametrize("ropes", [[ROPE, None, ROPE], [ROPE] * 3, [None] * 3], ids=["mixed", "one", "none"])
@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_what_is_written_is_what_was_recorded(
    ropes: list[RopeTable | None], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that move forward, back and not at all, cut at either end, in batches of any size."""
    monkeypatch.setattr(paging, "MOVED_AT_ONCE", at_once)
    stretches = [
        Stretch(stored(6, position=2, seed=1), 5, 2, 6),
        Stretch(stored(4, position=20, seed=2), 12, 0, 3),
        Stretch(stored(5, position=16, seed=3), 16, 0, 5),
    ]
    layers = fake_layers()
    KVWriter(layers, ropes, slice(None), CPU).write(stretches, SLOTS)
    assert_written(layers, stretches, ropes)


def test_all_layers_and_chunks_of_a_batch_move_in_one_go() -> None:
    moved: list[torch.Size] = []

    class Counting(RopeTable):
        def move(self, keys: torch.Tensor, delta: int | torch.Tensor) -> torch.Tensor:
            moved.append(keys.shape)
            return super().move(keys, delta)

    updates: list[int] = []

    class Impl(FakeImpl):
        def do_kv_cache_update(self, layer: Any, key: torch.Tensor, *args: Any) -> None:
            updates.append(len(key))
            super().do_kv_cache_update(layer, key, *args)

    rope = Counting(ROPE.cos, ROPE.sin, True)
    chunks = [Stretch(stored(6, position=2), 5, 0, 6), Stretch(stored(4, position=2), 12, 0, 4)]
    KVWriter(fake_layers(Impl), [rope] * N_LAYERS, slice(None), CPU).write(chunks, SLOTS)
    assert moved == [(N_LAYERS, 10, H, D)]
    assert updates == [10] * N_LAYERS


@pytest.mark.parametrize("head", range(H))
def test_a_rank_writes_its_own_heads(head: int) -> None:
    layers = fake_layers()
    for layer in layers.values():
        layer.kv_cache = torch.zeros(2, 64, 1, D)
    kv = stored(6, position=2)
    KVWriter(layers, [ROPE] * N_LAYERS, slice(head, head + 1), CPU).write([Stretch(kv, 5, 0, 6)], SLOTS)
    for i, layer in enumerate(layers.values()):
        assert layer.kv_cache[0, SLOTS[5:11], 0].equal(ROPE.move(kv.keys[i], 3)[:, head])
        assert layer.kv_cache[1, SLOTS[5:11], 0].equal(kv.values[i, :, head])


def test_nothing_to_write_writes_nothing() -> None:
    layers = fake_layers(BrokenImpl)
    KVWriter(layers, [ROPE] * N_LAYERS, slice(None), CPU).write([], SLOTS)


def test_writing_does_not_change_what_the_store_holds() -> None:
    kv = stored(6, position=2)
    before = kv.keys.clone(), kv.values.clone()
    KVWriter(fake_layers(), [ROPE, None, ROPE], slice(None), CPU).write([Stretch(kv, 5, 0, 6)], SLOTS)
    assert kv.keys.equal(before[0]) and kv.values.equal(before[1])


# Watching beside a capture.


def test_watching_shows_updates_to_both_and_leaves_the_first_attached() -> None:
    layers, first, second = fake_layers(), [], []
    recorder = KVRecorder(layers)
    recorder.attach([lambda *args: first.append(args)])
    row, slot = torch.ones(1, H, D), torch.tensor([0])
    with pytest.raises(ValueError, match="stop"), recorder.watching([lambda *args: second.append(args)]):
        update(layers["layer.0"], row, row, slot)
        raise ValueError("stop")
    update(layers["layer.0"], row, row, slot)
    assert (len(first), len(second)) == (2, 1)
    recorder.detach()
    with recorder.watching([lambda *args: second.append(args)]):
        update(layers["layer.0"], row, row, slot)
    assert (len(first), len(second)) == (2, 2)
    assert all(vars(layer.impl) == {} for layer in layers.values())
