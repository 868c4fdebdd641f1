"""The quadratic learner: it learns, resumes to the bit, and needs no torch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from shoal.node.quadratic import QuadraticLearner


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
