"""`Transport` on the virtual network: listen, dial, connections. The twin of protocol/grpc_transport.py.

Covers: dialing with the expected peer id, the gate, handlers as tasks of the accepting process. Does not cover: what
becomes of a stream once it is open (stream.py), when bytes arrive (network.py).

Who is dialed proves its identity by being who it is; the binding is a hash of its identity and a number of the process, so
that the handshake above runs as it does over TLS.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ..protocol import limits
from ..protocol.errors import ExitCode, ShoalError
from ..protocol.identity import Identity
from ..protocol.transport import Call, DialError, Gate, Handler, StreamClosed
from ..protocol.version import sha256
from .loop import nanoseconds
from .network import Network, SimHost
from .process import PROCESS, Process, SimFuture, SimTask
from .stream import FOREVER_S, End, SimStream, wake

OPEN_BYTES = 120  # headers of a new stream
# Reading the certificate, then connecting with it: TCP and TLS 1.3, twice.
DIAL_ROUND_TRIPS = 4
DIAL_RETRY_NS = 1_000_000_000  # as TCP's first retransmission of a SYN; doubles
FIRST_PORT = 20_000


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
        stream.event("open", OPEN_BYTES)
        stream.put(Call(method[:32], token, self._remote), OPEN_BYTES)
        return stream

    async def _wait_for_room(self, timeout_s: float) -> None:
        """Until one more stream may be opened or the connection is over. Raises asyncio.TimeoutError."""
        near, loop = self._near, self._near.transport.network.loop
        deadline = loop.now_ns + nanoseconds(min(timeout_s, FOREVER_S))
        while near.alive and len(near.streams) >= limits.STREAMS_PER_CONNECTION_MAX:
            if loop.now_ns >= deadline:
                raise asyncio.TimeoutError
            waiter = loop.create_future()
            near.room.append(waiter)
            timer = loop.post(deadline, wake, (waiter,), near.transport.process)
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
        if stream.closed or self._handler is None or self.dead:
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
        timer = loop.call_later(min(timeout_s, FOREVER_S), _fail, result, late)
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
