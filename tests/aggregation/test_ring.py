"""Ring schedules: everybody ends with everything, the dense sum is right and equal on all, hostile chunks are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.aggregation.compress import encode
from shoal.aggregation.ring import (
    DENSE_SETTINGS,
    RingAllGather,
    RingReduce,
    choose_exchange,
    chunk_bounds,
    join_chunks,
    reduced_bytes_max,
    schedule,
)
from shoal.protocol.errors import PeerFault


def run_ring(vectors: list[np.ndarray], bits: int) -> list[RingReduce]:
    n = len(vectors)
    members = [RingReduce(n, rank, v, bits) for rank, v in enumerate(vectors)]
    for hop in range(2 * (n - 1)):
        sent = [m.outgoing(hop) for m in members]
        for rank, member in enumerate(members):
            assert len(sent[rank - 1]) <= member.max_bytes(hop)
            member.incoming(hop, sent[rank - 1])
    return members


@given(st.integers(1, 7), st.integers(1, 200), st.sampled_from([8, 16, 32]), st.integers(0, 2**32 - 1))
def test_the_dense_sum_is_right_and_equal_on_all(n: int, d: int, bits: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = [rng.standard_normal(d).astype(np.float32) for _ in range(n)]
    members = run_ring(vectors, bits)
    assert all(m.complete and m.hop == 2 * (n - 1) for m in members)
    assert len({m.chunk_hashes() for m in members}) == 1
    total = np.sum(vectors, axis=0, dtype=np.float64)
    tolerance = {32: 1e-5, 16: 2e-2, 8: 2e-2 * max(1.0, float(np.abs(total).max()))}[bits]
    assert np.allclose(members[0].result(), total, atol=tolerance)
    joined = join_chunks([members[-1].payload(c) for c in range(n)], d, bits)
    assert np.array_equal(joined, members[0].result())


@given(st.integers(1, 12))
def test_every_chunk_visits_everybody(n: int) -> None:
    for rank in range(n):
        hops = schedule(n, rank)
        assert len(hops) == 2 * (n - 1)
        for number, hop in enumerate(hops):
            assert hop.receive == schedule(n, (rank - 1) % n)[number].send
        if n > 1:
            assert {h.receive for h in hops[n - 1 :]} | {(rank + 1) % n} == set(range(n))


@given(st.integers(0, 50), st.integers(1, 9))
def test_chunks_cover_the_vector_evenly(d: int, n: int) -> None:
    bounds = chunk_bounds(d, n)
    assert bounds[0][0] == 0 and bounds[-1][1] == d
    sizes = [high - low for low, high in bounds]
    assert max(sizes) - min(sizes) <= 1 and all(a[1] == b[0] for a, b in zip(bounds, bounds[1:]))


def test_hostile_chunks_are_refused() -> None:
    member = RingReduce(3, 0, np.ones(9, np.float32), 32)
    with pytest.raises(PeerFault, match="hop 1"):
        member.incoming(1, b"")
    with pytest.raises(PeerFault, match="bytes"):
        member.incoming(0, b"123")
    with pytest.raises(PeerFault, match="not finite"):
        member.incoming(0, np.full(3, np.nan, "<f4").tobytes())
    with pytest.raises(ValueError):
        member.outgoing(2)
    member.incoming(0, np.ones(3, "<f4").tobytes())
    with pytest.raises(PeerFault, match="reduced chunk"):
        RingReduce(2, 0, np.full(2, 3e38, np.float32), 32).incoming(0, np.full(1, 3e38, "<f4").tobytes())
    member.incoming(1, np.ones(3, "<f4").tobytes())
    with pytest.raises(PeerFault, match="bad_chunk"):
        member.incoming(2, b"\1junk")
    with pytest.raises(ValueError):
        RingReduce(3, 3, np.ones(3, np.float32), 32)


def test_more_members_than_coordinates() -> None:
    members = run_ring([np.ones(2, np.float32)] * 5, 32)
    assert members[3].result().tolist() == [5, 5]
    with pytest.raises(PeerFault, match="empty chunk"):
        join_chunks([b"x", b"", b"", b"", b""], 2, 32)


def test_all_gather_forwards_everything_once_around_the_ring() -> None:
    order = ["a", "b", "c", "d"]
    origins = {p.encode(): p for p in order}
    rings = {p: RingAllGather(order, p, origins) for p in order}
    for p in order:
        rings[p].mark_held(p.encode())
    sent = 0
    for _ in range(len(order) - 1):
        moves = []
        for ring in rings.values():
            to = ring.successors[0]
            moves += [(to, h) for h in ring.to_send(to, set(rings[to].held))]
        for to, h in moves:
            rings[to].mark_held(h)
            sent += 1
    assert all(r.held.keys() == origins.keys() for r in rings.values()) and sent == 4 * 3
    assert all(r.finished_with(r.successors[0], set(rings[r.successors[0]].held)) for r in rings.values())


def test_own_first_then_in_order_of_arrival_and_never_to_the_origin() -> None:
    ring = RingAllGather(["a", "b", "c"], "b", {b"1": "a", b"2": "b", b"3": "c"})
    assert ring.successors == ("c", "a")
    ring.mark_held(b"unknown")
    assert not ring.held
    for hash_ in (b"3", b"1", b"2"):
        ring.mark_held(hash_)
    assert ring.to_send("c", set()) == [b"2", b"1"]
    assert ring.to_send("a", {b"2"}) == [b"3"]
    assert not ring.finished_with("a", {b"2"}) and ring.finished_with("a", {b"2", b"3"})
    with pytest.raises(ValueError):
        RingAllGather(["a"], "z", {})


def test_what_is_lost_is_not_offered_until_it_is_held_again() -> None:
    ring = RingAllGather(["a", "b"], "a", {b"1": "a", b"2": "b"})
    ring.mark_held(b"1")
    ring.mark_lost(b"1")
    ring.mark_lost(b"unknown")
    assert ring.to_send("b", set()) == [] and not ring.finished_with("b", set())
    ring.mark_held(b"1")
    assert ring.to_send("b", set()) == [b"1"]


@given(st.integers(0, 300), st.sampled_from([8, 16, 32]), st.integers(0, 2**32 - 1))
def test_no_reduced_chunk_is_longer_than_its_bound(size: int, bits: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for chunk in (np.zeros(size), rng.standard_normal(size), rng.standard_normal(size) * 10.0 ** rng.integers(-30, 30)):
        payload = encode(chunk.astype(np.float32), DENSE_SETTINGS[bits]) if size else b""
        assert len(payload) <= reduced_bytes_max(size, bits) <= 4 * size + 16
        if bits == 32:
            assert len(payload) == reduced_bytes_max(size, bits)


def test_the_cheaper_exchange_is_chosen() -> None:
    assert choose_exchange(4, 25_000, 400_000, 32)[0] == "sparse"
    kind, reason = choose_exchange(64, 600_000, 400_000, 8)
    assert kind == "dense" and "64 peers" in reason
