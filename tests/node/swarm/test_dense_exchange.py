"""The dense exchange over streams in memory: whole attempts, chunks fetched by hash, and what hostile peers send."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.aggregation.compress import Compression
from shoal.aggregation.merge import OuterSgd, contribution
from shoal.aggregation.ring import DENSE_SETTINGS, RingReduce, reduced_bytes_max
from shoal.node.swarm.dense_exchange import HOP_SECONDS, DenseExchange
from shoal.node.swarm.ring_exchange import EARLY_PUSH_SECONDS
from shoal.node.swarm.state import MergeRules
from shoal.protocol import limits
from shoal.protocol.ballot_messages import Encoding, Exchange, Header, Roster, RosterEntry, Value
from shoal.protocol.errors import PeerFault
from shoal.protocol.transport import Stream, StreamClosed
from shoal.protocol.version import Dot, sha256
from shoal.protocol.wire_pb2 import DenseChunk, DenseHello, PullRequest

from .memory import InlineClock, MemoryNet, Serve, run

BASE = sha256(b"base")
RULES = MergeRules(Compression(1.0, 32), OuterSgd(1.0), 1000, 10.0, 0.0)


def header(peer: str, weight: int) -> Header:
    return Header(
        Dot(peer, 1, 1), bytes(32), 3, BASE, weight, Encoding.DENSE, sha256(b""), 0, 0.0, b"signed by " + peer.encode()
    )


def roster(peers: Sequence[str], weights: Sequence[int], attempt: int = 1) -> Roster:
    entries = tuple(RosterEntry(p, header(p, w) if w else None) for p, w in zip(peers, weights, strict=True))
    return Roster(peers[0], 3, BASE, attempt, entries, (), Exchange.RING_DENSE, "test")


def value(peers: Sequence[str], hashes: tuple[bytes, ...]) -> Value:
    return Value(3, BASE, bytes(32), (), tuple(sorted(peers)), (), Exchange.RING_DENSE, hashes, False, tuple(peers))


@dataclass
class Peer:
    name: str
    dense: DenseExchange
    complete: list[tuple[bytes, ...]] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)
    troubles: list[tuple[str, BaseException]] = field(default_factory=list)


def peer(name: str, net: MemoryNet, d: int, bits: int) -> Peer:
    dense = DenseExchange(
        me=name,
        clock=InlineClock(),
        open_stream=net.opener(name),
        d=d,
        bits=bits,
        rules=RULES,
        on_complete=lambda hashes: made.complete.append(hashes),
        on_failure=lambda attempt, why: made.failures.append((attempt, why)),
        on_trouble=lambda where, error: made.troubles.append((where, error)),
    )
    made = Peer(name, dense)
    net.handlers[name, "Dense"] = dense.serve
    net.handlers[name, "Chunks"] = dense.serve_chunks
    return made


async def until(condition, seconds: float = 600.0) -> None:
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not happen")


async def stopped(*peers: Peer) -> None:
    for one in peers:
        one.dense.end("test over")
    for _ in range(3):
        await asyncio.sleep(0)


@given(st.integers(1, 40), st.integers(1, 5), st.sampled_from([8, 16, 32]), st.integers(0, 2**32 - 1))
def test_all_reduce_the_same_and_who_missed_it_fetches_it(d: int, n: int, bits: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = [f"p{i}" for i in range(n)]
    weights = [int(w) for w in rng.integers(1, 9, n)]
    vectors = {p: (0.1 * rng.standard_normal(d)).astype(np.float32) for p in names}

    async def test() -> None:
        net = MemoryNet({})
        ring = [peer(p, net, d, bits) for p in names]
        late = peer("late", net, d, bits)
        for one in ring:
            one.dense.begin(roster(names, weights), vectors[one.name])
        await until(lambda: all(one.complete for one in ring))
        assert len({one.complete[0] for one in ring}) == 1
        committed = value(names, ring[0].complete[0])
        results = [await one.dense.reduced(committed, []) for one in ring]
        results.append(await late.dense.reduced(committed, ["late", "nobody", names[0]]))
        assert all(r is not None and np.array_equal(r, results[0]) for r in results)
        mean = np.sum([w * vectors[p].astype(float) for p, w in zip(names, weights, strict=True)], axis=0) / sum(
            weights
        )
        tolerance = {8: 2e-2, 16: 1e-3, 32: 1e-6}[bits]
        assert results[0] is not None and np.allclose(results[0] / 2.0**40, mean, atol=tolerance)
        await stopped(*ring)
        assert not net.server_errors and not any(one.failures or one.troubles for one in ring)
        assert all(isinstance(e, Exception) and not isinstance(e, PeerFault) for _, e in late.troubles)

    run(test())


def chunks_of(d: int, n: int, bits: int, seed: int = 0) -> list[bytes]:
    rng = np.random.default_rng(seed)
    members = [RingReduce(n, r, rng.standard_normal(d).astype(np.float32) * 0.1, bits) for r in range(n)]
    for hop in range(2 * (n - 1)):
        sent = [m.outgoing(hop) for m in members]
        for r in range(n):
            members[r].incoming(hop, sent[r - 1])
    return [members[0].payload(c) for c in range(n)]


def serves(*frames: bytes, end: bool = True) -> Serve:
    async def serve(_: str, stream: Stream) -> None:
        await stream.recv(1)
        for frame in frames:
            await stream.send(frame)
        if end:
            await stream.done_sending()
        try:
            await stream.recv(10_000)
        except StreamClosed:
            pass

    return serve


def head(size: int) -> bytes:
    return DenseChunk(payload_size=size).SerializeToString()


@pytest.mark.parametrize("d", [1, 2, 3, 30])
@pytest.mark.parametrize("case", ["too large", "too long", "other", "junk", "short", "silent", "empty frame"])
def test_a_holder_that_lies_costs_one_try(d: int, case: str) -> None:
    chunks = chunks_of(d, 2, 8)
    size = reduced_bytes_max(-(-d // 2), 8)
    first = chunks[0]
    serve = {
        "too large": serves(head(size + 1)),
        "too long": serves(head(max(1, len(first))), bytes(max(1, len(first)) + 1)),
        "other": serves(head(size), bytes(size)),
        "junk": serves(b"\xff junk"),
        "short": serves(head(size), bytes(size - 1)),
        "silent": serves(end=False),
        "empty frame": serves(head(size), b"", end=False),
    }[case]

    async def test() -> None:
        net = MemoryNet({("bad", "Chunks"): serve})
        late, good = peer("late", net, d, 8), peer("good", net, d, 8)
        hashes = tuple(sha256(c) for c in chunks)
        committed = value(["a", "b"], hashes)
        assert await late.dense.reduced(committed, ["bad", "good"]) is None  # good does not have them yet
        good.dense._chunks = dict(zip(hashes, chunks, strict=True))
        assert await late.dense.reduced(committed, ["bad", "good"]) is not None
        faults = [(who, e.kind) for who, e in late.troubles if isinstance(e, PeerFault)]
        kind = {"junk": "bad_message", "short": None, "silent": None}.get(case, "bad_chunk")
        assert faults == ([("bad", kind)] * 2 if kind else [])
        # chunks of another round make room
        others = chunks_of(d, 2, 8, seed=1)
        good.dense._chunks = {sha256(c): c for c in others}
        assert await late.dense.reduced(value(["a", "b"], tuple(map(sha256, others))), ["good"]) is not None
        assert set(late.dense._chunks.values()) == set(others)

    run(test())


def test_chunks_are_served_all_or_none_and_not_without_bound() -> None:
    async def test() -> None:
        net = MemoryNet({})
        good = peer("good", net, 9, 8)
        chunks = chunks_of(9, 2, 8)
        good.dense._chunks = {sha256(c): c for c in chunks}
        for asked in ([sha256(chunks[0]), bytes(32)], [sha256(chunks[0])] * (limits.CHUNKS_MAX + 1)):
            stream = await net.open("good", "Chunks", 1)
            await stream.send(PullRequest(update_hashes=asked).SerializeToString())
            with pytest.raises(StreamClosed):
                await stream.recv(1)
        (fault,) = net.server_errors
        assert isinstance(fault, PeerFault) and fault.kind == "bad_message"

    run(test())


# --- an attempt with a bad neighbour ----------------------------------------------------------------------------------


def chunk(hop: int, payload: bytes) -> list[bytes]:
    return [DenseChunk(hop=hop, chunk=0, payload_size=len(payload)).SerializeToString(), payload]


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ([b"\xff junk"], "bad_message"),
        (chunk(1, b"12345678"), "bad_chunk"),
        (chunk(0, bytes(100)), "bad_chunk"),  # longer than the hop's chunk
        ([chunk(0, bytes(8))[0], bytes(9)], "bad_chunk"),
        ([chunk(0, bytes(8))[0], b""], "bad_chunk"),
        (chunk(0, bytes(4)), "bad_chunk"),  # shorter than the hop's chunk
        (chunk(0, np.full(2, np.nan, "<f4").tobytes()), "bad_chunk"),
        (chunk(0, bytes(8))[:1], None),  # dies in the middle
    ],
)
def test_a_bad_predecessor_fails_the_attempt_and_is_charged(frames: list[bytes], kind: str | None) -> None:
    async def test() -> None:
        async def deaf(_: str, stream: Stream) -> None:
            try:
                while True:
                    await stream.recv(10_000)
            except StreamClosed:
                pass

        net = MemoryNet({("a", "Dense"): deaf})
        b = peer("b", net, 4, 32)
        b.dense.begin(roster(["a", "b"], [1, 1]), np.ones(4, np.float32))
        stream = await net.open("b", "Dense", 1, me="a")
        await stream.send(DenseHello(round=3, base_lineage=BASE, attempt=1).SerializeToString())
        for frame in frames:
            await stream.send(frame)
        if kind is None:
            stream.cancel("connection reset")
        await until(lambda: b.failures)
        assert b.failures[0][0] == 1 and not b.complete
        assert [e.kind for e in net.server_errors if isinstance(e, PeerFault)] == ([kind] if kind else [])
        await stopped(b)

    run(test())


@pytest.mark.parametrize(
    ("by", "attempt", "match", "seconds"),
    [
        ("c", 1, "not the predecessor", 1.0),
        ("a", 0, "no such attempt", 1.0),
        ("a", 2, "no such attempt", EARLY_PUSH_SECONDS + 1),
    ],
)
def test_who_is_not_the_predecessor_of_this_attempt_is_not_read(
    by: str, attempt: int, match: str, seconds: float
) -> None:
    async def test() -> None:
        net = MemoryNet({})
        b = peer("b", net, 4, 32)
        b.dense.begin(roster(["a", "b", "c"], [1, 1, 1]), None)
        stream = await net.open("b", "Dense", 1, me=by)
        await stream.send(DenseHello(round=3, base_lineage=BASE, attempt=attempt).SerializeToString())
        with pytest.raises(StreamClosed, match=match):
            await stream.recv(seconds)
        await stopped(b)

    run(test())


def test_a_second_stream_of_the_predecessor_is_refused_and_the_end_cancels_the_first() -> None:
    async def test() -> None:
        net = MemoryNet({})
        b = peer("b", net, 4, 32)
        b.dense.begin(roster(["a", "b", "c"], [1, 1, 1]), None)
        streams = [await net.open("b", "Dense", 1, me="a") for _ in range(2)]
        for stream in streams:
            await stream.send(DenseHello(round=3, base_lineage=BASE, attempt=1).SerializeToString())
        with pytest.raises(StreamClosed, match="not the predecessor"):
            await streams[1].recv(1)
        await stopped(b)
        with pytest.raises(StreamClosed, match="test over"):
            await streams[0].recv(1)

    run(test())


@pytest.mark.parametrize("how", ["unreachable", "dies", "silent"])
def test_a_bad_successor_fails_the_attempt(how: str) -> None:
    async def serve(_: str, stream: Stream) -> None:
        await stream.recv(1)
        if how == "dies":
            return stream.cancel("connection reset")
        try:
            while True:
                await stream.recv(10_000)
        except StreamClosed:
            pass

    async def test() -> None:
        net = MemoryNet({} if how == "unreachable" else {("b", "Dense"): serve})
        a = peer("a", net, 4, 32)
        a.dense.begin(roster(["a", "b"], [1, 1]), np.ones(4, np.float32))
        await until(lambda: a.failures, 2 * HOP_SECONDS)
        assert a.failures[0][0] == 1 and len(a.troubles) == 1 and not a.complete
        await stopped(a)

    run(test())


def test_alone_one_completes_at_once_and_32_bits_are_exact() -> None:
    async def test() -> None:
        a = peer("a", MemoryNet({}), 5, 32)
        vector = np.linspace(-0.5, 0.5, 5, dtype=np.float32)
        a.dense.begin(roster(["a"], [7]), vector)
        (hashes,) = a.complete
        result = await a.dense.reduced(value(["a"], hashes), [])
        assert result is not None and np.array_equal(result, contribution(vector, 1.0))
        assert DENSE_SETTINGS[32].bits == 32

    run(test())
