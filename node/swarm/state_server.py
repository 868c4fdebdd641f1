"""Serving the shared state: immutable snapshots, cut into hashed chunks, read without any lock on training.

A snapshot shares the memory of its (immutable) `SharedState`; nothing is copied. One that somebody downloads stays for a
while after the next commit, or a slow newcomer would never finish; which ones is decided by `StateServer` alone.

Covers the serving side of "State" streams. The downloading side is state_sync.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...protocol import limits
from ...protocol.ballot_wire import encode_commit
from ...protocol.commit import CheckedCommit
from ...protocol.errors import PeerFault
from ...protocol.transport import Clock, Stream
from ...protocol.version import sha256
from ...protocol.wire_pb2 import StateChunk, StateOffer, StateRequest
from ..store.checkpoint import state_parts
from .frames import parse
from .state import SharedState

REQUEST_SECONDS = 15.0
# A frame that the other side does not take within this time ends the stream.
SEND_SECONDS = 60.0
# A snapshot that nobody has asked for in this time goes.
IDLE_SECONDS = 120.0


def chunk_bytes(size: int) -> int:
    """Chunk size of a state file of `size` bytes: STATE_CHUNK_BYTES, doubled until at most STATE_CHUNKS_MAX are needed."""
    chunk = limits.STATE_CHUNK_BYTES
    while chunk * limits.STATE_CHUNKS_MAX < size:
        chunk *= 2
    return chunk


@dataclass(frozen=True)
class Servable:
    """What can be downloaded from this node now.

    Attributes:
        round: of the state.
        lineage, hash: 32 bytes each; `hash` names the very bytes, `lineage` is what a downloader may ask for.
        parts: makes the file, in pieces that share the state's memory; equal on all peers that have this state. Blocks.
        commit: the record that ends the lineage, where there is one.
    """

    round: int
    lineage: bytes
    hash: bytes
    parts: Callable[[], Sequence[bytes | memoryview]]
    commit: CheckedCommit | None = None


def servable(state: SharedState, commit: CheckedCommit | None) -> Servable:
    """A state of ring mode."""
    return Servable(state.round, state.lineage, state.hash, lambda: state_parts(state), commit)


class Snapshot:
    """One file, readable by chunk."""

    def __init__(self, state: Servable) -> None:
        """Hashes all of it: blocks."""
        self._parts = [memoryview(part) for part in state.parts()]
        self.size = sum(len(part) for part in self._parts)
        self.chunk_size = chunk_bytes(self.size)
        self.offer = StateOffer(
            round=state.round,
            lineage=state.lineage,
            state_hash=state.hash,
            size=self.size,
            chunk_size=self.chunk_size,
            chunk_hashes=[sha256(*self.pieces(i, self.chunk_size)) for i in range(-(-self.size // self.chunk_size))],
        )
        if state.commit is not None:
            self.offer.commit.CopyFrom(encode_commit(state.commit.commit))

    def chunk_length(self, index: int) -> int:
        return min(self.chunk_size, self.size - index * self.chunk_size)

    def pieces(self, index: int, piece_bytes_max: int) -> Iterator[bytes]:
        """Chunk `index` in pieces of at most `piece_bytes_max` bytes."""
        at = index * self.chunk_size
        end = at + self.chunk_length(index)
        start = 0
        for part in self._parts:
            while at < end and at < start + len(part):
                stop = min(end, start + len(part), at + piece_bytes_max)
                yield bytes(part[at - start : stop - start])
                at = stop
            start += len(part)


@dataclass
class _Kept:
    snapshot: Snapshot
    asked: float  # when it was last asked for, by the clock


class StateServer:
    """Handler of "State" streams."""

    def __init__(self, clock: Clock, state: Callable[[], Servable]) -> None:
        """`state`: the present one."""
        self._clock, self._state = clock, state
        self._kept: dict[bytes, _Kept] = {}  # by state hash, oldest first
        self._lock = asyncio.Lock()

    async def _snapshot(self, lineage: bytes) -> Snapshot:
        """The kept snapshot of `lineage`, or else the present state's."""
        state = self._state()
        now = self._clock.now()
        for kept in self._kept.values():
            if lineage and kept.snapshot.offer.lineage == lineage:
                kept.asked = now
                return kept.snapshot
        async with self._lock:
            if state.hash not in self._kept:
                snapshot = await self._clock.run(lambda: Snapshot(state))
                self._kept[state.hash] = _Kept(snapshot, now)
                self._prune(state.hash, now)
            kept = self._kept[state.hash]
            kept.asked = max(kept.asked, now)
            return kept.snapshot

    def _prune(self, newest: bytes, now: float) -> None:
        """Drop what nobody reads; of what is read, the one asked for longest ago. A stream under way keeps its own."""
        others = sorted((k for k in self._kept if k != newest), key=lambda k: self._kept[k].asked)
        for position, key in enumerate(others):
            surplus = position < len(others) - (limits.SNAPSHOTS_MAX - 1)
            if surplus or now - self._kept[key].asked > IDLE_SECONDS:
                del self._kept[key]

    async def serve(self, peer: str, stream: Stream) -> None:
        """One request: an offer, then the chunks that were asked for, of the snapshot that was offered.

        A request for a lineage that is not held is answered by the offer of the present state, without chunks.

        Raises PeerFault, StreamClosed, asyncio.TimeoutError.
        """
        request = StateRequest()
        parse(request, await stream.recv(REQUEST_SECONDS))
        if len(request.lineage) not in (0, 32):
            raise PeerFault("bad_message", f"lineage of {len(request.lineage)} bytes")
        snapshot = await self._snapshot(request.lineage)
        count = len(snapshot.offer.chunk_hashes)
        chunks = list(request.chunks) if request.lineage in (b"", snapshot.offer.lineage) else []
        if len(chunks) > count or any(index >= count for index in chunks):
            raise PeerFault("bad_message", "asks for chunks that do not exist")
        await self._send(stream, snapshot.offer.SerializeToString())
        for index in chunks:
            head = StateChunk(index=index, payload_size=snapshot.chunk_length(index))
            await self._send(stream, head.SerializeToString())
            for piece in snapshot.pieces(index, limits.PAYLOAD_FRAME_BYTES):
                await self._send(stream, piece)
        await stream.done_sending()

    async def _send(self, stream: Stream, frame: bytes) -> None:
        await asyncio.wait_for(stream.send(frame), SEND_SECONDS)
