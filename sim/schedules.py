"""Random swarms under random faults, from one seed: what the invariants are hunted with.

A schedule is small (2 to 12 peers, at most 64 coordinates, at most 120 virtual seconds of faults) so that thousands of them can
be run. All faults are over when it ends; then the swarm must come to one state within `SETTLE_SECONDS`, still making rounds.
"""

from __future__ import annotations

import random
from typing import Any

from . import faults as f
from .byzantine import KINDS
from .faults import Fault
from .link import Link
from .report import Report
from .simulation import Simulation, names

FAULT_SECONDS_MAX = 120.0
# From the last fault to one state everywhere: a dead peer is dialled again within 15 s, counted dead after a start only after
# 20 s, a false death takes a few probe intervals to clear, and a fork a download.
SETTLE_SECONDS = 120.0
PEERS_MAX = 12
DIMENSION_MAX = 64


def random_simulation(seed: int, *, byzantine: str | None = None, mode: str = "ring") -> Simulation:
    """The simulation of one seed, ready to run.

    Args:
        mode: "ring", "gossip" or "hybrid".
        byzantine: a kind of byzantine.py: the last of at least four peers lies from the start.
    """
    rng = random.Random(f"shoal.sim schedule {seed}")
    count = rng.randint(4 if byzantine else 2, PEERS_MAX)
    exchange = rng.choice(["auto", "auto", "sparse", "dense"])
    run: dict[str, Any] = {
        "compression": rng.choice(["0.1/4", "0.25/8", "0.5/2", "0.05/1", "1/8"]),
        "quadratic": {"dimension": rng.randint(1, DIMENSION_MAX), "noise": rng.choice([0.0, 0.05, 0.3])},
        "sync": {
            "target_samples": rng.choice([32, 64, 128]) * count,
            "round_seconds_max": rng.choice([5.0, 10.0, 20.0]),
            "exchange": exchange,
            "dense_bits": rng.choice([8, 16, 32]),
            "outer": rng.choice(["sgd", "sgd", "nesterov"]),
        },
        "membership": {"preset": rng.choice(["local", "lan"])},
    }
    if mode != "ring":
        run["sync"] |= {
            "mode": mode,
            "target_samples": rng.choice([32, 64, 128]),
            "gossip_seconds": rng.choice([2.0, 5.0]),
            "gossip_fanout": rng.choice([1, 3]),
            "compact_updates": rng.choice([1, 4, 16]),
            "forget_after_seconds": rng.choice([15.0, 3600.0]),
            "heal": rng.choice(["heavier", "merge"]),
            "heal_max": rng.choice([0, 0, 256, 1024]),
            "exchange": "auto",
            "outer": "sgd",
        }
    if mode == "hybrid":
        run["sync"] |= {"ring_size_max": rng.choice([2, 3, 4]), "target_samples": rng.choice([64, 128, 256])}
    low = rng.choice([0.2, 2.0, 20.0])
    link = Link(
        latency_ms=(low, low * rng.uniform(1.0, 5.0)),
        bandwidth_mbps=rng.choice([None, 10.0, 100.0]),
        loss=rng.choice([0.0, 0.0, 0.02, 0.1, 0.2]),
        duplicate=rng.choice([0.0, 0.05]),
        reorder=rng.choice([0.0, 0.05]),
    )
    sim = Simulation(seed, run=run, link=link, step_seconds=rng.choice([0.2, 0.5, 1.0]))
    speeds = [rng.choice([1.0, 1.0, 1.0, 0.3, 3.0]) for _ in range(count)]
    early = rng.randint(1, count)
    peers = sim.add_peers(early, speed=speeds[:early])
    for number in range(early, count):
        peers += sim.add_peers(1, speed=speeds[number], at_s=rng.uniform(0, 40))
    end = rng.uniform(40.0, FAULT_SECONDS_MAX)
    everybody = names(peers)
    if byzantine is not None:
        sim.byzantine(peers[-1], byzantine, at_s=0.0)
        everybody = everybody[:-1]  # what else happens to a liar is of no interest
    for _ in range(rng.randint(0, 6)):
        sim.add(*random_fault(rng, everybody, end))
    sim.fault_end_s = end
    return sim


def random_fault(rng: random.Random, peers: tuple[str, ...], end: float) -> list[Fault]:
    """One fault (or one spell of churn) that is over at `end`."""
    at = rng.uniform(1.0, end - 10.0)
    until = min(end, at + rng.expovariate(1 / 20.0) + 0.5)
    one = rng.choice(peers)
    cut = rng.randint(1, max(1, len(peers) - 1))
    shuffled = rng.sample(peers, len(peers))
    a, b = tuple(shuffled[:cut]), tuple(shuffled[cut:])
    match rng.choice(
        [
            "kill",
            "kill",
            "lost",
            "pause",
            "partition",
            "one_way",
            "flap",
            "leave",
            "full",
            "slow",
            "skew",
            "link",
            "churn",
        ]
    ):
        case "kill":
            return [f.Kill(peer=one, at_s=at, until_s=until)]
        case "lost":
            return [f.Kill(peer=one, at_s=at, until_s=until, disk_lost=True)] if len(peers) > 2 else []
        case "pause":
            return [f.Pause(peer=one, at_s=at, until_s=until)]
        case "partition" if b:
            return [f.Partition(a=a, b=b, at_s=at, until_s=until)]
        case "one_way" if b:
            return [f.Partition(a=a, b=b, at_s=at, until_s=until, one_way=True)]
        case "flap" if b:
            return [f.Flap(a=a, b=b, period_s=rng.uniform(0.5, 8.0), at_s=at, until_s=until)]
        case "leave":
            return [f.Leaving(peer=one, at_s=at, until_s=until)]
        case "full":
            return [f.FullDisk(peer=one, at_s=at, until_s=until)]
        case "slow":
            return [f.SlowDisk(peer=one, mb_per_s=rng.choice([0.5, 5.0]), at_s=at, until_s=until)]
        case "skew":
            return [f.Skew(peer=one, seconds=rng.uniform(-1e6, 1e6), at_s=at, until_s=until)]
        case "link" if b:
            slow = Link(latency_ms=(100.0, 800.0), bandwidth_mbps=1.0, loss=0.3)
            return [f.LinkChange(a=a, b=b, link=slow, at_s=at, until_s=until)]
        case "churn":
            return f.churn(peers, mean_up_s=30.0, mean_down_s=5.0, at_s=at, until_s=end, rng=rng)
    return []


def run_random(seed: int, *, byzantine: str | None = None, stride: int = 1, mode: str = "ring") -> Report:
    """Run one seed. The report's violations also hold what only the end can show: no common state, or no more rounds."""
    sim = random_simulation(seed, byzantine=byzantine, mode=mode)
    return sim.run(until_s=sim.fault_end_s, settle_s=SETTLE_SECONDS, stride=stride, must_settle=True)


__all__ = ["KINDS", "random_simulation", "run_random"]
