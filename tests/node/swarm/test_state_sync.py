"""State download: any mixture of dead, slow, lying and moving sources costs time at most; it resumes; it agrees."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.store.checkpoint import state_file
from shoal.node.swarm import chunks as chunks_module
from shoal.node.swarm import state_server as server_module
from shoal.node.swarm.chunks import ChunkList, Offer, PartialFile
from shoal.node.swarm.state import SharedState
from shoal.node.swarm.state_server import Snapshot, StateServer, chunk_bytes, servable
from shoal.node.swarm.state_sync import StateClient, check_offer, choose, read_ring_state
from shoal.protocol import limits
from shoal.protocol.errors import PeerFault
from shoal.protocol.transport import Stream, StreamClosed
from shoal.protocol.version import VersionVector, sha256
from shoal.protocol.wire_pb2 import Commit as WireCommit
from shoal.protocol.wire_pb2 import StateChunk, StateOffer, StateRequest

from .memory import InlineClock, MemoryNet, Serve, run

D = 200_000
RUN = b"r" * 32
CHUNK = 64 * 1024


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """25 chunks from a state that is quick to make."""
    monkeypatch.setattr(limits, "STATE_CHUNK_BYTES", CHUNK)


def state(round_: int = 3, outer: bool = True, seed: int = 0) -> SharedState:
    rng = np.random.default_rng([round_, seed])
    return SharedState.make(
        theta=rng.standard_normal(D, np.float32),
        outer=rng.standard_normal(D, np.float32) if outer else None,
        round_=round_,
        lineage=sha256(bytes([round_, seed])),
        vector=VersionVector({("a", 1): (round_, sha256(b"h"))}),
        electorate=["b", "a"],
        total_weight=7,
    )


def honest(*states: SharedState) -> Serve:
    """A server whose state moves on to the next of `states` with every request."""
    left = list(states)
    return StateServer(InlineClock(), lambda: servable(left.pop(0) if len(left) > 1 else left[0], None)).serve


class Client:
    """A client, what it complained of, and what it showed."""

    def __init__(self, folder: Path, handlers: dict[str, Serve], **more: Any) -> None:
        self.net = MemoryNet(handlers)
        self.trouble: list[tuple[str, BaseException]] = []
        self.shown: list[tuple[int, int]] = []
        self._client = StateClient(
            clock=InlineClock(), open_stream=self.net.open, folder=folder, d=D, run_id=RUN,
            trouble=lambda peer, error: self.trouble.append((peer, error)), read=read_ring_state,
            progress=lambda done, total: self.shown.append((done, total)), **more,
        )  # fmt: skip
        self.peers = sorted(handlers)

    async def download(self, lineage: bytes | None = None, peers: list[str] | None = None):
        return await self._client.download(peers or self.peers, lineage)

    def faulty(self) -> set[str]:
        """Who was charged: silence and broken streams are nobody's fault."""
        return {peer for peer, error in self.trouble if isinstance(error, PeerFault)}


def spoiled(serve: Serve, spoil) -> Serve:
    """A server of which `spoil(stream, n, frame)` sends the n-th frame."""

    async def handler(peer: str, stream: Stream) -> None:
        class Spoiling:
            count = 0

            async def send(self, frame: bytes) -> None:
                self.count += 1
                await spoil(stream, self.count - 1, frame)

            def __getattr__(self, name: str) -> Any:
                return getattr(stream, name)

        await serve(peer, Spoiling())  # pyright: ignore[reportArgumentType]

    return handler


async def _sleep_forever() -> None:
    await asyncio.sleep(1e9)


def after_offer(act) -> Any:
    """Behave until the offer is out, then act once and be silent."""

    async def spoil(stream: Stream, n: int, frame: bytes) -> None:
        if n == 0:
            await stream.send(frame)
        else:
            await act(stream, n, frame)

    return spoil


async def _drop(stream: Stream, n: int, frame: bytes) -> None:
    raise ConnectionResetError("gone")


async def _silence(stream: Stream, n: int, frame: bytes) -> None:
    await _sleep_forever()


async def _trickle(stream: Stream, n: int, frame: bytes) -> None:
    if n == 1:
        return await stream.send(frame)
    for byte in frame:
        await asyncio.sleep(1)
        await stream.send(bytes([byte]))


async def _empty_frames(stream: Stream, n: int, frame: bytes) -> None:
    await stream.send(frame if n == 1 else b"")


