"""Which news to put on the next message: each is told a bounded number of times, the least told first. Pure.

Holds names of news only, at most one per subject and kind; the records are looked up when they are sent, so what is told
is always the newest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

# (subject, whether it is what others report of it)
Key = tuple[str, bool]


def retransmits(mult: float, size: int) -> int:
    """How often one rumour is told: λ · ⌈log10(n + 1)⌉, which reaches all with high probability (Das et al. 2002)."""
    return max(1, round(mult * math.ceil(math.log10(size + 1))))


class Rumours:
    """News still to be told."""

    def __init__(self) -> None:
        self._told: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._told)

    def tell(self, key: Key) -> None:
        """This is new, or new again."""
        self._told[key] = 0

    def drop(self, key: Key) -> None:
        self._told.pop(key, None)

    def pick(self, room: int, limit: int) -> Iterator[Key]:
        """At most `room` of them; each counts as told once more, and is dropped after `limit` times."""
        for key in sorted(self._told, key=lambda k: (self._told[k], k))[: max(0, room)]:
            self._told[key] += 1
            if self._told[key] >= limit:
                del self._told[key]
            yield key
