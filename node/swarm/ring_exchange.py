"""Moves the updates of one attempt: ring all-gather of sparse updates, and pulled repairs.

Theory of operation. The roster of an attempt fixes the ring order and the hash of every update. Each member pushes to its
next live successor what it holds, its own update first, everything else as it arrives; the successor says first what it
has already, so a later attempt never re-sends. A dead successor is skipped. When nothing arrives any more, or the
predecessor is dead, what lacks is pulled from its origin, then from anybody. Nothing is accepted that the roster (or, for
repairs, the commit) does not name by hash, so a peer can neither push junk nor make memory grow. An update that turns out
to be lost here when it is to be sent (evicted, or its file damaged) is left out, and pulled again if the attempt needs it.

Covers streams "Push" and "Pull". Does not cover: who takes part and when it ends (protocol/ballot.py), the arithmetic
(aggregation/merge.py), or the dense exchange (dense_exchange.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass

from ...aggregation.ring import RingAllGather
from ...protocol import limits
from ...protocol.ballot_messages import Header, update_hash
from ...protocol.errors import PeerFault
from ...protocol.transport import Clock, DialError, Stream, StreamClosed
from ...protocol.wire_pb2 import PullRequest, PushDone, PushHave, PushHello, Signed, UpdateStart
from .frames import concerning, parse, send_payload
from .updates import UpdateStore

OpenStream = Callable[[str, str, float], Awaitable[Stream]]

OPEN_SECONDS = 5.0
# The next frame of a transfer under way. A live, slow uplink still moves a frame in this time.
FRAME_SECONDS = 20.0
# A push for an attempt whose roster has not reached us yet is kept waiting this long, then refused.
EARLY_PUSH_SECONDS = 10.0
# An idle push stream waits for its sender's own arrivals; the attempt's end cancels it long before.
IDLE_SECONDS = 600.0
# Without any new update for this long, what lacks is pulled.
STALL_SECONDS = 3.0


@dataclass(frozen=True)
class Transfer:
    """What one attempt has to move.

    Attributes:
        key: (round, base lineage, attempt).
        order: peers in ring order, this node among them.
        headers: update hash → header, as the roster names them.
    """

    key: tuple[int, bytes, int]
    order: tuple[str, ...]
    headers: dict[bytes, Header]

    def origin(self, update_hash: bytes) -> str:
        return self.headers[update_hash].dot.peer


class RingExchange:
    """Runs at most one attempt's transfer at a time; serves pushes of that attempt and pulls of anything held."""

    def __init__(
        self,
        *,
        me: str,
        clock: Clock,
        open_stream: OpenStream,
        store: UpdateStore,
        is_dead: Callable[[str], bool],
        on_arrival: Callable[[], None],
        on_trouble: Callable[[str, BaseException], None],
        before_payload: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._me = me
        self._clock = clock
        self._open = open_stream
        self._store = store
        self._is_dead = is_dead
        self._on_arrival = on_arrival
        self._on_trouble = on_trouble
        self._before_payload = before_payload
        self._transfer: Transfer | None = None
        self._started = asyncio.Event()
        self._arrived = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._repair: asyncio.Task[None] | None = None
        self._incoming: set[Stream] = set()
        self._arrivals = 0

    # ------------------------------------------------------------------------------------------------ one attempt

    def begin(self, transfer: Transfer) -> None:
        """Start moving; replaces whatever ran before."""
        self.end("next attempt")
        self._transfer = transfer
        for header in transfer.headers.values():  # a convener that names two updates of one origin is found out so
            self._store.witness(header)
        self._started.set()
        if len(transfer.order) > 1 and transfer.headers:
            self._own(lambda: self._push_loop(transfer), "push")
            self._repair = self._own(lambda: self._repair_loop(transfer), "repair")

    def end(self, reason: str) -> None:
        """Stop at once: cancels our streams and those that are being pushed to us."""
        self._transfer = None
        self._started.clear()
        for task in self._tasks:
            task.cancel(reason)
        self._tasks.clear()
        self._repair = None
        for stream in self._incoming:
            stream.cancel(reason)
        self._incoming.clear()

    def held(self) -> list[bytes]:
        """Hashes of the current transfer's updates that are complete and verified, in a fixed order."""
        transfer = self._transfer
        return [h for h in sorted(transfer.headers) if self._store.has(h)] if transfer else []

    def missing(self) -> list[bytes]:
        transfer = self._transfer
        return [h for h in sorted(transfer.headers) if not self._store.has(h)] if transfer else []

    def _own(self, work: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work()
            except Exception as error:
                self._on_trouble(name, error)

        task = asyncio.ensure_future(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _note_arrival(self) -> None:
        self._arrivals += 1
        self._arrived.set()
        self._arrived = asyncio.Event()
        self._on_arrival()

    # ------------------------------------------------------------------------------------------------ push

    async def _push_loop(self, transfer: Transfer) -> None:
        """Push to the next live successor; fall through to the one after it when that fails."""
        ring = RingAllGather(transfer.order, self._me, {h: transfer.origin(h) for h in transfer.headers})
        for successor in ring.successors:
            if self._is_dead(successor):
                continue
            try:
                await self._push_to(successor, transfer, ring)
                return
            except (StreamClosed, DialError, asyncio.TimeoutError, PeerFault) as error:
                self._on_trouble(concerning(successor, "push", error), error)

    async def _push_to(self, successor: str, transfer: Transfer, ring: RingAllGather[str]) -> None:
        stream = await self._open(successor, "Push", OPEN_SECONDS)
        try:
            round_, lineage, attempt = transfer.key
            await stream.send(PushHello(round=round_, base_lineage=lineage, attempt=attempt).SerializeToString())
            have = PushHave()
            parse(have, await stream.recv(EARLY_PUSH_SECONDS + FRAME_SECONDS))
            has = {h for h in have.update_hashes if h in transfer.headers}
            while not ring.finished_with(successor, has):
                arrived = self._arrived
                for hash_ in self.held():
                    ring.mark_held(hash_)
                ready = ring.to_send(successor, has)
                for hash_ in ready:
                    if await self._send_update(stream, hash_):
                        has.add(hash_)
                    else:
                        ring.mark_lost(hash_)
                if not ready:
                    await arrived.wait()
            await stream.done_sending()
            parse(PushDone(), await stream.recv(FRAME_SECONDS))
        finally:
            stream.cancel("push ended")

    async def _send_update(self, stream: Stream, hash_: bytes) -> bool:
        """False, with nothing sent, when the update is lost here: then it is pulled again if the attempt needs it."""
        try:
            header, payload = self._store.load(hash_)
        except KeyError:
            self._repair_again()
            return False
        start = UpdateStart(header=Signed.FromString(header.signed), payload_size=len(payload))
        await stream.send(start.SerializeToString())
        if self._before_payload is not None:
            await self._before_payload()
        await send_payload(stream, payload)
        return True

    async def serve_push(self, peer: str, stream: Stream) -> None:
        """Handler of "Push" streams."""
        hello = PushHello()
        parse(hello, await stream.recv(FRAME_SECONDS))
        transfer = await self._transfer_of((hello.round, hello.base_lineage, hello.attempt))
        if transfer is None or peer not in transfer.order:
            stream.cancel("no such attempt here")
            return
        self._incoming.add(stream)
        try:
            await stream.send(PushHave(update_hashes=self.held()).SerializeToString())
            received = 0
            while True:
                try:
                    frame = await stream.recv(IDLE_SECONDS)
                except StreamClosed as closed:
                    if not closed.clean:
                        raise
                    break
                await self._receive_update(stream, frame, transfer.headers.keys())
                received += 1
            await stream.send(PushDone(received=received).SerializeToString())
            await stream.done_sending()
        finally:
            self._incoming.discard(stream)

    async def _transfer_of(self, key: tuple[int, bytes, int]) -> Transfer | None:
        """The transfer a push names, waiting a little for a roster that is still on its way."""
        deadline = self._clock.now() + EARLY_PUSH_SECONDS
        while True:
            if self._transfer is not None and self._transfer.key == key:
                return self._transfer
            if self._transfer is not None and self._transfer.key[2] > key[2]:
                return None
            left = deadline - self._clock.now()
            if left <= 0:
                return None
            try:
                await asyncio.wait_for(self._started.wait(), min(left, 0.5))
                if self._transfer is not None and self._transfer.key != key:
                    await self._clock.sleep(min(left, 0.05))
            except asyncio.TimeoutError:
                continue

    async def _receive_update(self, stream: Stream, frame: bytes, wanted: Collection[bytes]) -> None:
        """Receive one update whose start is `frame`. Only what is wanted, by hash, is read at all."""
        start = UpdateStart()
        parse(start, frame)
        hash_ = update_hash(start.header)
        if hash_ not in wanted:
            with contextlib.suppress(PeerFault):
                self._store.suspect(start.header)
            raise PeerFault("unsolicited_update", hash_.hex()[:16])
        receiving = self._store.begin(start.header)  # checks signature, form and size
        if receiving.size != start.payload_size:
            raise PeerFault("bad_message", f"announced {start.payload_size} bytes, header says {receiving.size}")
        left = receiving.size
        while left > 0:
            piece = await stream.recv(FRAME_SECONDS)
            left -= len(piece)
            receiving.feed(piece)
        receiving.finish()
        self._note_arrival()

    # ------------------------------------------------------------------------------------------------ repair

    def _repair_again(self) -> None:
        """Something that was held is not any more; the loop ended when all was there."""
        transfer = self._transfer
        if transfer is not None and self._repair is not None and self._repair.done():
            self._repair = self._own(lambda: self._repair_loop(transfer), "repair")

    async def _repair_loop(self, transfer: Transfer) -> None:
        """Pull what lacks when nothing arrives for STALL_SECONDS."""
        while self.missing():
            before = self._arrivals
            await self._clock.sleep(STALL_SECONDS)
            missing = self.missing()
            if missing and self._arrivals == before:
                origins = [transfer.origin(h) for h in missing]
                await self.pull(missing, dict.fromkeys([*origins, *transfer.order]))

    async def pull(self, hashes: Iterable[bytes], holders: Iterable[str], soon: Collection[bytes] = ()) -> list[bytes]:
        """Ask the holders in turn; returns the hashes that nobody gave. Every failure is reported, none is raised.

        Args:
            soon: what will be wanted next, taken along from whoever is asked.
        """
        missing = [h for h in hashes if not self._store.has(h)]
        for holder in holders:
            if not missing:
                break
            if holder == self._me or self._is_dead(holder):
                continue
            try:
                await self._pull_from(holder, [*missing, *(h for h in soon if not self._store.has(h))])
            except (StreamClosed, DialError, asyncio.TimeoutError, PeerFault) as error:
                self._on_trouble(concerning(holder, "pull", error), error)
            missing = [h for h in missing if not self._store.has(h)]
        return missing

    async def _pull_from(self, holder: str, hashes: list[bytes]) -> None:
        stream = await self._open(holder, "Pull", OPEN_SECONDS)
        try:
            await stream.send(PullRequest(update_hashes=hashes[: limits.ROSTER_MAX]).SerializeToString())
            await stream.done_sending()
            wanted = set(hashes[: limits.ROSTER_MAX])
            while wanted:
                try:
                    frame = await stream.recv(FRAME_SECONDS)
                except StreamClosed as closed:
                    if not closed.clean:
                        raise
                    return
                await self._receive_update(stream, frame, wanted)
                wanted = {h for h in wanted if not self._store.has(h)}
        finally:
            stream.cancel("pull ended")

    async def serve_pull(self, peer: str, stream: Stream) -> None:
        """Handler of "Pull" streams: sends what is held of what is asked, and ends. What is lost here is left out."""
        request = PullRequest()
        parse(request, await stream.recv(FRAME_SECONDS))
        if len(request.update_hashes) > limits.ROSTER_MAX:
            raise PeerFault("bad_message", f"{len(request.update_hashes)} updates asked, limit {limits.ROSTER_MAX}")
        for hash_ in dict.fromkeys(request.update_hashes):
            if self._store.has(hash_):
                await self._send_update(stream, hash_)
        await stream.done_sending()
