"""The one interface through which the swarm code knows training.

Covers: what a learner must offer (`Learner`) and the values it returns. Does not cover: any learner; those are
`node/quadratic.py` (numpy, known optimum), `node/bandit.py` (numpy, known best reward) and `node/rl/learner.py` (a
language model under GRPO).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..aggregation.layout import Layout


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """What one inner step did.

    Attributes:
        samples: completions scored in this step; the unit of an update's weight.
        metrics: plain floats by name ("reward", "loss", "grad_norm", "skipped_groups", ...), for logs and status.
        skipped: True when the optimizer did not step (all rewards equal, or a non-finite loss or gradient).
    """

    samples: int
    metrics: dict[str, float] = field(default_factory=dict)
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class LocalResult:
    """What the inner steps since `begin` learned.

    Attributes:
        delta: fp32 [d], theta as loaded minus local theta (the pseudo-gradient); always finite.
        weight: samples behind the delta; 0 means that nothing was learned.
        metrics: means over the inner steps.
    """

    delta: np.ndarray
    weight: int
    metrics: dict[str, float] = field(default_factory=dict)


class Learner(Protocol):
    """Trains locally; blocking, called from one worker thread at a time, never concurrently."""

    layout: Layout

    def initial(self) -> np.ndarray:
        """theta before any training, fp32 [d]: equal on every peer that has the same base model and manifest."""
        ...

    def load(self, theta: np.ndarray) -> None:
        """Take the shared parameters, fp32 [d]. Optimizer moments are kept."""
        ...

    def begin(self, round_: int) -> None:
        """Start the inner steps of a round at the parameters last loaded."""
        ...

    def step(self) -> StepStats:
        """One inner step; the node decides after each whether to go on."""
        ...

    def finish(self) -> LocalResult:
        """The delta since `begin`. May be called with no step taken (weight 0, delta all zero)."""
        ...

    def set_shard(self, index_of: tuple[int, ...] | None, count: int) -> None:
        """Which of `count` data shards this peer draws prompts from; None means all of them."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Held-out metrics of the parameters last loaded ("accuracy", "reward"); draws nothing from the training RNG."""
        ...

    def snapshot(self) -> dict[str, np.ndarray | bytes]:
        """Optimizer, RNG, data cursor, replay: everything that `restore` needs to continue bit for bit."""
        ...

    def restore(self, saved: dict[str, np.ndarray | bytes]) -> None:
        """Inverse of `snapshot`, on a fresh learner with the same configuration, after `load`."""
        ...
