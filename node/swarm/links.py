"""What dialing, accepting and sending share: the table of links, sessions, counters, owned tasks; faults and bans.

No transport here: connections come from dialing.py, accepted streams from accepting.py.

A fault of a peer is counted and charged; it ends the bulk stream it came on, and the whole connection when no honest peer
could have made it. Many of those are a ban (protocol/conduct.py). An error of our own surfaces through `failed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from ...protocol import limits
from ...protocol.admission import Sessions
from ...protocol.conduct import Conduct
from ...protocol.errors import PeerFault
from ...protocol.handshake import Self
from ...protocol.transport import Clock, StreamClosed
from ...protocol.wire_pb2 import Envelope
from .link import Link, SessionStream, Traffic

# A control stream is idle for as long as nobody has anything to say; keepalive notices a dead one.
CONTROL_IDLE_SECONDS = 3600.0
# Faults that no honest peer can make, whatever it received from others: the connection ends. Others cost their message
# or their bulk stream.
DISCONNECTING = frozenset({"bad_signature", "wrong_signer", "bad_envelope"})
STRANGER = "stranger"  # who faults before admission are charged to


class Links:
    """All links of one node, and the tasks that work on them.

    Attributes:
        me: this side of handshakes, asked each time (addresses and incarnation change).
        peers: links by peer id; at most limits.LINKS_MAX.
        on_message: called for every decoded message; raises PeerFault for what must be charged.
        failed: an error of our own, of whichever task.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        me: Callable[[], Self],
        random_bytes: Callable[[int], bytes],
        rng: random.Random,
        say: Callable[..., None],
    ) -> None:
        self.clock, self.me, self.rng, self.random_bytes, self.say = clock, me, rng, random_bytes, say
        self.sessions = Sessions(random_bytes)
        self.peers: dict[str, Link] = {}
        self.traffic = Traffic()
        self.closed = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_message: Callable[[str, Envelope], None] = lambda peer, envelope: None
        self._conduct = Conduct()
        self._tasks: set[asyncio.Task[Any]] = set()

    # ------------------------------------------------------------------------------------------------ tasks

    def own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` as an owned task; what it dies of surfaces in `failed`."""
        task = asyncio.ensure_future(work)
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Surface an error of our own."""
        if not self.failed.done():
            self.failed.set_exception(error)

    async def close(self) -> None:
        """End every task and every dialed connection."""
        self.closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self.peers.values():
            if link.connection is not None:
                await link.connection.close()

    # ------------------------------------------------------------------------------------------------ the table

    def to(self, peer: str) -> Link:
        """The peer's link, made when there is none. Raises PeerFault("too_many_peers")."""
        if peer not in self.peers:
            if len(self.peers) >= limits.LINKS_MAX:
                idle = next((p for p, link in self.peers.items() if link.idle()), None)
                if idle is None:
                    raise PeerFault("too_many_peers", f"{len(self.peers)} peers, limit {limits.LINKS_MAX}")
                del self.peers[idle]
                self.traffic.forget(idle)
            self.peers[peer] = Link()
        return self.peers[peer]

    def news(self, peer: str, addresses: Sequence[str]) -> None:
        """A peer was heard of: remember its addresses, newest first, and close its circuit breaker."""
        if peer == self.me().identity.peer_id:
            return
        link = self.to(peer)
        link.remember(*addresses)
        link.breaker.reset()

    async def drop(self, link: Link) -> None:
        """End our connection to a peer."""
        connection, control = link.connection, link.control
        link.connection = link.control = None
        link.boot_id = b""
        if control is not None:
            control.cancel("connection dropped")
        if connection is not None:
            await connection.close()

    async def drop_idle(self, but: Link) -> None:
        """Close dialed connections beyond CONNECTIONS_KEPT_MAX that carry nothing, those unused for longest first."""
        dialed = [link for link in self.peers.values() if link.connection is not None]
        excess = len(dialed) - limits.CONNECTIONS_KEPT_MAX
        if excess <= 0:
            return
        before = self.clock.now() - limits.CONNECTION_IDLE_SECONDS_MIN
        idle = [link for link in dialed if link.used_at < before and link is not but and link.quiet()]
        for link in sorted(idle, key=lambda link: link.used_at)[:excess]:
            await self.drop(link)

    # ------------------------------------------------------------------------------------------------ faults

    def ban(self, peer: str, reason: str, evidence: bytes = b"") -> bool:
        """Refuse a peer from now on, and end what it has open. True when this is news."""
        news = self.me().bans.add(peer, reason, evidence)
        self._conduct.forget(peer)
        self._disconnect(peer, "banned")
        return news

    def _disconnect(self, peer: str, reason: str) -> None:
        """End everything a peer has open, in both directions, at once; no attempt to dial it for a while."""
        self.sessions.revoke(peer)
        link = self.peers.get(peer)
        if link is None:
            return
        link.cancel_streams(reason)
        link.queue.clear()
        link.breaker.failed(self.clock.now(), self.rng, reason)
        link.breaker.retry_at = self.clock.now() + limits.RECONNECT_BACKOFF_SECONDS_MAX
        if link.connection is not None and not self.closed:
            self.own(self.drop(link), f"disconnect {peer[-6:]}")

    def fault(self, peer: str, fault: PeerFault) -> None:
        """Count a fault and charge it; disconnect or ban the peer when that is called for."""
        self.traffic.charge(peer, fault.kind)
        self.say("peer fault", level="warning", peer=peer, kind=fault.kind, detail=fault.detail)
        if peer not in self.peers:
            return  # a stranger, or somebody we only heard of: nothing is open
        now = self.clock.now()
        reason = self._conduct.fault(peer, fault.kind, fault.detail, now)
        if reason is not None and self.me().bans.reason(peer) is None:
            self.say("banned here", level="warning", peer=peer, reason=reason)
            self._ban_for_conduct(peer, reason, now)
        elif fault.kind in DISCONNECTING:
            self._disconnect(peer, f"disconnected after {fault.kind}")

    def _ban_for_conduct(self, peer: str, reason: str, now: float) -> None:
        try:
            self.ban(peer, reason, self._conduct.evidence(peer, now))
        except PeerFault as full:  # no room for another ban
            self.say("not banned", level="warning", peer=peer, cause=str(full))
            self._disconnect(peer, reason)

    # ------------------------------------------------------------------------------------------------ messages

    async def read_messages(self, peer: str, stream: SessionStream) -> None:
        """Decode and deliver what comes on a control stream until it ends."""

        def take(frame: bytes) -> bool:
            if (link := self.peers.get(peer)) is not None:
                link.used_at = self.clock.now()
            envelope = Envelope()
            try:
                try:
                    envelope.ParseFromString(frame)
                except DecodeError as error:
                    raise PeerFault("bad_envelope", str(error)) from None
                self.on_message(peer, envelope)
            except PeerFault as fault:
                self.fault(peer, fault)
                return fault.kind not in DISCONNECTING
            return True

        with contextlib.suppress(StreamClosed, asyncio.TimeoutError):
            await stream.each(take, CONTROL_IDLE_SECONDS)
