"""When a peer that has lost its disk stays out of the ballot. Pure.

A member that has lost its disk may have voted in the open round and not know it: with its second vote two majorities could
decide differently. It watches instead and comes back as a joiner; unless the others are too few (of two members both must
vote anyway, and the other remembers), or do not decide either in `ABSTAIN_SECONDS`.
"""

from __future__ import annotations

from collections.abc import Collection

ABSTAIN_SECONDS = 30.0


class Abstention:
    """Of one peer, in one process."""

    def __init__(self, me: str) -> None:
        self._me = me
        self.until: float | None = None  # by the clock; None: not begun

    def must(self, now: float, electorate: Collection[str]) -> bool:
        """Whether to abstain in a round that these peers may vote in. Ask only when the disk was lost."""
        if self._me not in electorate:
            self.until = now  # what it may have voted for lies behind: a joiner named from here on has never voted
            return False
        if len(electorate) < 3:
            return False
        if self.until is None:
            self.until = now + ABSTAIN_SECONDS
        return now < self.until
