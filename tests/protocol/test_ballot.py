"""The ballot's stories, one peer or a few at a time; what random schedules do to it is in test_ballot_model.py."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from shoal.protocol.ballot import (
    Ballot,
    CloseRound,
    Decided,
    ExchangeFailed,
    Held,
    LocalResult,
    Measured,
    MembersDead,
    NeedLocalResult,
    Newcomer,
    Note,
    Persist,
    Phase,
    Received,
    Send,
    StartExchange,
    StopExchange,
    Tick,
    WakeAt,
)
from shoal.protocol.ballot_messages import (
    Commit,
    CommittedUpdate,
    Convene,
    Encoding,
    Exchange,
    Header,
    Holding,
    Join,
    Propose,
    Roster,
    RosterEntry,
    Value,
    Vote,
    VotedFor,
)
from shoal.protocol.ballot_record import BallotRecord
from shoal.protocol.ballot_rules import (
    EMPTY_STEP_FROM_ATTEMPT,
    binding,
    choose_exchange,
    convener_order,
    make_value,
    may_accept_split,
    may_split,
    refuse_value,
    still_missing,
)
from shoal.protocol.deadlines import Timing, Wait
from shoal.protocol.version import NO_HEAD, Dot, sha256

TIMING = Timing(local_s=2.0, join_s=4.0, roster_s=6.0, exchange_s=8.0, propose_s=10.0, vote_s=2.0, commit_s=4.0)
BASE, STATE = sha256(b"base"), sha256(b"state")


def header(peer: str, encoding: Encoding = Encoding.SPARSE) -> Header:
    return Header(Dot(peer, 1, 1), NO_HEAD, 1, BASE, 5, encoding, STATE, 10, 0.0, b"signed by " + peer.encode())


class Swarm:
    """Peers p0 … and a network that delivers at once and in order, unless a peer is cut off."""

    def __init__(self, n: int, *, observers: tuple[str, ...] = (), encoding: Encoding = Encoding.SPARSE) -> None:
        self.names = [f"p{i}" for i in range(n)]
        self.order = convener_order(self.names, BASE, 1)
        self.encoding = encoding
        self.now = 100.0
        self.ballots = {name: self.make(name) for name in (*self.names, *observers)}
        self.log: dict[str, list] = {name: [] for name in self.ballots}
        self.cut: set[str] = set()
        self.slow: set[str] = set()  # their local result never comes
        self.queue: deque = deque()

    def make(self, name: str, record: BallotRecord | None = None) -> Ballot:
        return Ballot(
            me=name,
            electorate=self.names,
            round_=1,
            base_lineage=BASE,
            base_state_hash=STATE,
            timing=TIMING,
            sign_vote=lambda vote: vote.peer.encode(),
            record=record,
        )

    def feed(self, name: str, event) -> list:
        actions = self.ballots[name].handle(self.now, event)
        self.log[name] += actions
        for action in actions:
            match action:
                case Send(to, message):
                    self.queue += [
                        (to_, Received(name, message))
                        for to_ in to
                        if to_ in self.ballots and not {to_, name} & self.cut
                    ]
                case NeedLocalResult() if name not in self.slow:
                    self.queue.append((name, LocalResult(header(name, self.encoding))))
                case StartExchange(roster) if self.encoding is Encoding.SPARSE:
                    self.queue.append((name, Held(tuple(roster.headers))))
        return actions

    def settle(self) -> None:
        while self.queue:
            name, event = self.queue.popleft()
            if name not in self.cut:
                self.feed(name, event)

    def close(self, name: str | None = None) -> None:
        self.feed(name or self.names[0], CloseRound("enough samples"))
        self.settle()

    def wait(self, seconds: float) -> None:
        """Time passes in ticks of a tenth of a second."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += 0.1
            for name in self.ballots:
                if name not in self.cut:
                    self.feed(name, Tick())
            self.settle()

    def of(self, name: str, kind) -> list:
        return [action for action in self.log[name] if isinstance(action, kind)]

    def notes(self, name: str) -> str:
        return "\n".join(note.reason for note in self.of(name, Note))

    def decided(self, name: str) -> Commit | None:
        return self.ballots[name].commit

    def sent(self, name: str, kind) -> list:
        return [action.message for action in self.of(name, Send) if isinstance(action.message, kind)]


# --- a working round --------------------------------------------------------------------------------------------------


