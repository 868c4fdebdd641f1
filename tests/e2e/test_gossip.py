"""Gossip mode in real processes: whoever dies or stands still comes back, and at rest all have the same bits."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from shoal.protocol.errors import ExitCode

from .harness import QUADRATIC, Node, Swarm, swarm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

GOSSIP = QUADRATIC.replace("[run.sync]", '[run.sync]\nmode = "gossip"\ngossip_seconds = 0.5\ncompact_updates = 2')
UPDATES = 40


def published(node: Node) -> int:
    return int((node.status() or {}).get("published", -1))


def at_rest(one: Swarm) -> None:
    """All have published what they should, and everybody has it all."""
    one.wait(lambda: all((n.status() or {}).get("finished") for n in one.nodes), "all finished")
    status = one.wait_equal()
    assert status["round"] >= UPDATES * len(one.nodes)
    for node in one.nodes:
        seen = node.status()
        assert seen is not None and seen["seq"] >= 1 and seen["published"] >= UPDATES
        assert node.ask("book")["exact"] and not seen["faults"], seen


@pytest.mark.parametrize(
    ("phase", "how"),
    [
        ("exchanging", "kill"),
        pytest.param("exchanging", "freeze", marks=pytest.mark.slow),
        pytest.param("training", "kill", marks=pytest.mark.slow),
        ("training", "freeze"),
    ],
)
def test_a_peer_dies_or_stands_still_and_comes_back(tmp_path: Path, phase: str, how: str) -> None:
    with swarm(tmp_path, GOSSIP, rounds=UPDATES) as one:
        one.found()
        one.join()
        victim = one.join(SHOAL_NODE__TEST_HOLD=f"{phase}@4")
        one.wait(lambda: victim.holding() == phase, f"held in {phase}")
        survivors = one.nodes[:2]
        victim.strike(how)
        before = min(map(published, survivors))
        one.wait(lambda: min(map(published, survivors)) >= before + 5, "the others go on")
        victim.bring_back(how)
        at_rest(one)


def test_many_deaths_leave_the_bits_equal(tmp_path: Path) -> None:
    """Each update of a peer is published once, however often it is killed: seq goes on where the journal ended."""
    with swarm(tmp_path, GOSSIP, rounds=UPDATES) as one:
        one.found()
        one.join()
        victim = one.join()
        for _ in range(5):
            before = max(0, published(victim))
            one.wait(lambda seen=before: published(victim) > seen, "it publishes again")
            victim.kill()
            victim.start("up")
            one.wait(lambda: bool((victim.status() or {}).get("ready")), "it is back")
            assert published(victim) > before
        at_rest(one)
        status = victim.status()
        assert status is not None and status["seq"] == status["published"]  # one life, no second update under one dot


def test_sigterm_saves_all_that_was_heard(tmp_path: Path) -> None:
    with swarm(tmp_path, GOSSIP, rounds=UPDATES) as one:
        one.found()
        leaver = one.join()
        at_rest(one)
        status = leaver.status()
        leaver.signal(signal.SIGTERM)
        assert leaver.wait_exit() == ExitCode.OK
        one.nodes[0].kill()
        leaver.start("up")  # nobody is there to ask
        one.wait(lambda: bool((leaver.status() or {}).get("ready")), "it is back")
        again = leaver.status()
        assert status is not None and again is not None
        assert (again["state_hash"], again["vector_hash"]) == (status["state_hash"], status["vector_hash"])
