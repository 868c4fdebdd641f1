"""The omniscient record of a simulated run: what was learned, said and decided, kept apart from every node's own books.

The invariant checkers compare the nodes with it. It learns of training through `Witness`, a learner that wraps the node's,
and of everything else by looking at the nodes after each event. It never speaks to a node.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..aggregation.book import to_fixed
from ..aggregation.compress import Compression, decode
from ..aggregation.forks import head_of
from ..aggregation.gossip import NO_BASE, UpdateLog
from ..aggregation.hybrid import read_sum
from ..node.config import SyncConfig
from ..node.learner import LocalResult, StepStats
from ..node.learners import NodeLearner
from ..node.swarm.state import SharedState
from ..protocol.ballot_messages import Encoding, Exchange, Header, Value
from ..protocol.rings import Combined, decode_combined
from ..protocol.version import Dot, VersionVector
from . import reference
from .reference import Values


@dataclass
class Learned:
    """What one peer's inner steps came to over all its lives: running sums of the booked deltas, int64 [d]."""

    sums: list[np.ndarray] = field(default_factory=list)  # sums[k]: after k results; sums[0] is zero
    published: int = 0  # results behind the newest journaled update

    def add(self, delta: np.ndarray) -> None:
        if not self.sums:
            self.sums.append(np.zeros(delta.size, np.int64))
        self.sums.append(self.sums[-1] + to_fixed(delta))

    def restart_from(self, learned: np.ndarray) -> int | None:
        """After a crash the books go on from an earlier sum, at or above what was published. Its index, or None."""
        for at in range(len(self.sums) - 1, -1, -1):
            if np.array_equal(self.sums[at], learned):
                del self.sums[at + 1 :]
                return at
        return None


class Witness:
    """A learner that tells the ledger what it learned. Otherwise the wrapped one."""

    def __init__(self, learner: NodeLearner, record: Learned) -> None:
        self._learner, self._record = learner, record
        self.layout = learner.layout

    def initial(self) -> np.ndarray:
        return self._learner.initial()

    def load(self, theta: np.ndarray) -> None:
        self._learner.load(theta)

    def begin(self, round_: int) -> None:
        self._learner.begin(round_)

    def step(self) -> StepStats:
        return self._learner.step()

    def finish(self) -> LocalResult:
        result = self._learner.finish()
        self._record.add(result.delta)
        return result

    def set_shard(self, index_of: tuple[int, ...] | None, count: int) -> None:
        self._learner.set_shard(index_of, count)

    def evaluate(self) -> dict[str, float]:
        return self._learner.evaluate()

    def snapshot(self) -> dict[str, np.ndarray | bytes]:
        return self._learner.snapshot()

    def restore(self, saved: dict[str, np.ndarray | bytes]) -> None:
        self._learner.restore(saved)

    def close(self) -> None:
        self._learner.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self._learner, name)


@dataclass(frozen=True)
class Said:
    """One update as its origin signed it."""

    header: Header
    fixed: tuple[np.ndarray | None, np.ndarray] | None  # indices (None: dense) and int64 values; None: not decodable
    values: Values = None  # sparse ones as decoded
    term: tuple[np.ndarray, np.ndarray] | None = None  # gossip mode: indices and int64 contributions; None: void
    ring: Combined | None = None  # hybrid mode: what a combined update says
    where: np.ndarray | None = None  # and the coordinates int64 [k] of its sum


@dataclass(frozen=True)
class Version:
    """One state of the shared parameters, as the first node that had it computed it."""

    round: int
    parent: bytes
    state: SharedState
    dots: Mapping[tuple[str, int], int]  # (peer, incarnation) → highest seq included
    adopted: Mapping[tuple[str, int], np.ndarray]  # (peer, incarnation) → int64 [d], sum of its adopted updates

    def adopted_of(self, peer: str, since: int, d: int) -> np.ndarray:
        """int64 [d]: what the state holds of a peer's updates from incarnation `since` on."""
        total = np.zeros(d, np.int64)
        for (origin, incarnation), mass in self.adopted.items():
            if origin == peer and incarnation >= since:
                total += mass
        return total


# A version's sum is recomputed for one in so many: every update makes one.
SUMMED_EVERY = 16