async def _flip(stream: Stream, n: int, frame: bytes) -> None:
    await stream.send(frame if n == 1 else bytes([frame[0] ^ 1]) + frame[1:])


async def _too_long(stream: Stream, n: int, frame: bytes) -> None:
    await stream.send(frame if n == 1 else frame + b"x")


async def _other_chunk(stream: Stream, n: int, frame: bytes) -> None:
    await stream.send(StateChunk(index=24, payload_size=1).SerializeToString() if n == 1 else frame)


async def _junk(stream: Stream, n: int, frame: bytes) -> None:
    await stream.send(b"\xff" * 20)


# ------------------------------------------------------------------------------------------------ the good case


@pytest.mark.parametrize("outer", [True, False])
def test_a_state_comes_back_to_the_bit_from_several_peers_at_once(tmp_path: Path, outer: bool) -> None:
    one = state(outer=outer)
    client = Client(tmp_path, {name: honest(one) for name in "abc"})
    found = run(client.download())
    assert found is not None
    got, commit, reason = found
    assert got.hash == one.hash and got.electorate == one.electorate and got.total_weight == 7 and commit is None
    assert np.array_equal(got.theta, one.theta)
    assert reason == "3 of 3 peers offer the same state of round 3"
    assert not client.trouble and not list(tmp_path.iterdir())
    assert client.shown[-1][0] == client.shown[-1][1] and [d for d, _ in client.shown] == sorted(
        d for d, _ in client.shown
    )
    assert all(client.net.opened.count(name) >= 2 for name in "abc")  # an offer, and chunks


def test_equal_states_are_equal_files_whatever_made_them() -> None:
    one, other = state(), state()
    assert one is not other and state_file(one) == state_file(other)
    assert Snapshot(servable(one, None)).offer == Snapshot(servable(other, None)).offer


def test_the_only_one_reachable_is_believed_and_that_is_said(tmp_path: Path) -> None:
    client = Client(tmp_path, {"a": honest(state())})
    found = run(client.download(peers=["a", "gone"]))
    assert found is not None and found[2].endswith("nobody else could confirm it")
    assert [peer for peer, _ in client.trouble] == ["gone"] and not client.faulty()


def test_nobody_reachable_is_none(tmp_path: Path) -> None:
    client = Client(tmp_path, {})
    assert run(client.download(peers=["x", "y"])) is None
    assert run(client.download(peers=[])) is None


def test_a_named_lineage_is_the_only_one_taken(tmp_path: Path) -> None:
    client = Client(tmp_path, {"a": honest(state(3)), "b": honest(state(4)), "c": honest(state(4))})
    found = run(client.download(lineage=state(3).lineage))
    assert found is not None and found[0].round == 3
    assert run(client.download(lineage=sha256(b"nobody has it"))) is None


# ------------------------------------------------------------------------------------------------ bad sources


@pytest.mark.parametrize("act", [_drop, _silence, _trickle, _empty_frames, _flip, _too_long, _other_chunk, _junk])
@pytest.mark.parametrize("bad", [1, 2])
def test_sources_that_fail_stall_or_lie_do_not_stop_the_download(tmp_path: Path, act, bad: int) -> None:
    one = state()
    handlers: dict[str, Serve] = {"good": honest(one)}
    for i in range(bad):
        handlers[f"bad{i}"] = spoiled(honest(one), after_offer(act))

    async def timed():
        loop = asyncio.get_running_loop()
        started = loop.time()
        return await client.download(), loop.time() - started

    client = Client(tmp_path, handlers)
    found, seconds = run(timed())
    assert found is not None and found[0].hash == one.hash
    assert seconds < 5  # virtual: a silent source's chunks are taken over, its deadline is not waited for
    expected = set() if act in (_drop, _silence, _trickle) else {f"bad{i}" for i in range(bad)}
    assert client.faulty() == expected
    assert not list(tmp_path.iterdir())


def test_a_source_that_dies_after_the_others_went_idle_is_replaced(tmp_path: Path) -> None:
    """The chunks it had go back to sources that have nothing left to do."""
    one = state()

    async def late(stream: Stream, n: int, frame: bytes) -> None:
        if n == 0:
            return await stream.send(frame)
        await asyncio.sleep(0.9)
        raise ConnectionResetError("late death")

    client = Client(tmp_path, {"good": honest(one), "late": spoiled(honest(one), late)})
    found = run(client.download())
    assert found is not None and found[0].hash == one.hash


