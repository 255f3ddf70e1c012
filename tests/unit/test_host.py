from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ConfigurationError, EngineClosed, EngineStartError
from speccache_rag.hosting.doctor import examine
from speccache_rag.hosting.engine_host import EngineHost
from tests.unit.conftest import THREAD, Maker, changed

# One engine a configuration.


def test_same_options_same_engine(maker: Maker, config: SpecCacheConfig) -> None:
    first, second = EngineHost.acquire(config), EngineHost.acquire(changed(config))
    assert first is second
    assert first.engine is second.engine
    assert len(maker.made) == 1
    assert len(maker.threads()) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": "full_reuse"},
        {"policy_options": {"seed": 3}},
        {"recompute_ratio": 0.9},
        {"scoring": "online"},
        {"tenant": "acme"},
        {"anchor": "Hello."},
        {"speculative_model": "small"},
    ],
    ids=str,
)
def test_options_that_are_not_the_engines_share_it(
    maker: Maker, config: SpecCacheConfig, changes: dict[str, Any]
) -> None:
    assert EngineHost.acquire(config) is EngineHost.acquire(changed(config, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"engine_options": {"max_model_len": 100}},
        {"store": "elsewhere"},
        {"ram_bytes": 1 << 20},
        {"model": "another"},
        {"engine": "another"},
    ],
    ids=str,
)
def test_options_of_the_engine_need_another_one(maker: Maker, config: SpecCacheConfig, changes: dict[str, Any]) -> None:
    assert EngineHost.acquire(config) is not EngineHost.acquire(changed(config, **changes))


def test_the_order_of_engine_options_does_not_matter(maker: Maker, config: SpecCacheConfig) -> None:
    one, other = {"max_model_len": 100, "seed": 1}, {"seed": 1, "max_model_len": 100}
    hosts = [EngineHost.acquire(changed(config, engine_options=options)) for options in (one, other)]
    assert hosts[0] is hosts[1]


def test_the_engine_gets_its_options(maker: Maker, config: SpecCacheConfig, tmp_path: Path) -> None:
    options = {"max_model_len": 100}
    host = EngineHost.acquire(changed(config, engine_options=options, store=str(tmp_path), ram_bytes=77))
    assert host.engine.facts.max_model_len == 100
    (engine,) = maker.made
    assert (engine.model, engine.options) == (Path(config.model), options)
    defaults = {"disk_bytes": None, "kv_dtype": "auto", "secret_file": None}
    assert engine.store == {"path": str(tmp_path), "ram_bytes": 77, **defaults}


# Its life.


def test_nothing_starts_before_it_is_asked_for(maker: Maker, config: SpecCacheConfig) -> None:
    host = EngineHost.acquire(config)
    assert host.model == Path(config.model)
    assert host.tokenizer.has_chat_template
    assert not host.running
    assert (maker.made, maker.threads()) == ([], [])
    assert host.engine is maker.made[0]
    assert host.running
    assert maker.made[0].thread == THREAD  # its coroutines belong to its own loop


def test_many_threads_start_one_engine(maker: Maker, config: SpecCacheConfig) -> None:
    host = EngineHost.acquire(config)
    with ThreadPoolExecutor(8) as pool:
        engines = set(pool.map(lambda _: id(host.engine), range(16)))
    assert len(engines) == len(maker.made) == 1


def test_the_last_user_stops_the_engine(maker: Maker, config: SpecCacheConfig) -> None:
    users = [EngineHost.acquire(config) for _ in range(3)]
    engine = users[0].engine
    for user in users[:2]:
        user.release()
        assert not maker.made[0].closed
        assert user.engine is engine
    users[2].release()
    assert maker.made[0].closed
    assert maker.threads() == []
    assert not users[0].running


def test_a_released_host_is_closed_for_good_and_the_next_one_is_new(maker: Maker, config: SpecCacheConfig) -> None:
    old = EngineHost.acquire(config)
    _ = old.engine
    old.release()
    for use in (lambda: old.engine, lambda: old.loop, lambda: old.library(config)):
        with pytest.raises(EngineClosed):
            use()
    new = EngineHost.acquire(config)
    assert new is not old
    assert new.engine is maker.made[1]
    assert not maker.made[1].closed
    with pytest.raises(EngineClosed):
        _ = old.engine


def test_a_host_that_never_started_is_released_too(maker: Maker, config: SpecCacheConfig) -> None:
    host = EngineHost.acquire(config)
    host.release()
    with pytest.raises(EngineClosed):
        _ = host.engine
    assert maker.made == []


def test_the_end_of_the_process_stops_all(maker: Maker, config: SpecCacheConfig) -> None:
    for n in (100, 200):
        _ = EngineHost.acquire(changed(config, engine_options={"max_model_len": n})).engine
    EngineHost._stop_all()
    assert [engine.closed for engine in maker.made] == [True, True]
    assert maker.threads() == []


# Failing to start.


def test_a_failed_start_leaves_nothing_and_can_be_tried_again(maker: Maker, config: SpecCacheConfig) -> None:
    fault = EngineStartError("No memory.")
    maker.start_faults = [fault]
    host = EngineHost.acquire(config)
    with pytest.raises(EngineStartError) as caught:
        _ = host.engine
    assert caught.value is fault
    assert not host.running
    assert maker.threads() == []
    assert maker.made[0].closed
    assert host.engine is maker.made[1]
    assert maker.made[1].started


