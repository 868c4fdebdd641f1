"""Connections to everybody, over a `Transport`, real or simulated: what the rest of a node uses.

Theory of operation. Who is talked to is connected to, and stays so while there are not too many (limits.py); an idle connection
beyond that is closed, and dialed again when it is needed. Per peer there is at most one dialed connection and one "Control"
stream on it, on which messages (`Envelope`) flow both ways; a peer that opened one to us is answered on that, and dialed only
where there is none. Messages are best effort: bounded queues that drop the oldest, because every sender repeats what matters.
Streams of other methods carry bulk data and are served only to live sessions; a ban ends them at once, a newer process of the
same identity at the next frame.

Here are the public surface and the sending of messages; links.py keeps what all sides share, dialing.py and accepting.py
are the two sides of a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence

from ...protocol import limits
from ...protocol.errors import PeerFault
from ...protocol.handshake import Other, Self
from ...protocol.transport import Clock, DialError, Stream, StreamClosed, Transport
from ...protocol.wire_pb2 import Envelope, Welcome
from .accepting import Accepting, StreamHandler
from .dialing import DIAL_SECONDS, Dialing
from .link import Link, SessionStream
from .links import Links

# A queued message older than this says nothing new: senders repeat faster.
STALE_SECONDS = 10.0


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
        self._transport = transport
        self._links = Links(clock=clock, me=me, random_bytes=random_bytes, rng=rng, say=say)
        self._dialing = Dialing(self._links, transport)
        self._accepting = Accepting(self._links, self._dialing, transport, known)
        self.traffic = self._links.traffic
        self.failed = self._links.failed

    # ------------------------------------------------------------------------------------------------ set-up

    def serve(self, method: str, handler: StreamHandler) -> None:
        """Register the handler of a stream method."""
        self._accepting.handlers[method] = handler

    def on_message(self, callback: Callable[[str, Envelope], None]) -> None:
        """Called for every decoded message; raises PeerFault for what must be charged."""
        self._links.on_message = callback

    def on_welcome(self, callback: Callable[[str, Welcome], None]) -> None:
        """Called for every peer that let us in."""
        self._dialing.on_welcome = callback

    async def listen(self, host: str, port: int) -> int:
        """The bound port. Raises ShoalError(ADDRESS)."""
        return await self._transport.listen(host, port, self._accepting.gate, self._accepting.accept)

    async def close(self) -> None:
        """End every stream and connection."""
        await self._links.close()
        await self._transport.close()

    # ------------------------------------------------------------------------------------------------ peers

    def news(self, peer: str, addresses: Sequence[str]) -> None:
        """A peer was heard of: remember its addresses, newest first, and close its circuit breaker. Where there is no room for
        another peer it stays unknown; that is nobody's fault, whoever told of it."""
        try:
            self._links.news(peer, addresses)
        except PeerFault as full:
            self._links.say("a peer is not remembered", level="debug", peer=peer, cause=str(full))

    def addresses(self, peer: str) -> list[str]:
        peers = self._links.peers
        return list(peers[peer].addresses) if peer in peers else []

    def connected(self) -> list[str]:
        """Peers with a connection in either direction."""
        links = self._links.peers.items()
        return sorted(p for p, link in links if link.connection is not None or link.incoming())

    def last_error(self, peer: str) -> str:
        peers = self._links.peers
        return peers[peer].breaker.last_error if peer in peers else ""

    def ban(self, peer: str, reason: str, evidence: bytes = b"") -> bool:
        """Refuse a peer from now on, and end what it has open. True when this is news."""
        return self._links.ban(peer, reason, evidence)

    def fault(self, peer: str, fault: PeerFault) -> None:
        """Count a fault and charge it; a peer with many that no honest one makes is banned here."""
        self._links.fault(peer, fault)

    # ------------------------------------------------------------------------------------------------ connections

    async def connect(self, address: str, peer: str) -> Other:
        """Dial one address now, whatever the breaker says. Raises DialError or Refused."""
        return await self._dialing.connect(address, peer)

    async def open(self, peer: str, method: str, timeout_s: float = DIAL_SECONDS) -> Stream:
        """A bulk stream. Raises DialError, StreamClosed, asyncio.TimeoutError."""
        return await self._dialing.open(peer, method, timeout_s)

    # ------------------------------------------------------------------------------------------------ messages

    def post(self, peer: str, envelope: Envelope) -> None:
        """Queue one message, best effort; never blocks, never raises."""
        if self._links.closed or peer == self._links.me().identity.peer_id:
            return
        frame = envelope.SerializeToString()
        if len(frame) > limits.MESSAGE_BYTES_MAX:
            self._links.say(
                "message too large, not sent", level="error", bytes=len(frame), limit=limits.MESSAGE_BYTES_MAX
            )
            return
        try:
            link = self._links.to(peer)
        except PeerFault as fault:
            return self._links.say("message not sent", level="warning", cause=str(fault))
        link.used_at = self._links.clock.now()
        idle = link.sender is None or link.sender.done()
        if idle and not link.queue:  # the usual case needs no task
            stream = link.control or link.incoming()
            if stream is not None and stream.send_now(frame):
                return
        link.queue.append((link.used_at, frame))
        if idle:
            link.sender = self._links.own(self._send_loop(peer, link), f"sender to {peer[-6:]}")

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
            if self._links.clock.now() - queued_at > STALE_SECONDS:
                continue
            try:
                await stream.send(frame)
            except StreamClosed:
                if stream is link.control:
                    await self._links.drop(link)
                elif stream in link.accepted:
                    link.accepted.remove(stream)

    async def _control_of(self, peer: str, link: Link) -> SessionStream | None:
        """A control stream to the peer: ours, else the one it opened, else a new one.

        A restarted peer comes to us while we still try where it was: what it opens is used at once, the dial goes on by itself.
        """
        stream = link.control or link.incoming()
        if stream is None:
            link.called = asyncio.get_running_loop().create_future()
            dial = self._links.own(self._try(peer), f"dial of {peer[-6:]}")
            await asyncio.wait({dial, link.called}, return_when=asyncio.FIRST_COMPLETED)
            link.called = None
            stream = link.control or link.incoming()
        return stream

    async def _try(self, peer: str) -> None:
        with contextlib.suppress(DialError):
            await self._dialing.ensure(peer)
