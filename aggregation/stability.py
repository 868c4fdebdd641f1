"""What is stable: held, durably and under the same heads, by every member not forgotten. Pure; a gossiped minimum.

One epoch looks for one new frontier. A view says "everybody in `holders` has all of `entries` on disk". Where two views
meet, the entries become the lower of each (absent is lowest) and the holders those whose claim covers the result:
whoever's view was lowered to something it was not asked about must look again. So entries only fall, holders of the
lowest only grow, every peer ends with the same pair within a few times O(log n) contacts, and nobody collects anything.
When all members hold it, it is the frontier of this epoch and the next one begins.

Entries are only those above the frontier, so that quiet chains cost nothing. A view carries what the epoch before settled:
who missed its end learns it from the next. The frontier itself is `UpdateLog.advance`'s, which joins.

Departs from a plain minimum with a contributor bitmap in that contributors vouch for the minimum's heads, not for their
own: a minimum over two forks of a chain would be held by half of its contributors.

Not covered: lies. A member that claims for others can settle too early; those who then lack something find themselves
behind and need a snapshot, but no two logs count differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..protocol.version import VersionVector
from .chains import NOTHING, Top
from .forks import Key

HeadAt = Callable[[Key, int], "bytes | None"]


@dataclass(frozen=True)
class StabilityView:
    """What one peer knows in an epoch.

    Attributes:
        epoch: counts from 0.
        entries: (seq, head) above the frontier, by chain.
        holders: peers known to have all of it durably.
        settled: what the epoch before made final.
    """

    epoch: int
    entries: Mapping[Key, Top] = field(default_factory=dict)
    holders: frozenset[str] = frozenset()
    settled: Mapping[Key, Top] = field(default_factory=dict)

    def meet(self, other: StabilityView) -> StabilityView:
        """The lower entries of two views of one epoch, whatever their order, and whoever vouches for all of them."""
        entries = {
            key: min(self.entries[key], other.entries[key]) for key in self.entries.keys() & other.entries.keys()
        }
        holders: frozenset[str] = frozenset()
        for view in (self, other):
            if all(view.entries[key] == top for key, top in entries.items()):
                holders |= view.holders
        return StabilityView(self.epoch, entries, holders, _higher(self.settled, other.settled))


class Stability:
    """One peer's part. Call `mine` when something became durable or was retracted or members changed, and
    `merge` for each view heard."""

    def __init__(self, me: str, head_at: HeadAt) -> None:
        """`head_at`: our log's (`UpdateLog.head_at`); what was retracted has none and is not vouched for."""
        self._me = me
        self._head_at = head_at
        self._durable = VersionVector({})
        self._frontier = VersionVector({})
        self._members: frozenset[str] = frozenset({me})
        self._view = StabilityView(0, {}, frozenset({me}))
        self._alone = True  # no other view of this epoch was met: the minimum is ours to raise

    @property
    def view(self) -> StabilityView:
        """To be shown to others."""
        return self._view

    @property
    def alone(self) -> bool:
        """Whether no other view of this epoch was met yet."""
        return self._alone

    def mine(self, durable: VersionVector, frontier: VersionVector, members: frozenset[str]) -> VersionVector | None:
        """Our own word, now.

        Args:
            durable: the vector of our last state on disk.
            frontier: the log's.
            members: everybody not forgotten, alive or not; we are one of them anyway.

        Returns:
            as `merge`.
        """
        self._durable, self._frontier, self._members = durable, frontier, members | {self._me}
        return self._news({}, self._vouch())

    def merge(self, other: StabilityView) -> VersionVector | None:
        """Take a view heard.

        Returns:
            entries that are final and above our frontier, to be given to `UpdateLog.advance`; None: no news.
        """
        if other.epoch < self._view.epoch:
            return None
        if other.epoch > self._view.epoch:
            self._view = self._begin(other.epoch, {})
        missed = {
            key: self._frontier.entries[key]
            for key, (seq, _) in other.entries.items()
            if 0 < seq <= self._frontier.seq(*key)
        }
        self._alone = False
        met = self._view.meet(other)
        self._view = StabilityView(met.epoch, met.entries, met.holders, _higher(met.settled, missed))
        return self._news(met.settled, self._vouch())

    def _news(self, heard: Mapping[Key, Top], ended: Mapping[Key, Top]) -> VersionVector | None:
        final = {key: top for key, top in _higher(heard, ended).items() if top[0] > self._frontier.seq(*key)}
        return VersionVector(final) if final else None

    def _ours(self, key: Key) -> Top | None:
        """What we can vouch for on a chain: durable, not taken back, not yet final."""
        seq, head = self._durable.entries.get(key, NOTHING)
        if seq > self._frontier.seq(*key) and self._head_at(key, seq) == head:
            return seq, head
        return None

    def _offer(self) -> dict[Key, Top]:
        return {key: top for key in self._durable.entries if (top := self._ours(key)) is not None}

    def _begin(self, epoch: int, settled: Mapping[Key, Top]) -> StabilityView:
        return StabilityView(epoch, self._offer(), frozenset({self._me}), settled)

    def _vouch(self) -> Mapping[Key, Top]:
        """Lower the minimum to what we hold, be one of its holders, and end the epoch if we were the last."""
        if self._alone:
            self._view = self._begin(self._view.epoch, self._view.settled)
        entries: dict[Key, Top] = {}
        for key, top in self._view.entries.items():
            ours = self._ours(key)
            if ours is not None and (top[0] > ours[0] or self._head_at(key, top[0]) == top[1]):
                entries[key] = min(top, ours)
        self._view = self._view.meet(StabilityView(self._view.epoch, entries, frozenset({self._me})))
        if not self._members <= self._view.holders or not (self._view.entries or self._offer()):
            return {}
        ended = self._view.entries
        self._view = self._begin(self._view.epoch + 1, ended)
        self._alone = True
        return ended


def _higher(one: Mapping[Key, Top], two: Mapping[Key, Top]) -> dict[Key, Top]:
    return {key: max(one.get(key, NOTHING), two.get(key, NOTHING)) for key in one.keys() | two.keys()}
