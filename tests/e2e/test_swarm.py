"""A swarm of real processes: it agrees, survives every way to die, and its members come back with what they learned."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from shoal.node.store.metrics import read_metrics

from .harness import LANGUAGE_MODEL, Node, Swarm, swarm

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


def _cases() -> list[object]:
    """All ten; a few of them in every run, the rest with the slow tests."""
    quick = {("exchanging", "kill"), ("voting", "kill"), ("convening", "freeze")}
    phases = ("training", "convening", "exchanging", "voting", "committing")
    cases = [(phase, how) for phase in phases for how in ("kill", "freeze")]
    return [pytest.param(*c, marks=[] if c in quick else [pytest.mark.slow], id="-".join(c)) for c in cases]


@pytest.mark.parametrize(("phase", "how"), _cases())
def test_a_member_dies_in_a_phase_and_comes_back(tmp_path: Path, phase: str, how: str) -> None:
    with swarm(tmp_path) as one:
        one.found()
        one.join()
        victim = one.join(SHOAL_NODE__TEST_HOLD=phase)
        survivors = one.nodes[:2]
        one.wait(lambda: victim.holding() == phase, f"held in {phase}")
        before = max(one.rounds(survivors))
        victim.strike(how)
        one.wait_round(before + 3, survivors)
        victim.bring_back(how)
        one.wait(lambda: bool((victim.status() or {}).get("member")), "the victim is a member again")
        together = max(one.rounds(survivors)) + 2
        one.wait_round(together)
        one.assert_same_history(from_round=together)
        assert_book_is_exact(one.nodes)
        faults = [(n.status() or {})["faults"] for n in one.nodes]
        assert all(f.keys() <= {"state_moved_on"} for f in faults), faults


@pytest.mark.parametrize("how", ["kill", pytest.param("freeze", marks=pytest.mark.slow)])
def test_dense_exchange_survives_a_death(tmp_path: Path, how: str) -> None:
    with swarm(tmp_path, exchange="dense", dimension=1000) as one:
        one.found()
        one.join()
        victim = one.join(SHOAL_NODE__TEST_HOLD="exchanging")
        survivors = one.nodes[:2]
        one.wait(lambda: victim.holding() == "exchanging", "held in a dense exchange")
        before = max(one.rounds(survivors))
        victim.signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        one.wait_round(before + 3, survivors)
        victim.release()
        if how == "kill":
            victim.wait_exit()
            victim.start("up")
        else:
            victim.signal(signal.SIGCONT)
        one.wait(lambda: bool((victim.status() or {}).get("member")), "the victim is a member again")
        together = max(one.rounds(survivors)) + 2
        one.wait_round(together)
        one.assert_same_history(from_round=together)
        assert_book_is_exact(one.nodes)


def test_the_convener_dies_before_its_first_word(tmp_path: Path) -> None:
    """The convener answers probes and otherwise stays silent: it is passed over at the phase deadline, dead or not."""
    with swarm(tmp_path) as one:
        first = one.found()
        for _ in range(3):
            one.join()
        one.wait(lambda: len((first.status() or {})["electorate"]) == 4, "four members")
        mute = one.nodes[1]
        mute.kill()
        mute.start("up", SHOAL_NODE__TEST_HOLD="convening")
        one.wait(lambda: mute.holding() == "convening", "the mute one is held")
        others = [n for n in one.nodes if n is not mute]
        # Over this many rounds it is the mute one's turn to convene the first attempt several times.
        one.wait_round(max(one.rounds(others)) + 12, others)
        assert mute.alive and mute.holding() == "convening"
        mute.release()
        one.wait(lambda: bool((mute.status() or {}).get("member")), "the mute one is a member again")
        together = max(one.rounds(others)) + 2
        one.wait_round(together)
        one.assert_same_history(from_round=together)


@pytest.mark.slow
def test_two_peers_part_and_heal(tmp_path: Path) -> None:
    """Each of two goes on alone, marked split; when both are back one side wins by rule and all bits are equal again."""
    with swarm(tmp_path) as one:
        first = one.found()
        second = one.join()
        one.wait(lambda: len((first.status() or {})["electorate"]) == 2, "the second is a member")
        one.wait_round(one.rounds([first])[0] + 2)
        second.signal(signal.SIGSTOP)
        before = one.rounds([first])[0]
        one.wait_round(before + 3, [first])
        first.signal(signal.SIGSTOP)
        second.signal(signal.SIGCONT)
        alone = one.rounds([second])[0]
        one.wait_round(max(alone, before) + 3, [second])
        first.signal(signal.SIGCONT)

        def together() -> bool:
            seen = [n.status() for n in one.nodes]
            return all(s is not None and len(s["electorate"]) == 2 and s["member"] for s in seen)

        one.wait(together, "both are members of one electorate again", timeout_s=90)
        goal = max(one.rounds()) + 3
        one.wait_round(goal)
        status = one.nodes[0].status()
        assert status is not None
        histories = [{r["round"]: r["state_hash"] for r in read_metrics(n.data_dir)} for n in one.nodes]
        later = [r for r in histories[0].keys() & histories[1].keys() if r >= goal]
        assert later and all(histories[0][r] == histories[1][r] for r in later)
        assert_book_is_exact(one.nodes)


STATE = {"dimension": 1_000_000}  # a state of four chunks


@pytest.mark.parametrize("how", ["kill", pytest.param("freeze", marks=pytest.mark.slow)])
def test_a_newcomer_dies_while_it_downloads_and_comes_back(tmp_path: Path, how: str) -> None:
    with swarm(tmp_path, **STATE) as one:
        one.found()
        one.join()
        survivors = one.nodes[:2]
        one.wait(lambda: all(len((n.status() or {})["electorate"]) == 2 for n in survivors), "two members")
        newcomer = one.join(wait=False, SHOAL_NODE__TEST_HOLD="downloading")
        one.wait(lambda: newcomer.holding() == "downloading", "held while downloading")
        newcomer.strike(how)
        one.wait_round(max(one.rounds(survivors)) + 3, survivors)
        newcomer.bring_back(how, "join", one.invite)
        assert_together(one, one.nodes)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_source_dies_while_a_newcomer_downloads_from_it(tmp_path: Path, how: str) -> None:
    """The newcomer gets the state from the others, whether its source is gone or just silent."""
    with swarm(tmp_path, **STATE) as one:
        source = one.found()  # named first in the invite: the newcomer begins with it
        others = [one.join(), one.join()]
        one.wait(lambda: all(len((n.status() or {})["electorate"]) == 3 for n in one.nodes), "three members")
        one.invite = source.ask("invite")["invite"]  # names all three
        newcomer = one.join(wait=False, SHOAL_NODE__TEST_HOLD="downloading")
        one.wait(lambda: newcomer.holding() == "downloading", "held while downloading")
        source.strike(how)
        newcomer.release()
        # A silent source counts as lost only when its connection does.
        one.wait(lambda: bool((newcomer.status() or {}).get("member")), "the newcomer is a member", timeout_s=150)
        one.wait_round(max(one.rounds(others)) + 2, [*others, newcomer])
        if how == "kill":
            source.start("up")
        else:
            source.signal(signal.SIGCONT)
        assert_together(one, one.nodes)


@pytest.mark.slow
def test_a_language_model_killed_in_an_exchange_comes_back_with_what_it_learned(tmp_path: Path) -> None:
    """As with the stand-in, but with rollouts, rewards and AdamW behind every update."""
    with swarm(tmp_path, LANGUAGE_MODEL, target_samples=192) as one:
        one.found()
        one.join()
        victim = one.join(SHOAL_NODE__TEST_HOLD="exchanging")
        survivors = one.nodes[:2]
        one.wait(lambda: victim.holding() == "exchanging", "held in an exchange", timeout_s=90)
        before = max(one.rounds(survivors))
        victim.kill()
        one.wait_round(before + 3, survivors)
        victim.release()
        victim.start("up")
        one.wait(lambda: bool((victim.status() or {}).get("ready")), "the victim is ready")
        assert_together(one, one.nodes)
        one.wait(lambda: (victim.status() or {}).get("seq", 0) >= 2, "the victim publishes again, under a new dot")
        records = [r for r in read_metrics(survivors[0].data_dir) if r["round"] > before]
        assert any("reward" in r for r in records) and max(r["updates"] for r in records) >= 2
        assert not any(r["void"] for r in records)
        faults = [(n.status() or {})["faults"] for n in one.nodes]
        assert all(f.keys() <= {"state_moved_on"} for f in faults), faults


def assert_together(one: Swarm, nodes: list[Node]) -> None:
    """Members all, with the same bits from here on, and nothing that was learned is lost."""
    one.wait(lambda: all((n.status() or {}).get("member") for n in nodes), "all are members")
    together = max(one.rounds(nodes)) + 2
    one.wait_round(together, nodes)
    one.assert_same_history(from_round=together, nodes=nodes)
    assert_book_is_exact(nodes)
