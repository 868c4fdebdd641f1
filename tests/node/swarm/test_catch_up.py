"""Catching up, without a network: peers ahead, forks of every kind, silence, lies, downloads that fail."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shoal.aggregation.compress import Compression
from shoal.aggregation.merge import OuterSgd
from shoal.node.swarm import catch_up
from shoal.node.swarm.catch_up import ASK_SECONDS, REPLAY_ROUNDS_MAX, SETTLE_SECONDS, VAIN_MAX, WATCH_SECONDS, CatchUp
from shoal.node.swarm.state import MergeRules, SharedState
from shoal.protocol import limits
from shoal.protocol.ballot_messages import Commit, CommittedUpdate, Convene, Exchange, Value, Vote
from shoal.protocol.commit import CommitLog, check_commit
from shoal.protocol.errors import ExitCode, PeerFault, ShoalError
from shoal.protocol.version import Dot, VersionVector, sha256
from shoal.protocol.wire_pb2 import CommitRequest, Envelope, Summary

from .memory import InlineClock, run

ROOT = sha256(b"root")
E = ("a", "b", "c", "d", "e")
RULES = MergeRules(Compression(1.0, 32), OuterSgd(1.0), 1000, 10.0, 0.0)


def commits(
    base: bytes,
    count: int,
    *,
    first: int = 1,
    tag: bytes = b"",
    voters: str = "abc",
    weight: int = 0,
    roster: tuple[str, ...] = E,
) -> list[Commit]:
    """A chain of commits that stand on `base`."""
    made = []
    for round_ in range(first, first + count):
        updates = (CommittedUpdate(Dot("a", 1, round_), sha256(tag, bytes([round_ % 256])), weight),) if weight else ()
        exchange = Exchange.RING_SPARSE if weight else Exchange.NOTHING
        value = Value(round_, base, sha256(b"state", tag), updates, roster, (), exchange)
        votes = tuple(Vote(v, round_, base, 0, value.hash, False, b"") for v in voters)
        made.append(Commit(0, value, votes))
        base = value.lineage
    return made


def tip(chain: list[Commit]) -> bytes:
    return chain[-1].value.lineage


def state(round_: int, lineage: bytes) -> SharedState:
    return SharedState.make(
        theta=np.zeros(2, np.float32), outer=None, round_=round_, lineage=lineage, vector=VersionVector({}),
        electorate=E, total_weight=0,
    )  # fmt: skip


class Rounds:
    """What catching up needs of the rounds, and what it did to them."""

    def __init__(self, chain: list[Commit], *, kept: int = limits.COMMIT_RECORDS_KEPT) -> None:
        self.log = CommitLog(ROOT, 0, electorate=E, kept=kept)
        for commit in chain:
            self.log.add(check_commit(commit, E, commit.round, commit.base_lineage), 1, tip=commit.value.lineage)
        self.state = state(len(chain), tip(chain) if chain else ROOT)
        self.settings = SimpleNamespace(rules=RULES)
        self.poked: list[tuple[str, bytes]] = []
        self.replaced: list[tuple[SharedState, bytes | None, str]] = []
        self.logs_begun: list[list[Commit]] = []

    def poke(self, peer: str, lineage: bytes) -> None:
        self.poked.append((peer, lineage))

    def replace(self, new: SharedState, fork: bytes | None, reason: str) -> None:
        self.replaced.append((new, fork, reason))
        self.state = new

    def start_log(self, chain: list[Commit], new: SharedState) -> None:
        self.logs_begun.append(chain)
        self.log = CommitLog(new.lineage, new.round, electorate=new.electorate)


@dataclass
class Swarm:
    """Others, as a CatchUp sees them: summaries, chains that answer requests, states to download."""

    rounds: Rounds
    shown: dict[str, Summary] = field(default_factory=dict)
    chains: dict[str, list[Commit]] = field(default_factory=dict)
    downloads: list[SharedState | None] = field(default_factory=list)
    chain_of_download: list[Commit] = field(default_factory=list)
    asked: list[tuple[str, CommitRequest]] = field(default_factory=list)
    downloaded: list[tuple[list[str], str]] = field(default_factory=list)
    kept: list[Commit] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    faults: list[PeerFault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.one = CatchUp(
            clock=InlineClock(),
            post=self._post,
            summaries=lambda: dict(self.shown),
            download=self._download,
            records=self._records,
            keep_records=self._keep_records,
            say=lambda event, **k: self.said.append(event),
            conflicts_seen=self.conflicts.append,
        )

    async def _keep_records(self, commits: list[Commit]) -> None:
        self.kept = commits

    def show(self, peer: str, chain: list[Commit], *, answers: bool = True) -> None:
        self.shown[peer] = Summary(round=chain[-1].round, lineage=tip(chain))
        if answers:
            self.chains[peer] = chain

    def _post(self, peer: str, envelope: Envelope) -> None:
        request = envelope.commit_request
        self.asked.append((peer, request))
        chain = self.chains.get(peer, [])
        at = next((i for i, c in enumerate(chain) if c.base_lineage == request.lineage), None)
        if at is not None:
            answer = chain[at : at + limits.COMMITS_PER_REPLY_MAX]
            asyncio.get_running_loop().call_later(0.01, self._hear, peer, answer)

    def _hear(self, peer: str, answer: list[Commit]) -> None:
        for commit in answer:
            try:
                self.one.hint(peer, commit)
            except PeerFault as fault:
                self.faults.append(fault)

    async def _download(self, lineage: bytes | None, peers: list[str], reason: str) -> SharedState | None:
        self.downloaded.append((peers, reason))
        return self.downloads.pop(0) if self.downloads else None

    async def _records(self, peers: list[str], new: SharedState) -> list[Commit]:
        return self.chain_of_download

    async def watch(self, seconds: float) -> None:
        """Watch for a while; raises what the watch raises."""
        task = asyncio.ensure_future(self.one.watch(self.rounds))  # type: ignore[arg-type]
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if done:
            task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def watched(self, seconds: float) -> Swarm:
        run(self.watch(seconds))
        return self


# --- somebody is ahead ------------------------------------------------------------------------------------------------


def test_nobody_ahead_nothing_asked() -> None:
    mine = commits(ROOT, 3)
    swarm = Swarm(Rounds(mine))
    swarm.shown = {
        "same": Summary(round=3, lineage=tip(mine)),
        "behind": Summary(round=2, lineage=mine[1].value.lineage),
        "root": Summary(round=0, lineage=ROOT),
        "odd": Summary(round=9, lineage=b"short"),
    }
    swarm.watched(5)
    assert not swarm.asked and not swarm.conflicts and swarm.one.behind() == {}


def test_before_the_rounds_are_there_everything_is_quiet() -> None:
    swarm = Swarm(Rounds([]))
    swarm.shown = {"b": Summary(round=9, lineage=sha256(b"x"))}
    assert swarm.one.behind() == {} and swarm.one.next_commit(ROOT) is None
    swarm.one.hint("b", commits(ROOT, 1)[0])
    assert len(swarm.rounds.log) == 0


def test_a_little_behind_the_records_are_asked_for_and_the_round_is_poked() -> None:
    mine = commits(ROOT, 3)
    theirs = mine + commits(tip(mine), 5, first=4)
    swarm = Swarm(Rounds(mine))
    swarm.show("b", theirs)
    swarm.watched(5)
    assert swarm.asked[0] == ("b", CommitRequest(after_round=3, lineage=tip(mine))) and len(swarm.asked) == 1
    assert swarm.rounds.poked[0] == ("b", tip(theirs)) and not swarm.downloaded and not swarm.conflicts
    following = swarm.one.next_commit(tip(mine))
    assert following is not None and following.value == theirs[3].value
    assert swarm.one.next_commit(tip(theirs)) is None


def test_long_behind_the_next_question_starts_where_the_last_answer_ended() -> None:
    theirs = commits(ROOT, 3 * limits.COMMITS_PER_REPLY_MAX)
    swarm = Swarm(Rounds([]))
    swarm.show("b", theirs)
    swarm.downloads = [state(96, tip(theirs))]
    swarm.watched(10)
    assert [r.lineage for _, r in swarm.asked] == [ROOT, theirs[31].value.lineage, theirs[63].value.lineage]
    (new, fork, reason) = swarm.rounds.replaced[0]
    assert new.lineage == tip(theirs) and fork is None and "96 rounds behind b" in reason
    assert swarm.downloaded == [(["b"], reason)] and not swarm.rounds.logs_begun


def test_what_is_noted_of_peers_is_forgotten_when_they_are_not_ahead_any_more() -> None:
    """Identities cost nothing in an open run: whatever each of them showed once must not stay."""
    mine = commits(ROOT, 3)
    swarm = Swarm(Rounds(mine))

    async def main() -> None:
        watch = asyncio.ensure_future(swarm.one.watch(swarm.rounds))  # type: ignore[arg-type]
        for n in range(200):
            swarm.shown = {}
            swarm.show(f"told {n}", mine + commits(tip(mine), 2, first=4, tag=bytes([n])))
            swarm.show(f"silent {n}", commits(sha256(bytes([n])), 9), answers=False)
            swarm.one.hint(f"repeats {n}", mine[0])
            await asyncio.sleep(2 * WATCH_SECONDS)
            noted = {*swarm.one._asked, *swarm.one._heard, *swarm.one._vain, *swarm.one._apart}
            assert len(noted) < 6
        swarm.shown = {}
        await asyncio.sleep(2 * WATCH_SECONDS)
        assert not (swarm.one._asked or swarm.one._heard or swarm.one._vain or swarm.one._apart or swarm.one._lost)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)

    run(main())


def test_the_gap_decides_between_replay_and_download() -> None:
    for gap, downloads in ((REPLAY_ROUNDS_MAX, 0), (REPLAY_ROUNDS_MAX + 1, 1)):
        swarm = Swarm(Rounds([]))
        swarm.show("b", commits(ROOT, gap))
        swarm.downloads = [state(gap, tip(swarm.chains["b"]))]
        swarm.watched(3)
        assert len(swarm.downloaded) == downloads and bool(swarm.rounds.poked) == (not downloads)


def test_a_download_that_fails_is_tried_again() -> None:
    swarm = Swarm(Rounds([]))
    chain = commits(ROOT, 40)
    swarm.show("b", chain)
    swarm.downloads = [None, None, state(40, tip(chain))]
    swarm.watched(10)
    assert len(swarm.downloaded) == 3 and len(swarm.rounds.replaced) == 1


def test_a_state_beyond_the_log_comes_with_its_records() -> None:
    """The holders went on: what they give lies beyond what was asked for, joined to the log by the records between."""
    chain = commits(ROOT, 45)
    swarm = Swarm(Rounds([]))
    swarm.show("b", chain[:40])
    swarm.downloads, swarm.chain_of_download = [state(45, tip(chain))], chain
    swarm.watched(4)
    assert swarm.rounds.log.knows(tip(chain)) and not swarm.rounds.logs_begun and len(swarm.rounds.replaced) == 1
    # a chain that hangs in the air begins a log of its own
    other = commits(sha256(b"elsewhere"), 3, first=50)
    swarm = Swarm(Rounds([]))
    swarm.show("b", chain[:40])
    swarm.downloads, swarm.chain_of_download = [state(52, tip(other))], other
    swarm.watched(4)
    assert swarm.rounds.logs_begun == [other] and len(swarm.rounds.replaced) == 1
    # and without any records the state is taken all the same
    swarm = Swarm(Rounds([]))
    swarm.show("b", chain[:40])
    swarm.downloads = [state(52, tip(other))]
    swarm.watched(4)
    assert not swarm.rounds.logs_begun and len(swarm.rounds.replaced) == 1


def test_an_older_state_is_not_taken() -> None:
    mine = commits(ROOT, 3)
    chain = mine + commits(tip(mine), 40, first=4)
    swarm = Swarm(Rounds(mine))
    swarm.show("b", chain)
    swarm.downloads = [state(2, mine[1].value.lineage)]
    swarm.watched(2)
    assert not swarm.rounds.replaced and any("older" in event for event in swarm.said)


def test_a_download_without_anybody_to_ask_is_none() -> None:
    async def test() -> None:
        swarm = Swarm(Rounds([]))
        swarm.one.attach(swarm.rounds)  # type: ignore[arg-type]
        await swarm.one.download(swarm.rounds, "why", sha256(b"nobody has it"))  # type: ignore[arg-type]
        assert not swarm.downloaded

    run(test())


# --- settling ---------------------------------------------------------------------------------------------------------


async def settle_time(swarm: Swarm) -> float:
    clock = InlineClock()
    swarm.one.attach(swarm.rounds)  # type: ignore[arg-type]
    before = clock.now()
    await swarm.one.settled()
    return clock.now() - before


def test_a_newcomer_waits_a_little_for_news_and_not_for_ever() -> None:
    swarm = Swarm(Rounds([]))
    assert run(settle_time(swarm)) == 0
    swarm.show("b", commits(ROOT, 3), answers=False)
    assert SETTLE_SECONDS <= run(settle_time(swarm)) <= SETTLE_SECONDS + WATCH_SECONDS


def test_one_that_shows_what_leads_nowhere_is_not_waited_for() -> None:
    """And is reported once. When it shows something that does lead somewhere, it counts again."""

    async def test() -> None:
        mine = commits(ROOT, 3)
        good = mine + commits(tip(mine), 2, first=4)
        nonsense = Summary(round=10**9, lineage=sha256(b"nonsense"))
        swarm = Swarm(Rounds(mine))
        swarm.shown["liar"] = nonsense
        assert await settle_time(swarm) >= SETTLE_SECONDS
        await swarm.watch(ASK_SECONDS * (VAIN_MAX + 20))
        assert len(swarm.conflicts) == 1 and "no common commit" in swarm.conflicts[0] and not swarm.downloaded
        assert await settle_time(swarm) == 0
        swarm.show("liar", good)
        await swarm.watch(ASK_SECONDS * 20)
        assert swarm.rounds.poked and len(swarm.conflicts) == 1
        swarm.rounds.state = state(5, tip(good))
        await swarm.watch(1)
        swarm.shown["liar"] = nonsense
        assert await settle_time(swarm) >= SETTLE_SECONDS

    run(test())


# --- forks ------------------------------------------------------------------------------------------------------------


def test_a_fork_that_we_lose_is_a_download_with_the_fork_named() -> None:
    common = commits(ROOT, 4)
    mine = common + commits(tip(common), 2, first=5, tag=b"mine", voters="abc")
    theirs = common + commits(tip(common), 3, first=5, tag=b"theirs", voters="abcd")
    swarm = Swarm(Rounds(mine))
    swarm.show("d", theirs)
    swarm.downloads = [state(7, tip(theirs))]
    swarm.watched(10)
    backwards = [r.lineage for _, r in swarm.asked]
    assert backwards == [tip(mine), mine[-1].base_lineage, tip(common)]  # until the chains meet
    (new, fork, _) = swarm.rounds.replaced[0]
    assert (new.lineage, fork) == (tip(theirs), tip(common))
    assert len(swarm.conflicts) == 1 and "theirs stands" in swarm.conflicts[0]


def test_a_winner_with_fewer_rounds_is_followed_too() -> None:
    common = commits(ROOT, 4)
    mine = common + commits(tip(common), 5, first=5, tag=b"mine", voters="abc")
    theirs = common + commits(tip(common), 1, first=5, tag=b"theirs", voters="abcde")
    swarm = Swarm(Rounds(mine))
    swarm.show("d", theirs)
    swarm.downloads = [state(5, tip(theirs))]
    swarm.watched(20)
    assert swarm.rounds.replaced[0][:2] == (swarm.rounds.state, tip(common)) and swarm.rounds.state.round == 5


def test_a_fork_that_we_win_is_counted_once_and_forgotten() -> None:
    common = commits(ROOT, 4)
    mine = common + commits(tip(common), 2, first=5, tag=b"mine", voters="abcd")
    theirs = common + commits(tip(common), 3, first=5, tag=b"theirs", voters="abc")
    swarm = Swarm(Rounds(mine))
    swarm.show("d", theirs)
    swarm.watched(20)
    assert len(swarm.conflicts) == 1 and "mine stands" in swarm.conflicts[0] and not swarm.rounds.replaced
    assert swarm.one.behind() == {}


def test_a_fork_at_the_root_is_found_there() -> None:
    for length in (1, 3, 6):
        mine = commits(ROOT, length, tag=b"mine", voters="abcd")
        swarm = Swarm(Rounds(mine))
        swarm.show("d", commits(ROOT, length + 1, tag=b"theirs", voters="abc"))
        swarm.watched(15)
        assert len(swarm.conflicts) == 1 and "mine stands" in swarm.conflicts[0]


def test_one_peer_on_a_fork_older_than_the_records_stops_nobody() -> None:
    """Whether nobody has records of its lineage, or its records do not reach back to ours."""
    mine = commits(ROOT, 30)
    swarm = Swarm(Rounds(mine, kept=10))
    swarm.show("d", commits(sha256(b"elsewhere"), 40))
    swarm.watched(ASK_SECONDS * 2 * VAIN_MAX)
    assert len(swarm.conflicts) == 1 and "no common commit" in swarm.conflicts[0] and not swarm.downloaded


def apart(rounds: Rounds, common: list[Commit], tag: bytes) -> list[Commit]:
    """A branch whose records the log holds, though not the commit where it leaves ours any more."""
    return common + commits(tip(common), 40 - len(common), first=len(common) + 1, tag=tag)


def test_records_that_do_not_reach_back_to_ours_are_a_conflict_that_nobody_decides() -> None:
    mine = commits(ROOT, 30)
    swarm = Swarm(Rounds(mine, kept=10))
    log = swarm.rounds.log
    branch = apart(swarm.rounds, mine[:22], b"other")
    for commit in branch[22:]:
        log.add(check_commit(commit, E, commit.round, commit.base_lineage), 1, tip=tip(mine))
    later = commits(tip(mine), 8, first=31)
    for commit in later:
        log.add(check_commit(commit, E, commit.round, commit.base_lineage), 1, tip=commit.value.lineage)
    swarm.rounds.state = state(38, tip(later))
    swarm.show("d", branch)
    swarm.watched(5)
    assert len(swarm.conflicts) == 1 and "no common commit" in swarm.conflicts[0] and not swarm.rounds.replaced


def test_most_of_us_on_a_fork_older_than_the_records_stops_the_node() -> None:
    for liars, stops in (("cd", False), ("bcd", True), ("xyz", False)):
        swarm = Swarm(Rounds(commits(ROOT, 30), kept=10))
        for peer in liars:
            swarm.show(peer, commits(sha256(b"elsewhere"), 40))
        if not stops:
            swarm.watched(ASK_SECONDS * 2 * VAIN_MAX)
            continue
        with pytest.raises(ShoalError, match="no common commit") as caught:
            swarm.watched(ASK_SECONDS * 2 * VAIN_MAX)
        assert caught.value.code is ExitCode.DIVERGED and "3 of 5 members" in caught.value.values
    # while the log still reaches back to its beginning, their silence says nothing
    swarm = Swarm(Rounds(commits(ROOT, 5)))
    for peer in "bcd":
        swarm.show(peer, commits(sha256(b"elsewhere"), 40), answers=False)
    swarm.watched(ASK_SECONDS * 2 * VAIN_MAX)
    assert len(swarm.conflicts) == 3


def away(mine: dict[tuple[str, int], tuple[int, bytes]], theirs: dict[tuple[str, int], tuple[int, bytes]]) -> Swarm:
    """We have round 5; most of our electorate shows round 40 and has records of the last ten alone."""
    swarm = Swarm(Rounds(commits(ROOT, 5), kept=10))
    now = commits(sha256(b"long forgotten"), 40)
    for peer in "bcd":
        swarm.show(peer, now, answers=False)
    swarm.rounds.state = replace(swarm.rounds.state, vector=VersionVector(mine))
    swarm.downloads = [None, replace(state(40, tip(now)), vector=VersionVector(theirs))]
    swarm.chain_of_download = now[-10:]
    return swarm


HEAD, OTHER = sha256(b"head"), sha256(b"other head")


def test_who_was_away_for_longer_than_records_are_kept_comes_back_as_a_newcomer() -> None:
    swarm = away({("a", 1): (2, HEAD), ("b", 1): (5, HEAD)}, {("a", 1): (2, HEAD), ("b", 1): (39, OTHER)})
    swarm.watched(ASK_SECONDS * 3 * VAIN_MAX)
    (new, fork, reason) = swarm.rounds.replaced[0]
    assert (new.round, fork) == (40, None) and "away" in reason
    assert len(swarm.downloaded) == 2  # the first one failed
    assert swarm.downloaded[0][0] == ["b", "c", "d"]


@pytest.mark.parametrize("theirs", [{("b", 1): (39, OTHER)}, {("a", 1): (2, OTHER), ("b", 1): (39, OTHER)}])
def test_who_was_away_on_a_branch_that_the_others_do_not_have_is_told(theirs: dict[Any, Any]) -> None:
    swarm = away({("a", 1): (2, HEAD), ("b", 1): (5, HEAD)}, theirs)
    with pytest.raises(ShoalError, match="different branches") as caught:
        swarm.watched(ASK_SECONDS * 3 * VAIN_MAX)
    assert caught.value.code is ExitCode.DIVERGED and not swarm.rounds.replaced


def test_few_who_claim_to_be_far_ahead_are_not_followed() -> None:
    swarm = away({}, {})
    del swarm.shown["c"], swarm.shown["d"]
    swarm.watched(ASK_SECONDS * 2 * VAIN_MAX)
    assert not swarm.downloaded and len(swarm.conflicts) == 1


def test_who_returns_when_all_others_were_replaced_follows_their_successors_and_learns_nothing_before() -> None:
    swarm = away({("a", 1): (2, HEAD)}, {("a", 1): (2, HEAD), ("x", 1): (39, OTHER)})
    swarm.shown = {successor: swarm.shown[old] for successor, old in zip("xyz", "bcd", strict=True)}

    async def main() -> None:
        swarm.one.attach(swarm.rounds)  # type: ignore[arg-type]
        settled = asyncio.ensure_future(swarm.one.settled())
        watch = asyncio.ensure_future(swarm.one.watch(swarm.rounds))  # type: ignore[arg-type]
        while not swarm.rounds.replaced:
            assert not settled.done()
            await asyncio.sleep(1.0)
        await settled
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)

    run(main())
    assert swarm.downloaded[0][0] == ["x", "y", "z"]
    assert swarm.rounds.state.round == 40


def test_successors_count_only_when_no_majority_of_us_is_here_and_most_of_them_agree() -> None:
    for here, elsewhere in (("bc", ""), ("b", "uvw")):
        swarm = away({}, {})
        ahead, ours = swarm.shown["b"], Summary(round=5, lineage=swarm.rounds.state.lineage)
        swarm.shown = {**dict.fromkeys("xyz", ahead), **dict.fromkeys([*here, *elsewhere], ours)}
        swarm.watched(ASK_SECONDS * 2 * VAIN_MAX)
        assert not swarm.downloaded and len(swarm.conflicts) == 3


# --- silence and lies -------------------------------------------------------------------------------------------------


def test_a_silent_peer_is_asked_once_a_second_further_and_further_back() -> None:
    mine = commits(ROOT, 20)
    swarm = Swarm(Rounds(mine))
    swarm.show("b", commits(ROOT, 30, tag=b"x"), answers=False)
    swarm.watched(12)
    assert 10 <= len(swarm.asked) <= 12
    lineages = [ROOT, *(c.value.lineage for c in mine)]
    back = [20 - lineages.index(r.lineage) for _, r in swarm.asked]
    assert back[:8] == [0, 1, 2, 4, 8, 16, 20, 0]
    assert [r.after_round for _, r in swarm.asked][:3] == [20, 19, 18]


def test_news_of_a_peer_brings_the_next_question_forward() -> None:
    async def test() -> None:
        swarm = Swarm(Rounds(commits(ROOT, 3)))
        swarm.show("b", commits(ROOT, 9, tag=b"x"), answers=False)
        task = asyncio.ensure_future(swarm.one.watch(swarm.rounds))  # type: ignore[arg-type]
        await asyncio.sleep(0.3)
        assert len(swarm.asked) == 1
        news = Convene(7, ROOT, 0, "why")
        swarm.one.hint("stranger", news)
        await asyncio.sleep(0.3)
        assert len(swarm.asked) == 1
        swarm.one.hint("b", news)
        await asyncio.sleep(0.3)
        assert len(swarm.asked) == 2
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(test())


def test_forged_commits_are_the_senders_fault_and_are_not_kept() -> None:
    mine = commits(ROOT, 2)
    for bad in (
        commits(tip(mine), 1, first=3, voters="ab"),  # no majority
        commits(tip(mine), 1, first=3, voters="abz"),  # a vote from outside
        commits(tip(mine), 1, first=3, roster=("a", "b", "z")),  # a member from nowhere
    ):
        swarm = Swarm(Rounds(mine))
        swarm.show("b", bad)
        swarm.watched(3)
        assert swarm.faults and all(f.kind == "bad_commit" for f in swarm.faults)
        assert not swarm.rounds.log.knows(tip(bad)) and not swarm.rounds.poked


def test_a_commit_on_an_unknown_base_is_not_kept() -> None:
    swarm = Swarm(Rounds(commits(ROOT, 2)))
    swarm.one.attach(swarm.rounds)  # type: ignore[arg-type]
    swarm.one.hint("b", commits(sha256(b"unknown"), 1, first=9)[0])
    assert len(swarm.rounds.log) == 2


def test_a_peer_that_repeats_what_we_have_is_not_forward_news() -> None:
    async def test() -> None:
        mine = commits(ROOT, 5)
        theirs = mine + commits(tip(mine), 3, first=6)
        swarm = Swarm(Rounds(mine))
        swarm.one.attach(swarm.rounds)  # type: ignore[arg-type]
        swarm.one.hint("b", theirs[6])
        assert not swarm.rounds.log.knows(theirs[6].value.lineage)  # its base is not there yet
        for commit in (theirs[5], theirs[2], theirs[6], theirs[1]):
            swarm.one.hint("b", commit)
        assert swarm.one._heard["b"] == theirs[6].value.lineage

    run(test())


def test_weights_of_kept_records_are_the_capped_ones() -> None:
    swarm = Swarm(Rounds([]))
    swarm.one.attach(swarm.rounds)  # type: ignore[arg-type]
    (commit,) = commits(ROOT, 1, weight=10**6)
    swarm.one.hint("b", commit)
    record = swarm.rounds.log.get(commit.value.lineage)
    assert record is not None and record.weight == RULES.weight_max


def test_what_is_served() -> None:
    chain = commits(ROOT, 40)
    swarm = Swarm(Rounds(chain))
    posted: list[tuple[str, Any]] = []
    swarm.one._post = lambda peer, envelope: posted.append((peer, envelope.commit))
    rounds: Any = swarm.rounds
    swarm.one.answer(rounds, "b", CommitRequest(lineage=chain[4].value.lineage))
    assert len(posted) == limits.COMMITS_PER_REPLY_MAX and all(peer == "b" for peer, _ in posted)
    posted.clear()
    swarm.one.answer(rounds, "b", CommitRequest(lineage=chain[37].value.lineage))
    assert len(posted) == 2
    swarm.one.answer(rounds, "b", CommitRequest(lineage=sha256(b"unknown")))
    assert len(posted) == 2
    with pytest.raises(PeerFault, match="lineage of 3 bytes"):
        swarm.one.answer(rounds, "b", CommitRequest(lineage=b"abc"))
    assert catch_up.BACKWARD[-1] < limits.COMMIT_RECORDS_KEPT
