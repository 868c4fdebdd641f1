"""A swarm of real processes: it agrees, survives every way to die, and its members come back with what they learned."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from .harness import Node, Swarm, swarm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def convener(one: Swarm, round_: int) -> Node:
    """The node that convenes attempt 0 of the round after the present state, as all members compute it."""
    from shoal.protocol.ballot_rules import convener_order

    status = one.nodes[0].status()
    assert status is not None and status["round"] == round_ - 1
    first = convener_order(status["electorate"], bytes.fromhex(status["lineage"]), round_)[0]
    return next(n for n in one.nodes if (n.status() or {}).get("peer_id") == first)


def assert_book_is_exact(nodes: list[Node]) -> None:
    assert all(node.ask("book")["exact"] for node in nodes)


def test_three_peers_agree_and_stop_at_the_last_round(tmp_path: Path) -> None:
    with swarm(tmp_path, rounds=8) as one:
        one.found(SHOAL_NODE__WAIT_FOR_START="true")
        one.join(SHOAL_NODE__WAIT_FOR_START="true")
        one.join(SHOAL_NODE__WAIT_FOR_START="true")
        one.begin()
        one.wait(lambda: all((n.status() or {}).get("finished") for n in one.nodes), "all finished")
        status = one.wait_equal()
        assert status["round"] == 8
        assert len(status["electorate"]) == 3
        assert_book_is_exact(one.nodes)


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("phase", ["training", "convening", "exchanging", "voting", "committing"])
def test_a_member_dies_in_a_phase_and_comes_back(tmp_path: Path, phase: str, how: str) -> None:
    with swarm(tmp_path) as one:
        one.found()
        one.join()
        victim = one.join(SHOAL_NODE__TEST_HOLD=phase)
        survivors = one.nodes[:2]
        one.wait(lambda: victim.holding() == phase, f"held in {phase}")
        before = max(one.rounds(survivors))
        if how == "kill":
            victim.kill()
        else:
            victim.signal(signal.SIGSTOP)
        one.wait_round(before + 3, survivors)
        victim.release()
        if how == "kill":
            victim.start("up")
        else:
            victim.signal(signal.SIGCONT)
        one.wait(lambda: bool((victim.status() or {}).get("member")), "the victim is a member again")
        together = max(one.rounds(survivors)) + 2
        one.wait_round(together)
        one.assert_same_history(from_round=together)
        assert_book_is_exact(one.nodes)
        assert not any((n.status() or {})["faults"] for n in one.nodes)
