"""A learner with a policy and a known best reward: a contextual bandit under policy gradient, in numpy.

For tests, and for watching the network with something that explores as GRPO does and costs nothing. A softmax policy, linear
in the features of a context, chooses one of several arms; the reward is 0 or 1. The gradient is REINFORCE's (Williams 1992)
with GRPO's baseline: several choices for the same context, each compared with their mean and divided by their standard
deviation (arXiv:2402.03300). Not here: an importance ratio (every step is on-policy), Adam, data of a peer's own.

The contexts are a finite set, so that the mean reward of a policy is a sum and not an estimate. Arm a pays with
probability sigmoid(SHARPNESS * x . w_a) for hidden weights w: choosing the largest x . w_a is best, and within the
policy's reach.
"""

from __future__ import annotations

import json
import time

import numpy as np

from ..aggregation.layout import Layout, TensorSpec
from .learner import LocalResult, StepStats

SHARPNESS = 2.0  # of the chances to be paid; higher makes the arms differ more
ADVANTAGE_EPSILON = 1e-4  # added to a group's standard deviation, as in TRL


class BanditLearner:
    """Implements `Learner`. theta is the policy's weights, fp32 [features * arms].

    Args:
        features: of a context, drawn from a standard normal distribution.
        arms: to choose from.
        contexts: how many there are.
        contexts_per_step, num_generations: an inner step draws so many contexts, and so many arms for each (a group).
        learning_rate: of plain SGD on the mean over all choices.
        seed: of the problem; equal on all peers.
        peer_seed: of what is drawn; different on each.
        step_seconds: every step sleeps so long, in place of real work.

    Attributes:
        best_reward: mean reward of the best policy, which no policy exceeds.
    """

    def __init__(
        self,
        *,
        features: int = 16,
        arms: int = 8,
        contexts: int = 256,
        contexts_per_step: int = 8,
        num_generations: int = 8,
        learning_rate: float = 0.5,
        seed: int = 0,
        peer_seed: int = 0,
        step_seconds: float = 0.0,
    ) -> None:
        self._shape = (features, arms)
        self.layout = Layout([TensorSpec("policy", self._shape)])
        problem = np.random.Generator(np.random.PCG64(seed))
        self._contexts = problem.standard_normal((contexts, features))
        hidden = problem.standard_normal((features, arms)) / np.sqrt(features)
        self._chances = 1.0 / (1.0 + np.exp(-SHARPNESS * self._contexts @ hidden))  # of a reward, [contexts, arms]
        self.best_reward = float(self._chances.max(axis=1).mean())
        self._draws, self._group = contexts_per_step, num_generations
        self._lr, self._step_seconds = learning_rate, step_seconds
        self._rng = np.random.Generator(np.random.PCG64([seed, peer_seed]))
        self._theta = self.initial()
        self._local = self._theta.copy()
        self._samples = self._steps = 0
        self._sums = [0.0, 0.0]  # of rewards and losses over the steps

    def initial(self) -> np.ndarray:
        """Every arm alike."""
        return np.zeros(self.layout.size, np.float32)

    def load(self, theta: np.ndarray) -> None:
        self._theta = np.array(theta, np.float32)
        self.begin(0)

    def begin(self, round_: int) -> None:
        self._local = self._theta.copy()
        self._samples = self._steps = 0
        self._sums = [0.0, 0.0]

    def policy(self, theta: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Probabilities fp64 [n, arms] under theta fp32 [d] for contexts x fp64 [n, features]."""
        logits = x @ theta.astype(np.float64).reshape(self._shape)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)

    def reward(self, theta: np.ndarray) -> float:
        """Expected reward of theta fp32 [d] over all contexts: exact, at most `best_reward`."""
        return float((self.policy(theta, self._contexts) * self._chances).sum(axis=1).mean())

    def step(self) -> StepStats:
        """Draw contexts, a group of arms for each, and their rewards; one gradient step. Skipped if no group differs."""
        if self._step_seconds:
            time.sleep(self._step_seconds)
        drawn = self._rng.integers(len(self._contexts), size=self._draws)
        x, chances = self._contexts[drawn], self._chances[drawn]
        policy = self.policy(self._local, x)
        arms = _choose(policy, self._rng.random((self._draws, self._group)))
        rewards = (self._rng.random(arms.shape) < np.take_along_axis(chances, arms, axis=1)).astype(np.float64)
        spread = rewards.std(axis=1, ddof=1, keepdims=True)
        advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / (spread + ADVANTAGE_EPSILON)
        # d log softmax = one-hot minus policy; advantages sum to zero in a group, so only the one-hot part is left.
        toward = np.zeros_like(policy)
        np.add.at(toward, (np.arange(self._draws)[:, None], arms), advantages)
        gradient = x.T @ toward / arms.size  # [features, arms]
        skipped = not (spread > 0).any()
        if not skipped:
            self._local = (self._local + self._lr * gradient.ravel()).astype(np.float32)
            self._samples += arms.size
        loss = self.best_reward - self.reward(self._local)
        self._steps += 1
        self._sums = [self._sums[0] + float(rewards.mean()), self._sums[1] + loss]
        metrics = {
            "reward": float(rewards.mean()),
            "loss": loss,
            "skipped_groups": float((spread == 0).mean()),
            "skipped_steps": float(skipped),
        }
        return StepStats(samples=arms.size, metrics=metrics, skipped=skipped)

    def finish(self) -> LocalResult:
        steps = max(1, self._steps)
        return LocalResult(
            delta=self._theta - self._local,
            weight=self._samples,
            metrics={"reward": self._sums[0] / steps, "loss": self._sums[1] / steps},
        )

    def set_shard(self, index_of: tuple[int, ...] | None, count: int) -> None:
        """There is no data to divide: every peer draws from all contexts."""

    def evaluate(self) -> dict[str, float]:
        """Exact reward of the parameters last loaded; loss is what is missing to the best; accuracy is greedy's share."""
        reward = self.reward(self._theta)
        greedy = self.policy(self._theta, self._contexts).argmax(axis=1)
        accuracy = float((greedy == self._chances.argmax(axis=1)).mean())
        return {"reward": reward, "loss": self.best_reward - reward, "accuracy": accuracy}

    def snapshot(self) -> dict[str, np.ndarray | bytes]:
        return {
            "rng": json.dumps(self._rng.bit_generator.state).encode(),
            "local": self._local.copy(),
            "counts": json.dumps([self._samples, self._steps, self._sums]).encode(),
        }

    def restore(self, saved: dict[str, np.ndarray | bytes]) -> None:
        self._rng.bit_generator.state = json.loads(bytes(saved["rng"]))
        self._local = np.array(saved["local"], np.float32)
        self._samples, self._steps, self._sums = json.loads(bytes(saved["counts"]))

    def close(self) -> None:
        """Nothing to release."""


def _choose(policy: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Arms int64 [n, g] by inversion: policy fp64 [n, arms], uniform fp64 [n, g] in [0, 1)."""
    below = np.cumsum(policy, axis=1)[:, None, :] <= uniform[:, :, None]
    return np.minimum(below.sum(axis=2), policy.shape[1] - 1)  # rounding may leave the last sum short of 1