def test_a_round_of_four_commits_every_update_in_one_attempt():
    swarm = Swarm(4)
    swarm.close()
    commits = {swarm.decided(name).value for name in swarm.names}
    assert len(commits) == 1
    (value,) = commits
    assert value.roster == tuple(swarm.names) and not value.split and value.previous_state_hash == STATE
    assert [u.dot.peer for u in value.updates] == swarm.names
    assert all(len(swarm.of(name, Decided)) == 1 for name in swarm.names)
    assert all(len(swarm.of(name, NeedLocalResult)) == 1 for name in swarm.names)
    assert all(len(swarm.of(name, StartExchange)) == len(swarm.of(name, StopExchange)) == 1 for name in swarm.names)
    convener = swarm.order[0]
    assert {m.wait for m in swarm.of(convener, Measured)} == {Wait.LOCAL, Wait.JOIN, Wait.EXCHANGE, Wait.VOTE}
    member = swarm.order[1]
    assert {m.wait for m in swarm.of(member, Measured)} == {Wait.LOCAL, Wait.ROSTER, Wait.PROPOSE, Wait.COMMIT}


def test_promise_and_vote_are_persisted_before_they_are_sent():
    swarm = Swarm(3)
    swarm.close()
    for name in swarm.names:
        promised, voted = -1, None
        for action in swarm.log[name]:
            match action:
                case Persist(record):
                    promised, voted = record.promised, record.voted
                case Send(_, Join() as join):
                    assert promised == join.attempt
                case Send(_, Vote() as vote):
                    assert voted is not None and (voted.attempt, voted.value.hash) == (vote.attempt, vote.value_hash)
                case Send(_, Propose() as propose):
                    assert voted is not None and voted.value == propose.value


def test_a_peer_alone_decides_at_once_and_it_is_no_split():
    swarm = Swarm(1)
    swarm.close()
    commit = swarm.decided("p0")
    assert commit is not None and not commit.value.split and not any(v.split for v in commit.votes)
    assert swarm.of("p0", Send) == []


def test_nothing_wakes_a_peer_that_trains_or_has_decided():
    swarm = Swarm(2)
    assert swarm.feed("p0", Tick()) == []
    swarm.close()
    assert not any(isinstance(a, WakeAt) for a in swarm.feed("p0", Tick()))
    assert not swarm.feed("p0", CloseRound("again")) and not swarm.feed("p0", MembersDead(frozenset({"p1"})))


def test_a_second_close_and_a_message_of_another_round_change_nothing():
    swarm = Swarm(3)
    swarm.cut = set(swarm.names[1:])
    swarm.close()
    before = swarm.ballots["p0"].attempt
    swarm.feed("p0", CloseRound("time"))
    assert swarm.ballots["p0"].attempt == before
    stray = Convene(7, BASE, 3, "elsewhere")
    assert not swarm.ballots["p0"].concerns(stray)
    swarm.feed("p0", Received("p1", stray))
    assert "ignored" in swarm.notes("p0") and swarm.ballots["p0"].attempt == before


# --- death, silence, slowness -----------------------------------------------------------------------------------------


def test_a_dead_convener_is_passed_over_at_once():
    swarm = Swarm(3)
    first = swarm.order[0]
    swarm.cut = {first}
    swarm.close(swarm.order[1])
    for name in swarm.order[1:]:
        swarm.feed(name, MembersDead(frozenset({first})))
    swarm.settle()
    commit = swarm.decided(swarm.order[1])
    assert commit is not None and commit.attempt == 1 and not commit.value.split
    assert first not in commit.value.roster


def test_a_silent_convener_is_passed_over_at_its_deadline_and_costs_no_second_one():
    swarm = Swarm(4)
    first = swarm.order[0]
    swarm.cut = {first}
    swarm.close(swarm.order[1])
    swarm.wait(TIMING.roster_s - 0.3)
    assert swarm.decided(swarm.order[1]) is None
    swarm.wait(1.5)
    assert all(swarm.decided(name) is not None for name in swarm.order[1:])


def test_a_silent_member_costs_one_join_deadline():
    swarm = Swarm(4)
    swarm.cut = {swarm.order[2]}
    swarm.close(swarm.order[1])
    swarm.wait(TIMING.join_s - 0.3)
    assert swarm.decided(swarm.order[0]) is None
    swarm.wait(0.6)
    commit = swarm.decided(swarm.order[0])
    assert (
        commit is not None
        and commit.attempt == 0
        and "not waited for longer" in swarm.sent(swarm.order[0], Roster)[0].reason
    )


def test_the_death_of_a_member_ends_the_wait_for_it_at_once():
    swarm = Swarm(4)
    victim = swarm.order[2]
    swarm.cut = {victim}
    swarm.close(swarm.order[1])
    assert swarm.decided(swarm.order[0]) is None
    swarm.feed(swarm.order[0], MembersDead(frozenset({victim})))
    swarm.settle()
    assert swarm.decided(swarm.order[0]) is not None


def test_a_slow_inner_step_is_waited_for_until_its_deadline_then_its_peer_joins_without():
    swarm = Swarm(3)
    slow = swarm.order[1]
    swarm.slow = {slow}
    swarm.close()
    assert swarm.decided(slow) is None
    swarm.wait(TIMING.local_s + 0.2)
    commit = swarm.decided(slow)
    assert commit is not None and slow in commit.value.roster
    assert slow not in {u.dot.peer for u in commit.value.updates}
    assert "joining without" in swarm.notes(slow)


