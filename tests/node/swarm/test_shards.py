"""Shards by weighted rendezvous hashing: complete, disjoint, minimal movement, in proportion to speed."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from shoal.node.swarm import shards as shards_module
from shoal.node.swarm.shards import SHARDS, assign, owner, score

FIRST_SHARDS = (0, 2, 5, 6, 9, 10, 11, 13, 14, 15)

peers = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=6, unique=True)


@given(peers)
def test_every_shard_has_exactly_one_owner(names: list[str]) -> None:
    weights = dict.fromkeys(names, 1.0)
    owned = [shard for name in names for shard in assign(name, weights)]
    assert sorted(owned) == list(range(SHARDS))


@given(peers, st.text("xyz", min_size=1, max_size=3))
def test_only_the_newcomers_shards_move(names: list[str], newcomer: str) -> None:
    before, after = dict.fromkeys(names, 1.0), dict.fromkeys([*names, newcomer], 1.0)
    for shard in range(64):
        assert owner(shard, after) in (owner(shard, before), newcomer)


def test_faster_peers_have_more() -> None:
    weights = {"slow": 1.0, "fast": 4.0}
    assert 150 < len(assign("fast", weights)) < 240


def test_an_unknown_speed_counts_as_the_mean() -> None:
    assert 60 < len(assign("new", {"new": 0.0, "a": 3.0, "b": 5.0})) < 115
    assert assign("a", {"a": 0.0}) == tuple(range(SHARDS))


@given(peers)
def test_only_the_leavers_shards_move(names: list[str]) -> None:
    weights = {name: 1.0 + i for i, name in enumerate(names)}
    stay = {name: weight for name, weight in weights.items() if name != names[0]}
    for shard in range(64):
        if stay and owner(shard, weights) != names[0]:
            assert owner(shard, stay) == owner(shard, weights)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.floats(), min_size=1, max_size=8))
def test_whatever_speeds_are_claimed_everybody_has_data_and_every_shard_a_peer(weights: dict[str, float]) -> None:
    owned = {name: assign(name, weights, 32) for name in weights}
    assert all(owned.values())
    assert {shard for shards in owned.values() for shard in shards} == set(range(32))


def test_a_boast_does_not_take_all_the_data() -> None:
    weights = {"liar": 1e300, **{f"p{i}": 10.0 for i in range(15)}}
    assert len(assign("liar", weights)) < 0.75 * SHARDS


def test_the_score_is_finite_at_both_ends(monkeypatch) -> None:
    for digest in (bytes(32), b"\xff" * 32):
        monkeypatch.setattr(shards_module, "sha256", lambda *parts, digest=digest: digest)
        shards_module._distance.cache_clear()
        assert 0 < score(1, "a", 1.0) < math.inf
    shards_module._distance.cache_clear()


def test_the_assignment_is_the_same_everywhere() -> None:
    """Written down once: another version of the code must not reshuffle everybody's data."""
    assert assign("a", {"a": 2.0, "b": 1.0, "c": 1.0}, 16) == FIRST_SHARDS
