"""Hybrid mode in real processes: a member of a ring dies or stands still, in any phase, and at rest all have the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import QUADRATIC, Node, swarm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

HYBRID = QUADRATIC.replace("[run.sync]", '[run.sync]\nmode = "hybrid"\ngossip_seconds = 0.5\nring_size_max = 3')
ROUNDS = 40


def rounds_of(node: Node) -> int:
    return int((node.status() or {}).get("published", -1))


@pytest.mark.parametrize(
    ("phase", "how"),
    [
        ("exchanging", "kill"),
        pytest.param("training", "kill", marks=pytest.mark.slow),
        pytest.param("voting", "freeze", marks=pytest.mark.slow),
        pytest.param("committing", "kill", marks=pytest.mark.slow),
    ],
)
def test_a_member_of_a_ring_dies_or_stands_still_and_comes_back(tmp_path: Path, phase: str, how: str) -> None:
    with swarm(tmp_path, HYBRID, rounds=ROUNDS, round_seconds=5, target_samples=600) as one:
        one.found()
        for _ in range(3):
            one.join()
        victim = one.join(SHOAL_NODE__TEST_HOLD=f"{phase}@3")
        one.wait(lambda: victim.holding() == phase, f"held in {phase}")
        survivors = one.nodes[:-1]
        victim.strike(how)
        before = min(map(rounds_of, survivors))
        one.wait(lambda: min(map(rounds_of, survivors)) >= before + 2, "the others go on")
        victim.bring_back(how)
        one.wait(lambda: all((n.status() or {}).get("finished") for n in one.nodes), "all finished")
        status = one.wait_equal()
        # Rings of three from five peers: at least two sums a round once all are there.
        assert status["round"] >= ROUNDS
        for node in one.nodes:
            seen = node.status()
            assert seen is not None and seen["seq"] >= 1 and not seen["faults"], seen
            assert node.ask("book")["exact"]