def test_an_update_that_comes_before_the_roster_is_still_taken():
    swarm = Swarm(3)
    slow, other = swarm.order[1], swarm.order[2]
    swarm.slow, swarm.cut = {slow}, {other}
    swarm.close(slow)
    swarm.wait(TIMING.local_s + 0.2)  # joined without, the convener still waits for the third
    swarm.feed(slow, LocalResult(header(slow)))
    swarm.feed(slow, LocalResult(None))
    swarm.settle()
    swarm.wait(TIMING.join_s)
    assert slow in {u.dot.peer for u in swarm.decided(slow).value.updates}


def test_the_death_of_a_member_in_the_exchange_keeps_what_arrived():
    swarm = Swarm(3)
    convener, other, victim = swarm.order
    b = swarm.ballots[convener]
    swarm.feed(convener, CloseRound("time"))
    swarm.feed(convener, LocalResult(header(convener)))
    for name in (other, victim):
        swarm.feed(convener, Received(name, Join(name, 1, BASE, 0, header(name), None, STATE)))
    assert b.phase is Phase.EXCHANGING
    mine, theirs = header(convener).update_hash, header(other).update_hash
    swarm.feed(convener, Held((mine, theirs)))
    swarm.feed(convener, Received(other, Holding(other, 1, BASE, 0, (mine, theirs))))
    assert b.phase is Phase.EXCHANGING  # the victim's update is still awaited
    swarm.feed(convener, MembersDead(frozenset({victim})))
    assert b.phase is Phase.VOTING
    (proposal,) = swarm.sent(convener, Propose)
    assert {u.dot.peer for u in proposal.value.updates} == {convener, other}
    assert victim in proposal.value.roster


def test_when_votes_cannot_reach_a_majority_any_more_the_convener_goes_on():
    swarm = Swarm(3)
    convener, other, victim = swarm.order
    swarm.cut = {other, victim}
    swarm.close(convener)
    for name in (other, victim):
        swarm.feed(convener, Received(name, Join(name, 1, BASE, 0, None, None, STATE)))
    swarm.feed(convener, MembersDead(frozenset({other, victim})))
    swarm.settle()
    commit = swarm.decided(convener)
    assert commit is not None and commit.attempt > 0  # alone, and marked
    assert all(vote.split for vote in commit.votes)


# --- Paxos ------------------------------------------------------------------------------------------------------------


def voted_value(swarm: Swarm, split=False) -> Value:
    mine = header("p0")
    update = CommittedUpdate(mine.dot, mine.update_hash, mine.weight)
    return Value(1, BASE, STATE, (update,), ("p0", "p1"), (), Exchange.RING_SPARSE, split=split)


def test_the_voted_value_of_the_highest_attempt_is_proposed_again():
    swarm = Swarm(3)
    convener, one, two = swarm.order
    old = replace(voted_value(swarm), joiners=("old",))
    new = replace(voted_value(swarm), joiners=("new",))
    swarm.feed(convener, CloseRound("time"))
    swarm.feed(convener, LocalResult(header(convener)))
    for name, vote in ((one, VotedFor(0, old)), (two, VotedFor(2, new))):
        swarm.feed(convener, Received(name, Join(name, 1, BASE, 3, header(name), vote, STATE)))
    assert swarm.ballots[convener].attempt == 3
    roster, proposal = swarm.sent(convener, Roster)[-1], swarm.sent(convener, Propose)[-1]
    assert roster.bound_value == proposal.value == new
    assert roster.exchange is Exchange.NOTHING and not roster.headers and roster.joiners == ("new",)
    assert swarm.of(convener, StartExchange) == []


def test_votes_of_a_split_never_outrank_others():
    swarm = Swarm(3)
    majority, minority = VotedFor(1, voted_value(swarm)), VotedFor(9, voted_value(swarm, split=True), split=True)
    assert binding([None, minority, majority]) == majority
    assert binding([None, minority]) == minority
    assert binding([None]) is None


def test_a_restarted_member_keeps_promise_vote_and_update():
    swarm = Swarm(3)
    member = next(name for name in swarm.names if name not in (swarm.order[0], swarm.order[2]))
    value = voted_value(swarm)
    record = BallotRecord(1, BASE, 2, VotedFor(1, value), None, header(member))
    swarm.ballots[member] = swarm.make(member, record)
    swarm.feed(member, Tick())
    (join,) = swarm.sent(member, Join)
    assert (join.attempt, join.voted, join.header) == (2, VotedFor(1, value), header(member))
    assert not swarm.of(member, NeedLocalResult)
    swarm.feed(member, Received(swarm.order[1 - 1], Convene(1, BASE, 0, "behind")))
    assert swarm.sent(member, Convene)[-1].attempt == 2  # "I am further"
    with pytest.raises(ValueError, match="record of round 1"):
        Ballot(
            me=member,
            electorate=swarm.names,
            round_=2,
            base_lineage=BASE,
            base_state_hash=STATE,
            timing=TIMING,
            sign_vote=lambda vote: b"",
            record=record,
        )


