"""Small versions of benchmarks/sim.py, membership.py and gossip.py: what docs/scale.md says holds, on few peers."""

from __future__ import annotations

import importlib.util
import math
import queue
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"scale_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


membership, gossip, speed = load("membership"), load("gossip"), load("sim")
OURS = membership.VARIANTS["ours"]


def test_under_loss_every_update_reaches_everybody_once_and_costs_little_more_than_itself() -> None:
    found = gossip.bytes_sent(peers=8, updates=1)
    assert found["identical"] and not found["violations"] and not found["errors"]
    assert found["update_bytes"] >= 64 * 1024
    assert found["included_by_each"] == [found["updates"]] == [8]
    assert found["received_new"] == 8 * 7
    assert 1.0 <= found["bytes_of_updates_over_least"] <= 1.2


@pytest.mark.parametrize("news", [True, False])
def test_an_update_reaches_everybody_within_a_few_periods_times_log_n(news: bool) -> None:
    found = gossip.spread(12, news, updates=2)
    assert found["updates"] >= 2 and not found["violations"]
    assert found["periods_until_all"]["max"] <= 2 * math.log2(12)


def test_a_death_among_seventy_is_seen_by_all() -> None:
    found = membership.detection(70, 1, OURS, kills=3)  # more than are all neighbours of each other
    assert found["first_suspicion_s"]["max"] <= 8.0
    assert found["dead_for_all_s"]["max"] <= 30.0


@pytest.mark.parametrize(("loss", "slow"), [(0.0, False), (0.2, False), (0.0, True)])
def test_the_living_are_not_buried(loss: float, slow: bool) -> None:
    found = membership.false_positives(40, 1, OURS, loss, slow, 1.0)
    assert found["false_deaths_of_healthy_peers"] == 0
    assert (found["suspicions_per_peer_hour"] > 0) == (loss > 0.1 or slow)


def test_a_mass_restart_and_a_partition_heal() -> None:
    assert membership.restart(40, 1, OURS)["whole_after_s"] <= 60.0
    found = membership.partition(20, 1, OURS, minutes=5.0)
    assert found["dead_seen_before"] == [10, 10] and found["whole_after_s"] <= 120.0


def test_the_speed_benchmark_runs_clean() -> None:
    out: queue.Queue[dict] = queue.Queue()
    speed.measure(6, 100.0, 1, 60.0, out)
    found = [out.get_nowait() for _ in range(out.qsize())][-1]
    assert found["finished"] and not found["violations"] and not found["errors"]
    assert found["updates"][1] >= 6 and found["loss"][1] < found["loss"][0]
