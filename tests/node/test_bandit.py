"""The bandit learner: its gradient is the policy gradient, it nears the best reward and never exceeds it, and resumes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.node import bandit as bandit_module
from shoal.node import learners
from shoal.node.bandit import BanditLearner
from shoal.node.config import Config, RunConfig
from shoal.node.learners import build
from shoal.sim import Simulation


def train(one: BanditLearner, rounds: int, steps: int = 20) -> np.ndarray:
    theta = one.initial()
    for round_ in range(1, rounds + 1):
        one.load(theta)
        one.begin(round_)
        for _ in range(steps):
            one.step()
        theta = theta - one.finish().delta
    one.load(theta)
    return theta


def test_it_nears_the_best_reward():
    one = BanditLearner(seed=3, peer_seed=1)
    first = one.evaluate()
    train(one, 40)
    last = one.evaluate()
    assert first["loss"] > 0.3 and last["loss"] < 0.1 * first["loss"]
    assert last["accuracy"] > 0.75 > first["accuracy"]
    assert last["loss"] == one.best_reward - last["reward"]


@given(st.integers(0, 1000), st.floats(0.01, 1e6))
def test_no_policy_exceeds_the_best_reward(seed: int, size: float):
    one = BanditLearner(seed=seed % 7, features=3, arms=4, contexts=20)
    theta = (size * np.random.Generator(np.random.PCG64(seed)).standard_normal(one.layout.size)).astype(np.float32)
    assert 0.0 < one.reward(theta) <= one.best_reward + 1e-12


def test_the_best_reward_is_within_the_policys_reach():
    """The hidden weights, made loud, choose the best arm everywhere."""
    one = BanditLearner(seed=5)
    problem = np.random.Generator(np.random.PCG64(5))
    problem.standard_normal((256, 16))
    hidden = problem.standard_normal((16, 8))
    assert one.reward((1e4 * hidden).astype(np.float32).ravel()) == pytest.approx(one.best_reward, abs=1e-6)


def test_on_average_a_step_follows_the_gradient_of_the_reward():
    """One context, and two arms: all groups that differ have advantages of one size, so the division by the spread scales
    the gradient and does not turn it."""
    one = BanditLearner(seed=2, peer_seed=0, features=4, arms=2, contexts=1, contexts_per_step=1, num_generations=2)
    theta, h = np.full(8, 0.1, np.float32), 1e-3
    steps = np.zeros(8)
    for _ in range(4000):
        one.load(theta)
        one.step()
        steps -= one.finish().delta
    gradient = np.array([(one.reward(theta + e) - one.reward(theta - e)) / (2 * h) for e in h * np.eye(8, dtype="f4")])
    cosine = steps @ gradient / (np.linalg.norm(steps) * np.linalg.norm(gradient))
    assert cosine > 0.99


def test_groups_without_a_difference_teach_nothing():
    one = BanditLearner(seed=1, features=2, arms=2, contexts=4)
    one._chances = np.ones_like(one._chances)
    one.load(one.initial())
    stats = one.step()
    assert stats.skipped and stats.metrics["skipped_groups"] == 1.0 and stats.samples == 64
    result = one.finish()
    assert result.weight == 0 and not result.delta.any()


@given(st.integers(0, 5))
@settings(deadline=None)
def test_it_resumes_to_the_bit(before: int):
    one, other = (BanditLearner(seed=3, peer_seed=1) for _ in range(2))
    one.load(one.initial())
    one.begin(1)
    for _ in range(before):
        one.step()
    other.load(one.initial())
    other.restore(one.snapshot())
    one.evaluate()  # draws nothing
    for _ in range(3):
        assert one.step() == other.step()
    assert one.finish().delta.tobytes() == other.finish().delta.tobytes()
    assert (one.finish().weight, one.finish().metrics) == (other.finish().weight, other.finish().metrics)


def test_peers_share_the_problem_and_not_the_draws():
    one, other = (BanditLearner(seed=3, peer_seed=i) for i in range(2))
    assert one.best_reward == other.best_reward and one.initial().tobytes() == other.initial().tobytes()
    one.step(), other.step()
    assert not np.array_equal(one.finish().delta, other.finish().delta)


def test_arms_are_drawn_as_often_as_the_policy_says():
    policy = np.array([[0.1, 0.2, 0.7]])
    drawn = bandit_module._choose(policy, np.random.Generator(np.random.PCG64(0)).random((1, 100_000)))
    assert np.bincount(drawn[0], minlength=3) / 100_000 == pytest.approx(policy[0], abs=0.005)
    assert bandit_module._choose(np.full((1, 3), 0.333), np.array([[1 - 1e-9]])).item() == 2  # sums short of 1


def test_steps_take_the_time_they_are_told(monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []
    monkeypatch.setattr(bandit_module.time, "sleep", slept.append)
    BanditLearner(step_seconds=0.25).step()
    assert slept == [0.25]


def test_the_manifest_selects_it():
    run = RunConfig.model_validate({"learner": "bandit", "seed": 4, "bandit": {"features": 5, "arms": 3}})
    one = build(Config(run=run), "12D3KooWpeer", Path(), lambda text, share: None)
    assert isinstance(one, BanditLearner) and one.layout.size == 15 and one.layout.tensors[0].name == "policy"
    assert one.best_reward == BanditLearner(seed=4, features=5, arms=3).best_reward
    one.set_shard(None, 1)
    one.close()
    assert learners.base_hash_of(one) == learners.base_hash_of(BanditLearner(features=5, arms=3, seed=9))


def test_it_needs_no_torch():
    code = "import sys, shoal.node.bandit, shoal.node.learners; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("mode", ["ring", "gossip"])
def test_simulated_peers_learn_it_together(mode: str):
    run = {"learner": "bandit", "sync": {"mode": mode, "target_samples": 1536 if mode == "ring" else 512}}
    sim = Simulation(seed=2, run=run)
    sim.add_peers(3)
    report = sim.run(until_s=90, stride=10)
    assert report.identical and not report.violations
    assert report.loss_last < 0.5 * report.loss_first
