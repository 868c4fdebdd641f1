"""Whom a member of a large swarm watches and stays connected to: a bounded neighbourhood that needs no messages. Pure.

Up to FULL_MAX members everybody is everybody's neighbour. Above that each peer has a place on each of RINGS rings, given by
the hash of its id, and its neighbours are the REACH members before and behind it on every ring (the rings are those of Rapid:
Suresh et al., "Stable and Consistent Membership at Scale with Rapid", 2018). So

* it is symmetric: peers that see the same members agree on who is whose neighbour;
* a newcomer or a death changes the neighbours of about RINGS * 2 * REACH members and nobody else's;
* rings placed at random make an expander: news crosses it in about log n steps, as over random pairs;
* close ones on a ring share neighbours, which can be asked to probe for each other over connections that are there.

Whoever may choose ids freely can settle around a victim, so this is for efficiency and never for safety: some probes and
all exchanges of whole tables go to members drawn from all.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

from .version import sha256

FULL_MAX = 64
RINGS, REACH = 4, 4
# 32: a probe a second visits them all twice a minute.
DEGREE = RINGS * 2 * REACH


@lru_cache(maxsize=1 << 14)
def _places(peer: str) -> tuple[tuple[bytes, str], ...]:
    """On every ring; the id breaks ties."""
    digest = sha256(b"shoal/v1/overlay\0", peer.encode())
    return tuple((digest[8 * ring : 8 * ring + 8], peer) for ring in range(RINGS))


class Overlay:
    """The rings, as one peer sees them."""

    def __init__(self) -> None:
        self._rings: tuple[list[tuple[bytes, str]], ...] = tuple([] for _ in range(RINGS))

    def __len__(self) -> int:
        return len(self._rings[0])

    def add(self, peer: str) -> None:
        """Nothing when it is there."""
        for ring, place in zip(self._rings, _places(peer), strict=True):
            at = bisect_left(ring, place)
            if at == len(ring) or ring[at] != place:
                ring.insert(at, place)

    def discard(self, peer: str) -> None:
        """Nothing when it is not there."""
        for ring, place in zip(self._rings, _places(peer), strict=True):
            at = bisect_left(ring, place)
            if at < len(ring) and ring[at] == place:
                del ring[at]

    def around(self, peer: str) -> set[str]:
        """Its neighbours, itself left out; all, up to FULL_MAX + 1 members. `peer` need not be a member."""
        if len(self) <= FULL_MAX + 1:
            return {other for _, other in self._rings[0]} - {peer}
        found: set[str] = set()
        for ring, place in zip(self._rings, _places(peer), strict=True):
            at, size = bisect_left(ring, place), len(ring)
            behind = at + 1 if ring[at % size] == place else at
            for step in range(REACH):
                found.add(ring[(at - 1 - step) % size][1])
                found.add(ring[(behind + step) % size][1])
        return found - {peer}
