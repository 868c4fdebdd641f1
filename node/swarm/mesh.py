"""Connections to everybody: dial, handshake, sessions, messages, streams. Sits on `Transport`, real or simulated.

Theory of operation. Per peer there is at most one dialed connection and one "Control" stream on it, on which messages
(`Envelope`) flow both ways; a peer that opened one to us is answered on that, and dialed only where there is none.
Messages are best effort: bounded queues that drop the oldest, because every sender repeats what matters. Streams of
other methods carry bulk data and are served only to live sessions; a ban ends them at once, a newer process of the
same identity at the next frame.

Failures to dial open a per-peer circuit breaker with capped backoff, so a dead peer costs nobody time; news of the peer
closes it. A fault of a peer is counted and charged; it ends the bulk stream it came on, and the whole connection when
no honest peer could have made it. An error of our own surfaces through `failed`.

One identity, one process: who comes with an identity that we know from another process (another boot id) is let in only
after that one failed to answer at the addresses we know of it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from ...protocol import limits
from ...protocol.admission import Sessions
from ...protocol.errors import PeerFault, ShoalError
from ...protocol.handshake import Dialed, Dialer, Other, Refuse, Refused, Self, decode, refuse
from ...protocol.transport import HANDSHAKE_METHOD, Call, Clock, Connection, DialError, Stream, StreamClosed, Transport
from ...protocol.wire_pb2 import Challenge, Envelope, Refusal, Welcome
from .link import Link, SessionStream, Traffic

CONTROL = "Control"
DIAL_SECONDS = 5.0
# A control stream is idle for as long as nobody has anything to say; keepalive notices a dead one.
CONTROL_IDLE_SECONDS = 3600.0
# How long the process that holds an identity may take to show that it lives, before a newcomer with it is let in.
LIVENESS_SECONDS = 3.0
# A queued message older than this says nothing new: senders repeat faster.
STALE_SECONDS = 10.0
# One host may hold this many of the places for handshakes, so that it cannot keep everybody else out.
HANDSHAKES_PER_HOST_MAX = limits.HANDSHAKES_AT_ONCE_MAX // 2
LINKS_MAX = 2 * limits.MEMBERS_MAX
# Faults that no honest peer can make, whatever it received from others: the connection ends. Others cost their message
# or their bulk stream.
DISCONNECTING = frozenset({"bad_signature", "wrong_signer", "bad_envelope"})
STRANGER = "stranger"  # who faults before admission are charged to
_BUSY = "busy with other handshakes"

StreamHandler = Callable[[str, Stream], Awaitable[None]]


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
        self._links: dict[str, Link] = {}
        self._handlers: dict[str, StreamHandler] = {}
        self._message: Callable[[str, Envelope], None] = lambda peer, envelope: None
        self._welcome: Callable[[str, Welcome], None] = lambda peer, welcome: None
        self._handshakes: Counter[str] = Counter()  # in progress, by host
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

    def _link(self, peer: str) -> Link:
        if peer not in self._links:
            if len(self._links) >= LINKS_MAX:
                idle = next((p for p, link in self._links.items() if link.idle()), None)
                if idle is None:
                    raise PeerFault("too_many_peers", f"{len(self._links)} peers, limit {LINKS_MAX}")
                del self._links[idle]
                self.traffic.forget(idle)
            self._links[peer] = Link()
        return self._links[peer]

    def news(self, peer: str, addresses: Sequence[str]) -> None:
        """A peer was heard of: remember its addresses, newest first, and close its circuit breaker."""
        if peer == self._me().identity.peer_id:
            return
        link = self._link(peer)
        link.remember(*addresses)
        link.breaker.reset()

    def addresses(self, peer: str) -> list[str]:
        return list(self._links[peer].addresses) if peer in self._links else []

    def connected(self) -> list[str]:
        """Peers with a connection in either direction."""
        return sorted(p for p, link in self._links.items() if link.connection is not None or link.incoming())

    def last_error(self, peer: str) -> str:
        return self._links[peer].breaker.last_error if peer in self._links else ""

    def ban(self, peer: str, reason: str, evidence: bytes = b"") -> bool:
        """Refuse a peer from now on, and end what it has open. True when this is news."""
        news = self._me().bans.add(peer, reason, evidence)
        self._disconnect(peer, "banned")
        return news

    def _disconnect(self, peer: str, reason: str) -> None:
        """End everything a peer has open, in both directions, at once; no attempt to dial it for a while."""
        self._sessions.revoke(peer)
        link = self._links.get(peer)
        if link is None:
            return
        link.cancel_streams(reason)
        link.queue.clear()
        link.breaker.failed(self._clock.now(), self._rng, reason)
        link.breaker.retry_at = self._clock.now() + limits.RECONNECT_BACKOFF_SECONDS_MAX
        if link.connection is not None and not self._closed:
            self._own(self._drop(link), f"disconnect {peer[-6:]}")

    def fault(self, peer: str, fault: PeerFault) -> None:
        """Count a fault and charge it."""
        self.traffic.charge(peer, fault.kind)
        self._say("peer fault", level="warning", peer=peer, kind=fault.kind, detail=fault.detail)
        if fault.kind in DISCONNECTING and peer in self._links:
            self._disconnect(peer, f"disconnected after {fault.kind}")

    # ------------------------------------------------------------------------------------------------ dialing

    async def connect(self, address: str, peer: str) -> Other:
        """Dial one address now, whatever the breaker says. Raises DialError or Refused."""
        self.news(peer, [address])
        link = self._link(peer)
        async with link.lock:
            await self._drop(link)
            return await self._dial(link, peer, address)

    async def _ensure(self, peer: str, timeout_s: float = DIAL_SECONDS) -> Link:
        """A link with a connection. Raises DialError."""
        link = self._link(peer)
        async with link.lock:
            if link.connection is not None:
                return link
            breaker = link.breaker
            if self._clock.now() < breaker.retry_at:
                raise DialError("unreachable", f"waiting after {breaker.failures} failures: {breaker.last_error}")
            errors = ["no address is known"] if not link.addresses else []
            for address in list(link.addresses):
                try:
                    await self._dial(link, peer, address, timeout_s)
                    return link
                except (DialError, Refused) as error:
                    errors.append(" ".join(str(error).split()))
            breaker.failed(self._clock.now(), self._rng, "; ".join(errors)[: limits.REASON_CHARS_MAX])
            raise DialError("unreachable", breaker.last_error)

    async def _dial(self, link: Link, peer: str, address: str, timeout_s: float = DIAL_SECONDS) -> Other:
        """Connect, shake hands, open the control stream. Raises DialError or Refused."""
        self._refuse_banned(peer)
        connection = await self._transport.dial(address, peer, timeout_s=timeout_s)
        try:
            welcome, other = await asyncio.wait_for(self._greet(connection), limits.HANDSHAKE_SECONDS_MAX)
            self._refuse_banned(peer)  # it may have happened meanwhile
            stream = await connection.open(CONTROL, welcome.session, timeout_s=timeout_s)
        except BaseException as error:
            await connection.close()
            if isinstance(error, PeerFault):
                self.traffic.charge(peer, error.kind)
                raise DialError("unreachable", f"{address}: handshake: {error}") from None
            if isinstance(error, StreamClosed):
                raise DialError("unreachable", f"{address}: handshake: {error.reason}") from None
            if isinstance(error, asyncio.TimeoutError):
                raise DialError("timeout", f"{address}: no end of the handshake") from None
            raise
        link.connection, link.token, link.boot_id = connection, welcome.session, other.boot_id
        link.breaker.reset()
        link.breaker.last_error = ""
        link.remember(address, *other.addresses)
        admission = self._me().admission
        if welcome.admission_key and not admission.key:
            admission.key = welcome.admission_key
        link.control = SessionStream(stream, self.traffic, CONTROL, peer, None)
        self._own(self._read_control(peer, link, link.control, connection), f"control of {peer[-6:]}")
        self._welcome(peer, welcome)
        return other

    def _refuse_banned(self, peer: str) -> None:
        if (reason := self._me().bans.reason(peer)) is not None:
            raise DialError("unreachable", f"{peer} is banned: {reason}")

    async def _greet(self, connection: Connection) -> tuple[Welcome, Other]:
        dialer = Dialer(self._me(), connection.peer_id, connection.binding, self._random_bytes)
        stream = await connection.open(HANDSHAKE_METHOD, b"", timeout_s=DIAL_SECONDS)
        try:
            await stream.send(dialer.hello())
            await stream.send(dialer.on_challenge(await stream.recv(limits.HANDSHAKE_SECONDS_MAX)))
            return dialer.on_welcome(await stream.recv(limits.HANDSHAKE_SECONDS_MAX))
        except StreamClosed as error:
            if _BUSY not in error.reason:
                raise
            raise Refused(
                Refusal.BUSY,
                values=f"{connection.address} is {_BUSY}, at most {limits.HANDSHAKES_AT_ONCE_MAX} at once",
                todo="Nothing: it is tried again.",
            ) from None
        finally:
            stream.cancel("handshake over")

    async def _read_control(self, peer: str, link: Link, stream: SessionStream, connection: Connection) -> None:
        """Messages that come back on our own control stream; its end is the end of the connection."""
        try:
            await self._messages(peer, stream)
        finally:
            if link.connection is connection:
                await self._drop(link)

    async def _drop(self, link: Link) -> None:
        connection, control = link.connection, link.control
        link.connection = link.control = None
        link.boot_id = b""
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
                    raise PeerFault("bad_envelope", str(error)) from None
                self._message(peer, envelope)
            except PeerFault as fault:
                self.fault(peer, fault)
                if fault.kind in DISCONNECTING:
                    return

    # ------------------------------------------------------------------------------------------------ sending

    def post(self, peer: str, envelope: Envelope) -> None:
        """Queue one message, best effort; never blocks, never raises."""
        if self._closed or peer == self._me().identity.peer_id:
            return
        frame = envelope.SerializeToString()
        if len(frame) > limits.MESSAGE_BYTES_MAX:
            self._say("message too large, not sent", level="error", bytes=len(frame), limit=limits.MESSAGE_BYTES_MAX)
            return
        try:
            link = self._link(peer)
        except PeerFault as fault:
            return self._say("message not sent", level="warning", cause=str(fault))
        link.queue.append((self._clock.now(), frame))
        if link.sender is None or link.sender.done():
            link.sender = self._own(self._send_loop(peer, link), f"sender to {peer[-6:]}")

    async def _send_loop(self, peer: str, link: Link) -> None:
        """Send what is queued, then end; `post` starts the next one."""
        while link.queue:
            stream = await self._control_of(peer, link)
            if stream is None:
                link.queue.clear()  # unreachable now; what matters is repeated
                return
            if not link.queue:
                return  # emptied while we dialed
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

    async def _control_of(self, peer: str, link: Link) -> SessionStream | None:
        """A control stream to the peer: ours, else the one it opened, else a new one."""
        stream = link.control or link.incoming()
        if stream is None:
            try:
                await self._ensure(peer)
            except DialError:
                pass
            stream = link.control or link.incoming()
        return stream

    async def open(self, peer: str, method: str, timeout_s: float = DIAL_SECONDS) -> Stream:
        """A bulk stream. Raises DialError, StreamClosed, asyncio.TimeoutError."""
        stream = await self._open(peer, method, timeout_s) or await self._open(peer, method, timeout_s)
        if stream is None:
            raise StreamClosed(f"unavailable: {peer[-6:]} closes every connection")
        opened = SessionStream(stream, self.traffic, method, peer, None)
        if self._me().bans.reason(peer) is not None:
            opened.cancel("banned")
            raise StreamClosed("banned")
        self._link(peer).streams.add(opened)
        return opened

    async def _open(self, peer: str, method: str, timeout_s: float) -> Stream | None:
        """None when the connection turns out to be over, as after the peer's restart: nothing was sent, dial anew."""
        link = await self._ensure(peer, timeout_s)
        connection = link.connection
        assert connection is not None
        try:
            return await connection.open(method, link.token, timeout_s=timeout_s)
        except (StreamClosed, asyncio.TimeoutError) as error:
            if link.connection is connection:
                await self._drop(link)
            if isinstance(error, StreamClosed) and "unauthenticated" not in error.reason:
                return None
            raise

    # ------------------------------------------------------------------------------------------------ accepting

    def _gate(self, call: Call) -> str | None:
        if self._closed:
            return "closing"
        if call.method == HANDSHAKE_METHOD:
            full = sum(self._handshakes.values()) >= limits.HANDSHAKES_AT_ONCE_MAX
            return _BUSY if full or self._handshakes[_host(call)] >= HANDSHAKES_PER_HOST_MAX else None
        session = self._sessions.find(call.token)
        if session is None or not session.live:
            return "no session"
        return None if call.method == CONTROL or call.method in self._handlers else f"no method {call.method}"

    async def _accept(self, call: Call, stream: Stream) -> None:
        """Serve one incoming stream; what the peer does wrong is charged, what we do wrong surfaces."""
        peer, who = STRANGER, call.remote
        try:
            if call.method == HANDSHAKE_METHOD:
                host = _host(call)
                self._handshakes[host] += 1
                try:
                    await asyncio.wait_for(self._serve_handshake(call, stream), limits.HANDSHAKE_SECONDS_MAX)
                finally:
                    self._handshakes[host] -= 1
                    self._handshakes += Counter()  # drops what is zero
                return
            session = self._sessions.find(call.token)
            if session is None:
                return stream.cancel("no session")
            peer = who = session.peer
            checked = SessionStream(stream, self.traffic, call.method, peer, session)
            if call.method == CONTROL:
                await self._serve_control(peer, checked)
            else:
                self._link(peer).streams.add(checked)
                await self._handlers[call.method](peer, checked)
        except PeerFault as fault:
            self.fault(peer, fault)
            stream.cancel(fault.kind)
        except (StreamClosed, asyncio.TimeoutError, ShoalError) as error:
            self._say("stream ended", level="debug", peer=who, method=call.method, cause=str(error))
            stream.cancel("ended")
        except asyncio.CancelledError:
            raise
        except Exception as error:  # whatever it is, it is ours and must be seen
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
        if isinstance(answer, Other) and (reason := self._me().bans.reason(answer.peer)) is not None:
            answer = refuse(Refusal.BANNED, reason, "Only the swarm's members can lift a ban.")  # banned meanwhile
        if isinstance(answer, Refuse):
            self.traffic.faults[f"refused_{Refusal.Reason.Name(answer.reason).lower()}"] += 1  # type: ignore[arg-type]
            self._say("handshake refused", level="warning", remote=call.remote, reason=answer.detail)
            await stream.send(answer.frame)
            return
        assert isinstance(answer, Other)
        self.news(answer.peer, answer.addresses)
        link = self._link(answer.peer)
        if link.connection is not None and link.boot_id != answer.boot_id:
            await self._drop(link)  # leads to a process that is no more
        self._sessions.revoke(answer.peer, but_boot=answer.boot_id)
        session = self._sessions.start(answer.peer, answer.boot_id, self._clock.now())
        incarnation, seq = self._known(answer.peer)
        await stream.send(
            dialed.welcome(session.token, incarnation_known=incarnation, seq_known=seq, observed=call.remote)
        )

    async def _other_process(self, other: Other) -> Refuse | None:
        """A refusal if another live process has this identity: one that still answers with a boot id that we knew."""
        link = self._links.get(other.peer)
        boots = {s.boot_id for s in self._sessions.of(other.peer)}
        if link is not None and link.connection is not None:
            boots.add(link.boot_id)
        boots.discard(other.boot_id)
        if not boots or link is None:
            return None
        answers = await asyncio.gather(*(self._boot_at(address, other.peer) for address in link.addresses))
        todo = "Stop that process, or give this one its own data directory."
        for address, boot in zip(list(link.addresses), answers, strict=False):
            if boot in boots:
                return refuse(Refusal.IDENTITY_IN_USE, f"a live process at {address} has identity {other.peer}", todo)
        incoming = link.incoming()
        if other.boot_id in answers or incoming is None or incoming.session is None:
            return None  # its address is the newcomer's now, or nothing of the old one is left
        if incoming.session.boot_id not in boots:
            return None
        # It cannot be dialed, but what it opened is still up: keepalive will tell which of the two it is.
        wait_s = (limits.KEEPALIVE_TIME_MS + limits.KEEPALIVE_TIMEOUT_MS) / 1000
        values = f"an earlier process of {other.peer} still has a connection here; a dead one ends within {wait_s:g} s"
        return refuse(Refusal.BUSY, values, f"{todo} If it is gone, this is tried again by itself.")

    async def _boot_at(self, address: str, peer: str) -> bytes | None:
        """`_boot_of` under a deadline; None when nobody answers as `peer`."""
        try:
            return await asyncio.wait_for(self._boot_of(address, peer), LIVENESS_SECONDS)
        except (DialError, StreamClosed, asyncio.TimeoutError, PeerFault):
            return None

    async def _boot_of(self, address: str, peer: str) -> bytes:
        """The boot id of whoever is `peer` at `address` now: the first half of a handshake."""
        connection = await self._transport.dial(address, peer, timeout_s=LIVENESS_SECONDS)
        try:
            dialer = Dialer(self._me(), peer, connection.binding, self._random_bytes)
            stream = await connection.open(HANDSHAKE_METHOD, b"", timeout_s=LIVENESS_SECONDS)
            try:
                await stream.send(dialer.hello())
                frame = await stream.recv(LIVENESS_SECONDS)
            finally:
                stream.cancel("seen")
            challenge = Challenge()
            decode(challenge, frame[1:])
            return challenge.boot_id
        finally:
            await connection.close()


def _host(call: Call) -> str:
    return call.remote.rpartition(":")[0]