def test_a_restarted_convener_leaves_its_own_attempt():
    swarm = Swarm(3)
    convener = swarm.order[0]
    swarm.ballots[convener] = swarm.make(convener, BallotRecord(1, BASE, 3))
    swarm.feed(convener, Tick())
    assert swarm.ballots[convener].attempt == 4
    assert swarm.of(convener, NeedLocalResult)


def member_in_exchange(n=3, attempt=0, *, split=False, **roster_changes):
    """A member that took a roster; returns (swarm, member, convener, roster)."""
    swarm = Swarm(n)
    convener, member = swarm.order[attempt % n], swarm.order[(attempt + 1) % n]
    peers = swarm.order[:1] if split else swarm.order
    peers = sorted({convener, *peers}) if not split else sorted({convener, member})
    roster = Roster(
        convener,
        1,
        BASE,
        attempt,
        tuple(RosterEntry(p, header(p)) for p in peers),
        (),
        Exchange.RING_SPARSE,
        "joined",
        **roster_changes,
    )
    swarm.cut = set(swarm.names) - {member}
    swarm.feed(member, Received(convener, roster))
    swarm.settle()
    return swarm, member, convener, roster


def proposal_for(swarm: Swarm, roster: Roster, /, **changes) -> Propose:
    holdings = {p: Holding(p, 1, BASE, roster.attempt, tuple(roster.headers)) for p in roster.peers}
    value, _ = make_value(roster, holdings, previous_state_hash=STATE, electorate=swarm.names, dead=())
    assert value is not None
    return Propose(roster.convener, 1, BASE, roster.attempt, replace(value, **changes))


def test_a_member_votes_once_per_attempt_and_repeats_that_vote():
    swarm, member, convener, roster = member_in_exchange()
    good = proposal_for(swarm, roster)
    swarm.feed(member, Received(convener, good))
    swarm.feed(member, Received(convener, good))
    swarm.feed(member, Received(convener, replace(good, value=replace(good.value, joiners=("x",)))))
    votes = swarm.sent(member, Vote)
    assert len(votes) == 2 and votes[0] == votes[1] and votes[0].value_hash == good.value.hash
    assert "another value in this attempt" in swarm.notes(member)
    swarm.feed(member, Received(swarm.order[2], good))  # not the convener's
    assert len(swarm.sent(member, Vote)) == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"previous_state_hash": BASE}, "stands on state"),
        ({"updates": (CommittedUpdate(Dot("p0", 1, 2), STATE, 5),)}, "the roster does not"),
        (
            {"updates": (replace(CommittedUpdate(Dot("p0", 1, 1), header("p0").update_hash, 5), weight=6),)},
            "the roster does not",
        ),
        ({"roster": ("p0",)}, "other members"),
        ({"joiners": ("x",)}, "other members"),
        ({"exchange": Exchange.RING_DENSE}, "says RING_DENSE"),
        ({"exchange": Exchange.NOTHING}, "says NOTHING"),
        ({"split": True}, "split=True"),
    ],
)
def test_what_a_member_does_not_vote_for(changes, why):
    swarm, member, convener, roster = member_in_exchange()
    swarm.feed(member, Received(convener, proposal_for(swarm, roster, **changes)))
    assert why in swarm.notes(member) and not swarm.sent(member, Vote)


def test_a_bound_value_is_voted_for_whoever_is_on_the_roster():
    swarm = Swarm(3)
    bound = voted_value(swarm)
    swarm, member, convener, roster = member_in_exchange(bound_value=bound)
    swarm.feed(member, Received(convener, replace(proposal_for(swarm, roster), value=replace(bound, joiners=("x",)))))
    assert "bound value" in swarm.notes(member)
    swarm.feed(member, Received(convener, proposal_for(swarm, roster)))
    assert swarm.sent(member, Vote)[0].value_hash == bound.hash


def test_a_roster_that_ignores_a_reported_vote_gets_no_vote():
    _, member, _, roster = member_in_exchange()
    swarm = Swarm(3)
    cast = VotedFor(0, voted_value(swarm))
    value = proposal_for(swarm, roster).value
    arguments = {"me": member, "previous_state_hash": STATE, "electorate": swarm.names}
    assert "ignores my vote" in str(refuse_value(value, roster, binds_me=cast, **arguments))
    assert refuse_value(value, roster, binds_me=None, **arguments) is None
    dense = replace(roster, exchange=Exchange.RING_DENSE)
    partial = replace(value, exchange=Exchange.RING_DENSE, updates=value.updates[:1], ring=roster.peers)
    assert "dense" in str(refuse_value(partial, dense, binds_me=None, **arguments))


