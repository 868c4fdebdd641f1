"""Connections that others open: the gate, handshakes, sessions, their streams.

Nothing of a stranger is read but a handshake, and of those only so many at once, in all and of one host. Streams of other
methods are served only to live sessions.

One identity, one process: who comes with an identity that we know from another process (another boot id) is let in only
after that one failed to answer at the addresses we know of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from ...protocol import limits
from ...protocol.errors import PeerFault, ShoalError
from ...protocol.handshake import Dialed, Other, Refuse, refuse
from ...protocol.transport import HANDSHAKE_METHOD, Call, Stream, StreamClosed, Transport
from ...protocol.wire_pb2 import Refusal
from .dialing import BUSY, CONTROL, Dialing
from .link import SessionStream
from .links import STRANGER, Links
from .tokens import TOKENS, Tokens

StreamHandler = Callable[[str, Stream], Awaitable[None]]


class Accepting:
    """The dialed side of a mesh. `handlers`: by stream method, all but the handshake and the control stream."""

    def __init__(
        self, links: Links, dialing: Dialing, transport: Transport, known: Callable[[str], tuple[int, int]]
    ) -> None:
        """`known`: highest (incarnation, seq) seen of a peer, told to it in the Welcome."""
        self._links, self._dialing, self._transport, self._known = links, dialing, transport, known
        self._tokens = Tokens(links, dialing)
        self._handshakes: Counter[str] = Counter()  # in progress, by host
        self.handlers: dict[str, StreamHandler] = {TOKENS: self._tokens.serve}

    def gate(self, call: Call) -> str | None:
        if self._links.closed:
            return "closing"
        if call.method == HANDSHAKE_METHOD:
            full = sum(self._handshakes.values()) >= limits.HANDSHAKES_AT_ONCE_MAX
            return BUSY if full or self._handshakes[_host(call)] >= limits.HANDSHAKES_PER_HOST_MAX else None
        session = self._links.sessions.find(call.token)
        if session is None or not session.live:
            return "no session"
        return None if call.method == CONTROL or call.method in self.handlers else f"no method {call.method}"

    async def accept(self, call: Call, stream: Stream) -> None:
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
            session = self._links.sessions.find(call.token)
            if session is None:
                return stream.cancel("no session")
            peer = who = session.peer
            checked = SessionStream(stream, self._links.traffic, call.method, peer, session)
            if call.method == CONTROL:
                await self._serve_control(peer, checked)
            else:
                self._links.to(peer).streams.add(checked)
                await self.handlers[call.method](peer, checked)
        except PeerFault as fault:
            self._links.fault(peer, fault)
            stream.cancel(fault.kind)
        except (StreamClosed, asyncio.TimeoutError, ShoalError) as error:
            self._links.say("stream ended", level="debug", peer=who, method=call.method, cause=str(error))
            stream.cancel("ended")
        except Exception as error:  # whatever it is, it is ours and must be seen
            self._links.fail(error)
            stream.cancel("internal error")

    async def _serve_control(self, peer: str, stream: SessionStream) -> None:
        link = self._links.to(peer)
        link.accept(stream)
        try:
            await self._links.read_messages(peer, stream)
        finally:
            if stream in link.accepted:
                link.accepted.remove(stream)

    async def _serve_handshake(self, call: Call, stream: Stream) -> None:
        dialed = Dialed(self._links.me(), self._transport.binding, self._links.random_bytes)
        answer = dialed.on_hello(await stream.recv(limits.HANDSHAKE_SECONDS_MAX))
        if isinstance(answer, bytes):
            await stream.send(answer)
            frame = await stream.recv(limits.HANDSHAKE_SECONDS_MAX)
            known = self._links.me().admission.owner(dialed.token_id) is not None
            answer = dialed.on_proof(frame)
            if isinstance(answer, Other):
                used = await self._tokens.settle(dialed.token_id, answer.peer, known=known)
                answer = used or await self._other_process(answer) or answer
        if isinstance(answer, Other) and (reason := self._links.me().bans.reason(answer.peer)) is not None:
            answer = refuse(Refusal.BANNED, reason, "Only the swarm's members can lift a ban.")  # banned meanwhile
        if isinstance(answer, Refuse):
            self._links.traffic.faults[f"refused_{Refusal.Reason.Name(answer.reason).lower()}"] += 1  # type: ignore[arg-type]
            self._links.say("handshake refused", level="warning", remote=call.remote, reason=answer.detail)
            await stream.send(answer.frame)
            return
        assert isinstance(answer, Other)
        self._links.news(answer.peer, answer.addresses)
        link = self._links.to(answer.peer)
        if link.connection is not None and link.boot_id != answer.boot_id:
            await self._links.drop(link)  # leads to a process that is no more
        self._links.sessions.revoke(answer.peer, but_boot=answer.boot_id)
        session = self._links.sessions.start(answer.peer, answer.boot_id, self._links.clock.now())
        incarnation, seq = self._known(answer.peer)
        await stream.send(
            dialed.welcome(session.token, incarnation_known=incarnation, seq_known=seq, observed=call.remote)
        )

    async def _other_process(self, other: Other) -> Refuse | None:
        """A refusal if another live process has this identity: one that still answers with a boot id that we knew."""
        link = self._links.peers.get(other.peer)
        boots = {s.boot_id for s in self._links.sessions.of(other.peer)}
        if link is not None and link.connection is not None:
            boots.add(link.boot_id)
        boots.discard(other.boot_id)
        if not boots or link is None:
            return None
        answers = await asyncio.gather(*(self._dialing.boot_at(address, other.peer) for address in link.addresses))
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


def _host(call: Call) -> str:
    return call.remote.rpartition(":")[0]