def test_a_constructor_that_refuses_leaves_nothing(maker: Maker, config: SpecCacheConfig) -> None:
    maker.constructor_fault = ConfigurationError("Unknown engine option.")
    host = EngineHost.acquire(config)
    with pytest.raises(ConfigurationError, match="Unknown engine option"):
        _ = host.loop
    assert (host.running, maker.threads()) == (False, [])
    maker.constructor_fault = None
    assert host.engine is maker.made[0]


def test_a_failed_start_reaches_every_user(maker: Maker, config: SpecCacheConfig) -> None:
    maker.start_faults = [EngineStartError("second"), EngineStartError("first")]
    one, two = EngineHost.acquire(config), EngineHost.acquire(config)
    with pytest.raises(EngineStartError, match="first"):
        _ = one.engine
    with pytest.raises(EngineStartError, match="second"):
        _ = two.engine
    assert one.engine is two.engine is maker.made[2]


def test_an_unknown_engine_is_named(config: SpecCacheConfig) -> None:
    host = EngineHost.acquire(changed(config, engine="no-such-engine"))
    try:
        with pytest.raises(ConfigurationError, match="Unknown engine 'no-such-engine'") as caught:
            _ = host.engine
        assert "vllm" in caught.value.hint
    finally:
        host.release()


def test_a_model_that_is_not_there_is_named(maker: Maker, config: SpecCacheConfig, tmp_path: Path) -> None:
    host = EngineHost.acquire(changed(config, model=str(tmp_path / "nothing")))
    with pytest.raises(ConfigurationError, match="does not exist"):
        _ = host.engine
    assert maker.made == []


# What goes with it.


def test_one_library_a_tenant_and_anchor(maker: Maker, config: SpecCacheConfig) -> None:
    host = EngineHost.acquire(config)
    plain = host.library(config)
    assert host.library(changed(config, policy="full_reuse")) is plain
    others = [host.library(changed(config, **change)) for change in ({"tenant": "acme"}, {"anchor": "Hello."})]
    digests = {library.namespace.digest for library in (plain, *others)}
    assert len(digests) == 3
    text = "A text that only the tenant acme has ever warmed, and nobody else may find."
    others[0].learn(others[0].chunk(text))
    assert [len(library.match(text)) for library in (plain, *others)] == [0, 1, 0]


def test_the_anchor_is_the_chat_templates_header(maker: Maker, config: SpecCacheConfig) -> None:
    host = EngineHost.acquire(config)
    library = host.library(config)
    assert library.anchor == host.tokenizer.header() != ""
    assert library.namespace.anchor_ids == host.tokenizer.encode(library.anchor)
    facts = host.engine.facts
    assert (library.namespace.fingerprint, library.namespace.dtype) == (facts.fingerprint, facts.dtype)
    assert host.library(changed(config, anchor="")).namespace.anchor_ids == ()


def test_known_chunks_survive_the_host(maker: Maker, config: SpecCacheConfig, tmp_path: Path) -> None:
    config = changed(config, store=str(tmp_path / "store"))
    text = "A text that was warmed in a process that has ended since, and is known to the next."
    for known in (0, 1):
        host = EngineHost.acquire(config)
        library = host.library(config)
        assert len(library.match(text)) == known
        library.learn(library.chunk(text))
        host.release()


def test_one_scorer_a_speculative_model(maker: Maker, config: SpecCacheConfig, tiny_folder: Path) -> None:
    host = EngineHost.acquire(config)
    assert host.scorer(config) is None
    speculative = changed(config, speculative_model=str(tiny_folder))
    assert host.scorer(speculative) is not None
    assert host.scorer(speculative) is host.scorer(changed(speculative, policy="random"))
    assert not host.running  # a scorer needs no engine


def test_doctor_says_what_is_wrong_and_goes_on(maker: Maker, config: SpecCacheConfig, tmp_path: Path) -> None:
    config = changed(config, store=str(tmp_path))
    host = EngineHost.acquire(config)
    assert all(check.ok for check in examine(config, host))
    maker.start_faults = [EngineStartError("No memory.", hint="Buy some."), EngineStartError("No memory.")]
    broken = EngineHost.acquire(changed(config, ram_bytes=5))
    checks = {check.name: check for check in examine(config, broken)}
    assert not checks["engine and self-check"].ok
    assert "No memory." in checks["engine and self-check"].detail
    assert all(checks[name].ok for name in ("versions", "target model", "target tokenizer", "store"))
    missing = changed(config, model=str(tmp_path / "nothing"))
    found = {check.name: check.ok for check in examine(missing, EngineHost.acquire(missing))}
    assert not found["target model"] and found["store"]


def test_one_engine_that_does_not_stop_keeps_no_other_from_it(
    maker: Maker, config: SpecCacheConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (EngineHost.acquire(changed(config, ram_bytes=size)) for size in (1, 2))
    for host in (first, second):
        assert host.engine
    stop = EngineHost._stop

    def stuck(host: EngineHost) -> None:
        stop(host)
        if host is first:
            raise RuntimeError("stuck")

    monkeypatch.setattr(EngineHost, "_stop", stuck)
    EngineHost._stop_all()
    assert all(engine.closed for engine in maker.made)
    assert "did not stop" in caplog.text
