"""When two sides of a partition meet: add up, or decide. Pure arithmetic and rules; gathers and moves nothing.

Small differences are simply exchanged and added. Two sides that both converged while apart would overshoot if added: each
went most of the way, and the sum goes twice as far. So when the lighter side's concurrent weight is above `heal_max` it is a
conflict, and the run's rule applies:

* *heavier*: the state of more weight wins whole. The losers take its snapshot, their chains are frozen where the winner has
  them, and they go on under a new incarnation; what they had learned flows back into their residuals, damped.
* *merge*: both sides take the average of the two states, by concurrent weight. From the common frontier C it is
  C + (a(A-C) + b(B-C)) / (a+b), in which C cancels: (aA + bB) / (a+b). So nobody needs to have kept C.

Every pair of peers decides alone, at every contact. That is consistent because the order of states is total (weight of all
that is included, then the smaller hash): wherever a heavier one is heard of it wins, so all end with one. Weights are
claims, as capped by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np

from ..protocol.version import VersionVector, sha256
from .forks import Key
from .snapshots import Snapshot, join_inner

Rule = Literal["heavier", "merge"]


@dataclass(frozen=True)
class Side:
    """One of two states that meet.

    Attributes:
        total_weight: of all updates included, since the start of the run.
        concurrent_weight: of those that the other side lacks.
        state_hash: 32 bytes.
        base: 32 bytes, `UpdateLog.base`.
    """

    total_weight: int
    concurrent_weight: int
    state_hash: bytes
    base: bytes


class Kind(Enum):
    """What to do when two sides meet."""

    ADD = "add"  # exchange what is missing; the sum is the state
    KEEP = "keep"  # ours wins: freeze the other's chains where we have them
    TAKE = "take"  # theirs wins: take their snapshot
    MERGE = "merge"  # both take `merged`


@dataclass(frozen=True)
class Decision:
    kind: Kind
    reason: str


def heal(mine: Side, theirs: Side, *, heal_max: int, rule: Rule) -> Decision:
    """What to do where `mine` and `theirs` meet. Both sides find the same: KEEP here is TAKE there.

    Args:
        heal_max: concurrent weight of the lighter side up to which states are added; 0 always decides.
    """
    lighter = min(mine.concurrent_weight, theirs.concurrent_weight)
    same_base = mine.base == theirs.base
    if same_base and (lighter <= heal_max or mine.state_hash == theirs.state_hash):
        return Decision(Kind.ADD, f"the lighter side's concurrent weight is {lighter}, at most {heal_max} is added")
    why = f"the lighter side's concurrent weight is {lighter}, above {heal_max}"
    if not same_base:
        # Sums that start from different merges cannot be added, and average what they share: the heavier wins.
        why = "one side has merged what the other has not"
    elif rule == "merge":
        total = mine.concurrent_weight + theirs.concurrent_weight
        return Decision(Kind.MERGE, f"{why}: average, ours counts {mine.concurrent_weight} of {total}")
    ours_first = _rank(mine) < _rank(theirs)
    kind = Kind.KEEP if ours_first else Kind.TAKE
    reason = f"{why}: {'ours' if ours_first else 'theirs'} is heavier ({mine.total_weight} and {theirs.total_weight})"
    return Decision(kind, reason)


def _rank(side: Side) -> tuple[int, bytes]:
    """Smallest first wins."""
    return -side.total_weight, side.state_hash


def abandoned(winner: VersionVector, loser: VersionVector) -> dict[Key, int]:
    """Chains to freeze in the winner's state (`UpdateLog.freeze`): those that the loser has more of, where we have them.

    Without it the loser's updates would come back by gossip and be added after all.
    """
    return {key: winner.seq(*key) for key, (seq, _) in loser.entries.items() if seq > winner.seq(*key)}


def merged(one: Snapshot, one_weight: int, two: Snapshot, two_weight: int) -> Snapshot:
    """The average of two folded snapshots by their concurrent weights, as a state of its own with a base of its own.

    Both sides get the same bits whichever is `one`: the order is by hash, the division rounds down once. A coordinate's sum
    must be below 2^62 in magnitude, which takes 2^22 contributions in one direction.

    Raises:
        ValueError: a snapshot has a log, both weigh nothing, or the two name two heads at one seq: that is a fork, to be
            proven and retracted first.
    """
    for snapshot in (one, two):
        if snapshot.kept:
            raise ValueError("only folded snapshots can be averaged")
    if one.acc.shape != two.acc.shape:
        raise ValueError(f"snapshots of {one.acc.size} and {two.acc.size} coordinates")
    if min(one_weight, two_weight) < 0 or not one_weight + two_weight:
        raise ValueError(f"weights {one_weight} and {two_weight} give no average")
    floor = one.floor.merge(two.floor)
    if two.hash < one.hash:
        one, one_weight, two, two_weight = two, two_weight, one, one_weight
    # An integer share of whole / 2^31 keeps every product within int64.
    shift = max(0, (one_weight + two_weight).bit_length() - 31)
    part, whole = two_weight >> shift, (one_weight >> shift) + (two_weight >> shift)
    quotient, rest = np.divmod(two.acc - one.acc, whole)
    limits = {
        key: min(s.limits.get(key, 2**63 - 1) for s in (one, two)) for key in one.limits.keys() | two.limits.keys()
    }
    return Snapshot(
        acc=one.acc + quotient * part + rest * part // whole,
        floor=floor,
        weight=max(one.weight + two_weight, two.weight + one_weight),
        frontier=floor,
        # The shares are in the name: weights are those of the moment of meeting, and two pairs that average the same states
        # with others must not call the results the same.
        base=sha256(b"shoal/v1/merged\0", one.hash, two.hash, part.to_bytes(8, "big"), whole.to_bytes(8, "big")),
        limits={key: max(limit, floor.seq(*key)) for key, limit in limits.items()},
        proofs=tuple(sorted({f.dot: f for f in two.proofs + one.proofs}.values(), key=lambda fork: fork.dot)),
        inner={
            key: join_inner(one.inner.get(key, ()), two.inner.get(key, ()))
            for key in one.inner.keys() | two.inner.keys()
        },
    )
