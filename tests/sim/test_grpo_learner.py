"""The real language-model learner runs in the simulator: GRPO on a tiny transformer, in virtual time, with one trace a seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.sim import Link, Report, Simulation

ROUNDS = 3
RUN: dict[str, Any] = {
    "learner": "grpo",
    "compression": "short",
    "model": {"tiny": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 32}},
    "task": {"options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, "eval_size": 16},
    "grpo": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 3, "learning_rate": 1e-3},
    "warmup": {"steps": 30, "learning_rate": 5e-3, "batch_size": 16, "seconds_max": 3600.0},
    "sync": {"rounds_max": ROUNDS, "target_samples": 96},
}


def play(mode: str, *, die: bool = False) -> tuple[Simulation, Report]:
    run = {**RUN, "sync": {**RUN["sync"], "mode": mode}}
    if mode == "gossip":
        run["sync"]["target_samples"] = 32
    sim = Simulation(seed=5, run=run, step_seconds=2.0)
    peers = sim.add_peers(3, link=Link(latency_ms=(5, 40)), node={"threads": 1, "eval_every_rounds": -1})
    if die:
        sim.kill(peers[2], at_s=6, restart_s=9)
    return sim, sim.run(until_s=60, stride=5)


@pytest.mark.parametrize("mode", ["ring", "gossip"])
def test_peers_train_a_language_model_to_the_same_bits(mode: str):
    sim, report = play(mode)
    assert report.identical and not report.violations and not report.errors
    assert min(report.rounds.values()) == (ROUNDS if mode == "ring" else 3 * ROUNDS)
    assert all(values for values in report.series["reward"].values()) and len(report.series["reward"]) == 3


def test_one_seed_one_trace_also_with_torch_and_a_death():
    (_, first), (_, second) = play("ring", die=True), play("ring", die=True)
    assert first.identical and not first.violations and min(first.rounds.values()) == ROUNDS
    assert first.trace_hash == second.trace_hash and first.state_hashes == second.state_hashes
    assert np.isfinite(first.reward_last)
