"""Hybrid mode: rings that are drawn anew for every round, and gossip that carries what each of them came to.

Theory of operation. A peer goes round by round:

    train and seek a ring → drawn → (ballot) close, exchange, vote → decided → sum sealed and published → next

Inside a ring all is as in ring mode: one decree, the same ballot, the same ring all-gather (rounds.py); its electorate are
the members drawn. The shared state is gossip mode's: the update log, in which each ring's sum is one entry (hybrid_seal.py),
so that theta moves only through the log and peers with equal vectors have equal bits. Rings wait for nobody outside.

A ring that cannot decide, because half of it is dead or has gone on, is given up; a split decides nothing here. What its
members had put in flows back, and should a sum with it turn up after all, their books see it counted and owe that much less:
exactly once holds for each update, and the residual makes good whatever was sent a second time.

Does not cover: who is drawn (hybrid_draw.py), the log's upkeep (gossip.py), decisions (protocol/ballot.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...protocol import ballot_wire
from ...protocol.ballot import CloseRound, LocalResult, MembersDead, Phase
from ...protocol.ballot_messages import Header, parse_header
from ...protocol.ballot_rules import convener_order, is_majority
from ...protocol.commit import CheckedCommit
from ...protocol.deadlines import Deadlines, Wait
from ...protocol.errors import PeerFault
from ...protocol.rings import COMBINED_LIFE, NONCE_BYTES, SWARM_SHARE_MIN, Draw, decode_draw
from ...protocol.version import Dot, VersionVector
from ...protocol.wire_pb2 import Envelope, RingDraw, RingPlace, RingRequest, Signed, Summary
from ..learner import StepStats
from ..store.journal import Journal, JournalFull
from .ballot_driver import BallotDriver
from .gossip import Gossip
from .hybrid_draw import REPEAT_SECONDS, Drawer, Seeker
from .hybrid_replica import LEAP_MAX, HybridReplica
from .hybrid_seal import Sealing, Settling
from .local_work import Place, Work
from .state import SharedState

# After its ring has decided a peer waits for the sum before it trains on, but not longer than this.
SUM_SECONDS = 3.0
# Members that watch the ring's samples, to close the round at the target.
WATCHERS = 2


@dataclass
class Ring:
    """The ring that this peer is in now."""

    draw: Draw
    lineage: bytes
    drawn_at: float
    left: set[str] = field(default_factory=set)  # members that are in no such ring, or no more
    samples: dict[str, int] = field(default_factory=dict)  # by other member


class Hybrid(Gossip):
    """One peer in hybrid mode. From outside it looks as `Gossip` does, whose log and exchanges it has."""

    replica: HybridReplica

    def __init__(
        self,
        *,
        own: Journal,
        ballot: BallotDriver,
        sealing: Callable[[Hybrid], Sealing],
        ring_size_max: int,
        random_bytes: Callable[[int], bytes],
        dead: Callable[[], frozenset[str]],
        check_life: Callable[[], None],
        covered: Callable[[], int],
        **parts: Any,
    ) -> None:
        """
        Args:
            own: the journal of own inner updates; `journal`, among gossip's parts, is that of combined ones.
            sealing: makes the part that sees decided rings through.
            dead: members of the swarm that are dead or have left.
            check_life: starts a new incarnation where one is due. Raises JournalFull.
            covered: round of the oldest checkpoint.
        """
        super().__init__(**parts)
        self._own, self.ballot = own, ballot
        self._size_max, self._random_bytes, self._dead = ring_size_max, random_bytes, dead
        self._check_life, self._covered = check_life, covered
        self.sealing = sealing(self)
        self._drawer = Drawer(self.me, ring_size_max)
        self._drawing = Deadlines()  # in which ROSTER stands for the draw, from the first request
        self._seeker: Seeker | None = None
        self._draw: asyncio.Future[Draw] = asyncio.get_running_loop().create_future()
        self._ring: Ring | None = None
        self._given_up = asyncio.Event()
        self._told_at = 0.0
        self._round = max((parse_header(Signed.FromString(u.signed)).round for u in own.updates), default=0)
        self._sum_came = asyncio.Event()
        self.replica.on_sum = self._sum_came.set

    # ------------------------------------------------------------------------------------------------ outside

    @property
    def sums(self) -> Journal:
        """The journal of combined updates."""
        return self._journal

    @property
    def swarm_drawn(self) -> int:
        """Peers of the whole swarm, by the draw of the present ring."""
        return max(self._ring.draw.peers, len(self._ring.draw.members)) if self._ring is not None else 1

    @property
    def published(self) -> int:
        """Own updates of this life that were put into a ring, whatever became of it."""
        return self._own.last_seq

    @property
    def finished(self) -> bool:
        """Whether the run is over for this peer: its last ring is, and the sums of its rings are in the log or given up."""
        return self._all_published and self.progress.phase == "finished" and not self.sealing.promised()

    @property
    def round(self) -> int:
        """The last round that this peer has been through, as the swarm counts them. It names rings and no more: a liar can
        make it leap."""
        return self._round

    def summary(self) -> Summary:
        """What membership carries of us."""
        summary = super().summary()
        summary.open_round = self._next_round()
        return summary

    def members_changed(self) -> None:
        """Membership's view changed."""
        self._reckon()

    async def leave(self, grace_s: float) -> bool:
        """Push what is learned: close the ring's round and see its sum published. Then hand the log to somebody."""
        self._leaving = True
        self.ballot.feed(CloseRound("a member leaves"))
        deadline, before = self._clock.now() + grace_s, self._round
        while self._seeker is not None and self._round == before and self._clock.now() < deadline:
            await self._clock.sleep(0.1)
        self._work.stop()
        while self.sealing.promised() and self._clock.now() < deadline:
            await self._clock.sleep(0.1)
        return await super().leave(max(0.0, deadline - self._clock.now()))

    def on_proof(self, first: Header, second: Header) -> None:
        """Two headers under one dot. Inner updates are in sums that others have sealed: their proof only bans."""
        if first.dot.incarnation & COMBINED_LIFE:
            super().on_proof(first, second)

    def known(self, peer: str) -> tuple[int, int]:
        """Highest (incarnation, seq) of a peer's own updates that the log shows."""
        lives = [(incarnation & ~COMBINED_LIFE, 0) for who, incarnation in self.log.vector.entries if who == peer]
        return max([(0, 0), *lives, *self.log.inner_of(peer)])

    def is_final(self, dot: Dot) -> bool:
        """Whether an own update counts for good, or is so old that it will not be counted any more."""
        for_good = self.log.counts_for_good(dot) and dot not in self._undecided
        return for_good or dot not in self.replica.recent_own()

    # ------------------------------------------------------------------------------------------------ messages

    def on_message(self, peer: str, envelope: Envelope) -> None:
        """News, draws, the ballot of the ring, seals. Raises PeerFault for what must be charged to `peer`."""
        match envelope.WhichOneof("body"):
            case "ring_request":
                self._on_request(peer, envelope.ring_request)
            case "ring_draw":
                self._on_draw(decode_draw(envelope.ring_draw.SerializeToString(deterministic=True)))
            case "ring_place":
                self._on_place(peer, envelope.ring_place)
            case "seal_request":
                self.sealing.asked(peer, envelope.seal_request)
            case "seal":
                self.sealing.sealed(peer, envelope.seal)
            case body if body in ballot_wire.BODIES:
                self._on_ballot(peer, envelope)
            case _:
                super().on_message(peer, envelope)

    def _on_ballot(self, peer: str, envelope: Envelope) -> None:
        message = ballot_wire.decode(envelope, peer, self._run_id)
        size = envelope.ByteSize()
        if self.ballot.receive(peer, message, size) or self.ballot.answer(peer, message):
            return
        self.ballot.keep_early(peer, message, size)
        self._post(peer, Envelope(ring_place=self._place()))

    def _place(self) -> RingPlace:
        ring, nonce = self._ring, self._seeker.nonce if self._seeker is not None else bytes(NONCE_BYTES)
        return RingPlace(nonce=nonce, lineage=ring.lineage if ring else b"", samples=self.progress.samples)

    def _on_request(self, peer: str, request: RingRequest) -> None:
        if len(request.nonce) != NONCE_BYTES or not request.round:
            raise PeerFault("bad_ring", f"asks for round {request.round} with a nonce of {len(request.nonce)} bytes")
        round_ = min(request.round, self._next_round() + LEAP_MAX)
        draw = self._drawer.requested(self._clock.now(), peer, round_, request.nonce, self._alive())
        if draw is None:
            return
        envelope = Envelope(ring_draw=RingDraw.FromString(draw.encoded))
        for member in draw.members:
            if member == self.me:
                self._on_draw(draw)
            else:
                self._post(member, envelope)

    def _on_draw(self, draw: Draw) -> None:
        """Take the first draw of the present search, unless it makes the swarm out to be much smaller than it is."""
        seeker, swarm = self._seeker, 1 + len(self._alive())
        if seeker is None or self._draw.done() or draw.members.get(self.me) != seeker.nonce:
            return
        if not seeker.round <= draw.round <= seeker.round + 2 * LEAP_MAX or len(draw.members) > self._size_max:
            return
        if draw.peers < SWARM_SHARE_MIN * swarm:
            return
        self._drawing.observe(Wait.ROSTER, self._clock.now() - seeker.since)
        self._draw.set_result(draw)

    def _on_place(self, peer: str, place: RingPlace) -> None:
        ring = self._ring
        if ring is None or peer not in ring.draw.members:
            return
        if place.lineage == ring.lineage:
            ring.samples[peer] = place.samples
            self._maybe_close()
        elif place.lineage or place.nonce != ring.draw.members[peer]:
            ring.left.add(peer)
            self._reckon()
        else:
            self._post(peer, Envelope(ring_draw=RingDraw.FromString(ring.draw.encoded)))

    def _reckon(self) -> None:
        """Who of the ring is still in it; without a majority it is given up."""
        ring = self._ring
        if ring is None:
            return
        gone = frozenset(ring.draw.members) & (self._dead() | ring.left) - {self.me}
        if is_majority(len(ring.draw.members) - len(gone), len(ring.draw.members)):
            self.ballot.feed(MembersDead(gone))
        else:
            self._given_up.set()

    # ------------------------------------------------------------------------------------------------ rounds

    def _next_round(self) -> int:
        return 1 + max(self._round, self.replica.round_seen)

    async def _train(self) -> None:
        await self._started.wait()
        while not (self._stopping.is_set() or self._all_published or self._leaving or self.quiet):
            await self._one_round()
        self.progress.phase = "finished"

    async def _one_round(self) -> None:
        """Train, be drawn, decide, publish."""
        state = self.state
        self._work.open()
        self.progress.samples = self.progress.steps = 0
        self.progress.phase, self._round_started = "training", self._clock.now()
        self._given_up.clear()
        trainer = asyncio.ensure_future(self._work.train(state, self._after_step))
        try:
            draw = await self._seek(trainer)
            if draw is not None:
                await self._in_ring(draw, state, trainer)
        finally:
            self._work.stop()
            self._ring = self._seeker = None
            self.ballot.close("round over")
            self.ballot.retire()
            try:
                work = await asyncio.shield(trainer)  # the step under way ends by itself; its result is booked
            except asyncio.CancelledError:
                await asyncio.gather(trainer, return_exceptions=True)
                raise
        self.progress.samples = 0
        await self._after_round(work)

    async def _seek(self, trainer: asyncio.Future[Work]) -> Draw | None:
        """Ask to be drawn until we are. None when this peer is to end."""
        loop, now = asyncio.get_running_loop(), self._clock.now()
        patience = self._drawing.seconds(Wait.ROSTER)[0] + self._drawer.patience
        self._draw = loop.create_future()
        seeker = self._seeker = Seeker(self.me, self._next_round(), self._random_bytes(NONCE_BYTES), patience, now)
        while not (self._stopping.is_set() or self.quiet):
            asked = seeker.ask(self._clock.now(), self._alive(), self._size_max)
            request = RingRequest(round=seeker.round, nonce=seeker.nonce)
            if asked == self.me:
                self._on_request(self.me, request)
            else:
                self._post(asked, Envelope(ring_request=request))
            await asyncio.wait({self._draw}, timeout=REPEAT_SECONDS)
            if self._draw.done():
                return self._draw.result()
            if trainer.done():
                trainer.result()
        return None

    async def _in_ring(self, draw: Draw, state: SharedState, trainer: asyncio.Future[Work]) -> None:
        """The round of a ring, from its draw to its sum."""
        lineage = draw.lineage(self._run_id)
        self._ring = Ring(draw, lineage, self._clock.now())
        self.ballot.open(_start_of(draw, lineage), dead=frozenset(), abstain=False)
        self._reckon()
        pump = asyncio.ensure_future(self.ballot.run())
        inner = asyncio.ensure_future(self._put_in(draw, lineage, state, trainer))
        given_up = asyncio.ensure_future(self._given_up.wait())
        ends: set[asyncio.Future[Any]] = {given_up, self.ballot.decided}
        owned: set[asyncio.Future[Any]] = {pump, inner, *ends}
        self._maybe_close()
        try:
            while not any(end.done() for end in ends):
                await asyncio.wait(owned, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                self._maybe_close()
                for task in owned - ends:
                    if task.done():
                        task.result()  # raises what it died of
                        owned = owned - {task}
        finally:
            self._work.stop()
            pump.cancel()
            given_up.cancel()
            await asyncio.gather(pump, inner, given_up, return_exceptions=True)  # `inner` ends by itself
            self._round = max(self._round, draw.round)
        decided = self.ballot.decided.result() if self.ballot.decided.done() else None
        self.ballot.retire()
        self.ballot.end_exchange("decided" if decided is not None else "given up")
        if decided is None or decided.split:
            self._say("ring given up", level="warning", round=draw.round, ring=len(draw.members))
        else:
            await self._settle(draw, decided)

    async def _put_in(self, draw: Draw, lineage: bytes, state: SharedState, trainer: asyncio.Future[Work]) -> None:
        """Publish the own update into the ring once the inner steps have ended."""
        work = await asyncio.shield(trainer)
        if self.ballot.decided.done() or self._given_up.is_set():
            return  # too late: it is sent with the next round
        header: Header | None = None
        try:
            header = await self._work.publish(state, work, Place(draw.round, lineage, self.sealing.promised()))
        except JournalFull:
            pass  # the journal has said so; what was learned stays in the residual
        self.ballot.feed(LocalResult(header))
        self.ballot.report_held()

    async def _settle(self, draw: Draw, decided: CheckedCommit) -> None:
        """See the sum through beside what comes next, but give it the time that it usually takes."""
        self.progress.phase = "committing"
        order = convener_order(draw.members, decided.value.base_lineage, draw.round)
        first = decided.commit.attempt % len(order)
        task = asyncio.ensure_future(self.sealing.settle(draw, decided.value, order[first:] + order[:first]))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        self.progress.rounds_done += 1
        self._say(
            "ring decided",
            round=draw.round,
            ring=len(draw.members),
            updates=len(decided.value.updates),
            samples=self.progress.samples,
            attempt=decided.commit.attempt,
        )
        until = self._clock.now() + SUM_SECONDS
        while not self.replica.carries(decided.value.base_lineage) and not task.done():
            if (left := until - self._clock.now()) <= 1e-6:
                return
            self._sum_came.clear()
            waiter = asyncio.ensure_future(self._sum_came.wait())
            await asyncio.wait({waiter, task}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()

    async def _after_round(self, work: Work) -> None:
        await self._record(work)
        log = self.log
        if self._save_is_due():
            await self._save_all(work)
            covered = self._covered()
            keep = {u.dot for u in self._journal.updates if not log.vector.includes(u.dot) or u.round > covered}
            await self._clock.run(lambda: self._journal.compact(keep))

    async def entered(self, phase: Phase) -> None:
        """The ring's ballot has entered a phase."""
        self.progress.phase = phase.value
        await self._hold(phase.value, self.published + 1)

    # ------------------------------------------------------------------------------------------------ closing

    async def _after_step(self, stats: StepStats) -> None:
        progress = self.progress
        progress.steps += 1
        progress.samples += stats.samples
        progress.metrics = dict(stats.metrics)
        await self._hold("training", self.published + 1)
        ring, now = self._ring, self._clock.now()
        if ring is None:
            return
        if now - self._told_at >= 1.0:
            self._told_at = now
            for watcher in convener_order(ring.draw.members, ring.lineage, ring.draw.round)[:WATCHERS]:
                if watcher != self.me:
                    self._post(watcher, Envelope(ring_place=self._place()))
        self._maybe_close()

    def _maybe_close(self) -> None:
        """Close the ring's round when it is due."""
        ring = self._ring
        if ring is None or self._work.stopping:
            return
        total = self.progress.samples + sum(ring.samples.values())
        elapsed = self._clock.now() - max(ring.drawn_at, self._round_started)
        size, full = len(ring.draw.members), min(self._size_max, ring.draw.peers)
        target = -(
            -self.settings.target_samples * size // max(size, full)
        )  # a smaller ring is done as soon as a full one
        if total >= target:
            self.ballot.feed(CloseRound(f"{total} samples reach the target of {target}"))
        elif elapsed >= self.settings.round_seconds_max:
            self.ballot.feed(CloseRound(f"{elapsed:.1f} s reach the limit at {total} samples"))
        elif self._leaving or self.quiet:
            self.ballot.feed(CloseRound("this peer ends"))

    # ------------------------------------------------------------------------------------------------ publishing

    def next_dot(self) -> Dot:
        """The name of this peer's next combined update: in a chain of the present life that nothing has ended. Blocks.

        Raises JournalFull.
        """
        journal = self._journal
        key = (self.me, self._own.incarnation | COMBINED_LIFE)
        said = journal.last_seq if journal.incarnation == key[1] else 0
        if self.replica.ended(key) or self.log.vector.seq(*key) != said or journal.incarnation > key[1]:
            self._life_over()
        self._check_life()
        life = self._own.incarnation | COMBINED_LIFE
        if journal.incarnation != life:
            journal.start_incarnation(life - 1)
        return journal.next_dot(self.me)

    def include_sum(self, header: Header, payload: bytes, ring: Settling) -> None:
        """A combined update is in the journal: now it counts here, and others may hear of it."""
        dot = header.dot
        key = (dot.peer, dot.incarnation)
        if self.log.vector.seq(*key) != dot.seq - 1 or self.replica.ended(key):
            return self._life_over()
        added = self.replica.add(header, payload)
        self._say(
            "ring published",
            round=header.round,
            ring=len(ring.draw.members),
            updates=len(ring.value.updates),
            void=added.void,
            bytes=len(payload),
            included=self.state.round,
            state_hash=self.state.hash.hex()[:16],
        )
        self.grew({key})


def _start_of(draw: Draw, lineage: bytes) -> SharedState:
    """What a ring's ballot stands on: its draw, in place of a state, for members come with states of their own."""
    nothing = np.zeros(0, np.float32)
    return SharedState(nothing, None, draw.round - 1, lineage, VersionVector({}), tuple(draw.members), 0, lineage)
