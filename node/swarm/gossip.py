"""Gossip mode: every peer publishes when it has something, and everybody gets everything. Drives the pure update log.

Theory of operation. One task trains: inner steps from the state as it is, then a signed update with its scale, journaled, put
into the own log, told to a few peers. Another keeps the logs alike: every `interval_s`, and at once when news says that
somebody has more, it opens a "Gossip" stream to a peer; both show their vectors, both ask for what they lack, both send.
What is asked for is claimed for a while, so that one update is not fetched twice at a time. News of what arrived is passed on
once, which reaches everybody in about log(n) steps; the periodic exchange mends what was lost.

Order never matters (aggregation/gossip.py): peers with equal vectors have equal bits. An origin that signs two updates under
one dot is found where its chains meet; the proof spreads, what it disputes is taken back everywhere.

Does not cover: which update is void (aggregation/contributions.py), the streams' transport (mesh.py).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ...aggregation.forks import Fork, Key
from ...aggregation.gossip import UpdateLog, Verdict
from ...protocol import gossip_wire
from ...protocol.ballot_messages import Header
from ...protocol.ballot_wire import decode_header
from ...protocol.errors import PeerFault
from ...protocol.gossip_wire import Range, Tops
from ...protocol.identity import Identity
from ...protocol.transport import Clock, DialError, Stream, StreamClosed
from ...protocol.version import VersionVector
from ...protocol.wire_pb2 import Envelope, GossipHello, GossipWant, Signed, Summary, UpdateStart
from ..learner import StepStats
from ..store.journal import Journal, JournalFull
from .frames import parse, receive_payload, send_payload
from .local_work import LocalWork, Work
from .rounds import Progress
from .state import SharedState

STREAM_SECONDS = 10.0
# A payload frame, at 1 Mbit/s, and its share of a busy line.
FRAME_SECONDS = 30.0
# An update that was asked for is not asked for again from another peer before this.
CLAIM_SECONDS = 15.0
# Exchanges that we open at once; what others open is bounded by their number.
EXCHANGES_MAX = 4
# Bytes of updates that one exchange brings at most in each direction; the rest comes with the next.
EXCHANGE_BYTES_MAX = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class GossipSettings:
    """The manifest's part.

    Attributes:
        target_samples, round_seconds_max: a peer publishes after so many own samples, or after this time.
        rounds_max: own updates after which the run is over for this peer; 0: never.
        interval_s: seconds between two exchanges that this peer begins by itself.
        fanout: peers that news is told to.
        outer_lr: the outer step size.
    """

    target_samples: int
    round_seconds_max: float
    rounds_max: int
    interval_s: float
    fanout: int
    outer_lr: float


class Gossip:
    """One peer in gossip mode. From outside it looks as `Rounds` does: `run` in a task, `stop` or `leave` to end."""

    def __init__(
        self,
        *,
        identity: Identity,
        run_id: bytes,
        clock: Clock,
        rng: random.Random,
        settings: GossipSettings,
        log: UpdateLog,
        work: LocalWork,
        journal: Journal,
        open_stream: Callable[[str, str, float], Awaitable[Stream]],
        post: Callable[[str, Envelope], None],
        alive: Callable[[], set[str]],
        equivocation: Callable[[Header, Header], None],
        banned: Callable[[str], bool],
        trouble: Callable[[str, BaseException], None],
        save: Callable[[Work | None], Awaitable[bool]],
        say: Callable[..., None],
        hold: Callable[[str, int], Awaitable[None]],
        started: asyncio.Event,
    ) -> None:
        """
        Args:
            equivocation: told of two headers under one dot; bans their origin and spreads the proof.
            save: makes log, book and learner durable; says whether it succeeded.
        """
        self.me = identity.peer_id
        self._run_id, self._clock, self._rng = run_id, clock, rng
        self.settings, self.log = settings, log
        self._work, self._journal = work, journal
        self._open, self._post, self._alive = open_stream, post, alive
        self._equivocation, self._banned, self._trouble = equivocation, banned, trouble
        self._save, self._say, self._hold, self._started = save, say, hold, started
        self.progress = Progress()
        self.published = 0  # own updates in this run
        self.journal_trouble = ""
        self._shared: tuple[bytes, SharedState] | None = None
        self.durable_round = self.state.round
        self._stopping = asyncio.Event()
        self._leaving = False
        self._wake = asyncio.Event()
        self._news: dict[str, None] = {}  # peers that have something we lack, in the order heard
        self._claims: dict[tuple[Key, int], float] = {}
        self._suspect: dict[str, set[Key]] = {}  # peer → chains whose heads differ from ours
        self._round_started = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy: set[str] = set()  # peers with an exchange that we opened
        self.exchanges = 0
        self.quiet = False  # publish nothing more, but go on exchanging: states come to rest only when all do

    # ------------------------------------------------------------------------------------------------ outside

    @property
    def state(self) -> SharedState:
        """The shared state as the log has it now. Its round is the number of updates included."""
        cached, now = self._shared, self.log.digest + self.log.base
        if cached is None or cached[0] != now:
            vector = self.log.vector
            made = SharedState.make(
                theta=self.log.theta,
                outer=None,
                round_=sum(seq for seq, _ in vector.entries.values()),
                lineage=self.log.version,
                vector=vector,
                electorate=(),
                total_weight=self.log.total_weight,
            )
            self._shared = cached = (now, made)
        return cached[1]

    @property
    def finished(self) -> bool:
        return 0 < self.settings.rounds_max <= self.published

    def summary(self) -> Summary:
        """What membership carries of us."""
        state = self.state
        return Summary(
            round=state.round,
            lineage=state.lineage,
            state_hash=state.hash,
            samples=self.progress.samples,
            total_weight=state.total_weight,
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
                handed |= await self._exchange(peer)
        self.stop()
        return handed

    def members_changed(self) -> None:
        """Nobody is waited for."""

    def on_message(self, peer: str, envelope: Envelope) -> None:
        """News. Raises PeerFault for what must be charged to `peer`."""
        if envelope.WhichOneof("body") != "gossip_news":
            raise PeerFault("bad_message", f"{envelope.WhichOneof('body')} in gossip mode")
        tops = gossip_wire.decode_tops(envelope.gossip_news.tops)
        if self._lacking(tops):
            self._news[peer] = None
            self._wake.set()

    def on_proof(self, first: Header, second: Header) -> None:
        """Two headers under one dot, verified: take back what they dispute."""
        retraction = self.log.retract(Fork(first, second))
        self._say("updates taken back", level="warning", updates=len(retraction.dots), reason=retraction.reason)

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
        """Own updates that were journaled and are not in the log yet, as after a crash between the two."""
        for update in self._journal.updates:
            header = decode_header(Signed.FromString(update.signed), self._run_id)
            if self.log.judge(header)[0] is Verdict.NEW:
                self.log.add(header, update.payload)
        book = self._work.book
        for dot in book.dots():
            if not book.adopted(dot) and self.log.vector.includes(dot):
                book.adopt(dot)

    async def _train(self) -> None:
        await self._started.wait()
        while not (self._stopping.is_set() or self.finished or self._leaving or self.quiet):
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
        try:
            header = await self._work.publish(state, work)
            self.journal_trouble = ""
        except JournalFull as error:
            header, self.journal_trouble = None, str(error)
            self._say("publishing nothing: the journal cannot be written", level="error", cause=str(error))
        if header is not None:
            added = self.log.add(header, self._journal.updates[-1].payload)
            self._work.book.adopt(header.dot)
            self.published += 1
            self.progress.rounds_done += 1
            self._say(
                "update published",
                seq=header.dot.seq,
                scale=round(header.scale, 6),
                void=added.void,
                samples=work.result.weight,
                included=self.state.round,
                state_hash=self.state.hash.hex()[:16],
            )
            self._tell({(header.dot.peer, header.dot.incarnation)})
        await self._save(work)
        self.durable_round = self.state.round

    # ------------------------------------------------------------------------------------------------ exchange

    async def _keep_alike(self) -> None:
        """Exchange with whoever has news, and now and then with anybody."""
        next_at = self._clock.now() + self.settings.interval_s * self._rng.random()
        while not self._stopping.is_set():
            wait = max(0.0, next_at - self._clock.now())
            try:
                await asyncio.wait_for(self._wake.wait(), wait)
            except asyncio.TimeoutError:
                pass
            self._wake.clear()
            if self._clock.now() >= next_at:
                # ± 25 %, or all would meet at once.
                next_at = self._clock.now() + self.settings.interval_s * (0.75 + 0.5 * self._rng.random())
                if alive := sorted(self._alive()):
                    self._news.setdefault(self._rng.choice(alive))
            while self._news and len(self._busy) < EXCHANGES_MAX:
                peer = next(iter(self._news))
                del self._news[peer]
                if peer not in self._busy and not self._banned(peer):
                    self._begin(peer)

    def _begin(self, peer: str) -> None:
        async def exchanging() -> None:
            try:
                await self._exchange(peer)
            finally:
                self._busy.discard(peer)
                if self._news:
                    self._wake.set()

        self._busy.add(peer)
        task = asyncio.ensure_future(exchanging())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._trouble(self.me, error)

    async def _exchange(self, peer: str) -> bool:
        """One exchange that we open. Whether it ended well."""
        try:
            stream = await self._open(peer, "Gossip", STREAM_SECONDS)
        except (StreamClosed, DialError, asyncio.TimeoutError) as error:
            self._trouble(peer, error)
            return False
        try:
            await stream.send(gossip_wire.encode_hello(self.log.vector.entries))
            await self._transfer(peer, stream, await _read_hello(stream))
            return True
        except (StreamClosed, asyncio.TimeoutError, PeerFault) as error:
            self._trouble(peer, error)
            return False
        finally:
            stream.cancel("exchange over")

    async def serve(self, peer: str, stream: Stream) -> None:
        """Handler of one "Gossip" stream."""
        theirs = await _read_hello(stream)
        await stream.send(gossip_wire.encode_hello(self.log.vector.entries))
        await self._transfer(peer, stream, theirs)

    async def _transfer(self, peer: str, stream: Stream, theirs: Tops) -> None:
        """Both vectors are known: ask, send what is asked for, take what comes. The same on both sides."""
        self.exchanges += 1
        wanted = self._want(peer, theirs)
        claimed = [(r.key, seq) for r in wanted for seq in range(r.first, r.last + 1)]
        for one in claimed:
            self._claims[one] = self._clock.now() + CLAIM_SECONDS
        sender: asyncio.Task[None] | None = None
        try:
            await stream.send(gossip_wire.encode_want(wanted))
            want = GossipWant()
            parse(want, await stream.recv(STREAM_SECONDS))
            sender = asyncio.ensure_future(self._send(stream, gossip_wire.decode_want(want)))
            got = await self._receive(peer, stream)
            await sender
        finally:
            for one in claimed:
                self._claims.pop(one, None)
            if sender is not None and not sender.done():
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)
        if got:
            self._tell(got, but=peer)

    def _lacking(self, tops: Tops) -> list[Range]:
        """What these chains have and ours do not."""
        ours, frozen = self.log.vector, self.log.frozen
        found = []
        for key, (seq, _) in sorted(tops.items()):
            have = ours.seq(*key)
            last = min(seq, frozen.get(key, seq))
            if last > have:
                found.append(Range(key, have + 1, last))
        return found

    def _want(self, peer: str, theirs: Tops) -> list[Range]:
        """What to ask of a peer with this vector: what we lack and nobody is giving us; disputed chains from their start."""
        now = self._clock.now()
        self._claims = {one: until for one, until in self._claims.items() if until > now}
        wanted = []
        for lacking in self._lacking(theirs):
            last = lacking.first
            while last <= lacking.last and (lacking.key, last) not in self._claims:
                last += 1
            if last > lacking.first:
                wanted.append(Range(lacking.key, lacking.first, last - 1))
        disputed = {key for key, _ in self.log.disagreements(VersionVector(theirs))} | self._suspect.pop(peer, set())
        for key in sorted(disputed & theirs.keys()):
            wanted.append(Range(key, 1, theirs[key][0]))
        return wanted

    async def _send(self, stream: Stream, wanted: list[Range]) -> None:
        """What the other asked for, as far as it is here and within an exchange's bytes."""
        budget = EXCHANGE_BYTES_MAX
        for one in wanted:
            for seq in range(one.first, min(one.last, self.log.vector.seq(*one.key)) + 1):
                header = self.log.header_at(one.key, seq)
                if header is None or budget < 0:
                    break
                payload = self.log.payload(header.dot)
                start = UpdateStart(header=Signed.FromString(header.signed), payload_size=len(payload))
                await stream.send(start.SerializeToString())
                await send_payload(stream, payload)
                budget -= len(payload)
        await stream.done_sending()

    async def _receive(self, peer: str, stream: Stream) -> set[Key]:
        """Take updates until the other is done. Chains that grew."""
        grew: set[Key] = set()
        while True:
            try:
                frame = await stream.recv(FRAME_SECONDS)
            except StreamClosed as end:
                if end.clean:
                    return grew
                raise
            start = UpdateStart()
            parse(start, frame)
            header = decode_header(start.header, self._run_id)
            if start.payload_size != header.payload_size or header.payload_size > self._work.payload_bytes_max:
                raise PeerFault("bad_payload", f"{start.payload_size} bytes announced for {header.dot}")
            payload = await receive_payload(stream, header.payload_size, FRAME_SECONDS, fault="bad_payload")
            if self._take(peer, header, payload):
                grew.add((header.dot.peer, header.dot.incarnation))

    def _take(self, peer: str, header: Header, payload: bytes) -> bool:
        """Put one update into the log, or find what is wrong with it. Whether it is new."""
        verdict, other = self.log.judge(header)
        key = (header.dot.peer, header.dot.incarnation)
        if verdict is Verdict.NEW:
            added = self.log.add(header, payload)
            if added.void:
                self._say("void update", level="warning", origin=header.dot.peer[-6:], reason=added.reason)
            if header.dot.peer == self.me and self._work.book.knows(header.dot):
                self._work.book.adopt(header.dot)
            return True
        if verdict is Verdict.FORK and other is not None:
            self._equivocation(other, header)
        elif verdict is Verdict.FORK:
            self._suspect.setdefault(peer, set()).add(key)
            self._news[peer] = None
            self._wake.set()
        return False

    def _tell(self, keys: set[Key], but: str = "") -> None:
        """News of grown chains to a few peers."""
        tops = {key: top for key, top in self.log.vector.entries.items() if key in keys}
        others = sorted(self._alive() - {but})
        if tops:
            envelope = Envelope(gossip_news=gossip_wire.encode_news(tops))
            for peer in self._rng.sample(others, min(self.settings.fanout, len(others))):
                self._post(peer, envelope)


async def _read_hello(stream: Stream) -> Tops:
    hello = GossipHello()
    parse(hello, await stream.recv(STREAM_SECONDS))
    return gossip_wire.decode_tops(hello.entries)
