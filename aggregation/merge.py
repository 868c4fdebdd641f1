"""Exact accumulation and the outer step: the one path by which updates become shared state.

Invariant 1 (same version, same bits) rests on this file: int64 sums in units of 2^-40, element-wise IEEE operations in a
fixed order, `math.fsum` for norms; no BLAS, no transcendental, no order of arrival.

A *void* update counts and contributes zero: one of its contributions is not finite or reaches 1 in magnitude. The
accumulator wraps and never saturates: with magnitudes below 1 it takes 2^23 contributions to one coordinate to overflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Generic, Protocol, TypeVar

import numpy as np

from .compress import Sparse
from .robust import clip_scale, norm

FRACTION_BITS = 40
UNIT = float(2**FRACTION_BITS)

K = TypeVar("K")


def contribution(values: np.ndarray, scale: float) -> np.ndarray | None:
    """`rint(f64(scale) * f64(value) * 2^40)` as int64 [k] for fp32 [k]; None (void) if one is non-finite or >= 1."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.float64(scale) * values.astype(np.float64)
    if not (np.abs(scaled) < 1.0).all():
        return None
    return np.rint(scaled * UNIT).astype(np.int64)


class Accumulator:
    """int64 [d] that wraps: any order of the same contributions gives the same bits."""

    def __init__(self, d: int) -> None:
        self.total = np.zeros(d, np.int64)

    def add(self, indices: np.ndarray, fixed: np.ndarray) -> None:
        """Add int64 [k] at distinct indices [k]."""
        self.total[indices] += fixed

    def subtract(self, indices: np.ndarray, fixed: np.ndarray) -> None:
        """Take back exactly what was added."""
        self.total[indices] -= fixed


def apply_fixed(theta0: np.ndarray, total: np.ndarray) -> np.ndarray:
    """fp32 [d]: `f32(f64(theta0) + total * 2^-40)`."""
    return (theta0.astype(np.float64) + total.astype(np.float64) / UNIT).astype(np.float32)


def capped_weights(claims: Mapping[K, int], cap: int, median_multiple: float) -> dict[K, int]:
    """Weights after both caps: an absolute one, and a multiple of the median of the claims (a lie moves it little).

    The lower median is used and the product rounded down, so the result is an integer that every peer finds.
    """
    limited = {key: min(max(0, claim), cap) for key, claim in claims.items()}
    positive = [w for w in limited.values() if w > 0]
    if not positive:
        return limited
    bound = max(1, int(median_multiple * median_low(positive)))
    return {key: min(weight, bound) for key, weight in limited.items()}


def _fp32(values: np.ndarray) -> np.ndarray:
    """Round to fp32; what overflows becomes infinite and is caught by `merge_round`."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


class OuterOptimizer(Protocol):
    """Turns the merged pseudo-gradient into the new state. Element-wise IEEE operations only."""

    def step(
        self, theta: np.ndarray, buffer: np.ndarray | None, merged: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """theta fp32 [d], buffer fp32 [d] or None, merged int64 [d] (2^-40 units) → the new pair; inputs unchanged."""
        ...


@dataclass(frozen=True)
class OuterSgd:
    """theta - lr * g. With lr 1 this is averaging, the default for RL."""

    lr: float = 1.0

    def step(
        self, theta: np.ndarray, buffer: np.ndarray | None, merged: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        gradient = merged.astype(np.float64) / UNIT
        return _fp32(theta.astype(np.float64) - np.float64(self.lr) * gradient), None


@dataclass(frozen=True)
class OuterNesterov:
    """Nesterov momentum as in torch.optim.SGD(nesterov=True), the outer step of DiLoCo (arXiv:2311.08105).

    b ← momentum * b + g;  theta ← theta - lr * (g + momentum * b). High momentum overshoots in short RL runs.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def step(
        self, theta: np.ndarray, buffer: np.ndarray | None, merged: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        gradient = merged.astype(np.float64) / UNIT
        before = np.zeros_like(gradient) if buffer is None else buffer.astype(np.float64)
        moved = _fp32(np.float64(self.momentum) * before + gradient)
        direction = gradient + np.float64(self.momentum) * moved.astype(np.float64)
        return _fp32(theta.astype(np.float64) - np.float64(self.lr) * direction), moved


@dataclass(frozen=True)
class MergeResult(Generic[K]):
    """What one round's merge gave.

    Attributes:
        theta, buffer: the new state, fp32 [d].
        merged: int64 [d], the weighted mean of the updates in 2^-40 units.
        voids: keys of updates that contributed zero, charged to their origins.
        reason: one sentence for the log.
    """

    theta: np.ndarray
    buffer: np.ndarray | None
    merged: np.ndarray
    voids: tuple[K, ...]
    reason: str


def merge_round(
    theta: np.ndarray,
    buffer: np.ndarray | None,
    updates: Iterable[tuple[K, Sparse | None, int]],
    outer: OuterOptimizer,
    norm_max: float = 0.0,
) -> MergeResult[K]:
    """The weighted mean of a round's updates and one outer step: the function every peer runs to get the same bits.

    Args:
        theta, buffer: fp32 [d] and fp32 [d] or None.
        updates: (key, update, capped weight), in dot order; None for an update that does not decode, which is void.
        norm_max: updates of a larger norm are scaled down to it; 0 means no limit.

    The normalizer is the sum of all the weights given, void updates included: a void one must not raise the others' share.
    A sum of zero means no step.
    """
    items: Sequence[tuple[K, Sparse | None, int]] = list(updates)
    normalizer = sum(weight for _, _, weight in items)
    accumulator = Accumulator(theta.size)
    if normalizer <= 0:
        return MergeResult(theta, buffer, accumulator.total, (), "no step: the weights sum to zero")
    voids: list[K] = []
    clipped = 0
    for key, update, weight in items:
        # Magnitude is judged before the weight: whether an update is void must not depend on who else took part.
        if update is None or not (np.abs(update.values) < np.float32(1.0)).all():
            voids.append(key)
            continue
        scale = weight / normalizer
        if norm_max > 0:
            factor = clip_scale(norm(update.values), norm_max)
            clipped += factor < 1
            scale *= factor
        fixed = contribution(update.values, scale)
        assert fixed is not None  # a share of what is below 1
        accumulator.add(update.indices, fixed)
    new_theta, new_buffer = outer.step(theta, buffer, accumulator.total)
    reason = (
        f"mean of {len(items) - len(voids)} updates, {len(voids)} void, {clipped} clipped, total weight {normalizer}"
    )
    if not np.isfinite(new_theta).all():
        return MergeResult(theta, buffer, np.zeros_like(accumulator.total), tuple(k for k, _, _ in items),
                           "no step: it would leave the range of fp32")  # fmt: skip
    return MergeResult(new_theta, new_buffer, accumulator.total, tuple(voids), reason)