def test_rosters_of_the_wrong_peer_or_with_strangers_are_ignored():
    swarm, member, convener, roster = member_in_exchange()
    other = next(p for p in swarm.order if p not in (member, convener))
    swarm.feed(member, Received(other, replace(roster, convener=other)))
    assert "does not convene" in swarm.notes(member)
    swarm.feed(member, Received(convener, replace(roster, entries=(*roster.entries, RosterEntry("x", None)))))
    assert "strangers" in swarm.notes(member)
    swarm.feed(member, Received(convener, replace(roster, reason="another")))
    assert "second roster" in swarm.notes(member)
    assert len(swarm.of(member, StartExchange)) == 1


def test_a_roster_with_a_majority_pulls_a_member_to_a_higher_attempt():
    swarm, member, convener, roster = member_in_exchange()
    ahead = swarm.order[2]
    higher = replace(roster, convener=ahead, attempt=2)
    swarm.feed(member, Received(ahead, higher))
    assert swarm.ballots[member].attempt == 2 and swarm.ballots[member].phase is Phase.EXCHANGING
    assert len(swarm.of(member, StartExchange)) == 2 and len(swarm.of(member, StopExchange)) == 1


def test_one_fast_clock_does_not_break_an_attempt_that_works():
    swarm = Swarm(4)
    convener, member, fast = swarm.order[:3]
    swarm.cut = {convener, fast, swarm.order[3]}
    swarm.close(member)
    swarm.feed(member, Received(fast, Convene(1, BASE, 2, "impatient")))
    assert swarm.ballots[member].attempt == 0
    swarm.feed(member, Received(swarm.order[3], Convene(1, BASE, 2, "impatient")))
    assert swarm.ballots[member].attempt == 2  # two of four are gone: no majority is left below


def test_a_member_follows_when_the_convener_itself_has_left():
    swarm = Swarm(5)
    convener, member = swarm.order[:2]
    swarm.cut = set(swarm.names) - {member}
    swarm.close(member)
    swarm.feed(member, Received(convener, Convene(1, BASE, 6, "gave up")))
    assert swarm.ballots[member].attempt == 6 and swarm.ballots[member].convener == member


# --- repeats and stragglers -------------------------------------------------------------------------------------------


def test_lost_messages_are_mended_by_repeats():
    swarm = Swarm(3)
    convener, one, two = swarm.order
    lossy = {Join: 1, Roster: 2, Propose: 2, Vote: 2, Commit: 4}

    deliver = swarm.feed

    def feed(name, event):
        kind = type(event.message) if isinstance(event, Received) else None
        if kind in lossy and lossy[kind] > 0:
            lossy[kind] -= 1
            return []
        return deliver(name, event)

    swarm.feed = feed  # type: ignore[method-assign]
    swarm.close(one)
    swarm.wait(6.0)
    assert all(swarm.decided(name) is not None for name in swarm.names)
    assert len({swarm.decided(name).value for name in swarm.names}) == 1
    assert not any(lossy.values())


def test_a_late_member_gets_the_roster_and_may_vote():
    swarm = Swarm(5)
    convener, late = swarm.order[0], swarm.order[4]
    swarm.cut = {late}
    swarm.feed(convener, CloseRound("time"))
    for name in swarm.order[1:4]:
        swarm.feed(convener, Received(name, Join(name, 1, BASE, 0, None, None, STATE)))
    swarm.feed(convener, LocalResult(header(convener)))
    swarm.now += TIMING.join_s
    swarm.feed(convener, Tick())
    assert swarm.ballots[convener].roster is not None
    swarm.log[convener].clear()
    swarm.feed(convener, Received(late, Join(late, 1, BASE, 0, None, None, STATE)))
    assert swarm.sent(convener, Roster)
    assert any(m.wait is Wait.JOIN for m in swarm.of(convener, Measured))


def test_a_decided_peer_answers_stragglers_but_not_a_flood():
    swarm = Swarm(3)
    swarm.close()
    name, asking = swarm.order[0], swarm.order[2]
    swarm.log[name].clear()
    swarm.now += TIMING.retry_s
    for _ in range(10):
        swarm.feed(name, Received(asking, Convene(1, BASE, 4, "what happened?")))
    swarm.feed(name, Received(asking, swarm.decided(name)))
    assert len(swarm.sent(name, Commit)) == 1
    swarm.now += TIMING.retry_s
    swarm.feed(name, Received(asking, Convene(1, BASE, 4, "what happened?")))
    assert len(swarm.sent(name, Commit)) == 2
    for i in range(2000):  # strangers do not make the memory grow
        swarm.feed(name, Received(f"stranger {i}", Convene(1, BASE, 4, "?")))
    assert len(swarm.ballots[name]._answered) <= 512


