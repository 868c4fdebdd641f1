"""Bounds of membership with the "lan" preset in virtual time: detection, false deaths under loss, pauses, healing."""

from __future__ import annotations

import pytest

from shoal.protocol.membership import PRESETS, State

from .membership_net import Net

LAN = PRESETS["lan"]


# Measured over some seeds: 5.3 to 6.3 s (3 peers), 5.8 to 9.7 s (7), 7.5 to 10.3 s (20).
@pytest.mark.parametrize(("n", "bound_s"), [(3, 10), (7, 15), (20, 20)])
def test_everybody_sees_a_killed_peer_dead(n: int, bound_s: float) -> None:
    net = Net(n, LAN)
    net.kill("p1")
    net.until(lambda: net.all_see("p1", State.DEAD), bound_s)


# Measured over 300 s: no death; suspicions at 20 % loss are many (1026 among 20 peers) and refuted.
@pytest.mark.parametrize(("n", "loss"), [(3, 0.0), (7, 0.05), (7, 0.2), (20, 0.05)])
def test_hardly_anybody_is_declared_dead_by_loss(n: int, loss: float) -> None:
    net = Net(n, LAN)
    net.loss = loss
    net.run(120)
    assert net.count(State.DEAD) <= 1


@pytest.mark.parametrize("n", [3, 7, 20])
def test_ten_seconds_of_pause_accuse_nobody(n: int) -> None:
    net = Net(n, LAN)
    net.changes.clear()
    net.freeze("p1", 10)
    net.run(10.5)
    net.until(net.whole, 20)
    assert {change.peer for _, _, change in net.changes} <= {"p1"}


# A fresh split leaves local health low: probes come up to nine times more slowly, while a suspicion that the other half
# reports is as short as ever. A suspect that is not asked at once would have its turn after its death.
@pytest.mark.parametrize(("n", "seed"), [(7, seed) for seed in range(12)] + [(20, seed) for seed in range(4)])
def test_halves_that_meet_again_at_once_bury_nobody_of_their_own(n: int, seed: int) -> None:
    net = Net(n, LAN, seed)
    peers = sorted(net.nodes)
    halves = (set(peers[: n // 2]), set(peers[n // 2 :]))
    net.partition(*(sorted(half) for half in halves))

    def split() -> bool:
        return all(net.nodes[a].machine.dead() == other for one, other in (halves, halves[::-1]) for a in one)

    net.until(split, 200)
    net.run(2)
    net.changes.clear()
    net.partition()
    net.until(net.whole, 30)
    own = [(o, c) for _, o, c in net.changes if c.new is State.DEAD and any({o, c.peer} <= half for half in halves)]
    assert not own
