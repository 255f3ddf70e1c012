from __future__ import annotations

from speccache_rag.selection import POLICIES, WRAPPERS
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


class TestHeads(PolicyContract):
    policy = build_policy("heads(4)+attended")


class TestHeadsBeforeCompletion(PolicyContract):
    policy = build_policy("heads(2)+speccache")
    slack = 0.25


class TestGrouped(PolicyContract):
    policy = build_policy("grouped(4)+attended")


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
    assert {registry.load(name) for registry in (POLICIES, WRAPPERS) for name in registry.names()} == tested
