"""From a ring's decision to its sum in everybody's log: fetching, adding up, sealing, publishing.

Theory of operation. Every member fetches the committed updates and computes their sum. Then one of them, the convener of the
deciding attempt first, asks all for a seal on the next dot of its own chain of combined updates; with seals of more than
half of the ring it journals the combined update and gossips it. Who does not get there in time is followed by the next. A
member seals one dot for a ring, once, and not after a restart (it then knows the ring no more): so at most one dot is ever
sealed by more than half, and no round counts twice. If the seals are divided between two publishers, or the one that has
them dies with them, nothing is published, and what the members learned flows back into their residuals.

Does not cover: how the ring decided (protocol/ballot.py), the log (replica.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ...aggregation.forks import head_of
from ...aggregation.hybrid import HybridRules, RingSum, combine, write_sum
from ...protocol.ballot_messages import Encoding, Header, Value, parse_header
from ...protocol.ballot_rules import is_majority
from ...protocol.errors import PeerFault
from ...protocol.identity import Identity
from ...protocol.rings import COMBINED_LIFE, Combined, Draw, Seal, decode_seal, dot_of, in_order, wire_dot
from ...protocol.signing import sign_body
from ...protocol.transport import Clock
from ...protocol.version import Dot, sha256
from ...protocol.wire_pb2 import Envelope, SealRequest, Signed, UpdateHeader
from ..store.journal import Journal, JournalFull, OwnUpdate
from .ring_exchange import RingExchange
from .updates import UpdateStore

RETRY_SECONDS = 0.5
# How long a publisher has the turn, and a ring is worked on in all. After it what its members put in is sent again.
TURN_SECONDS = 5.0
SETTLE_SECONDS = 30.0
# After this a ring is forgotten; until then it still seals.
FORGET_SECONDS = 60.0
NO_ARRAY = np.zeros(0, np.float32)


@dataclass
class Settling:
    """One decided ring, until its sum is in the log or given up.

    Attributes:
        order: who publishes, in turn.
        own: this peer's update in it, if it has one.
        combined: once it is computed, without seals.
        sealed: the dot that this peer has sealed it for.
    """

    draw: Draw
    value: Value
    order: tuple[str, ...]
    own: Dot | None
    since: float
    combined: Combined | None = None
    weight: int = 0
    sealed: Dot | None = None
    asking: Dot | None = None
    seals: dict[str, Signed] = field(default_factory=dict)

    @property
    def lineage(self) -> bytes:
        return self.value.base_lineage


class Sealing:
    """One peer's part in it."""

    def __init__(
        self,
        *,
        identity: Identity,
        run_id: bytes,
        clock: Clock,
        rules: HybridRules,
        d: int,
        exchange: RingExchange,
        store: UpdateStore,
        journal: Journal,
        next_dot: Callable[[], Dot],
        include: Callable[[Header, bytes, Settling], None],
        included: Callable[[bytes], bool],
        count: Callable[[], int],
        gone: Callable[[str], bool],
        post: Callable[[str, Envelope], None],
        say: Callable[..., None],
        hold: Callable[[], Awaitable[None]],
    ) -> None:
        """
        Args:
            journal: of combined updates alone.
            next_dot: the name of the next combined update; blocks; raises JournalFull.
            include: puts one that is journaled into the log and tells others.
            included: whether the log has the sum of a ring, by its lineage.
            count: updates in the log now, which checkpoints are numbered by.
            gone: whether a peer is dead or banned.
            hold: test-only; awaited before seals are asked for.
        """
        self.me = identity.peer_id
        self._identity, self._run_id, self._clock = identity, run_id, clock
        self._rules, self._d = rules, d
        self._exchange, self._store, self._journal = exchange, store, journal
        self._next_dot, self._include, self._included = next_dot, include, included
        self._count, self._gone = count, gone
        self._post, self._say, self._hold = post, say, hold
        self._rings: dict[bytes, Settling] = {}
        self._turn = asyncio.Lock()  # a dot is asked for by one ring at a time
        self._news = asyncio.Event()

    # ------------------------------------------------------------------------------------------------ readers

    def promised(self) -> tuple[Dot, ...]:
        """Own updates that a ring has decided on and that are still expected in the log."""
        now = self._clock.now()
        return tuple(
            ring.own
            for ring in self._rings.values()
            if ring.own is not None and now - ring.since < SETTLE_SECONDS and not self._included(ring.lineage)
        )

    # ------------------------------------------------------------------------------------------------ messages

    def asked(self, peer: str, request: SealRequest) -> None:
        """A member wants to publish. Raises PeerFault."""
        dot = dot_of(request.dot)
        if dot.peer != peer or not dot.incarnation & COMBINED_LIFE:
            raise PeerFault("bad_ring", f"asks for a seal on {dot}, which is not of its combined updates")
        ring = self._rings.get(request.lineage)
        if ring is not None and peer in ring.draw.members and ring.combined is not None:
            self._seal(ring, dot)

    def _seal(self, ring: Settling, dot: Dot) -> None:
        ring.sealed = ring.sealed or dot
        if ring.sealed != dot or ring.combined is None:
            return
        seal = Seal(self.me, ring.lineage, ring.value.hash, ring.combined.sum_hash, dot)
        signed = seal.sign(self._identity, self._run_id)
        if dot.peer == self.me:
            ring.seals[self.me] = signed
        else:
            self._post(dot.peer, Envelope(seal=signed))

    def sealed(self, peer: str, signed: Signed) -> None:
        """A seal that this peer has asked for. Raises PeerFault."""
        seal = decode_seal(signed, self._run_id)
        if seal.peer != peer:
            raise PeerFault("wrong_signer", f"a seal of {seal.peer[-8:]}")
        ring = self._rings.get(seal.lineage)
        if ring is None or ring.combined is None or peer not in ring.draw.members or seal.dot != ring.asking:
            return
        if (seal.value_hash, seal.sum_hash) != (ring.value.hash, ring.combined.sum_hash):
            return self._say("a member of the ring has another sum", level="warning", member=peer[-6:])
        ring.seals[peer] = signed
        self._news.set()

    # ------------------------------------------------------------------------------------------------ a ring

    async def settle(self, draw: Draw, value: Value, order: tuple[str, ...]) -> None:
        """See a decided ring through. Ends when its sum is in the log, or after SETTLE_SECONDS."""
        now = self._clock.now()
        self._rings = {k: ring for k, ring in self._rings.items() if now - ring.since < FORGET_SECONDS}
        own = next((u.dot for u in value.updates if u.dot.peer == self.me), None)
        ring = self._rings[value.base_lineage] = Settling(draw, value, order, own, now)
        if not value.updates:
            return
        if not await self._compute(ring):
            self._say("updates of a ring are nowhere to be had", level="warning", round=value.round)
            return
        for turn, peer in enumerate(order):
            await self._until(ring, ring.since + turn * TURN_SECONDS, order[:turn])
            if self._over(ring):
                return
            if peer == self.me:
                await self._publish(ring)

    def _over(self, ring: Settling) -> bool:
        return self._included(ring.lineage) or self._clock.now() - ring.since >= SETTLE_SECONDS

    async def _until(self, ring: Settling, at: float, before: tuple[str, ...]) -> None:
        """Wait for a turn: until `at`, or until all those before are gone."""
        while self._clock.now() < at and not self._over(ring) and not all(map(self._gone, before)):
            await self._clock.sleep(min(RETRY_SECONDS, max(0.0, at - self._clock.now())))

    async def _compute(self, ring: Settling) -> bool:
        """Fetch the committed updates and add them up. False when nobody has them."""
        hashes = [update.update_hash for update in ring.value.updates]
        holders = dict.fromkeys([*(u.dot.peer for u in ring.value.updates), *ring.value.roster])
        while await self._exchange.pull(hashes, holders):
            if self._over(ring):
                return False
            await self._clock.sleep(RETRY_SECONDS)
        try:
            updates = [self._store.load(hash_) for hash_ in hashes]
        except KeyError:  # gone from the disk since
            return False
        found: RingSum = await self._clock.run(lambda: combine(updates, ring.draw.peers, self._d, self._rules))
        counted = tuple(update.dot in found.counted for update in ring.value.updates)
        ring.weight = found.weight
        ring.combined = Combined(ring.draw, ring.value, counted, write_sum(found.indices, found.fixed, self._d))
        return True

    async def _publish(self, ring: Settling) -> None:
        """Collect seals, journal, gossip."""
        await self._hold()
        async with self._turn:
            if self._over(ring):
                return
            try:
                dot = await self._clock.run(self._next_dot)
                if not await self._collect(ring, dot):
                    return self._say("a ring's sum is not sealed", level="warning", round=ring.value.round,
                                     seals=len(ring.seals), ring=len(ring.draw.members))  # fmt: skip
                number = self._count() + 1
                header, payload = await self._clock.run(lambda: self._write(ring, dot, number))
            except JournalFull as error:
                return self._say("a ring's sum is not published", level="debug", cause=str(error))
            finally:
                ring.asking = None
            self._include(header, payload, ring)

    async def _collect(self, ring: Settling, dot: Dot) -> bool:
        """Whether more than half of the ring have sealed it for `dot`."""
        size, end = len(ring.draw.members), self._clock.now() + TURN_SECONDS
        ring.asking, ring.seals = dot, {}
        self._seal(ring, dot)
        request = Envelope(seal_request=SealRequest(lineage=ring.lineage, dot=wire_dot(dot)))
        while not is_majority(len(ring.seals), size):
            if self._clock.now() >= end or self._included(ring.lineage):
                return False
            for peer in ring.draw.members:
                if peer != self.me and peer not in ring.seals:
                    self._post(peer, request)
            self._news.clear()
            repeat_at = self._clock.now() + RETRY_SECONDS
            while not is_majority(len(ring.seals), size) and (left := repeat_at - self._clock.now()) > 1e-6:
                try:
                    await asyncio.wait_for(self._news.wait(), left)
                except asyncio.TimeoutError:
                    break
                self._news.clear()
        return True

    def _write(self, ring: Settling, dot: Dot, number: int) -> tuple[Header, bytes]:
        """Sign and journal the combined update: from here on it is said. Raises JournalFull."""
        assert ring.combined is not None
        payload = replace(ring.combined, seals=in_order(list(ring.seals.items()))).encode()
        headers: list[Header] = []

        def build(next_: Dot, head: bytes) -> OwnUpdate:
            if next_ != dot:
                raise JournalFull(f"a new life began while {dot} was sealed")
            wire = UpdateHeader(
                dot=wire_dot(dot),
                previous_head=head,
                round=ring.value.round,
                base_lineage=ring.lineage,
                weight=ring.weight,
                encoding=Encoding.COMBINED.value,  # pyright: ignore[reportArgumentType]
                payload_hash=sha256(payload),
                payload_size=len(payload),
                scale=1.0,
            )
            header = parse_header(sign_body(self._identity, "update", "origin", self._run_id, wire.SerializeToString()))
            headers.append(header)
            return OwnUpdate(
                dot=dot,
                round=number,
                base_lineage=ring.lineage,
                signed=header.signed,
                payload=payload,
                head=head_of(header),
                delta=NO_ARRAY,
                learned=NO_ARRAY.astype(np.int64),
            )

        self._journal.say(self.me, build)
        return headers[0], payload
