"""Connections that this node opens: dial, handshake, control stream, bulk streams.

Failures to dial open a per-peer circuit breaker with capped backoff, so a dead peer costs nobody time; news of the peer
closes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...protocol import limits
from ...protocol.errors import PeerFault
from ...protocol.handshake import Dialer, Other, Refused, decode
from ...protocol.transport import HANDSHAKE_METHOD, Connection, DialError, Stream, StreamClosed, Transport
from ...protocol.wire_pb2 import Challenge, Refusal, Welcome
from .link import Link, SessionStream
from .links import Links

CONTROL = "Control"
DIAL_SECONDS = 5.0
# How long the process that holds an identity may take to show that it lives, before a newcomer with it is let in.
LIVENESS_SECONDS = 3.0
BUSY = "busy with other handshakes"


class Dialing:
    """The dialing side of a mesh. `on_welcome` is told of every completed handshake."""

    def __init__(self, links: Links, transport: Transport) -> None:
        self._links, self._transport = links, transport
        self.on_welcome: Callable[[str, Welcome], None] = lambda peer, welcome: None

    async def connect(self, address: str, peer: str) -> Other:
        """Dial one address now, whatever the breaker says. Raises DialError or Refused."""
        self._links.news(peer, [address])
        link = self._links.to(peer)
        async with link.lock:
            await self._links.drop(link)
            return await self._dial(link, peer, address)

    async def ensure(self, peer: str, timeout_s: float = DIAL_SECONDS) -> Link:
        """A link with a connection. Raises DialError."""
        link = self._links.to(peer)
        async with link.lock:
            if link.connection is not None:
                return link
            breaker = link.breaker
            if self._links.clock.now() < breaker.retry_at:
                raise DialError("unreachable", f"waiting after {breaker.failures} failures: {breaker.last_error}")
            errors = ["no address is known"] if not link.addresses else []
            for address in list(link.addresses):
                try:
                    await self._dial(link, peer, address, timeout_s)
                    return link
                except (DialError, Refused) as error:
                    errors.append(" ".join(str(error).split()))
            breaker.failed(self._links.clock.now(), self._links.rng, "; ".join(errors)[: limits.REASON_CHARS_MAX])
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
                self._links.traffic.charge(peer, error.kind)
                raise DialError("unreachable", f"{address}: handshake: {error}") from None
            if isinstance(error, StreamClosed):
                raise DialError("unreachable", f"{address}: handshake: {error.reason}") from None
            if isinstance(error, asyncio.TimeoutError):
                raise DialError("timeout", f"{address}: no end of the handshake") from None
            raise
        link.connection, link.token, link.boot_id = connection, welcome.session, other.boot_id
        link.used_at = self._links.clock.now()
        await self._links.drop_idle(link)
        link.breaker.reset()
        link.breaker.last_error = ""
        link.remember(address, *other.addresses)
        admission = self._links.me().admission
        if welcome.admission_key and not admission.key:
            admission.key = welcome.admission_key
        link.control = SessionStream(stream, self._links.traffic, CONTROL, peer, None)
        self._links.own(self._read_control(peer, link, link.control, connection), f"control of {peer[-6:]}")
        self.on_welcome(peer, welcome)
        return other

    def _refuse_banned(self, peer: str) -> None:
        if (reason := self._links.me().bans.reason(peer)) is not None:
            raise DialError("unreachable", f"{peer} is banned: {reason}")

    async def _greet(self, connection: Connection) -> tuple[Welcome, Other]:
        dialer = Dialer(self._links.me(), connection.peer_id, connection.binding, self._links.random_bytes)
        stream = await connection.open(HANDSHAKE_METHOD, b"", timeout_s=DIAL_SECONDS)
        try:
            await stream.send(dialer.hello())
            await stream.send(dialer.on_challenge(await stream.recv(limits.HANDSHAKE_SECONDS_MAX)))
            return dialer.on_welcome(await stream.recv(limits.HANDSHAKE_SECONDS_MAX))
        except StreamClosed as error:
            if BUSY not in error.reason:
                raise
            raise Refused(
                Refusal.BUSY,
                values=f"{connection.address} is {BUSY}, at most {limits.HANDSHAKES_AT_ONCE_MAX} at once",
                todo="Nothing: it is tried again.",
            ) from None
        finally:
            stream.cancel("handshake over")

    async def _read_control(self, peer: str, link: Link, stream: SessionStream, connection: Connection) -> None:
        """Messages that come back on our own control stream; its end is the end of the connection."""
        try:
            await self._links.read_messages(peer, stream)
        finally:
            if link.connection is connection:
                await self._links.drop(link)

    # ------------------------------------------------------------------------------------------------ bulk streams

    async def open(self, peer: str, method: str, timeout_s: float = DIAL_SECONDS) -> Stream:
        """A bulk stream. Raises DialError, StreamClosed, asyncio.TimeoutError."""
        stream = await self._open(peer, method, timeout_s) or await self._open(peer, method, timeout_s)
        if stream is None:
            raise StreamClosed(f"unavailable: {peer[-6:]} closes every connection")
        opened = SessionStream(stream, self._links.traffic, method, peer, None)
        if self._links.me().bans.reason(peer) is not None:
            opened.cancel("banned")
            raise StreamClosed("banned")
        self._links.to(peer).streams.add(opened)
        return opened

    async def _open(self, peer: str, method: str, timeout_s: float) -> Stream | None:
        """None when the connection turns out to be over, as after the peer's restart: nothing was sent, dial anew."""
        link = await self.ensure(peer, timeout_s)
        connection, link.used_at = link.connection, self._links.clock.now()
        assert connection is not None
        try:
            return await connection.open(method, link.token, timeout_s=timeout_s)
        except (StreamClosed, asyncio.TimeoutError) as error:
            if link.connection is connection:
                await self._links.drop(link)
            if isinstance(error, StreamClosed) and "unauthenticated" not in error.reason:
                return None
            raise

    # ------------------------------------------------------------------------------------------------ who is there

    async def boot_at(self, address: str, peer: str) -> bytes | None:
        """`_boot_of` under a deadline; None when nobody answers as `peer`."""
        try:
            return await asyncio.wait_for(self._boot_of(address, peer), LIVENESS_SECONDS)
        except (DialError, StreamClosed, asyncio.TimeoutError, PeerFault):
            return None

    async def _boot_of(self, address: str, peer: str) -> bytes:
        """The boot id of whoever is `peer` at `address` now: the first half of a handshake."""
        connection = await self._transport.dial(address, peer, timeout_s=LIVENESS_SECONDS)
        try:
            dialer = Dialer(self._links.me(), peer, connection.binding, self._links.random_bytes)
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
