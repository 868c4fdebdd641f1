"""What a commit proves, who may vote next, and the chain of commits: ancestry, forks, and which side of a fork wins.
Pure.

`CommitLog` keeps the records of the last `COMMIT_RECORDS_KEPT` rounds, as far as they fit into its bytes, on every branch
that was heard of, so that the point of a fork is known; what it cannot know it says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum

from . import limits
from .ballot_rules import CheckedCommit, check_commit, electorate_after

__all__ = [
    "CheckedCommit",
    "CommitLog",
    "CommitRecord",
    "Resolution",
    "Winner",
    "check_commit",
    "electorate_after",
]


class Winner(Enum):
    MINE = "mine"
    THEIRS = "theirs"
    SAME = "same"  # one continues the other: no fork
    UNDECIDABLE = "undecidable"  # the fork is older than the records: a person decides


@dataclass(frozen=True)
class Resolution:
    """Who wins a conflict and why. `fork`: the last common lineage; `rounds_stale`: rounds that the loser is behind
    it."""

    winner: Winner
    reason: str
    fork: bytes | None = None
    rounds_stale: int = 0


@dataclass(frozen=True)
class CommitRecord:
    """One commit on some branch. `weight`: sum of the committed weights as capped by the manifest."""

    checked: CheckedCommit
    weight: int
    total_weight: int  # along the lineage, this one included

    @property
    def size(self) -> int:
        """Bytes of what was signed."""
        commit = self.checked.commit
        return len(commit.value.encoded) + sum(len(vote.signed) for vote in commit.votes)

    @property
    def round(self) -> int:
        return self.checked.value.round

    @property
    def lineage(self) -> bytes:
        return self.checked.lineage

    @property
    def base_lineage(self) -> bytes:
        return self.checked.value.base_lineage


class CommitLog:
    """Commit records by lineage: a tree that grows from `root` (genesis, or the state that a newcomer downloaded)."""

    def __init__(
        self,
        root: bytes,
        root_round: int,
        root_weight: int = 0,
        *,
        electorate: Collection[str] = (),
        kept: int = limits.COMMIT_RECORDS_KEPT,
        bytes_max: int = limits.COMMIT_RECORDS_BYTES_MAX,
    ) -> None:
        """
        Args:
            root: lineage of the state at `root_round`, whose cumulative weight is `root_weight`.
            electorate: who may vote after it.
            kept: rounds.
            bytes_max: of the own branch, encoded, and as many again of others.
        """
        self.kept, self._bytes_max = kept, bytes_max
        self.root_electorate = frozenset(electorate)
        self._root = (root, root_round, root_weight)
        self._records: dict[bytes, CommitRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def get(self, lineage: bytes) -> CommitRecord | None:
        return self._records.get(lineage)

    def knows(self, lineage: bytes) -> bool:
        """The lineage is the root or ends in a kept record."""
        return lineage == self._root[0] or lineage in self._records

    def add(self, checked: CheckedCommit, weight: int, *, tip: bytes) -> CommitRecord:
        """Keep one more commit; `tip` is the lineage of this node's own state, whose branch is never dropped for space.

        Adding a commit of the own branch: pass its own lineage as `tip`. Raises ValueError when its base is not known.
        """
        base = checked.value.base_lineage
        if not self.knows(base):
            raise ValueError(f"commit of round {checked.value.round} stands on an unknown lineage {base.hex()[:16]}")
        if (known := self._records.get(checked.lineage)) is not None:
            return known
        parent = self._records.get(base)
        before = parent.total_weight if parent else self._root[2]
        record = CommitRecord(checked, weight, before + weight)
        self._records[checked.lineage] = record
        self._drop(tip)
        return record

    def chain(self, lineage: bytes) -> Iterator[CommitRecord]:
        """Records from `lineage` back to the root, newest first."""
        while (record := self._records.get(lineage)) is not None:
            yield record
            lineage = record.base_lineage

    def is_ancestor(self, older: bytes, newer: bytes) -> bool:
        """`older` lies on the chain that ends in `newer`, as far as records are kept."""
        return older == newer or any(r.base_lineage == older for r in self.chain(newer))

    def after(self, lineage: bytes, tip: bytes, limit: int = limits.COMMITS_PER_REPLY_MAX) -> list[CommitRecord]:
        """Up to `limit` records of the chain to `tip` that come after `lineage`, oldest first; empty when it is not
        on it."""
        later: list[CommitRecord] = []
        for record in self.chain(tip):
            later.append(record)
            if record.base_lineage == lineage:
                return later[::-1][:limit]
        return []

    def fork_point(self, mine: bytes, theirs: bytes) -> bytes | None:
        """The last lineage common to both, or None when it is not among the kept ones."""
        if not (self.knows(mine) and self.knows(theirs)):
            return None
        ancestors = {mine, *(r.base_lineage for r in self.chain(mine))}
        if theirs in ancestors:
            return theirs
        return next((r.base_lineage for r in self.chain(theirs) if r.base_lineage in ancestors), None)

    def resolve_conflict(self, mine: bytes, theirs: bytes) -> Resolution:
        """Which of two lineages stands. Both sides compute the same from the same records.

        In this order: more distinct signers from the electorate at the fork, more capped weight since the fork, the
        smaller lineage right after the fork.
        """
        fork = self.fork_point(mine, theirs)
        if fork is None:
            return Resolution(Winner.UNDECIDABLE, f"no common commit among the last {self.kept} rounds")
        sides = [self._since(fork, tip) for tip in (mine, theirs)]
        if not sides[0] or not sides[1]:
            return Resolution(Winner.SAME, "one lineage continues the other", fork)
        # Both first commits after the fork were voted in the same electorate.
        electorate = sides[0][0].checked.electorate
        signers = [len(electorate & frozenset().union(*(r.checked.signers for r in side))) for side in sides]
        weights = [sum(r.weight for r in side) for side in sides]
        first = [side[0].lineage for side in sides]
        if signers[0] != signers[1]:
            won, why = (
                signers[0] > signers[1],
                f"{signers[0]} signers from the electorate at the fork against {signers[1]}",
            )
        elif weights[0] != weights[1]:
            won, why = weights[0] > weights[1], f"equal signers; capped weight {weights[0]} against {weights[1]}"
        else:
            won = first[0] < first[1]
            why = f"equal signers and weight; {first[0].hex()[:16]} against {first[1].hex()[:16]}, the smaller wins"
        return Resolution(
            Winner.MINE if won else Winner.THEIRS, f"{why} (mine first)", fork, len(sides[1 if won else 0])
        )

    def _since(self, fork: bytes, tip: bytes) -> list[CommitRecord]:
        """Records after `fork` up to `tip`, oldest first."""
        side: list[CommitRecord] = []
        for record in self.chain(tip):
            if record.lineage == fork:
                break
            side.append(record)
        return side[::-1]

    def _drop(self, tip: bytes) -> None:
        """Forget what is more than `kept` rounds, or on the own branch `bytes_max`, older than `tip`; then, to stay within
        twice both, other branches."""
        own, size, first = set[bytes](), 0, self._root[1] + 1
        for record in self.chain(tip):
            own.add(record.lineage)
            size += record.size
            if len(own) == 1:
                first = record.round - self.kept + 1
            elif size > self._bytes_max:
                first = max(first, record.round + 1)
        for record in [r for r in self._records.values() if r.round < first]:
            del self._records[record.lineage]
            if record.lineage in own and record.round >= self._root[1]:
                self._root = (record.lineage, record.round, record.total_weight)
                self.root_electorate = frozenset(electorate_after(record.checked.value))
        size = sum(r.size for r in self._records.values())
        others = sorted((r for r in self._records.values() if r.lineage not in own), key=lambda r: r.round)
        for record in others:
            if len(self._records) <= 2 * self.kept and size <= 2 * self._bytes_max:
                break
            size -= record.size
            del self._records[record.lineage]
