"""`Transport` on the virtual network: listen, dial, streams of frames. The twin of protocol/grpc_transport.py.

Covers: dialing with the expected peer id, the gate, handlers as tasks of the accepting process, half-close, cancel, flow
control, what a cut, a pause, a crash does to streams. Does not cover: when bytes arrive (network.py).

Theory of operation. A connection is two `End`s that learn of each other only by what arrives. Each stream is two
`SimStream`s. What one puts is numbered and taken by the other in that order, however it travelled; only the frames of
"Control" are cast as messages, each on its own. What meets a cut path waits at the sender (`_stalled`) and is sent anew
once the path is whole; an end that could not have got an answer for as long as keepalive allows breaks, be it for a cut, a
pause or lost power. A process that is killed is different: its machine resets what it had open.

Where this departs from gRPC: a broken connection does not reconnect by itself, and who waits for flow control may go on as
soon as the other side has read, without word of it having to travel.

Who is dialed proves its identity by being who it is; the binding is a hash of its identity and a number of the process, so
that the handshake above runs as it does over TLS.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from ..protocol import limits
from ..protocol.errors import ExitCode, ShoalError
from ..protocol.handshake import plain
from ..protocol.identity import Identity
from ..protocol.transport import Call, DialError, Gate, Handler, StreamClosed
from ..protocol.version import sha256
from .loop import PROCESS, Process, SimFuture, SimHandle, SimTask, nanoseconds
from .network import Count, Network, Path, SimHost

# Bytes of one stream on their way or unread; the sender waits then, as for HTTP/2's flow control. The frame that reaches
# it goes through.
WINDOW_BYTES = 1024 * 1024
MESSAGES = "Control"  # the method whose frames are messages: best effort
OPEN_BYTES = 120  # headers of a new stream
# Reading the certificate, then connecting with it: TCP and TLS 1.3, twice.
DIAL_ROUND_TRIPS = 4
DIAL_RETRY_NS = 1_000_000_000  # as TCP's first retransmission of a SYN; doubles
FIRST_PORT = 20_000
# The end of a connection follows its last frame: a reader that is ready gets to read that.
_AFTER_NS = 100_000
_FOREVER_S = 1e9


class _Reset:
    """The dialed side gave the stream up."""


_RESET = _Reset()


class SimStream:
    """One end of a stream."""

    __slots__ = (
        "end",
        "other",
        "method",
        "task",
        "_loop",
        "_count",
        "_accepted",
        "_inbox",
        "_early",
        "_expected",
        "_reader",
        "_deadline",
        "_timer",
        "_writer",
        "_in_flight",
        "_seq",
        "_stalled",
        "_last_ns",
        "_closed",
        "_other_done",
        "_half_closed",
    )

    other: SimStream

    def __init__(self, end: End, method: str, *, accepted: bool) -> None:
        self.end, self.method = end, method
        self.task: SimTask | None = None  # of the handler, on the accepting side
        self._loop = end.transport.network.loop
        self._count: Count = end.path.count(method)
        self._accepted = accepted
        # Arrived: frames, and what ends them. `_early` arrived before what it follows.
        self._inbox: deque[bytes | StreamClosed] = deque()
        self._early: dict[int, Any] = {}
        self._expected = 0
        self._reader: SimFuture | None = None
        self._deadline = 0
        self._timer: SimHandle | None = None  # at the deadline or earlier: one serves many reads
        # Sent.
        self._writer: SimFuture | None = None
        self._in_flight = 0  # bytes that we sent and the other side has not read
        self._seq = 0
        self._stalled: list[tuple[int, Any, int]] = []
        self._last_ns = 0  # arrival of what we sent last
        self._closed: StreamClosed | None = None  # why nothing more can be read or written here
        self._other_done: StreamClosed | None = None  # how the accepting side ended the stream
        self._half_closed = False
        end.streams[self] = None

    # ------------------------------------------------------------------------------------------------ sending

    async def send(self, frame: bytes) -> None:
        size = len(frame)
        if size > limits.FRAME_BYTES_MAX:
            raise ValueError(f"frame of {size} bytes, limit {limits.FRAME_BYTES_MAX}")
        while True:
            over = self._closed or self._other_done
            if over is not None:
                raise StreamClosed(over.reason, clean=over.clean)
            if self._half_closed:
                raise StreamClosed("failed: the stream is half-closed")
            if self._in_flight < WINDOW_BYTES:
                break
            self._writer = self._loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None
        self.end.transport.sent_bytes += size
        count = self._count
        count.frames += 1
        count.bytes += size
        self._event("send", size)
        if self.method == MESSAGES:
            self._cast(frame, size)
        else:
            self._in_flight += size
            self._put(frame, size)

    async def done_sending(self) -> None:
        if self._closed is not None:
            raise StreamClosed(self._closed.reason, clean=self._closed.clean)
        if not self._accepted and not self._half_closed:
            self._half_closed = True
            self._put(StreamClosed("the other side is done", clean=True))

    def _cast(self, frame: bytes, size: int) -> None:
        path, count = self.end.path, self._count
        copies, self._last_ns = path.cast(size, self._last_ns, self.other._message, (frame, size))
        self._in_flight += copies * size
        if copies == 0:
            count.lost += 1
            self._event("drop", size)
        elif copies == 2:
            count.duplicated += 1
            self._event("dup", size)

    def _put(self, item: Any, size: int = 0) -> None:
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
        self._stalled.append((seq, item, size))
        self.end.streams[self] = None

    def resend(self) -> None:
        """The path is whole again."""
        stalled, self._stalled = self._stalled, []
        for seq, item, size in stalled:
            self._last_ns = self.end.path.carry(size, self._last_ns, self.other._arrive, (seq, item, size))
        if self._closed is not None:
            self.end.forget(self)

    def _event(self, kind: str, size: int) -> None:
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
            sender._event("drop", size)
            return
        sender._event("deliver", size)
        self._inbox.append(frame)
        _wake(self._reader)

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
            sender._event("deliver", size)
        if seq != self._expected:
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
            self._inbox.append(item)
            _wake(self._reader)
        elif isinstance(item, StreamClosed):
            self._inbox.append(item)
            if not self._accepted:  # the call is over, though there may be frames to read
                self._other_done = item
                self.end.forget(self)
                _wake(self._writer)
            _wake(self._reader)
        elif isinstance(item, Call):
            transport = self.end.transport
            self._loop.post(self._loop.now_ns, transport.accept, (item, self), transport.process)
        else:
            self.close("cancelled: the other side gave the stream up", cancel_task=True)

    async def recv(self, timeout_s: float) -> bytes:
        inbox = self._inbox
        if not inbox:
            await self._wait(timeout_s)
        item = inbox[0]
        if isinstance(item, StreamClosed):
            raise StreamClosed(item.reason, clean=item.clean)
        inbox.popleft()
        self.end.transport.received_bytes += len(item)
        sender = self.other
        sender._in_flight -= len(item)
        if sender._writer is not None:
            _wake(sender._writer)
        return item

    async def _wait(self, timeout_s: float) -> None:
        """Until the inbox has something. Raises StreamClosed, asyncio.TimeoutError."""
        loop = self._loop
        deadline = loop.now_ns + nanoseconds(min(timeout_s, _FOREVER_S))
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
            _wake(self._reader)
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
            self._put(_RESET)
        self.close("cancelled: the stream was given up")

    def finish(self, how: StreamClosed) -> None:
        """The accepting side ends the stream; the other reads what was sent before, then `how`."""
        if self._closed is None:
            self._put(how)
            self.close("cancelled: the stream has ended" if how.clean else how.reason, cancel_task=True)

    def close(self, reason: str, *, cancel_task: bool = False) -> None:
        """Nothing more passes here; what arrived and was not read is lost."""
        if self._closed is not None:
            return
        self._closed = StreamClosed(reason)
        self._inbox.clear()
        self._early.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        _wake(self._reader)
        _wake(self._writer)
        if not self._stalled:
            self.end.forget(self)
        if cancel_task and self.task is not None and self.task is not asyncio.current_task(self._loop):
            self.task.cancel()


def _wake(waiter: SimFuture | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class End:
    """One side of a connection, as its machine sees it."""

    __slots__ = ("transport", "path", "other", "streams", "alive", "room", "_timer")

    other: End

    def __init__(self, transport: SimTransport, path: Path) -> None:
        self.transport, self.path = transport, path
        self.streams: dict[SimStream, None] = {}
        self.room: deque[SimFuture] = deque()  # who waits to open a stream
        self.alive = True
        self._timer: SimHandle | None = None  # keepalive's, while nobody could answer
        transport.ends[self] = None
        path.source.ends[self] = None

    def forget(self, stream: SimStream) -> None:
        self.streams.pop(stream, None)
        if self.room:
            _wake(self.room[0])

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
            _wake(waiter)

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


class SimConnection:
    """A dialed connection, its dialed side being `peer_id`."""

    def __init__(self, near: End, far: End, peer_id: str, address: str, remote: str) -> None:
        self._near, self._far = near, far
        self.peer_id, self.address, self.binding = peer_id, address, far.transport.binding
        self._remote = remote  # our address as the dialed side sees it

    async def open(self, method: str, token: bytes, *, timeout_s: float) -> SimStream:
        """Returns without waiting for the other side, as gRPC does; a refusal comes with the first read."""
        near = self._near
        if timeout_s <= 0:
            raise asyncio.TimeoutError
        if near.alive and len(near.streams) >= limits.STREAMS_PER_CONNECTION_MAX:
            await self._wait_for_room(timeout_s)
        if not near.alive:
            raise StreamClosed("unavailable: the connection is closed")
        stream, other = SimStream(near, method, accepted=False), SimStream(self._far, method, accepted=True)
        stream.other, other.other = other, stream
        stream._event("open", OPEN_BYTES)
        stream._put(Call(method[:32], token, self._remote), OPEN_BYTES)
        return stream

    async def _wait_for_room(self, timeout_s: float) -> None:
        """Until one more stream may be opened or the connection is over. Raises asyncio.TimeoutError."""
        near, loop = self._near, self._near.transport.network.loop
        deadline = loop.now_ns + nanoseconds(min(timeout_s, _FOREVER_S))
        while near.alive and len(near.streams) >= limits.STREAMS_PER_CONNECTION_MAX:
            if loop.now_ns >= deadline:
                raise asyncio.TimeoutError
            waiter = loop.create_future()
            near.room.append(waiter)
            timer = loop.post(deadline, _wake, (waiter,), near.transport.process)
            try:
                await waiter
            finally:
                timer.cancel()
                near.room.remove(waiter)

    async def close(self) -> None:
        self._near.shut("cancelled: the connection was closed", "cancelled: the other side closed the connection")


class SimTransport:
    """One process's transport. Made in the process that uses it (`SimHost.inside`)."""

    def __init__(self, network: Network, host: SimHost, identity: Identity) -> None:
        self.network, self.host = network, host
        self.process: Process | None = PROCESS.get() or host.life
        self.peer_id = identity.peer_id
        number = network.loop.next_serial()  # a new certificate in every process
        self.binding = sha256(b"shoal.sim certificate", identity.peer_id.encode(), number.to_bytes(8, "big"))
        self.sent_bytes = self.received_bytes = 0
        self.ends: dict[End, None] = {}
        self._gate: Gate = lambda call: "not listening"
        self._handler: Handler | None = None
        self._handling: dict[SimTask, None] = {}
        host.transports.append(self)

    @property
    def dead(self) -> bool:
        return self.process is not None and self.process.killed

    # ------------------------------------------------------------------------------------------------ listening

    async def listen(self, host: str, port: int, gate: Gate, handler: Handler) -> int:
        taken = self.host.listeners
        cause = ""
        if host not in ("", "0.0.0.0", "[::]", "::", self.host.address):
            cause = "Cannot assign requested address"
        elif port in taken or self.dead:
            cause = "Address already in use"
        if cause:
            raise ShoalError(
                "The address cannot be listened on",
                values=f"wanted {host or 'any address'} port {port}; {cause}",
                todo="Choose another with --port (0 takes a free one), or stop the process that has it: `ss -ltnp`.",
                code=ExitCode.ADDRESS,
            )
        port = port or next(p for p in range(FIRST_PORT, 65_536) if p not in taken)
        self._gate, self._handler = gate, handler
        taken[port] = self
        return port

    def accept(self, call: Call, stream: SimStream) -> None:
        """A stream arrived. Runs as this process."""
        if stream._closed is not None or self._handler is None or self.dead:
            return
        token = PROCESS.set(self.process)
        try:
            refusal = self._gate(call)
            if refusal is not None:
                return stream.finish(StreamClosed(f"unauthenticated: {refusal}"))
            task = self.network.loop.create_task(
                self._serve(call, stream), name=f"{self.host.name} serves {call.method}"
            )
        finally:
            PROCESS.reset(token)
        stream.task = task
        self._handling[task] = None
        task.add_done_callback(self._served)

    async def _serve(self, call: Call, stream: SimStream) -> None:
        assert self._handler is not None
        try:
            await self._handler(call, stream)
        except asyncio.CancelledError:
            stream.cancel("the other side is closing")
            raise
        except Exception as error:
            stream.finish(StreamClosed(f"unknown: Unexpected {type(error)}: {error}"))
            raise
        stream.finish(StreamClosed("the other side is done", clean=True))

    def _served(self, task: Any) -> None:
        self._handling.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.network.loop.call_exception_handler({"message": "in a handler", "exception": error, "task": task})

    # ------------------------------------------------------------------------------------------------ dialing

    async def dial(self, address: str, peer_id: str, *, timeout_s: float) -> SimConnection:
        target, port = self.network.at_address(address)
        if target is None or self.dead:
            raise DialError("unreachable", f"{address}: No route to host")
        loop = self.network.loop
        result: SimFuture = loop.create_future()
        late = DialError("timeout", f"{address} did not answer in {timeout_s:g} s")
        timer = loop.call_later(min(timeout_s, _FOREVER_S), _fail, result, late)
        _Dialing(self, target, port, peer_id, address, result).knock()
        try:
            return await result
        except asyncio.CancelledError:
            if result.done() and not result.cancelled() and result.exception() is None:
                await result.result().close()  # it came at the moment when nobody wanted it any more
            raise
        finally:
            timer.cancel()

    # ------------------------------------------------------------------------------------------------ the end

    def die(self) -> None:
        """The process was killed."""
        for end in list(self.ends):
            end.vanish()

    async def close(self) -> None:
        for port in [port for port, owner in self.host.listeners.items() if owner is self]:
            del self.host.listeners[port]
        self._handler = None
        if self in self.host.transports:
            self.host.transports.remove(self)
        for end in list(self.ends):
            end.shut("cancelled: the transport was closed", "unavailable: the other side is closing")
        current = asyncio.current_task()
        handling = [task for task in self._handling if task is not current]
        if handling:
            await asyncio.wait(handling)


