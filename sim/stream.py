"""Streams on the virtual network, and the two ends of the connection that carries them.

Covers: order, half-close, cancel, flow control; what a cut, a pause, a crash does to streams. Does not cover: listening and
dialing (transport.py), when bytes arrive (network.py).

Theory of operation. A connection is two `End`s that learn of each other only by what arrives. Each stream is two
`SimStream`s. What one puts is numbered and taken by the other in that order, however it travelled; only the frames of
"Control" are cast as messages, each on its own. What meets a cut path waits at the sender (`_stalled`) and is sent anew
once the path is whole; an end that could not have got an answer for as long as keepalive allows breaks, be it for a cut, a
pause or lost power. A process that is killed is different: its machine resets what it had open.

Where this departs from gRPC: a broken connection does not reconnect by itself, and who waits for flow control may go on as
soon as the other side has read, without word of it having to travel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

from ..protocol import limits
from ..protocol.handshake import plain
from ..protocol.transport import Call, StreamClosed
from .loop import nanoseconds
from .network import Count, Path
from .process import SimFuture, SimHandle, SimTask

if TYPE_CHECKING:
    from .transport import SimTransport

# Bytes of one stream on their way or unread; the sender waits then, as for HTTP/2's flow control. The frame that reaches
# it goes through.
WINDOW_BYTES = 1024 * 1024
MESSAGES = "Control"  # the method whose frames are messages: best effort
# The end of a connection follows its last frame: a reader that is ready gets to read that.
_AFTER_NS = 100_000
FOREVER_S = 1e9  # as good as no deadline, and fits in nanoseconds


class _Reset:
    """The dialed side gave the stream up."""


_RESET = _Reset()


class _Enough:
    """The taker of `each` wants no more."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


