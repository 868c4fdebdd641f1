"""A learner whose optimum is known: a noisy quadratic, in numpy. Starts without importing torch.

For tests, and for people who want to see the network alone. The loss is 1/2 (x - x*)' A (x - x*) with a diagonal A whose
condition number is given; every peer draws its own gradient noise. Rewards are minus the loss.
"""

from __future__ import annotations

import json
import time

import numpy as np

from ..aggregation.layout import Layout, TensorSpec
from .learner import LocalResult, StepStats

SAMPLES_PER_STEP = 8


class QuadraticLearner:
    """Implements `Learner`.

    Args:
        dimension: d.
        condition: largest over smallest curvature (the largest is 1).
        noise: standard deviation of the gradient noise per coordinate.
        learning_rate: of plain SGD, stable below 2.
        seed: of the problem; equal on all peers.
        peer_seed: of the noise; different on each.
        step_seconds: every step sleeps so long, in place of real work.
    """

    def __init__(
        self,
        *,
        dimension: int,
        condition: float = 10.0,
        noise: float = 0.05,
        learning_rate: float = 0.1,
        seed: int = 0,
        peer_seed: int = 0,
        step_seconds: float = 0.0,
    ) -> None:
        self.layout = Layout([TensorSpec("x", (dimension,))])
        problem = np.random.Generator(np.random.PCG64(seed))
        self.optimum = (0.5 * problem.uniform(-1, 1, dimension)).astype(np.float32)
        self._curvature = np.geomspace(1.0, 1.0 / condition, dimension).astype(np.float32)
        self._noise, self._lr, self._step_seconds = np.float32(noise), np.float32(learning_rate), step_seconds
        self._rng = np.random.Generator(np.random.PCG64([seed, peer_seed]))
        self._theta = self.initial()
        self._local = self._theta.copy()
        self._samples = self._steps = 0
        self._loss_sum = 0.0

    def initial(self) -> np.ndarray:
        return np.zeros(self.layout.size, np.float32)

    def load(self, theta: np.ndarray) -> None:
        self._theta = np.array(theta, np.float32)
        self._local = self._theta.copy()

    def begin(self, round_: int) -> None:
        self._local = self._theta.copy()
        self._samples = self._steps = 0
        self._loss_sum = 0.0

    def loss(self, x: np.ndarray) -> float:
        """At x fp32 [d]."""
        off = x.astype(np.float64) - self.optimum
        return float(0.5 * np.sum(self._curvature * off * off))

    def distance(self, x: np.ndarray) -> float:
        """Of x fp32 [d] from the optimum."""
        return float(np.linalg.norm(x.astype(np.float64) - self.optimum))

    def step(self) -> StepStats:
        if self._step_seconds:
            time.sleep(self._step_seconds)
        noise = self._noise * self._rng.standard_normal(self.layout.size, dtype=np.float32)
        self._local = self._local - self._lr * (self._curvature * (self._local - self.optimum) + noise)
        loss = self.loss(self._local)
        self._samples += SAMPLES_PER_STEP
        self._steps += 1
        self._loss_sum += loss
        metrics = {"loss": loss, "reward": -loss, "distance": self.distance(self._local)}
        return StepStats(samples=SAMPLES_PER_STEP, metrics=metrics)

    def finish(self) -> LocalResult:
        mean = self._loss_sum / max(1, self._steps)
        return LocalResult(
            delta=self._theta - self._local, weight=self._samples, metrics={"loss": mean, "reward": -mean}
        )

    def set_shard(self, index_of: tuple[int, ...] | None, count: int) -> None:
        """There is no data to divide."""

    def evaluate(self) -> dict[str, float]:
        loss = self.loss(self._theta)
        return {"loss": loss, "reward": -loss, "distance": self.distance(self._theta)}

    def snapshot(self) -> dict[str, np.ndarray | bytes]:
        return {
            "rng": json.dumps(self._rng.bit_generator.state).encode(),
            "local": self._local.copy(),
            "counts": json.dumps([self._samples, self._steps, self._loss_sum]).encode(),
        }

    def restore(self, saved: dict[str, np.ndarray | bytes]) -> None:
        self._rng.bit_generator.state = json.loads(bytes(saved["rng"]))
        self._local = np.array(saved["local"], np.float32)
        self._samples, self._steps, self._loss_sum = json.loads(bytes(saved["counts"]))

    def close(self) -> None:
        """Nothing to release."""
