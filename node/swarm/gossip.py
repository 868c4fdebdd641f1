"""Gossip mode: every peer publishes when it has something, and everybody gets everything.

Theory of operation. One task trains: inner steps from the state as it is, then a signed update with its scale, journaled, put
into the own log, told to a few peers. Another keeps the logs alike: what news announces is fetched at once and told on, which
reaches everybody in about log(n) steps; and every `interval_s` an exchange with a random peer mends what was lost
(gossip_exchange.py). Order never matters: peers with equal vectors have equal bits (aggregation/gossip.py).

Does not cover: what follows when the log changes (replica.py), which update is void (aggregation/contributions.py).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ...aggregation.forks import Fork, Key
from ...aggregation.gossip import UpdateLog
from ...protocol import gossip_wire, limits
from ...protocol.ballot_messages import Header
from ...protocol.ballot_wire import decode_header
from ...protocol.errors import PeerFault
from ...protocol.gossip_wire import Tops
from ...protocol.transport import Clock
from ...protocol.version import Dot
from ...protocol.wire_pb2 import Envelope, Signed, Summary
from ..learner import StepStats
from ..store.journal import Journal, JournalFull
from .alarm import Alarm
from .gossip_exchange import GossipExchange
from .local_work import LocalWork, Work
from .replica import Replica
from .rounds import Progress
from .state import SharedState

# An exchange that shows that another is needed is followed by it after this pause: two that cannot agree yet must not spin.
AGAIN_SECONDS = 0.5
# Sums that were made in several places at once have found their winner after this time.
RIVALS_SECONDS = 120.0
# A checkpoint holds the whole log: a new one is written when the log has grown by this share, but not after less than this part
# of `save_seconds`, after which one is written anyway.
SAVE_GROWTH = 0.25
SAVE_SHARE_MIN = 1 / 120
# In a swarm so large that not everybody is a neighbour, news and exchanges go to neighbours, who are connected already; this
# share of the exchanges goes to members drawn from all.
STRAY_SHARE = 1 / 32
# News is fetched at once, but on average not more often than so many times in an interval: where there is more of it, each
# fetch brings more, so that its cost does not grow with the number of updates.
FETCHES_PER_INTERVAL = 4
ROUNDING_SECONDS = 1e-6  # a wait may end this much early


@dataclass(frozen=True, kw_only=True)
class GossipSettings:
    """The manifest's part.

    Attributes:
        target_samples, round_seconds_max: a peer publishes after so many own samples, or after this time.
        rounds_max: own updates after which the run is over for this peer; 0: never.
        interval_s: seconds between two exchanges that this peer begins by itself.
        fanout: peers that news is told to.
        save_seconds: a checkpoint is written after so long at the latest.
    """

    target_samples: int
    round_seconds_max: float
    rounds_max: int
    interval_s: float
    fanout: int
    save_seconds: float = 60.0


class Gossip:
    """One peer in gossip mode. From outside it looks as `Rounds` does: `run` in a task, `stop` or `leave` to end."""

    def __init__(
        self,
        *,
        me: str,
        run_id: bytes,
        clock: Clock,
        rng: random.Random,
        settings: GossipSettings,
        replica: Replica,
        exchange: GossipExchange,
        work: LocalWork,
        journal: Journal,
        post: Callable[[str, Envelope], None],
        alive: Callable[[], set[str]],
        near: Callable[[], frozenset[str]],
        complete: Callable[[], bool],
        banned: Callable[[str], bool],
        trouble: Callable[[str, BaseException], None],
        life_over: Callable[[], None],
        save: Callable[[Work | None], Awaitable[bool]],
        record: Callable[[Work | None], Awaitable[None]],
        say: Callable[..., None],
        hold: Callable[[str, int], Awaitable[None]],
        started: asyncio.Event,
    ) -> None:
        """
        Args:
            complete: whether every member that has not left is alive.
            near: the live peers to stay connected to, all of them in a small swarm (protocol/overlay.py).
            life_over: what is published next needs a new incarnation.
            save: makes log, book and learner durable; says whether it succeeded.
            record: writes one line of history.
        """
        self.me, self._run_id = me, run_id
        self._clock, self._rng, self.settings = clock, rng, settings
        self.replica, self._exchange = replica, exchange
        self._work, self._journal = work, journal
        self._post, self._alive, self._near, self._complete = post, alive, near, complete
        self._banned, self._trouble = banned, trouble
        self._life_over, self._save, self._record = life_over, save, record
        self._say, self._hold, self._started = say, hold, started
        self.progress = Progress()
        self.durable_round = self.state.round
        self._saved_at, self._saved_bytes, self._saved_digest = clock.now(), replica.log.log_bytes, replica.log.digest
        self._saving = asyncio.Lock()
        self._undecided: frozenset[Dot] = frozenset()  # own updates that rivals may still take back
        self._replaced = (0, clock.now())  # sums replaced when last looked, and when there was last reason for another
        self._stopping = asyncio.Event()
        self._leaving = False
        self._wake = Alarm(clock.call_later)
        self._news: dict[str, Tops] = {}  # peers that told of something we lack, in the order heard
        self._fetches_paid = 0.0  # until when fetches so far use up what is allowed
        self._due: dict[str, float] = {}  # peers that an exchange is due with, and from when on
        self._round_started = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy: set[str] = set()  # peers with a stream that we opened
        self.quiet = False  # publish nothing more, but go on exchanging: states come to rest only when all do

    # ------------------------------------------------------------------------------------------------ outside

    @property
    def log(self) -> UpdateLog:
        return self.replica.log

    @property
    def state(self) -> SharedState:
        """The shared state as the log has it now. Its round is the number of updates included."""
        return self.replica.state

    @property
    def published(self) -> int:
        """Own updates that the log has, of all lives."""
        return self.log.published(self.me)

    @property
    def finished(self) -> bool:
        """Whether this peer will publish nothing more, because the run is over for it."""
        return self._all_published

    @property
    def _all_published(self) -> bool:
        return 0 < self.settings.rounds_max <= self.published

    def is_final(self, dot: Dot) -> bool:
        """Whether an own update counts, or does not, for good.

        Nothing recent is while somebody is missing, nor for a while after that, or after a start, or after another sum took the
        place of ours: two sides may meet that each call final what the other has not, and averages that were made in several
        places at once may still replace each other.
        """
        log, key = self.log, (dot.peer, dot.incarnation)
        past = log.frontier.seq(*key) >= dot.seq or log.frozen.get(key, dot.seq) < dot.seq
        return past and dot not in self._undecided

    def _look_for_rivals(self) -> None:
        """Before a save, whose worker has no clock."""
        now = self._clock.now()
        if self.replica.replaced != self._replaced[0] or not self._complete():
            self._replaced = self.replica.replaced, now
        over = now - self._replaced[1] >= RIVALS_SECONDS
        self._undecided = frozenset() if over else frozenset(self.replica.recent_own())

    def summary(self) -> Summary:
        """What membership carries of us. `lineage` names the vector; the hash is left out while nobody has computed it."""
        known = self.replica.state_if_known
        return Summary(
            round=known.round if known else self.durable_round,
            lineage=self.log.digest,
            state_hash=known.hash if known else b"",
            samples=self.progress.samples,
            total_weight=self.log.total_weight,
        )

    def stop(self) -> None:
        """End `run` at the next await."""
        self._stopping.set()
        self._work.stop()
        self._wake.set()

    async def leave(self, grace_s: float) -> bool:
        """Publish what is learned and hand it to somebody. True when somebody has it."""
        self._leaving = True
        self._work.stop()
        deadline = self._clock.now() + grace_s
        before = self.published
        while self.progress.samples > 0 and self.published == before and self._clock.now() < deadline:
            await self._clock.sleep(0.05)
        handed = False
        for peer in self._rng.sample(sorted(self._alive()), min(2, len(self._alive()))):
            if self._clock.now() < deadline:
                handed |= await self._exchange.exchange(peer)
        if self.log.digest != self._saved_digest:
            await self._save_all(None)
        self.stop()
        return handed

    def members_changed(self) -> None:
        """Nobody is waited for."""

    def on_message(self, peer: str, envelope: Envelope) -> None:
        """News. Raises PeerFault for what must be charged to `peer`."""
        if envelope.WhichOneof("body") != "gossip_news":
            raise PeerFault("bad_message", f"{envelope.WhichOneof('body')} in gossip mode")
        tops = gossip_wire.decode_tops(envelope.gossip_news.tops)
        if self._exchange.lacking(tops):
            self._news[peer] = (
                {**self._news.get(peer, {}), **tops} if len(self._news.get(peer, ())) < limits.GOSSIP_NEWS_MAX else tops
            )
            self._wake.set()

    def on_proof(self, first: Header, second: Header) -> None:
        """Two headers under one dot, verified: take back what they dispute."""
        retraction = self.replica.prove(Fork(first, second))
        self._say("updates taken back", level="warning", updates=len(retraction.dots), reason=retraction.reason)

    def due(self, peer: str) -> None:
        """Another exchange with this peer is due soon."""
        self._due.setdefault(peer, self._clock.now() + AGAIN_SECONDS)
        self._wake.set()

    def grew(self, keys: set[Key], but: str = "") -> None:
        """News of grown chains to a few peers."""
        tops = {
            key: top
            for key in sorted(keys)[: limits.GOSSIP_NEWS_MAX]
            if (top := self.log.vector.entries.get(key)) is not None
        }
        others = sorted(self._near() - {but})
        if tops:
            envelope = Envelope(gossip_news=gossip_wire.encode_news(tops))
            for peer in self._rng.sample(others, min(self.settings.fanout, len(others))):
                self._post(peer, envelope)

    # ------------------------------------------------------------------------------------------------ running

    async def run(self) -> None:
        """Until `stop`. Exceptions of any task that it owns come out here."""
        self._resume()
        tasks: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._train()),
            asyncio.ensure_future(self._keep_alike()),
        ]
        stop: asyncio.Future[Any] = asyncio.ensure_future(self._stopping.wait())
        try:
            pending: set[Any] = {*tasks, stop}
            while not self._stopping.is_set():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in (*tasks, stop, *self._tasks):
                task.cancel()
            await asyncio.gather(*tasks, stop, *self._tasks, return_exceptions=True)
            self.progress.phase = "finished"

    def _resume(self) -> None:
        updates = self._journal.updates
        self.replica.resume(
            [(decode_header(Signed.FromString(update.signed), self._run_id), update.payload) for update in updates]
        )

    async def _train(self) -> None:
        await self._started.wait()
        while not (self._stopping.is_set() or self._all_published or self._leaving or self.quiet):
            state = self.state
            self._work.open()
            self.progress.samples = self.progress.steps = 0
            self.progress.phase = "training"
            self._round_started = self._clock.now()
            work = await self._work.train(state, self._after_step)
            await self._publish(state, work)
            self.progress.samples = 0
        self.progress.phase = "finished"

    async def _after_step(self, stats: StepStats) -> None:
        progress, settings = self.progress, self.settings
        progress.steps += 1
        progress.samples += stats.samples
        progress.metrics = dict(stats.metrics)
        await self._hold("training", self.published + 1)
        elapsed = self._clock.now() - self._round_started
        due = progress.samples >= settings.target_samples or elapsed >= settings.round_seconds_max
        if due or self._leaving or self.quiet:
            self._work.stop()

    async def _publish(self, state: SharedState, work: Work) -> None:
        if self.replica.ended((self.me, self._journal.incarnation)):
            self._life_over()
        try:
            header = await self._work.publish(state, work)
        except JournalFull:
            header = None  # the journal has said so; what was learned stays in the residual
        if header is not None:
            self._include_own(header, work)
        await self._record(work)
        if self._save_is_due():
            await self._save_all(work)

    def _save_is_due(self) -> bool:
        grown = self.log.log_bytes - self._saved_bytes > SAVE_GROWTH * self._saved_bytes
        waited = (self._clock.now() - self._saved_at) / self.settings.save_seconds
        return (grown and waited >= SAVE_SHARE_MIN) or waited >= 1 or self._all_published or self._leaving

    async def _save_all(self, work: Work | None) -> None:
        async with self._saving:
            vector, round_ = self.log.vector, self.state.round
            self._saved_at, self._saved_bytes = self._clock.now(), self.log.log_bytes
            self._saved_digest = self.log.digest
            self._look_for_rivals()
            if await self._save(work):
                self.replica.made_durable(vector)
                self.durable_round = round_

    def _include_own(self, header: Header, work: Work) -> None:
        """The update is in the journal: now it counts here, and others may hear of it."""
        dot = header.dot
        if self.log.vector.seq(dot.peer, dot.incarnation) != dot.seq - 1 or self.replica.ended(
            (dot.peer, dot.incarnation)
        ):
            # While it was being signed its chain was ended by a healing: it counts nowhere and flows back.
            self._life_over()
            return
        added = self.replica.add(header, self._payload_of(dot))
        self.progress.rounds_done += 1
        self._say(
            "update published",
            seq=dot.seq,
            scale=round(header.scale, 6),
            void=added.void,
            samples=work.result.weight,
            included=self.state.round,
            state_hash=self.state.hash.hex()[:16],
        )
        self.grew({(dot.peer, dot.incarnation)})

    def _payload_of(self, dot: Dot) -> bytes:
        return next(update.payload for update in reversed(self._journal.updates) if update.dot == dot)

    # ------------------------------------------------------------------------------------------------ exchange

    async def _keep_alike(self) -> None:
        """Fetch what news announced, and now and then exchange with anybody."""
        next_at = self._clock.now() + self.settings.interval_s * self._rng.random()
        while not self._stopping.is_set():
            room = len(self._busy) < limits.GOSSIP_EXCHANGES_MAX  # else the end of a transfer wakes us
            until = min([next_at, *(at for peer, at in self._due.items() if room and peer not in self._busy)])
            if room and self._news.keys() - self._busy:  # left over, because it is too early for another fetch
                until = min(until, self._may_fetch_at() + ROUNDING_SECONDS)
            await self._wake.wait(until - self._clock.now())
            if self._clock.now() >= next_at:
                # ± 25 %, or all would meet at once.
                next_at = self._clock.now() + self.settings.interval_s * (0.75 + 0.5 * self._rng.random())
                near, alive = self._near(), self._alive()
                stray = len(near) < len(alive) and self._rng.random() < STRAY_SHARE
                if others := sorted(alive if stray else near):
                    self._due[self._rng.choice(others)] = self._clock.now()
            self._start_some()

    def _start_some(self) -> None:
        now = self._clock.now()
        for peer in [*(peer for peer, at in self._due.items() if at <= now), *self._news]:
            if len(self._busy) >= limits.GOSSIP_EXCHANGES_MAX:
                return
            if self._banned(peer):
                self._due.pop(peer, None)
                self._news.pop(peer, None)
            elif peer not in self._busy:
                if self._due.get(peer, now + 1) <= now:  # brings what the news was about, too
                    del self._due[peer]
                    self._news.pop(peer, None)
                    self._begin(peer, self._exchange.exchange(peer))
                elif now < self._may_fetch_at():
                    return  # what else there is is news, too
                elif not self._exchange.lacking(self._news[peer]):
                    del self._news[peer]  # others have brought it meanwhile
                elif self._exchange.apart(self._news[peer]):
                    del self._news[peer]
                    self._begin(peer, self._exchange.exchange(peer))
                else:
                    self._fetches_paid = max(now, self._fetches_paid) + self.settings.interval_s / FETCHES_PER_INTERVAL
                    self._begin(peer, self._exchange.fetch(peer, self._news.pop(peer)))

    def _may_fetch_at(self) -> float:
        return self._fetches_paid - self.settings.interval_s

    def _begin(self, peer: str, transfer: Coroutine[Any, Any, bool]) -> None:
        async def transferring() -> None:
            try:
                await transfer
            finally:
                self._busy.discard(peer)
                if self._news or self._due:
                    self._wake.set()

        self._busy.add(peer)
        task = asyncio.ensure_future(transferring())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._trouble(self.me, error)
