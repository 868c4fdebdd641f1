"""Whose token is it: members ask each other before they admit a newcomer by a token, and tell each other afterwards.

So a token that one identity used at one member admits no other at any member that can reach that one or somebody who was
told. Two identities that use a token at the same time at two members: both members ask each other, and the smaller
sha-256 of (token id, peer id) is admitted, on either side. What is told is believed (protocol/admission.py says why).

Covers streams "Tokens". Does not cover: whether a proof of a token is good (protocol/admission.py).
"""

from __future__ import annotations

import asyncio

from ...protocol import limits
from ...protocol.admission import TOKEN_ID_BYTES, USED_BY_ANOTHER
from ...protocol.errors import PeerFault
from ...protocol.handshake import Refuse, refuse
from ...protocol.transport import DialError, Stream, StreamClosed
from ...protocol.version import sha256
from ...protocol.wire_pb2 import Refusal, TokenUse
from .dialing import Dialing
from .frames import parse
from .links import Links

TOKENS = "Tokens"
# A part of the handshake's time; whoever does not answer within it is not waited for.
ASK_SECONDS = 2.0


class Tokens:
    """One member's part in it."""

    def __init__(self, links: Links, dialing: Dialing) -> None:
        self._links, self._dialing = links, dialing
        self._pending: dict[bytes, str] = {}  # token id → who is to have it, of handshakes in progress here

    async def settle(self, token_id: bytes, peer: str, *, known: bool) -> Refuse | None:
        """A refusal if another identity was first to use the token that `peer` has just proven.

        Args:
            known: it was bound to `peer` before this handshake: nothing is asked.
        """
        admission = self._links.me().admission
        if not token_id or (known and token_id not in self._pending):
            return None
        self._pending[token_id] = peer
        admitted = False
        try:
            answers = await self._ask_all(TokenUse(token_id=token_id, peer=peer))
            rivals = {*answers, self._pending[token_id]} - {peer, ""}
            admitted = not rivals
        finally:
            self._pending.pop(token_id, None)
            if not admitted:
                admission.release(token_id)
        if rivals:
            admission.hear(token_id, min(rivals))
            values = f"{admission.mode} admission: {USED_BY_ANOTHER}"
            return refuse(Refusal.NOT_ADMITTED, values, "Ask a member for an invite.")
        self._links.own(self._tell(TokenUse(token_id=token_id, peer=peer, used=True)), "tell of a token")
        return None

    async def serve(self, peer: str, stream: Stream) -> None:
        """Handler of "Tokens" streams."""
        use = TokenUse()
        parse(use, await stream.recv(ASK_SECONDS))
        if len(use.token_id) != TOKEN_ID_BYTES or not 0 < len(use.peer) <= limits.PEER_ID_CHARS_MAX:
            raise PeerFault(
                "bad_message", f"a token id of {len(use.token_id)} bytes, a peer of {len(use.peer)} characters"
            )
        await stream.send(TokenUse(token_id=use.token_id, peer=self._answer(use)).SerializeToString())
        await stream.done_sending()

    def _answer(self, use: TokenUse) -> str:
        """Who uses the token, or nobody; of two newcomers at the same time, who is to have it, and it stays so here."""
        admission = self._links.me().admission
        here = self._pending.get(use.token_id)
        if here is None or use.used:
            if use.used and admission.mode == "token":
                admission.hear(use.token_id, use.peer)
            return admission.owner(use.token_id) or ""
        self._pending[use.token_id] = min((here, use.peer), key=lambda p: sha256(use.token_id, p.encode()))
        return self._pending[use.token_id]

    def _others(self, token_id: bytes, newcomer: str) -> list[str]:
        here = [p for p, link in self._links.peers.items() if link.connection is not None or link.incoming()]
        return sorted((p for p in here if p != newcomer), key=lambda p: sha256(token_id, p.encode()))[
            : limits.TOKEN_ASKED_MAX
        ]

    async def _ask_all(self, use: TokenUse) -> list[str]:
        """Answers of those that answer in time; empty for "nobody"."""
        others = self._others(use.token_id, use.peer)
        return [a for a in await asyncio.gather(*(self._ask(p, use) for p in others)) if a is not None]

    async def _tell(self, use: TokenUse) -> None:
        await self._ask_all(use)

    async def _ask(self, peer: str, use: TokenUse) -> str | None:
        try:
            return await asyncio.wait_for(self._exchange(peer, use), ASK_SECONDS)
        except (StreamClosed, DialError, asyncio.TimeoutError) as error:
            cause = str(error) or type(error).__name__
            self._links.say("not asked about a token", level="debug", peer=peer, cause=cause)
        except PeerFault as fault:
            self._links.fault(peer, fault)
        return None

    async def _exchange(self, peer: str, use: TokenUse) -> str:
        stream = await self._dialing.open(peer, TOKENS, ASK_SECONDS)
        try:
            await stream.send(use.SerializeToString())
            answer = TokenUse()
            parse(answer, await stream.recv(ASK_SECONDS))
            if answer.token_id != use.token_id or len(answer.peer) > limits.PEER_ID_CHARS_MAX:
                raise PeerFault("bad_message", "the answer is about another token, or names no peer")
            return answer.peer
        finally:
            stream.cancel("answered")