def test_a_commit_is_taken_in_any_phase_and_passed_on():
    swarm = Swarm(5)
    swarm.close()
    commit = swarm.decided("p0")
    fresh = Swarm(5)
    fresh.feed("p1", Received("p0", replace(commit, votes=commit.votes[:1])))
    assert "commit refused" in fresh.notes("p1")
    fresh.feed("p1", Received("p0", commit))
    (send,) = [a for a in fresh.of("p1", Send) if isinstance(a.message, Commit)]
    assert 1 <= len(send.to) <= 2 and not set(send.to) & {"p0", "p1"}


# --- split ------------------------------------------------------------------------------------------------------------


def test_of_two_the_survivor_goes_on_alone_marked():
    swarm = Swarm(2)
    alive, dead = "p0", "p1"
    swarm.cut = {dead}
    swarm.close(alive)
    assert swarm.decided(alive) is None
    swarm.feed(alive, MembersDead(frozenset({dead})))
    swarm.settle()
    commit = swarm.decided(alive)
    assert commit is not None and commit.value.split and commit.value.roster == (alive,)


def test_who_sees_most_alive_does_not_vote_in_a_split():
    assert may_split("abcd", "cd") and may_split("ab", "b") and not may_split("abc", "a") and not may_split("a", "")
    swarm, member, convener, roster = member_in_exchange(n=5)
    few = replace(
        roster, entries=roster.entries[:0] + tuple(RosterEntry(p, header(p)) for p in sorted((convener, member)))
    )
    swarm = Swarm(5)
    swarm.cut = set(swarm.names) - {member}
    swarm.feed(member, Received(convener, few))
    swarm.feed(member, Received(convener, proposal_for(swarm, few)))
    assert "I see most alive" in swarm.notes(member) and not swarm.sent(member, Vote)
    swarm.feed(member, MembersDead(frozenset(set(swarm.names) - {member, convener})))
    swarm.feed(member, Received(convener, proposal_for(swarm, few)))
    (vote,) = swarm.sent(member, Vote)
    assert vote.split


def split_commit(swarm: Swarm, signer: str) -> Commit:
    value = Value(1, BASE, STATE, (), (signer,), (), Exchange.NOTHING, split=True)
    return Commit(1, value, (Vote(signer, 1, BASE, 1, value.hash, True, b"signed"),))


def test_a_split_commit_is_held_back_while_a_majority_may_decide_otherwise():
    swarm = Swarm(5)
    me, signer, *others = swarm.names
    swarm.cut = set(swarm.names) - {me}
    commit = split_commit(swarm, signer)
    swarm.feed(me, Received(signer, commit))
    assert swarm.decided(me) is None
    for other in others[:1]:
        swarm.feed(me, Received(other, commit))  # it has taken it
    assert swarm.decided(me) == commit
    arguments = {"me": me, "electorate": swarm.names, "gone": (), "decided": ()}
    assert not may_accept_split(commit, votes=[voted_value(swarm)], **arguments)
    assert may_accept_split(commit, votes=[voted_value(swarm)], **(arguments | {"gone": others}))


def test_a_convener_that_has_taken_a_split_commit_is_not_waited_for():
    swarm = Swarm(5)
    convener, me = swarm.order[:2]
    swarm.cut = set(swarm.names) - {me}
    swarm.close(me)
    swarm.feed(me, Received(convener, split_commit(swarm, convener)))
    assert swarm.decided(me) is None and swarm.ballots[me].attempt == 1
    assert "taken a split's commit" in swarm.notes(me)


def test_the_value_of_a_split_is_preferred_when_nothing_binds():
    swarm = Swarm(5)
    convener, signer, *others = swarm.order
    swarm.cut = set(swarm.names) - {convener}
    commit = split_commit(swarm, signer)
    swarm.feed(convener, CloseRound("time"))
    swarm.feed(convener, LocalResult(header(convener)))
    swarm.feed(convener, Received(signer, commit))
    for other in others:
        swarm.feed(convener, Received(other, Join(other, 1, BASE, 0, None, None, STATE)))
    swarm.now += TIMING.join_s
    swarm.feed(convener, Tick())
    roster = swarm.sent(convener, Roster)[-1]
    assert roster.bound_value == commit.value and "committed by a split" in roster.reason


def test_split_commits_without_end_are_not_kept():
    swarm = Swarm(7)
    me = swarm.names[0]
    swarm.cut = set(swarm.names) - {me}
    for i in range(20):
        commit = split_commit(swarm, swarm.names[1])
        value = replace(commit.value, previous_state_hash=sha256(bytes([i])))
        votes = tuple(replace(v, value_hash=value.hash) for v in commit.votes)
        swarm.feed(me, Received(swarm.names[1], replace(commit, value=value, votes=votes)))
    assert len(swarm.ballots[me]._splits) == 8 and "too many split" in swarm.notes(me)


