"""A swarm of more than twenty rounds a second: newcomers get in that are further away than a round is long."""

from __future__ import annotations

import pytest

from shoal.sim import Link, Simulation

FAST = {
    "quadratic": {"dimension": 64},
    "compression": "0.1/4",
    "sync": {"target_samples": 24, "round_seconds_max": 10},
}


@pytest.mark.parametrize("latency_ms", [0.3, 30.0, 100.0])
def test_a_newcomer_gets_into_a_swarm_that_is_faster_than_its_way_there_and_back(latency_ms: float) -> None:
    sim = Simulation(seed=1, run=FAST, link=Link(latency_ms=0.3), step_seconds=0.01)
    old = sim.add_peers(3)
    (new,) = sim.add_peers(1, link=Link(latency_ms=latency_ms), at_s=2.0)
    before = []
    sim.at(2.0, lambda: before.append(old[0].node.rounds.state.round))

    def member() -> bool:
        return new.node is not None and new.node.ready and new.peer_id in new.node.rounds.state.electorate

    report = sim.run(until_s=12.0, until=member, settle_s=10.0, must_settle=True)
    assert before[0] > 40  # rounds in the first two seconds
    assert report.until_s < 12.0
    assert report.identical and not report.violations and not report.errors


def test_a_lone_founder_at_full_speed_lets_a_distant_newcomer_in() -> None:
    sim = Simulation(seed=2, run={**FAST, "sync": {"target_samples": 8}}, step_seconds=0.02)
    sim.add_peers(1)
    sim.add_peers(1, link=Link(latency_ms=80.0), at_s=1.0)
    report = sim.run(until_s=6.0, settle_s=10.0, must_settle=True)
    assert report.identical and not report.violations and not report.errors
