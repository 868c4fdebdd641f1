"""Connections to everybody: dial, handshake, sessions, messages, streams. Sits on `Transport`, so it runs simulated too.

Theory of operation. Per peer there is at most one dialed connection and one "Control" stream on it, on which messages
(`Envelope`) flow both ways; a peer that cannot be dialed is answered on the control stream that it opened. Messages are
best effort: bounded queues that drop the oldest, because every sender repeats what matters. Streams of other methods carry
bulk data and are served only to live sessions; a ban or a newer process of the same identity ends them at the next frame.

Failures to dial open a per-peer circuit breaker with capped backoff, so a dead peer costs nobody time; news of the peer
closes it. A fault of a peer is counted and ends that stream; an error of our own surfaces through `failed`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from ...protocol import limits
from ...protocol.admission import Session, Sessions
from ...protocol.errors import PeerFault, ShoalError
from ...protocol.handshake import Dialed, Dialer, Other, Refuse, Refused, Self, decode, refuse
from ...protocol.transport import HANDSHAKE_METHOD, Call, Clock, Connection, DialError, Stream, StreamClosed, Transport
from ...protocol.wire_pb2 import Challenge, Envelope, Refusal, Welcome

CONTROL = "Control"
DIAL_SECONDS = 5.0
BACKOFF_SECONDS_MIN = 0.25
# A control stream is idle for as long as nobody has anything to say; keepalive notices a dead one.
CONTROL_IDLE_SECONDS = 3600.0
# How long the process that holds an identity may take to show that it lives, before a newcomer with it is let in.
LIVENESS_SECONDS = 3.0
# A queued message older than this says nothing new: senders repeat faster.
STALE_SECONDS = 10.0

StreamHandler = Callable[[str, Stream], Awaitable[None]]


class SessionStream:
    """A stream of an admitted peer: counts bytes and looks at the session on every frame."""

    def __init__(self, stream: Stream, traffic: Traffic, method: str, session: Session | None) -> None:
        self._stream, self._traffic, self._method, self._session = stream, traffic, method, session

    def _check(self) -> None:
        if self._session is not None and not self._session.live:
            self._stream.cancel("session ended")
            raise StreamClosed("unauthenticated: session ended")

    async def send(self, frame: bytes) -> None:
        self._check()
        await self._stream.send(frame)
        self._traffic.sent[self._method] += len(frame)

    async def recv(self, timeout_s: float) -> bytes:
        frame = await self._stream.recv(timeout_s)
        self._check()
        self._traffic.received[self._method] += len(frame)
        return frame

    async def done_sending(self) -> None:
        await self._stream.done_sending()

    def cancel(self, reason: str) -> None:
        self._stream.cancel(reason)


@dataclass
class Traffic:
    """Frame bytes by stream method, and faults by kind."""

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    charged: Counter[str] = field(default_factory=Counter)  # by peer


@dataclass
class _Link:
    """Everything about one peer."""

    addresses: list[str] = field(default_factory=list)
    queue: deque[tuple[float, bytes]] = field(default_factory=lambda: deque(maxlen=limits.MESSAGE_QUEUE_MAX))
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    connection: Connection | None = None
    session: bytes = b""
    control: SessionStream | None = None  # on our connection
    accepted: list[SessionStream] = field(default_factory=list)  # on theirs
    failures: int = 0
    retry_at: float = 0.0
    last_error: str = ""
    sender: asyncio.Task[None] | None = None


class Mesh:
    """One node's connections. `identity`, run and admission come in `me`; everything else is learned."""

    def __init__(
        self,
        *,
        transport: Transport,
        clock: Clock,
        me: Callable[[], Self],
        random_bytes: Callable[[int], bytes],
        rng: random.Random,
        known: Callable[[str], tuple[int, int]] = lambda peer: (0, 0),
        say: Callable[..., None] = lambda *a, **k: None,
    ) -> None:
        """
        Args:
            me: this side of handshakes, asked each time (addresses and incarnation change).
            known: highest (incarnation, seq) seen of a peer, told to it in the Welcome.
        """
        self._transport, self._clock, self._me = transport, clock, me
        self._random_bytes, self._rng = random_bytes, rng
        self._known = known
        self._say = say
        self._sessions = Sessions(random_bytes)
        self._links: dict[str, _Link] = {}
        self._handlers: dict[str, StreamHandler] = {}
        self._message: Callable[[str, Envelope], None] = lambda peer, envelope: None
        self._welcome: Callable[[str, Welcome], None] = lambda peer, welcome: None
        self._handshakes = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.traffic = Traffic()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # ------------------------------------------------------------------------------------------------ set-up

    def serve(self, method: str, handler: StreamHandler) -> None:
        """Register the handler of a stream method."""
        self._handlers[method] = handler

    def on_message(self, callback: Callable[[str, Envelope], None]) -> None:
        """Called for every decoded message; raises PeerFault for what must be charged."""
        self._message = callback

    def on_welcome(self, callback: Callable[[str, Welcome], None]) -> None:
        self._welcome = callback

    async def listen(self, host: str, port: int) -> int:
        """The bound port. Raises ShoalError(ADDRESS)."""
        return await self._transport.listen(host, port, self._gate, self._accept)

    async def close(self) -> None:
        """End every stream and connection."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links.values():
            if link.connection is not None:
                await link.connection.close()
        await self._transport.close()

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` as an owned task; what it dies of surfaces in `failed`."""
        task = asyncio.ensure_future(work)
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.failed.done():
            self.failed.set_exception(error)

    # ------------------------------------------------------------------------------------------------ addresses

    def _link(self, peer: str) -> _Link:
        if peer not in self._links:
            if len(self._links) >= 2 * limits.MEMBERS_MAX:
                raise PeerFault("too_many_peers", peer)
            self._links[peer] = _Link()
        return self._links[peer]

    def news(self, peer: str, addresses: Sequence[str]) -> None:
        """A peer was heard of: remember its addresses, newest first, and close its circuit breaker."""
        if peer == self._me().identity.peer_id:
            return
        link = self._link(peer)
        link.addresses = list(dict.fromkeys([*addresses, *link.addresses]))[: limits.ADDRESSES_MAX]
        link.failures, link.retry_at = 0, 0.0

    def addresses(self, peer: str) -> list[str]:
        return list(self._links[peer].addresses) if peer in self._links else []

    def connected(self) -> list[str]:
        """Peers with a connection in either direction."""
        return sorted(p for p, link in self._links.items() if link.connection is not None or link.accepted)

    def last_error(self, peer: str) -> str:
        return self._links[peer].last_error if peer in self._links else ""

    def ban(self, peer: str, reason: str, evidence: bytes = b"") -> bool:
        """Refuse a peer from now on, and end what it has open. True when this is news."""
        news = self._me().bans.add(peer, reason, evidence)
        self._sessions.revoke(peer)
        link = self._links.get(peer)
        if link is not None:
            for stream in [*link.accepted, *([link.control] if link.control else [])]:
                stream.cancel("banned")
            if link.sender is not None:
                link.sender.cancel()
        return news

    def fault(self, peer: str, fault: PeerFault) -> None:
        """Count a fault and charge it."""
        self.traffic.faults[fault.kind] += 1
        self.traffic.charged[peer] += 1
        self._say("peer fault", level="warning", peer=peer, kind=fault.kind, detail=fault.detail)

    # ------------------------------------------------------------------------------------------------ dialing

    async def connect(self, address: str, peer: str) -> Other:
        """Dial one address now, whatever the breaker says. Raises DialError or Refused."""
        self.news(peer, [address])
        link = self._link(peer)
        async with link.lock:
            await self._drop(link)
            return await self._dial(link, peer, address)

    async def _ensure(self, peer: str, timeout_s: float = DIAL_SECONDS) -> _Link:
        """A link with a connection. Raises DialError."""
        link = self._link(peer)
        async with link.lock:
            if link.connection is not None:
                return link
            if self._me().bans.reason(peer) is not None:
                raise DialError("unreachable", f"{peer} is banned")
            if self._clock.now() < link.retry_at:
                raise DialError("unreachable", f"waiting after {link.failures} failures: {link.last_error}")
            errors = ["no address is known"] if not link.addresses else []
            for address in list(link.addresses):
                try:
                    await self._dial(link, peer, address, timeout_s)
                    return link
                except (DialError, Refused, PeerFault, StreamClosed, asyncio.TimeoutError) as error:
                    errors.append(str(error).splitlines()[0] or type(error).__name__)
            link.failures += 1
            backoff = BACKOFF_SECONDS_MIN * 2 ** min(link.failures, 16) * (0.5 + self._rng.random())
            link.retry_at = self._clock.now() + min(backoff, limits.RECONNECT_BACKOFF_SECONDS_MAX)
            link.last_error = "; ".join(errors)
            raise DialError("unreachable", link.last_error)

    async def _dial(self, link: _Link, peer: str, address: str, timeout_s: float = DIAL_SECONDS) -> Other:
        connection = await self._transport.dial(address, peer, timeout_s=timeout_s)
        try:
            welcome, other = await asyncio.wait_for(self._greet(connection), limits.HANDSHAKE_SECONDS_MAX)
            stream = await connection.open(CONTROL, welcome.session, timeout_s=timeout_s)
        except BaseException:
            await connection.close()
            raise
        link.connection, link.session = connection, welcome.session
        link.failures, link.retry_at, link.last_error = 0, 0.0, ""
        link.addresses = list(dict.fromkeys([address, *other.addresses, *link.addresses]))[: limits.ADDRESSES_MAX]
        admission = self._me().admission
        if welcome.admission_key and not admission.key:
            admission.key = welcome.admission_key
        link.control = SessionStream(stream, self.traffic, CONTROL, None)
        self._own(self._read_control(peer, link, link.control, connection), f"control of {peer[-6:]}")
        self._welcome(peer, welcome)
        return other

    async def _greet(self, connection: Connection) -> tuple[Welcome, Other]:
        dialer = Dialer(self._me(), connection.peer_id, connection.binding, self._random_bytes)
        stream = await connection.open(HANDSHAKE_METHOD, b"", timeout_s=DIAL_SECONDS)
        try:
            await stream.send(dialer.hello())
            await stream.send(dialer.on_challenge(await stream.recv(limits.HANDSHAKE_SECONDS_MAX)))
            return dialer.on_welcome(await stream.recv(limits.HANDSHAKE_SECONDS_MAX))
        finally:
            stream.cancel("handshake over")

    async def _read_control(self, peer: str, link: _Link, stream: SessionStream, connection: Connection) -> None:
        """Messages that come back on our own control stream; its end is the end of the connection."""
        try:
            await self._messages(peer, stream)
        finally:
            if link.connection is connection:
                await self._drop(link)

    async def _drop(self, link: _Link) -> None:
        connection, control = link.connection, link.control
        link.connection = link.control = None
        if control is not None:
            control.cancel("connection dropped")
        if connection is not None:
            await connection.close()

    async def _messages(self, peer: str, stream: SessionStream) -> None:
        """Decode and deliver until the stream ends."""
        while True:
            try:
                frame = await stream.recv(CONTROL_IDLE_SECONDS)
            except (StreamClosed, asyncio.TimeoutError):
                return
            envelope = Envelope()
            try:
                try:
                    envelope.ParseFromString(frame)
                except DecodeError as error:
                    raise PeerFault("bad_message", f"Envelope: {error}") from None
                self._message(peer, envelope)
            except PeerFault as fault:
                self.fault(peer, fault)

    # ------------------------------------------------------------------------------------------------ sending

    def post(self, peer: str, envelope: Envelope) -> None:
        """Queue one message, best effort; never blocks, never raises."""
        if self._closed or peer == self._me().identity.peer_id:
            return
        frame = envelope.SerializeToString()
        if len(frame) > limits.MESSAGE_BYTES_MAX:
            self._say("message too large, not sent", level="error", bytes=len(frame), limit=limits.MESSAGE_BYTES_MAX)
            return
        link = self._link(peer)
        link.queue.append((self._clock.now(), frame))
        link.wake.set()
        if link.sender is None or link.sender.done():
            link.sender = self._own(self._send_loop(peer, link), f"sender to {peer[-6:]}")

    async def _send_loop(self, peer: str, link: _Link) -> None:
        while True:
            await link.wake.wait()
            link.wake.clear()
            while link.queue:
                stream = await self._control_of(peer, link)
                if stream is None:
                    link.queue.clear()  # unreachable now; what matters is repeated
                    break
                queued_at, frame = link.queue.popleft()
                if self._clock.now() - queued_at > STALE_SECONDS:
                    continue
                try:
                    await stream.send(frame)
                except StreamClosed:
                    if stream is link.control:
                        await self._drop(link)
                    elif stream in link.accepted:
                        link.accepted.remove(stream)

    async def _control_of(self, peer: str, link: _Link) -> SessionStream | None:
        """A control stream to the peer: ours, else a new one, else the one it opened."""
        if link.control is None:
            try:
                await self._ensure(peer)
            except DialError:
                return link.accepted[-1] if link.accepted else None
        return link.control or (link.accepted[-1] if link.accepted else None)

    async def open(self, peer: str, method: str, timeout_s: float = DIAL_SECONDS) -> Stream:
        """A bulk stream. Raises DialError, StreamClosed, asyncio.TimeoutError."""
        link = await self._ensure(peer, timeout_s)
        assert link.connection is not None
        try:
            stream = await link.connection.open(method, link.session, timeout_s=timeout_s)
        except StreamClosed:
            await self._drop(link)
            raise
        return SessionStream(stream, self.traffic, method, None)

    # ------------------------------------------------------------------------------------------------ accepting

    def _gate(self, call: Call) -> str | None:
        if self._closed:
            return "closing"
        if call.method == HANDSHAKE_METHOD:
            return "too many handshakes" if self._handshakes >= limits.HANDSHAKES_AT_ONCE_MAX else None
        session = self._sessions.find(call.token)
        if session is None or not session.live:
            return "no session"
        return None if call.method == CONTROL or call.method in self._handlers else f"no method {call.method}"

    async def _accept(self, call: Call, stream: Stream) -> None:
        """Serve one incoming stream; what the peer does wrong is charged, what we do wrong surfaces."""
        peer = call.remote
        try:
            if call.method == HANDSHAKE_METHOD:
                self._handshakes += 1
                try:
                    await asyncio.wait_for(self._serve_handshake(call, stream), limits.HANDSHAKE_SECONDS_MAX)
                finally:
                    self._handshakes -= 1
                return
            session = self._sessions.find(call.token)
            if session is None:
                return stream.cancel("no session")
            peer = session.peer
            checked = SessionStream(stream, self.traffic, call.method, session)
            if call.method == CONTROL:
                await self._serve_control(peer, checked)
            else:
                await self._handlers[call.method](peer, checked)
        except PeerFault as fault:
            self.fault(peer, fault)
            stream.cancel(str(fault))
        except (StreamClosed, asyncio.TimeoutError, ShoalError) as error:
            self._say("stream ended", level="debug", peer=peer, method=call.method, cause=str(error))
            stream.cancel("ended")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            stream.cancel("internal error")

    async def _serve_control(self, peer: str, stream: SessionStream) -> None:
        link = self._link(peer)
        link.accepted.append(stream)
        try:
            await self._messages(peer, stream)
        finally:
            if stream in link.accepted:
                link.accepted.remove(stream)

    async def _serve_handshake(self, call: Call, stream: Stream) -> None:
        dialed = Dialed(self._me(), self._transport.binding, self._random_bytes)
        answer = dialed.on_hello(await stream.recv(limits.HANDSHAKE_SECONDS_MAX))
        if isinstance(answer, bytes):
            await stream.send(answer)
            other = dialed.on_proof(await stream.recv(limits.HANDSHAKE_SECONDS_MAX))
            answer = other if isinstance(other, Refuse) else await self._other_process(other) or other
        if isinstance(answer, Refuse):
            self.traffic.faults[f"refused_{Refusal.Reason.Name(answer.reason).lower()}"] += 1  # type: ignore[arg-type]
            self._say("handshake refused", level="warning", remote=call.remote, reason=answer.detail)
            await stream.send(answer.frame)
            return
        assert isinstance(answer, Other)
        self._sessions.revoke(answer.peer, but_boot=answer.boot_id)
        session = self._sessions.start(answer.peer, answer.boot_id, self._clock.now())
        incarnation, seq = self._known(answer.peer)
        self.news(answer.peer, answer.addresses)
        await stream.send(
            dialed.welcome(session.token, incarnation_known=incarnation, seq_known=seq, observed=call.remote)
        )

    async def _other_process(self, other: Other) -> Refuse | None:
        """A refusal if another live process has this identity: one that still answers with the boot id we knew."""
        boots = {s.boot_id for s in self._sessions.of(other.peer) if s.boot_id != other.boot_id}
        link = self._links.get(other.peer)
        for address in link.addresses if boots and link else []:
            if address in other.addresses:
                continue  # a port has one owner, and that is the newcomer now
            try:
                boot = await asyncio.wait_for(self._boot_of(address, other.peer), LIVENESS_SECONDS)
            except (DialError, StreamClosed, asyncio.TimeoutError, PeerFault, Refused):
                continue
            if boot in boots:
                return refuse(
                    Refusal.IDENTITY_IN_USE,
                    f"a live process at {address} has identity {other.peer}",
                    "Stop that process, or give this one its own data directory.",
                )
        return None

    async def _boot_of(self, address: str, peer: str) -> bytes:
        """The boot id of whoever is `peer` at `address` now: the first half of a handshake."""
        connection = await self._transport.dial(address, peer, timeout_s=LIVENESS_SECONDS)
        try:
            dialer = Dialer(self._me(), peer, connection.binding, self._random_bytes)
            stream = await connection.open(HANDSHAKE_METHOD, b"", timeout_s=LIVENESS_SECONDS)
            await stream.send(dialer.hello())
            frame = await stream.recv(LIVENESS_SECONDS)
            stream.cancel("seen")
            challenge = Challenge()
            decode(challenge, frame[1:])
            return challenge.boot_id
        finally:
            await connection.close()