def test_a_mute_peer_does_not_delay_the_offers_of_two_that_agree(tmp_path: Path) -> None:
    one = state()

    async def mute(peer: str, stream: Stream) -> None:
        await _sleep_forever()

    client = Client(tmp_path, {"a": honest(one), "b": honest(one), "m": mute})

    async def timed() -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        assert await client.download() is not None
        return loop.time() - started

    assert run(timed()) < 3


def test_all_sources_lie_alike_and_are_all_charged(tmp_path: Path) -> None:
    """Two that agree on a file whose state hash is not what they say."""
    one = state()
    snapshot = Snapshot(servable(one, None))
    snapshot.offer.state_hash = sha256(b"another")

    async def liar(peer: str, stream: Stream) -> None:
        request = StateRequest.FromString(await stream.recv(1))
        await stream.send(snapshot.offer.SerializeToString())
        for index in request.chunks:
            await stream.send(StateChunk(index=index, payload_size=snapshot.chunk_length(index)).SerializeToString())
            for piece in snapshot.pieces(index, limits.PAYLOAD_FRAME_BYTES):
                await stream.send(piece)

    client = Client(tmp_path, {"x": liar, "y": liar})
    assert run(client.download()) is None
    assert client.faulty() == {"x", "y"} and not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ agreement


def test_two_that_agree_beat_one_that_claims_to_be_ahead(tmp_path: Path) -> None:
    client = Client(tmp_path, {"a": honest(state(3)), "b": honest(state(3)), "liar": honest(state(9, seed=1))})
    found = run(client.download())
    assert found is not None and found[0].round == 3 and found[2].startswith("2 of 3")


def test_while_a_commit_spreads_they_are_asked_again_until_two_agree(tmp_path: Path) -> None:
    """One was a round behind at first; the liar that claims most has nobody beside it."""
    handlers = {"a": honest(state(3), state(4)), "b": honest(state(4)), "liar": honest(state(9, seed=1))}
    client = Client(tmp_path, handlers)
    found = run(client.download())
    assert found is not None and found[0].round == 4
    assert "2 of 3" in found[2]


def _offer(round_: int, key: bytes) -> Offer:
    return Offer(key, round_, key, key, CHUNK, CHUNK, (key,), None)


def test_the_choice_prefers_agreement_then_an_interrupted_download_then_votes_then_the_round() -> None:
    k, m = b"k" * 32, b"m" * 32
    pair_k, pair_m = {p: _offer(3, k) for p in "ab"}, {p: _offer(4, m) for p in "cd"}
    assert choose({k: pair_k, m: pair_m}, b"", 4)[0] == m
    assert choose({k: pair_k, m: pair_m}, k, 4)[0] == k
    assert choose({k: {"a": _offer(3, k)}, m: pair_m}, k, 3)[0] == m
    assert choose({k: pair_k | {"e": _offer(3, k)}, m: pair_m}, b"", 5)[0] == k
    key, reason = choose({k: {"a": _offer(3, k)}, m: {"b": _offer(4, m)}}, b"", 2)
    assert key == m and "1 others offer other states" in reason


# ------------------------------------------------------------------------------------------------ moving on, resuming


def test_a_slow_newcomer_gets_the_state_it_began_with_while_rounds_go_on(tmp_path: Path) -> None:
    """Every request finds the servers a round further; the snapshot under download is kept for it."""
    states = [state(r) for r in range(3, 40)]
    moving = {"a": honest(*states), "b": honest(*states)}
    client = Client(tmp_path, moving)
    found = run(client.download())
    assert found is not None and found[0].hash == states[0].hash and not client.faulty()


def test_a_server_keeps_few_snapshots_and_drops_idle_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 10.0)
    states = [state(r) for r in range(1, 8)]
    present = [states[0]]
    server = StateServer(InlineClock(), lambda: servable(present[0], None))

    async def offered(lineage: bytes = b"") -> bytes:
        return (await server._snapshot(lineage)).offer.lineage

    async def story() -> None:
        assert await offered() == states[0].lineage
        for one in states[1:]:
            present[0] = one
            await asyncio.sleep(1)
            assert await offered(states[0].lineage) == states[0].lineage  # in use, so it stays
            await asyncio.sleep(1)
            assert await offered() == one.lineage
            assert len(server._kept) <= limits.SNAPSHOTS_MAX
        await asyncio.sleep(11)
        present[0] = state(8)
        await offered()
        assert len(server._kept) == 1
        assert await offered(states[0].lineage) == state(8).lineage

    run(story())


