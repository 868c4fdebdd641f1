"""Group-relative advantages: reward minus the mean of its group, scaled by a standard deviation.

Several rewards are summed first, or each normalized in its group first (GDPO, 2601.05242); the baseline is the group's
mean or the mean of the others (RLOO, 2402.14740). Does not score completions (`rewards.py`). Whether a group carries a
signal is decided by exact equality over the whole group, never by a small standard deviation. `None` means "does not
apply": such a reward takes no part in any mean, and a completion without any reward gets advantage 0. Agrees with TRL
1.16 but in that last point: TRL's numerical noise in a group of equal rewards is an exact 0 here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

SCALE_EPSILON = 1e-4  # added to the standard deviation, as in TRL, so that a tiny spread cannot blow up

Scale = Literal["group", "batch", "none"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """Advantages of one batch of groups.

    Attributes:
        values: fp64 [n], one per completion, 0 where there is no signal.
        has_signal: bool [n], False for every completion of a group that is skipped.
        skipped_groups: fraction of the groups without a signal, 0 to 1.
        reward_mean: mean over the scored completions, NaN when there is none.
        reward_std: standard deviation over the scored completions (one degree of freedom less), 0 for fewer than two.
    """

    values: np.ndarray
    has_signal: np.ndarray
    skipped_groups: float
    reward_mean: float
    reward_std: float


def combined_advantages(
    columns: Sequence[Sequence[float | None]],
    weights: Sequence[float],
    group_sizes: Sequence[int],
    *,
    aggregation: Aggregation = "sum_then_normalize",
    scale: Scale = "group",
    leave_one_out: bool = False,
) -> Advantages:
    """Advantages from several reward functions.

    Args:
        columns: for each function, one reward per completion; None or a non-finite value means "does not apply".
        weights: one per function.
        group_sizes: as in `group_advantages`.
        aggregation: "sum_then_normalize" sums the weighted rewards of a completion, then does what `group_advantages`
            does; "normalize_then_sum" normalizes each function within its group, sums, and normalizes over the batch,
            so that a reward with a small spread is not drowned by one with a large spread.
        scale, leave_one_out: as in `group_advantages`; "normalize_then_sum" has its own scaling and needs defaults.

    Raises:
        ValueError: lengths that do not agree, or options that exclude each other.
    """
    if len(weights) != len(columns) or len({len(c) for c in columns}) != 1:
        raise ValueError(f"{len(columns)} columns of lengths {[len(c) for c in columns]}, {len(weights)} weights")
    table = np.stack([_known(c) for c in columns], axis=1)  # fp64 [n, functions], NaN = does not apply
    factors = np.array(weights, dtype=np.float64)
    scored = ~np.isnan(table).all(axis=1)
    total = np.where(scored, np.nansum(table * factors, axis=1), np.nan)
    if aggregation == "sum_then_normalize":
        return group_advantages(total.tolist(), group_sizes, scale=scale, leave_one_out=leave_one_out)
    if aggregation != "normalize_then_sum":
        raise ValueError(f"unknown aggregation {aggregation!r}")
    if scale != "group" or leave_one_out:
        raise ValueError('"normalize_then_sum" needs scale = "group" and no leave_one_out: it normalizes by itself')
    _check_sizes(group_sizes, len(total))
    normalized = np.zeros_like(table)
    has_signal = np.zeros(len(table), dtype=bool)
    for rows in _groups(group_sizes):
        for column, factor in enumerate(factors):
            group = table[rows, column]
            present = group[~np.isnan(group)]
            if len(present) > 1 and factor != 0 and not bool(np.all(present == present[0])):
                centred = (group - present.mean()) / (_std(present) + SCALE_EPSILON)
                normalized[rows, column] = np.nan_to_num(centred, nan=0.0)
                has_signal[rows] = True
    summed = (normalized * factors).sum(axis=1)
    values = np.zeros(len(table))
    if has_signal.any():
        values = (summed - summed[scored].mean()) / (_std(summed[scored]) + SCALE_EPSILON)
    counted = has_signal & scored
    return _result(np.where(counted, values, 0.0), has_signal, group_sizes, total)


def group_advantages(
    rewards: Sequence[float | None],
    group_sizes: Sequence[int],
    *,
    scale: Scale = "group",
    leave_one_out: bool = False,
) -> Advantages:
    """Advantages of completions that lie group after group.

    Args:
        rewards: one per completion; None or a non-finite value means "does not apply".
        group_sizes: completions per group, in order; groups may differ in size. Sums to len(rewards).
        scale: divide by the group's deviation, by the batch's, or not at all.
        leave_one_out: the baseline is the mean of the group's other completions, which keeps it independent of the
            completion: the group's mean, times n / (n - 1) for n scored completions.

    Raises:
        ValueError: the sizes do not sum to the number of rewards.
    """
    _check_sizes(group_sizes, len(rewards))
    flat = _known(rewards)
    batch_std = _std(flat[~np.isnan(flat)])
    values = np.zeros(len(flat))
    has_signal = np.zeros(len(flat), dtype=bool)
    for rows in _groups(group_sizes):
        group = flat[rows]
        known = ~np.isnan(group)
        present = group[known]
        if len(present) < 2 or bool(np.all(present == present[0])):
            continue
        centred = present - present.mean()
        if leave_one_out:
            centred = centred * (len(present) / (len(present) - 1))
        if scale != "none":
            centred = centred / ((_std(present) if scale == "group" else batch_std) + SCALE_EPSILON)
        values[rows][known] = centred
        has_signal[rows] = True
    return _result(values, has_signal, group_sizes, flat)


def _result(values: np.ndarray, has_signal: np.ndarray, group_sizes: Sequence[int], rewards: np.ndarray) -> Advantages:
    scored = rewards[~np.isnan(rewards)]
    skipped = sum(not has_signal[rows].any() for rows in _groups(group_sizes))
    return Advantages(
        values=values,
        has_signal=has_signal,
        skipped_groups=skipped / len(group_sizes) if group_sizes else 0.0,
        reward_mean=float(scored.mean()) if len(scored) else math.nan,
        reward_std=_std(scored),
    )


def _known(rewards: Sequence[float | None]) -> np.ndarray:
    """fp64 [n], NaN where the reward does not apply."""
    return np.array([math.nan if r is None or not math.isfinite(r) else float(r) for r in rewards], dtype=np.float64)


def _groups(sizes: Sequence[int]) -> list[slice]:
    ends = np.cumsum(sizes).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _check_sizes(sizes: Sequence[int], n: int) -> None:
    if sum(sizes) != n:
        raise ValueError(f"group sizes sum to {sum(sizes)}, {n} rewards")


def _std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