class _Dialing:
    """One attempt to connect: knocks until somebody answers or whoever waits for `result` gives up."""

    __slots__ = ("_transport", "_target", "_port", "_peer_id", "_address", "_result", "_retry_ns", "_there", "_back")

    def __init__(
        self, transport: SimTransport, target: SimHost, port: int, peer_id: str, address: str, result: SimFuture
    ) -> None:
        self._transport, self._target, self._port = transport, target, port
        self._peer_id, self._address, self._result = peer_id, address, result
        self._retry_ns = DIAL_RETRY_NS
        self._there, self._back = transport.host.path_to(target), target.path_to(transport.host)

    def knock(self) -> None:
        if not self._result.done() and not self._transport.dead:
            self._after(self._there.latency_ns(), self._knocked)

    def _after(self, ns: float, call: Any, *args: Any, process: Process | None = None) -> None:
        loop = self._transport.network.loop
        loop.post(loop.now_ns + int(ns), call, args, process)

    def _unheard(self) -> bool:
        """Whether silence is all the answer there is; then it is tried again later."""
        if not (self._there.cut or self._back.cut or self._target.silent):
            return False
        self._after(self._retry_ns, self.knock)
        self._retry_ns *= 2
        return True

    def _knocked(self) -> None:
        """At the target's machine. Its system refuses where nobody listens; else its process must answer."""
        if self._unheard():
            return
        listener = self._target.listeners.get(self._port)
        if listener is None:
            refused = DialError("unreachable", f"{self._address}: Connection refused")
            return self._after(self._back.latency_ns(), _fail, self._result, refused)
        self._after(0, self._answer, listener, process=listener.process)

    def _answer(self, listener: SimTransport) -> None:
        """In the target's process: who it is."""
        if self._unheard():
            return
        if self._target.listeners.get(self._port) is not listener:
            return self._knocked()
        if listener.peer_id != self._peer_id:
            wrong = DialError("wrong_peer", f"{self._address} is {listener.peer_id}, expected {self._peer_id}")
            return self._after(2 * self._back.latency_ns() + self._there.latency_ns(), _fail, self._result, wrong)
        more = sum(self._there.latency_ns() + self._back.latency_ns() for _ in range(DIAL_ROUND_TRIPS - 1))
        self._after(more + self._back.latency_ns(), self._done, listener)

    def _done(self, listener: SimTransport) -> None:
        transport, target = self._transport, self._target
        if self._result.done() or transport.dead or self._unheard():
            return
        if target.listeners.get(self._port) is not listener:
            return _fail(self._result, DialError("unreachable", f"{self._address}: Connection reset by peer"))
        near, far = End(transport, self._there), End(listener, self._back)
        near.other, far.other = far, near
        remote = f"{transport.host.address}:{transport.host.ephemeral_port()}"
        connection = SimConnection(near, far, self._peer_id, self._address, remote)
        self._result.set_result(connection)
        near.review()  # the other side may be paused by now
        network = transport.network
        if network.on_event is not None:
            network.on_event("open", transport.host.name, target.name, "", 0)


def _fail(result: SimFuture, error: DialError) -> None:
    if not result.done():
        result.set_exception(error)
