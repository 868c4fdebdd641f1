"""Peers that lie. Each kind bends one thing of a real node and leaves the rest as it is.

scale, sign_flip, noise: what the learner learned, a hundred times too large, reversed, or random. free_ride: nothing
learned, the weight claimed all the same. lie_weight: a thousand times the samples, and in gossip mode a scale to match.
nan: payloads of random bytes, signed as if they were updates. replay: every message again, later, and in gossip mode every
update twice, wanted or not. equivocate: two updates under one dot, each shown to half of the others (also as convener), in
gossip mode two whole chains, in hybrid mode both.
forge: rosters without a signature, and in gossip mode every update that it sends, its own or not. confess: after some updates
a second header for its oldest one, with the proof, to half of the others. stranger: an invite whose token is made up. The
node's own guards stay on; what they would stop is put in behind them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.message import DecodeError

from ..aggregation.compress import Sparse
from ..aggregation.contributions import Contributions
from ..aggregation.forks import head_of
from ..node.gossip_mode import proof_notice
from ..node.learner import LocalResult
from ..node.store.journal import OwnUpdate
from ..node.swarm.gossip import Gossip
from ..node.swarm.hybrid import Hybrid
from ..node.swarm.rounds import Rounds
from ..protocol.ballot_messages import Header, parse_header
from ..protocol.errors import PeerFault
from ..protocol.gossip_wire import Range
from ..protocol.signing import sign_body
from ..protocol.transport import Stream
from ..protocol.version import Dot
from ..protocol.wire_pb2 import Envelope, Join, Roster, Signed, UpdateHeader, Updates
from .ledger import Learned, Witness

if TYPE_CHECKING:
    from ..node.node import Node

KINDS = (
    "scale",
    "sign_flip",
    "nan",
    "noise",
    "replay",
    "equivocate",
    "free_ride",
    "lie_weight",
    "stranger",
    "forge",
    "confess",
)
REPLAYED_MAX = 256
CONFESSED_AFTER = 6  # own updates
WEIGHT_LIE = 1000

Heard = Callable[[Header, bytes], None]


class Liar(Witness):
    """A witnessed learner whose results are bent as `kind` says; None: honest."""

    kind: str | None = None

    def __init__(self, learner, record: Learned, rng: random.Random) -> None:
        super().__init__(learner, record)
        self._rng = np.random.Generator(np.random.PCG64(rng.getrandbits(64)))

    def finish(self) -> LocalResult:
        result = self._learner.finish()
        delta, weight = result.delta, result.weight
        if self.kind == "scale":
            delta = np.clip(delta * 100, -0.9, 0.9).astype(np.float32)
        elif self.kind == "sign_flip":
            delta = -delta
        elif self.kind == "noise":
            delta = (0.3 * self._rng.standard_normal(delta.size)).astype(np.float32)
        elif self.kind == "free_ride":
            delta = np.zeros_like(delta)
        elif self.kind == "lie_weight":
            weight *= WEIGHT_LIE
        result = LocalResult(delta=delta, weight=weight, metrics=result.metrics)
        self._record.add(result.delta)
        return result


def bend(node: Node, kind: str, rng: random.Random, heard: Heard) -> None:
    """Make a running node lie on the wire: replay, equivocate, nan. `heard`: told of updates that it signs beside its own."""
    rounds = node.rounds
    assert rounds is not None
    if kind == "replay":
        _replay(node, rng)
        if isinstance(rounds, Gossip):
            _send_all_twice(rounds)
    elif kind == "equivocate":
        if isinstance(rounds, Gossip):
            _two_chains(node, rounds, heard)
        if isinstance(rounds, Rounds | Hybrid):
            _two_headers(node, heard)
    elif kind == "nan":
        _garbage(node, rng)
    elif kind == "forge":
        _forge(node)
    elif kind == "confess":
        _confess(node)
    elif kind == "lie_weight" and isinstance(rounds, Gossip):
        scale = rounds._work._scale
        rounds._work._scale = lambda state, result: WEIGHT_LIE * scale(state, result)


# --- nan --------------------------------------------------------------------------------------------------------------


class _Lenient(Contributions):
    """Takes what does not decode for void, so that a liar's own log holds what it has signed."""

    def _decode(self, header: Header, payload: bytes) -> tuple[np.ndarray, np.ndarray | None, str, float]:
        try:
            return super()._decode(header, payload)
        except PeerFault as fault:
            return np.zeros(0, np.int64), None, f"void: {fault}", 0.0


