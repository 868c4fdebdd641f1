"""Every kind of liar really lies, in both modes: its bytes differ from an honest twin's, and the others do what they should."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from shoal.sim import Link, Simulation
from shoal.sim.byzantine import KINDS, WEIGHT_LIE
from shoal.sim.ledger import Said
from shoal.sim.report import Report

SYNC: dict[str, dict[str, Any]] = {
    "ring": {"target_samples": 192, "round_seconds_max": 10.0, "exchange": "sparse", "norm_max": 0.5},
    "gossip": {"mode": "gossip", "target_samples": 64, "gossip_seconds": 2.0, "step_max": 0.15},
}


@dataclass
class Swarm:
    """Four honest peers and one more, after a run. `faults`: what the honest ones counted, by kind."""

    sim: Simulation
    report: Report
    faults: dict[str, int] = field(default_factory=dict)

    @property
    def said(self) -> list[list[Said]]:
        """What the last peer signed under each of its names, in order."""
        last = self.sim.peers[-1].peer_id
        return [list(of.values()) for dot, of in sorted(self.sim.checkers.ledger.said.items()) if dot.peer == last]

    @property
    def first(self) -> Said:
        return self.said[0][0]

    def honest_that_said(self, what: str) -> set[str]:
        return {peer.name for peer in self.sim.peers[:-1] for _, _, text in peer.logged if what in text}

    @property
    def messages(self) -> int:
        """Frames that the last peer cast to others, whatever its rounds brought it to send besides."""
        paths = self.sim.peers[-1].host.paths.values()
        return sum(path.count("Control").frames for path in paths)

    @property
    def included(self) -> int:
        """Updates of the last peer that the honest ones' state holds, void ones too."""
        last = self.sim.peers[-1].peer_id
        return sum(seq for (peer, _), (seq, _) in self.vector.items() if peer == last)

    vector: dict[tuple[str, int], tuple[int, bytes]] = field(default_factory=dict)


@functools.cache
def swarm(mode: str, kind: str | None) -> Swarm:
    """kind None: the last peer is honest, too."""
    sim = Simulation(2, run={"sync": SYNC[mode], "quadratic": {"dimension": 48}}, link=Link(latency_ms=(5, 20)))
    peers = sim.add_peers(5)
    if kind is not None:
        sim.byzantine(peers[-1], kind)
    found = Swarm(sim, None)  # type: ignore[arg-type]

    def count() -> None:
        for peer in peers[:-1]:
            assert peer.node is not None and peer.node.rounds is not None
            found.vector = dict(peer.node.rounds.state.vector.entries)
            for name, number in peer.node.mesh.traffic.faults.items():
                found.faults[name] = found.faults.get(name, 0) + number

    sim.at(59.9, count)
    found.report = sim.run(until_s=60, settle_s=60)
    assert found.report.identical and not found.report.violations and not found.report.errors
    return found


def values(said: Said) -> tuple[np.ndarray, np.ndarray]:
    assert said.values is not None
    return said.values


EVERYBODY = {"p0", "p1", "p2", "p3"}
MODES = ["ring", "gossip"]


def _each_kind() -> list[object]:
    """Every kind in every mode; in every run each kind in one of the modes, by turns."""
    cases = [(kind, mode, i, j) for i, kind in enumerate(KINDS) for j, mode in enumerate(MODES)]
    return [
        pytest.param(kind, mode, marks=[] if i % len(MODES) == j else [pytest.mark.slow], id=f"{kind}-{mode}")
        for kind, mode, i, j in cases
    ]


@pytest.mark.parametrize(("kind", "mode"), _each_kind())
def test_the_others_agree_and_learn_on(kind: str, mode: str) -> None:
    report = swarm(mode, kind).report
    assert report.loss_first is not None and report.loss_last is not None
    assert report.loss_last < report.loss_first / 3


@pytest.mark.parametrize("mode", MODES)
def test_what_it_learned_is_bent(mode: str) -> None:
    """Until its first update a liar does what its honest twin does, so the two can be compared number by number."""
    twin = swarm(mode, None).first
    indices, learned = values(twin)
    reversed_ = values(swarm(mode, "sign_flip").first)
    assert np.array_equal(reversed_[0], indices) and np.array_equal(reversed_[1], -learned)
    assert np.abs(values(swarm(mode, "scale").first)[1]).max() > 2 * np.abs(learned).max()
    assert np.linalg.norm(values(swarm(mode, "noise").first)[1]) > 2 * np.linalg.norm(learned)
    free = swarm(mode, "free_ride")
    assert not values(free.first)[1].any() and free.first.header.weight == twin.header.weight > 0
    assert swarm(mode, "lie_weight").first.header.weight == WEIGHT_LIE * twin.header.weight


def test_ring_mode_bounds_what_a_liar_moves() -> None:
    """A norm is clipped and a weight capped: what a round moves stays within the mean of steps of `norm_max`."""
    for kind in ("scale", "noise", "lie_weight", "nan"):
        found = swarm("ring", kind)
        states = sorted(found.sim.checkers.ledger.versions.values(), key=lambda version: version.round)
        steps = [np.linalg.norm(b.state.theta - a.state.theta) for a, b in zip(states, states[1:], strict=False)]
        assert len(steps) > 5 and max(steps) <= SYNC["ring"]["norm_max"] * 1.001
    claims = [said.header.weight for of in swarm("ring", "lie_weight").said for said in of]
    most = 4.0 * 64 * 5  # a multiple of the median of five honest claims
    assert min(claims) > most > 0


@pytest.mark.parametrize("kind", ["scale", "noise", "lie_weight"])
def test_gossip_mode_takes_too_large_a_step_for_void(kind: str) -> None:
    found = swarm("gossip", kind)
    assert all(said.term is None for said in found.said[0])
    assert found.honest_that_said("void update") == EVERYBODY


def test_garbage_is_void_in_ring_mode_and_ends_its_chain_in_gossip_mode() -> None:
    for mode in MODES:
        found = swarm(mode, "nan")
        assert any(said.values is None for of in found.said for said in of)
    assert swarm("gossip", "nan").included == 0
    assert swarm("gossip", "nan").honest_that_said("banned") == EVERYBODY
    assert swarm("gossip", "nan").faults["bad_payload"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_two_updates_under_one_name_are_proved_to_everybody(mode: str) -> None:
    found = swarm(mode, "equivocate")
    assert max(len(of) for of in found.said) == 2
    assert found.honest_that_said("equivocation: two updates named") == EVERYBODY
    assert found.faults["refused_banned"] > 0
    if mode == "gossip":
        assert found.included < found.said.index(next(of for of in found.said if len(of) == 2)) + 1


@pytest.mark.parametrize("mode", MODES)
def test_what_is_sent_again_changes_nothing(mode: str) -> None:
    found, twin = swarm(mode, "replay"), swarm(mode, None)
    assert found.messages > 1.3 * twin.messages
    assert found.included > 5 and not found.honest_that_said("banned")


@pytest.mark.parametrize("mode", MODES)
def test_a_stranger_stays_outside(mode: str) -> None:
    found = swarm(mode, "stranger")
    assert not found.said and not found.included
    assert any("does not admit this peer" in text for _, _, text in found.sim.peers[-1].logged)
