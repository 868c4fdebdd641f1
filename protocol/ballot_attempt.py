"""One peer's state in a round, and what it does as a member: attempts, promises, votes, the decision. See ballot.py.

`Attempts` is the part of a `Ballot` that acts; it does not decide when (ballot.py) nor convene (ballot_convener.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from . import limits
from .ballot_events import Action, Decided, Measured, Note, Persist, Phase, Send, StartExchange, StopExchange
from .ballot_messages import Commit, Convene, Exchange, Holding, Join, Message, Roster, Value, Vote, VotedFor
from .ballot_record import BallotRecord
from .ballot_rules import (
    ChooseExchange,
    binding,
    choose_exchange,
    convener_order,
    is_majority,
    is_split_roster,
    may_accept_split,
    may_split,
    refuse_value,
)
from .deadlines import Timing, Wait


class Attempts:
    """State, and a member's moves.

    Args:
        me: this peer. Outside `electorate` it is an observer.
        electorate: who may vote: `electorate_after(previous value)`.
        round_, base_lineage, base_state_hash: the round, and the state that it starts from.
        timing: waits of this round.
        sign_vote: the exact bytes of the signed vote (deterministic, so that repeats are equal).
        record: what was last persisted for this round and lineage, if anything.
        choose: which exchange the roster's updates get.
        dead: membership's view at the start.
        unready: peers that are not to be named joiners.
        abstain: only observe, though in the electorate: this peer does not know what it promised or voted for before.
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
        unready: Collection[str] = (),
        abstain: bool = False,
    ) -> None:
        if record is not None and not record.concerns(round_, base_lineage):
            raise ValueError(f"record of round {record.round} given to round {round_}, or of another lineage")
        self.me = me
        self.abstain = abstain
        self._unready = frozenset(unready)
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
        self._observers: dict[str, tuple[bytes | None, float]] = {}  # `_on_newcomer`'s, and when it last said so
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

    @property
    def observing(self) -> bool:
        return self.abstain or self.me not in self.electorate

    @property
    def spoken(self) -> bool:
        """What this peer has to say in the round is settled, as after a restart: nothing is left to be learned for it."""
        return self._local_done

    @property
    def convener(self) -> str | None:
        """Of the current attempt."""
        return self.order[self.attempt % len(self.order)] if self.attempt >= 0 else None

    def concerns(self, message: Message) -> bool:
        return (message.round, message.base_lineage) == (self.round, self.base_lineage)

    # -------------------------------------------------------------------------------------------------------- attempts

    def _next_attempt(self, reason: str) -> None:
        """Go on to the next attempt whose convener is neither dead, silent nor gone with a split; tell everybody."""
        n = len(self.order)
        following = range(self.attempt + 1, self.attempt + 1 + n)
        useless = self._dead | self._silent | self._left()
        attempt = next(a for a in following if self.order[a % n] not in useless)
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
        # The silent may speak again, but not because they are waited for.
        gone = self._dead | self._silent | self._left() | ahead.keys()
        able = self.electorate - gone | {self.me}
        if self.convener in ahead:
            self._enter(max(ahead.values()), "its convener has left the attempt")
        elif not is_majority(len(able), len(self.electorate)):
            self._enter(
                max(ahead.values()), f"{len(ahead)} ahead, {len(able)} of {len(self.electorate)} left: no majority"
            )
        elif self._lacks_sum_of(ahead):
            self._enter(max(ahead.values()), "a member has left the dense exchange and taken its partial sums along")

    def _lacks_sum_of(self, gone: Collection[str]) -> bool:
        """Whether the dense exchange under way needs one of these peers still: partial sums cannot be repaired."""
        roster = self.roster
        if roster is None or roster.exchange is not Exchange.RING_DENSE or self._chunks:
            return False
        return self.phase is Phase.EXCHANGING and not roster.headers.keys().isdisjoint(
            h for h, header in roster.headers.items() if header.dot.peer in gone
        )

    def _ahead(self) -> dict[str, int]:
        """Live members that have promised a higher attempt."""
        return {p: a for p, a in self._seen.items() if a > self.attempt and p not in self._dead}

    def _left(self) -> set[str]:
        """Who has taken a split's commit that is held back here: they neither convene nor vote any more."""
        return {peer for _, takers in self._splits.values() for peer in takers}

    def _live(self) -> frozenset[str]:
        return self.electorate - self._dead

    def _begin(self, phase: Phase, wait: Wait) -> None:
        self.phase, self._since = phase, self._now
        self._deadline = self._now + self.timing.after(wait, self.attempt)
        self._retry_at = self._now + self.timing.retry_s

    def _overdue(self) -> bool:
        return self._deadline is not None and self._now >= self._deadline

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

    # ---------------------------------------------------------------------------------------------------------- member

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

    # -------------------------------------------------------------------------------------------------------- decision

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

    # ---------------------------------------------------------------------------------------------------------- output

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
