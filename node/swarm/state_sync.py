"""Downloading the shared state from several peers at once.

Theory of operation. Everybody is asked for an offer (lineage, state hash, hash of every chunk). The offer that most peers
make is believed; while no two agree although several answered (a commit is just spreading) they are asked again, a few
times. Then every source that made it fetches chunks off one common list, and an idle source takes over what a slow one has
not delivered. A chunk must come within a multiple of what chunks take, measured; a source that fails, stalls or lies is
dropped and costs its own chunks at most. Verified chunks are kept in a partial file beside their bitmap, so that a
restarted download asks for the same state first and goes on. At the end the state hash is recomputed from the arrays.

Does not cover: serving (state_server.py), the bookkeeping of chunks (chunks.py), the manifest (manifest.py), or whether
the state may be adopted (the caller).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Generic, TypeVar

from ...protocol import limits
from ...protocol.ballot_wire import decode_commit
from ...protocol.errors import PeerFault
from ...protocol.transport import Clock, DialError, Stream, StreamClosed
from ...protocol.version import sha256
from ...protocol.wire_pb2 import Commit as WireCommit
from ...protocol.wire_pb2 import StateChunk, StateOffer, StateRequest
from ..store.checkpoint import read_state_file
from ..store.disk import REAL_DISK, Disk
from .chunks import STEAL_SECONDS, ChunkList, Offer, PartialFile
from .frames import parse, receive_payload
from .state import SharedState
from .state_server import StateServer, chunk_bytes

OpenStream = Callable[[str, str, float], Awaitable[Stream]]
OPEN_SECONDS = 5.0
# The other side hashes its state first, after the training step under way.
OFFER_SECONDS = 15.0
# Once two agree, the others get this long to join in.
OFFER_GRACE_SECONDS = 1.0
# How often, and after what pause, offers are asked for while no two peers agree.
CONFIRM_TRIES = 4
CONFIRM_SECONDS = 0.5
# A coordinate of a state in ring mode: theta and at most one buffer, fp32.
RING_BYTES = 8
_TROUBLE = (StreamClosed, DialError, asyncio.TimeoutError, PeerFault)


def check_offer(frame: bytes, d: int, run_id: bytes | None, each: int = RING_BYTES) -> Offer:
    """Decode an offer of a state of d coordinates, of at most `each` bytes per coordinate and a header.

    Without a `run_id` its commit record is left out. Raises PeerFault.
    """
    offer = StateOffer()
    parse(offer, frame)
    limit = min(limits.STATE_BYTES_MAX, each * d + 16 * 1024 * 1024)
    if not 0 < offer.size <= limit or offer.chunk_size != chunk_bytes(offer.size):
        raise PeerFault("bad_message", f"offers {offer.size} bytes by {offer.chunk_size}, limit {limit}")
    if -(-offer.size // offer.chunk_size) != len(offer.chunk_hashes):
        raise PeerFault("bad_message", f"{len(offer.chunk_hashes)} chunk hashes for {offer.size} bytes")
    if any(len(h) != 32 for h in (offer.lineage, offer.state_hash, *offer.chunk_hashes)):
        raise PeerFault("bad_message", "a hash of another size than 32 bytes")
    commit = offer.commit if run_id is not None and offer.HasField("commit") else None
    if run_id is not None and commit is not None and decode_commit(commit, run_id).value.lineage != offer.lineage:
        raise PeerFault("bad_message", "the commit record ends another lineage")
    return Offer(
        key=sha256(offer.round.to_bytes(8, "big"), offer.lineage, offer.state_hash, *offer.chunk_hashes),
        round=offer.round,
        lineage=offer.lineage,
        state_hash=offer.state_hash,
        size=offer.size,
        chunk_size=offer.chunk_size,
        chunk_hashes=tuple(offer.chunk_hashes),
        commit=commit,
    )


def choose(offers: dict[bytes, dict[str, Offer]], prefer: bytes, asked: int) -> tuple[bytes, str]:
    """Which offer is believed, and why. Pure.

    Args:
        offers: key → peer → offer; not empty.
        prefer: key of an interrupted download; wins among those that as many as two peers make.
        asked: how many peers were asked.
    """

    def rank(key: bytes) -> tuple[bool, bool, int, int, bytes]:
        made = offers[key]
        agreed = len(made) >= 2
        return agreed, agreed and key == prefer, len(made), next(iter(made.values())).round, key

    best = max(offers, key=rank)
    made = offers[best]
    reason = f"{len(made)} of {asked} peers offer the same state of round {next(iter(made.values())).round}"
    if len(made) == 1:
        others = len({peer for o in offers.values() for peer in o} - made.keys())
        reason += f"; {others} others offer other states" if others else "; nobody else could confirm it"
    return best, reason


State = TypeVar("State")


def read_ring_state(path: Path, offer: Offer, d: int, disk: Disk) -> SharedState:
    """A downloaded state of ring mode. Raises ValueError when it is not what was offered."""
    state = read_state_file(path, d, disk)
    if (state.hash, state.lineage, state.round) != (offer.state_hash, offer.lineage, offer.round):
        raise ValueError("the file holds another state than was offered")
    return state


class StateClient(Generic[State]):
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
        read: Callable[[Path, Offer, int, Disk], State],
        bytes_each: int = RING_BYTES,
        progress: Callable[[int, int], None] = lambda done, total: None,
        hold: Callable[[str, int], Awaitable[None]] | None = None,
        disk: Disk = REAL_DISK,
    ) -> None:
        """
        Args:
            folder: for the partial file; on the data directory's disk.
            trouble: told of every source that failed, with its peer id.
            read: the downloaded file's state, checked against the offer; raises ValueError.
            bytes_each: bytes of the largest file per coordinate.
            progress: bytes done and in all.
            hold: test-only: awaited with ("downloading", round) before a received chunk counts.
        """
        self._clock, self._open, self._folder, self._disk = clock, open_stream, folder, disk
        self._d, self._run_id = d, run_id
        self._trouble, self._progress, self._hold = trouble, progress, hold
        self._read, self._bytes_each = read, bytes_each

    async def download(
        self, peers: list[str], lineage: bytes | None = None
    ) -> tuple[State, WireCommit | None, str] | None:
        """The state (and the record of its last commit) and why it is believed; None when no source was good enough.

        After None the partial file stays: the next call goes on where this one ended, if the state is still offered.

        Raises OSError when the partial file cannot be written.
        """
        prefer, interrupted = await self._clock.run(lambda: PartialFile.interrupted(self._folder, self._disk))
        offers = await self._gather_offers(peers, lineage, interrupted)
        if not offers:
            return None
        key, reason = choose(offers, prefer, len(peers))
        sources = offers[key]
        offer = max(sources.values(), key=lambda o: o.commit is not None)
        partial = PartialFile(self._folder, offer, self._disk)
        try:
            await self._clock.run(partial.open)
            await self._fetch_all(sorted(sources), partial)
        finally:
            partial.close()
        if len(partial.done) < len(offer.chunk_hashes):
            return None
        try:
            state = await self._clock.run(lambda: self._read(partial.path, offer, self._d, self._disk))
        except ValueError as error:
            for peer in sorted(sources):
                self._trouble(peer, PeerFault("bad_state", str(error)))
            return None
        finally:
            partial.forget()
        return state, offer.commit, reason

    # ------------------------------------------------------------------------------------------------ offers

    async def _gather_offers(
        self, peers: list[str], lineage: bytes | None, interrupted: bytes
    ) -> dict[bytes, dict[str, Offer]]:
        """key → peer → offer, over a few rounds of asking while no two peers agree."""
        offers: dict[bytes, dict[str, Offer]] = {}
        for attempt in range(CONFIRM_TRIES):
            if attempt:
                await self._clock.sleep(CONFIRM_SECONDS)
            for peer, offer in (await self._ask_all(peers, lineage or interrupted)).items():
                if lineage is None or offer.lineage == lineage:
                    offers.setdefault(offer.key, {})[peer] = offer
            answered = {peer for made in offers.values() for peer in made}
            if len(answered) < 2 or any(len(made) >= 2 for made in offers.values()):
                break
        return offers

    async def _ask_all(self, peers: list[str], lineage: bytes) -> dict[str, Offer]:
        """Everybody's offer, in the order of `peers`; a silent one is not waited for once two others agree."""
        found: dict[str, Offer] = {}

        async def ask(peer: str) -> None:
            try:
                found[peer] = await asyncio.wait_for(self._ask(peer, lineage), OPEN_SECONDS + OFFER_SECONDS)
            except _TROUBLE as error:
                self._trouble(peer, error)

        tasks = [asyncio.ensure_future(ask(peer)) for peer in peers]
        try:
            pending = set(tasks)
            while pending:
                keys = [offer.key for offer in found.values()]
                agreed = len(keys) > len(set(keys))
                done, pending = await asyncio.wait(
                    pending,
                    timeout=OFFER_GRACE_SECONDS if agreed else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if agreed and not done:
                    break
        finally:
            await _stop(tasks)
        return {peer: found[peer] for peer in peers if peer in found}

    async def _ask(self, peer: str, lineage: bytes) -> Offer:
        stream = await self._open(peer, "State", OPEN_SECONDS)
        try:
            await stream.send(StateRequest(lineage=lineage).SerializeToString())
            return check_offer(await stream.recv(OFFER_SECONDS), self._d, self._run_id, self._bytes_each)
        finally:
            stream.cancel("offer read")

    # ------------------------------------------------------------------------------------------------ chunks

    async def _fetch_all(self, sources: list[str], partial: PartialFile) -> None:
        """Every missing chunk, until all are there or no source is left. Raises OSError."""
        count = len(partial.offer.chunk_hashes)
        chunks = ChunkList([i for i in range(count) if i not in partial.done], len(sources))
        self._show(partial)
        changed = asyncio.Event()
        tasks = [asyncio.ensure_future(self._work(peer, partial, chunks, changed)) for peer in sources]
        for task in tasks:
            task.add_done_callback(lambda _: changed.set())
        try:
            while len(partial.done) < count and not all(task.done() for task in tasks):
                for task in tasks:
                    if task.done():
                        task.result()  # a source's failure ends its task quietly; what is raised here is our disk's
                changed.clear()
                await changed.wait()
        finally:
            await _stop(tasks)
        if len(partial.done) < count:
            for task in tasks:
                if not task.cancelled():
                    task.result()

    async def _work(self, peer: str, partial: PartialFile, chunks: ChunkList, changed: asyncio.Event) -> None:
        """One source: takes chunks until it fails or is stopped."""
        while True:
            taken = chunks.take(peer, self._clock.now())
            if not taken:
                await self._clock.sleep(STEAL_SECONDS / 4)
                continue
            try:
                await self._request(peer, taken, partial, chunks, changed)
            except _TROUBLE as error:
                chunks.sources -= 1
                self._trouble(peer, error)
                return
            finally:
                chunks.give_back(peer)
                partial.remember()

    async def _request(
        self, peer: str, wanted: list[int], partial: PartialFile, chunks: ChunkList, changed: asyncio.Event
    ) -> None:
        offer = partial.offer
        stream = await self._open(peer, "State", OPEN_SECONDS)
        try:
            request = StateRequest(lineage=offer.lineage, chunks=wanted).SerializeToString()
            await asyncio.wait_for(stream.send(request), OPEN_SECONDS)
            if check_offer(await stream.recv(OFFER_SECONDS), self._d, None, self._bytes_each).key != offer.key:
                raise StreamClosed("the source does not serve this state any more")
            for place, index in enumerate(wanted):
                if partial.done.issuperset(wanted[place:]):
                    return
                started, size = self._clock.now(), offer.length(index)
                limit = chunks.deadline_s(peer, size)
                data = await asyncio.wait_for(_receive_chunk(stream, index, size, limit), limit)
                if sha256(data) != offer.chunk_hashes[index]:
                    raise PeerFault("bad_state", f"chunk {index} has another hash than offered")
                chunks.measured(peer, max(1e-6, self._clock.now() - started), size)
                if self._hold is not None:
                    await self._hold("downloading", offer.round)
                if index not in partial.done:
                    # Not handed to the worker thread, where it would wait for a training step: it goes to the page cache.
                    partial.write(index, data)
                    chunks.finished(index)
                    self._show(partial)
                    changed.set()
        finally:
            stream.cancel("chunks read")

    def _show(self, partial: PartialFile) -> None:
        self._progress(sum(partial.offer.length(i) for i in partial.done), partial.offer.size)


async def _receive_chunk(stream: Stream, index: int, size: int, timeout_s: float) -> bytes:
    """One chunk of exactly `size` bytes. Raises PeerFault at the first byte too many, and for a frame without any."""
    head = StateChunk()
    parse(head, await stream.recv(timeout_s))
    if (head.index, head.payload_size) != (index, size):
        detail = f"chunk {head.index} of {head.payload_size} bytes, expected {index} of {size}"
        raise PeerFault("bad_message", detail)
    return await receive_payload(stream, size, timeout_s, fault="bad_message")


async def _stop(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel what still runs and see every outcome."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


__all__ = ["Offer", "StateClient", "StateServer", "check_offer", "choose"]
