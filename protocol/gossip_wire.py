"""Messages of gossip mode: vectors, views, and what is wanted, checked right after decoding. Everything here is hostile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from google.protobuf.message import DecodeError

from . import limits
from .errors import PeerFault
from .version import HASH_BYTES
from .wire_pb2 import ChainLimit, GossipHello, GossipNews, GossipWant, StabilityView, VersionEntry

Key = tuple[str, int]
Tops = dict[Key, tuple[int, bytes]]
# Entries kept encoded and decoded, about 500 bytes each.
ENTRIES_MAX = 16 * limits.MEMBERS_MAX
# The largest honest one: a peer id, two numbers, a head, and their tags.
ENTRY_BYTES_MAX = limits.PEER_ID_CHARS_MAX + HASH_BYTES + 32


@dataclass(frozen=True)
class Range:
    """Updates `first` … `last` of one chain."""

    key: Key
    first: int
    last: int


@dataclass(frozen=True)
class View:
    """What a peer knows of an epoch of compaction; see aggregation/stability.py."""

    epoch: int
    entries: Tops
    holders: frozenset[str]
    settled: Tops


@dataclass(frozen=True)
class Hello:
    """What one peer shows another at the start of an exchange.

    Attributes:
        tops: its vector.
        frontier: what is final for it.
        limits: last seq of every chain that a healing has ended.
        base: 32 bytes, the merged state that its sum starts from.
        total_weight: of all updates included.
        state_hash: 32 bytes.
        floor_hash: 32 bytes, of the snapshot that it can give.
        view: None while it has nothing to compact.
    """

    tops: Tops
    frontier: Tops = field(default_factory=dict)
    limits: dict[Key, int] = field(default_factory=dict)
    base: bytes = bytes(HASH_BYTES)
    total_weight: int = 0
    state_hash: bytes = bytes(HASH_BYTES)
    floor_hash: bytes = bytes(HASH_BYTES)
    view: View | None = None


def encode_tops(tops: Mapping[Key, tuple[int, bytes]]) -> list[bytes]:
    """In the order of the keys."""
    return [_encode_entry(key, top) for key, top in sorted(tops.items())]


def decode_tops(entries: Sequence[bytes]) -> Tops:
    """(peer, incarnation) → (seq, head). Raises PeerFault("bad_vector")."""
    if len(entries) > limits.MEMBERS_MAX:
        raise PeerFault("bad_vector", f"more than {limits.MEMBERS_MAX} chains")
    tops = dict(map(_decode_entry, entries))
    if len(tops) != len(entries):
        raise PeerFault("bad_vector", "a chain is named twice")
    return tops


# A vector of a thousand chains crosses the wire with every exchange, and few of its entries are new.
@lru_cache(maxsize=ENTRIES_MAX)
def _encode_entry(key: Key, top: tuple[int, bytes]) -> bytes:
    return VersionEntry(peer=key[0], incarnation=key[1], seq=top[0], head=top[1]).SerializeToString()


@lru_cache(maxsize=ENTRIES_MAX)  # keeps no failures
def _decode_entry(data: bytes) -> tuple[Key, tuple[int, bytes]]:
    if len(data) > ENTRY_BYTES_MAX:
        raise PeerFault("bad_vector", f"an entry of {len(data)} bytes")
    entry = VersionEntry()
    try:
        entry.ParseFromString(data)
    except DecodeError as error:
        raise PeerFault("bad_vector", str(error)) from None
    key = _key(entry.peer, entry.incarnation)
    if not 0 < entry.seq <= limits.INT64_MAX or len(entry.head) != HASH_BYTES:
        raise PeerFault("bad_vector", f"entry of {entry.peer[-8:]} with seq {entry.seq}")
    return key, (entry.seq, entry.head)


def encode_hello(hello: Hello) -> bytes:
    """Inverse of `decode_hello`."""
    wire = GossipHello(
        entries=encode_tops(hello.tops),
        frontier=encode_tops(hello.frontier),
        limits=[ChainLimit(peer=p, incarnation=i, seq=s) for (p, i), s in sorted(hello.limits.items())],
        base=hello.base,
        total_weight=hello.total_weight,
        state_hash=hello.state_hash,
        floor_hash=hello.floor_hash,
    )
    if hello.view is not None:
        order = _order(hello.tops)
        bits = sum(1 << place for place, peer in enumerate(order) if peer in hello.view.holders)
        wire.view.CopyFrom(
            StabilityView(
                epoch=hello.view.epoch,
                entries=encode_tops(hello.view.entries),
                holders=bits.to_bytes((len(order) + 7) // 8, "little"),
                others=sorted(hello.view.holders.difference(order)),
                settled=encode_tops(hello.view.settled),
            )
        )
    return wire.SerializeToString()


def decode_hello(wire: GossipHello) -> Hello:
    """Raises PeerFault("bad_vector")."""
    if any(len(each) != HASH_BYTES for each in (wire.base, wire.state_hash, wire.floor_hash)):
        raise PeerFault("bad_vector", f"a hash of another size than {HASH_BYTES} bytes")
    if wire.total_weight > limits.INT64_MAX or len(wire.limits) > limits.MEMBERS_MAX:
        raise PeerFault("bad_vector", f"total weight {wire.total_weight}, {len(wire.limits)} limits")
    if any(limit.seq > limits.INT64_MAX for limit in wire.limits):
        raise PeerFault("bad_vector", "an impossible limit")
    tops = decode_tops(wire.entries)
    return Hello(
        tops=tops,
        frontier=decode_tops(wire.frontier),
        limits={_key(limit.peer, limit.incarnation): limit.seq for limit in wire.limits},
        base=wire.base,
        total_weight=wire.total_weight,
        state_hash=wire.state_hash,
        floor_hash=wire.floor_hash,
        view=_view(wire.view, _order(tops)) if wire.HasField("view") else None,
    )


def _order(tops: Tops) -> list[str]:
    return sorted({peer for peer, _ in tops})


def _view(wire: StabilityView, order: list[str]) -> View:
    if (
        wire.epoch > limits.INT64_MAX
        or len(wire.holders) * 8 >= len(order) + 8
        or len(wire.others) > limits.MEMBERS_MAX
    ):
        raise PeerFault("bad_vector", f"a view of epoch {wire.epoch} with {len(wire.holders)} bytes of holders")
    if any(not 0 < len(peer) <= limits.PEER_ID_CHARS_MAX for peer in wire.others):
        raise PeerFault("bad_vector", "a peer id of impossible length")
    bits = int.from_bytes(wire.holders, "little")
    named = [peer for place, peer in enumerate(order) if bits >> place & 1]
    return View(wire.epoch, decode_tops(wire.entries), frozenset([*named, *wire.others]), decode_tops(wire.settled))


def encode_news(tops: Mapping[Key, tuple[int, bytes]]) -> GossipNews:
    return GossipNews(tops=encode_tops(tops))


def encode_want(ranges: Iterable[Range], concurrent_weight: int = 0) -> bytes:
    wire = [GossipWant.Range(peer=r.key[0], incarnation=r.key[1], first=r.first, last=r.last) for r in ranges]
    return GossipWant(ranges=wire, concurrent_weight=concurrent_weight).SerializeToString()


def decode_want(wire: GossipWant) -> list[Range]:
    """Raises PeerFault("bad_want")."""
    if len(wire.ranges) > limits.MEMBERS_MAX or wire.concurrent_weight > limits.INT64_MAX:
        raise PeerFault("bad_want", f"{len(wire.ranges)} ranges, weight {wire.concurrent_weight}")
    ranges = []
    for one in wire.ranges:
        if not 0 < one.first <= one.last <= limits.INT64_MAX:
            raise PeerFault("bad_want", f"updates {one.first} to {one.last}")
        ranges.append(Range(_key(one.peer, one.incarnation), one.first, one.last))
    return ranges


def _key(peer: str, incarnation: int) -> Key:
    if not 0 < len(peer) <= limits.PEER_ID_CHARS_MAX or incarnation > limits.INT64_MAX:
        raise PeerFault("bad_vector", "a peer id or incarnation of impossible length")
    return peer, incarnation
