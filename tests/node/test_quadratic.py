"""The quadratic learner: it learns, resumes to the bit, and needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shoal.node import quadratic as quadratic_module
from shoal.node.quadratic import QuadraticLearner
from shoal.node.store.checkpoint import Checkpoint, Checkpoints
from shoal.node.swarm.state import SharedState
from shoal.protocol.version import VersionVector


def learner(peer_seed: int = 1) -> QuadraticLearner:
    return QuadraticLearner(dimension=20, peer_seed=peer_seed, seed=3)


def test_it_approaches_its_optimum() -> None:
    one = learner()
    theta = one.initial()
    first = one.evaluate()["loss"]
    for round_ in range(1, 20):
        one.load(theta)
        one.begin(round_)
        for _ in range(10):
            stats = one.step()
        theta = theta - one.finish().delta
    one.load(theta)
    assert one.evaluate()["loss"] < 0.05 * first and stats.samples > 0


def test_it_resumes_to_the_bit() -> None:
    one, other = learner(), learner()
    one.load(one.initial())
    one.begin(1)
    one.step()
    other.load(one.initial())
    other.restore(one.snapshot())
    for _ in range(3):
        one.step()
        other.step()
    assert np.array_equal(one.finish().delta, other.finish().delta)
    assert one.finish().weight == other.finish().weight


def test_a_fresh_process_resumes_to_the_bit_through_a_checkpoint(tmp_path: Path) -> None:
    """In the middle of a round, through files; an evaluation in between draws nothing from the training noise."""
    one, other = learner(), learner()
    one.load(one.initial())
    one.begin(1)
    one.step()
    theta = one.initial()
    state = SharedState.make(
        theta=theta,
        outer=None,
        round_=0,
        lineage=bytes(32),
        vector=VersionVector.of(),
        electorate=["a"],
        total_weight=0,
    )
    Checkpoints(tmp_path).save(Checkpoint(state, b"", {}, one.snapshot(), {}))
    saved = Checkpoints(tmp_path).newest()
    assert saved is not None
    other.load(saved.state.theta)
    other.restore(dict(saved.learner))
    one.evaluate()
    for _ in range(3):
        assert one.step() == other.step()
    assert one.finish().delta.tobytes() == other.finish().delta.tobytes()
    assert one.finish().metrics == other.finish().metrics


def test_a_step_says_loss_reward_and_distance() -> None:
    one = learner()
    one.begin(1)
    stats = one.step()
    assert stats.metrics["reward"] == -stats.metrics["loss"] and stats.metrics["distance"] > 0
    one.load(one.optimum)
    assert one.evaluate() == {"loss": 0.0, "reward": 0.0, "distance": 0.0}


def test_steps_take_the_time_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(quadratic_module.time, "sleep", slept.append)
    one = QuadraticLearner(dimension=3, step_seconds=0.25)
    one.begin(1)
    one.step()
    assert slept == [0.25]


def test_peers_share_the_problem_and_not_the_noise() -> None:
    one, other = learner(1), learner(2)
    assert np.array_equal(one.optimum, other.optimum)
    one.begin(1), other.begin(1)
    one.step(), other.step()
    assert not np.array_equal(one.finish().delta, other.finish().delta)


def test_nothing_learned_has_no_weight() -> None:
    one = learner()
    one.begin(1)
    result = one.finish()
    assert result.weight == 0 and not result.delta.any()
    one.set_shard(None, 1)
    one.close()


def test_the_daemon_does_not_import_torch_for_it() -> None:
    code = "import sys, shoal.node.daemon; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