class SimStream:
    """One end of a stream."""

    __slots__ = ("end", "other", "method", "task", "_loop", "_count", "_accepted", "_inbox", "_early",
        "_expected", "_reader", "_deadline", "_timer", "_writer", "_in_flight", "_seq", "_stalled", "_last_ns",
        "_closed", "_other_done", "_half_closed", "_taker", "_last_taken_ns")  # fmt: skip

    other: SimStream

    def __init__(self, end: End, method: str, *, accepted: bool) -> None:
        self.end, self.method = end, method
        self.task: SimTask | None = None  # of the handler, on the accepting side
        self._loop = end.transport.network.loop
        self._count: Count = end.path.count(method)
        self._accepted = accepted
        # Arrived: frames, and what ends them. `_early` arrived before what it follows.
        # A list, though it is a queue: it is nearly always short, and a swarm of a thousand has a million of them.
        self._inbox: list[bytes | StreamClosed | _Enough] = []
        self._early: dict[int, Any] | None = None
        self._expected = 0
        self._reader: SimFuture | None = None
        self._taker: tuple[Callable[[bytes], bool], Context] | None = None  # who gets frames as they come
        self._last_taken_ns = 0
        self._deadline = 0
        self._timer: SimHandle | None = None  # at the deadline or earlier: one serves many reads
        # Sent.
        self._writer: SimFuture | None = None
        self._in_flight = 0  # bytes that we sent and the other side has not read
        self._seq = 0
        self._stalled: list[tuple[int, Any, int]] | None = None
        self._last_ns = 0  # arrival of what we sent last
        self._closed: StreamClosed | None = None  # why nothing more can be read or written here
        self._other_done: StreamClosed | None = None  # how the accepting side ended the stream
        self._half_closed = False
        end.streams[self] = None

    @property
    def closed(self) -> bool:
        """Whether nothing more can be read or written here."""
        return self._closed is not None

    # ------------------------------------------------------------------------------------------------ sending

    async def send(self, frame: bytes) -> None:
        size = len(frame)
        if size > limits.FRAME_BYTES_MAX:
            raise ValueError(f"frame of {size} bytes, limit {limits.FRAME_BYTES_MAX}")
        while not self.send_now(frame):
            over = self._closed or self._other_done
            if over is not None:
                raise StreamClosed(over.reason, clean=over.clean)
            if self._half_closed:
                raise StreamClosed("failed: the stream is half-closed")
            self._writer = self._loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None

    def send_now(self, frame: bytes) -> bool:
        size = len(frame)
        over = self._closed is not None or self._other_done is not None or self._half_closed
        if over or self._in_flight >= WINDOW_BYTES or size > limits.FRAME_BYTES_MAX:
            return False
        self.end.transport.sent_bytes += size
        count = self._count
        count.frames += 1
        count.bytes += size
        self.event("send", size)
        if self.method == MESSAGES:
            self._cast(frame, size)
        else:
            self._in_flight += size
            self.put(frame, size)
        return True

    async def done_sending(self) -> None:
        if self._closed is not None:
            raise StreamClosed(self._closed.reason, clean=self._closed.clean)
        if not self._accepted and not self._half_closed:
            self._half_closed = True
            self.put(StreamClosed("the other side is done", clean=True))

    def _cast(self, frame: bytes, size: int) -> None:
        path, count = self.end.path, self._count
        copies, self._last_ns = path.cast(size, self._last_ns, self.other._message, (frame, size))
        self._in_flight += copies * size
        if copies == 0:
            count.lost += 1
            self.event("drop", size)
        elif copies == 2:
            count.duplicated += 1
            self.event("dup", size)

    def put(self, item: Any, size: int = 0) -> None:
        """Send something that arrives, in order."""
        if not self.end.alive:
            return
        seq = self._seq
        self._seq += 1
        if self._stalled or self.end.path.cut:
            self._stall(seq, item, size)
        else:
            self._last_ns = self.end.path.carry(size, self._last_ns, self.other._arrive, (seq, item, size))

    def _stall(self, seq: int, item: Any, size: int) -> None:
        """The path is cut; keep this for later, even when the stream is over here."""
        self._stalled = self._stalled or []
        self._stalled.append((seq, item, size))
        self.end.streams[self] = None

    def resend(self) -> None:
        """The path is whole again."""
        stalled, self._stalled = self._stalled, None
        for seq, item, size in stalled or ():
            self._last_ns = self.end.path.carry(size, self._last_ns, self.other._arrive, (seq, item, size))
        if self._closed is not None:
            self.end.forget(self)

    def event(self, kind: str, size: int) -> None:
        path = self.end.path
        on_event = path.network.on_event
        if on_event is not None:
            on_event(kind, path.source.name, path.target.name, self.method, size)

    # ------------------------------------------------------------------------------------------------ receiving

    def _message(self, frame: bytes, size: int) -> None:
        """A message is there, or would be if the path were not cut by now."""
        sender = self.other
        if self._closed is not None or not self.end.alive or sender.end.path.cut:
            sender._in_flight -= size
            sender._count.lost += 1
            sender.event("drop", size)
            return
        sender.event("deliver", size)
        self._frame(frame)

    def _arrive(self, seq: int, item: Any, size: int) -> None:
        """Something of the ordered kind is there."""
        sender = self.other
        if not self.end.alive:
            return
        if sender.end.path.cut:
            if sender.end.alive:
                sender._stall(seq, item, size)
            return
        if isinstance(item, bytes):
            sender.event("deliver", size)
        if seq != self._expected:
            self._early = self._early or {}
            self._early[seq] = item
            return
        self._take(item)
        self._expected += 1
        while self._early and self._expected in self._early:
            self._take(self._early.pop(self._expected))
            self._expected += 1

    def _take(self, item: Any) -> None:
        if self._closed is not None:
            return
        if isinstance(item, bytes):
            self._frame(item)
        elif isinstance(item, StreamClosed):
            self._inbox.append(item)
            if not self._accepted:  # the call is over, though there may be frames to read
                self._other_done = item
                self.end.forget(self)
                wake(self._writer)
            wake(self._reader)
        elif isinstance(item, Call):
            transport = self.end.transport
            self._loop.post(self._loop.now_ns, transport.accept, (item, self), transport.process)
        else:
            self.close("cancelled: the other side gave the stream up", cancel_task=True)

    def _frame(self, frame: bytes) -> None:
        """A frame is there: for `each`, at once if its process runs and nothing waits before it; else it waits to be read."""
        process = self.end.transport.process
        if self._taker is None or self._inbox or (process is not None and process.held is not None):
            self._inbox.append(frame)
            wake(self._reader)
            return
        take, context = self._taker
        self._loop.ran = process
        try:
            if context.run(self._hand_over, frame, take):
                return
            self._inbox.append(_Enough())
        except Exception as error:
            self._inbox.append(_Enough(error))
        wake(self._reader)

    def _hand_over(self, frame: bytes, take: Callable[[bytes], bool]) -> bool:
        self._last_taken_ns = self._loop.now_ns
        self._was_read(frame)
        return take(frame)

    async def each(self, take: Callable[[bytes], bool], timeout_s: float) -> None:
        self._taker, self._last_taken_ns = (take, copy_context()), self._loop.now_ns
        idle_ns = nanoseconds(min(timeout_s, FOREVER_S))
        try:
            while True:
                try:
                    await self._wait((self._last_taken_ns + idle_ns - self._loop.now_ns) / 1e9)
                except asyncio.TimeoutError:
                    if self._loop.now_ns - self._last_taken_ns < idle_ns:
                        continue  # what came meanwhile was taken at once
                    raise
                item = self._inbox[0]
                if isinstance(item, StreamClosed):
                    raise StreamClosed(item.reason, clean=item.clean)
                del self._inbox[0]
                if isinstance(item, _Enough):
                    if item.error is not None:
                        raise item.error
                    return
                if not self._hand_over(item, take):
                    return
        finally:
            self._taker = None

    async def recv(self, timeout_s: float) -> bytes:
        inbox = self._inbox
        if not inbox:
            await self._wait(timeout_s)
        item = inbox[0]
        if isinstance(item, StreamClosed):
            raise StreamClosed(item.reason, clean=item.clean)
        assert isinstance(item, bytes)  # one reader at a time
        del inbox[0]
        self._was_read(item)
        return item

    def _was_read(self, frame: bytes) -> None:
        self.end.transport.received_bytes += len(frame)
        sender = self.other
        sender._in_flight -= len(frame)
        if sender._writer is not None:
            wake(sender._writer)

    async def _wait(self, timeout_s: float) -> None:
        """Until the inbox has something. Raises StreamClosed, asyncio.TimeoutError."""
        loop = self._loop
        deadline = loop.now_ns + nanoseconds(min(timeout_s, FOREVER_S))
        while not self._inbox:
            if self._closed is not None:
                raise StreamClosed(self._closed.reason, clean=self._closed.clean)
            if loop.now_ns >= deadline:
                raise asyncio.TimeoutError
            self._deadline = deadline
            if self._timer is None or self._timer.at_ns > deadline:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = loop.post(deadline, self._look_at_deadline, (), self.end.transport.process)
            self._reader = loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def _look_at_deadline(self) -> None:
        self._timer = None
        if self._reader is None:
            return
        if self._loop.now_ns >= self._deadline:
            wake(self._reader)
        else:
            self._timer = self._loop.post(self._deadline, self._look_at_deadline, (), self.end.transport.process)

    # ------------------------------------------------------------------------------------------------ the end

    def cancel(self, reason: str) -> None:
        if self._closed is not None:
            return
        if self._accepted:
            self.finish(StreamClosed(f"cancelled: {plain(reason[:200])}"))
            return
        if self._other_done is None:
            self.put(_RESET)
        self.close("cancelled: the stream was given up")

    def finish(self, how: StreamClosed) -> None:
        """The accepting side ends the stream; the other reads what was sent before, then `how`."""
        if self._closed is None:
            self.put(how)
            self.close("cancelled: the stream has ended" if how.clean else how.reason, cancel_task=True)

    def close(self, reason: str, *, cancel_task: bool = False) -> None:
        """Nothing more passes here; what arrived and was not read is lost."""
        if self._closed is not None:
            return
        self._closed = StreamClosed(reason)
        self._inbox.clear()
        self._early = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake(self._reader)
        wake(self._writer)
        if not self._stalled:
            self.end.forget(self)
        if cancel_task and self.task is not None and self.task is not asyncio.current_task(self._loop):
            self.task.cancel()


