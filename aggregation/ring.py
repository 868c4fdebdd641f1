"""Ring schedules without I/O: all-gather of sparse updates, reduce-scatter and all-gather of dense ones, and the choice.

`RingAllGather` answers "what do I still send to my next live successor, what do I lack and from whom". `RingReduce` is the
classic bandwidth-optimal all-reduce (Patarasu and Yuan, 2009): n-1 hops of partial sums in fp32, then n-1 hops of reduced
chunks, quantized once by the chunk's owner so that everybody ends with the same bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import numpy as np

from ..protocol.errors import PeerFault
from ..protocol.version import sha256
from .compress import Compression, decode, encode, max_payload_bytes

P = TypeVar("P", bound=Hashable)

DENSE_SETTINGS = {32: Compression(1.0, 32), 16: Compression(1.0, 16), 8: Compression(1.0, 8)}


class RingAllGather(Generic[P]):
    """One member's view of the all-gather of one roster.

    Args:
        order: members in ring order, `me` among them.
        origins: update hash → its origin.

    Attributes:
        successors: all others, in the order in which they are tried.
        held: what is complete and verified here, in order of arrival.
    """

    def __init__(self, order: Sequence[P], me: P, origins: dict[bytes, P]) -> None:
        """Raises ValueError when `me` is not in `order`."""
        if me not in order:
            raise ValueError("this peer is not in the ring")
        at = order.index(me)
        self.me = me
        self.origins = dict(origins)
        self.successors = (*order[at + 1 :], *order[:at])
        self.held: dict[bytes, None] = {}

    def mark_held(self, update_hash: bytes) -> None:
        """Complete and verified here. Hashes that the roster does not name are ignored."""
        if update_hash in self.origins:
            self.held[update_hash] = None

    def mark_lost(self, update_hash: bytes) -> None:
        """Held no more: evicted, or its file is damaged. It can be held again later."""
        self.held.pop(update_hash, None)

    def to_send(self, successor: P, has: set[bytes]) -> list[bytes]:
        """What to forward now: own updates first, then in order of arrival; never to an update's origin."""
        ready = [h for h in self.held if h not in has and self.origins[h] != successor]
        return sorted(ready, key=lambda h: self.origins[h] != self.me)

    def finished_with(self, successor: P, has: set[bytes]) -> bool:
        """Nothing will ever be left to send to this successor."""
        return all(h in has or origin == successor for h, origin in self.origins.items())


