"""Hybrid mode's own messages: draws of rings, seals, and the combined update that a ring publishes. Pure; all hostile.

A *draw* names the members of one ring, each with the nonce of its request, so that a member that left or restarted meanwhile
is not taken for the one that was drawn. The draw's hash is the base lineage of the ring's round: what its members sign for
this round (updates, votes, seals) serves no other ring.

A *combined update* is what the round came to: the decided value, which lists the inner dots, and the sum of what they
contribute. It travels as payload of an update of whichever member publishes it, and counts only if more than half of
the ring have sealed it *for that very dot*. A member seals one dot for a ring, once: so no round counts twice, whoever
publishes it, and whether a combined update counts follows from its own bytes alone. (Had every member been free to publish, two
copies would have to be told apart by memory of what was counted before, which no log that is compacted can keep.)

Combined updates form chains of their own beside the inner updates of a peer: their incarnations have `COMBINED_LIFE` set.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from . import limits
from .ballot_messages import Exchange, Value, decode_value
from .ballot_rules import is_majority
from .errors import PeerFault
from .identity import Identity
from .signing import sign_body, verify_body
from .version import HASH_BYTES, Dot, sha256
from .wire_pb2 import CombinedUpdate, RingDraw, Signed
from .wire_pb2 import Dot as WireDot
from .wire_pb2 import Seal as WireSeal

NONCE_BYTES: Final = 32
# Set in the incarnation of every chain of combined updates. Lives are counted in seconds of wall time and stay far below.
COMBINED_LIFE: Final = 1 << 62
# A ring drawn by a peer that knows of fewer others than this share of ours would count for too much: it is not joined.
SWARM_SHARE_MIN: Final = 0.5


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise PeerFault("bad_ring", what)


# --- draws ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """One ring.

    Attributes:
        round: above every round that a member has been in.
        drawer: who collected the requests; need not be a member.
        peers: in the whole swarm, as the drawer knows it.
        members: peer → nonce (32 bytes), by peer in ascending order.
        encoded: the exact bytes.
    """

    round: int
    drawer: str
    peers: int
    members: dict[str, bytes]
    encoded: bytes

    def lineage(self, run_id: bytes) -> bytes:
        """32 bytes: the base lineage of the ring's round."""
        return sha256(b"shoal/v1/ring\0", run_id, self.encoded)


def make_draw(round_: int, drawer: str, peers: int, members: dict[str, bytes]) -> Draw:
    """A draw of these members (peer → nonce)."""
    wire = RingDraw(round=round_, drawer=drawer, peers=peers)
    for peer in sorted(members):
        wire.members.add(peer=peer, nonce=members[peer])
    return decode_draw(wire.SerializeToString(deterministic=True))


def decode_draw(encoded: bytes) -> Draw:
    """Raises PeerFault("bad_ring")."""
    _need(len(encoded) <= limits.MESSAGE_BYTES_MAX, f"a draw of {len(encoded)} bytes")
    wire = RingDraw()
    try:
        wire.ParseFromString(encoded)
    except DecodeError:
        raise PeerFault("bad_ring", "a draw does not decode") from None
    peers = [member.peer for member in wire.members]
    _need(0 < len(peers) <= limits.ROSTER_MAX, f"a ring of {len(peers)} members")
    _need(all(0 < len(p) <= limits.PEER_ID_CHARS_MAX for p in (*peers, wire.drawer)), "a peer id of impossible length")
    _need(all(a < b for a, b in zip(peers, peers[1:], strict=False)), "members are not sorted or repeat")
    _need(all(len(m.nonce) == NONCE_BYTES for m in wire.members), "a nonce of another size")
    _need(0 < wire.round <= limits.INT64_MAX and len(peers) <= wire.peers, f"round {wire.round}, {wire.peers} peers")
    _need(wire.SerializeToString(deterministic=True) == encoded, "a draw that is not in canonical form")
    return Draw(wire.round, wire.drawer, wire.peers, {m.peer: m.nonce for m in wire.members}, encoded)