def test_a_download_goes_on_where_a_killed_one_ended(tmp_path: Path) -> None:
    one, newer = state(3), state(4)

    class Killed(Exception):
        pass

    seen = 0

    async def killer(phase: str, round_: int) -> None:
        nonlocal seen
        assert (phase, round_) == ("downloading", 3)
        seen += 1
        if seen == 15:
            raise Killed

    first = Client(tmp_path, {"a": honest(one), "b": honest(one)}, hold=killer)
    with pytest.raises(Killed):
        run(first.download())
    assert len(list(tmp_path.glob("download-*"))) == 2

    # The swarm has moved on; both still keep what was being downloaded.
    async def story():
        kept = {}
        for name in "ab":
            serve = honest(one, newer)
            await MemoryNet({name: serve}).open(name, "State", 1)
            kept[name] = serve
            stream = await MemoryNet(kept).open(name, "State", 1)
            await stream.send(StateRequest().SerializeToString())
            await stream.recv(1)
        second = Client(tmp_path, kept)
        return second, await second.download()

    second, found = run(story())
    assert found is not None and found[0].hash == one.hash
    done, total = second.shown[0]
    assert done >= 8 * CHUNK and second.shown[-1] == (total, total)
    assert not list(tmp_path.iterdir())


def test_a_damaged_partial_file_is_verified_not_trusted(tmp_path: Path) -> None:
    one = state(3)
    snapshot = Snapshot(servable(one, None))
    offer = check_offer(snapshot.offer.SerializeToString(), D, RUN)
    partial = PartialFile(tmp_path, offer)
    partial.open()
    for index in range(6):
        partial.write(index, b"".join(snapshot.pieces(index, CHUNK)))
    partial.remember()
    os.pwrite(partial._descriptor, b"damage", 2 * CHUNK)
    partial.close()
    again = PartialFile(tmp_path, offer)
    again.open()
    assert again.done == {0, 1, 3, 4, 5}
    again.close()
    assert PartialFile.interrupted(tmp_path) == (offer.key, offer.lineage)
    index = next(tmp_path.glob("*.json"))
    for junk in ("", "[]", '{"done": [-1, 999999, "x"]}', '{"key": 5}'):
        index.write_text(junk)
        other = PartialFile(tmp_path, offer)
        assert PartialFile.interrupted(tmp_path) == (b"", b"")
        other.open()
        assert other.done == set()
        other.close()


def test_a_download_that_nobody_offers_any_more_is_dropped_for_the_present_one(tmp_path: Path) -> None:
    offer = check_offer(Snapshot(servable(state(1), None)).offer.SerializeToString(), D, RUN)
    stale = PartialFile(tmp_path, offer)
    stale.open()
    stale.close()
    client = Client(tmp_path, {"a": honest(state(3)), "b": honest(state(3))})
    found = run(client.download())
    assert found is not None and found[0].round == 3 and not list(tmp_path.iterdir())


def test_a_full_disk_ends_the_download_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: PartialFile, index: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PartialFile, "write", full)
    client = Client(tmp_path, {"a": honest(state()), "b": honest(state())})
    with pytest.raises(OSError, match="No space"):
        run(client.download())
    assert not client.faulty()


# ------------------------------------------------------------------------------------------------ hostile frames


def _good_offer() -> StateOffer:
    offer = StateOffer()
    offer.CopyFrom(Snapshot(servable(state(), None)).offer)
    return offer


@pytest.mark.parametrize(
    "change",
    [
        {"size": 0},
        {"size": 2**62},
        {"size": 8 * D + 17 * 1024 * 1024},
        {"chunk_size": 0},
        {"chunk_size": 1},
        {"lineage": b"short"},
        {"state_hash": b""},
        {"commit": WireCommit(value=b"junk")},
        {"commit": WireCommit(attempt=2**32 - 1)},
    ],
)
def test_an_impossible_offer_is_its_senders_fault(change: dict[str, Any]) -> None:
    offer = _good_offer()
    for name, value in change.items():
        if name == "commit":
            offer.commit.CopyFrom(value)
        else:
            setattr(offer, name, value)
    with pytest.raises(PeerFault):
        check_offer(offer.SerializeToString(), D, RUN)


def test_an_offer_needs_a_hash_of_every_chunk() -> None:
    for damage in (lambda o: o.chunk_hashes.append(bytes(32)), lambda o: o.chunk_hashes.pop()):
        offer = _good_offer()
        damage(offer)
        with pytest.raises(PeerFault):
            check_offer(offer.SerializeToString(), D, RUN)
    offer = _good_offer()
    offer.chunk_hashes[0] = b"x"
    with pytest.raises(PeerFault):
        check_offer(offer.SerializeToString(), D, RUN)