def wake(waiter: SimFuture | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class End:
    """One side of a connection, as its machine sees it."""

    __slots__ = ("transport", "path", "other", "streams", "alive", "room", "_timer")

    other: End

    def __init__(self, transport: SimTransport, path: Path) -> None:
        self.transport, self.path = transport, path
        self.streams: dict[SimStream, None] = {}
        self.room: list[SimFuture] = []  # who waits to open a stream
        self.alive = True
        self._timer: SimHandle | None = None  # keepalive's, while nobody could answer
        transport.ends[self] = None
        path.source.ends[self] = None

    def forget(self, stream: SimStream) -> None:
        self.streams.pop(stream, None)
        if self.room:
            wake(self.room[0])

    # ------------------------------------------------------------------------------------------------ keepalive

    def review(self) -> None:
        """Who can reach whom may have changed: see whether either end must be watched, or can go on."""
        self._review()
        self.other._review()

    def _review(self) -> None:
        if not self.alive:
            return
        if not self.path.cut:
            for stream in list(self.streams):
                stream.resend()
        other = self.other
        silent = self.path.cut or other.path.cut or other.path.source.silent
        if not silent and not other.alive:
            # The first packet that gets there is answered with a reset.
            there_and_back = int(self.path.latency_ns() + other.path.latency_ns())
            loop = self.transport.network.loop
            loop.post(loop.now_ns + there_and_back, self.die, ("unavailable: connection reset by peer",))
        process = other.transport.process
        if silent or (process is not None and process.paused):
            if self._timer is None:
                self._timer = self._keepalive()
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _keepalive(self) -> SimHandle:
        """The next ping is due within KEEPALIVE_TIME, and waits KEEPALIVE_TIMEOUT for its answer."""
        network = self.transport.network
        wait_ms = limits.KEEPALIVE_TIMEOUT_MS + limits.KEEPALIVE_TIME_MS * network.rng.random()
        return network.loop.post(network.loop.now_ns + int(wait_ms * 1e6), self._unanswered, (), self.transport.process)

    def _unanswered(self) -> None:
        self._timer = None
        self.shut("unavailable: keepalive watchdog timeout", "unavailable: connection reset by peer")

    # ------------------------------------------------------------------------------------------------ the end

    def shut(self, here: str, there: str) -> None:
        """Close this side, with the reason `here`; the other side closes with the reason `there` when it hears of it."""
        if not self.alive:
            return
        after_ns = self._last_arrival()
        self.die(here)
        self._tell(there, after_ns)

    def vanish(self) -> None:
        """The process of this side is gone. Nobody in it is woken; the machine resets the other side, if it has power."""
        if not self.alive:
            return
        after_ns = self._last_arrival()
        for stream in list(self.streams):
            stream._closed = stream._closed or StreamClosed("unavailable: this process was killed")
        self._unlink()
        if self.path.source.silent:
            self.other._review()
        else:
            self._tell("unavailable: connection reset by peer", after_ns)

    def die(self, reason: str) -> None:
        """Break every stream of this side."""
        if not self.alive:
            return
        self._unlink()
        network = self.transport.network
        if network.on_event is not None:
            network.on_event("break", self.path.source.name, self.path.target.name, "", 0)
        for stream in list(self.streams):
            stream.close(reason, cancel_task=True)
        self.streams.clear()
        for waiter in self.room:
            wake(waiter)

    def _unlink(self) -> None:
        self.alive = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.transport.ends.pop(self, None)
        self.path.source.ends.pop(self, None)

    def _last_arrival(self) -> int:
        return max((stream._last_ns for stream in self.streams), default=0) + _AFTER_NS

    def _tell(self, reason: str, after_ns: int) -> None:
        """Word to the other side. On a cut path it is lost; `review` makes good for it when the path is whole again."""
        if self.other.alive and not self.path.cut:
            self.path.carry(0, after_ns, self.other._told, (reason,))

    def _told(self, reason: str) -> None:
        if not self.other.path.cut:
            self.die(reason)
