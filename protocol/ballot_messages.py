"""What members say to each other within one round, and what a round decides: frozen values, no I/O.

Covers: update headers, `Value` with its canonical bytes and hash, the messages of one round, `Commit`. Does not cover:
signatures and limits of messages from the wire (ballot_wire.py), or who may say what when (ballot.py).

`Value` is the one thing here that owns its bytes: its hash is what members vote for, so the encoding must be one to
one. Protobuf without maps, written field by field in order, is; `decode_value` refuses bytes that do not encode back
to themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import pairwise

from google.protobuf.message import DecodeError

from . import limits
from .errors import PeerFault
from .version import HASH_BYTES, Dot, next_lineage, sha256
from .wire_pb2 import CommittedUpdate as WireUpdate
from .wire_pb2 import Signed, UpdateHeader
from .wire_pb2 import Value as WireValue


class Encoding(IntEnum):
    """How an update's payload is coded; numbers as on the wire."""

    SPARSE = 1
    DENSE = 2
    COMBINED = 3  # hybrid mode (rings.py); no update of a round


class Exchange(IntEnum):
    """How a roster moves its updates; numbers as on the wire."""

    RING_SPARSE = 1
    RING_DENSE = 2
    NOTHING = 3


def update_hash(signed: Signed) -> bytes:
    """sha-256 of a signed header: of body and signature alone, whatever else the sender's encoder added."""
    return sha256(Signed(body=signed.body, signature=signed.signature).SerializeToString(deterministic=True))


@dataclass(frozen=True)
class Header:
    """One update as its origin signed it. `signed` is the exact `Signed` message (bytes), opaque from here on."""

    dot: Dot
    previous_head: bytes
    round: int
    base_lineage: bytes
    weight: int  # samples; a claim, capped by the merge
    encoding: Encoding
    payload_hash: bytes
    payload_size: int  # bytes
    scale: float  # gossip mode; 0 in ring mode
    signed: bytes

    @cached_property
    def update_hash(self) -> bytes:
        return sha256(self.signed)


@dataclass(frozen=True, order=True)
class CommittedUpdate:
    """One update that a round decided on; ordered by dot, the order of the merge."""

    dot: Dot
    update_hash: bytes
    weight: int  # as in the header; caps are recomputed by everybody


@dataclass(frozen=True)
class Value:
    """What a round decides. Updates, roster and joiners are sorted; `ring` is the dense exchange's ring order."""

    round: int
    base_lineage: bytes
    previous_state_hash: bytes
    updates: tuple[CommittedUpdate, ...]
    roster: tuple[str, ...]
    joiners: tuple[str, ...]
    exchange: Exchange
    chunk_hashes: tuple[bytes, ...] = ()
    split: bool = False  # first proposed to half of the electorate or less
    ring: tuple[str, ...] = ()

    @cached_property
    def encoded(self) -> bytes:
        """The canonical bytes."""
        wire = WireValue(
            round=self.round,
            base_lineage=self.base_lineage,
            previous_state_hash=self.previous_state_hash,
            roster=self.roster,
            joiners=self.joiners,
            exchange=self.exchange.value,  # pyright: ignore[reportArgumentType]
            chunk_hashes=self.chunk_hashes,
            split=self.split,
            ring=self.ring,
        )
        for update in self.updates:
            entry: WireUpdate = wire.updates.add()
            entry.dot.peer, entry.dot.incarnation, entry.dot.seq = (
                update.dot.peer,
                update.dot.incarnation,
                update.dot.seq,
            )
            entry.update_hash, entry.weight = update.update_hash, update.weight
        return wire.SerializeToString(deterministic=True)

    @cached_property
    def hash(self) -> bytes:
        """sha-256 of the canonical bytes: what votes name."""
        return sha256(self.encoded)

    @property
    def lineage(self) -> bytes:
        """Lineage of the state after this value is applied."""
        return next_lineage(self.base_lineage, self.hash)


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise PeerFault("bad_message", what)