@given(st.binary(max_size=300))
def test_any_bytes_for_an_offer_end_in_the_declared_error(frame: bytes) -> None:
    with pytest.raises(PeerFault):
        check_offer(frame, D, RUN)


@pytest.mark.parametrize(
    "request_",
    [
        b"\xff\xff",
        StateRequest(lineage=b"short").SerializeToString(),
        StateRequest(chunks=[2**31]).SerializeToString(),
        StateRequest(chunks=[0] * 5000).SerializeToString(),
    ],
)
def test_an_impossible_request_is_refused(request_: bytes) -> None:
    async def story() -> None:
        net = MemoryNet({"a": honest(state())})
        stream = await net.open("a", "State", 1)
        await stream.send(request_)
        with pytest.raises(StreamClosed):
            await stream.recv(1)
        assert isinstance(net.server_errors[0], PeerFault)

    run(story())


def test_a_reader_that_does_not_read_ends_the_stream() -> None:
    async def story() -> None:
        net = MemoryNet({"a": honest(state())})
        stream = await net.open("a", "State", 1)
        await stream.send(StateRequest(chunks=list(range(20))).SerializeToString())
        await asyncio.sleep(server_module.SEND_SECONDS + 1)
        assert isinstance(net.server_errors[0], asyncio.TimeoutError)

    run(story())


# ------------------------------------------------------------------------------------------------ the parts


@given(st.integers(1, limits.STATE_BYTES_MAX))
def test_any_state_has_few_enough_chunks_for_one_frame(size: int) -> None:
    chunk = chunk_bytes(size)
    assert -(-size // chunk) <= limits.STATE_CHUNKS_MAX and (
        chunk == limits.STATE_CHUNK_BYTES or chunk * limits.STATE_CHUNKS_MAX < 2 * size
    )


def test_pieces_put_together_are_the_file() -> None:
    one = state()
    snapshot = Snapshot(servable(one, None))
    count = len(snapshot.offer.chunk_hashes)
    for piece in (1000, CHUNK, 10 * CHUNK):
        chunks = [b"".join(snapshot.pieces(i, piece)) for i in range(count)]
        assert b"".join(chunks) == state_file(one)
    assert [len(c) for c in chunks] == [snapshot.chunk_length(i) for i in range(count)]


@given(st.data())
def test_every_chunk_is_fetched_whatever_the_sources_do(data: st.DataObject) -> None:
    """Sources take, finish, and fail in any order; as long as one stays, nothing is lost and no more than two share one."""
    chunks = ChunkList(range(40), 3)
    now, done = 0.0, set()
    at_work: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for _ in range(2000):
        if len(done) == 40:
            break
        now += data.draw(st.sampled_from([0.0, 2.0])) if _ < 60 else 2.0
        peer = data.draw(st.sampled_from(sorted(at_work))) if _ < 60 else "a"
        if not at_work[peer]:
            at_work[peer] = chunks.take(peer, now)
        elif peer != "a" and data.draw(st.booleans()):
            chunks.give_back(peer)
            at_work.pop(peer)
        else:
            index = at_work[peer].pop(0)
            if index not in done:
                done.add(index)
                chunks.finished(index)
            if not at_work[peer]:
                chunks.give_back(peer)
        held = [index for taken in at_work.values() for index in taken if index not in done]
        assert all(held.count(index) <= 2 for index in held)
    assert done == set(range(40))


def test_the_deadline_follows_what_was_measured() -> None:
    chunks = ChunkList([], 2)
    size = limits.STATE_CHUNK_BYTES
    assert chunks.deadline_s("a", size) == chunks_module.CHUNK_SECONDS_MAX
    assert chunks.deadline_s("a", 4 * size) == 4 * chunks_module.CHUNK_SECONDS_MAX
    chunks.measured("a", 0.01, size)
    assert chunks.deadline_s("b", size) == chunks_module.CHUNK_SECONDS_FLOOR
    chunks.measured("b", 3.0, size)
    assert 20 < chunks.deadline_s("b", size) <= 24 and 10 < chunks.deadline_s("a", size) < 14
    chunks.measured("b", 1000.0, size)
    assert chunks.deadline_s("b", size) == chunks_module.CHUNK_SECONDS_MAX
