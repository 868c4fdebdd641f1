"""The dense exchange of one attempt: ring reduce-scatter of the weighted updates, then all-gather of the reduced chunks.

The schedule and the arithmetic are aggregation/ring.py's; here are the streams. Partial sums cannot be repaired, so any
failure fails the attempt, and the ballot starts the next one whole. What can be repaired is the end: a member that did not
get all reduced chunks fetches them by the hashes that the commit names ("Chunks" streams).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from ...aggregation.merge import capped_weights, contribution
from ...aggregation.ring import RingReduce, chunk_bounds, join_chunks, reduced_bytes_max
from ...protocol import limits
from ...protocol.ballot_messages import Roster, Value
from ...protocol.errors import PeerFault
from ...protocol.transport import Clock, DialError, Stream, StreamClosed
from ...protocol.version import sha256
from ...protocol.wire_pb2 import DenseChunk, DenseHello, PullRequest
from .frames import concerning, parse, receive_payload, send_payload
from .ring_exchange import EARLY_PUSH_SECONDS, FRAME_SECONDS, OPEN_SECONDS, OpenStream
from .state import MergeRules

# One hop of a large model over a slow uplink; the attempt's own deadline usually ends it sooner.
HOP_SECONDS = 120.0
_TROUBLE = (StreamClosed, DialError, asyncio.TimeoutError, PeerFault)


class DenseExchange:
    """At most one attempt at a time; keeps the reduced chunks of the last completed one for those who missed them."""

    def __init__(
        self,
        *,
        me: str,
        clock: Clock,
        open_stream: OpenStream,
        d: int,
        bits: int,
        rules: MergeRules,
        on_complete: Callable[[tuple[bytes, ...]], None],
        on_failure: Callable[[int, str], None],
        on_trouble: Callable[[str, BaseException], None],
        before_chunk: Callable[[], Awaitable[None]] | None = None,
        record: Callable[[bytes], None] | None = None,
    ) -> None:
        """
        Args:
            record: takes every reduced chunk of a committed round; blocks.
            bits: how reduced chunks travel (8, 16 or 32).
            on_complete: told the hashes of all reduced chunks, in order.
            on_failure: told the attempt that cannot complete any more, and why.
        """
        self._me, self._clock, self._open = me, clock, open_stream
        self._d, self._bits, self._rules = d, bits, rules
        self._on_complete, self._on_failure, self._on_trouble = on_complete, on_failure, on_trouble
        self._before_chunk, self._record = before_chunk, record
        self._key: tuple[int, bytes, int] | None = None
        self._order: tuple[str, ...] = ()
        self._reduce: RingReduce | None = None
        self._advanced = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._incoming: Stream | None = None
        self._chunks: dict[bytes, bytes] = {}

    # ------------------------------------------------------------------------------------------------ one attempt

    def begin(self, roster: Roster, vector: np.ndarray | None) -> None:
        """Start. `vector`: this peer's own update fp32 [d], or None when the roster has none of it."""
        self.end("next attempt")
        headers = [e.header for e in roster.entries if e.header is not None]
        weights = capped_weights(
            {h.dot.peer: h.weight for h in headers}, self._rules.weight_max, self._rules.weight_median_multiple_max
        )
        total = sum(weights.values())
        mine = weights.get(self._me, 0)
        if vector is None or not mine:
            scaled = np.zeros(self._d, np.float32)
        else:
            scaled = (vector.astype(np.float64) * (mine / total)).astype(np.float32)
        self._key = (roster.round, roster.base_lineage, roster.attempt)
        self._order = roster.peers
        self._reduce = RingReduce(len(self._order), self._order.index(self._me), scaled, self._bits)
        if self._reduce.complete:
            return self._complete()
        self._task = asyncio.ensure_future(self._send_all(self._reduce, roster.attempt))

    def end(self, reason: str) -> None:
        """Stop at once."""
        self._key = None
        if self._task is not None:
            self._task.cancel(reason)
            self._task = None
        if self._incoming is not None:
            self._incoming.cancel(reason)
            self._incoming = None
        self._reduce = None
        self._signal()

    def _signal(self) -> None:
        self._advanced.set()
        self._advanced = asyncio.Event()

    def _complete(self) -> None:
        assert self._reduce is not None
        hashes = self._reduce.chunk_hashes()
        self._chunks = {h: self._reduce.payload(i) for i, h in enumerate(hashes)}
        self._on_complete(hashes)

    async def _send_all(self, reduce: RingReduce, attempt: int) -> None:
        successor = self._order[(self._order.index(self._me) + 1) % len(self._order)]
        key = self._key
        assert key is not None
        try:
            stream = await self._open(successor, "Dense", OPEN_SECONDS)
            try:
                hello = DenseHello(round=key[0], base_lineage=key[1], attempt=key[2])
                await stream.send(hello.SerializeToString())
                for hop in range(len(reduce.hops)):
                    while reduce.hop < hop:
                        await asyncio.wait_for(self._advanced.wait(), HOP_SECONDS)
                    await self._send_chunk(stream, hop, reduce.hops[hop].send, reduce.outgoing(hop))
                await stream.done_sending()
                await _until_read(stream)
                while not reduce.complete:
                    await asyncio.wait_for(self._advanced.wait(), HOP_SECONDS)
            finally:
                stream.cancel("dense exchange ended")
        except Exception as error:  # one of our own is reported, too: nobody else looks at this task
            self._on_trouble(concerning(successor, "dense exchange", error), error)
            if self._key == key:
                self._on_failure(attempt, f"to {successor[-6:]}: {error or type(error).__name__}")

    async def _send_chunk(self, stream: Stream, hop: int, chunk: int, payload: bytes) -> None:
        await stream.send(DenseChunk(hop=hop, chunk=chunk, payload_size=len(payload)).SerializeToString())
        if self._before_chunk is not None:
            await self._before_chunk()
        await send_payload(stream, payload)

    async def serve(self, peer: str, stream: Stream) -> None:
        """Handler of "Dense" streams: the predecessor's chunks of the attempt in progress."""
        hello = DenseHello()
        parse(hello, await stream.recv(FRAME_SECONDS))
        key = (hello.round, hello.base_lineage, hello.attempt)
        deadline = self._clock.now() + EARLY_PUSH_SECONDS
        while self._key != key:
            if self._clock.now() > deadline or (self._key is not None and self._key[2] > key[2]):
                return stream.cancel("no such attempt here")
            await self._clock.sleep(0.05)
        reduce = self._reduce
        at = self._order.index(self._me)
        if reduce is None or peer != self._order[at - 1] or self._incoming is not None:
            return stream.cancel("not the predecessor of this attempt")
        self._incoming = stream
        try:
            while not reduce.complete:
                hop = reduce.hop
                head = DenseChunk()
                parse(head, await stream.recv(HOP_SECONDS))
                if head.hop != hop or head.payload_size > reduce.max_bytes(hop):
                    raise PeerFault("bad_chunk", f"hop {head.hop} of {head.payload_size} bytes, expected hop {hop}")
                payload = await receive_payload(stream, head.payload_size, FRAME_SECONDS, fault="bad_chunk")
                await self._clock.run(lambda h=hop, p=payload: reduce.incoming(h, p))
                self._signal()
            if self._reduce is reduce:
                self._complete()
        except _TROUBLE as error:
            if self._key == key and not reduce.complete:
                self._on_failure(key[2], f"from {peer[-6:]}: {error or type(error).__name__}")
            raise
        finally:
            if self._incoming is stream:
                self._incoming = None

    # ------------------------------------------------------------------------------------------------ the result

    async def reduced(self, value: Value, holders: list[str]) -> np.ndarray | None:
        """int64 [d] of a committed dense round, fetching what lacks by hash; None when nobody has it."""
        # One round's chunks are kept at a time, whether they were reduced here or fetched.
        self._chunks = {h: self._chunks[h] for h in dict.fromkeys(value.chunk_hashes) if h in self._chunks}
        missing = [h for h in dict.fromkeys(value.chunk_hashes) if h not in self._chunks]
        sizes = {high - low for low, high in chunk_bounds(self._d, len(value.chunk_hashes))}
        bytes_max = max((reduced_bytes_max(size, self._bits) for size in sizes), default=0)
        for holder in holders:
            if not missing:
                break
            if holder == self._me:
                continue
            try:
                await self._fetch(holder, missing, bytes_max)
            except _TROUBLE as error:
                self._on_trouble(concerning(holder, "chunks", error), error)
            missing = [h for h in missing if h not in self._chunks]
        if missing:
            return None
        payloads = [self._chunks[h] for h in value.chunk_hashes]
        if (record := self._record) is not None:
            await self._clock.run(lambda: [record(payload) for payload in payloads])
        return await self._clock.run(lambda: _fixed(join_chunks(payloads, self._d, self._bits)))

    async def _fetch(self, holder: str, hashes: list[bytes], bytes_max: int) -> None:
        stream = await self._open(holder, "Chunks", OPEN_SECONDS)
        try:
            await stream.send(PullRequest(update_hashes=hashes).SerializeToString())
            for wanted in hashes:
                head = DenseChunk()
                parse(head, await stream.recv(FRAME_SECONDS))
                if head.payload_size > bytes_max:
                    raise PeerFault("bad_chunk", f"{head.payload_size} bytes, at most {bytes_max} are possible")
                payload = await receive_payload(stream, head.payload_size, FRAME_SECONDS, fault="bad_chunk")
                if sha256(payload) != wanted:
                    raise PeerFault("bad_chunk", "another chunk than was asked for")
                self._chunks[wanted] = payload
        finally:
            stream.cancel("chunks read")

    async def serve_chunks(self, peer: str, stream: Stream) -> None:
        """Handler of "Chunks" streams: all that are asked for, or none."""
        request = PullRequest()
        parse(request, await stream.recv(FRAME_SECONDS))
        if len(request.update_hashes) > limits.CHUNKS_MAX:
            raise PeerFault("bad_message", f"{len(request.update_hashes)} chunks asked, limit {limits.CHUNKS_MAX}")
        if not all(h in self._chunks for h in request.update_hashes):
            return stream.cancel("not all of these chunks are here")
        for index, wanted in enumerate(request.update_hashes):
            await self._send_chunk(stream, 0, index, self._chunks[wanted])
        await stream.done_sending()


def _fixed(mean: np.ndarray) -> np.ndarray:
    """In 2^-40 units; a mean that reaches 1 somewhere (or is not finite) is no step at all."""
    fixed = contribution(mean, 1.0)
    return np.zeros(mean.size, np.int64) if fixed is None else fixed


async def _until_read(stream: Stream) -> None:
    """Wait until the other side has ended its part: cancelling before would throw away what is still on the way."""
    try:
        await stream.recv(HOP_SECONDS)
    except StreamClosed as closed:
        if not closed.clean:
            raise
