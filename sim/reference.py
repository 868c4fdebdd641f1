"""The merge of a sparse round once more, number by number, to hold against what the nodes computed.

Written apart from aggregation/merge.py, from the design's formulas and in plain Python arithmetic, so that one mistake would
have to be made twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..node.config import SyncConfig

UNITS = 2**40

Values = tuple[np.ndarray, np.ndarray] | None  # indices int64 [k] and values fp32 [k]; None: not decodable


def capped(claims: Mapping[str, int], sync: SyncConfig) -> dict[str, int]:
    """Weights by origin: at most `weight_max`, and at most a multiple of the lower median of those above 0."""
    first = {peer: max(0, min(claim, sync.weight_max)) for peer, claim in claims.items()}
    positive = sorted(weight for weight in first.values() if weight)
    if not positive:
        return first
    middle = positive[(len(positive) - 1) // 2]
    bound = max(1, int(sync.weight_median_multiple_max * middle))
    return {peer: min(weight, bound) for peer, weight in first.items()}


def merge(
    theta: np.ndarray, outer: np.ndarray | None, updates: Sequence[tuple[str, int, Values]], sync: SyncConfig
) -> tuple[np.ndarray, np.ndarray | None]:
    """theta and outer buffer, fp32 [d], after the round whose committed updates are (origin, claimed weight, values)."""
    weights = capped({origin: claim for origin, claim, _ in updates}, sync)
    total = sum(weights[origin] for origin, _, _ in updates)
    if total <= 0:
        return theta, outer
    merged = [0] * theta.size
    for origin, _, values in updates:
        if values is None or any(not abs(float(v)) < 1.0 for v in values[1]):
            continue
        scale = weights[origin] / total
        for index, value in zip(values[0].tolist(), values[1].tolist(), strict=True):
            merged[index] += round(scale * value * UNITS)
    new, buffer = [], []
    for i, units in enumerate(merged):
        gradient = units / UNITS
        if sync.outer == "sgd":
            new.append(np.float32(float(theta[i]) - sync.outer_lr * gradient))
            continue
        before = 0.0 if outer is None else float(outer[i])
        moved = np.float32(sync.outer_momentum * before + gradient)
        buffer.append(moved)
        step = gradient + sync.outer_momentum * float(moved)
        new.append(np.float32(float(theta[i]) - sync.outer_lr * step))
    return np.array(new, np.float32), np.array(buffer, np.float32) if buffer else None


# What quantizing a chunk once, and summing in fp32, may do to a mean, as a share of its largest coordinate.
DENSE_ERROR = {8: 2.0**-5, 16: 2.0**-10, 32: 2.0**-18}


def dense_mean(updates: Sequence[tuple[str, int, np.ndarray]], sync: SyncConfig) -> np.ndarray:
    """fp64 [d]: the weighted mean of (origin, claimed weight, int64 [d] in units of 2^-40)."""
    weights = capped({origin: claim for origin, claim, _ in updates}, sync)
    total = sum(weights.values())
    if total <= 0:
        return np.zeros(updates[0][2].size) if updates else np.zeros(0)
    return sum((weights[o] / total * fixed / UNITS for o, _, fixed in updates), np.zeros(updates[0][2].size))


def ring_sum(
    updates: Sequence[tuple[str, int, float, Values]], peers: int, kept: int, sync: SyncConfig
) -> dict[int, int]:
    """Hybrid mode: coordinate → units of 2^-40 of what a ring's updates (origin, claimed weight, damping, values) come to, in
    a swarm of `peers`, thinned out to `kept` coordinates (0: all). Clipping by norm is left out."""
    weights = capped({origin: claim for origin, claim, _, _ in updates}, sync)
    total = sum(weights.values())
    found: dict[int, int] = {}
    for origin, _, damping, values in updates if total else ():
        if values is None or not 0 < damping <= 1 or any(not abs(float(v)) < 1.0 for v in values[1]):
            continue
        share = sync.outer_lr * damping * (weights[origin] / total) * (len(updates) / max(peers, len(updates)))
        for index, value in zip(values[0].tolist(), values[1].tolist(), strict=True):
            found[index] = found.get(index, 0) + round(share * value * UNITS)
    largest = max((abs(units) for units in found.values()), default=0)
    unit = 2 ** max(0, largest.bit_length() - sync.sum_bits)
    rounded = {index: (2 * units + unit) // (2 * unit) * unit for index, units in found.items()}
    ranked = sorted((-abs(units), index) for index, units in rounded.items() if units)
    return {index: rounded[index] for _, index in (ranked[:kept] if kept else ranked)}


def term(scale: float, values: Values, step_max: float) -> tuple[np.ndarray, np.ndarray] | None:
    """What a gossiped update adds to the sum: indices and int64 contributions; None when it is void."""
    if values is None or not scale > 0:
        return None
    scaled = [scale * float(value) for value in values[1]]
    if not all(abs(one) < 1.0 for one in scaled):
        return None
    if 0 < step_max < scale * math.sqrt(math.fsum(float(value) ** 2 for value in values[1])):
        return None
    return values[0], np.array([round(one * UNITS) for one in scaled], np.int64)
