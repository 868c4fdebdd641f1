"""The simulator runs the real node: one seed, one trace; what the checkers promise; seeds that once broke something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.sim import Link, Simulation
from shoal.sim.byzantine import KINDS
from shoal.sim.schedules import run_random

from .hunt import broken, hunt

ROOT = Path(__file__).parents[2]

# What each broke when it was found, on the code of that day:
REGRESSIONS = {
    25: "a branch of more rounds than own updates were remembered lost, and its mass with it",
    50: "a downloaded state held own updates that were then sent a second time",
    64: "a ballot record that could not be written ended up as an error that nobody saw",
    101: "the winner of a fork had fewer rounds, so the loser never looked at it",
    116: "a newcomer at a known address refused the members, and they stopped",
    117: "the root of a commit log had the electorate of its tip",
    137: "a dense exchange waited for members that had gone on to a later attempt",
    140: "a newcomer on a lost branch knew no record older than itself",
    142: "the records older than a download were lost to everybody who downloaded from it",
    590: "a commit that was being applied replaced the newer state downloaded meanwhile",
    621: "the same, and an own update was booked twice",
    260: "a downloaded state that came too late replaced the log of the state that stayed",
    60020: "restarted members went on learning in a round they had spoken in, and held up every hop of its dense exchange",
}


def test_the_swarm_learns_and_agrees() -> None:
    sim = Simulation(seed=7)
    peers = sim.add_peers(5, link=Link(latency_ms=(20, 80), bandwidth_mbps=100, loss=0.01))
    sim.partition(peers[:2], peers[2:], at_s=40, heal_s=80)
    sim.kill(peers[2], at_s=20, restart_s=50)
    report = sim.run(until_s=150)
    assert report.identical and not report.violations and not report.errors
    assert report.loss_first is not None and report.loss_last is not None and report.loss_last < report.loss_first / 3
    assert min(report.rounds.values()) > 10
    assert {fault["kind"] for fault in report.faults} == {"partition", "kill"}


def test_a_simulation_runs_once() -> None:
    sim = Simulation()
    sim.add_peers(1)
    sim.run(until_s=1)
    with pytest.raises(RuntimeError, match="runs once"):
        sim.run(until_s=2)


SCRIPT = """
from shoal.sim.schedules import run_random
for seed in (3, 4):
    print(run_random(seed).trace_hash)
"""


@pytest.mark.timeout(300)
def test_one_seed_one_trace_whatever_the_hash_seed() -> None:
    traces = set()
    for hash_seed in ("0", "1", "4711"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            capture_output=True,
            text=True,
            timeout=250,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
        )
        traces.add(done.stdout)
    assert len(traces) == 1 and len(next(iter(traces)).split()) == 2


@pytest.mark.parametrize("seed", sorted(REGRESSIONS))
def test_what_once_broke(seed: int) -> None:
    assert not broken(seed), REGRESSIONS[seed]


def _hunt(first: int, count: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.sim.hunt", str(first), str(count), *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def _collect(hunts: list[subprocess.Popen[str]], timeout_s: float) -> str:
    try:
        return "".join(one.communicate(timeout=timeout_s)[0] for one in hunts).strip()
    finally:
        for one in hunts:
            one.kill()


@pytest.mark.parametrize("first", range(0, 200, 10))
@pytest.mark.timeout(300)
def test_random_faults_break_nothing(first: int) -> None:
    """200 schedules of every kind of fault but lies, checked after every event."""
    assert not list(hunt(first, 10))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(300)
def test_one_liar_breaks_nothing_for_the_others(kind: str) -> None:
    assert not list(hunt(0, 3, kind))


def test_each_liar_on_the_wire_does_something_of_its_own() -> None:
    kinds = ("free_ride", "equivocate", "replay", "nan")  # the first one lies in what it learned alone
    assert len({run_random(2, byzantine=kind).trace_hash for kind in kinds}) == len(kinds)


@pytest.mark.long
@pytest.mark.timeout(36_000)
def test_many_random_faults_break_nothing() -> None:
    """2,000 schedules, half of them gossip, and over 1,000 with one liar, 48 of each kind in each mode."""
    assert not _collect([_hunt(0, 1000), _hunt(1000, 1000, "--mode", "gossip")], 18_000)
    for kind in KINDS:
        hunts = [_hunt(0, 48, "--byzantine", kind, "--mode", mode) for mode in ("ring", "gossip")]
        assert not _collect(hunts, 9_000)
