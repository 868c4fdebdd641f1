"""The round's decree as a pure state machine: promise, propose, vote, commit. No I/O, no clock, no randomness.

Covers one round of one peer. Does not cover: training, moving updates, signatures and limits of messages
(ballot_wire.py), the chain of commits (commit.py), how long to wait (deadlines.py), the single decisions as pure
functions (ballot_rules.py).

Theory of operation
-------------------
One `Ballot` is one decree of single-decree Paxos among the electorate; attempts are ballot numbers, and attempt a
belongs to `order[a mod n]`, its convener. `handle(now, event)` returns actions, to be carried out in order:

    phase        entered by                          sent, and repeated every retry_s           left by
    TRAINING     construction                        -                                          the round's close
    CONVENING    a new attempt (promise persisted)   Join; convener: Convene                    roster
    EXCHANGING   the roster                          Holding; convener: Roster                  proposal
    VOTING       own vote (persisted)                Vote; convener: Roster and Propose         commit
    DECIDED      a commit, from anywhere, any time   Commit, to whoever still asks              never

The three middle ones also end by their deadline, each peer by its own.

Next attempt. A phase deadline passes, the convener is known dead, or the attempt cannot get a majority any more: the
member goes to the next attempt whose convener is neither dead nor was found silent, and tells everybody (Convene).
Others follow it at once only if their own attempt is lost anyway: its convener has left it, or too many are dead,
silent or ahead for a majority, or a roster with a majority on it proves the higher attempt. So one fast clock cannot
break an attempt that works, and peers whose attempts cannot work meet in the highest one. Waits grow with the attempt
until they overlap long enough.

The silent. Whoever let a deadline pass is not waited for again in this round until it speaks, so one mute peer costs
one phase deadline and no more.

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
heard of lately as joiners. They are never counted and never waited for. One that is a moment behind the round (it follows the
chain, but its word takes longer than a round) is named, too, as long as the roster is a majority of the next electorate
without it: from then on it is a member, and waited for like one.

For the driver
--------------
* Start: `Ballot(...)`, then `Tick`. With a record of this round it resumes where its promises require.
* `Persist` replaces the previous record. Before the next round's first record, the state after this commit must be
  durable.
* `NeedLocalResult` comes once; answer with `LocalResult` as soon as the inner step ends and the journal has the
  update (or with None). It is not waited for longer than `timing.local_s`; an update that comes too late for the
  roster serves a later attempt or goes back to the residual.
* `StartExchange` / `StopExchange` alternate. Report `Held` at every change (the own update is added here).
* Keep the decided ballot for messages of its round until the next one is decided: it answers stragglers.
* Messages of other rounds or lineages are noted and ignored; route them first (`concerns`).
"""

from __future__ import annotations

from . import limits
from .ballot_convener import Convening
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
from .ballot_messages import Commit, Convene, Header, Holding, Join, Message, Propose, Roster, Vote
from .ballot_record import BallotRecord
from .ballot_rules import check_commit, is_split_roster, still_missing
from .deadlines import Wait
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
    "Newcomer",
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


class Ballot(Convening):
    """One peer's part in one round: events in, actions out. See the module's docstring, and `Attempts` for
    arguments."""

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
            case Newcomer(peer):
                self._on_newcomer(peer, None)
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

    # ---------------------------------------------------------------------------------------------------------- events

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

    # -------------------------------------------------------------------------------------------------------- messages

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
                return self._on_newcomer(peer, message.state_hash)
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

    def _on_newcomer(self, peer: str, state_hash: bytes | None) -> None:
        """`state_hash`: of the state that it stands on; None: it is a moment behind."""
        room = peer in self._observers or len(self._observers) < limits.ROSTER_MAX
        if room and not self.observing and peer not in self.electorate:
            self._observers[peer] = (state_hash, self._now)

    def _convening_in(self, attempt: int) -> bool:
        return attempt == self.attempt and self.convener == self.me

    def _on_join(self, peer: str, join: Join) -> None:
        known = self._joins.get(peer)
        if known is None or join.attempt > known.attempt or (join.attempt == known.attempt and known.header is None):
            self._joins[peer] = join
            if self._convening_in(join.attempt) and join.state_hash != self.base_state_hash:
                theirs, mine = join.state_hash.hex()[:16], self.base_state_hash.hex()[:16]
                self._note(f"state hashes differ at one lineage: {theirs} at {peer}, {mine} here")
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
        if checked.value_hash not in self._splits and len(self._splits) >= limits.SPLITS_KEPT:
            return self._note("too many split commits: ignored")
        self._splits.setdefault(checked.value_hash, (commit, set()))[1].add(peer)
        return None  # `_settle` judges it

    # ------------------------------------------------------------------------------------------------------------ time

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
                # Also who reported less than all: it may have gone on to a later attempt, and then says so.
                missing = still_missing(self.roster, self._holdings, self.roster.peers, self._dead)
                self._send(tuple(p for p in live if p in missing), self.roster)
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
