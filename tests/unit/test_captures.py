from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from speccache_rag.engines.reuse.fill import KVShape
from speccache_rag.engines.vllm.messages import CaptureJob, CapturePlan
from speccache_rag.engines.vllm.worker import captures as captures_module
from speccache_rag.engines.vllm.worker.captures import Captures
from speccache_rag.engines.vllm.worker.paging import slots_of
from speccache_rag.engines.vllm.worker.recorder import KVRecorder
from speccache_rag.errors import EngineError, SpecCacheError, StoreUnavailable
from speccache_rag.store.base import Done
from speccache_rag.store.memory import MemoryStore
from speccache_rag.types import ChunkKey, ChunkKV
from tests.unit.test_recorder import BLOCK_SIZE, N_LAYERS, D, H, fake_layers, random_kv, update

A, B = (ChunkKey(c * 64) for c in "ab")
ANCHOR = 2


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures_module, "all_heads", lambda own, n_heads: own)


class Step:
    """Captures over fake layers: one call is one step of the engine."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore(1 << 20)
        self.layers = fake_layers()
        shape = KVShape(N_LAYERS, H, D, torch.float32)
        model: Any = SimpleNamespace(layers=self.layers, shape=shape, recorder=KVRecorder(self.layers))
        self.captures = Captures(self.store, model, BLOCK_SIZE)

    def __call__(self, jobs: list[CaptureJob], rows: list[tuple[CaptureJob, int, int]], *finished: str) -> None:
        """`rows` are (job, first, end): tokens of the chunks that this step computes."""
        self.captures.begin_step(jobs, finished)
        for job, first, end in rows:
            keys, values = kv_of(job)
            slots = slots_of(job.block_ids, BLOCK_SIZE, ANCHOR + end)[ANCHOR + first :]
            for i, layer in enumerate(self.layers.values()):
                update(layer, keys[i, first:end], values[i, first:end], slots)
        self.captures.end_step()
        assert all(vars(layer.impl) == {} for layer in self.layers.values()), "nothing is watched between steps"


def job(name: str, key: ChunkKey = A, length: int = 5, blocks: tuple[int, ...] = (3, 1), **changes: Any) -> CaptureJob:
    ids = tuple(range(50, 50 + length))
    return CaptureJob(name, ids, blocks, CapturePlan(str(key), ANCHOR, length, f"tag {name}", **changes))


def kv_of(job: CaptureJob) -> tuple[torch.Tensor, torch.Tensor]:
    return random_kv(job.plan.length, seed=len(job.request_id) + job.plan.length)


def test_a_chunk_is_stored_when_all_of_it_was_seen() -> None:
    step, one = Step(), job("r")
    step([one], [(one, 0, 2)])
    assert step.store.get(A) is None
    assert isinstance(step.captures.take(["tag r"])["tag r"], EngineError), "asked now, it is not whole"
    step([one], [(one, 2, 5)])
    stored = step.store.get(A)
    assert stored is not None
    keys, values = kv_of(one)
    assert stored.keys.equal(keys) and stored.values.equal(values)
    assert (stored.token_ids, stored.position) == (one.token_ids, ANCHOR)
    assert step.captures.take(["tag r"]) == {"tag r": stored.nbytes}
    assert isinstance(step.captures.take(["tag r"])["tag r"], EngineError), "each result is given once"


def test_captures_of_one_step_do_not_mix() -> None:
    step = Step()
    one, other = job("r", A, 5, (3, 1)), job("other", B, 3, (7, 2))
    step([one, other], [(other, 0, 3), (one, 0, 5)])
    for each, key in ((one, A), (other, B)):
        stored = step.store.get(key)
        assert stored is not None and stored.keys.equal(kv_of(each)[0])


def test_a_request_that_ended_early_leaves_nothing_and_says_so() -> None:
    step, one = Step(), job("r")
    step([one], [(one, 0, 2)])
    step([], [], "r")
    assert step.captures._buffers == {}
    assert step.store.get(A) is None
    (error,) = step.captures.take(["tag r"]).values()
    assert isinstance(error, EngineError) and "not captured whole" in str(error)


def test_the_probe_is_kept_and_not_stored() -> None:
    step, one = Step(), job("r", probe=True)
    step([one], [(one, 0, 5)])
    assert step.captures.probe is not None
    assert step.captures.probe.keys.equal(kv_of(one)[0])
    assert step.store.get(A) is None
    assert step.captures.take(["tag r"]) == {"tag r": step.captures.probe.nbytes}


class Slow(MemoryStore):
    """A store that writes when the test lets it."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.waiting: list[Done] = []
        self.full = False

    def put_soon(self, key: ChunkKey, kv: ChunkKV, done: Done) -> bool:
        self.waiting.append(done)
        return not self.full


def test_what_is_still_being_written_is_neither_done_nor_lost() -> None:
    store = Slow()
    step, one = Step(store), job("r")
    step([one], [(one, 0, 5)])
    assert step.captures.take(["tag r"]) == {}
    writer = threading.Thread(target=store.waiting[0], args=(4096,))
    writer.start()
    writer.join()
    assert step.captures.take(["tag r"]) == {"tag r": 4096}


def test_a_write_that_fails_is_the_result() -> None:
    store = Slow()
    step, one = Step(store), job("r")
    step([one], [(one, 0, 5)])
    error = StoreUnavailable("the disk is full")
    store.waiting[0](error)
    assert step.captures.take(["tag r"]) == {"tag r": error}


def test_a_store_that_cannot_keep_up_drops_the_chunk_and_says_so() -> None:
    store = Slow()
    store.full = True
    step, one = Step(store), job("r")
    step([one], [(one, 0, 5)])
    (error,) = step.captures.take(["tag r"]).values()
    assert isinstance(error, SpecCacheError) and "faster than the store can write" in str(error)


def test_results_that_nobody_asks_for_are_dropped_beyond_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures_module, "KEPT_RESULTS", 2)
    step = Step()
    for name in ("r1", "r2", "r3"):
        one = job(name)
        step([one], [(one, 0, 5)])
    ended = step.captures.take(["tag r1", "tag r2", "tag r3"])
    assert isinstance(ended["tag r1"], EngineError)
    assert isinstance(ended["tag r2"], int) and isinstance(ended["tag r3"], int)


class Broken(MemoryStore):
    def put_soon(self, key: ChunkKey, kv: ChunkKV, done: Done) -> bool:
        if key == A:
            raise MemoryError("no room for it")
        return super().put_soon(key, kv, done)


def test_an_error_in_one_capture_is_its_result_and_the_others_go_on() -> None:
    """It must not reach vLLM's step, which serves other requests too."""
    step = Step(Broken(1 << 20))
    one, other = job("r", A, 5, (3, 1)), job("other", B, 3, (7, 2))
    step([one, other], [(one, 0, 5), (other, 0, 3)])
    ended = step.captures.take(["tag r", "tag other"])
    assert isinstance(ended["tag r"], EngineError) and "no room for it" in str(ended["tag r"])
    assert isinstance(ended["tag other"], int)
    assert step.store.get(B) is not None


def test_an_error_while_recording_does_not_reach_the_step() -> None:
    """Rows of another shape than the first ones: whatever it is, the running forward is not ours to end."""
    step, one, other = Step(), job("r"), job("other", B, 3, (7, 2))
    step([one], [(one, 0, 2)])
    step.captures._buffers["r"]._keys = torch.zeros(1)
    step([one, other], [(one, 2, 5), (other, 0, 3)])
    ended = step.captures.take(["tag r", "tag other"])
    assert isinstance(ended["tag r"], EngineError)
    assert isinstance(ended["tag other"], int)
