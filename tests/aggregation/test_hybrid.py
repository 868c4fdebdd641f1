"""A ring's sum: what it counts, its one encoding, and how the log adds it and remembers what is in it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.aggregation.contributions import GossipRules
from shoal.aggregation.gossip import UpdateLog, Verdict
from shoal.aggregation.heal import merged
from shoal.aggregation.hybrid import HybridRules, combine, combined_bytes_max, read_sum, thinned, write_sum
from shoal.aggregation.merge import UNIT
from shoal.aggregation.snapshots import INNER_KEPT, Snapshot, join_inner
from shoal.protocol.ballot_messages import CommittedUpdate, Encoding, Exchange, Value
from shoal.protocol.errors import PeerFault
from shoal.protocol.rings import Combined, make_draw
from shoal.protocol.version import NO_HEAD, Dot, VersionVector

from .origins import RULES, THETA0, D, Update, head_of, update

RING_RULES = HybridRules(RULES.compression, 1_000_000, 4.0, 0.0, 1.0)
THIN = replace(RING_RULES, keep=1.0, bits=8)
LOG_RULES = GossipRules(RULES.compression, combined=True)
RUN = b"r" * 32


def inner(peer: str, seq: int = 1, **more: object) -> Update:
    return update(peer, seq, scale=1.0, **more)  # type: ignore[arg-type]


def published(by: str, seq: int, previous: bytes, updates: list[Update], round_: int, peers: int = 6) -> Update:
    """A combined update, without the seals that only its receivers look at."""
    found = combine(updates, peers, D, RING_RULES)
    draw = make_draw(round_, by, peers, {h.dot.peer: b"n" * 32 for h, _ in updates})
    value = Value(
        round=round_,
        base_lineage=draw.lineage(RUN),
        previous_state_hash=draw.lineage(RUN),
        updates=tuple(sorted(CommittedUpdate(h.dot, h.update_hash, h.weight) for h, _ in updates)),
        roster=tuple(sorted(h.dot.peer for h, _ in updates)),
        joiners=(),
        exchange=Exchange.RING_SPARSE,
    )
    counted = tuple(u.dot in found.counted for u in value.updates)
    payload = Combined(draw, value, counted, write_sum(found.indices, found.fixed, D)).encode()
    return update(by, seq, previous, payload=payload, encoding=Encoding.COMBINED, scale=1.0, weight=found.weight)


def test_all_rings_of_a_round_together_make_one_step_of_averaging() -> None:
    updates = [inner(peer) for peer in ("ada", "bob", "cyd", "dan", "eve", "fay")]
    whole = combine(updates, 6, D, RING_RULES)
    total = np.zeros(D, np.int64)
    for part in (updates[:2], updates[2:4], updates[4:]):
        found = combine(part, 6, D, RING_RULES)
        total[found.indices] += found.fixed
        assert found.counted == {h.dot for h, _ in part} and found.weight == 6
    expected = np.zeros(D, np.int64)
    expected[whole.indices] = whole.fixed
    assert np.abs(total - expected).max() <= 6  # each contribution is rounded once
    assert np.abs(total).max() / UNIT > 1e-3


def test_void_updates_count_in_the_weights_and_move_nothing() -> None:
    good, broken = inner("ada"), inner("bob", payload=b"not an update")
    damped = [inner("bob"), update("cyd", scale=0.0), update("dan", scale=1.5), update("eve", scale=float("-1"))]
    alone = combine([good], 8, D, RING_RULES)
    with_broken = combine([good, broken], 8, D, RING_RULES)
    assert with_broken.counted == {good[0].dot}
    # Half of the weight, twice the updates of eight: the same step.
    assert np.array_equal(with_broken.fixed, alone.fixed)
    assert combine(damped, 8, D, RING_RULES).counted == {damped[0][0].dot}
    huge = inner("bob", size=1e6)
    assert combine([good, huge], 8, D, RING_RULES).counted == {good[0].dot}


def test_a_claimed_weight_is_capped_and_a_norm_is_clipped() -> None:
    honest = [inner(peer) for peer in ("ada", "bob", "cyd")]
    liar = inner("dan", weight=10**6)
    found = combine([*honest, liar], 4, D, RING_RULES)
    assert found.weight == 9 + 12  # four times the median
    clipped = combine(honest, 4, D, replace(RING_RULES, norm_max=1e-3))
    assert np.sqrt(((clipped.fixed / UNIT) ** 2).sum()) <= 1e-3


def test_a_sum_is_thinned_out_to_its_largest_coordinates_in_a_common_unit() -> None:
    updates = [inner(peer) for peer in ("ada", "bob", "cyd", "dan", "eve")]
    whole, thin = combine(updates, 5, D, RING_RULES), combine(updates, 5, D, THIN)
    exact = dict(zip(whole.indices.tolist(), whole.fixed.tolist(), strict=True))
    assert thin.indices.size == RULES.compression.form(D).total < whole.indices.size
    left_out = max(abs(v) for i, v in exact.items() if i not in thin.indices)
    unit = 2 ** (int(np.abs(whole.fixed).max()).bit_length() - 8)
    for index, units in zip(thin.indices.tolist(), thin.fixed.tolist(), strict=True):
        assert units % unit == 0 and abs(units - exact[index]) <= unit // 2 and abs(units) >= left_out - unit
    assert len(write_sum(thin.indices, thin.fixed, D)) < len(write_sum(whole.indices, whole.fixed, D)) / 4
    assert thin.counted == whole.counted


@given(
    st.lists(st.integers(-(2**50), 2**50), min_size=D, max_size=D), st.integers(4, 62), st.sampled_from([0, 0.5, 1, 4])
)
def test_thinning_never_moves_a_number_by_more_than_half_a_unit(total: list[int], bits: int, keep: float) -> None:
    indices, fixed = thinned(np.array(total, np.int64), replace(RING_RULES, keep=keep, bits=bits))
    unit = 2 ** max(0, max(map(abs, total)).bit_length() - bits)
    assert all(abs(f - total[i]) <= unit // 2 and f for i, f in zip(indices.tolist(), fixed.tolist(), strict=True))
    assert keep == 0 or indices.size <= round(keep * RULES.compression.form(D).total)
    assert np.array_equal(read_sum(write_sum(indices, fixed, D), D)[1], fixed)


def test_a_ring_of_no_weight_comes_to_nothing() -> None:
    found = combine([inner("ada", weight=0)], 4, D, RING_RULES)
    assert not found.indices.size and not found.counted and found.weight == 0


sums = st.dictionaries(
    st.integers(0, 63), st.integers(-(2**62), 2**62).filter(bool) | st.integers(-9, 9).filter(bool), max_size=64
)


@given(sums)
def test_a_sum_has_one_encoding(entries: dict[int, int]) -> None:
    indices = np.array(sorted(entries), np.int64)
    fixed = np.array([entries[i] for i in sorted(entries)], np.int64)
    data = write_sum(indices, fixed, 64)
    back = read_sum(data, 64)
    assert np.array_equal(back[0], indices) and np.array_equal(back[1], fixed)
    with pytest.raises(PeerFault):
        read_sum(data + b"\0", 64)


@given(st.binary(max_size=80))
def test_no_bytes_crash_the_reader_of_sums(data: bytes) -> None:
    try:
        indices, fixed = read_sum(data, 64)
    except PeerFault:
        return
    assert write_sum(indices, fixed, 64) == data


def test_the_size_limit_holds_for_the_largest_sum() -> None:
    fixed = np.full(D, -(2**62), np.int64)
    assert len(write_sum(np.arange(D), fixed, D)) < combined_bytes_max(D, RULES.compression, 8)


@given(st.integers(0, 2**32))
def test_any_order_gives_the_same_bits_and_the_same_memory(seed: int) -> None:
    rings = [[inner("ada", n), inner("bob", n)] for n in range(1, 6)]
    one: list[Update] = []
    two: list[Update] = []
    for number, ring in enumerate(rings, 1):
        target = (one, two)[number % 2]
        by = ("ada", "bob")[number % 2]
        previous = head_of(target[-1][0]) if target else NO_HEAD
        target.append(published(by, len(target) + 1, previous, ring, number))
    rng = random.Random(seed)
    logs = [UpdateLog(THETA0, LOG_RULES) for _ in range(2)]
    for log in logs:
        waiting = [list(one), list(two)]
        while any(waiting):
            chain = rng.choice([c for c in waiting if c])
            header, payload = chain.pop(0)
            assert log.judge(header)[0] is Verdict.NEW
            log.add(header, payload)
            if rng.random() < 0.3:  # what is final differs in time, never in what it comes to
                log.advance(VersionVector({(header.dot.peer, 0): log.vector.entries[(header.dot.peer, 0)]}))
    assert logs[0].state_hash == logs[1].state_hash
    for log in logs:
        assert all(log.counts(h.dot) for ring in rings for h, _ in ring)
        assert not log.counts(Dot("ada", 0, 6))
        log.advance(log.vector)
        assert all(log.counts_for_good(h.dot) for ring in rings for h, _ in ring)
        assert max(log.inner_of("bob")) == (0, 5)
    again = [UpdateLog.from_snapshot(THETA0, LOG_RULES, log.snapshot().to_parts()) for log in logs]
    assert len({log.snapshot().hash for log in [*logs, *again]}) == 1
    assert again[0].counts(Dot("bob", 0, 3))


def test_what_is_taken_back_is_not_counted_any_more() -> None:
    log = UpdateLog(THETA0, LOG_RULES)
    before = log.theta.tobytes()
    log.add(*published("ada", 1, NO_HEAD, [inner("ada"), inner("bob")], 1))
    assert log.counts(Dot("bob", 0, 1)) and log.theta.tobytes() != before
    log.freeze({("ada", 0): 0})
    assert not log.counts(Dot("bob", 0, 1)) and log.theta.tobytes() == before


def test_a_plain_update_is_refused_in_hybrid_mode_and_a_combined_one_in_gossip_mode() -> None:
    with pytest.raises(PeerFault, match="gossips COMBINED"):
        UpdateLog(THETA0, LOG_RULES).add(*inner("ada"))
    with pytest.raises(PeerFault, match="gossips SPARSE"):
        UpdateLog(THETA0, RULES).add(*published("ada", 1, NO_HEAD, [inner("ada")], 1))


def test_a_step_above_the_limit_for_all_its_updates_is_void() -> None:
    one = published("ada", 1, NO_HEAD, [inner("ada"), inner("bob")], 1, peers=2)
    log = UpdateLog(THETA0, replace(LOG_RULES, step_max=1e-4))
    added = log.add(*one)
    assert added.void and "the limit for 2 updates" in added.reason
    assert not log.counts(Dot("ada", 0, 1))  # what is void is owed again
    assert not UpdateLog(THETA0, replace(LOG_RULES, step_max=10.0)).add(*one).void


def test_the_average_of_two_sides_holds_the_inner_updates_of_both() -> None:
    sides: list[Snapshot] = []
    for peer in ("ada", "bob"):
        log = UpdateLog(THETA0, LOG_RULES)
        log.add(*published(peer, 1, NO_HEAD, [inner(peer)], 1))
        sides.append(log.snapshot(folded=True))
    both = merged(sides[0], 1, sides[1], 1)
    assert both.inner == {("ada", 0): (1,), ("bob", 0): (1,)}


@given(st.lists(st.sets(st.integers(1, 300), max_size=90), min_size=1, max_size=6), st.randoms())
def test_memory_of_inner_updates_is_bounded_and_joins_in_any_order(parts: list[set[int]], rng: random.Random) -> None:
    def joined() -> tuple[int, ...]:
        kept: tuple[int, ...] = ()
        for part in parts:
            kept = join_inner(kept, part)
        return kept

    first = joined()
    rng.shuffle(parts)
    assert joined() == first == tuple(sorted(set().union(*parts))[-INNER_KEPT:])