def rings_of(peers: Collection[str], round_: int, size_max: int) -> list[list[str]]:
    """The rings of a round, as far as everybody knows the same peers: sizes differ by at most one. The first peer of each draws
    it; the next one takes over where that one does not answer."""
    prefix = b"shoal/v1/drawer\0" + round_.to_bytes(8, "big")
    order = sorted(peers, key=lambda peer: (sha256(prefix, peer.encode()), peer))
    count = max(1, -(-len(order) // size_max))
    return [order[at::count] for at in range(count)]


# --- seals ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seal:
    """A member's word that the round was decided so and came to this sum, to be published under `dot` alone."""

    peer: str
    lineage: bytes
    value_hash: bytes
    sum_hash: bytes
    dot: Dot

    def sign(self, identity: Identity, run_id: bytes) -> Signed:
        """The signed message."""
        body = WireSeal(
            peer=self.peer,
            lineage=self.lineage,
            value_hash=self.value_hash,
            sum_hash=self.sum_hash,
            dot=wire_dot(self.dot),
        )
        return sign_body(identity, "seal", "member", run_id, body.SerializeToString(deterministic=True))


def decode_seal(signed: Signed, run_id: bytes) -> Seal:
    """A seal with its signature checked. Raises PeerFault."""
    _need(len(signed.body) <= limits.HEADER_BYTES_MAX, f"a seal of {len(signed.body)} bytes")
    wire = WireSeal()
    try:
        wire.ParseFromString(signed.body)
    except DecodeError:
        raise PeerFault("bad_ring", "a seal does not decode") from None
    sizes = [len(wire.lineage), len(wire.value_hash), len(wire.sum_hash)]
    _need(sizes == [HASH_BYTES] * 3, f"a seal has hashes of {sizes} bytes")
    seal = Seal(wire.peer, wire.lineage, wire.value_hash, wire.sum_hash, dot_of(wire.dot))
    verify_body(signed, wire.peer, "seal", "member", run_id)
    return seal


def wire_dot(dot: Dot) -> WireDot:
    return WireDot(peer=dot.peer, incarnation=dot.incarnation, seq=dot.seq)


def dot_of(wire: WireDot) -> Dot:
    """Raises PeerFault("bad_ring")."""
    _need(0 < len(wire.peer) <= limits.PEER_ID_CHARS_MAX, "a peer id of impossible length")
    _need(0 < wire.seq <= limits.INT64_MAX and wire.incarnation <= limits.INT64_MAX, f"update {wire.seq}")
    return Dot(wire.peer, wire.incarnation, wire.seq)


# --- combined updates -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Combined:
    """One ring's round, as it is published.

    Attributes:
        draw, value: the ring and what it decided.
        counted: for each of the value's updates whether it is in the sum; void ones are not.
        sum: bytes of aggregation/hybrid.py.
        seals: of more than half of the ring.
    """

    draw: Draw
    value: Value
    counted: tuple[bool, ...]
    sum: bytes
    seals: tuple[Signed, ...] = ()

    @property
    def dots(self) -> tuple[Dot, ...]:
        """The inner dots in the sum, in order."""
        return tuple(u.dot for u, counts in zip(self.value.updates, self.counted, strict=True) if counts)

    @property
    def sum_hash(self) -> bytes:
        """32 bytes: what seals name, besides the value."""
        return sha256(bytes(self.counted), b"\0", self.sum)

    def encode(self) -> bytes:
        """The payload."""
        wire = CombinedUpdate(
            draw=self.draw.encoded,
            value=self.value.encoded,
            counted=bytes(self.counted),
            sum=self.sum,
            seals=self.seals,
        )
        return wire.SerializeToString(deterministic=True)


def decode_combined(payload: bytes) -> Combined:
    """A combined update as it hangs together by itself. A pure function. Raises PeerFault."""
    wire = CombinedUpdate()
    try:
        wire.ParseFromString(payload)
    except DecodeError:
        raise PeerFault("bad_payload", "a combined update does not decode") from None
    draw, value = decode_draw(wire.draw), decode_value(wire.value)
    _need(len(wire.counted) == len(value.updates), f"{len(wire.counted)} marks for {len(value.updates)} updates")
    _need(set(wire.counted) <= {0, 1}, "a mark that is neither 0 nor 1")
    _need(len(wire.seals) <= len(draw.members), "more seals than members")
    combined = Combined(draw, value, tuple(map(bool, wire.counted)), wire.sum, tuple(wire.seals))
    _need(combined.encode() == payload, "a combined update that is not in canonical form")
    return combined


def verify_combined(payload: bytes, dot: Dot, run_id: bytes) -> Combined:
    """The combined update of `dot`, if its ring has sealed it so. A pure function of its arguments.

    Raises PeerFault: it does not decode, names others than its ring, or is not sealed for `dot` by more than half of the ring.
    """
    combined = decode_combined(payload)
    check_value(combined.value, combined.draw, run_id)
    check_seals(combined, dot, run_id)
    return combined


def check_value(value: Value, draw: Draw, run_id: bytes) -> None:
    """Whether a value can be what this ring decided. Raises PeerFault("bad_ring")."""
    _need((value.round, value.base_lineage) == (draw.round, draw.lineage(run_id)), "a value of another ring")
    _need(set(value.roster) <= draw.members.keys(), "a value that names others than its ring")
    _need(not value.split and not value.joiners, "a value that no ring can decide")
    _need(value.exchange is not Exchange.RING_DENSE, "a dense value")


def check_seals(combined: Combined, dot: Dot, run_id: bytes) -> None:
    """Raises PeerFault: fewer than more than half of the ring have sealed it for `dot`, or one of the seals is another's."""
    _need(bool(dot.incarnation & COMBINED_LIFE), f"{dot} is not of a chain of combined updates")
    _need(dot.peer in combined.draw.members, f"{dot.peer[-8:]} publishes for a ring that it is not in")
    seals = [decode_seal(signed, run_id) for signed in combined.seals]
    lineage, value_hash, sum_hash = combined.value.base_lineage, combined.value.hash, combined.sum_hash
    for seal in seals:
        _need(seal == Seal(seal.peer, lineage, value_hash, sum_hash, dot), f"the seal of {seal.peer[-8:]} is another's")
    peers = [seal.peer for seal in seals]
    _need(peers == sorted(set(peers)), "seals are not sorted or repeat")
    _need(set(peers) <= combined.draw.members.keys(), "a seal from outside the ring")
    _need(
        is_majority(len(peers), len(combined.draw.members)), f"{len(peers)} of {len(combined.draw.members)} have sealed"
    )


def in_order(seals: Sequence[tuple[str, Signed]]) -> tuple[Signed, ...]:
    """Seals as `Combined.seals` wants them: by peer."""
    return tuple(signed for _, signed in sorted(seals, key=lambda item: item[0]))
