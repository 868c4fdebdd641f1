"""Bounds on one update: its norm, and the factor that clips it. Deterministic on every machine.

`math.fsum` is exactly rounded and IEEE square roots are too, so two CPUs cannot disagree in the last bit, as they do with
BLAS norms. Non-finite values have no norm: the merge treats such an update as void before it asks.
"""

from __future__ import annotations

import math

import numpy as np


def norm(values: np.ndarray) -> float:
    """Euclidean norm of fp32 [k], as fp64. Raises ValueError on NaN or Inf."""
    if not np.isfinite(values).all():
        raise ValueError("the norm of non-finite values is not defined")
    wide = values.astype(np.float64)
    return math.sqrt(math.fsum((wide * wide).tolist()))


def clip_scale(length: float, limit: float) -> float:
    """The factor at most 1 that brings a vector of norm `length` within `limit`; `limit` 0 means no limit."""
    if limit <= 0 or length <= limit:
        return 1.0
    return limit / length
