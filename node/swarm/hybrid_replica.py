"""The replica of hybrid mode: its log holds sums of rings, and an own update counts by the sum that it is in. No I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ...aggregation.gossip import Added
from ...aggregation.snapshots import INNER_KEPT
from ...protocol.ballot_messages import Header
from ...protocol.version import Dot
from .replica import Replica

LINEAGES_KEPT = 4096
# By so much a round may be ahead of the one before, as far as a peer knows: numbers on the wire end before a liar's leaps do.
LEAP_MAX = 2**20


class HybridReplica(Replica):
    """A replica in whose log an own update counts by the sum that it is in."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._carried: OrderedDict[bytes, None] = OrderedDict()  # lineages of rings whose sum came in lately
        self.round_seen = 0
        self.on_sum: Callable[[], None] = lambda: None

    def add(self, header: Header, payload: bytes) -> Added:
        added = super().add(header, payload)
        self._note(header)
        self._settle_with_log()
        self.on_sum()
        return added

    def _note(self, header: Header) -> None:
        self.round_seen = max(self.round_seen, min(header.round, self.round_seen + LEAP_MAX))
        self._carried[header.base_lineage] = None
        if len(self._carried) > LINEAGES_KEPT:
            self._carried.popitem(last=False)

    def _settle_with_log(self) -> None:
        """Own updates count where the sum that they are in was thinned out to, and where the log includes it."""
        for dot in self._book.dots():
            if not self._book.adopted(dot) and (where := self.log.counted_at(dot)) is not None:
                self._book.narrow(dot, where)
        super()._settle_with_log()

    def recent_own(self) -> list[Dot]:
        """Own updates on record that may still come to count."""
        return self._book.dots()[-INNER_KEPT:]

    def carries(self, lineage: bytes) -> bool:
        """Whether the sum of a ring of late came in."""
        return lineage in self._carried

    def _included(self, dot: Dot) -> bool:
        return self.log.counts(dot)
