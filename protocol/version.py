"""Names and order of updates and states: dots, heads, version vectors, lineage.

Pure. In ring mode two states compare by lineage ancestry, in gossip mode by vectors; equal seq with unequal heads is
CONCURRENT in either. Lineage ancestry needs the kept commit records and is decided by whoever has them (commit.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

HASH_BYTES = 32
NO_HEAD = bytes(HASH_BYTES)


def sha256(*parts: bytes) -> bytes:
    """sha-256 over the concatenation of `parts` (32 bytes)."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


@dataclass(frozen=True, order=True)
class Dot:
    """The name of exactly one update. Ordered by (peer, incarnation, seq): the order of every merge."""

    peer: str
    incarnation: int
    seq: int

    def __str__(self) -> str:
        return f"{self.peer[-6:]}/{self.incarnation}/{self.seq}"


def next_head(previous: bytes, signed_header: bytes) -> bytes:
    """Head of a chain after one more signed header (its exact bytes)."""
    return sha256(b"shoal/v1/head\0", previous, signed_header)


def genesis_lineage(run_id: bytes, founder: str, state_hash: bytes) -> bytes:
    """Lineage of round 0."""
    return sha256(b"shoal/v1/genesis\0", run_id, founder.encode(), b"\0", state_hash)


def next_lineage(previous: bytes, value_hash: bytes) -> bytes:
    """Lineage after one more commit: covers what was decided, not who voted nor in which attempt."""
    return sha256(b"shoal/v1/lineage\0", previous, value_hash)


class Order(Enum):
    EQUAL = "equal"
    BEFORE = "before"
    AFTER = "after"
    CONCURRENT = "concurrent"


@dataclass(frozen=True)
class VersionVector:
    """(peer, incarnation) → (seq, head) of what is included."""

    entries: Mapping[tuple[str, int], tuple[int, bytes]]

    @classmethod
    def of(cls, entries: Iterable[tuple[tuple[str, int], tuple[int, bytes]]] = ()) -> VersionVector:
        return cls(dict(entries))

    def seq(self, peer: str, incarnation: int) -> int:
        return self.entries.get((peer, incarnation), (0, NO_HEAD))[0]

    def includes(self, dot: Dot) -> bool:
        return dot.seq <= self.seq(dot.peer, dot.incarnation)

    def advance(self, dot: Dot, head: bytes) -> VersionVector:
        """Include one more dot of its origin. Raises ValueError when it is not above what is included."""
        key = (dot.peer, dot.incarnation)
        if dot.seq <= self.seq(*key):
            raise ValueError(f"{dot} is already included up to seq {self.seq(*key)}")
        return VersionVector({**self.entries, key: (dot.seq, head)})

    def compare(self, other: VersionVector) -> Order:
        """EQUAL, BEFORE (other has more), AFTER, or CONCURRENT (each has more, or equal seq with unequal heads)."""
        less = more = False
        for key in self.entries.keys() | other.entries.keys():
            (mine, my_head), (theirs, their_head) = (v.entries.get(key, (0, NO_HEAD)) for v in (self, other))
            if mine == theirs and my_head != their_head:
                return Order.CONCURRENT
            less |= mine < theirs
            more |= mine > theirs
        if less and more:
            return Order.CONCURRENT
        return Order.BEFORE if less else Order.AFTER if more else Order.EQUAL

    def merge(self, other: VersionVector) -> VersionVector:
        """Least upper bound. Raises ValueError on equal seq with unequal heads: that is a proof, not a merge."""
        merged = dict(self.entries)
        for key, (seq, head) in other.entries.items():
            mine, my_head = merged.get(key, (0, NO_HEAD))
            if mine == seq and my_head != head:
                raise ValueError(f"two heads at seq {seq} of {key[0]} incarnation {key[1]}")
            if seq > mine:
                merged[key] = (seq, head)
        return VersionVector(merged)

    def hash(self) -> bytes:
        """sha-256 over the sorted entries: equal exactly for EQUAL vectors."""
        return sha256(b"shoal/v1/vector\0", b"\n".join([_line(key, top) for key, top in sorted(self.entries.items())]))


@lru_cache(maxsize=1 << 16)  # vectors are hashed often, and few of their entries change in between
def _line(key: tuple[str, int], top: tuple[int, bytes]) -> bytes:
    return f"{key[0]} {key[1]} {top[0]} {top[1].hex()}".encode()
