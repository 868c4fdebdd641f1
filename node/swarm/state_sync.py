"""Downloading the shared state (and the manifest) from several peers at once.

Serving: one immutable snapshot file per state, made once, read without any lock on training. Downloading: everybody is
asked for an offer (lineage, state hash, hash of every chunk); the offer that most peers make is believed, two agreeing
beats one; then every source that made it fetches chunks from one common list. A source that fails or lies costs its own
chunk and is dropped. Verified chunks are kept in a partial file with their bitmap, so a restarted download goes on. At the
end the state hash is recomputed from the arrays.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from ...protocol import limits
from ...protocol.ballot_wire import decode_commit, encode_commit
from ...protocol.commit import CheckedCommit
from ...protocol.errors import PeerFault
from ...protocol.transport import Clock, DialError, Stream, StreamClosed
from ...protocol.version import sha256
from ...protocol.wire_pb2 import Commit as WireCommit
from ...protocol.wire_pb2 import StateChunk, StateOffer, StateRequest
from ..store.checkpoint import read_state_file, state_file
from .ring_exchange import parse
from .state import SharedState

OpenStream = Callable[[str, str, float], Awaitable[Stream]]
OPEN_SECONDS = 5.0
OFFER_SECONDS = 15.0
CHUNK_SECONDS = 30.0
CHUNKS_PER_REQUEST = 4
_TROUBLE = (StreamClosed, DialError, asyncio.TimeoutError, PeerFault)


class StateServer:
    """Handler of "State" streams."""

    def __init__(self, clock: Clock, state: Callable[[], tuple[SharedState, CheckedCommit | None]]) -> None:
        """`state`: the present state and the commit that made it (None at round 0 or right after a download)."""
        self._clock, self._state = clock, state
        self._served: tuple[bytes, bytes, StateOffer] | None = None  # state hash, file, offer
        self._lock = asyncio.Lock()

    async def _snapshot(self) -> tuple[bytes, StateOffer]:
        state, checked = self._state()
        async with self._lock:
            if self._served is None or self._served[0] != state.hash:
                file = await self._clock.run(lambda: state_file(state))
                size = limits.STATE_CHUNK_BYTES
                offer = StateOffer(
                    round=state.round,
                    lineage=state.lineage,
                    state_hash=state.hash,
                    size=len(file),
                    chunk_size=size,
                    chunk_hashes=[sha256(file[at : at + size]) for at in range(0, len(file), size)],
                )
                if checked is not None:
                    offer.commit.CopyFrom(encode_commit(checked.commit))
                self._served = (state.hash, file, offer)
            return self._served[1], self._served[2]

    async def serve(self, peer: str, stream: Stream) -> None:
        """One request: an offer, then the chunks that were asked for, of the snapshot that was offered."""
        request = StateRequest()
        parse(request, await stream.recv(OFFER_SECONDS))
        file, offer = await self._snapshot()
        if request.lineage and request.lineage != offer.lineage:
            # An older snapshot is gone; the offer tells the peer which one there is.
            request.ClearField("chunks")
        await stream.send(offer.SerializeToString())
        if len(request.chunks) > len(offer.chunk_hashes) or any(c >= len(offer.chunk_hashes) for c in request.chunks):
            raise PeerFault("bad_message", "asks for chunks that do not exist")
        for index in request.chunks:
            chunk = file[index * offer.chunk_size : (index + 1) * offer.chunk_size]
            await stream.send(StateChunk(index=index, payload_size=len(chunk)).SerializeToString())
            for at in range(0, len(chunk), limits.PAYLOAD_FRAME_BYTES):
                await stream.send(chunk[at : at + limits.PAYLOAD_FRAME_BYTES])
        await stream.done_sending()


@dataclass
class _Offer:
    """A checked offer."""

    key: bytes  # hash over everything that must agree
    round: int
    lineage: bytes
    state_hash: bytes
    size: int
    chunk_size: int
    chunk_hashes: list[bytes]
    commit: WireCommit | None


def check_offer(frame: bytes, d: int) -> _Offer:
    """Decode an offer. Raises PeerFault."""
    offer = StateOffer()
    parse(offer, frame)
    # theta and at most one buffer, and a header; anything beyond is not a state of this layout.
    limit = min(limits.STATE_BYTES_MAX, 8 * d + 16 * 1024 * 1024)
    count = -(-offer.size // offer.chunk_size) if offer.chunk_size else 0
    if not 0 < offer.size <= limit or offer.chunk_size != limits.STATE_CHUNK_BYTES or count != len(offer.chunk_hashes):
        raise PeerFault("bad_message", f"offers {offer.size} bytes in {len(offer.chunk_hashes)} chunks, limit {limit}")
    if any(len(h) != 32 for h in (offer.lineage, offer.state_hash, *offer.chunk_hashes)):
        raise PeerFault("bad_message", "a hash of another size than 32 bytes")
    key = sha256(offer.lineage, offer.state_hash, *offer.chunk_hashes)
    commit = offer.commit if offer.HasField("commit") else None
    return _Offer(
        key,
        offer.round,
        offer.lineage,
        offer.state_hash,
        offer.size,
        offer.chunk_size,
        list(offer.chunk_hashes),
        commit,
    )


class StateClient:
    """Downloads one state at a time."""

    def __init__(
        self,
        *,
        clock: Clock,
        open_stream: OpenStream,
        folder: Path,
        d: int,
        run_id: bytes,
        trouble: Callable[[str, BaseException], None],
        progress: Callable[[int, int], None] = lambda done, total: None,
        hold: Callable[[str, int], Awaitable[None]] | None = None,
    ) -> None:
        """
        Args:
            folder: for the partial file; on the data directory's disk.
            trouble: told of every source that failed, with its peer id.
            progress: bytes done and in all.
        """
        self._clock, self._open, self._folder = clock, open_stream, folder
        self._d, self._run_id = d, run_id
        self._trouble, self._progress, self._hold = trouble, progress, hold

    async def download(
        self, peers: list[str], lineage: bytes | None = None
    ) -> tuple[SharedState, WireCommit | None, str] | None:
        """The state (and the record of its last commit) and why it is believed; None when no source was good enough.

        Raises OSError when the partial file cannot be written.
        """
        offers = dict(await asyncio.gather(*(self._ask(peer, lineage) for peer in peers)))
        good = {p: o for p, o in offers.items() if o is not None and (lineage is None or o.lineage == lineage)}
        if not good:
            return None
        votes = Counter(o.key for o in good.values())
        best = max(good.values(), key=lambda o: (votes[o.key], o.round, o.key))
        sources = [p for p, o in good.items() if o.key == best.key]
        reason = f"{len(sources)} of {len(peers)} peers offer the same state of round {best.round}"
        if len(sources) == 1:
            reason += "; nobody else could confirm it"
        path = self._folder / f"download-{best.key.hex()[:16]}.partial"
        done = self._resume(path, best)
        todo: asyncio.Queue[int] = asyncio.Queue()
        for index in range(len(best.chunk_hashes)):
            if index not in done:
                todo.put_nowait(index)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, best.size)
            self._progress(len(done) * best.chunk_size, best.size)
            await asyncio.gather(*(self._fetch(peer, best, todo, done, descriptor, path) for peer in sources))
        finally:
            os.close(descriptor)
        if len(done) < len(best.chunk_hashes):
            return None
        try:
            state = await self._clock.run(lambda: read_state_file(path, self._d))
            if (state.hash, state.lineage, state.round) != (best.state_hash, best.lineage, best.round):
                raise ValueError("the file holds another state than was offered")
        except ValueError as error:
            for peer in sources:
                self._trouble(peer, PeerFault("bad_state", str(error)))
            return None
        finally:
            self._forget(path)
        return state, best.commit, reason

    async def _ask(self, peer: str, lineage: bytes | None) -> tuple[str, _Offer | None]:
        try:
            stream = await self._open(peer, "State", OPEN_SECONDS)
            try:
                await stream.send(StateRequest(lineage=lineage or b"").SerializeToString())
                return peer, check_offer(await stream.recv(OFFER_SECONDS), self._d)
            finally:
                stream.cancel("offer read")
        except _TROUBLE as error:
            self._trouble(peer, error)
            return peer, None

    async def _fetch(
        self, peer: str, offer: _Offer, todo: asyncio.Queue[int], done: set[int], descriptor: int, path: Path
    ) -> None:
        """Take chunks off the list until it is empty or this source fails; unfinished ones go back."""
        while not todo.empty():
            taken = []
            while len(taken) < CHUNKS_PER_REQUEST and not todo.empty():
                taken.append(todo.get_nowait())
            try:
                stream = await self._open(peer, "State", OPEN_SECONDS)
                try:
                    await self._chunks(stream, offer, taken, done, descriptor)
                finally:
                    stream.cancel("chunks read")
                    self._remember(path, done)
            except _TROUBLE as error:
                self._trouble(peer, error)
                return
            finally:
                for index in taken:
                    if index not in done:
                        todo.put_nowait(index)

    async def _chunks(self, stream: Stream, offer: _Offer, wanted: list[int], done: set[int], descriptor: int) -> None:
        await stream.send(StateRequest(lineage=offer.lineage, chunks=wanted).SerializeToString())
        if check_offer(await stream.recv(OFFER_SECONDS), self._d).key != offer.key:
            raise PeerFault("state_moved_on", "the source serves another state now")
        for expected in wanted:
            head = StateChunk()
            parse(head, await stream.recv(CHUNK_SECONDS))
            size = min(offer.chunk_size, offer.size - expected * offer.chunk_size)
            if head.index != expected or head.payload_size != size:
                raise PeerFault(
                    "bad_message", f"chunk {head.index} of {head.payload_size} bytes, expected {expected}, {size}"
                )
            data = bytearray()
            while len(data) < size:
                data += await stream.recv(CHUNK_SECONDS)
            if sha256(bytes(data)) != offer.chunk_hashes[expected]:
                raise PeerFault("bad_state", f"chunk {expected} has another hash than offered")
            await self._clock.run(lambda d=bytes(data), at=expected * offer.chunk_size: os.pwrite(descriptor, d, at))
            done.add(expected)
            self._progress(min(len(done) * offer.chunk_size, offer.size), offer.size)
            if self._hold is not None:
                await self._hold("downloading", offer.round)

    # ------------------------------------------------------------------------------------------------ resuming

    def _resume(self, path: Path, offer: _Offer) -> set[int]:
        """Chunks of an earlier, interrupted download of the same offer that are there and still verify."""
        for other in self._folder.glob("download-*.partial*"):
            if not other.name.startswith(path.name):
                other.unlink(missing_ok=True)
        try:
            listed = json.loads(path.with_name(path.name + ".json").read_text())
            with open(path, "rb") as file:
                good = set()
                for index in listed:
                    file.seek(index * offer.chunk_size)
                    if sha256(file.read(offer.chunk_size)) == offer.chunk_hashes[index]:
                        good.add(index)
                return good
        except (OSError, ValueError, TypeError, IndexError):
            return set()

    def _remember(self, path: Path, done: set[int]) -> None:
        path.with_name(path.name + ".json").write_text(json.dumps(sorted(done)))

    def _forget(self, path: Path) -> None:
        for name in (path, path.with_name(path.name + ".json")):
            with contextlib.suppress(OSError):
                name.unlink()


__all__ = ["StateClient", "StateServer", "check_offer", "decode_commit"]