def _garbage(node: Node, rng: random.Random) -> None:
    """Payloads of random bytes, which decode to nothing, to the largest numbers, or not at all; in gossip mode others'
    payloads are garbled, too, half of those that it passes on."""
    rounds = node.rounds
    assert rounds is not None
    work = rounds._work
    honest = work.encode
    nothing = Sparse(np.zeros(0, np.int64), np.zeros(0, np.float32))
    work.encode = lambda vector, compression: rng.randbytes(len(honest(vector, compression)))
    work.decode = lambda payload, d, compression: nothing
    if isinstance(rounds, Gossip):
        log, me = rounds.log, node.identity.peer_id
        log._contributions = _Lenient(log.contributions.d, log.rules)
        held = log.payload

        def payload(dot: Dot) -> bytes:
            honest = held(dot)
            return honest if dot.peer == me or rng.random() < 0.5 else rng.randbytes(len(honest))

        log.payload = payload  # type: ignore[method-assign]


# --- replay -----------------------------------------------------------------------------------------------------------


def _replay(node: Node, rng: random.Random) -> None:
    post = node.mesh.post
    old: deque[tuple[str, Envelope]] = deque(maxlen=REPLAYED_MAX)

    def posting(peer: str, envelope: Envelope) -> None:
        post(peer, envelope)
        old.append((peer, envelope))
        peer, again = old[rng.randrange(len(old))]
        post(peer, again)

    _rewire(node, posting)


def _send_all_twice(gossip: Gossip) -> None:
    exchange = gossip._exchange
    honest = exchange._send

    def sending(stream: Stream, wanted: list[Range]) -> Awaitable[None]:
        whole = [Range(one.key, 1, one.last) for one in wanted]
        everything = [Range(key, 1, seq) for key, (seq, _) in sorted(gossip.log.vector.entries.items())]
        return honest(stream, whole + everything)

    exchange._send = sending  # type: ignore[method-assign]


# --- equivocate -------------------------------------------------------------------------------------------------------


def _in_other_half(peer: str) -> bool:
    return sum(peer.encode()) % 2 == 1


def _second(node: Node, first: Header, previous_head: bytes) -> Header:
    """Another update under the same dot, with the same payload."""
    wire = UpdateHeader.FromString(Signed.FromString(first.signed).body)
    wire.weight += 1
    wire.previous_head = previous_head
    return parse_header(sign_body(node.identity, "update", "origin", node.run_.id, wire.SerializeToString()))


def _two_headers(node: Node, heard: Heard) -> None:
    """Ring and hybrid mode: half of the others are shown another header when this peer joins an attempt or convenes one."""
    post, me = node.mesh.post, node.identity.peer_id

    def other(wire: Signed) -> Signed:
        first = parse_header(wire)
        second = _second(node, first, first.previous_head)
        payload = next((u.payload for u in node.journal.updates if u.dot == second.dot), None)
        if payload is None:
            return wire
        heard(second, payload)
        return Signed.FromString(second.signed)

    def signed(type_: str, role: str, body: Join | Roster) -> Signed:
        return sign_body(node.identity, type_, role, node.run_.id, body.SerializeToString())

    def twisted(envelope: Envelope) -> Envelope:
        kind = envelope.WhichOneof("body")
        if kind == "join":
            join = Join.FromString(envelope.join.body)
            if join.HasField("header"):
                join.header.CopyFrom(other(join.header))
            return Envelope(join=signed("join", "member", join))
        if kind == "roster":
            roster = Roster.FromString(envelope.roster.body)
            for entry in roster.entries:
                if entry.peer == me and entry.HasField("header"):
                    entry.header.CopyFrom(other(entry.header))
            return Envelope(roster=signed("roster", "convener", roster))
        return envelope

    _rewire(node, lambda peer, envelope: post(peer, twisted(envelope) if _in_other_half(peer) else envelope))