def decode_value(encoded: bytes) -> Value:
    """A `Value` from its canonical bytes. Raises PeerFault("bad_message") on anything else."""
    _need(len(encoded) <= limits.SIGNED_BODY_BYTES_MAX, f"value of {len(encoded)} bytes")
    wire = WireValue()
    try:
        wire.ParseFromString(encoded)
    except DecodeError:
        raise PeerFault("bad_message", "value does not decode") from None
    for name in ("updates", "roster", "joiners", "ring"):
        _need(len(getattr(wire, name)) <= limits.ROSTER_MAX, f"value names {len(getattr(wire, name))} {name}")
    _need(len(wire.chunk_hashes) <= limits.CHUNKS_MAX, f"value names {len(wire.chunk_hashes)} chunks")
    hashes = [wire.base_lineage, wire.previous_state_hash, *wire.chunk_hashes, *(u.update_hash for u in wire.updates)]
    _need(all(len(h) == HASH_BYTES for h in hashes), "value has a hash of another size than 32 bytes")
    peers = [*wire.roster, *wire.joiners, *wire.ring, *(u.dot.peer for u in wire.updates)]
    _need(all(0 < len(p) <= limits.PEER_ID_CHARS_MAX for p in peers), "value has a peer id of impossible length")
    _need(all(u.weight <= limits.WEIGHT_MAX for u in wire.updates), "value has an impossible weight")
    _need(wire.exchange in set(Exchange), f"value has exchange {wire.exchange}")
    value = Value(
        round=wire.round,
        base_lineage=wire.base_lineage,
        previous_state_hash=wire.previous_state_hash,
        updates=tuple(
            CommittedUpdate(Dot(u.dot.peer, u.dot.incarnation, u.dot.seq), u.update_hash, u.weight)
            for u in wire.updates
        ),
        roster=tuple(wire.roster),
        joiners=tuple(wire.joiners),
        exchange=Exchange(wire.exchange),
        chunk_hashes=tuple(wire.chunk_hashes),
        split=wire.split,
        ring=tuple(wire.ring),
    )
    for name in ("roster", "joiners"):
        members = getattr(value, name)
        _need(all(a < b for a, b in pairwise(members)), f"value's {name} is not sorted or repeats a peer")
    _need(bool(value.roster), "value has an empty roster")
    _need(not set(value.roster) & set(value.joiners), "a joiner is on the roster already")
    _need(len(value.roster) + len(value.joiners) <= limits.ROSTER_MAX, "roster and joiners together are too many")
    origins = [u.dot.peer for u in value.updates]
    _need(all(a < b for a, b in pairwise(origins)), "value's updates are not sorted or repeat an origin")
    _need(set(origins) <= set(value.roster), "value has an update from outside its roster")
    _need(value.encoded == encoded, "value is not in canonical form")
    return value


def parse_header(signed: Signed) -> Header:
    """The `Header` in a signed message; checks form and limits, not the signature. Raises PeerFault("bad_message")."""
    _need(len(signed.body) <= limits.HEADER_BYTES_MAX, f"header of {len(signed.body)} bytes")
    wire = UpdateHeader()
    try:
        wire.ParseFromString(signed.body)
    except DecodeError:
        raise PeerFault("bad_message", "header does not decode") from None
    sizes = [len(wire.previous_head), len(wire.base_lineage), len(wire.payload_hash)]
    _need(sizes == [HASH_BYTES] * 3, f"header has hashes of {sizes} bytes")
    _need(0 < len(wire.dot.peer) <= limits.PEER_ID_CHARS_MAX, "header has a peer id of impossible length")
    _need(0 < wire.dot.seq <= limits.INT64_MAX, f"header has seq {wire.dot.seq}")
    _need(wire.dot.incarnation <= limits.INT64_MAX, f"header has incarnation {wire.dot.incarnation}")
    _need(wire.weight <= limits.WEIGHT_MAX, f"header claims weight {wire.weight}, limit {limits.WEIGHT_MAX}")
    _need(wire.payload_size <= limits.UPDATE_BYTES_MAX, f"header announces {wire.payload_size} bytes")
    _need(wire.encoding in set(Encoding), f"header has encoding {wire.encoding}")
    _need(math.isfinite(wire.scale), "header has a scale that is not finite")
    return Header(
        dot=Dot(wire.dot.peer, wire.dot.incarnation, wire.dot.seq),
        previous_head=wire.previous_head,
        round=wire.round,
        base_lineage=wire.base_lineage,
        weight=wire.weight,
        encoding=Encoding(wire.encoding),
        payload_hash=wire.payload_hash,
        payload_size=wire.payload_size,
        scale=wire.scale,
        signed=Signed(body=signed.body, signature=signed.signature).SerializeToString(deterministic=True),
    )


