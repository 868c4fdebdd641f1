"""The update log: the shared state as the exact sum of everybody's updates. Pure; no I/O, no clock.

theta = f32(f64(theta0) - acc * 2^-40), where acc is the int64 sum of the contributions of all included updates. Integers add
in any order, so the state is a function of three sets that only grow: the updates held, the proofs of equivocation, and
the frontier. Two logs that know the same have the same bits, whatever the order in which they learned it.

Theory of operation. A chain is one origin's updates in seq order; the vector names the tops (chains.py).

* *Floor*: where a chain's kept headers begin. What is at or below it is in the sum alone. It follows the frontier, and is
  above it only where `drop_over_limit` gave up the log of updates that not everybody has.
* *Frontier*: final. A proof of something at or below it takes nothing of that back.
* *Limit*: a chain takes no update above it. A proof of equivocation at seq s sets it to s - 1 on that chain and to 0 on the
  same peer's later incarnations, and what was included above is subtracted (`retract`). Never below the frontier.
* *Retracted* payloads are kept: another peer may have called the frontier before it knew the proof. A frontier is final,
  so hearing of it puts them back. A log's own word to the frontier (stability.py) never passes a limit.
* *Behind*: a frontier was heard that names an update which is not here. Others have compacted it: a snapshot is needed.

Does not verify signatures, decide whom to ban, or say what is stable (stability.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ..protocol.ballot_messages import Header
from ..protocol.errors import PeerFault
from ..protocol.version import HASH_BYTES, Dot, VersionVector, sha256
from .chains import NOTHING, Chains, Top, dots_of
from .contributions import Contributions, GossipRules, Record
from .forks import Fork, Key, head_of
from .layout import state_hash
from .merge import Accumulator, apply_fixed
from .snapshots import Parts, Snapshot, join_inner

NO_BASE = bytes(HASH_BYTES)
_UNLIMITED = 2**63


class Verdict(Enum):
    """What a header is to a log."""

    NEW = "new"  # the next of its chain: fetch the payload and add it
    DUPLICATE = "duplicate"  # included already
    GAP = "gap"  # one before it is missing
    FORK = "fork"  # its origin signed two chains
    FROZEN = "frozen"  # above its chain's limit: never again
    BELOW = "below"  # at or below the floor: counts already


@dataclass(frozen=True)
class Added:
    """What `add` did. `step`: scale * norm, 0 when void."""

    void: bool
    reason: str
    step: float


@dataclass(frozen=True)
class Retraction:
    """What a proof took back.

    Attributes:
        dots: subtracted now, in dot order.
        below_frontier: the disputed dot is final: what is at or below the frontier stays.
        conflict: disputed updates stay counted because their log was dropped (`drop_over_limit`): this state cannot
            become the others' by itself and must be replaced by a snapshot.
        reason: one sentence for the log.
    """

    dots: tuple[Dot, ...]
    below_frontier: bool
    conflict: bool
    reason: str


class UpdateLog:
    """Not thread-safe; one user at a time. Memory: theta0, theta and the sum (16 bytes a coordinate), and the log."""

    def __init__(self, theta0: np.ndarray, rules: GossipRules, contributions: Contributions | None = None) -> None:
        """
        Args:
            theta0: fp32 [d], finite; the same bits on every peer.
            contributions: shared with other logs of this run, or None.

        Raises:
            ValueError: theta0 is not finite fp32 [d], or `contributions` are of another run.
        """
        if theta0.dtype != np.float32 or theta0.ndim != 1 or not np.isfinite(theta0).all():
            raise ValueError(f"theta0 of dtype {theta0.dtype} and shape {theta0.shape} is not finite fp32 [d]")
        self._contributions = contributions or Contributions(theta0.size, rules)
        if not self._contributions.serve(theta0.size, rules):
            raise ValueError("the contributions given are of another size or other rules")
        self.rules = rules
        self.base = NO_BASE  # names the merge of two sides (heal.py) that the sum started from
        self.total_weight = 0  # of all included updates, void ones too
        self.log_bytes = 0  # headers and payloads kept, retracted ones too
        self._theta0 = theta0
        self._sum = Accumulator(theta0.size)
        self._chains = Chains()
        self._frontier: dict[Key, Top] = {}
        self._behind: dict[Key, Top] = {}
        self._retracted: dict[Key, list[Record]] = {}  # ascending; begins right above the chain's top
        self._limits: dict[Key, int] = {}  # set by `freeze`
        self._proofs: dict[str, Fork] = {}  # by peer: of its lowest disputed dot
        self._inner: dict[Dot, Record] = {}  # hybrid mode: inner updates above the floor, and the sum that each is in
        self._floor_inner: dict[Key, tuple[int, ...]] = {}  # at the floor, newest INNER_KEPT of each chain, ascending
        self.floor_changes = 0  # grows whenever `snapshot` without its log could be another
        self._theta: np.ndarray | None = None
        self._state_hash: bytes | None = None

    # ------------------------------------------------------------------------------------------------ state

    @property
    def contributions(self) -> Contributions:
        """To be shared with other logs of this run."""
        return self._contributions

    @property
    def theta(self) -> np.ndarray:
        """fp32 [d], read-only."""
        if self._theta is None:
            self._theta = apply_fixed(self._theta0, -self._sum.total)
            self._theta.flags.writeable = False
        return self._theta

    @property
    def vector(self) -> VersionVector:
        return self._chains.vector

    def top(self, key: Key) -> Top:
        """(seq, head) of the chain, as in `vector`; (0, 32 zero bytes) where there is none."""
        return self._chains.top(key)

    def published(self, peer: str) -> int:
        """How many of the peer's updates are included, of all its lives."""
        return sum(self._chains.top(key)[0] for key in self._chains.keys_of(peer))

    @property
    def included(self) -> int:
        """How many updates are included."""
        return self._chains.included

    @property
    def digest(self) -> bytes:
        """Of the vector, cheaply (`Chains.digest`)."""
        return self._chains.digest

    @property
    def frontier(self) -> VersionVector:
        """What is final; never above `vector`."""
        return VersionVector(dict(self._frontier))

    @property
    def version(self) -> bytes:
        """32 bytes: the vector's hash and the merged base, if there is one."""
        of_vector = self.vector.hash()
        return of_vector if self.base == NO_BASE else sha256(b"shoal/v1/rebased\0", self.base, of_vector)

    @property
    def state_hash(self) -> bytes:
        """sha-256 (32 bytes) of theta and version."""
        if self._state_hash is None:
            self._state_hash = state_hash(self.theta, None, self.version)
        return self._state_hash

    @property
    def kept(self) -> int:
        """Updates kept above the floor."""
        return self._chains.count

    @property
    def limits(self) -> dict[Key, int]:
        """Chains that `freeze` has ended, and their last seq: what is final is never above it."""
        return {key: max(limit, self._frontier.get(key, NOTHING)[0]) for key, limit in self._limits.items()}

    @property
    def frozen(self) -> dict[Key, int]:
        """Known chains with a limit: the highest seq that each will ever have here."""
        keys = set(self._limits)
        for peer, fork in self._proofs.items():
            keys |= {(peer, fork.dot.incarnation), *self._chains.keys_of(peer)}
        return {key: limit for key in sorted(keys) if (limit := self._limit(key)) < _UNLIMITED}

    @property
    def proofs(self) -> dict[str, Fork]:
        """By equivocating peer: the proof with its lowest disputed dot. They must spread to everybody."""
        return dict(self._proofs)

    @property
    def behind(self) -> dict[Key, Top]:
        """(seq, head) of frontiers heard of that name what is not here. Not empty: get a snapshot from who has it."""
        return dict(self._behind)

    # ------------------------------------------------------------------------------------------------ updates

    def judge(self, header: Header) -> tuple[Verdict, Header | None]:
        """What this header is to the log.

        The second value is the other header of a FORK, which completes the proof. A FORK without one does not continue
        our chain: the two part below it, where the sender's chain from its start shows the proof.
        """
        dot = header.dot
        key = (dot.peer, dot.incarnation)
        top, top_head = self._chains.top(key)
        if dot.seq <= top:
            held = self._chains.record(key, dot.seq)
            if held is None:
                return Verdict.BELOW, None
            if held.header.signed == header.signed or held.top[1] == head_of(header):
                return Verdict.DUPLICATE, None
            return Verdict.FORK, held.header
        if dot.seq > self._limit(key):
            return Verdict.FROZEN, None
        if dot.seq > top + 1:
            return Verdict.GAP, None
        if header.previous_head != top_head:
            return Verdict.FORK, None
        return Verdict.NEW, None

    def add(self, header: Header, payload: bytes) -> Added:
        """Include one update whose header `judge` calls NEW.

        Raises:
            PeerFault: its payload is not what the header names, or does not decode (contributions.py).
            ValueError: the header is not NEW.
        """
        verdict, _ = self.judge(header)
        if verdict is not Verdict.NEW:
            raise ValueError(f"{header.dot} is {verdict.value} here and cannot be added")
        record = self._contributions.read(header, payload)
        self._include(record)
        self.log_bytes += record.size
        if record.key in self._behind:
            self.advance(VersionVector({record.key: self._behind[record.key]}))
        return Added(record.void, record.reason, record.step)

    def counts(self, dot: Dot) -> bool:
        """Hybrid mode: whether this inner update is in the sum, as far as it is remembered (snapshots.py)."""
        return dot in self._inner or dot.seq in self._floor_inner.get((dot.peer, dot.incarnation), ())

    def counted_at(self, dot: Dot) -> np.ndarray | None:
        """Hybrid mode: coordinates int64 [k] of the sum that this inner update is in; None where that is not kept."""
        record = self._inner.get(dot)
        held = self._contributions.of(record) if record is not None else None
        return held[0] if held is not None else None

    def counts_for_good(self, dot: Dot) -> bool:
        """Hybrid mode: as `counts`, and nothing can take it back: it is at the floor, and the floor is final."""
        if dot.seq not in self._floor_inner.get((dot.peer, dot.incarnation), ()):
            return False
        return all(seq <= self._frontier.get(key, NOTHING)[0] for key, (seq, _) in self._chains.floors().items())

    def inner_of(self, peer: str) -> list[tuple[int, int]]:
        """Hybrid mode: (incarnation, seq) of the peer's inner updates in the sum, as far as they are remembered."""
        above = [(dot.incarnation, dot.seq) for dot in self._inner if dot.peer == peer]
        return above + [(i, seqs[-1]) for (who, i), seqs in self._floor_inner.items() if who == peer]

    def lacks(self, theirs: VersionVector, bytes_max: int) -> list[Header]:
        """Headers that a peer with this vector can add, in order, up to about `bytes_max` (`Chains.lacks`)."""
        return self._chains.lacks(theirs, bytes_max)

    def weight_beyond(self, theirs: VersionVector) -> int:
        """Weight of what a peer with this vector lacks, as far as it is kept (`Chains.weight_beyond`)."""
        return self._chains.weight_beyond(theirs)

    def compacted_for(self, theirs: VersionVector) -> list[Key]:
        """Chains of which a peer with this vector needs a snapshot (`Chains.compacted_for`)."""
        return self._chains.compacted_for(theirs)

    def disagreements(self, theirs: VersionVector) -> list[tuple[Key, int]]:
        """(key, seq) of unequal heads (`Chains.disagreements`)."""
        return self._chains.disagreements(theirs)

    def payload(self, dot: Dot) -> bytes:
        """Bytes of an update that is kept, or retracted and kept. Raises KeyError."""
        key = (dot.peer, dot.incarnation)
        for record in (self._chains.record(key, dot.seq), *self._retracted.get(key, ())):
            if record is not None and record.top[0] == dot.seq:
                return record.payload
        raise KeyError(dot)

    def header_at(self, key: Key, seq: int) -> Header | None:
        """The included header, if it is kept."""
        record = self._chains.record(key, seq)
        return record.header if record is not None else None

    def head_at(self, key: Key, seq: int) -> bytes | None:
        """Head of the chain after `seq` (0: 32 zero bytes); None where it is not included, or compacted away."""
        return self._chains.head_at(key, seq)

    # ------------------------------------------------------------------------------------------------ taking back

    def retract(self, fork: Fork) -> Retraction:
        """Take back what the proof disputes, and freeze that peer's chains from the disputed dot on. Repeats do nothing."""
        dot = fork.dot
        known = self._proofs.get(dot.peer)
        if known is None or dot < known.dot:
            self._proofs[dot.peer] = fork
        dots, conflict = self._lower(key for key in self._chains.keys_of(dot.peer) if key[1] >= dot.incarnation)
        final = dot.seq <= self._frontier.get((dot.peer, dot.incarnation), NOTHING)[0]
        reason = f"{dot.peer[-8:]} signed two headers under {dot}: {len(dots)} of its updates are taken back"
        if final:
            reason += "; the disputed one is final and stays"
        if conflict:
            reason += "; others were dropped from the log and stay counted, a snapshot is needed"
        return Retraction(tuple(dots), final, conflict, reason)

    def freeze(self, limits: Mapping[Key, int]) -> Retraction:
        """Limit chains without a proof (healing by rule abandons them from there on); takes back what is above."""
        for key, limit in limits.items():
            self._limits[key] = min(limit, self._limits.get(key, limit))
        self.floor_changes += 1
        dots, conflict = self._lower(sorted(limits))
        reason = f"{len(limits)} chains frozen: {len(dots)} updates are taken back"
        return Retraction(tuple(dots), False, conflict, reason)

    def _limit(self, key: Key) -> int:
        """The highest seq that this chain may have."""
        limit = self._limits.get(key, _UNLIMITED)
        fork = self._proofs.get(key[0])
        if fork is not None and key[1] >= fork.dot.incarnation:
            limit = min(limit, fork.dot.seq - 1 if key[1] == fork.dot.incarnation else 0)
        if limit == _UNLIMITED:
            return limit
        return max(limit, self._frontier.get(key, NOTHING)[0])

    def _lower(self, keys: Iterable[Key]) -> tuple[list[Dot], bool]:
        """Bring chains down to their limits. Gives what was subtracted, and whether dropped updates above remain."""
        dots: list[Dot] = []
        lost = False
        for key in keys:
            limit = self._limit(key)
            taken = self._chains.cut(key, limit)
            for record in taken:
                held = self._contributions.of(record)
                if held is not None:
                    self._sum.subtract(*held)
                self.total_weight -= record.header.weight
                self._forget_inner(record)
            if taken:
                self._retracted[key] = taken + self._retracted.get(key, [])
                self._theta = self._state_hash = None
            dots += dots_of(taken)
            lost |= self._chains.floor(key)[0] > limit
        return dots, lost

    # ------------------------------------------------------------------------------------------------ compaction

    def advance(self, frontier: VersionVector) -> list[Dot]:
        """Join a frontier with ours and compact what is final; the state changes only by what is put back.

        What it names and was retracted counts again, up to it. What it names and is not here is left to `behind`.

        Returns:
            dots that the log keeps no more, in dot order.
        """
        compacted: list[Dot] = []
        for key, (seq, head) in sorted(frontier.entries.items()):
            if seq <= self._frontier.get(key, NOTHING)[0]:
                continue
            if not self._holds(key, seq, head) and not self._restore(key, (seq, head)):
                self._behind[key] = max(self._behind.get(key, NOTHING), (seq, head))
                continue
            self._frontier[key] = (seq, head)
            self.floor_changes += 1
            if self._behind.get(key, (_UNLIMITED, b""))[0] <= seq:
                del self._behind[key]
            compacted += self._compact(key, seq)
        return compacted

    def drop_over_limit(self) -> list[Dot]:
        """Keep the log within `log_bytes_max`: retracted payloads go first, then the longest chains' oldest updates.

        What is dropped stays counted but can neither be taken back nor given to others: say so loudly. Returns the dots.
        """
        limit = self.rules.log_bytes_max
        if not 0 < limit < self.log_bytes:
            return []
        dropped: list[Dot] = []
        for key in sorted(self._retracted):
            records = self._retracted.pop(key)
            dropped += dots_of(records)
            self.log_bytes -= sum(record.size for record in records)
        sizes: dict[Key, int] = {}
        for record in self._chains.kept():
            sizes[record.key] = sizes.get(record.key, 0) + record.size
        heap = [(-size, key) for key, size in sizes.items()]
        heapq.heapify(heap)
        while self.log_bytes > limit:
            size, key = heapq.heappop(heap)
            record = self._chains.records(key)[0]
            dropped += self._compact(key, record.top[0])
            if size + record.size:
                heapq.heappush(heap, (size + record.size, key))
        return dropped

    def _holds(self, key: Key, seq: int, head: bytes) -> bool:
        """Included with this head, as far as can be told: below the floor of dropped updates nothing can."""
        return seq < self._chains.floor(key)[0] or self._chains.head_at(key, seq) == head

    def _restore(self, key: Key, top: Top) -> bool:
        """Count retracted updates again up to `top`, if that is one of them."""
        records = self._retracted.get(key, [])
        count = next((i + 1 for i, record in enumerate(records) if record.top == top), 0)
        for record in records[:count]:
            self._include(record)
        if count:
            self._retracted[key] = records[count:]
        return count > 0

    def _compact(self, key: Key, seq: int) -> list[Dot]:
        gone = self._chains.compact(key, seq)
        for record in gone:
            self._forget_inner(record)
        add_inner(self._floor_inner, gone)
        self.floor_changes += bool(gone)
        self.log_bytes -= sum(record.size for record in gone)
        return dots_of(gone)

    def _include(self, record: Record) -> None:
        self._chains.push(record)
        held = self._contributions.of(record)
        if held is not None:
            self._sum.add(*held)
        self.total_weight += record.header.weight
        for dot in record.inner:
            self._inner[dot] = record
        self._theta = self._state_hash = None

    def _forget_inner(self, record: Record) -> None:
        for dot in record.inner:
            if self._inner.get(dot) is record:
                del self._inner[dot]

    # ------------------------------------------------------------------------------------------------ snapshots

    def snapshot(self, *, folded: bool = False) -> Snapshot:
        """The state at the floor and the log above it; `folded`: the state at the vector and no log."""
        acc = self._sum.total.copy()
        weight = self.total_weight
        kept = [] if folded else list(self._chains.kept())
        for record in kept:
            held = self._contributions.of(record)
            if held is not None:
                indices, fixed = held
                acc[indices] -= fixed
            weight -= record.header.weight
        retracted = [record for key in sorted(self._retracted) for record in self._retracted[key]]
        inner = dict(self._floor_inner)
        if folded:
            add_inner(inner, self._chains.kept())
        return Snapshot(
            acc=acc,
            floor=self.vector if folded else VersionVector(self._chains.floors()),
            weight=weight,
            frontier=self.frontier,
            base=self.base,
            limits=self.limits,
            kept=tuple((record.header, record.payload) for record in kept),
            retracted=tuple((record.header, record.payload) for record in retracted),
            proofs=tuple(sorted(self._proofs.values(), key=lambda fork: fork.dot)),
            inner=inner,
        )

    @classmethod
    def from_snapshot(
        cls,
        theta0: np.ndarray,
        rules: GossipRules,
        snapshot: Snapshot | Parts,
        *,
        verify: Callable[[Header], None] | None = None,
        contributions: Contributions | None = None,
    ) -> UpdateLog:
        """The log that a snapshot (or its parts) was made of.

        Args:
            verify: checks the signature of every header in it, raising PeerFault; None for an own checkpoint.

        Raises:
            PeerFault("bad_snapshot"): it does not hang together. Whether its state at the floor is true is for two peers
                to agree on (`Snapshot.hash`).
        """
        if not isinstance(snapshot, Snapshot):
            snapshot = Snapshot.from_parts(snapshot, theta0.size)
        log = cls(theta0, rules, contributions)
        log.base, log.total_weight = snapshot.base, snapshot.weight
        log._sum.total[:] = snapshot.acc
        log._limits = dict(snapshot.limits)
        log._floor_inner = dict(snapshot.inner)
        log._proofs = {fork.dot.peer: fork for fork in reversed(snapshot.proofs)}
        for key, floor in snapshot.floor.entries.items():
            log._chains.begin(key, floor)
        log._frontier = dict(snapshot.frontier.entries)
        headers = [header for header, _ in snapshot.kept + snapshot.retracted]
        headers += [header for fork in snapshot.proofs for header in (fork.first, fork.second)]
        for header in headers if verify is not None else ():
            verify(header)  # pyright: ignore[reportOptionalCall]
        for header, payload in snapshot.kept:
            verdict, _ = log.judge(header)
            if verdict is not Verdict.NEW:
                raise PeerFault("bad_snapshot", f"{header.dot} in its log is {verdict.value}")
            log.add(header, payload)
        for key, (seq, head) in log._frontier.items():
            if not log._holds(key, seq, head):
                raise PeerFault("bad_snapshot", f"its frontier names {key[0][-8:]} at {seq}, which it has not")
        for header, payload in snapshot.retracted:
            record = log._contributions.read(header, payload)
            above = log._retracted.setdefault(record.key, [])
            seq, head = above[-1].top if above else log._chains.top(record.key)
            if (header.dot.seq, header.previous_head) != (seq + 1, head):
                raise PeerFault("bad_snapshot", f"{header.dot} was not retracted from its log")
            above.append(record)
            log.log_bytes += record.size
        return log


def add_inner(inner: dict[Key, tuple[int, ...]], records: Iterable[Record]) -> None:
    """Add what records count to the newest inner updates by chain; the order of the records does not matter."""
    for record in records:
        for dot in record.inner:
            key = (dot.peer, dot.incarnation)
            inner[key] = join_inner(inner.get(key, ()), (dot.seq,))
