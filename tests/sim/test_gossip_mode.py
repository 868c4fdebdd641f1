"""Gossip mode in the real node: every order gives the same bits, under loss, faults and liars."""

from __future__ import annotations

import pytest

from shoal.aggregation.gossip import UpdateLog
from shoal.sim import Link, Simulation

from .hunt import broken, hunt

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


@pytest.mark.parametrize("rule", ["heavier", "merge"])
@pytest.mark.parametrize("forget_after", [20.0, 3600.0])
def test_two_sides_heal_by_rule_and_a_newcomer_takes_a_snapshot(
    rule: str, forget_after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    make = UpdateLog.from_snapshot.__func__

    def from_snapshot(
        cls: type[UpdateLog], theta0: object, rules: object, snapshot: object, **more: object
    ) -> UpdateLog:
        log = make(cls, theta0, rules, snapshot, **more)
        begun.append(sum(seq for seq, _ in log.frontier.entries.values()))
        return log

    monkeypatch.setattr(UpdateLog, "from_snapshot", classmethod(from_snapshot))
    sync = {"heal": rule, "heal_max": 500, "compact_updates": 2, "forget_after_seconds": forget_after}
    sim = Simulation(seed=3, run={"sync": GOSSIP["sync"] | sync, "quadratic": {"dimension": 32, "noise": 0.05}})
    peers = sim.add_peers(6)
    sim.partition(peers[:2], peers[2:], at_s=30, heal_s=100)
    sim.add_peers(1, at_s=140)
    report = sim.run(until_s=180, settle_s=60)
    said = [text for peer in sim.peers for _, _, text in peer.logged]
    assert report.identical and not report.violations and not report.errors
    assert any("two sides meet" in text for text in said)
    assert begun and begun[-1] > 0  # the newcomer began with what was final, not with nothing
    assert report.loss_first is not None and report.loss_last is not None and report.loss_last < report.loss_first / 50


@pytest.mark.parametrize("kind", ["equivocate", "replay", "nan", "scale"])
def test_one_liar_breaks_nothing_for_the_others(kind: str) -> None:
    assert not broken(1, kind, "gossip")


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.timeout(300)
def test_random_faults_break_nothing(first: int) -> None:
    assert not list(hunt(first, 5, mode="gossip"))