# --- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convene:
    """ "I am at this attempt": from its convener a call for joins, from anybody else news (and a nack to lower
    ones)."""

    round: int
    base_lineage: bytes
    attempt: int
    reason: str


@dataclass(frozen=True)
class VotedFor:
    """A vote cast earlier. `split`: cast in an attempt whose roster had half of the electorate or less."""

    attempt: int
    value: Value
    split: bool = False

    @property
    def rank(self) -> tuple[bool, int]:
        """The higher one binds: votes that can be part of a majority before votes of a split."""
        return (not self.split, self.attempt)


@dataclass(frozen=True)
class Join:
    """A promise to ignore lower attempts, or (`observer`) a wish to be named a joiner, which promises nothing."""

    peer: str
    round: int
    base_lineage: bytes
    attempt: int
    header: Header | None
    voted: VotedFor | None
    state_hash: bytes
    observer: bool = False


@dataclass(frozen=True)
class RosterEntry:
    peer: str
    header: Header | None  # None: votes but contributes nothing


@dataclass(frozen=True)
class Roster:
    """Who takes part in an attempt, in ring order. `bound_value`: a value voted for earlier, to be proposed again."""

    convener: str
    round: int
    base_lineage: bytes
    attempt: int
    entries: tuple[RosterEntry, ...]
    joiners: tuple[str, ...]
    exchange: Exchange
    reason: str
    bound_value: Value | None = None

    @cached_property
    def peers(self) -> tuple[str, ...]:
        """In ring order."""
        return tuple(entry.peer for entry in self.entries)

    @cached_property
    def headers(self) -> dict[bytes, Header]:
        """Update hash → header, in ring order."""
        return {entry.header.update_hash: entry.header for entry in self.entries if entry.header is not None}


@dataclass(frozen=True)
class Holding:
    """Which of the roster's updates the sender has, complete and verified; dense: hashes of all reduced chunks or
    none."""

    peer: str
    round: int
    base_lineage: bytes
    attempt: int
    update_hashes: tuple[bytes, ...]
    chunk_hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Propose:
    convener: str
    round: int
    base_lineage: bytes
    attempt: int
    value: Value


@dataclass(frozen=True)
class Vote:
    """`signed`: the exact `Signed` message (bytes) that makes the vote part of a commit; equality ignores it."""

    peer: str
    round: int
    base_lineage: bytes
    attempt: int
    value_hash: bytes
    split: bool = False  # cast in a split attempt by a voter who, too, sees half or more of the electorate dead
    signed: bytes = field(default=b"", compare=False)


@dataclass(frozen=True)
class Commit:
    """A value and the votes for it, all of one attempt. Proves itself to whoever knows the electorate."""

    attempt: int
    value: Value
    votes: tuple[Vote, ...]

    @property
    def round(self) -> int:
        return self.value.round

    @property
    def base_lineage(self) -> bytes:
        return self.value.base_lineage

    @cached_property
    def signers(self) -> frozenset[str]:
        return frozenset(vote.peer for vote in self.votes)


Message = Convene | Join | Roster | Holding | Propose | Vote | Commit
