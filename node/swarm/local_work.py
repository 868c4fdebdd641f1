"""This peer's own learning within a round: inner steps, the booked delta, the compressed, signed and journaled update.

Covers the way from `Learner.step` to a signed header whose bytes are on disk. Does not cover: when a round closes
(rounds.py decides), or what becomes of the update.

Invariant 3 lives here and in `aggregation/book.py`: what was learned is booked before anything else happens to it, so
that whatever compression drops or the swarm does not adopt stays in the residual.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import numpy as np

from ...aggregation.book import Book
from ...aggregation.compress import Compression, Sparse, decode, encode, max_payload_bytes
from ...protocol.ballot_messages import Encoding, Header, parse_header
from ...protocol.identity import Identity
from ...protocol.signing import sign_body
from ...protocol.transport import Clock
from ...protocol.version import Dot, sha256
from ...protocol.wire_pb2 import Dot as WireDot
from ...protocol.wire_pb2 import UpdateHeader
from ..learner import Learner, LocalResult, StepStats
from ..store.journal import Journal, OwnUpdate
from .shards import SHARDS
from .state import SharedState, head_of
from .updates import UpdateStore

# An update with a contribution of 1 or more is void (merge.py). What a coordinate owes beyond half of that waits for the next
# update: otherwise a residual that once grew too large would void every later update, too, for good. Half, because the
# quantizer may round a value up.
CONTRIBUTION_MAX = 0.5


@dataclass(frozen=True)
class Work:
    """What the inner steps of one round came to."""

    result: LocalResult
    steps: int
    seconds: float


@dataclass(frozen=True)
class Place:
    """The round that an update is made for, where it is not the one after the state (hybrid mode).

    Attributes:
        round, base_lineage: as in the header.
        promised: own updates that are not in the state yet and will be: what they hold is not sent again.
    """

    round: int
    base_lineage: bytes
    promised: tuple[Dot, ...] = ()


class LocalWork:
    """Runs the learner for one round at a time."""

    def __init__(
        self,
        *,
        learner: Learner,
        clock: Clock,
        book: Book,
        journal: Journal,
        store: UpdateStore,
        identity: Identity,
        run_id: bytes,
        compression: Compression,
        shards: Callable[[], tuple[int, ...]],
        dense: Callable[[int], bool] = lambda electorate: False,
        check_life: Callable[[], None] = lambda: None,
        scale: Callable[[SharedState, LocalResult], float] = lambda state, result: 0.0,
        momentum: float = 0.0,
        gain: float = 1.0,
        step_cost_s: float = 0.0,
    ) -> None:
        """
        Args:
            gain: what others may multiply an update with, beside its scale.
            dense: whether an electorate of this size exchanges densely.
            scale: of the update, signed with it, in gossip mode; 0 in ring mode.
            momentum: of the outer optimizer where it lives at the origin (gossip mode): Nesterov's.
            check_life: starts a new incarnation where one is due, or raises JournalFull.
            step_cost_s: virtual seconds of one inner step.
        """
        self._learner = learner
        self._clock = clock
        self.book = book
        self._journal = journal
        self._store = store
        self._identity = identity
        self._run_id = run_id
        self._compression = compression
        self._dense = dense
        self._shards = shards
        self._check_life, self._scale = check_life, scale
        self._momentum, self._gain, self._step_cost_s = momentum, gain, step_cost_s
        self.velocity: np.ndarray | None = None  # fp32 [d], with momentum
        self.encode, self.decode = encode, decode  # by name, so that a simulated liar can have its own
        self._stop = asyncio.Event()

    @property
    def payload_bytes_max(self) -> int:
        """The largest sparse payload of this run."""
        return max_payload_bytes(self.book.d, self._compression)

    def open(self) -> None:
        """A new round: a stop that was meant for the last one is over."""
        self._stop.clear()

    def stop(self) -> None:
        """End the inner steps after the one under way, or keep them from starting."""
        self._stop.set()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    async def train(self, state: SharedState, after_step: Callable[[StepStats], Awaitable[None]]) -> Work:
        """Inner steps from `state` until `stop`; the delta is in the book when this returns."""
        started = self._clock.now()
        shards = self._shards()
        await self._clock.run(lambda: self._begin(state, shards))
        steps = 0
        while not self._stop.is_set():
            stats = await self._clock.run(self._learner.step, cost_s=self._step_cost_s)
            steps += 1
            await after_step(stats)
        result = await self._clock.run(self._finish)
        return Work(result=result, steps=steps, seconds=self._clock.now() - started)

    def _begin(self, state: SharedState, shards: tuple[int, ...]) -> None:
        self._learner.load(state.theta)
        self._learner.set_shard(shards, SHARDS)
        self._learner.begin(state.round + 1)

    def _finish(self) -> LocalResult:
        result = self._learner.finish()
        if self._momentum and np.isfinite(result.delta).all():
            before = np.zeros_like(result.delta) if self.velocity is None else self.velocity
            self.velocity = np.float32(self._momentum) * before + result.delta
            # What is booked as learned is the step of the outer optimizer, so that the residual is what of it is still owed.
            result = replace(result, delta=result.delta + np.float32(self._momentum) * self.velocity)
        self.book.learn(result.delta)
        return result

    async def publish(self, state: SharedState, work: Work, place: Place | None = None) -> Header | None:
        """Compress the residual, sign, journal (fsynced) and store it. None when there is nothing to say.

        `place`: the round that it is for; default: the one after `state`.

        Raises JournalFull: nothing may be published; what was learned stays in the residual.
        """
        if work.result.weight <= 0:
            return None
        place = place or Place(state.round + 1, state.lineage)
        return await self._clock.run(lambda: self._publish(state, work, place))

    def _publish(self, state: SharedState, work: Work, place: Place) -> Header:
        self._check_life()
        residual = self.book.residual_f64(place.promised)
        if self._dense(len(state.electorate)):
            own: Sparse | np.ndarray = residual.astype(np.float32)
            payload, encoding = own.astype("<f4").tobytes(), Encoding.DENSE
        else:
            limit = CONTRIBUTION_MAX / max(1.0, self._gain * self._scale(state, work.result))
            payload, encoding = self.encode(residual.clip(-limit, limit), self._compression), Encoding.SPARSE
            own = self.decode(payload, residual.size, self._compression)
        headers: list[Header] = []
        learned = self.book.parts()["learned"]

        def build(dot: Dot, head: bytes) -> OwnUpdate:
            wire = UpdateHeader(
                dot=WireDot(peer=dot.peer, incarnation=dot.incarnation, seq=dot.seq),
                previous_head=head,
                round=place.round,
                base_lineage=place.base_lineage,
                weight=work.result.weight,
                encoding=encoding.value,  # pyright: ignore[reportArgumentType]
                payload_hash=sha256(payload),
                payload_size=len(payload),
                scale=self._scale(state, work.result),
            )
            header = parse_header(sign_body(self._identity, "update", "origin", self._run_id, wire.SerializeToString()))
            headers.append(header)
            return OwnUpdate(
                dot=dot,
                round=state.round + 1,
                base_lineage=state.lineage,
                signed=header.signed,
                payload=payload,
                head=head_of(header),
                delta=work.result.delta,
                learned=learned,
            )

        dot = self._journal.say(self._identity.peer_id, build).dot
        (header,) = headers
        self.record_own(dot, own)
        if header.encoding is Encoding.SPARSE:
            self._store.put(header, payload)
        return header

    def record_own(self, dot: Dot, own: Sparse | np.ndarray) -> None:
        """Book an own update's decoded value: what is given back if the swarm does not adopt it."""
        self.book.record(dot, own)
