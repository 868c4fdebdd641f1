"""Shards by weighted rendezvous hashing: complete, disjoint, minimal movement, in proportion to speed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.node.swarm.shards import SHARDS, assign, owner

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