def chunk_bounds(d: int, n: int) -> list[tuple[int, int]]:
    """n contiguous pieces of d coordinates whose sizes differ by at most one."""
    return [(d * i // n, d * (i + 1) // n) for i in range(n)]


@dataclass(frozen=True)
class Hop:
    """What a member sends and receives in one hop; chunk numbers."""

    send: int
    receive: int


def schedule(n: int, rank: int) -> list[Hop]:
    """2(n-1) hops. In the first n-1 a received chunk is added, in the rest it replaces. Rank owns chunk (rank+1) mod n."""
    reduce = [Hop((rank - h) % n, (rank - h - 1) % n) for h in range(n - 1)]
    gather = [Hop((rank + 1 - h) % n, (rank - h) % n) for h in range(n - 1)]
    return reduce + gather


class RingReduce:
    """One member's side of a dense all-reduce; the caller moves the bytes.

    Args:
        n, rank: ring size and place.
        vector: fp32 [d], already scaled by this member's share of the total weight.
        bits: how a reduced chunk travels: 32, 16 (fp16) or 8.
    """

    def __init__(self, n: int, rank: int, vector: np.ndarray, bits: int) -> None:
        if not 0 <= rank < n:
            raise ValueError(f"rank {rank} of {n}")
        self.n, self.rank = n, rank
        self.hops = schedule(n, rank)
        self.bounds = chunk_bounds(vector.size, n)
        self._setting = DENSE_SETTINGS[bits]
        self._partial = vector.astype(np.float32, copy=True)
        self._reduced: dict[int, bytes] = {}
        self._next = 0
        if n == 1:
            self._own()

    @property
    def complete(self) -> bool:
        return len(self._reduced) == self.n

    @property
    def hop(self) -> int:
        """The hop whose chunk is awaited; 2(n-1) when all are in."""
        return self._next

    def max_bytes(self, hop: int) -> int:
        """Limit on the frame of a hop, before anything is allocated."""
        low, high = self.bounds[self.hops[hop].receive]
        return 4 * (high - low) if hop < self.n - 1 else reduced_bytes_max(high - low, self._setting.bits)

    def outgoing(self, hop: int) -> bytes:
        """Bytes to send in `hop`; every earlier hop must have been received."""
        if hop > self._next:
            raise ValueError(f"hop {hop} before hop {self._next} was received")
        chunk = self.hops[hop].send
        if hop < self.n - 1:
            low, high = self.bounds[chunk]
            return self._partial[low:high].astype("<f4").tobytes()
        return self._reduced[chunk]

    def incoming(self, hop: int, payload: bytes) -> None:
        """Take the chunk of `hop`. Raises PeerFault("bad_chunk") on a wrong hop, size or value."""
        if hop != self._next:
            raise PeerFault("bad_chunk", f"hop {hop}, expected {self._next}")
        chunk = self.hops[hop].receive
        low, high = self.bounds[chunk]
        if hop < self.n - 1:
            if len(payload) != 4 * (high - low):
                raise PeerFault("bad_chunk", f"{len(payload)} bytes, expected {4 * (high - low)}")
            part = np.frombuffer(payload, "<f4")
            if not np.isfinite(part).all():
                raise PeerFault("bad_chunk", "a partial sum is not finite")
            with np.errstate(over="ignore"):
                self._partial[low:high] += part
        else:
            _decode_chunk(payload, high - low, self._setting)
            self._reduced[chunk] = payload
        if hop == self.n - 2:
            self._own()
        self._next = hop + 1  # last: another thread may send what this hop made ready

    def _own(self) -> None:
        low, high = self.bounds[(self.rank + 1) % self.n]
        own = self._partial[low:high]
        if not np.isfinite(own).all():
            raise PeerFault("bad_chunk", "the reduced chunk is not finite")
        self._reduced[(self.rank + 1) % self.n] = encode(own, self._setting) if own.size else b""

    def chunk_hashes(self) -> tuple[bytes, ...]:
        """sha-256 of every reduced chunk's bytes, in order; only when complete."""
        return tuple(sha256(self._reduced[c]) for c in range(self.n))

    def payload(self, chunk: int) -> bytes:
        return self._reduced[chunk]

    def result(self) -> np.ndarray:
        """The reduced vector fp32 [d]: a function of the reduced chunks' bytes alone."""
        return join_chunks([self._reduced[c] for c in range(self.n)], self.bounds[-1][1], self._setting.bits)


def join_chunks(payloads: Sequence[bytes], d: int, bits: int) -> np.ndarray:
    """fp32 [d] from all reduced chunks in order. Raises PeerFault("bad_chunk")."""
    setting = DENSE_SETTINGS[bits]
    bounds = chunk_bounds(d, len(payloads))
    return np.concatenate(
        [_decode_chunk(p, high - low, setting) for p, (low, high) in zip(payloads, bounds, strict=True)]
    )


def reduced_bytes_max(size: int, bits: int) -> int:
    """No reduced chunk of `size` coordinates is longer (bytes); an empty one has none."""
    return max_payload_bytes(size, DENSE_SETTINGS[bits]) if size else 0


def _decode_chunk(payload: bytes, size: int, setting: Compression) -> np.ndarray:
    if not size:
        if payload:
            raise PeerFault("bad_chunk", "bytes for an empty chunk")
        return np.zeros(0, np.float32)
    try:
        return decode(payload, size, setting).values
    except PeerFault as fault:
        raise PeerFault("bad_chunk", fault.detail) from None


def choose_exchange(n: int, sparse_bytes: int, d: int, dense_bits: int) -> tuple[Literal["sparse", "dense"], str]:
    """The cheaper exchange in bytes that one member sends, and why. Equal on all peers: nothing measured enters."""
    sparse = (n - 1) * sparse_bytes
    dense = (n - 1) * (4 * d + d * dense_bits // 8) // n
    kind: Literal["sparse", "dense"] = "sparse" if sparse <= dense else "dense"
    return kind, f"{n} peers: sparse all-gather sends {sparse} bytes each, dense all-reduce {dense}"
