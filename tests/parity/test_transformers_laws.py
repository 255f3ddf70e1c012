"""Laws of the Transformers engine alone: it has no prefix cache, and its model can be asked directly."""

from __future__ import annotations

import pytest

from speccache_rag import SpecCache
from speccache_rag.engines.transformers.cache import ReuseCache
from tests.hosts import host_of
from tests.parity.engines import CHUNKS, LOGPROB_ATOL, ask, assert_same, difference
from tests.parity.laws import THREE


@pytest.fixture(scope="module", autouse=True)
def warm(tsc: SpecCache) -> None:
    tsc.warm(CHUNKS, show_progress=False)


@pytest.mark.parametrize("policy", ["full_recompute", "full_reuse"])
def test_an_exact_repeat_answers_the_same_and_nothing_leaks_between_requests(tsc: SpecCache, policy: str) -> None:
    first = ask(tsc, THREE, policy=policy)
    other = ask(tsc, THREE, policy="full_reuse" if policy == "full_recompute" else "full_recompute")
    assert difference(other, first) > 1e-2, "reuse is exact here, so the law would show nothing"
    again = ask(tsc, THREE, policy=policy, cold=False)
    assert_same(again, first, atol=0.0)
    assert again.report.cached_tokens == 0, "this engine has no prefix cache"


def test_decoding_over_reused_kv_equals_prefilling_the_same_answer(tsc: SpecCache) -> None:
    """The cache grows at the right end: logprobs of the n-th token do not depend on how its past got there."""
    prompt = host_of(tsc).tokenizer.header() + CHUNKS[0] + "\n\nQuestion: when?"
    first = ask(tsc, prompt, policy="full_reuse", max_tokens=1)
    both = ask(tsc, prompt, policy="full_reuse", max_tokens=2)
    assert first.logprobs is not None and both.logprobs is not None
    token = max(first.logprobs[0], key=lambda t: first.logprobs[0][t])
    plan = tsc.plan(prompt, policy="full_recompute").reuse
    target = host_of(tsc).engine._alive()  # type: ignore[attr-defined]
    _, logits = target.prefill([*plan.token_ids, token])
    expected = logits.float().log_softmax(-1)
    for found, logprob in both.logprobs[1].items():
        assert abs(logprob - float(expected[found])) < LOGPROB_ATOL


def test_an_error_while_a_prompt_is_filled_is_reported_and_changes_no_answer(
    tsc: SpecCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = ask(tsc, THREE, policy="full_recompute")

    def broken(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(ReuseCache, "write", broken)
        found = ask(tsc, THREE, policy="full_reuse")
    assert_same(found, plain)
    assert found.report.fault == "RuntimeError('broken on purpose')"
    assert (found.report.chunks_reused, found.report.loaded_tokens) == (0, 0)
    assert "broken on purpose" in caplog.text
    assert ask(tsc, THREE, policy="full_reuse").report.chunks_reused == 3