class _OtherChain:
    """A second chain of headers beside the liar's own, with the same payloads, for half of the others."""

    def __init__(self, node: Node, gossip: Gossip, heard: Heard) -> None:
        self._node, self._gossip, self._heard = node, gossip, heard
        self._made: dict[Dot, Header] = {}

    def instead_of(self, first: Header) -> Signed:
        """Of what the liar signed before it began to lie, and of others' updates, there is only one."""
        if first.dot.peer != self._node.identity.peer_id:
            return Signed.FromString(first.signed)
        if (made := self._made.get(first.dot)) is None:
            dot = first.dot
            before = self._made.get(Dot(dot.peer, dot.incarnation, dot.seq - 1))
            made = _second(self._node, first, head_of(before) if before is not None else first.previous_head)
            self._made[dot] = made
            self._heard(made, self._gossip.log.payload(dot))
        return Signed.FromString(made.signed)


class _Twisted(Stream):
    """A stream on which other headers go out in place of the honest ones."""

    def __init__(self, stream: Stream, instead_of: Callable[[Header], Signed]) -> None:
        self._stream, self._instead_of = stream, instead_of

    async def send(self, frame: bytes) -> None:
        await self._stream.send(self._twist(frame))

    async def recv(self, timeout_s: float) -> bytes:
        return await self._stream.recv(timeout_s)

    async def done_sending(self) -> None:
        await self._stream.done_sending()

    def cancel(self, reason: str) -> None:
        self._stream.cancel(reason)

    def _twist(self, frame: bytes) -> bytes:
        try:
            updates = Updates.FromString(frame)
            headers = [parse_header(start.header) for start in updates.updates]
        except (DecodeError, PeerFault):  # a frame of another kind
            return frame
        for start, first in zip(updates.updates, headers, strict=True):
            start.header.CopyFrom(self._instead_of(first))
        return updates.SerializeToString() if headers else frame


def _two_chains(node: Node, gossip: Gossip, heard: Heard) -> None:
    """Gossip mode, and the sums of hybrid mode. The liar does not hand out the proof against itself."""
    gossip._exchange._equivocation = lambda first, second: None
    _twist_streams(node, gossip, _OtherChain(node, gossip, heard).instead_of, _in_other_half)


def _twist_streams(
    node: Node, gossip: Gossip, instead_of: Callable[[Header], Signed], to: Callable[[str], bool]
) -> None:
    exchange, handlers = gossip._exchange, node.mesh._accepting.handlers

    def twisted(peer: str, stream: Stream) -> Stream:
        return _Twisted(stream, instead_of) if to(peer) else stream

    open_stream = exchange._open

    async def opening(peer: str, kind: str, timeout_s: float) -> Stream:
        return twisted(peer, await open_stream(peer, kind, timeout_s))

    exchange._open = opening
    for kind, serve in (("Gossip", exchange.serve), ("Fetch", exchange.serve_fetch)):
        handlers[kind] = lambda peer, stream, serve=serve: serve(peer, twisted(peer, stream))


# --- forge, confess ---------------------------------------------------------------------------------------------------


def _forge(node: Node) -> None:
    post = node.mesh.post

    def posting(peer: str, envelope: Envelope) -> None:
        if envelope.WhichOneof("body") == "roster":
            forged = Signed(body=envelope.roster.body, signature=bytes(64))
            envelope = Envelope(roster=forged)
        post(peer, envelope)

    _rewire(node, posting)
    if isinstance(node.rounds, Gossip):

        def forged(header: Header) -> Signed:
            return Signed(body=Signed.FromString(header.signed).body, signature=bytes(64))

        _twist_streams(node, node.rounds, forged, lambda peer: True)


def _confess(node: Node) -> None:
    """One update late enough for the oldest of its chain to be final, and the proof goes to half of the others alone."""
    say = node.journal.say

    def saying(peer: str, build: Callable[[Dot, bytes], OwnUpdate]) -> OwnUpdate:
        update = say(peer, build)
        if update.dot.seq == CONFESSED_AFTER:
            first = parse_header(Signed.FromString(node.journal.updates[0].signed))
            notice = proof_notice(first.dot, first.signed, _second(node, first, first.previous_head).signed)
            assert node.members is not None
            for other in sorted(filter(_in_other_half, node.members.alive())):
                node.mesh.post(other, Envelope(ban=notice))
        return update

    node.journal.say = saying  # type: ignore[method-assign]


def _rewire(node: Node, post: Callable[[str, Envelope], None]) -> None:
    """The rounds were handed the honest `post` when they were built."""
    if isinstance(node.rounds, Rounds | Hybrid):
        node.rounds.ballot._post = post
    if isinstance(node.rounds, Hybrid):
        node.rounds.sealing._post = post
    if isinstance(node.rounds, Gossip):
        node.rounds._post = post
