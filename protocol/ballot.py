"""The round's decree as a pure state machine: promise, propose, vote, commit. No I/O, no clock, no randomness.

Covers one round of one peer. Does not cover: training, moving updates, signatures and limits of messages (ballot_wire.py),
the chain of commits (commit.py), how long to wait (deadlines.py), the single decisions as pure functions (ballot_rules.py).

Theory of operation
-------------------
One `Ballot` is one decree of single-decree Paxos among the electorate; attempts are ballot numbers, and attempt a belongs
to `order[a mod n]`, its convener. `handle(now, event)` returns actions, to be carried out in order:

    phase        entered by                            what is sent, and repeated every retry_s        left when
    TRAINING     construction                          -                                               round closes, here or anywhere
    CONVENING    a new attempt (promise persisted)     Join to the convener / Convene by it            roster / join deadline
    EXCHANGING   the roster                            Holding to the convener / Roster by it          proposal / exchange deadline
    VOTING       own vote (persisted)                  Vote to the convener / Roster, Propose by it    commit / vote deadline
    DECIDED      a commit, from anywhere, at any time  Commit to whoever still asks                    never

Next attempt. A phase deadline passes, the convener is known dead, or the attempt cannot get a majority any more: the member
goes to the next attempt whose convener is neither dead nor was found silent, and tells everybody (Convene). Others follow
it at once only if their own attempt is lost anyway: its convener has left it, or too many are dead, silent or ahead for a majority,
or a roster with a majority on it proves the higher attempt. So one fast clock cannot break an attempt that works, and
peers whose attempts cannot work meet in the highest one. Waits grow with the attempt until they overlap long enough.

The silent. Whoever let a deadline pass is not waited for again in this round until it speaks, so one mute peer costs one
phase deadline and no more.

What is durable. `Persist` comes before any message that reveals the promise or the vote. A convener votes for its own
proposal, durably, before sending it, and after a restart never continues an attempt of its own: no attempt ever has two
rosters or two proposals.

Split. When half or more of the electorate is dead in the convener's view it may go on with joins and votes of more than
half of the others; a roster of half of the electorate or less marks the attempt as split to everybody, members vote
in it only if they see the same deaths, and such votes are kept apart from others (ballot_rules.binding). So a split can
disagree with a majority but never makes two majorities disagree. A split commit that reaches a peer which might still
be part of a deciding majority is held back until that majority has let a deadline pass, and its value preferred when
nothing binds.

Observers (not in the electorate) show themselves to all members until they see the commit; a convener names those it
heard of lately as joiners. They are never counted and never waited for.

For the driver
--------------
* Start: `Ballot(...)`, then `Tick`. With a record of this round it resumes where its promises require.
* `Persist` replaces the previous record. Before the next round's first record, the state after this commit must be durable.
* `NeedLocalResult` comes once; answer with `LocalResult` as soon as the inner step ends and the journal has the update (or
  with None). It is not waited for longer than `timing.local_s`; an update that comes too late for the roster serves a later
  attempt or goes back to the residual.
* `StartExchange` / `StopExchange` alternate. Report `Held` at every change (the own update is added here).
* Keep the decided ballot for messages of its round until the next one is decided: it answers stragglers.
* Messages of other rounds or lineages are noted and ignored; route them first (`concerns`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from . import limits
from .ballot_events import (
    Action,
    CloseRound,
    Decided,
    Event,
    ExchangeFailed,
    Held,
    LocalResult,
    Measured,
    MembersDead,
    NeedLocalResult,
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
from .ballot_messages import (
    Commit,
    Convene,
    Exchange,
    Header,
    Holding,
    Join,
    Message,
    Propose,
    Roster,
    Value,
    Vote,
    VotedFor,
)
from .ballot_record import BallotRecord
from .ballot_rules import (
    ChooseExchange,
    binding,
    check_commit,
    choose_exchange,
    convener_order,
    is_majority,
    is_split_roster,
    make_roster,
    make_value,
    may_accept_split,
    may_split,
    refuse_value,
    still_missing,
)
from .deadlines import Timing, Wait
from .errors import PeerFault

__all__ = [
    "Action",
    "Ballot",
    "BallotRecord",
    "CloseRound",
    "Decided",
    "Event",
    "ExchangeFailed",
    "Held",
    "LocalResult",
    "Measured",
    "MembersDead",
    "NeedLocalResult",
    "Note",
    "Persist",
    "Phase",
    "Received",
    "Send",
    "StartExchange",
    "StopExchange",
    "Tick",
    "WakeAt",
]

# Split commits held back at once. Each needs a split of its own; more than a few mean a broken network.
_SPLITS_KEPT = 8


class Ballot:
    """One peer's part in one round. See the module's docstring.

    Args:
        me: this peer. Outside `electorate` it is an observer.
        electorate: who may vote: `electorate_after(previous value)`.
        round_, base_lineage, base_state_hash: the round, and the state that it starts from.
        timing: waits of this round.
        sign_vote: the exact bytes of the signed vote (deterministic, so that repeats are equal).
        record: what was last persisted for this round and lineage, if anything.
        choose: which exchange the roster's updates get.
        dead: membership's view at the start.
    """

    def __init__(
        self,
        *,
        me: str,
        electorate: Collection[str],
        round_: int,
        base_lineage: bytes,
        base_state_hash: bytes,
        timing: Timing,
        sign_vote: Callable[[Vote], bytes],
        record: BallotRecord | None = None,
        choose: ChooseExchange = choose_exchange,
        dead: Collection[str] = (),
    ) -> None:
        if record is not None and not record.concerns(round_, base_lineage):
            raise ValueError(f"record of round {record.round} given to round {round_}, or of another lineage")
        self.me = me
        self.electorate = frozenset(electorate)
        self.order = convener_order(electorate, base_lineage, round_)
        self.round = round_
        self.base_lineage = base_lineage
        self.base_state_hash = base_state_hash
        self.timing = timing
        self.phase = Phase.TRAINING
        self.attempt = -1
        self.roster: Roster | None = None
        self.commit: Commit | None = None
        self._sign_vote = sign_vote
        self._choose = choose
        self._record = record or BallotRecord(round_, base_lineage)
        self._others = tuple(p for p in self.order if p != me)
        self._started = False
        self._now = 0.0
        self._out: list[Action] = []
        # What this peer knows of the others.
        self._dead = frozenset(dead) - {me}
        self._silent: set[str] = set()
        self._seen: dict[str, int] = {}  # highest attempt heard of, by member
        self._joins: dict[str, Join] = {}  # latest, of the current attempt or a later one
        self._observers: dict[str, tuple[Join, float]] = {}
        self._splits: dict[bytes, tuple[Commit, set[str]]] = {}  # held-back split commits, with who has decided so
        self._answered: dict[str, float] = {}  # DECIDED: when a straggler was last answered
        # What this peer has.
        self._header = self._record.header
        self._local_done = self._header is not None
        self._local_due: float | None = None  # join without an own update from then on
        self._local_late = False  # that time has come
        self._closed_at = 0.0
        self._held: tuple[bytes, ...] = ()
        self._chunks: tuple[bytes, ...] = ()
        # The current attempt.
        self._entered_at = self._since = 0.0  # when the attempt and its current phase began
        self._pause_until = 0.0  # no roster before: keeps a lone convener that cannot propose from spinning
        self._deadline: float | None = None
        self._retry_at: float | None = None
        self._exchanging = False
        self._holdings: dict[str, Holding] = {}
        self._proposal: Value | None = None  # convener: proposed; member: voted for
        self._votes: dict[str, Vote] = {}

    # ------------------------------------------------------------------------------------------------ outside

    @property
    def observing(self) -> bool:
        return self.me not in self.electorate

    @property
    def convener(self) -> str | None:
        """Of the current attempt."""
        return self.order[self.attempt % len(self.order)] if self.attempt >= 0 else None

    def concerns(self, message: Message) -> bool:
        return (message.round, message.base_lineage) == (self.round, self.base_lineage)

    def handle(self, now: float, event: Event) -> list[Action]:
        """Take in one event at time `now` (seconds, monotonic). Never raises for what peers do."""
        self._out, self._now = [], now
        if not self._started:
            self._started = True
            self._start()
        if self._local_due is not None and now >= self._local_due and not self._ready():
            self._local_late = True
            self._note(f"no own update after {self.timing.local_s:.3g} s: joining without")
            self._join()
        match event:
            case Received(peer, message):
                self._on_message(peer, message)
            case _ if self.phase is Phase.DECIDED:
                pass
            case CloseRound(reason):
                self._close(reason)
            case LocalResult(header):
                self._on_local(header)
            case Held(updates, chunks):
                self._on_held(updates, chunks)
            case MembersDead(dead):
                self._on_dead(dead)
            case ExchangeFailed(attempt, reason):
                if attempt == self.attempt and self.phase is Phase.EXCHANGING:
                    self._next_attempt(f"exchange failed: {reason}")
            case Tick():
                pass
        self._settle()
        self._expire()
        self._repeat()
        if (wake := self._wake()) is not None:
            self._out.append(WakeAt(wake))
        return self._out

    # ------------------------------------------------------------------------------------------------ events

    def _start(self) -> None:
        if self.observing:
            self._show()
        elif self._record.promised >= 0:
            # Closed before the restart. An attempt of our own is not continued: what it sent out is forgotten.
            self._closed_locally("restarted in an open round")
            self.attempt = self._record.promised
            if self.convener == self.me:
                self._next_attempt("restarted in an attempt of its own")
            else:
                self._enter(self.attempt, "restarted")

    def _close(self, reason: str) -> None:
        if self.phase is not Phase.TRAINING or self.observing:
            return
        self._closed_locally(reason)
        if self._seen:
            self._enter(max(self._seen.values()), reason)
        else:
            self._next_attempt(reason)

    def _closed_locally(self, reason: str) -> None:
        self._closed_at = self._now
        self._local_due = self._now + self.timing.local_s
        if not self._local_done:
            self._out.append(NeedLocalResult(reason))

    def _on_local(self, header: Header | None) -> None:
        if self.observing:
            return
        if self._local_due is not None and not self._local_done:
            self._out.append(Measured(Wait.LOCAL, self._now - self._closed_at))
        self._local_done, self._header = True, header or self._header
        self._join()

    def _on_held(self, updates: tuple[bytes, ...], chunks: tuple[bytes, ...]) -> None:
        if (updates, chunks) != (self._held, self._chunks):
            self._held, self._chunks = updates, chunks
            if self.phase in (Phase.EXCHANGING, Phase.VOTING):
                self._hold()

    def _on_dead(self, dead: frozenset[str]) -> None:
        self._dead = dead - {self.me}
        for peer in self._dead & self._observers.keys():
            del self._observers[peer]
        if self.convener in self._dead and not self.observing:
            self._next_attempt("the convener is dead")

    # ------------------------------------------------------------------------------------------------ messages

    def _on_message(self, peer: str, message: Message) -> None:
        if not self.concerns(message):
            return self._note(f"{type(message).__name__} of round {message.round} ignored, this is {self.round}")
        if self.phase is Phase.DECIDED:
            if not isinstance(message, Commit):
                self._answer(peer)
            return None
        if isinstance(message, Commit):
            return self._on_commit(peer, message)
        if peer not in self.electorate:
            if isinstance(message, Join) and message.observer and not self.observing:
                if peer in self._observers or len(self._observers) < limits.ROSTER_MAX:
                    self._observers[peer] = (message, self._now)
                return None
            return self._note(f"{type(message).__name__} of a stranger ignored")
        if isinstance(message, Join) and message.observer:
            return self._note("a member asks to observe: ignored, it may vote")
        self._seen[peer] = max(self._seen.get(peer, 0), message.attempt)
        self._silent.discard(peer)
        if self.observing:
            return None
        self._close(f"closed by another member ({type(message).__name__} of attempt {message.attempt})")
        if message.attempt < self.attempt:
            self._send((peer,), self._convene("already at a higher attempt"))
            return None
        match message:
            case Join():
                self._on_join(peer, message)
            case Roster():
                self._on_roster(peer, message)
            case Propose():
                self._on_propose(peer, message)
            case Holding():
                if self._convening_in(message.attempt) and self.roster is not None:
                    self._holdings[peer] = message
                    if not still_missing(self.roster, self._holdings, (peer,), self._dead):
                        self._measure(Wait.EXCHANGE, Phase.EXCHANGING)
            case Vote():
                self._on_vote(peer, message)
            case Convene():
                if peer == self.convener and message.attempt == self.attempt and self.phase is Phase.CONVENING:
                    self._join()
        return None

    def _convening_in(self, attempt: int) -> bool:
        return attempt == self.attempt and self.convener == self.me

    def _on_join(self, peer: str, join: Join) -> None:
        known = self._joins.get(peer)
        if known is None or join.attempt > known.attempt or (join.attempt == known.attempt and known.header is None):
            self._joins[peer] = join
            if self._convening_in(join.attempt) and join.state_hash != self.base_state_hash:
                self._note(
                    f"state hashes differ: {peer} has {join.state_hash.hex()[:16]}, {self.base_state_hash.hex()[:16]} here"
                )
        if self._convening_in(join.attempt):
            if known is None or known.attempt < join.attempt:
                self._out.append(Measured(Wait.JOIN, self._now - self._entered_at))
            if self.roster is not None:  # late, or it lost the roster
                self._send((peer,), self.roster)

    def _on_roster(self, peer: str, roster: Roster) -> None:
        peers = set(roster.peers)
        if peer != roster.convener or peer != self.order[roster.attempt % len(self.order)]:
            return self._note("roster of somebody who does not convene that attempt: ignored")
        if len(peers) != len(roster.peers) or not peers <= self.electorate or peer not in peers:
            return self._note("roster with strangers, repeats, or without its convener: ignored")
        for member in peers - {self.me}:
            self._seen[member] = max(self._seen.get(member, 0), roster.attempt)
        if roster.attempt > self.attempt and not is_split_roster(roster, self.electorate):
            self._enter(roster.attempt, "a majority is on its roster")
        else:
            self._follow()
        if roster.attempt != self.attempt:
            return None
        if self.roster is None:
            self._take(roster)
        elif roster != self.roster:
            return self._note("a second roster in one attempt: ignored")
        if self.phase is Phase.EXCHANGING:
            self._hold()
        return None

    def _on_propose(self, peer: str, propose: Propose) -> None:
        if propose.attempt != self.attempt or peer != propose.convener or peer != self.convener or self.roster is None:
            return  # its convener repeats roster and proposal until it has the vote
        why = self._refuse(propose.value)
        if why is not None:
            return self._note(f"no vote in attempt {self.attempt}: {why}")
        if self.phase is Phase.EXCHANGING:
            self._measure(Wait.PROPOSE, Phase.EXCHANGING)
            self._begin(Phase.VOTING, Wait.COMMIT)
        self._proposal = propose.value
        self._send((peer,), self._vote(propose.value))

    def _refuse(self, value: Value) -> str | None:
        assert self.roster is not None
        cast = [vote for vote in (self._record.voted, self._record.voted_split) if vote is not None]
        here = [vote for vote in cast if vote.attempt == self.attempt]
        if here:
            return None if here[0].value == value else "voted for another value in this attempt"
        if is_split_roster(self.roster, self.electorate) and not may_split(self.electorate, self._dead):
            return f"its roster has {len(self.roster.entries)} of {len(self.electorate)}, and I see most alive"
        return refuse_value(
            value,
            self.roster,
            me=self.me,
            previous_state_hash=self.base_state_hash,
            electorate=self.electorate,
            binds_me=self._reported(),
        )

    def _vote(self, value: Value) -> Vote:
        """Cast (durably) or repeat the vote of this attempt."""
        assert self.roster is not None
        split = is_split_roster(self.roster, self.electorate)
        cast = VotedFor(self.attempt, value, split)
        self._persist(replace(self._record, voted_split=cast) if split else replace(self._record, voted=cast))
        vote = Vote(self.me, self.round, self.base_lineage, self.attempt, value.hash, split)
        return replace(vote, signed=self._sign_vote(vote))

    def _on_vote(self, peer: str, vote: Vote) -> None:
        if not self._convening_in(vote.attempt) or self._proposal is None or self.roster is None:
            return
        if vote.value_hash != self._proposal.hash or vote.split != is_split_roster(self.roster, self.electorate):
            return self._note("a vote for something else: ignored")
        if peer not in self._votes:
            self._measure(Wait.VOTE, Phase.VOTING)
        self._votes[peer] = vote

    def _on_commit(self, peer: str, commit: Commit) -> None:
        try:
            checked = check_commit(commit, self.electorate, self.round, self.base_lineage)
        except PeerFault as fault:
            return self._note(f"commit refused: {fault}")
        if not checked.split:
            return self._decide(commit, "a majority voted for it", passed_by=peer)
        if checked.value_hash not in self._splits and len(self._splits) >= _SPLITS_KEPT:
            return self._note("too many split commits: ignored")
        self._splits.setdefault(checked.value_hash, (commit, set()))[1].add(peer)
        return None  # `_settle` judges it

    # ------------------------------------------------------------------------------------------------ attempts

    def _next_attempt(self, reason: str) -> None:
        """Go on to the next attempt whose convener is neither dead nor silent (this peer is neither), and tell everybody."""
        n = len(self.order)
        following = range(self.attempt + 1, self.attempt + 1 + n)
        attempt = next(a for a in following if self.order[a % n] not in self._dead | self._silent)
        self._enter(attempt, reason)
        if self.convener != self.me:
            self._send(self._others, self._convene(reason))

    def _enter(self, attempt: int, reason: str) -> None:
        self._stop_exchange(reason)
        self._note(f"attempt {attempt} of round {self.round}: {reason}")
        self.attempt = attempt
        self.roster, self._proposal = None, None
        self._holdings, self._votes, self._chunks = {}, {}, ()
        self._joins = {peer: join for peer, join in self._joins.items() if join.attempt >= attempt}
        self._entered_at = self._now
        self._persist(replace(self._record, promised=attempt, header=self._header))
        mine = self.convener == self.me
        self._begin(Phase.CONVENING, Wait.JOIN if mine else Wait.ROSTER)
        if mine:
            self._send(self._others, self._convene(reason))
        self._join()

    def _follow(self) -> None:
        """Go where the others are if the current attempt is lost anyway."""
        ahead = self._ahead()
        if not ahead:
            return
        # Who has taken a split's commit votes no more. The silent may speak again, but not because they are waited for.
        gone = self._dead | self._silent | ahead.keys() | {p for _, takers in self._splits.values() for p in takers}
        able = self.electorate - gone | {self.me}
        if self.convener in ahead:
            self._enter(max(ahead.values()), "its convener has left the attempt")
        elif not is_majority(len(able), len(self.electorate)):
            self._enter(
                max(ahead.values()), f"{len(ahead)} ahead, {len(able)} of {len(self.electorate)} left: no majority"
            )

    def _ahead(self) -> dict[str, int]:
        """Live members that have promised a higher attempt."""
        return {p: a for p, a in self._seen.items() if a > self.attempt and p not in self._dead}

    def _begin(self, phase: Phase, wait: Wait) -> None:
        self.phase, self._since = phase, self._now
        self._deadline = self._now + self.timing.after(wait, self.attempt)
        self._retry_at = self._now + self.timing.retry_s

    def _take(self, roster: Roster) -> None:
        """Start the exchange of a roster, one's own or received."""
        if roster.convener != self.me:
            self._measure(Wait.ROSTER, Phase.CONVENING)
        self.roster = roster
        idle = roster.exchange is Exchange.NOTHING  # the proposal follows at once
        if roster.convener == self.me:
            self._begin(Phase.EXCHANGING, Wait.VOTE if idle else Wait.EXCHANGE)
        else:
            self._begin(Phase.EXCHANGING, Wait.COMMIT if idle else Wait.PROPOSE)
        if not idle and self.me in roster.peers:
            self._exchanging = True
            self._out.append(StartExchange(roster))

    def _stop_exchange(self, reason: str) -> None:
        if self._exchanging:
            self._exchanging = False
            self._out.append(StopExchange(reason))

    # ------------------------------------------------------------------------------------------------ member

    def _ready(self) -> bool:
        return self._local_done or self._local_late

    def _reported(self) -> VotedFor | None:
        """The earlier vote that joins of this attempt carry."""
        return binding((self._record.voted, self._record.voted_split))

    def _my_join(self) -> Join:
        return Join(
            self.me, self.round, self.base_lineage, self.attempt, self._header, self._reported(), self.base_state_hash
        )

    def _join(self) -> None:
        if self.phase is Phase.CONVENING and self._ready() and self.convener is not None and self.convener != self.me:
            self._send((self.convener,), self._my_join())

    def _hold(self) -> None:
        """Report what is held to the convener (or book it, as the convener)."""
        assert self.roster is not None and self.convener is not None
        mine = {self._header.update_hash} if self._header is not None else set()
        held = tuple(sorted(self.roster.headers.keys() & ({*self._held} | mine)))
        holding = Holding(self.me, self.round, self.base_lineage, self.attempt, held, self._chunks)
        if self.convener == self.me:
            self._holdings[self.me] = holding
        else:
            self._send((self.convener,), holding)

    # ------------------------------------------------------------------------------------------------ convener

    def _settle(self) -> None:
        """Whatever has become possible: follow, issue the roster, propose, commit."""
        if self.phase is Phase.DECIDED:
            return
        self._judge_splits()
        while self.attempt >= 0 and self.phase is not Phase.DECIDED:
            before = (self.phase, self.attempt)
            self._follow()
            if self.convener == self.me:
                match self.phase:
                    case Phase.CONVENING:
                        self._issue_roster()
                    case Phase.EXCHANGING:
                        self._propose()
                    case _:
                        self._count_votes()
            if (self.phase, self.attempt) == before:
                return

    def _overdue(self) -> bool:
        return self._deadline is not None and self._now >= self._deadline

    def _live(self) -> frozenset[str]:
        return self.electorate - self._dead

    def _issue_roster(self) -> None:
        if not self._ready() or self._now < self._pause_until:
            return
        joins = {p: j for p, j in self._joins.items() if j.attempt == self.attempt and p not in self._dead}
        joins[self.me] = self._my_join()
        waiting = self._live() - joins.keys() - self._silent - self._ahead().keys()
        if waiting and not self._overdue():
            return
        size, live = len(joins), self._live()
        if is_majority(size, len(self.electorate)):
            reason = f"{size} of {len(self.electorate)} joined"
        elif may_split(self.electorate, self._dead) and is_majority(size, len(live)):
            reason = f"split: {size} of {len(live)} live ones joined, {len(self.electorate) - len(live)} are dead"
        else:
            return
        # A deviating state is this peer's own trouble or the sender's; its promise counts, its update does not.
        joins = {p: j if j.state_hash == self.base_state_hash else replace(j, header=None) for p, j in joins.items()}
        splits = sorted(self._splits.values(), key=lambda s: (-len(s[0].signers), s[0].value.hash))
        self._take(
            make_roster(
                convener=self.me,
                attempt=self.attempt,
                joins=joins,
                order=self.order,
                joiners=self._joiners(limits.ROSTER_MAX - size),
                choose=self._choose,
                reason=reason + (f", {len(waiting)} were not waited for longer" if waiting else ""),
                preferred=splits[0][0].value if splits else None,
            )
        )
        self._silent |= waiting
        self._hold()
        assert self.roster is not None
        self._send(tuple(p for p in self.roster.peers if p != self.me), self.roster)

    def _joiners(self, room: int) -> tuple[str, ...]:
        """Observers heard of lately that stand on the same state."""
        fresh = self._now - 8 * self.timing.retry_s
        named = [
            p for p, (join, at) in self._observers.items() if at >= fresh and join.state_hash == self.base_state_hash
        ]
        return tuple(sorted(named)[:room])

    def _propose(self) -> None:
        roster = self.roster
        assert roster is not None
        if self._lost(self._live() - self._ahead().keys()):
            return
        awaited = set(roster.peers) & self._live() - self._silent - self._ahead().keys()
        missing = still_missing(roster, self._holdings, awaited, self._dead)
        if roster.exchange is Exchange.NOTHING:
            missing = {}
        value, why = make_value(
            roster,
            self._holdings,
            previous_state_hash=self.base_state_hash,
            electorate=self.electorate,
            dead=self._dead,
        )
        broken = roster.exchange is Exchange.RING_DENSE and any(
            p in self._dead and p not in self._holdings_complete() for p in roster.peers
        )
        if missing and not self._overdue() and not (broken and value is None):
            return
        if value is not None and (refused := self._refuse(value)) is not None:
            value, why = None, refused
        if self._overdue():
            self._silent |= {p for p in missing if p not in self._holdings} - {self.me}
        if value is None:
            self._pause_until = self._now + self.timing.retry_s
            return self._next_attempt(f"nothing to propose: {why}")
        self._note(f"proposal of attempt {self.attempt}: {why}")
        self._proposal = value
        self._votes = {self.me: self._vote(value)}
        self._begin(Phase.VOTING, Wait.VOTE)
        self._send(tuple(p for p in roster.peers if p != self.me), self._proposing())

    def _holdings_complete(self) -> set[str]:
        return {p for p, holding in self._holdings.items() if holding.chunk_hashes}

    def _proposing(self) -> Propose:
        assert self._proposal is not None
        return Propose(self.me, self.round, self.base_lineage, self.attempt, self._proposal)

    def _count_votes(self) -> None:
        assert self.roster is not None and self._proposal is not None
        split = is_split_roster(self.roster, self.electorate)
        live = self._live()
        if split:
            enough = may_split(self.electorate, self._dead) and is_majority(len(self._votes.keys() & live), len(live))
        else:
            enough = is_majority(len(self._votes), len(self.electorate))
        if enough:
            votes = tuple(self._votes[p] for p in sorted(self._votes))
            self._decide(Commit(self.attempt, self._proposal, votes), f"{len(votes)} of {len(self.electorate)} voted")
        else:
            self._lost((live - self._ahead().keys()) | self._votes.keys())

    def _lost(self, able: Collection[str]) -> bool:
        """Go on when those `able` to vote cannot make the attempt's quorum any more."""
        assert self.roster is not None
        if is_split_roster(self.roster, self.electorate):
            lost, why = not may_split(self.electorate, self._dead), "a majority is alive after all"
        else:
            lost, why = not is_majority(len(able), len(self.electorate)), "a majority can no longer vote"
        if lost:
            self._next_attempt(why)
        return lost

    # ------------------------------------------------------------------------------------------------ decision

    def _judge_splits(self) -> None:
        mine = [vote.value for vote in (self._record.voted, self._record.voted_split) if vote is not None]
        for commit, takers in self._splits.values():
            if may_accept_split(
                commit,
                me=self.me,
                electorate=self.electorate,
                gone=self._dead | self._silent,
                decided=takers,
                votes=mine,
            ):
                return self._decide(commit, "a split committed it and no majority is left to disagree", passed_by="")
        return None

    def _decide(self, commit: Commit, reason: str, passed_by: str | None = None) -> None:
        """The round is over. `passed_by`: who sent the commit; None: counted here."""
        if passed_by is not None:
            self._measure(Wait.COMMIT, Phase.VOTING)
        self._stop_exchange("decided")
        self.phase, self.commit, self.attempt = Phase.DECIDED, commit, max(self.attempt, commit.attempt)
        self._deadline = self._retry_at = None
        self._note(f"round {self.round} is decided: {reason}")
        self._out.append(Decided(commit))
        if passed_by is None:
            to = [*self._others, *sorted({*self._observers, *commit.value.joiners} - self.electorate)]
        elif self.observing:
            return
        else:
            # The sender may have died half-way through telling everybody: two more tellings each reach all.
            at = self.order.index(self.me)
            ring = [self.order[(at + step) % len(self.order)] for step in (1, 2)]
            to = [*(p for p in dict.fromkeys(ring) if p not in (self.me, passed_by)), *sorted(self._observers)]
        self._send(tuple(to), commit)

    def _answer(self, peer: str) -> None:
        """Tell a straggler, at most twice per retry interval."""
        assert self.commit is not None
        if self._now - self._answered.get(peer, -self.timing.retry_s) < self.timing.retry_s / 2:
            return
        if len(self._answered) >= 2 * limits.ROSTER_MAX:
            self._answered.clear()
        self._answered[peer] = self._now
        self._send((peer,), self.commit)

    # ------------------------------------------------------------------------------------------------ time

    def _expire(self) -> None:
        """A deadline passed and `_settle` had no better idea: next attempt."""
        if not self._overdue() or self.phase is Phase.DECIDED:
            return
        assert self.convener is not None
        if self.convener != self.me:
            self._silent.add(self.convener)
            self._next_attempt(f"no {'roster' if self.phase is Phase.CONVENING else 'decision'} by the deadline")
        elif self.phase is Phase.CONVENING:
            self._silent |= self._live() - {self.me} - {p for p, j in self._joins.items() if j.attempt == self.attempt}
            self._next_attempt("too few joins by the deadline")
        else:
            self._silent |= self._live() - self._votes.keys()
            self._next_attempt(f"{len(self._votes)} votes of {len(self.electorate)} by the deadline")
        self._settle()

    def _repeat(self) -> None:
        """Send again what is unanswered."""
        if self._retry_at is None or self._now < self._retry_at:
            return
        self._retry_at = self._now + self.timing.retry_s
        if self.observing:
            return self._show()
        if self.convener != self.me:
            match self.phase:
                case Phase.CONVENING:
                    self._join()
                case Phase.EXCHANGING:
                    self._hold()
                case _:
                    assert self._proposal is not None and self.convener is not None
                    self._send((self.convener,), self._vote(self._proposal))
            return None
        live = [p for p in self._others if p not in self._dead]
        match self.phase:
            case Phase.CONVENING:
                joined = {p for p, join in self._joins.items() if join.attempt == self.attempt}
                self._send(tuple(p for p in live if p not in joined), self._convene("waiting for joins"))
            case Phase.EXCHANGING:
                assert self.roster is not None
                unheard = tuple(p for p in live if p in self.roster.peers and p not in self._holdings)
                self._send(unheard, self.roster)
            case _:
                assert self.roster is not None
                silent = tuple(p for p in live if p not in self._votes)
                self._send(silent, self.roster)
                self._send(silent, self._proposing())
        return None

    def _show(self) -> None:
        """Observer: ask all members to be named a joiner."""
        self._retry_at = self._now + self.timing.retry_s
        attempt = max(self._seen.values(), default=0)
        join = Join(self.me, self.round, self.base_lineage, attempt, None, None, self.base_state_hash, observer=True)
        self._send(self._others, join)

    def _wake(self) -> float | None:
        local = self._local_due if self.phase is Phase.CONVENING and not self._ready() else None
        pause = self._pause_until if self._pause_until > self._now and self.phase is Phase.CONVENING else None
        due = [at for at in (self._deadline, self._retry_at, local, pause) if at is not None]
        return min(due, default=None)

    # ------------------------------------------------------------------------------------------------ output

    def _send(self, to: tuple[str, ...], message: Message) -> None:
        if to:
            self._out.append(Send(to, message))

    def _convene(self, reason: str) -> Convene:
        return Convene(self.round, self.base_lineage, self.attempt, reason[: limits.REASON_CHARS_MAX])

    def _persist(self, record: BallotRecord) -> None:
        if record != self._record:
            self._record = record
            self._out.append(Persist(record))

    def _measure(self, wait: Wait, phase: Phase) -> None:
        if self.phase is phase:
            self._out.append(Measured(wait, self._now - self._since))

    def _note(self, reason: str) -> None:
        self._out.append(Note(reason))
