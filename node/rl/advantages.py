"""Group-relative advantages: reward minus the mean of its group, scaled by a standard deviation.

Does not score completions (`rewards.py`). Whether a group carries a signal is decided by exact equality over the whole
group, never by a small standard deviation. `None` means "does not apply": such a completion takes no part in its
group's mean and gets advantage 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

SCALE_EPSILON = 1e-4  # added to the standard deviation, as in TRL, so that a tiny spread cannot blow up


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


def group_advantages(
    rewards: Sequence[float | None],
    group_sizes: Sequence[int],
    *,
    scale: Literal["group", "batch", "none"] = "group",
) -> Advantages:
    """Advantages of completions that lie group after group.

    Args:
        rewards: one per completion; None or a non-finite value means "does not apply".
        group_sizes: completions per group, in order; groups may differ in size. Sums to len(rewards).
        scale: divide by the group's deviation, by the batch's, or not at all.

    Raises:
        ValueError: the sizes do not sum to the number of rewards.
    """
    if sum(group_sizes) != len(rewards):
        raise ValueError(f"group sizes sum to {sum(group_sizes)}, {len(rewards)} rewards")
    flat = np.array(
        [math.nan if r is None or not math.isfinite(r) else float(r) for r in rewards],
        dtype=np.float64,
    )
    scored = flat[~np.isnan(flat)]
    batch_std = _std(scored)
    values = np.zeros(len(flat))
    has_signal = np.zeros(len(flat), dtype=bool)
    skipped, start = 0, 0
    for size in group_sizes:
        group = flat[start : start + size]
        known = ~np.isnan(group)
        present = group[known]
        if len(present) < 2 or bool(np.all(present == present[0])):
            skipped += 1
        else:
            centred = present - present.mean()
            if scale != "none":
                centred = centred / ((_std(present) if scale == "group" else batch_std) + SCALE_EPSILON)
            values[start : start + size][known] = centred
            has_signal[start : start + size] = True
        start += size
    return Advantages(
        values=values,
        has_signal=has_signal,
        skipped_groups=skipped / len(group_sizes) if group_sizes else 0.0,
        reward_mean=float(scored.mean()) if len(scored) else math.nan,
        reward_std=batch_std,
    )


def _std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
