"""Messages of gossip mode: vectors and what is wanted, checked right after decoding. Everything here is hostile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from . import limits
from .errors import PeerFault
from .version import HASH_BYTES
from .wire_pb2 import GossipHello, GossipNews, GossipWant, VersionEntry

Key = tuple[str, int]
Tops = dict[Key, tuple[int, bytes]]


@dataclass(frozen=True)
class Range:
    """Updates `first` … `last` of one chain."""

    key: Key
    first: int
    last: int


def encode_tops(tops: Mapping[Key, tuple[int, bytes]]) -> list[VersionEntry]:
    """In the order of the keys."""
    return [VersionEntry(peer=p, incarnation=i, seq=s, head=h) for (p, i), (s, h) in sorted(tops.items())]


def decode_tops(entries: Iterable[VersionEntry]) -> Tops:
    """(peer, incarnation) → (seq, head). Raises PeerFault("bad_vector")."""
    tops: Tops = {}
    for entry in entries:
        if len(tops) >= limits.MEMBERS_MAX:
            raise PeerFault("bad_vector", f"more than {limits.MEMBERS_MAX} chains")
        key = _key(entry.peer, entry.incarnation)
        if not 0 < entry.seq <= limits.INT64_MAX or len(entry.head) != HASH_BYTES or key in tops:
            raise PeerFault("bad_vector", f"entry of {entry.peer[-8:]} with seq {entry.seq}")
        tops[key] = (entry.seq, entry.head)
    return tops


def encode_hello(tops: Mapping[Key, tuple[int, bytes]]) -> bytes:
    return GossipHello(entries=encode_tops(tops)).SerializeToString()


def encode_news(tops: Mapping[Key, tuple[int, bytes]]) -> GossipNews:
    return GossipNews(tops=encode_tops(tops))


def encode_want(ranges: Iterable[Range]) -> bytes:
    wire = [GossipWant.Range(peer=r.key[0], incarnation=r.key[1], first=r.first, last=r.last) for r in ranges]
    return GossipWant(ranges=wire).SerializeToString()


def decode_want(wire: GossipWant) -> list[Range]:
    """Raises PeerFault("bad_want")."""
    if len(wire.ranges) > limits.MEMBERS_MAX:
        raise PeerFault("bad_want", f"{len(wire.ranges)} ranges")
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
