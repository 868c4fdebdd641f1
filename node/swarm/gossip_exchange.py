"""Keeping update logs alike: push-pull exchanges of what the other lacks, and quick fetches of what news announced.

Theory of operation. An exchange ("Gossip") begins with both sides' hellos: vector, frontier, view, limits. From them and the
two concurrent weights both find the same decision (Replica.decide): usually to add, then both ask for what they lack and both
send. What is asked for is claimed for a while, so that one update is not fetched twice at a time. News names the chains that
have just grown; who lacks them fetches ("Fetch") from whoever told, without any vector crossing the wire, and passes the news
on. Who has fallen behind a frontier, or lost a healing to a merged state, downloads the state at the floor.

An origin that signs two updates under one dot is found where its chains meet. A proof goes to whoever shows more of a chain
than the proof leaves.

Does not cover: what follows from an update (replica.py), the streams' transport (mesh.py), when to exchange (gossip.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from ...aggregation.forks import Fork, Key
from ...aggregation.gossip import UpdateLog, Verdict
from ...aggregation.heal import Kind
from ...aggregation.snapshots import Snapshot
from ...protocol import gossip_wire, limits
from ...protocol.ballot_messages import Header
from ...protocol.ballot_wire import decode_header
from ...protocol.errors import PeerFault
from ...protocol.gossip_wire import Hello, Range, Tops
from ...protocol.transport import Clock, DialError, Stream, StreamClosed
from ...protocol.version import VersionVector
from ...protocol.wire_pb2 import GossipHello, GossipStart, GossipWant, Updates
from .frames import parse, receive_payload, send_payload
from .replica import Replica

STREAM_SECONDS = 10.0
# A payload frame, at 1 Mbit/s, and its share of a busy line.
FRAME_SECONDS = 30.0
# A chain that is being fetched is not asked for from another peer before this.
CLAIM_SECONDS = 15.0
# Payloads up to this size travel inside the frame that announces them, several in one.
INLINE_BYTES_MAX = 16 * 1024
INLINE_OVERHEAD_BYTES = 32  # of one update in such a frame: tags and lengths
# Exchanges in a row in which nobody could give the next update of a chain, until a snapshot is taken instead.
STARVED_MAX = 4
_TROUBLE = (StreamClosed, DialError, asyncio.TimeoutError, PeerFault)


class GossipExchange:
    """Both ends of "Gossip" and "Fetch" streams."""

    def __init__(
        self,
        *,
        run_id: bytes,
        clock: Clock,
        replica: Replica,
        payload_bytes_max: int,
        open_stream: Callable[[str, str, float], Awaitable[Stream]],
        equivocation: Callable[[Header, Header], None],
        send_proof: Callable[[str, Fork], None],
        download: Callable[[str, bytes], Awaitable[Snapshot | None]],
        grew: Callable[[set[Key], str], None],
        again: Callable[[str], None],
        hold: Callable[[], Awaitable[None]],
        trouble: Callable[[str, BaseException], None],
        say: Callable[..., None],
        verify: Callable[[Header, bytes], None] = lambda header, payload: None,
    ) -> None:
        """
        Args:
            verify: of an update, what its header's signature does not cover; raises PeerFault.
            equivocation: told of two headers under one dot; bans their origin and spreads the proof.
            send_proof: to one peer that has not heard of it.
            download: the state at a peer's floor, by the hash of its file; from everybody who has it.
            grew: told of chains that grew, and by whom.
            again: another exchange with this peer is due soon.
            hold: test-only; awaited in the middle of what we opened.
        """
        self._run_id, self._clock, self.replica = run_id, clock, replica
        self._payload_bytes_max = payload_bytes_max
        self._open, self._equivocation, self._send_proof = open_stream, equivocation, send_proof
        self._download, self._grew, self._again = download, grew, again
        self._hold, self._trouble, self._say, self._verify = hold, trouble, say, verify
        self._claims: dict[Key, float] = {}  # chains that are being fetched, and until when
        self._suspect: dict[str, set[Key]] = {}  # peer → chains whose heads differ from ours
        self._starved: dict[Key, int] = {}
        self._replacing = False
        self._beaten: list[Hello] = []  # states that ours was found heavier than while another is downloaded
        self.exchanges = self.fetches = 0

    # ------------------------------------------------------------------------------------------------ streams

    async def exchange(self, peer: str) -> bool:
        """One exchange that we open. Whether it ended well."""
        return await self._with_stream(peer, "Gossip", self._exchange)

    async def _exchange(self, peer: str, stream: Stream) -> None:
        ours, era = self.replica.hello(), self.replica.replaced
        await _send_hello(stream, ours)
        await self._hold()
        await self._transfer(peer, stream, ours, await _read_hello(stream), era)

    async def serve(self, peer: str, stream: Stream) -> None:
        """Handler of one "Gossip" stream."""
        theirs = await _read_hello(stream)
        ours, era = self.replica.hello(), self.replica.replaced
        await _send_hello(stream, ours)
        await self._transfer(peer, stream, ours, theirs, era)

    async def fetch(self, peer: str, tops: Tops) -> bool:
        """What a peer's news announced and we lack. Whether it ended well."""
        wanted = self._unclaimed(self.lacking(tops))
        if not wanted:
            return True

        async def fetching(peer: str, stream: Stream) -> None:
            with self._claiming(wanted):
                got = await self._fetch(peer, stream, wanted)
            if got:
                self._grew(got, peer)

        return await self._with_stream(peer, "Fetch", fetching)

    async def _fetch(
        self, peer: str, stream: Stream, wanted: list[Range], staged: list[tuple[Header, bytes]] | None = None
    ) -> set[Key]:
        self.fetches += 1
        await stream.send(gossip_wire.encode_want(wanted))
        await self._hold()
        return await self._receive(peer, stream, staged)

    async def serve_fetch(self, peer: str, stream: Stream) -> None:
        """Handler of one "Fetch" stream."""
        want = GossipWant()
        parse(want, await stream.recv(STREAM_SECONDS))
        await self._send(stream, gossip_wire.decode_want(want))

    async def _with_stream(self, peer: str, kind: str, use: Callable[[str, Stream], Awaitable[None]]) -> bool:
        try:
            stream = await self._open(peer, kind, STREAM_SECONDS)
        except (StreamClosed, DialError, asyncio.TimeoutError) as error:
            self._trouble(peer, error)
            return False
        try:
            await use(peer, stream)
            return True
        except _TROUBLE as error:
            self._trouble(peer, error)
            return False
        finally:
            stream.cancel("over")

    # ------------------------------------------------------------------------------------------------ one exchange

    async def _transfer(self, peer: str, stream: Stream, ours: Hello, theirs: Hello, era: int) -> None:
        """Both hellos are known: decide, ask, send what is asked for, take what comes. The same on both sides.

        `era`: sums that had taken the place of ours at our hello.
        """
        self.exchanges += 1
        self._tell_proofs(peer, theirs)
        log = self.replica.log
        our_weight = log.weight_beyond(VersionVector(theirs.tops))
        wanted = self._want(peer, theirs)
        await stream.send(gossip_wire.encode_want(wanted, our_weight))
        want = GossipWant()
        parse(want, await stream.recv(STREAM_SECONDS))
        decision = self.replica.decide(ours, theirs, our_weight, want.concurrent_weight)
        if decision.kind is not Kind.ADD:
            self._say(
                "two sides meet", level="warning", peer=peer[-6:], decision=decision.kind.value, why=decision.reason
            )
        # Until all is here: to give up our side before theirs has come would be to learn nothing for a while; and if ours is
        # not what won any more, nothing keeps out what the loser sends.
        staged: list[tuple[Header, bytes]] | None = None if decision.kind is Kind.ADD else []
        if self._moved(ours, era):
            pass  # as after the transfer
        elif decision.kind is Kind.KEEP:
            self._decided(decision.kind, ours, theirs, want.concurrent_weight)
        elif decision.kind is Kind.ADD:
            self.replica.hear(theirs)
            if theirs.base == self.replica.log.base:
                self.replica.join_limits(theirs.limits)
        sender = asyncio.ensure_future(self._send(stream, gossip_wire.decode_want(want)))
        try:
            with self._claiming(wanted):
                got = await self._receive(peer, stream, staged)
            await sender
        finally:
            if not sender.done():
                sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
        if decision.kind is not Kind.MERGE and self._moved(ours, era):
            if got:
                self._grew(got, peer)
            return self._again(peer)
        if decision.kind is Kind.TAKE and self._replaced_whole(theirs):
            got = set()  # what they have comes with their state (_catch_up); until then ours stays as it is
        elif decision.kind in (Kind.KEEP, Kind.TAKE):
            if decision.kind is Kind.TAKE:
                self._decided(decision.kind, ours, theirs, our_weight)
            got = {(h.dot.peer, h.dot.incarnation) for h, payload in staged or () if self._take(peer, h, payload)}
        elif staged is not None:
            self._average(peer, ours, theirs, our_weight, want.concurrent_weight, staged)
        if got:
            self._grew(got, peer)
        await self._catch_up(peer, theirs, decision.kind, wanted, staged or [], era)

    def _moved(self, ours: Hello, era: int) -> bool:
        """Whether another exchange has been faster, and this side is no longer what the hello shows: then nothing that follows
        from the hello is true any more."""
        limits = self.replica.log.limits
        return self.replica.replaced != era or any(s > limits.get(k, s) for k, (s, _) in ours.tops.items())

    def _replaced_whole(self, theirs: Hello) -> bool:
        """Whether we, the loser, cannot come to the winner's state by updates: sums from different averages, or an earlier
        healing ended chains here that the winner goes on with. Then its state and its limits replace ours."""
        log = self.replica.log
        return log.base != theirs.base or any(theirs.tops.get(k, (0,))[0] > s for k, s in log.limits.items())

    def _decided(self, kind: Kind, ours: Hello, theirs: Hello, loser_weight: int) -> None:
        """One side is heavier."""
        if (
            kind is Kind.KEEP and self._replacing and theirs.base == ours.base
        ):  # among averages any that is taken is one less
            self._beaten.append(theirs)
        if self.replica.abandons(theirs, loser_weight):
            winner, loser = (ours, theirs) if kind is Kind.KEEP else (theirs, ours)
            self.replica.abandon(winner.tops, loser.tops)

    def _average(
        self,
        peer: str,
        ours: Hello,
        theirs: Hello,
        our_weight: int,
        their_weight: int,
        staged: list[tuple[Header, bytes]],
    ) -> None:
        if self.replica.log.base != ours.base:
            return  # another exchange has been faster
        try:
            self.replica.average(ours, theirs, our_weight, their_weight, staged)
        except ValueError as error:
            self._say("two sides could not be averaged yet", level="warning", peer=peer[-6:], why=str(error))
            self._again(peer)

    def _tell_proofs(self, peer: str, theirs: Hello) -> None:
        """Proofs that this peer cannot know, or it would show less."""
        proofs = self.replica.log.proofs
        for (origin, incarnation), (seq, _) in theirs.tops.items() if proofs else ():
            fork = proofs.get(origin)
            disputed = fork is not None and (incarnation, seq) >= (fork.dot.incarnation, fork.dot.seq)
            if fork is not None and disputed and theirs.frontier.get((origin, incarnation), (0,))[0] < seq:
                self._send_proof(peer, fork)

    async def _catch_up(
        self,
        peer: str,
        theirs: Hello,
        kind: Kind,
        wanted: list[Range],
        staged: list[tuple[Header, bytes]],
        era: int,
    ) -> None:
        """Take the state at the other's floor where its log cannot help any more."""
        replica = self.replica
        for one in wanted:
            if replica.log.vector.seq(*one.key) >= one.first or one.key in replica.log.frozen:
                self._starved.pop(one.key, None)
            elif kind is Kind.ADD:
                self._starved[one.key] = self._starved.get(one.key, 0) + 1
        forced = kind is Kind.TAKE and (
            self._replaced_whole(theirs) or any(s > replica.log.vector.seq(*k) for k, (s, _) in theirs.frontier.items())
        )
        behind = any(
            theirs.frontier.get(key, (0,))[0] >= seq > replica.log.vector.seq(*key)
            for key, (seq, _) in replica.log.behind.items()
        )
        starving = any(count >= STARVED_MAX for count in self._starved.values())
        if not (forced or behind or starving) or self._replacing:
            return
        self._replacing = True
        self._beaten.clear()
        try:
            snapshot = await self._download(peer, theirs.floor_hash)
            log: UpdateLog | None = None
            if snapshot is not None and forced:
                log = await self._whole(peer, theirs, snapshot, staged)
            elif snapshot is not None and self._fits(snapshot):
                log = replica.standing_on(snapshot)
            if forced and any(_heavier_first(theirs) >= _heavier_first(other) for other in self._beaten):
                log = None  # ours has grown meanwhile and won: two sides must not change places
            if log is not None and replica.replaced == era:
                replica.replace(log)
                self._starved.clear()
                self._say("state at the floor taken", included=replica.state.round, forced=forced)
            if snapshot is not None or forced:  # their floor may have changed since their hello
                self._again(peer)
        finally:
            self._replacing = False

    async def _whole(
        self, peer: str, theirs: Hello, snapshot: Snapshot, staged: list[tuple[Header, bytes]]
    ) -> UpdateLog | None:
        """The state at the winner's floor with all that it has shown above it: with less we would seem to be the lighter side
        to those who lost with us, and be drawn back. None where that is not to be had: the snapshot may be another side's, or
        newer than what was shown."""
        if snapshot.base != theirs.base or any(
            s > theirs.tops.get(k, (0,))[0] for k, (s, _) in snapshot.floor.entries.items()
        ):
            return None
        updates, before = list(staged), 2**63
        while True:
            log = self.replica.taking_over(theirs, snapshot, updates)
            lacking = _lacking(log, theirs.tops)
            missing = sum(one.last - one.first + 1 for one in lacking)
            if not lacking:
                return log
            if missing >= before:
                return None
            before = missing

            async def fetching(peer: str, stream: Stream, wanted: list[Range] = lacking) -> None:
                await self._fetch(peer, stream, wanted, updates)

            if not await self._with_stream(peer, "Fetch", fetching):
                return None

    def _fits(self, snapshot: Snapshot) -> bool:
        """Whether it may take the place of our log: it has all that is final here."""
        ours = self.replica.log.frontier.entries
        return snapshot.base == self.replica.log.base and all(
            snapshot.floor.seq(*key) >= seq for key, (seq, _) in ours.items()
        )

    # ------------------------------------------------------------------------------------------------ asking

    def apart(self, tops: Tops) -> bool:
        """Whether these chains have so much more than ours that an exchange must decide about it (`Replica.apart`)."""
        return self.replica.apart((one.key, one.last - one.first + 1) for one in self.lacking(tops))

    def lacking(self, tops: Tops) -> list[Range]:
        """What these chains have and ours do not."""
        return _lacking(self.replica.log, tops)

    def _unclaimed(self, lacking: list[Range]) -> list[Range]:
        """Without chains that another exchange is bringing: a chain comes in order, so from one peer at a time."""
        now = self._clock.now()
        for key in [key for key, until in self._claims.items() if until <= now]:
            del self._claims[key]
        return [one for one in lacking if one.key not in self._claims]

    @contextlib.contextmanager
    def _claiming(self, wanted: list[Range]) -> Iterator[None]:
        until = self._clock.now() + CLAIM_SECONDS
        mine = [one.key for one in wanted]
        self._claims.update((key, until) for key in mine)
        try:
            yield
        finally:
            for key in mine:
                self._claims.pop(key, None)

    def _want(self, peer: str, theirs: Hello) -> list[Range]:
        """What to ask of a peer with this hello: what we lack and nobody is giving us; disputed chains from their start."""
        wanted = self._unclaimed(self.lacking(theirs.tops))
        log = self.replica.log
        disputed = {key for key, _ in log.disagreements(VersionVector(theirs.tops))} | self._suspect.pop(peer, set())
        for key in sorted(disputed & theirs.tops.keys()):
            wanted.append(Range(key, theirs.frontier.get(key, (0,))[0] + 1, theirs.tops[key][0]))
        return [one for one in wanted if one.first <= one.last][: limits.MEMBERS_MAX // 2]

    # ------------------------------------------------------------------------------------------------ updates

    async def _send(self, stream: Stream, wanted: list[Range]) -> None:
        """What the other asked for, as far as it is here and within an exchange's bytes."""
        budget = limits.GOSSIP_EXCHANGE_BYTES_MAX
        log = self.replica.log
        frame, room = Updates(), limits.PAYLOAD_FRAME_BYTES
        for one in wanted:
            for seq in range(one.first, min(one.last, log.vector.seq(*one.key)) + 1):
                header = log.header_at(one.key, seq)
                if header is None or budget < 0:
                    break
                payload = log.payload(header.dot)
                budget -= len(payload)
                inline = len(payload) <= INLINE_BYTES_MAX
                size = len(header.signed) + len(payload) + INLINE_OVERHEAD_BYTES
                if frame.updates and (not inline or size > room):
                    await stream.send(frame.SerializeToString())
                    frame, room = Updates(), limits.PAYLOAD_FRAME_BYTES
                start = frame.updates.add(payload_size=len(payload), payload=payload if inline else b"")
                start.header.MergeFromString(header.signed)
                room -= size
                if not inline:
                    await stream.send(frame.SerializeToString())
                    await send_payload(stream, payload)
                    frame, room = Updates(), limits.PAYLOAD_FRAME_BYTES
        if frame.updates:
            await stream.send(frame.SerializeToString())
        await stream.done_sending()

    async def _receive(self, peer: str, stream: Stream, staged: list[tuple[Header, bytes]] | None = None) -> set[Key]:
        """Take updates until the other is done, into the log or, unjudged, into `staged`. Chains that grew."""
        grew: set[Key] = set()
        room = 2 * limits.GOSSIP_EXCHANGE_BYTES_MAX
        while True:
            try:
                frame = await stream.recv(FRAME_SECONDS)
            except StreamClosed as end:
                if end.clean:
                    return grew
                raise
            updates = Updates()
            parse(updates, frame)
            for start in updates.updates:
                header = decode_header(start.header, self._run_id)
                size = header.payload_size
                room -= size
                if start.payload_size != size or size > self._payload_bytes_max or room < 0:
                    raise PeerFault("bad_payload", f"{start.payload_size} bytes announced for {header.dot}")
                payload = start.payload
                if size > INLINE_BYTES_MAX:
                    payload = await receive_payload(stream, size, FRAME_SECONDS, fault="bad_payload")
                self._verify(header, payload)
                if staged is not None:
                    staged.append((header, payload))
                elif self._take(peer, header, payload):
                    grew.add((header.dot.peer, header.dot.incarnation))

    def _take(self, peer: str, header: Header, payload: bytes) -> bool:
        """Put one update into the log, or find what is wrong with it. Whether it is new."""
        verdict, other = self.replica.log.judge(header)
        if verdict is Verdict.NEW:
            added = self.replica.add(header, payload)
            if added.void:
                self._say("void update", level="warning", origin=header.dot.peer[-6:], reason=added.reason)
            return True
        if verdict is Verdict.FORK and other is not None:
            self._equivocation(other, header)
        elif verdict is Verdict.FORK:
            self._suspect.setdefault(peer, set()).add((header.dot.peer, header.dot.incarnation))
            self._again(peer)
        return False


def _heavier_first(hello: Hello) -> tuple[int, bytes]:
    return -hello.total_weight, hello.state_hash


def _lacking(log: UpdateLog, tops: Tops) -> list[Range]:
    more = [(key, seq) for key, (seq, _) in tops.items() if seq > log.top(key)[0]]
    if not more:
        return []
    frozen = log.frozen
    found = [Range(key, log.top(key)[0] + 1, min(seq, frozen.get(key, seq))) for key, seq in sorted(more)]
    return [one for one in found if one.first <= one.last]


async def _send_hello(stream: Stream, hello: Hello) -> None:
    data = gossip_wire.encode_hello(hello)
    await stream.send(GossipStart(hello_size=len(data)).SerializeToString())
    await send_payload(stream, data)


async def _read_hello(stream: Stream) -> Hello:
    start, wire = GossipStart(), GossipHello()
    parse(start, await stream.recv(STREAM_SECONDS))
    if start.hello_size > limits.GOSSIP_HELLO_BYTES_MAX:
        raise PeerFault("bad_vector", f"a hello of {start.hello_size} bytes, limit {limits.GOSSIP_HELLO_BYTES_MAX}")
    parse(wire, await receive_payload(stream, start.hello_size, STREAM_SECONDS, fault="bad_vector"))
    return gossip_wire.decode_hello(wire)
