from __future__ import annotations

from speccache_rag.selection import POLICIES
from speccache_rag.selection.factory import build_policy
from tests.contract.policy_contract import PolicyContract


class TestSpecCache(PolicyContract):
    policy = build_policy("speccache")
    slack = 0.25


class TestSpecCacheWithoutCompletion(PolicyContract):
    policy = build_policy("speccache", {"complete": False})


class TestSpecCacheWithoutSlack(PolicyContract):
    policy = build_policy("speccache", {"completion_slack": 0})


class TestAttended(PolicyContract):
    policy = build_policy("attended")


class TestAttendedByTheTarget(PolicyContract):
    policy = build_policy("attended", {"scorer": "target"})


class TestCacheBlend(PolicyContract):
    policy = build_policy("cacheblend")


class TestCacheBlendOnKeys(PolicyContract):
    policy = build_policy("cacheblend", {"of": "key"})


class TestEpic(PolicyContract):
    policy = build_policy("epic")


class TestRandom(PolicyContract):
    policy = build_policy("random")


class TestFullReuse(PolicyContract):
    policy = build_policy("full_reuse")
    follows_ratio = False


class TestFullRecompute(PolicyContract):
    policy = build_policy("full_recompute")
    follows_ratio = False


def test_every_registered_policy_is_under_contract() -> None:
    tested = {type(contract.policy) for contract in PolicyContract.__subclasses__()}
    assert {POLICIES.load(name) for name in POLICIES.names()} == tested
