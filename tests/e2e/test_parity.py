"""Real processes under faults, and the simulator fed with what they said and decided: the same state hashes, to the bit."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.sim.replay import load, replay

from .harness import QUADRATIC, Node, Swarm, swarm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

RECORD = {"SHOAL_NODE__RECORD_BYTES_MAX": "50000000"}
GOSSIP = QUADRATIC.replace("[run.sync]", '[run.sync]\nmode = "gossip"\ngossip_seconds = 1.0')
HYBRID = QUADRATIC.replace("[run.sync]", '[run.sync]\nmode = "hybrid"\ngossip_seconds = 1.0\nring_size_max = 2')


def begin(one: Swarm, count: int = 3) -> None:
    """Peers that start to train together."""
    wait = {"SHOAL_NODE__WAIT_FOR_START": "true"}
    one.found(**RECORD, **wait)
    for _ in range(count - 1):
        one.join(**RECORD, **wait)
    one.begin()


def steps(node: Node, what: str) -> int:
    return int((node.status() or {}).get(what, -1))


def suffer(one: Swarm, what: str, step: int) -> None:
    """One peer is frozen for a while, another killed and restarted, and the run goes on; `what` of the status counts steps."""
    first, frozen, killed = one.nodes

    def reach(count: int, nodes: list[Node]) -> None:
        one.wait(lambda: min(steps(n, what) for n in nodes) >= count, f"{what} {count}")

    reach(step, one.nodes)
    frozen.signal(signal.SIGSTOP)
    reach(2 * step, [first, killed])
    killed.kill()
    frozen.signal(signal.SIGCONT)
    reach(3 * step, [first, frozen])
    killed.start("up", **RECORD)


def part(one: Swarm, count: int) -> None:
    """Two sides that each go on alone: first one stands still, then the other, until each has published `count` more."""
    half = len(one.nodes) // 2
    one.wait(lambda: min(steps(n, "published") for n in one.nodes) >= 2, "all have begun")
    for moving, still in ((one.nodes[:half], one.nodes[half:]), (one.nodes[half:], one.nodes[:half])):
        for node in still:
            node.signal(signal.SIGSTOP)
        for node in moving:
            node.signal(signal.SIGCONT)
        before = {node.name: steps(node, "published") for node in moving}
        one.wait(
            lambda m=moving, b=before: all(steps(n, "published") >= b[n.name] + count for n in m), "a side goes on"
        )
    for node in one.nodes[:half]:
        node.signal(signal.SIGCONT)


def leave(one: Swarm) -> None:
    for node in one.nodes:
        node.signal(signal.SIGTERM)
    assert {node.wait_exit() for node in one.nodes} == {0}


def finish(one: Swarm) -> dict[str, Any]:
    """Let all come to their end and leave; the status that they share."""
    one.wait(lambda: all((n.status() or {}).get("finished") for n in one.nodes), "all finished")
    status = one.wait_equal()
    leave(one)
    return status


def folders(one: Swarm) -> list[Path]:
    return [node.data_dir for node in one.nodes]


def test_ring_mode(tmp_path: Path) -> None:
    with swarm(tmp_path, rounds=30, target_samples=480, exchange="sparse") as one:
        begin(one)
        suffer(one, "round", 6)
        status = finish(one)
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
        status = finish(one)
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


def test_dense_rounds(tmp_path: Path) -> None:
    with swarm(tmp_path, rounds=20, target_samples=480, exchange="dense") as one:
        begin(one)
        suffer(one, "round", 5)
        status = finish(one)
        run = load(folders(one))
        assert any(commit.value.chunk_hashes for commit in run.commits)
        found = replay(run)
        assert not found.differences
        assert (found.commits, found.state_hash) == (20, status["state_hash"])


def test_hybrid_mode(tmp_path: Path) -> None:
    with swarm(tmp_path, HYBRID, rounds=24, target_samples=160) as one:
        begin(one)
        suffer(one, "published", 6)
        status = finish(one)
        run = load(folders(one))
        found = replay(run)
        assert not found.differences
        # Each sum was added up again from what its members had said, and then all of them together.
        assert (found.updates, found.state_hash) == (status["round"], status["state_hash"])
        assert found.compared == found.updates + 3 and len(run.inner) > found.updates


@pytest.mark.parametrize("rule", ["heavier", "merge"])
def test_two_sides_that_are_healed(tmp_path: Path, rule: str) -> None:
    """Each side goes on while the other stands still. `heal_max` is so low that their meeting is a conflict."""
    healed = GOSSIP.replace("[run.sync]", f'[run.sync]\nheal = "{rule}"\nheal_max = 400')
    with swarm(tmp_path, healed, rounds=40, target_samples=80) as one:
        begin(one, 4)
        part(one, 12)
        status = finish(one)
        met = [r for n in one.nodes for r in n.log() if r.get("event") == "two sides meet"]
        assert met
        run = load(folders(one))
        found = replay(run)
        assert not found.differences
        assert found.state_hash == status["state_hash"] and found.compared == 4
        assert found.averages if rule == "merge" else found.taken_back


def test_a_changed_weight_is_found_out(tmp_path: Path) -> None:
    """The comparison can fail: one recorded payload of another update changes the hash."""
    with swarm(tmp_path, GOSSIP, rounds=3) as one:
        one.found(**RECORD)
        one.wait(lambda: all((n.status() or {}).get("finished") for n in one.nodes), "finished")
        one.nodes[0].signal(signal.SIGTERM)
        assert one.nodes[0].wait_exit() == 0
        run = load(folders(one))
        assert not replay(run).differences
        assert replay(dataclasses.replace(run, updates=run.updates[:-1])).differences
