"""The way through the rounds where no whole swarm is needed to see it: whose errors come out, and what is bounded."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.node.swarm import rounds as rounds_module
from shoal.node.swarm.abstention import ABSTAIN_SECONDS, Abstention
from shoal.node.swarm.ballot_driver import BallotDriver
from shoal.node.swarm.rounds import Rounds, RoundSettings
from shoal.protocol import limits
from shoal.protocol.ballot_messages import Convene
from shoal.protocol.deadlines import Deadlines
from shoal.protocol.identity import Identity
from shoal.protocol.version import sha256

from .memory import InlineClock, run

E = ("a", "b", "c")
ME = Identity.generate(bytes(32))
LINEAGE = sha256(b"root")


def some_state(round_: int = 0, lineage: bytes = LINEAGE) -> Any:
    return SimpleNamespace(round=round_, lineage=lineage, hash=sha256(b"state"), electorate=E, total_weight=0)


class Broken(BallotDriver):
    """A ballot that decides its round and dies of an error of ours in the same moment."""

    async def run(self) -> None:
        self.decided.set_result(None)  # pyright: ignore[reportArgumentType]
        raise RuntimeError("a bug")


def parts() -> dict[str, Any]:
    """A node's other parts, which do nothing."""

    async def nothing(*args: Any) -> Any:
        return True

    def silent(*args: Any, **kwargs: Any) -> Any:
        return None

    catch_up = SimpleNamespace(watch=lambda rounds: asyncio.sleep(3600), next_commit=silent, hint=silent)
    return dict(
        identity=ME,
        run_id=bytes(32),
        clock=InlineClock(),
        state=some_state(),
        history=SimpleNamespace(log=None),
        work=SimpleNamespace(open=silent, stop=silent, stopping=True),
        exchange=SimpleNamespace(end=silent),
        dense=SimpleNamespace(end=silent),
        store=None,
        journal=SimpleNamespace(ballot_record=silent),
        deadlines=Deadlines(),
        catch_up=catch_up,
        post=silent,
        dead=frozenset,
        expect=silent,
        say=silent,
        hold=nothing,
        save=nothing,
    )


def some_rounds(**changed: Any) -> Rounds:
    settings = RoundSettings(target_samples=1, round_seconds_max=1.0, rounds_max=0, rules=None)  # pyright: ignore[reportArgumentType]
    return Rounds(**{**parts(), **changed}, settings=settings, alive=set, summaries=dict, started=asyncio.Event())


def test_what_a_ballot_dies_of_is_not_lost_when_its_round_ends_in_that_moment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rounds_module, "BallotDriver", Broken)

    async def main() -> None:
        await some_rounds().run()

    with pytest.raises(RuntimeError, match="a bug"):
        run(main())


# ---------------------------------------------------------------------------------------------------- abstention


def test_a_member_without_its_disk_abstains_for_a_while_and_no_longer():
    one = Abstention("a")
    assert one.must(100.0, E)
    assert one.must(100.0 + ABSTAIN_SECONDS - 1, E)
    assert not one.must(100.0 + ABSTAIN_SECONDS, E)


def test_a_member_that_the_others_left_behind_votes_as_soon_as_it_is_named_again():
    one = Abstention("a")
    assert one.must(100.0, E)
    assert not one.must(101.0, ("b", "c"))
    assert not one.must(102.0, E)


def test_two_members_need_both_votes():
    assert not Abstention("a").must(100.0, ("a", "b"))


def test_the_end_of_an_abstention_opens_the_round_anew_and_leaves_no_timer(monkeypatch: pytest.MonkeyPatch):
    opened: list[tuple[float, bool]] = []

    class Watching(BallotDriver):
        def open(self, state: Any, *, abstain: bool, **others: Any) -> None:
            opened.append((self._clock.now(), abstain))
            super().open(state, abstain=abstain, **others)

        async def run(self) -> None:
            await asyncio.sleep(3600)

    monkeypatch.setattr(rounds_module, "BallotDriver", Watching)

    async def main() -> None:
        state = some_state()
        state.electorate = (ME.peer_id, "b", "c")
        catch_up = SimpleNamespace(
            watch=lambda rounds: asyncio.sleep(3600), next_commit=lambda lineage: None, settled=lambda: asyncio.sleep(0)
        )
        rounds = some_rounds(state=state, amnesiac=lambda: True, catch_up=catch_up)
        task = asyncio.ensure_future(rounds.run())
        await asyncio.sleep(2 * ABSTAIN_SECONDS)
        rounds.stop()
        rounds._started.set()
        await task

    run(main())
    assert [abstain for _, abstain in opened] == [True, False]
    assert opened[1][0] - opened[0][0] == pytest.approx(ABSTAIN_SECONDS)


# ---------------------------------------------------------------------------------------------------- messages


def convene(round_: int, lineage: bytes) -> Convene:
    return Convene(round_, lineage, 0, "x")


async def a_driver() -> BallotDriver:
    rounds = some_rounds()
    rounds.ballot.open(some_state(), dead=frozenset(), abstain=False)
    return rounds.ballot


def waiting(driver: BallotDriver) -> int:
    return driver._events.qsize() - 1  # the first is the tick of its opening


def test_messages_of_the_open_round_are_bounded_in_bytes_by_sender_and_in_all():
    async def main() -> None:
        driver = await a_driver()
        for _ in range(limits.BALLOT_MESSAGES_MAX):
            assert driver.receive("a", convene(1, LINEAGE), limits.MESSAGE_BYTES_MAX)
        share = waiting(driver)
        assert 0 < share * limits.MESSAGE_BYTES_MAX <= limits.BALLOT_BYTES_MAX // 8
        assert driver.receive("b", convene(1, LINEAGE), 100)
        assert waiting(driver) == share + 1  # a flood keeps nobody else out
        for n in range(limits.BALLOT_MESSAGES_MAX):
            driver.receive(f"p{n}", convene(1, LINEAGE), limits.MESSAGE_BYTES_MAX)
        assert waiting(driver) * limits.MESSAGE_BYTES_MAX <= limits.BALLOT_BYTES_MAX + limits.MESSAGE_BYTES_MAX
        before = waiting(driver)
        driver.dense_failed(0, "our own word is never dropped")
        assert waiting(driver) == before + 1

    run(main())


def test_early_messages_are_bounded_and_fed_to_their_round():
    async def main() -> None:
        driver = await a_driver()
        later = sha256(b"next")
        for _ in range(limits.EARLY_MESSAGES_MAX):
            driver.keep_early("a", convene(2, later), 1000)
        driver.keep_early("b", convene(2, later), 1000)
        driver.keep_early("c", convene(3, sha256(b"third")), 1000)
        kept = len(driver._early)
        assert kept == limits.EARLY_MESSAGES_MAX // 8 + 2
        driver.open(some_state(1, later), dead=frozenset(), abstain=False)
        assert waiting(driver) == kept - 1
        assert [peer for peer, *_ in driver._early] == ["c"]

    run(main())


def test_room_is_given_back_when_the_ballot_has_taken_a_message():
    async def main() -> None:
        driver = await a_driver()
        pump = asyncio.ensure_future(driver.run())
        for _ in range(5 * limits.BALLOT_MESSAGES_MAX // 8):
            before = waiting(driver)
            driver.receive("a", convene(1, LINEAGE), 1000)
            assert waiting(driver) == before + 1
            await asyncio.sleep(0.0)
            await asyncio.sleep(0.0)
        driver.close("over")
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)

    run(main())
