"""Drives the pure ballot of one round after another: feeds it events and carries out what it says, in order.

Nothing leaves before what it may reveal is on disk: the state that the round stands on, then promise and votes. What could
not be written is tried again before every batch of actions, and until it succeeds nothing is sent.

Does not cover: what a round is (rounds.py), the ballot's decisions (protocol/ballot.py), moving updates (ring_exchange.py,
dense_exchange.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import numpy as np

from ...protocol import ballot as b
from ...protocol import ballot_wire, limits
from ...protocol.ballot_messages import Encoding, Exchange, Message, Roster
from ...protocol.ballot_rules import choose_exchange
from ...protocol.commit import CheckedCommit, check_commit
from ...protocol.deadlines import Deadlines
from ...protocol.identity import Identity
from ...protocol.transport import Clock
from ...protocol.wire_pb2 import Envelope
from ..store.journal import Journal, JournalFull
from .dense_exchange import DenseExchange
from .local_work import LocalWork
from .ring_exchange import RingExchange, Transfer
from .state import SharedState
from .updates import UpdateStore
from .waiting import Room


class BallotDriver:
    """One peer's ballots. `open` each round, then `run` in a task until `decided`, then `close`."""

    def __init__(
        self,
        *,
        identity: Identity,
        run_id: bytes,
        clock: Clock,
        work: LocalWork,
        exchange: RingExchange,
        dense: DenseExchange,
        store: UpdateStore,
        journal: Journal,
        deadlines: Deadlines,
        post: Callable[[str, Envelope], None],
        say: Callable[..., None],
        state_saved: Callable[[], Awaitable[bool]],
        entered: Callable[[b.Phase], Awaitable[None]],
    ) -> None:
        """
        Args:
            state_saved: whether the state that the round stands on is on disk, after trying again where it is not.
            entered: told of every phase of the ballot but DECIDED; what it waits for, the ballot waits for.
        """
        self.me = identity.peer_id
        self._identity, self._run_id, self._clock = identity, run_id, clock
        self._work, self._exchange, self._dense, self._store = work, exchange, dense, store
        self._journal, self._deadlines, self._post, self._say = journal, deadlines, post, say
        self._state_saved, self._entered = state_saved, entered
        self.decided: asyncio.Future[CheckedCommit] = asyncio.get_running_loop().create_future()
        self.observers_seen = False  # somebody outside the electorate has asked to be let in
        self._ballot: b.Ballot | None = None
        self._previous: b.Ballot | None = None
        self._events: asyncio.Queue[tuple[b.Event, int]] = asyncio.Queue()  # with the size of a message taken in
        self._room = Room(limits.BALLOT_MESSAGES_MAX, limits.BALLOT_BYTES_MAX)
        self._early: deque[tuple[str, Message, int]] = deque()
        self._early_room = Room(limits.EARLY_MESSAGES_MAX, limits.EARLY_BYTES_MAX)
        self._dropped = 0  # messages of this round that found no room
        self._timer: asyncio.TimerHandle | None = None
        self._unsaved: b.BallotRecord | None = None  # what the journal has not taken yet

    # ------------------------------------------------------------------------------------------------ a round

    def open(
        self, state: SharedState, *, dead: frozenset[str], abstain: bool, unready: frozenset[str] = frozenset()
    ) -> None:
        """The ballot of the round after `state`. What came early for it is fed to it. `unready`: not to be named joiners."""
        if self._ballot is not None:
            self._previous = self._ballot
        self._ballot = b.Ballot(
            me=self.me,
            electorate=state.electorate,
            round_=state.round + 1,
            base_lineage=state.lineage,
            base_state_hash=state.hash,
            timing=self._deadlines.timing(),
            sign_vote=ballot_wire.vote_signer(self._identity, self._run_id),
            record=self._journal.ballot_record(state.round + 1, state.lineage),
            choose=choose_exchange,
            dead=dead,
            unready=unready,
            abstain=abstain,
        )
        self.decided = asyncio.get_running_loop().create_future()
        self._unsaved = None
        self._events = asyncio.Queue()
        self._room.clear()
        self._dropped = 0
        self.observers_seen = False
        early, self._early = self._early, deque()
        self._early_room.clear()
        self.feed(b.Tick())
        for peer, message, size in early:
            if not self.receive(peer, message, size) and message.round > state.round + 1:
                self.keep_early(peer, message, size)

    @property
    def observing(self) -> bool:
        """This peer has no vote in the open round."""
        assert self._ballot is not None
        return self._ballot.observing

    @property
    def spoken(self) -> bool:
        """Own update of the open round was sent before a restart."""
        assert self._ballot is not None
        return self._ballot.spoken

    def close(self, reason: str) -> None:
        """The round is over here, whatever came of it."""
        self.end_exchange(reason)
        if self._timer is not None:
            self._timer.cancel()

    def retire(self) -> None:
        """No round follows at once: if the last one was decided, its ballot answers stragglers."""
        if self._ballot is not None and self._ballot.phase is b.Phase.DECIDED:
            self._previous = self._ballot
        self._ballot = None

    # ------------------------------------------------------------------------------------------------ events

    def feed(self, event: b.Event) -> None:
        """Queue an event of the open round that this peer itself has to say: it comes once and is never dropped."""
        self._events.put_nowait((event, 0))

    def receive(self, peer: str, message: Message, size: int) -> bool:
        """Feed a message of `size` bytes if it is of the open round and there is room for it. Whether it is of the round."""
        if self._ballot is None or not self._ballot.concerns(message):
            return False
        if getattr(message, "observer", False):
            self.observers_seen = True
        self._take_in(b.Received(peer, message), size)
        return True

    def let_in(self, peer: str, size: int) -> None:
        """By a message of `size` bytes, a peer a moment behind the open round has asked to be named a joiner."""
        if self._ballot is not None and not self._ballot.observing:
            self.observers_seen = True
            self._take_in(b.Newcomer(peer), size)

    def _take_in(self, event: b.Received | b.Newcomer, size: int) -> None:
        if self._room.take(event.peer, size):
            return self._events.put_nowait((event, size))
        if not self._dropped:
            self._say("too many messages wait for the ballot, some are dropped", level="warning", peer=event.peer)
        self._dropped += 1

    def keep_early(self, peer: str, message: Message, size: int) -> None:
        """A message of a round that is not open yet; dropped when too many wait."""
        if self._early_room.take(peer, size):
            self._early.append((peer, message, size))

    def answer(self, peer: str, message: Message) -> bool:
        """A straggler of the previous round: the decided ballot answers it. Whether it is one."""
        if self._previous is None or not self._previous.concerns(message):
            return False
        for action in self._previous.handle(self._clock.now(), b.Received(peer, message)):
            if isinstance(action, b.Send):
                self._send(action)
        return True

    def report_held(self) -> None:
        """Something arrived: tell the ballot what is held now."""
        self.feed(b.Held(tuple(self._exchange.held())))

    def dense_complete(self, chunk_hashes: tuple[bytes, ...]) -> None:
        """Every reduced chunk is here."""
        self.feed(b.Held((), chunk_hashes))

    def dense_failed(self, attempt: int, reason: str) -> None:
        """A partial sum is lost: the attempt cannot complete."""
        self.feed(b.ExchangeFailed(attempt, reason))

    # ------------------------------------------------------------------------------------------------ actions

    async def run(self) -> None:
        """Feed the open round's ballot until cancelled."""
        ballot = self._ballot
        assert ballot is not None
        while True:
            event, size = await self._events.get()
            if isinstance(event, b.Received | b.Newcomer) and size:
                self._room.give_back(event.peer, size)
            before = ballot.phase
            actions = ballot.handle(self._clock.now(), event)
            muted = not await self._durable()
            for action in actions:
                muted = await self._perform(ballot, action, muted)
            if ballot.phase is not before and ballot.phase is not b.Phase.DECIDED:
                await self._entered(ballot.phase)

    async def _perform(self, ballot: b.Ballot, action: b.Action, muted: bool) -> bool:
        """One action. Returns whether the rest of its batch must not be sent (a promise that is not durable)."""
        match action:
            case b.Persist(record):
                self._unsaved = record
                return not await self._durable()
            case b.Send() if not muted:
                self._send(action)
            case b.NeedLocalResult():
                self._work.stop()
            case b.StartExchange(roster):
                self._begin_exchange(roster)
            case b.StopExchange(reason):
                self.end_exchange(reason)
            case b.Decided(commit):
                checked = check_commit(commit, ballot.electorate, ballot.round, ballot.base_lineage)
                if not self.decided.done():
                    self.decided.set_result(checked)
            case b.WakeAt(at):
                if self._timer is not None:
                    self._timer.cancel()
                delay = max(0.0, at - self._clock.now())
                self._timer = asyncio.get_running_loop().call_later(delay, self.feed, b.Tick())
            case b.Measured(wait, seconds):
                self._deadlines.observe(wait, seconds)
            case b.Note(reason):
                self._say("ballot", level="debug", round=ballot.round, reason=reason)
        return muted

    def _send(self, action: b.Send) -> None:
        envelope = ballot_wire.encode(action.message, self._identity, self._run_id)
        for peer in action.to:
            self._post(peer, envelope)

    async def _durable(self) -> bool:
        """Whether all that a message may reveal is on disk. The ballot counts a record as durable once it asked for it, so
        one that the journal did not take is kept here until it does."""
        saved = await self._state_saved()
        if self._unsaved is not None and saved and await self._clock.run(lambda: self._try_to_save(self._unsaved)):
            self._unsaved = None
        return saved and self._unsaved is None

    def _try_to_save(self, record: b.BallotRecord | None) -> bool:
        """Whether it is durable. Returned, not raised: the round may be over before anybody looks. The journal says why not."""
        try:
            if record is not None:
                self._journal.save_ballot(record)
        except JournalFull:
            return False
        return True

    # ------------------------------------------------------------------------------------------------ exchange

    def _begin_exchange(self, roster: Roster) -> None:
        if roster.exchange is Exchange.RING_DENSE:
            for header in roster.headers.values():
                self._store.put(header, b"")
            mine = next((h.dot for h in roster.headers.values() if h.dot.peer == self.me), None)
            # From the journal: it also has what was said before a restart, and any earlier one of this round.
            payloads = [update.payload for update in self._journal.updates if update.dot == mine]
            self._dense.begin(roster, np.frombuffer(payloads[0], "<f4").astype(np.float32) if payloads else None)
        else:
            self._exchange.begin(transfer_of(roster))
            self.report_held()

    def end_exchange(self, reason: str) -> None:
        """Stop moving updates at once."""
        self._exchange.end(reason)
        self._dense.end(reason)


def transfer_of(roster: Roster) -> Transfer:
    """The exchange's view of a roster."""
    sparse = {h: header for h, header in roster.headers.items() if header.encoding is Encoding.SPARSE}
    if roster.exchange is Exchange.NOTHING:
        sparse = {}
    return Transfer(
        key=(roster.round, roster.base_lineage, roster.attempt),
        order=roster.peers,
        headers=sparse,
    )
