"""The shared state and the one function that moves it: what peers agree on, and nothing else.

Pure. `apply_commit` is a function of the state, the committed value, the updates' bytes and the manifest, so equal versions
mean equal bits (invariant 1). Which value was decided is protocol/ballot.py's; fetching the updates is ring_exchange.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...aggregation.compress import Compression, Sparse, decode
from ...aggregation.forks import head_of
from ...aggregation.layout import state_hash
from ...aggregation.merge import OuterOptimizer, capped_weights, merge_round
from ...protocol.ballot_messages import Header, Value
from ...protocol.errors import PeerFault
from ...protocol.version import Dot, VersionVector, sha256


@dataclass(frozen=True)
class SharedState:
    """Immutable: a commit makes a new one, so that downloads and checkpoints read it while training goes on.

    Attributes:
        theta: fp32 [d].
        outer: fp32 [d], the outer optimizer's buffer, or None where it has none.
        round: last committed round; 0 is the genesis.
        lineage: chained hash of the commits behind it.
        vector: dots included, with heads.
        electorate: who may vote in the next round.
        total_weight: committed weight of the whole lineage, for conflicts.
        hash: over theta, outer, lineage and vector.
    """

    theta: np.ndarray
    outer: np.ndarray | None
    round: int
    lineage: bytes
    vector: VersionVector
    electorate: tuple[str, ...]
    total_weight: int
    hash: bytes

    @classmethod
    def make(
        cls,
        *,
        theta: np.ndarray,
        outer: np.ndarray | None,
        round_: int,
        lineage: bytes,
        vector: VersionVector,
        electorate: Sequence[str],
        total_weight: int,
    ) -> SharedState:
        """Build one and compute its hash."""
        theta.setflags(write=False)
        return cls(
            theta=theta,
            outer=outer,
            round=round_,
            lineage=lineage,
            vector=vector,
            electorate=tuple(sorted(electorate)),
            total_weight=total_weight,
            hash=hash_of(theta, outer, lineage, vector),
        )


def hash_of(theta: np.ndarray, outer: np.ndarray | None, lineage: bytes, vector: VersionVector) -> bytes:
    """The state hash (32 bytes)."""
    return state_hash(theta, outer, sha256(b"shoal/v1/version\0", lineage, vector.hash()))


def genesis_hash(theta: np.ndarray) -> bytes:
    """Hash of the parameters that a run starts from; the genesis lineage is made from it."""
    return state_hash(theta, None, b"shoal/v1/genesis")


@dataclass(frozen=True)
class Applied:
    """What a commit did.

    Attributes:
        state: the new state.
        void: dots that count zero although committed (non-finite or too large).
        adopted: dots that moved the state.
        weights: capped weight by origin.
        reason: one sentence for the log.
    """

    state: SharedState
    void: tuple[Dot, ...]
    adopted: tuple[Dot, ...]
    weights: Mapping[str, int]
    reason: str


@dataclass(frozen=True)
class MergeRules:
    """The manifest's part of a merge."""

    compression: Compression
    outer: OuterOptimizer
    weight_max: int
    weight_median_multiple_max: float
    norm_max: float


def advance_vector(vector: VersionVector, headers: Sequence[Header]) -> VersionVector:
    """Include the committed headers. A dot at or below what is included (only after a restored disk) changes nothing."""
    for header in headers:
        if not vector.includes(header.dot):
            vector = vector.advance(header.dot, head_of(header))
    return vector


def weights_of(value: Value, rules: MergeRules) -> dict[str, int]:
    """Capped weight by origin of what a value commits; a pure function of value and manifest."""
    return capped_weights(
        {u.dot.peer: u.weight for u in value.updates}, rules.weight_max, rules.weight_median_multiple_max
    )


def _decode_or_void(payload: bytes, d: int, compression: Compression) -> Sparse | None:
    """None for a payload that does not decode: it was hashed, signed and committed, so every peer finds the same fault."""
    try:
        return decode(payload, d, compression)
    except PeerFault:
        return None


def apply_commit(
    state: SharedState,
    value: Value,
    updates: Sequence[tuple[Header, bytes]],
    rules: MergeRules,
    *,
    reduced: np.ndarray | None = None,
) -> Applied:
    """Apply one decided round; a pure function of its arguments, to the bit.

    Args:
        updates: (header, payload) of every committed update, in the value's order; payloads are ignored in dense rounds.
        reduced: int64 [d], dense rounds only: the reduced weighted mean over the committed updates (2^-40 units).
    """
    weights = weights_of(value, rules)
    if reduced is None:
        items = []
        for header, payload in updates:
            sparse = _decode_or_void(payload, state.theta.size, rules.compression)
            items.append((header.dot, sparse, weights[header.dot.peer]))
        merged = merge_round(state.theta, state.outer, items, rules.outer, rules.norm_max)
        theta, outer, void, reason = merged.theta, merged.buffer, set(merged.voids), merged.reason
    else:
        theta, outer = rules.outer.step(state.theta, state.outer, reduced)
        void, reason = set(), f"dense mean of {len(updates)} updates"
    new = SharedState.make(
        theta=theta,
        outer=outer,
        round_=value.round,
        lineage=value.lineage,
        vector=advance_vector(state.vector, [header for header, _ in updates]),
        electorate=sorted({*value.roster, *value.joiners}),
        total_weight=state.total_weight + sum(weights.values()),
    )
    dots = [header.dot for header, _ in updates]
    return Applied(
        state=new,
        void=tuple(d for d in dots if d in void),
        adopted=tuple(d for d in dots if d not in void),
        weights=weights,
        reason=reason,
    )
