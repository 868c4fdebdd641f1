"""One peer's copy of the shared state in gossip mode: the update log, and what must follow when it changes.

Synchronous and without I/O: takes updates, proofs, frontiers, views and decisions about healing, and keeps in step with
the log: the book (which own updates count), stability (what all have on disk), the frontier. Who is asked for what is
gossip_exchange.py's, when something is published gossip.py's; the arithmetic is aggregation/gossip.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...aggregation.book import Book
from ...aggregation.forks import Fork, Key
from ...aggregation.gossip import Added, Retraction, UpdateLog, Verdict
from ...aggregation.heal import Decision, Kind, Rule, Side, abandoned, heal, merged
from ...aggregation.snapshots import Snapshot
from ...aggregation.stability import Stability, StabilityView
from ...protocol.ballot_messages import Header
from ...protocol.gossip_wire import Hello, View
from ...protocol.version import Dot, VersionVector
from ..store.gossip_file import file_hash, floor_only
from .state import SharedState

# Own updates that are final and may yet be lost with their side stay on record, up to so many and so many bytes.
OWN_KEPT_MAX = 1024
OWN_KEPT_BYTES_MAX = 64 * 1024**2
# Updates of every peer that two sides may be apart and still be added: so many outer steps, whatever the size of the swarm.
HEAL_UPDATES = 8


@dataclass(frozen=True)
class ReplicaSettings:
    """The manifest's part.

    Attributes:
        heal_max: concurrent weight of the lighter side up to which two sides are simply added; 0: HEAL_UPDATES times `usual`
            for every peer that either side has heard.
        heal_rule: what is done above it.
        compact_updates: a log of more updates than this per chain is compacted.
        usual: weight of a usual update.
    """

    heal_max: int
    heal_rule: Rule
    compact_updates: int
    usual: int


class Replica:
    """Not thread-safe: used in the event loop, and by the worker thread only while a checkpoint is written."""

    def __init__(
        self,
        *,
        me: str,
        theta0: np.ndarray,
        log: UpdateLog,
        book: Book,
        settings: ReplicaSettings,
        durable: VersionVector,
        members: Callable[[], frozenset[str] | None],
        life_over: Callable[[], None],
        say: Callable[..., None],
    ) -> None:
        """
        Args:
            theta0: fp32 [d], what all sums start from.
            durable: the vector of the checkpoint on disk.
            members: everybody not forgotten, alive or not; None while that is not known yet.
            life_over: called when own updates were taken back for good: what follows them needs a new incarnation.
        """
        self.me, self.theta0, self.log, self.settings = me, theta0, log, settings
        self._book, self._members, self._life_over, self._say = book, members, life_over, say
        self._durable = durable
        self._stability = Stability(me, self._head_at)
        self._state: tuple[bytes, SharedState] | None = None
        self._floor: tuple[int, Snapshot, bytes] | None = None
        self.replaced = 0  # sums that took the place of ours
        # Told of two sides, each with its weight, before their average takes the place of ours.
        self.on_average: Callable[[Snapshot, int, Snapshot, int], None] = lambda one, one_weight, two, two_weight: None

    def _head_at(self, key: Key, seq: int) -> bytes | None:
        return self.log.head_at(key, seq)

    # ------------------------------------------------------------------------------------------------ readers

    @property
    def state(self) -> SharedState:
        """The shared state as the log has it now. Its round is the number of updates included."""
        now = self.log.digest + self.log.base
        if self._state is None or self._state[0] != now:
            self._state = now, shared_state(self.log)
        return self._state[1]

    @property
    def state_if_known(self) -> SharedState | None:
        """`state`, if nothing has changed since it was last computed."""
        cached = self._state
        return cached[1] if cached is not None and cached[0] == self.log.digest + self.log.base else None

    @property
    def floor(self) -> tuple[Snapshot, bytes]:
        """The state at the floor, for newcomers, and the hash of its file. Computed when the floor has moved."""
        if self._floor is None or self._floor[0] != self.log.floor_changes:
            snapshot = floor_only(self.log.snapshot())
            self._floor = self.log.floor_changes, snapshot, file_hash(self.theta0, snapshot)
        return self._floor[1], self._floor[2]

    def hello(self) -> Hello:
        """What this peer shows at the start of an exchange."""
        log, view = self.log, None
        if not self._stability.alone or log.kept > self.settings.compact_updates * max(1, len(log.vector.entries)):
            self._vouch()
            own = self._stability.view
            view = View(own.epoch, dict(own.entries), own.holders, dict(own.settled))
        return Hello(
            tops=dict(log.vector.entries),
            frontier=dict(log.frontier.entries),
            limits=dict(log.limits),
            base=log.base,
            total_weight=log.total_weight,
            state_hash=log.state_hash,
            floor_hash=self.floor[1],
            view=view,
        )

    def ended(self, key: Key) -> bool:
        """Whether the next update of this chain would not count."""
        return self.log.frozen.get(key, 2**63) <= self.log.vector.seq(*key)

    def recent_own(self) -> list[Dot]:
        """Own updates on record that may still be lost, or come to count."""
        form = self.log.rules.compression.form(self.theta0.size)
        return self._book.dots()[-max(1, min(OWN_KEPT_MAX, OWN_KEPT_BYTES_MAX // (16 * form.total))) :]

    # ------------------------------------------------------------------------------------------------ updates

    def add(self, header: Header, payload: bytes) -> Added:
        """Include a verified update that `log.judge` calls NEW. Raises PeerFault when its payload is not what it names."""
        added = self.log.add(header, payload)
        if header.dot.peer == self.me and self._book.knows(header.dot):
            self._book.adopt(header.dot)
        if dropped := self.log.drop_over_limit():
            self._say(
                "updates dropped from the log that not everybody has: it is full",
                level="error",
                updates=len(dropped),
                todo="give the log more bytes (node.updates_bytes_max), or let members that are gone be forgotten sooner",
            )
        return added

    def resume(self, journaled: Iterable[tuple[Header, bytes]]) -> None:
        """Own updates that were journaled and are not in the log, as after a crash between the two."""
        for header, payload in journaled:
            if self.log.judge(header)[0] is Verdict.NEW:
                self.log.add(header, payload)
        self._settle_with_log()

    def prove(self, fork: Fork) -> Retraction:
        """Two headers under one dot, verified: take back what they dispute."""
        retraction = self.log.retract(fork)
        self._settle_with_log()
        return retraction

    def _settle_with_log(self) -> None:
        """Own updates on record count as adopted exactly where the log includes them."""
        for dot in self._book.dots():
            included = self._included(dot)
            if included and not self._book.adopted(dot):
                self._book.adopt(dot)
            elif not included and self._book.adopted(dot):
                self._book.unadopt(dot)

    def _included(self, dot: Dot) -> bool:
        return self.log.vector.includes(dot)

    # ------------------------------------------------------------------------------------------------ compaction

    def made_durable(self, vector: VersionVector) -> None:
        """A checkpoint with this vector is on disk."""
        self._durable = vector
        self._vouch()

    def hear(self, hello: Hello) -> None:
        """What another peer of our side shows: its frontier is final here too, its view meets ours."""
        if hello.base != self.log.base:
            return
        self._advance(VersionVector(hello.frontier))
        if hello.view is not None:
            view = hello.view
            self._vouch()
            news = self._stability.merge(StabilityView(view.epoch, view.entries, view.holders, view.settled))
            self._advance(news)
            self._vouch()

    def _vouch(self) -> None:
        """Our own word to the present minimum, again while it makes something final."""
        members = self._members()
        while members is not None and (news := self._stability.mine(self._durable, self.log.frontier, members)):
            before = self.log.frontier
            self._advance(news)
            if self.log.frontier == before:
                return

    def _advance(self, frontier: VersionVector | None) -> None:
        if frontier is None:
            return
        before = self.log.vector
        gone = self.log.advance(frontier)
        if (
            self.log.vector != before
        ):  # what was taken back counts again: others had called it final before the proof came
            self._settle_with_log()
        if gone:
            self._say("log compacted", level="debug", updates=len(gone), kept=self.log.kept)

    # ------------------------------------------------------------------------------------------------ healing

    def apart(self, lacking: Iterable[tuple[Key, int]]) -> bool:
        """Whether so many updates of these chains are missing here that it must be decided first whether they are added.

        News is fetched without that decision. The chains of one side differ by a few updates at any time; those of two sides by
        more in any chain that has grown, since only what has grown is news.
        """
        usual = max(1, self.log.total_weight // max(1, self.log.included))
        origins = len({peer for peer, _ in self.log.vector.entries})
        gap_max = max(1, self._heal_max(origins) // (usual * max(1, origins)))
        return any(missing > gap_max for _, missing in lacking)

    def _heal_max(self, origins: int) -> int:
        return self.settings.heal_max or HEAL_UPDATES * self.settings.usual * max(1, origins)

    def decide(self, ours: Hello, theirs: Hello, our_weight: int, their_weight: int) -> Decision:
        """What to do where two peers meet that have shown these hellos. Both find the same.

        Args:
            our_weight, their_weight: concurrent weight of each, as far as its log is kept.
        """
        ours_first = (-ours.total_weight, ours.state_hash) < (-theirs.total_weight, theirs.state_hash)
        heavier = Kind.KEEP if ours_first else Kind.TAKE
        ours_beyond, theirs_beyond = _beyond(ours.frontier, theirs.tops), _beyond(theirs.frontier, ours.tops)
        if ours.base == theirs.base and ours_beyond and theirs_beyond:
            # Each side calls final what the other has not: neither can have the other's log any more.
            return Decision(heavier, "both sides have compacted what the other lacks")
        heal_max = self._heal_max(len({peer for peer, _ in [*ours.tops, *theirs.tops]}))
        taken = max(_cut(theirs.limits, ours), _cut(ours.limits, theirs))
        if ours.base == theirs.base and taken > heal_max:
            # Other pairs have met before and found the other side the heavier one. Joining the limits of both decisions would
            # take back the work of both sides.
            return Decision(heavier, f"an earlier healing would take back a weight of {taken}, above {heal_max}")
        decision = heal(
            Side(ours.total_weight, our_weight, ours.state_hash, ours.base),
            Side(theirs.total_weight, their_weight, theirs.state_hash, theirs.base),
            heal_max=heal_max,
            rule=self.settings.heal_rule,
        )
        if decision.kind is Kind.MERGE and ours.base == theirs.base and (ours_beyond or theirs_beyond):
            # The average needs the signed updates of both sides, and one has dropped some that it calls final.
            return Decision(heavier, "one side has compacted what the other lacks")
        return decision

    def join_limits(self, limits: Mapping[Key, int]) -> None:
        """Chains that another peer of our side has ended."""
        fresh = {key: seq for key, seq in limits.items() if seq < self.log.limits.get(key, 2**63)}
        if fresh:
            self._freeze(fresh)

    def abandons(self, theirs: Hello, loser_weight: int) -> bool:
        """Whether the loser's chains end where the winner has them. Between sums of different bases the loser is replaced
        whole, and the little that it has beyond the winner is added; much of it would overshoot."""
        origins = len({peer for peer, _ in [*self.log.vector.entries, *theirs.tops]})
        return self.log.base == theirs.base or loser_weight > self._heal_max(origins)

    def abandon(self, winner: Mapping[Key, tuple[int, bytes]], loser: Mapping[Key, tuple[int, bytes]]) -> Retraction:
        """The heavier side has won: the other's chains end where the winner has them."""
        return self._freeze(abandoned(VersionVector(dict(winner)), VersionVector(dict(loser))))

    def _freeze(self, limits: Mapping[Key, int]) -> Retraction:
        before = [dot for dot in self._book.dots() if self._book.adopted(dot)]
        retraction = self.log.freeze(limits)
        self._owe(before)
        return retraction

    def _owe(self, adopted_before: list[Dot]) -> None:
        """Own updates that no longer count flow back, damped by 1/(1 + stale) as after a lost branch in ring mode."""
        self._settle_with_log()
        lost = [dot for dot in adopted_before if self._book.knows(dot) and not self._book.adopted(dot)]
        for dot in lost:
            self._book.damp(dot, len(lost), 1 + len(lost))
        if lost:
            self._say("own updates lost with their side: what they held flows back", level="warning", updates=len(lost))
            self._life_over()

    def average(self, ours: Hello, theirs: Hello, our_weight: int, their_weight: int, updates: Staged) -> None:
        """Both sides take the average of the two states that the hellos name.

        Args:
            updates: (header, payload) of what their vector has and our log has not.

        Raises ValueError: the two states cannot be rebuilt from what is here.
        """
        base = floor_only(self.log.snapshot())
        kept = self.log.snapshot().kept
        sides = []
        for tops in (ours.tops, theirs.tops):
            log = UpdateLog.from_snapshot(self.theta0, self.log.rules, base, contributions=self.log.contributions)
            for header, payload in [*kept, *updates]:
                named = header.dot.seq <= tops.get((header.dot.peer, header.dot.incarnation), (0,))[0]
                if named and log.judge(header)[0] is Verdict.NEW:
                    log.add(header, payload)
            if log.vector.entries != tops:
                raise ValueError("a side's state cannot be rebuilt from the updates at hand")
            sides.append(log.snapshot(folded=True))
        one, two = sides
        self.on_average(one, our_weight, two, their_weight)
        self.replace(self.standing_on(merged(one, our_weight, two, their_weight), ours=False))

    def taking_over(self, theirs: Hello, snapshot: Snapshot, updates: Staged) -> UpdateLog:
        """The log of a side that has won, from its state at the floor and updates: with its limits, and without what it has
        not of ours, unless that is so little that it is added (`abandons`)."""
        limits, tops = dict(theirs.limits), VersionVector(theirs.tops)
        if self.abandons(theirs, self.log.weight_beyond(tops)):
            for key, seq in abandoned(tops, self.log.vector).items():
                limits[key] = min(seq, limits.get(key, seq))
        return self.standing_on(replace(snapshot, limits=limits), updates, ours=False)

    def standing_on(self, snapshot: Snapshot, updates: Staged = (), *, ours: bool = True) -> UpdateLog:
        """The log that has this snapshot below, and above it these updates and what our log has.

        `ours`: the snapshot is of our own side, so that chains ended here stay ended.
        """
        old = self.log
        log = UpdateLog.from_snapshot(self.theta0, old.rules, snapshot, contributions=old.contributions)
        for fork in old.proofs.values():
            log.retract(fork)
        if ours:
            log.freeze(old.limits)
        for header, payload in sorted([*updates, *old.snapshot().kept], key=lambda one: one[0].dot):
            if log.judge(header)[0] is Verdict.NEW:
                log.add(header, payload)
        return log

    def replace(self, log: UpdateLog) -> None:
        """Another log in place of ours. Own updates lost so flow back."""
        before = [dot for dot in self._book.dots() if self._book.adopted(dot)]
        self.log = log
        self._floor = None
        self._stability = Stability(self.me, self._head_at)
        self._durable = VersionVector({})
        self.replaced += 1
        self._owe(before)


def _cut(limits: Mapping[Key, int], side: Hello) -> int:
    """Weight of what these limits would take back from a side, by the average of its updates. What is final there stays."""
    updates = sum(
        max(0, side.tops.get(key, (0,))[0] - max(seq, side.frontier.get(key, (0,))[0])) for key, seq in limits.items()
    )
    return updates * side.total_weight // max(1, sum(seq for seq, _ in side.tops.values()))


def _beyond(frontier: Mapping[Key, tuple[int, bytes]], tops: Mapping[Key, tuple[int, bytes]]) -> bool:
    return any(seq > tops.get(key, (0,))[0] for key, (seq, _) in frontier.items())


Staged = Iterable[tuple[Header, bytes]]


def shared_state(log: UpdateLog) -> SharedState:
    """What the log stands for."""
    vector = log.vector
    return SharedState.make(
        theta=log.theta,
        outer=None,
        round_=log.included,
        lineage=log.version,
        vector=vector,
        electorate=(),
        total_weight=log.total_weight,
    )
