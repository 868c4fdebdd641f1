"""Gossip mode in the real node: every order gives the same bits, under loss, faults and liars."""

from __future__ import annotations

import pytest

from shoal.sim import Link, Simulation

from .hunt import broken
from .test_simulation import _collect, _hunt

GOSSIP = {"sync": {"mode": "gossip", "target_samples": 64, "gossip_seconds": 5.0}}


def test_the_swarm_learns_and_agrees() -> None:
    lossy = Link(latency_ms=(10, 60), loss=0.2, duplicate=0.05, reorder=0.05)
    sim = Simulation(seed=3, run=GOSSIP, link=lossy)
    peers = sim.add_peers(6)
    sim.partition(peers[:2], peers[2:], at_s=20, heal_s=40)
    sim.kill(peers[3], at_s=15, restart_s=30)
    sim.kill(peers[4], at_s=25, restart_s=35, disk="lost")
    report = sim.run(until_s=60)
    assert report.identical and not report.violations and not report.errors
    assert report.loss_first is not None and report.loss_last is not None and report.loss_last < report.loss_first / 5


@pytest.mark.parametrize("kind", ["equivocate", "replay", "nan", "scale"])
def test_one_liar_breaks_nothing_for_the_others(kind: str) -> None:
    assert not broken(1, kind, "gossip")


@pytest.mark.parametrize("first", [0])
@pytest.mark.timeout(300)
def test_random_faults_break_nothing(first: int) -> None:
    assert not _collect([_hunt(first, 5, "--mode", "gossip"), _hunt(first + 5, 5, "--mode", "gossip")], 290)
