"""What one ring's round adds to the shared sum: a weighted mean in fixed point, and its bytes. Pure.

Every member of a ring computes it from the committed updates and the manifest, to the same bits, and seals it
(protocol/rings.py); whoever else adds it takes it as it is, for the inner updates never leave their ring. That is what a
hybrid saves: of a swarm of n in rings of m each peer receives m - 1 updates and n/m sums, in place of n - 1 updates. A sum of
sparse updates is hardly sparse, so it is thinned out again: its largest coordinates are kept, rounded to a few bits. An
update counts only at the coordinates kept; what it holds elsewhere stays in its origin's residual (Book.narrow).

    contribution of one update = rint(scale * value * 2^40),
    scale = outer_lr * damping * weight / (sum of the ring's weights) * (updates of the ring) / (peers of the swarm)

so that all rings of a round together make one outer step of averaging. Weights are capped as in ring mode. `damping` is
the origin's, signed in its header: at most 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..protocol.ballot_messages import Header
from ..protocol.errors import PeerFault
from ..protocol.version import Dot
from .bitstreams import Reader, positions_bytes_max, read_numbers, read_positions, write_numbers, write_positions
from .compress import Compression, decode
from .merge import Accumulator, capped_weights, contribution
from .robust import clip_scale, norm

COUNT_BYTES = 5  # of the coordinates in a sum; layouts have at most 2^40
WIDTH_MAX = 64
MEMBER_BYTES_MAX = 1024  # of a draw, a value and the seals, for each member: peer ids, hashes, signatures


@dataclass(frozen=True)
class HybridRules:
    """The manifest's part of combining.

    Attributes:
        weight_max, weight_median_multiple_max: caps on a claimed weight (merge.py).
        norm_max: updates of a larger norm are scaled down to it; 0 means no limit.
        outer_lr: size of the outer step.
        keep: a sum keeps as many coordinates as this many updates have; 0 keeps all.
        bits: of the largest number in a sum; the smaller ones are rounded to the same unit.
    """

    compression: Compression
    weight_max: int
    weight_median_multiple_max: float
    norm_max: float
    outer_lr: float
    keep: float = 0.0
    bits: int = 62


@dataclass(frozen=True)
class RingSum:
    """What a round came to.

    Attributes:
        indices: int64 [k], strictly ascending.
        fixed: int64 [k], in units of 2^-40; none is zero.
        counted: dots in it; the other updates of the round are void.
        weight: sum of the capped weights, void ones too.
    """

    indices: np.ndarray
    fixed: np.ndarray
    counted: frozenset[Dot]
    weight: int


def combine(updates: Sequence[tuple[Header, bytes]], peers: int, d: int, rules: HybridRules) -> RingSum:
    """The sum of a round's committed updates over d coordinates.

    Args:
        updates: (header, payload), in dot order, one of each origin.
        peers: of the whole swarm, from the draw; fewer than there are updates count as that many.
    """
    weights = capped_weights(
        {h.dot.peer: h.weight for h, _ in updates}, rules.weight_max, rules.weight_median_multiple_max
    )
    whole = sum(weights.values())
    accumulator, counted = Accumulator(d), set[Dot]()
    for header, payload in updates if whole > 0 else ():
        added = _contribution(header, payload, weights[header.dot.peer] / whole, len(updates), peers, d, rules)
        if added is not None:
            accumulator.add(*added)
            counted.add(header.dot)
    indices, fixed = thinned(accumulator.total, rules)
    return RingSum(indices, fixed, frozenset(counted), whole)


def thinned(total: np.ndarray, rules: HybridRules) -> tuple[np.ndarray, np.ndarray]:
    """int64 [d] → indices int64 [k] and numbers int64 [k] as `rules` keep them; equal magnitudes: the first ones."""
    shift = max(0, int(np.abs(total).max(initial=0)).bit_length() - rules.bits)
    if shift:
        total = (total + (1 << (shift - 1)) >> shift) << shift
    indices = np.flatnonzero(total)
    kept = round(rules.keep * rules.compression.form(total.size).total)
    if 0 < kept < indices.size:
        indices = np.sort(indices[np.argsort(-np.abs(total[indices]), kind="stable")[:kept]])
    return indices, total[indices]


def _contribution(
    header: Header, payload: bytes, share: float, count: int, peers: int, d: int, rules: HybridRules
) -> tuple[np.ndarray, np.ndarray] | None:
    """Indices and contributions of one update; None when it is void."""
    try:
        update = decode(payload, d, rules.compression)
    except PeerFault:
        return None
    if not 0 < header.scale <= 1 or not (np.abs(update.values) < np.float32(1.0)).all():
        return None
    scale = rules.outer_lr * header.scale * share * (count / max(peers, count))
    if rules.norm_max > 0:
        scale *= clip_scale(norm(update.values), rules.norm_max)
    fixed = contribution(update.values, scale)
    return None if fixed is None else (update.indices, fixed)


# --- bytes ------------------------------------------------------------------------------------------------------------


def write_sum(indices: np.ndarray, fixed: np.ndarray, d: int) -> bytes:
    """Count, unit as a power of two, width in bits, the set of indices, then the numbers, sign folded into the lowest bit."""
    lowest = int(np.bitwise_or.reduce(fixed)) if fixed.size else 0
    shift = (lowest & -lowest).bit_length() - 1 if lowest else 0
    units = fixed >> shift
    folded = (units << 1 ^ units >> 63).view(np.uint64)
    width = int(folded.max()).bit_length() if folded.size else 0
    head = indices.size.to_bytes(COUNT_BYTES, "little") + bytes([shift, width])
    return head + write_positions(indices, d) + write_numbers(folded, width)


def read_sum(data: bytes, d: int) -> tuple[np.ndarray, np.ndarray]:
    """(indices, fixed), inverse of `write_sum`. Raises PeerFault("bad_payload") on all that it does not write."""
    source = Reader(data)
    count, shift, width = source.number(COUNT_BYTES), source.number(1), source.number(1)
    if count > d or shift + width > WIDTH_MAX or count > 8 * source.left:
        raise PeerFault("bad_payload", f"a sum over {count} of {d} coordinates, {width} bits each")
    indices = read_positions(source, count, d)
    folded = read_numbers(source, count, width, np.uint64)
    fixed = ((folded >> np.uint64(1)).view(np.int64) ^ -(folded & np.uint64(1)).view(np.int64)) << shift
    if not fixed.all() or write_sum(indices, fixed, d) != data:
        raise PeerFault("bad_payload", "not the one encoding of a sum")
    return indices, fixed


def combined_bytes_max(d: int, compression: Compression, members: int) -> int:
    """No combined update of a ring of so many is longer: its sum, and its draw, value and seals."""
    count = min(d, members * compression.form(d).total)
    positions = max(positions_bytes_max(count, d), 1 + (d + 7) // 8)
    return COUNT_BYTES + 2 + positions + WIDTH_MAX * -(-count // 8) + MEMBER_BYTES_MAX * (members + 1)
