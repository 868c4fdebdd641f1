"""Bounds on one update: its norm, and the factor that clips it. Deterministic on every machine.

`math.fsum` is exactly rounded and IEEE square roots are too, so two CPUs cannot disagree in the last bit, as they do with
BLAS norms. Non-finite values have no norm: the merge treats such an update as void before it asks.
"""

from __future__ import annotations

import math
from itertools import chain

import numpy as np

_BLOCK = 2**16  # values turned into Python floats at a time, so that memory does not grow with the update


def norm(values: np.ndarray) -> float:
    """Euclidean norm of fp32 [k], as fp64. Raises ValueError on NaN or Inf."""
    if not np.isfinite(values).all():
        raise ValueError("the norm of non-finite values is not defined")
    blocks = (values[at : at + _BLOCK].astype(np.float64) for at in range(0, values.size, _BLOCK))
    return math.sqrt(math.fsum(chain.from_iterable((b * b).tolist() for b in blocks)))


def clip_scale(length: float, limit: float) -> float:
    """The factor at most 1 that brings a vector of norm `length` within `limit`; `limit` 0 means no limit."""
    if limit <= 0 or length <= limit:
        return 1.0
    return limit / length
