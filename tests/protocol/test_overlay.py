"""The neighbourhood of a large swarm: bounded, symmetric, connected, and little moved by one newcomer."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.overlay import DEGREE, FULL_MAX, REACH, RINGS, Overlay


def overlay(peers: list[str]) -> Overlay:
    made = Overlay()
    for peer in peers:
        made.add(peer)
    return made


def names(n: int) -> list[str]:
    return [f"p{i}" for i in range(n)]


@given(st.integers(0, FULL_MAX + 1))
def test_in_a_small_swarm_everybody_is_a_neighbour(n: int) -> None:
    peers = names(n)
    assert overlay(peers).around("p0") == set(peers) - {"p0"}


@pytest.mark.parametrize("n", [FULL_MAX + 2, 100, 1000])
def test_bounded_and_symmetric(n: int) -> None:
    peers = names(n)
    seen = overlay(peers)
    around = {peer: seen.around(peer) for peer in peers}
    assert all(peer not in near and REACH < len(near) <= DEGREE for peer, near in around.items())
    assert all(peer in around[other] for peer in peers for other in around[peer])


def test_the_order_of_arrival_and_those_who_left_do_not_matter() -> None:
    peers = names(200)
    mixed = overlay(random.Random(1).sample(names(300), 300))
    for peer in names(300)[200:]:
        mixed.discard(peer)
        mixed.discard(peer)
    assert all(mixed.around(peer) == overlay(peers).around(peer) for peer in peers)


def test_one_that_is_no_member_has_neighbours_too() -> None:
    assert REACH < len(overlay(names(100)).around("stranger")) <= DEGREE


def test_news_crosses_a_thousand_in_a_few_steps() -> None:
    seen = overlay(names(1000))
    reached, edge, steps = {"p0"}, {"p0"}, 0
    while len(reached) < 1000:
        edge = set().union(*(seen.around(peer) for peer in edge)) - reached
        assert edge, "not connected"
        reached |= edge
        steps += 1
    assert steps <= 4  # 32 + 32·31 > 1000 would do with two; random rings need a little more


def test_a_newcomer_moves_only_those_around_it() -> None:
    peers = names(500)
    before = {peer: overlay(peers).around(peer) for peer in peers}
    after = overlay([*peers, "new"])
    moved = [peer for peer in peers if after.around(peer) != before[peer]]
    assert set(moved) == after.around("new") and len(moved) <= RINGS * 2 * REACH


def test_neighbours_on_a_ring_share_some() -> None:
    seen = overlay(names(500))
    shared = [len(seen.around("p0") & seen.around(peer)) for peer in seen.around("p0")]
    assert min(shared) >= 3  # who can be asked to probe for the other