# --- observers --------------------------------------------------------------------------------------------------------


def test_an_observer_is_named_and_learns_the_commit():
    swarm = Swarm(3, observers=("new",))
    swarm.feed("new", Tick())
    swarm.settle()
    swarm.close()
    commit = swarm.decided("new")
    assert commit is not None and commit.value.joiners == ("new",) and "new" not in commit.signers
    assert commit == swarm.decided("p0")


def test_an_observer_neither_closes_votes_nor_counts():
    swarm = Swarm(3, observers=("new",))
    swarm.feed("new", Tick())
    swarm.settle()
    assert all(swarm.ballots[name].phase is Phase.TRAINING for name in swarm.names)
    swarm.feed("new", CloseRound("time"))
    swarm.feed("new", LocalResult(header("new")))
    swarm.feed("new", Received("p0", Convene(1, BASE, 4, "time")))
    swarm.now += TIMING.retry_s
    swarm.feed("new", Tick())
    assert [join.attempt for join in swarm.sent("new", Join)] == [0, 4]
    assert swarm.ballots["new"].phase is Phase.TRAINING and swarm.ballots["new"].observing


def test_observers_that_died_went_quiet_or_stand_elsewhere_are_not_named():
    swarm = Swarm(1)
    ask = Join("x", 1, BASE, 0, None, None, STATE, observer=True)
    swarm.feed("p0", Received("quiet", replace(ask, peer="quiet")))
    swarm.now += 60.0
    swarm.feed("p0", Received("dead", replace(ask, peer="dead")))
    swarm.feed("p0", MembersDead(frozenset({"dead"})))
    swarm.feed("p0", Received("astray", replace(ask, peer="astray", state_hash=BASE)))
    swarm.feed("p0", Received("good", replace(ask, peer="good")))
    for i in range(300):
        swarm.feed("p0", Received(f"y{i}", replace(ask, peer=f"y{i}")))
    swarm.close()
    joiners = swarm.decided("p0").value.joiners
    assert "good" in joiners and not {"quiet", "dead", "astray"} & set(joiners)
    assert len(joiners) + 1 <= 256


@pytest.mark.parametrize(("size", "here", "near", "named"), [(1, 0, 3, 1), (3, 0, 5, 2), (3, 1, 5, 2), (5, 5, 5, 5)])
def test_of_newcomers_a_moment_behind_only_so_many_are_named_that_the_next_round_needs_none(size, here, near, named):
    swarm = Swarm(size)
    for name in swarm.names:
        for i in range(here):
            ask = Join(f"h{i}", 1, BASE, 0, None, None, STATE, observer=True)
            swarm.feed(name, Received(f"h{i}", ask))
        for i in range(near):
            swarm.feed(name, Newcomer(f"n{i}"))
        swarm.feed(name, Newcomer("p0"))  # a member needs no letting in
    swarm.close()
    joiners = swarm.decided("p0").value.joiners
    assert len(joiners) == named
    assert {f"h{i}" for i in range(here)} <= set(joiners)


def test_who_is_not_ready_is_not_named():
    ballot = Ballot(
        me="p0", electorate=["p0"], round_=1, base_lineage=BASE, base_state_hash=STATE, timing=TIMING,
        sign_vote=lambda vote: b"signed", unready={"late"},
    )  # fmt: skip
    actions = []
    for event in (Tick(), Newcomer("late"), Newcomer("good"), CloseRound("time"), LocalResult(None)):
        actions += ballot.handle(100.0, event)
    (decided,) = [action for action in actions if isinstance(action, Decided)]
    assert decided.commit.value.joiners == ("good",)


def test_strangers_and_members_that_ask_to_observe_are_ignored():
    swarm = Swarm(3)
    swarm.feed("p0", Received("stranger", Convene(1, BASE, 9, "hello")))
    swarm.feed("p0", Received("p1", Join("p1", 1, BASE, 9, None, None, STATE, observer=True)))
    assert swarm.ballots["p0"].phase is Phase.TRAINING
    assert "stranger" in swarm.notes("p0") and "may vote" in swarm.notes("p0")


# --- dense ------------------------------------------------------------------------------------------------------------


def dense_attempt():
    swarm = Swarm(3, encoding=Encoding.DENSE)
    swarm.close()
    convener = swarm.order[0]
    assert swarm.ballots[convener].roster.exchange is Exchange.RING_DENSE
    return swarm, convener


CHUNKS = tuple(sha256(bytes([i])) for i in range(3))


