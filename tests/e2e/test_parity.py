"""Real processes under faults, and the simulator fed with what they said and decided: the same state hashes, to the bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.sim.replay import load, replay

from .harness import QUADRATIC, Node, Swarm, swarm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

RECORD = {"SHOAL_NODE__RECORD_BYTES_MAX": "50000000"}
GOSSIP = QUADRATIC.replace("[run.sync]", '[run.sync]\nmode = "gossip"\ngossip_seconds = 1.0')


def begin(one: Swarm) -> None:
    """Three peers that start to train together."""
    wait = {"SHOAL_NODE__WAIT_FOR_START": "true"}
    one.found(**RECORD, **wait)
    one.join(**RECORD, **wait)
    one.join(**RECORD, **wait)
    one.begin()


def suffer(one: Swarm, what: str, step: int) -> None:
    """One peer is frozen for a while, another killed and restarted, and the run goes on; `what` of the status counts steps."""
    first, frozen, killed = one.nodes

    def reach(count: int, nodes: list[Node]) -> None:
        one.wait(lambda: min(int((n.status() or {}).get(what, -1)) for n in nodes) >= count, f"{what} {count}")

    reach(step, one.nodes)
    frozen.signal(signal.SIGSTOP)
    reach(2 * step, [first, killed])
    killed.kill()
    frozen.signal(signal.SIGCONT)
    reach(3 * step, [first, frozen])
    killed.start("up", **RECORD)


def leave(one: Swarm) -> None:
    for node in one.nodes:
        node.signal(signal.SIGTERM)
    assert [node.wait_exit() for node in one.nodes] == [0, 0, 0]


def folders(one: Swarm) -> list[Path]:
    return [node.data_dir for node in one.nodes]


def test_ring_mode(tmp_path: Path) -> None:
    with swarm(tmp_path, rounds=30, target_samples=480, exchange="sparse") as one:
        begin(one)
        suffer(one, "round", 6)
        one.wait(lambda: all((n.status() or {}).get("finished") for n in one.nodes), "all finished")
        status = one.wait_equal()
        leave(one)
        run = load(folders(one))
        assert {len(commit.value.roster) for commit in run.commits} >= {2, 3}  # the frozen and the killed were missed
        found = replay(run)
        assert not found.differences
        assert (found.commits, found.state_hash) == (30, status["state_hash"])
        assert found.compared > 30
        # Another network, another order, the same bits.
        assert replay(run, seed=1).state_hash == found.state_hash


def test_gossip_mode_and_the_command(tmp_path: Path) -> None:
    with swarm(tmp_path, GOSSIP, rounds=30, target_samples=160) as one:
        begin(one)
        suffer(one, "published", 6)
        one.wait(lambda: all((n.status() or {}).get("finished") for n in one.nodes), "all finished")
        status = one.wait_equal()
        leave(one)
        done = subprocess.run(
            [sys.executable, "-m", "shoal.sim.replay", *map(str, folders(one))],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["ok"] and found["state_hash"] == status["state_hash"]
        assert (found["updates"], found["compared"]) == (status["round"], 3)


def test_a_changed_weight_is_found_out(tmp_path: Path) -> None:
    """The comparison can fail: one recorded payload of another update changes the hash."""
    with swarm(tmp_path, GOSSIP, rounds=3) as one:
        one.found(**RECORD)
        one.wait(lambda: all((n.status() or {}).get("finished") for n in one.nodes), "finished")
        one.nodes[0].signal(signal.SIGTERM)
        assert one.nodes[0].wait_exit() == 0
        run = load(folders(one))
        assert not replay(run).differences
        less = type(run)(run.config, run.id, run.genesis_lineage, run.peers, run.updates[:-1], run.commits)
        assert replay(less).differences
