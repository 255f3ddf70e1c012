from __future__ import annotations

import json
from pathlib import Path

import pytest

from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ConfigurationError
from speccache_rag.hosting.engine_host import EngineHost
from speccache_rag.selection import POLICIES
from speccache_rag.selection.attended import Attended
from speccache_rag.selection.epic import Epic
from speccache_rag.selection.factory import build_policy
from speccache_rag.selection.grouped import Grouped
from speccache_rag.selection.heads import Heads
from speccache_rag.selection.speccache import SpecCachePolicy
from speccache_rag.store.factory import build_store
from speccache_rag.store.memory import MemoryStore
from speccache_rag.store.tiered import TieredStore
from tests.contract.store_contract import assert_same, key_of, make_kv


def model_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    return path


class TestPolicy:
    @pytest.mark.parametrize("name", POLICIES.names())
    def test_every_policy_has_defaults(self, name: str) -> None:
        assert build_policy(name) == POLICIES.load(name)()

    def test_options_are_the_fields(self) -> None:
        assert build_policy("speccache", {"tau_cover": 0.5, "max_span": 8}) == SpecCachePolicy(
            tau_cover=0.5, max_span=8
        )

    def test_unknown_options_list_the_known_ones(self) -> None:
        with pytest.raises(ConfigurationError, match=r"'speccache': tau_covr\. Known: tau_smooth, tau_cover"):
            build_policy("speccache", {"tau_covr": 0.5})
        with pytest.raises(ConfigurationError, match="Known: none"):
            build_policy("full_reuse", {"seed": 1})

    @pytest.mark.parametrize("attribute", ["reuses", "fixed_ratio", "needs_speculative_model"])
    def test_what_a_policy_is_cannot_be_set(self, attribute: str) -> None:
        with pytest.raises(ConfigurationError, match=attribute):
            build_policy("speccache", {attribute: False})

    def test_unknown_name(self) -> None:
        with pytest.raises(ConfigurationError, match="Unknown policy 'best'"):
            build_policy("best")

    def test_bad_value(self) -> None:
        with pytest.raises(ConfigurationError, match=r"tau_cover is 2; it must be a number in \[0, 1\]"):
            build_policy("speccache", {"tau_cover": 2})

    def test_an_entry_point_that_is_no_policy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(POLICIES, "load", lambda name: dict)
        with pytest.raises(ConfigurationError, match="no SelectionPolicy"):
            build_policy("mine")


class TestExpression:
    def test_options_in_brackets(self) -> None:
        assert build_policy("attended(target, layers=all)") == Attended("target", "all")
        assert build_policy(" speccache( tau_cover = 0.5 ) ") == SpecCachePolicy(tau_cover=0.5)
        assert build_policy("epic()") == Epic()

    def test_wrappers_stand_before_a_plus(self) -> None:
        built = build_policy("heads(4)+grouped+attended", {"scorer": "target"})
        assert built == Heads(4, inner=Grouped(inner=Attended("target")))
        assert built.questions() == Attended("target").questions()

    def test_what_a_wrapper_wraps_tells_whether_a_speculative_model_is_needed(self) -> None:
        assert build_policy("heads+attended").needs_speculative_kv
        assert not build_policy("heads+attended(target)").needs_speculative_model

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("epic+attended", "Unknown wrapper 'epic'"),
            ("heads", "Unknown policy 'heads'"),
            ("heads(4)+", "'' in policy .* is no policy"),
            ("epic(1", r"'epic\(1' in policy .* is no policy"),
            ("attended(target, all, 3)", "has 2 options, and 3 values"),
            ("attended(layers=all, target)", "'target' .* stands behind an option with a name"),
            ("attended(target, scorer=target)", "is given scorer twice"),
            ("heads(0)+epic", "tokens is 0; it must be a whole number at least 1"),
            ("heads(inner=3)+epic", "Unknown options of policy 'heads': inner. Known: tokens"),
        ],
    )
    def test_what_is_no_policy_is_refused(self, name: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            build_policy(name)


class TestStore:
    def test_no_path_is_ram(self) -> None:
        options = json.loads(json.dumps({"path": None, "ram_bytes": 1 << 20}))
        assert isinstance(build_store(options), MemoryStore)
        assert isinstance(build_store({}), MemoryStore)

    def test_a_path_is_a_folder(self, tmp_path: Path) -> None:
        assert isinstance(build_store({"path": str(tmp_path / "kv"), "ram_bytes": 1 << 20}), TieredStore)
        assert (tmp_path / "kv").is_dir()

    def test_an_unknown_option(self) -> None:
        with pytest.raises(ConfigurationError, match="store: paht"):
            build_store({"paht": "kv"})

    def test_an_address_is_no_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigurationError, match="'s3://bucket/kv' is no local folder"):
            build_store({"path": "s3://bucket/kv"})
        assert not list(tmp_path.iterdir())


class TestScorer:
    def test_none_without_a_speculative_model(self) -> None:
        config = SpecCacheConfig.build(model="m", policy="full_reuse")
        assert EngineHost(config).scorer(config) is None

    def test_is_not_loaded_yet(self, tmp_path: Path) -> None:
        # The folder holds no weights: loading would fail.
        folder = model_folder(tmp_path / "small")
        config = SpecCacheConfig.build(model="m", speculative_model=str(folder))
        scorer = EngineHost(config).scorer(config)
        assert scorer is not None
        assert scorer.model_path == folder
        assert scorer.layers == "last_third"

    def test_a_missing_folder(self, tmp_path: Path) -> None:
        config = SpecCacheConfig.build(model="m", speculative_model=str(tmp_path / "absent"))
        with pytest.raises(ConfigurationError, match="does not exist"):
            EngineHost(config).scorer(config)


class TestSecret:
    def test_a_secret_is_read_from_its_file(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("0123456789abcdef0123\n")
        options = {"path": str(tmp_path / "kv"), "secret_file": str(tmp_path / "secret"), "disk_bytes": 1 << 20}
        kv = make_kv()
        with build_store(options) as store:
            store.put(key_of(kv), kv)
        with build_store(options) as store:
            assert_same(store.get(key_of(kv)), kv)
        with build_store({"path": str(tmp_path / "kv")}) as store:
            assert store.get(key_of(kv)) is None

    @pytest.mark.parametrize(("content", "message"), [("short", "5 bytes; 16 is the least"), (None, "cannot be read")])
    def test_a_bad_secret_is_refused(self, tmp_path: Path, content: str | None, message: str) -> None:
        if content is not None:
            (tmp_path / "secret").write_text(content)
        with pytest.raises(ConfigurationError, match=message):
            build_store({"path": str(tmp_path / "kv"), "secret_file": str(tmp_path / "secret")})