def test_a_dense_round_commits_the_chunks_that_most_agree_on():
    swarm, convener = dense_attempt()
    for name in swarm.order:
        swarm.feed(name, Held((), CHUNKS))
        swarm.settle()
    value = swarm.decided(convener).value
    assert value.chunk_hashes == CHUNKS and value.ring == swarm.ballots[convener].roster.peers
    assert [u.dot.peer for u in value.updates] == swarm.names


def test_a_dense_attempt_that_loses_a_member_restarts_whole_and_at_once():
    swarm, convener = dense_attempt()
    victim = swarm.order[2]
    swarm.cut = {victim}
    for name in swarm.order[:2]:
        swarm.feed(name, MembersDead(frozenset({victim})))
    swarm.settle()
    ballot = swarm.ballots[convener]
    assert ballot.attempt == 1 and ballot.roster is not None
    assert victim not in ballot.roster.peers and ballot.roster.exchange is Exchange.RING_DENSE


def test_a_failed_exchange_moves_its_member_on_but_an_old_failure_does_not():
    swarm, convener = dense_attempt()
    swarm.feed(convener, ExchangeFailed(7, "old news"))
    assert swarm.ballots[convener].attempt == 0
    swarm.feed(convener, ExchangeFailed(0, "a partial sum is lost"))
    assert swarm.ballots[convener].attempt == 1


def test_an_exchange_that_never_delivers_ends_in_an_empty_step():
    swarm = Swarm(3)
    roster = Roster(
        "p0", 1, BASE, 0, tuple(RosterEntry(p, header(p)) for p in swarm.names), (), Exchange.RING_SPARSE, ""
    )
    holdings = {p: Holding(p, 1, BASE, 0, (header(p).update_hash,)) for p in swarm.names}
    arguments = {"previous_state_hash": STATE, "electorate": swarm.names, "dead": ()}
    value, why = make_value(roster, holdings, **arguments)
    assert value is None and why.startswith("0 of 3")
    value, why = make_value(replace(roster, attempt=EMPTY_STEP_FROM_ATTEMPT), holdings, **arguments)
    assert value is not None and value.exchange is Exchange.NOTHING and "empty step" in why
    # p2 is dead and nobody else has its update: not awaited.
    assert still_missing(roster, holdings, ("p0", "p1"), {"p2"}) == {"p0": 1, "p1": 1}


def test_the_exchange_follows_the_encoding_of_most_updates():
    sparse, dense = header("a"), header("b", Encoding.DENSE)
    assert choose_exchange([], 3)[0] is Exchange.NOTHING
    assert choose_exchange([sparse, dense], 3)[0] is Exchange.RING_SPARSE
    assert choose_exchange([sparse, dense, replace(dense, signed=b"c")], 3)[0] is Exchange.RING_DENSE


def test_a_member_on_another_state_counts_but_contributes_nothing():
    swarm = Swarm(3)
    convener, astray, other = swarm.order
    swarm.feed(convener, CloseRound("time"))
    swarm.feed(convener, LocalResult(header(convener)))
    swarm.feed(convener, Received(astray, Join(astray, 1, BASE, 0, header(astray), None, BASE)))
    swarm.feed(convener, Received(other, Join(other, 1, BASE, 0, header(other), None, STATE)))
    roster = swarm.sent(convener, Roster)[0]
    assert astray in roster.peers and astray not in {h.dot.peer for h in roster.headers.values()}
    assert "state hashes differ" in swarm.notes(convener)


def test_a_lone_convener_that_cannot_propose_does_not_spin():
    swarm = Swarm(1)
    wrong = replace(voted_value(swarm), previous_state_hash=BASE)
    swarm.ballots["p0"] = swarm.make("p0", BallotRecord(1, BASE, 0, VotedFor(0, wrong), None, header("p0")))
    swarm.wait(2.0)
    assert swarm.decided("p0") is None
    assert 2 <= swarm.ballots["p0"].attempt <= 10
    assert "stands on state" in swarm.notes("p0")


def test_a_vote_for_something_else_does_not_count():
    swarm = Swarm(3)
    convener, one, two = swarm.order
    swarm.cut = {one, two}
    swarm.close(convener)
    for name in (one, two):
        swarm.feed(convener, Received(name, Join(name, 1, BASE, 0, None, None, STATE)))
    hashes = swarm.ballots[convener].roster.headers
    for name in (one, two):
        swarm.feed(convener, Received(name, Holding(name, 1, BASE, 0, tuple(hashes))))
    (proposal,) = swarm.sent(convener, Propose)
    swarm.feed(convener, Received(one, Vote(one, 1, BASE, 0, STATE)))
    swarm.feed(convener, Received(one, Vote(one, 1, BASE, 0, proposal.value.hash, split=True)))
    assert swarm.decided(convener) is None and "something else" in swarm.notes(convener)
    swarm.feed(convener, Received(one, Vote(one, 1, BASE, 0, proposal.value.hash)))
    assert swarm.decided(convener).signers == {convener, one}