class Ledger:
    """Everything that happened, by name."""

    def __init__(self, step_max: float = 0.0) -> None:
        self._step_max = step_max  # the manifest's, for gossiped updates
        self.learned: dict[str, Learned] = {}  # by peer
        self.said: dict[Dot, dict[bytes, Said]] = {}  # by dot, then by update hash: an equivocator has two
        self.versions: dict[bytes, Version] = {}  # by lineage
        self.decided: dict[bytes, dict[bytes, tuple[bool, frozenset[str]]]] = {}  # base → lineage → (split, signers)
        self.lost: set[str] = set()  # peers that have lost their disk
        self.gossiped: dict[bytes, bytes] = {}  # gossip mode: version → state hash
        self._summed: set[bytes] = set()
        self._said_by_head: dict[bytes, Said] = {}  # by the head of its origin's chain after it

    def of(self, peer: str) -> Learned:
        return self.learned.setdefault(peer, Learned())

    def heard(self, header: Header, payload: bytes, d: int, compression: Compression) -> None:
        """An update left its origin's journal."""
        by_hash = self.said.setdefault(header.dot, {})
        if header.update_hash in by_hash:
            return
        fixed: tuple[np.ndarray | None, np.ndarray] | None = None
        values: Values = None
        if header.encoding is Encoding.COMBINED:
            ring = decode_combined(payload)
            said = Said(header, None, ring=ring, where=read_sum(ring.sum, d)[0])
            by_hash[header.update_hash] = self._said_by_head[head_of(header)] = said
            return
        if header.encoding is Encoding.DENSE:
            fixed = (None, to_fixed(np.frombuffer(payload, "<f4")))
        else:
            try:
                sparse = decode(payload, d, compression)
                values = (sparse.indices, sparse.values)
                fixed = (sparse.indices, to_fixed(sparse.values))
            except Exception:
                fixed = None
        said = Said(header, fixed, values, reference.term(header.scale, values, self._step_max))
        by_hash[header.update_hash] = self._said_by_head[head_of(header)] = said

    def root(self, state: SharedState) -> None:
        """The genesis."""
        self.versions.setdefault(state.lineage, Version(0, b"", state, {}, {}))

    def decide(
        self,
        value: Value,
        state: SharedState,
        *,
        split: bool,
        signers: frozenset[str],
        adopted: tuple[Dot, ...],
        sync: SyncConfig,
    ) -> list[str]:
        """A node holds the state after `value`. Returns what is wrong with that, if anything."""
        lineage, base = value.lineage, value.base_lineage
        self.decided.setdefault(base, {})[lineage] = (split, signers)
        if (known := self.versions.get(lineage)) is not None:
            if known.state.hash == state.hash:
                return []
            return [
                f"round {value.round} {lineage.hex()[:12]}: hashes {known.state.hash.hex()[:12]} and {state.hash.hex()[:12]}"
            ]
        parent = self.versions.get(base)
        if parent is None:
            return [f"round {value.round} stands on {base.hex()[:12]}, which nobody ever had"]
        wrong = []
        dots = dict(parent.dots)
        sums = dict(parent.adopted)
        for update in value.updates:
            dot = update.dot
            key = (dot.peer, dot.incarnation)
            if dot.seq <= dots.get(key, 0):
                wrong.append(f"{dot} is committed in round {value.round} and was included before")
            dots[key] = max(dot.seq, dots.get(key, 0))
            said = self.said.get(dot, {}).get(update.update_hash)
            if said is None:
                wrong.append(f"{dot} is committed in round {value.round} and nobody ever said it")
            elif dot in adopted and said.fixed is not None:
                indices, fixed = said.fixed
                total = sums[key].copy() if key in sums else np.zeros(self._d, np.int64)
                if indices is None:
                    total += fixed
                else:
                    total[indices] += fixed
                sums[key] = total
        self.versions[lineage] = Version(value.round, base, state, dots, sums)
        if not wrong and value.exchange is Exchange.RING_DENSE:
            wrong = self._estimate(value, parent.state, state, sync)
        elif not wrong and sync.norm_max == 0:
            wrong = self._recompute(value, parent.state, state, sync)
        return wrong

    def _estimate(self, value: Value, before: SharedState, after: SharedState, sync: SyncConfig) -> list[str]:
        """A dense round: the mean in another order of summation and not quantized, so near the nodes' one and no more."""
        dense = [
            (u.dot.peer, u.weight, said.fixed[1])
            for u in value.updates
            if (said := self.said[u.dot][u.update_hash]).fixed is not None
        ]
        if sync.outer != "sgd" or len(dense) < len(value.updates):
            return []
        if any(len(self.said[update.dot]) > 1 for update in value.updates):
            return []  # who signs two updates may put either into a sum that nobody can look into
        mean = reference.dense_mean(dense, sync)
        moved = (before.theta.astype(np.float64) - after.theta.astype(np.float64)) / sync.outer_lr
        largest = float(np.abs(mean).max(initial=0.0))
        if not largest < 1.0:  # no step at all, or so near to none that the quantizer decides
            return []
        summed = max((float(np.abs(fixed).max(initial=0)) for _, _, fixed in dense), default=0.0) / reference.UNITS
        rounding = 2.0**-22 * (summed + float(np.abs(before.theta).max(initial=0.0)) / sync.outer_lr)
        off = float(np.abs(moved - mean).max(initial=0.0))
        if off > reference.DENSE_ERROR[sync.dense_bits] * largest + rounding:
            return [f"round {value.round}: a dense mean is off by {off:.3g}, its largest coordinate is {largest:.3g}"]
        return []

    def _recompute(self, value: Value, before: SharedState, after: SharedState, sync: SyncConfig) -> list[str]:
        """A sparse round, merged once more by reference.py."""
        updates = [(u.dot.peer, u.weight, self.said[u.dot][u.update_hash].values) for u in value.updates]
        theta, outer = reference.merge(before.theta, before.outer, updates, sync)
        if not np.array_equal(theta, after.theta):
            off = int(np.argmax(theta != after.theta))
            return [f"round {value.round}: coordinate {off} is {after.theta[off]!r}, merged again {theta[off]!r}"]
        if sync.outer != "sgd" and value.updates and outer is not None and not np.array_equal(outer, after.outer):  # type: ignore[arg-type]
            return [f"round {value.round}: the outer buffer is not what the merge gives"]
        return []

    def gossip(
        self,
        state: SharedState,
        log: UpdateLog,
        theta0: np.ndarray | None,
        sync: SyncConfig,
        *,
        always: bool = False,
    ) -> list[str]:
        """A node in gossip mode has this state. One version in SUMMED_EVERY (`always`: each) is summed again."""
        known = self.gossiped.setdefault(state.lineage, state.hash)
        if known != state.hash:
            return [f"version {state.lineage.hex()[:12]}: hashes {known.hex()[:12]} and {state.hash.hex()[:12]}"]
        due = always or state.lineage[0] % SUMMED_EVERY == 0
        if not due or state.lineage in self._summed or theta0 is None or log.base != NO_BASE:
            return []
        self._summed.add(state.lineage)
        total = np.zeros(theta0.size, np.int64)
        inner: set[Dot] = set()
        for dot, said in self.included(state.vector):
            if said is None or said.header.dot != dot:
                return [f"{dot} is included and nobody ever said it so"]
            if said.term is not None:
                total[said.term[0]] += said.term[1]
            if said.ring is not None:
                again = inner.intersection(said.ring.dots)
                if again:
                    return [f"{min(again)} is in two sums that are both included"]
                inner.update(said.ring.dots)
                if (wrong := self._add_ring(total, said.ring, sync, log.rules.compression)) is not None:
                    return [wrong]
        pairs = zip(theta0.tolist(), total.tolist(), strict=True)
        wanted = np.array([np.float32(t - s / reference.UNITS) for t, s in pairs])
        if not np.array_equal(wanted.astype(np.float32), state.theta):
            return [f"version {state.lineage.hex()[:12]} is not the sum of what it includes"]
        return []

    def included(self, vector: VersionVector) -> Iterator[tuple[Dot, Said | None]]:
        """Every update below a vector, chain by chain from its top; None, and no more of its chain, where nobody said it."""
        for (peer, incarnation), (seq, head) in vector.entries.items():
            for number in range(seq, 0, -1):
                said = self._said_by_head.get(head)
                yield Dot(peer, incarnation, number), said
                if said is None:
                    break
                head = said.header.previous_head

    def summed(self, vector: VersionVector, peer: str) -> dict[Dot, np.ndarray]:
        """Hybrid mode: a peer's inner updates below a vector, and the coordinates int64 [k] of the sum that each is in."""
        found: dict[Dot, np.ndarray] = {}
        for _, said in self.included(vector):
            if said is not None and said.ring is not None and said.where is not None:
                found |= {dot: said.where for dot in said.ring.dots if dot.peer == peer}
        return found

    def _add_ring(self, total: np.ndarray, ring: Combined, sync: SyncConfig, compression: Compression) -> str | None:
        """Add what a ring's updates come to, computed once more by reference.py. What is wrong with the ring, if anything."""
        updates = []
        for update in ring.value.updates:
            said = self.said.get(update.dot, {}).get(update.update_hash)
            if said is None:
                return f"{update.dot} is in a sum and nobody ever said it"
            updates.append((update.dot.peer, update.weight, said.header.scale, said.values))
        kept = round(sync.sum_keep * compression.form(total.size).total)
        for index, units in reference.ring_sum(updates, ring.draw.peers, kept, sync).items():
            total[index] += units
        return None

    def forks(self) -> list[str]:
        """Rounds decided twice on one base, neither marked split.

        Two majorities share a member, and that member would have to vote twice. It can only if it lost its disk in between:
        nothing that a peer can do remembers what its disk has forgotten.
        """
        found = []
        for base, ends in self.decided.items():
            whole = [(lineage, signers) for lineage, (split, signers) in ends.items() if not split]
            for (one, first), (other, second) in itertools.combinations(whole, 2):
                if not first & second <= self.lost:
                    found.append(f"base {base.hex()[:12]} has successors {one.hex()[:12]} and {other.hex()[:12]}")
        return found

    def continues(self, newer: bytes, older: bytes) -> bool:
        """Ring mode: whether one version stands on another."""
        while newer != older and (version := self.versions.get(newer)) is not None:
            newer = version.parent
        return newer == older

    def set_dimension(self, d: int) -> None:
        self._d = d
