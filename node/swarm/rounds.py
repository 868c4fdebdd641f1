"""Ring mode: one peer's way through the rounds, from the local work by the ballot to the next state.

Theory of operation. One task, `run`, goes round by round:

    open the round → train → (ballot) convene, exchange, vote → decided → fetch what lacks → apply → make durable → next

Beside it one task drives the ballot (ballot_driver.py). A commit decided elsewhere ends the round here at any moment,
whatever phase this peer is in; that is also how a restarted peer catches up (catch_up.py). What the inner steps learned
is booked before the round's outcome is known and never lost.

Does not cover: who is alive (members.py), sockets (mesh.py), decisions (protocol/ballot.py), arithmetic (state.py), what a
new state says of own updates (history.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ...protocol import ballot_wire, limits
from ...protocol.ballot import CloseRound, LocalResult, MembersDead, Phase, Received
from ...protocol.ballot_messages import Commit, Exchange, Header, Join
from ...protocol.commit import CheckedCommit, CommitLog
from ...protocol.deadlines import Deadlines
from ...protocol.identity import Identity
from ...protocol.transport import Clock
from ...protocol.wire_pb2 import Envelope, Summary
from ..learner import StepStats
from ..store.journal import Journal, JournalFull
from .abstention import Abstention
from .ballot_driver import BallotDriver
from .catch_up import CatchUp
from .dense_exchange import DenseExchange
from .history import History
from .local_work import LocalWork, Work
from .newcomers import Newcomers
from .ring_exchange import RingExchange
from .state import Applied, MergeRules, SharedState, apply_commit
from .updates import UpdateStore

# Pause between two tries to fetch a committed update that nobody gave, and to save a state that the disk did not take.
FETCH_RETRY_SECONDS = SAVE_RETRY_SECONDS = 1.0
# After this many fruitless tries the state itself is downloaded.
FETCH_TRIES = 3

Log = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """The manifest's and the node's part of how rounds run; fields as in the configuration."""

    target_samples: int
    round_seconds_max: float
    rounds_max: int
    rules: MergeRules


@dataclass
class Progress:
    """What status shows of the open round."""

    phase: str = "starting"
    samples: int = 0
    steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    rounds_done: int = 0


class Rounds:
    """One peer in ring mode. Construct, `run` in a task, `stop` or `leave` to end."""

    def __init__(
        self,
        *,
        identity: Identity,
        run_id: bytes,
        clock: Clock,
        settings: RoundSettings,
        state: SharedState,
        history: History,
        work: LocalWork,
        exchange: RingExchange,
        dense: DenseExchange,
        store: UpdateStore,
        journal: Journal,
        deadlines: Deadlines,
        catch_up: CatchUp,
        post: Callable[[str, Envelope], None],
        alive: Callable[[], set[str]],
        dead: Callable[[], frozenset[str]],
        expect: Callable[[Iterable[str]], None],
        summaries: Callable[[], dict[str, Summary]],
        save: Callable[[Applied | None, CheckedCommit | None, Work | None], Awaitable[bool]],
        say: Log,
        hold: Callable[[str, int], Awaitable[None]],
        started: asyncio.Event,
        amnesiac: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            save: makes a new state durable (or, with None, the present one with what is booked), records metrics, and
                says whether it succeeded.
            hold: test-only: waits while a test holds this peer in the named phase of the named round.
            started: training waits for it (a demo starts all peers at once).
            amnesiac: whether this peer's disk was lost, so that it cannot know what it promised before.
        """
        self.me = identity.peer_id
        self._run_id = run_id
        self._clock = clock
        self.settings = settings
        self.state = state
        self.history = history
        self._work = work
        self._exchange = exchange
        self._dense = dense
        self._store = store
        self._journal = journal
        self._catch_up = catch_up
        self._alive = alive
        self._dead = dead
        self._expect = expect
        self._summaries = summaries
        self._save = save
        self._say = say
        self._hold = hold
        self._started = started
        self._amnesiac = amnesiac
        self._abstention = Abstention(self.me)
        self._newcomers = Newcomers()
        self.progress = Progress()
        self.durable_round = state.round  # saved, or at least tried to
        self.ballot = BallotDriver(
            identity=identity,
            run_id=run_id,
            clock=clock,
            work=work,
            exchange=exchange,
            dense=dense,
            store=store,
            journal=journal,
            deadlines=deadlines,
            post=post,
            say=say,
            state_saved=self._state_saved,
            entered=self._entered,
        )
        self._stopping = asyncio.Event()
        self._replaced = asyncio.Event()
        self._closing: str | None = None
        self._saved = True  # the state is on disk
        self._save_tried = 0.0
        self._round_started = 0.0

    # ------------------------------------------------------------------------------------------------ outside

    @property
    def log(self) -> CommitLog:
        """The commits behind the state, and those on other branches that were heard of."""
        return self.history.log

    @property
    def finished(self) -> bool:
        """The run's last round is in the state and on disk."""
        return 0 < self.settings.rounds_max <= self.durable_round

    def summary(self) -> Summary:
        """What membership carries of us."""
        return Summary(
            round=self.state.round,
            lineage=self.state.lineage,
            state_hash=self.state.hash,
            open_round=self.state.round + 1,
            samples=self.progress.samples,
            total_weight=self.state.total_weight,
        )

    def stop(self) -> None:
        """End `run` at the next await: no push, no goodbye."""
        self._stopping.set()

    async def leave(self, grace_s: float) -> bool:
        """Push what is learned: close the round and wait for its commit. Then stop. True when the commit came in time."""
        self._closing = "a member leaves"
        self._work.stop()
        self.ballot.feed(CloseRound("leaving"))
        round_ = self.state.round
        deadline = self._clock.now() + grace_s
        while not self.finished and self.progress.samples > 0 and self.state.round == round_:
            if self._clock.now() >= deadline:
                break
            await self._clock.sleep(0.1)
        self.stop()
        return self.state.round > round_

    def members_changed(self) -> None:
        """Membership's view changed."""
        self.ballot.feed(MembersDead(self._dead()))

    def on_message(self, peer: str, envelope: Envelope) -> None:
        """A message of the ballot or of catching up. Raises PeerFault for what must be charged to `peer`."""
        if envelope.WhichOneof("body") == "commit_request":
            return self._catch_up.answer(self, peer, envelope.commit_request)
        message = ballot_wire.decode(envelope, peer, self._run_id)
        size = envelope.ByteSize()
        if isinstance(message, Join) and message.observer:
            self._show_near(peer, message, size)
        if self.ballot.receive(peer, message, size):
            if isinstance(message, Commit):
                self._catch_up.hint(peer, message)
            return
        if message.round > self.state.round + 1:
            if not isinstance(message, Commit) and message.round == self.state.round + 2:
                self.ballot.keep_early(peer, message, size)
            self._catch_up.hint(peer, message)
        elif isinstance(message, Commit):
            self._catch_up.hint(peer, message)
        elif (record := self.log.get(self.state.lineage)) and record.base_lineage == message.base_lineage:
            self.ballot.answer(peer, message)
        elif message.round == self.state.round + 1:
            self.ballot.keep_early(peer, message, size)
            self._catch_up.hint(peer, message)

    def _show_near(self, peer: str, join: Join, size: int) -> None:
        """A newcomer whose word has taken longer than its round asks to be let into this one."""
        if join.round <= self.state.round and self._newcomers.near(self._clock.now(), join.base_lineage):
            self.ballot.let_in(peer, size)

    # ------------------------------------------------------------------------------------------------ rounds

    async def run(self) -> None:
        """Until `stop`. Exceptions of any task that it owns come out here."""
        watch = asyncio.ensure_future(self._catch_up.watch(self))
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            while not self._stopping.is_set():
                if 0 < self.settings.rounds_max <= self.state.round:
                    self.durable_round = self.state.round
                    self.progress.phase = "finished"
                    await asyncio.wait({stop, watch}, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await self._one_round(stop, watch)
                if watch.done():
                    watch.result()
        finally:
            self.ballot.end_exchange("stopped")
            for task in (watch, stop):
                task.cancel()
            await asyncio.gather(watch, stop, return_exceptions=True)

    async def _one_round(self, stop: asyncio.Future[Any], watch: asyncio.Future[None]) -> None:
        """Open the next round, wait for its commit, apply it."""
        state = self.state
        self._replaced.clear()
        self._work.open()
        self._expect(state.electorate)
        abstain = self._must_abstain(state)
        unready = self._newcomers.unready(self._clock.now())
        self.ballot.open(state, dead=self._dead(), abstain=abstain, unready=unready)
        self._round_started = self._clock.now()
        self.progress.samples = self.progress.steps = 0
        self.progress.metrics = {}
        ahead = self._catch_up.next_commit(state.lineage)
        if ahead is not None:
            return await self._conclude(ahead, None, f"round {state.round + 1} was decided by others")
        pump = asyncio.ensure_future(self.ballot.run())
        member = not self.ballot.observing
        # Who has spoken before a restart learns no more for this round: its steps would only hold up the exchange.
        learns = member and not self.ballot.spoken
        trainer = asyncio.ensure_future(self._train(state)) if learns else None
        self.progress.phase = "training" if learns else "waiting"
        if not member:
            self._say("waiting to be named a joiner", round=state.round + 1, electorate=len(state.electorate))
        replaced = asyncio.ensure_future(self._replaced.wait())
        timer = self._end_abstention() if abstain else None
        ends = {stop, replaced, self.ballot.decided}
        owned = {pump, watch, *ends} | ({trainer} if trainer else set())
        try:
            while not any(end.done() for end in ends):
                await asyncio.wait(owned, return_when=asyncio.FIRST_COMPLETED)
                for task in owned - ends:
                    if task.done():
                        task.result()  # raises what it died of
                        owned = owned - {task}
        finally:
            self._work.stop()
            if timer is not None:
                timer.cancel()
            pump.cancel()
            replaced.cancel()
            died, _ = await asyncio.gather(pump, replaced, return_exceptions=True)
            self.ballot.close("round ended")
            done = await self._await_trainer(trainer)
        if isinstance(died, Exception):
            raise died  # in the very moment that the round ended
        if self.state is not state:
            self._saved = await self._save(None, None, done)  # replaced by a download
        elif self.ballot.decided.done():
            await self._conclude(self.ballot.decided.result(), done, "")
        elif done is not None:
            await self._save(None, None, done)

    def _must_abstain(self, state: SharedState) -> bool:
        if not self._amnesiac():
            return False
        begun = self._abstention.until is not None
        must = self._abstention.must(self._clock.now(), state.electorate)
        if must and not begun:
            self._say(
                "abstaining: the disk was lost, earlier votes are not known", level="warning", round=state.round + 1
            )
        return must

    def _end_abstention(self) -> asyncio.TimerHandle:
        """The round is opened anew, as a voter, when the abstention ends in it."""
        assert self._abstention.until is not None
        left = max(0.0, self._abstention.until - self._clock.now())
        return asyncio.get_running_loop().call_later(left, self._replaced.set)

    async def _await_trainer(self, trainer: asyncio.Task[Work | None] | None) -> Work | None:
        """The step under way ends by itself; its result is booked even if this task is being cancelled."""
        if trainer is None:
            return None
        try:
            return await asyncio.shield(trainer)
        except asyncio.CancelledError:
            await asyncio.gather(trainer, return_exceptions=True)
            raise

    async def _entered(self, phase: Phase) -> None:
        """The ballot has entered a phase."""
        if self.me in self.state.electorate:
            self.progress.phase = phase.value
        await self._hold(phase.value, self.state.round + 1)

    async def _state_saved(self) -> bool:
        """Whether the state is on disk; tried again now and then while it is not."""
        if not self._saved and self._clock.now() - self._save_tried > SAVE_RETRY_SECONDS:
            self._save_tried = self._clock.now()
            self._saved = await self._save(None, None, None)
        return self._saved

    # ------------------------------------------------------------------------------------------------ training

    async def _train(self, state: SharedState) -> Work | None:
        """Inner steps until the round closes, then publish. None when the round was over before it began."""
        await self._catch_up.settled()
        await self._started.wait()
        if self.ballot.decided.done():
            return None
        if self._work.stopping:  # the round closes already: take part without an update
            self.ballot.feed(LocalResult(None))
            return None
        self._round_started = self._clock.now()
        work = await self._work.train(state, self._after_step)
        if self.ballot.decided.done():
            return work
        header: Header | None = None
        try:
            header = await self._work.publish(state, work)
        except JournalFull:
            pass  # the journal has said so; what was learned stays in the residual
        self.ballot.feed(LocalResult(header))
        self.ballot.report_held()
        return work

    async def _after_step(self, stats: StepStats) -> None:
        progress = self.progress
        progress.steps += 1
        progress.samples += stats.samples
        progress.metrics = dict(stats.metrics)
        await self._hold("training", self.state.round + 1)
        reason = self._should_close(self._clock.now())
        if reason is not None and not self._work.stopping:
            self.ballot.feed(CloseRound(reason))

    def _should_close(self, now: float) -> str | None:
        """Why the round should close, or None. Pure but for what it reads."""
        if self._closing is not None:
            return self._closing
        settings, round_ = self.settings, self.state.round + 1
        others = sum(s.samples for p, s in self._summaries().items() if s.open_round == round_ and p != self.me)
        total = self.progress.samples + others
        if total >= settings.target_samples:
            return f"{total} samples reach the target of {settings.target_samples}"
        elapsed = now - self._round_started
        if elapsed >= settings.round_seconds_max:
            return f"{elapsed:.1f} s reach the limit of {settings.round_seconds_max} s at {total} samples"
        if self.ballot.observers_seen and len(self.state.electorate) == 1:
            return "newcomers wait and nobody else is here"
        return None

    # ------------------------------------------------------------------------------------------------ ballot

    # ------------------------------------------------------------------------------------------------ commit

    async def _conclude(self, checked: CheckedCommit, work: Work | None, why: str) -> None:
        """Fetch what the commit names, apply it, make it durable."""
        state, rules, reduced = self.state, self.settings.rules, None
        self.progress.phase = "committing"
        await self._hold("committing", checked.value.round)
        started = self._clock.now()
        updates = await self._fetch(checked)
        if updates is None and self.state is state:
            self.history.remember(checked)
            return await self._catch_up.download(self, f"updates of round {checked.value.round} are nowhere to be had")
        if checked.value.exchange is Exchange.RING_DENSE:
            reduced = await self._dense.reduced(checked.value, list(checked.value.ring))
            if reduced is None and self.state is state:
                self.history.remember(checked)
                return await self._catch_up.download(self, f"chunks of round {checked.value.round} are gone")
        if self.state is not state or updates is None:
            return None  # a downloaded state took its place meanwhile: this commit lies behind it, or on a lost branch
        applied = await self._clock.run(lambda: apply_commit(state, checked.value, updates, rules, reduced=reduced))
        if self.state is not state:
            return None
        self.history.follow(applied, checked)
        self.state = applied.state
        self._newcomers.committed(self._clock.now(), checked.value)
        self._saved = await self._save(applied, checked, work)
        self.durable_round = applied.state.round
        self.progress.rounds_done += 1
        self._say(
            "round committed",
            round=applied.state.round,
            **({k: round(v, 4) for k, v in work.result.metrics.items() if k == "reward"} if work else {}),
            updates=len(applied.adopted),
            void=len(applied.void),
            split=checked.split,
            roster=len(checked.value.roster),
            joiners=len(checked.value.joiners),
            exchange=checked.value.exchange.name.lower(),
            samples=self.progress.samples,
            apply_s=round(self._clock.now() - started, 3),
            state_hash=applied.state.hash.hex()[:16],
            reason=why or applied.reason,
        )

    def poke(self, peer: str, tip: bytes) -> None:
        """Records that continue our state are known: let the open round be decided by the first of them."""
        later = self.log.after(self.state.lineage, tip, limit=1)
        if later and not self.ballot.decided.done():
            self.ballot.feed(Received(peer, later[0].checked.commit))

    def start_log(self, chain: list[Commit], state: SharedState) -> None:
        """A log of its own for a state whose chain does not reach ours."""
        self.history.start(chain, state)

    def replace(self, state: SharedState, fork: bytes | None, reason: str) -> None:
        """Take a downloaded state in place of ours. The open round ends; `fork`: our own branch after it lost."""
        self.history.replace(self.state, state, fork)
        self.state = state
        self._newcomers = Newcomers()
        self._say("state downloaded", round=state.round, state_hash=state.hash.hex()[:16], reason=reason)
        self._replaced.set()

    def _wanted_next(self, checked: CheckedCommit, wanted: int) -> list[bytes]:
        """Updates of the rounds after this one, as far as their commits are known: who catches up with a swarm that is faster
        than a way there and back must not go once for every round."""
        later = self._catch_up.later(checked.lineage)
        hashes = [u.update_hash for one in later for u in one.value.updates]
        room = min(limits.ROSTER_MAX - wanted, limits.AHEAD_BYTES_MAX // max(1, self._work.payload_bytes_max))
        return hashes[: max(0, room)]

    async def _fetch(self, checked: CheckedCommit) -> list[tuple[Header, bytes]] | None:
        """The committed updates, pulled from whoever has them; None when nobody does."""
        value = checked.value
        hashes = [u.update_hash for u in value.updates]
        holders = dict.fromkeys([*(u.dot.peer for u in value.updates), *value.roster, *sorted(self._alive())])
        for attempt in range(FETCH_TRIES):
            missing = await self._exchange.pull(hashes, holders, self._wanted_next(checked, len(hashes)))
            if not missing:
                with contextlib.suppress(KeyError):  # gone from the disk since: pulled again
                    return [self._store.load(h) for h in hashes]
            self._say("committed updates are missing", level="warning", missing=len(missing), attempt=attempt)
            await self._clock.sleep(FETCH_RETRY_SECONDS)
        return None
