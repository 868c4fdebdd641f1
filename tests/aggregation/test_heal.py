"""Healing: when two sides are added up, who wins otherwise, and the exact average."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.aggregation.gossip import NO_BASE, UpdateLog
from shoal.aggregation.heal import Decision, Kind, Side, abandoned, heal, merged
from shoal.aggregation.snapshots import Snapshot
from shoal.protocol.errors import PeerFault
from shoal.protocol.version import VersionVector

from .origins import RULES, THETA0, chain, log_of, offer, pull, state

weights = st.integers(0, 2**40)
COMMON = chain("ada", 2)
MIRROR = {Kind.ADD: Kind.ADD, Kind.KEEP: Kind.TAKE, Kind.TAKE: Kind.KEEP, Kind.MERGE: Kind.MERGE}


def side(total: int, concurrent: int, name: bytes = b"a", base: bytes = NO_BASE) -> Side:
    return Side(total, concurrent, name * 32, base)


def kind(mine: Side, theirs: Side, heal_max: int, rule: str = "heavier") -> Kind:
    decision = heal(mine, theirs, heal_max=heal_max, rule=rule)  # pyright: ignore[reportArgumentType]
    assert isinstance(decision, Decision) and decision.reason
    return decision.kind


@pytest.mark.parametrize("rule", ["heavier", "merge"])
def test_a_light_side_is_added_whatever_the_rule(rule: str) -> None:
    assert kind(side(1000, 900), side(110, 10, b"b"), 10, rule) is Kind.ADD
    assert kind(side(1000, 900), side(1000, 900), 10, rule) is Kind.ADD  # one state needs no healing


def test_the_heavier_side_wins_and_a_tie_goes_to_the_smaller_hash() -> None:
    assert kind(side(100, 50), side(101, 51, b"b"), 10) is Kind.TAKE
    assert kind(side(101, 51), side(100, 50, b"b"), 10) is Kind.KEEP
    assert kind(side(100, 50), side(100, 50, b"b"), 10) is Kind.KEEP


def test_the_average_is_taken_by_rule_but_not_across_merges() -> None:
    assert kind(side(100, 50), side(101, 51, b"b"), 10, "merge") is Kind.MERGE
    assert kind(side(151, 0, base=b"m" * 32), side(101, 0, b"b"), 10, "merge") is Kind.KEEP
    assert kind(side(101, 0), side(151, 0, b"b", b"m" * 32), 10, "heavier") is Kind.TAKE


@given(weights, weights, weights, weights, st.sampled_from(["heavier", "merge"]), st.integers(0, 2**41), st.booleans())
def test_both_sides_find_the_same(
    total: int, other_total: int, one: int, two: int, rule: str, heal_max: int, rebased: bool
) -> None:
    mine, theirs = side(total, one), side(other_total, two, b"b", b"m" * 32 if rebased else NO_BASE)
    assert kind(theirs, mine, heal_max, rule) is MIRROR[kind(mine, theirs, heal_max, rule)]


def test_the_losers_updates_do_not_come_back_by_gossip() -> None:
    winner, loser = log_of(COMMON, chain("bob", 3)), log_of(COMMON, chain("eve", 2))
    before = state(winner)
    limits = abandoned(winner.vector, loser.vector)
    assert limits == {("eve", 0): 0}
    winner.freeze(limits)
    assert pull(winner, loser) == 0 and state(winner) == before
    taken = UpdateLog.from_snapshot(THETA0, RULES, winner.snapshot())
    assert pull(taken, loser) == 0 and state(taken) == before
    second_life = chain("eve", 1, incarnation=1)
    for log in (winner, taken):
        offer(log, second_life)
    assert state(winner) == state(taken) != before


def sides() -> tuple[UpdateLog, UpdateLog]:
    return log_of(COMMON, chain("bob", 3)), log_of(COMMON, chain("eve", 1))


def test_two_sides_merge_to_the_same_bits_and_go_on() -> None:
    one, two = sides()
    ours, theirs = one.weight_beyond(two.vector), two.weight_beyond(one.vector)
    assert (ours, theirs) == (9, 3)
    both = merged(one.snapshot(folded=True), ours, two.snapshot(folded=True), theirs)
    assert both.hash == merged(two.snapshot(folded=True), theirs, one.snapshot(folded=True), ours).hash
    assert both.weight == 6 + 9 + 3
    logs = [UpdateLog.from_snapshot(THETA0, RULES, both.to_parts()) for _ in range(2)]
    added = log_of(COMMON, chain("bob", 3), chain("eve", 1))
    assert logs[0].vector == added.vector and logs[0].state_hash != added.state_hash
    assert logs[0].version != added.version
    for log in logs:
        offer(log, chain("bob", 4))
    assert state(logs[0]) == state(logs[1])
    expected = (0.75 * one.theta.astype(np.float64) + 0.25 * two.theta) - THETA0
    assert np.abs(UpdateLog.from_snapshot(THETA0, RULES, both).theta - THETA0 - expected).max() < 1e-6


@given(
    st.lists(st.tuples(st.integers(-(2**61), 2**61), st.integers(-(2**61), 2**61)), min_size=1, max_size=8),
    st.integers(0, 2**31 - 1),
    st.integers(1, 2**31 - 1),
)
def test_the_average_is_exact(sums: list[tuple[int, int]], one_weight: int, two_weight: int) -> None:
    shift = max(0, (one_weight + two_weight).bit_length() - 31)
    one, two = (
        Snapshot(np.array(column, np.int64), VersionVector({}), 0, VersionVector({}), NO_BASE, {})
        for column in zip(*sums)
    )
    first, second = (
        ((one, one_weight), (two, two_weight)) if one.hash <= two.hash else ((two, two_weight), (one, one_weight))
    )
    part, whole = second[1] >> shift, (first[1] >> shift) + (second[1] >> shift)
    for a, b, got in zip(first[0].acc.tolist(), second[0].acc.tolist(), merged(one, one_weight, two, two_weight).acc):
        assert int(got) == (Fraction(b - a) * Fraction(part, whole)).__floor__() + a


def test_weights_beyond_31_bits_still_average() -> None:
    one, two = (s.snapshot(folded=True) for s in sides())
    exact = merged(one, 3, two, 1)
    assert np.abs(merged(one, 3 * 2**40, two, 2**40).acc - exact.acc).max() <= 1


def test_what_cannot_be_averaged_is_refused() -> None:
    one, two = sides()
    a, b = one.snapshot(folded=True), two.snapshot(folded=True)
    with pytest.raises(ValueError, match="folded"):
        merged(one.snapshot(), 1, b, 1)
    for bad in ((0, 0), (-1, 2)):
        with pytest.raises(ValueError, match="no average"):
            merged(a, bad[0], b, bad[1])
    forked = log_of(chain("ada", 2, seed=1)).snapshot(folded=True)
    with pytest.raises(ValueError, match="two heads"):
        merged(a, 1, forked, 1)
    short = Snapshot(np.zeros(3, np.int64), VersionVector({}), 0, VersionVector({}), NO_BASE, {})
    with pytest.raises(ValueError, match="coordinates"):
        merged(a, 1, short, 1)


def test_frozen_chains_stay_frozen_through_a_merge() -> None:
    one, two = sides()
    one.freeze({("bob", 0): 2, ("eve", 0): 0})
    two.freeze({("bob", 0): 3})
    both = merged(one.snapshot(folded=True), 1, two.snapshot(folded=True), 1)
    assert both.limits == {("bob", 0): 2, ("eve", 0): 1}
    log = UpdateLog.from_snapshot(THETA0, RULES, both)
    offer(log, [*chain("bob", 3), *chain("eve", 2)])
    assert log.frozen == {("bob", 0): 2, ("eve", 0): 1}
    assert [log.vector.seq("bob", 0), log.vector.seq("eve", 0)] == [2, 1]


def test_a_snapshot_of_another_size_is_refused() -> None:
    with pytest.raises(PeerFault, match="int64"):
        UpdateLog.from_snapshot(THETA0[:3], RULES, sides()[0].snapshot().to_parts())
