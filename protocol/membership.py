"""SWIM with Lifeguard as a pure state machine: who is alive, without anybody in charge. No I/O, no clock.

Theory of operation. Every probe interval one member, in shuffled turns, is pinged. No ack within the timeout: k others are
asked to ping it for us, and say so (nack) if they get no answer either. Still nothing by the end of the interval: it is
*suspect*, and dead unless it refutes within the suspicion timeout. News (rumours) rides on pings and acks, a bounded
number of times each, the least told first; whole tables are exchanged on first contact and now and then.

A record is ordered by (life, counter, severity). Only the subject raises its counter, and alive and left records carry its
signature, so nobody can revive or bury another with old news. A restarted process hears what is said of it and refutes.

Lifeguard (Dadgar, Phillips, Currey 2018): (1) local health: what goes wrong with our own probes raises `awareness`, which
stretches our interval and timeout; (2) the suspicion timeout starts long and shrinks with every independent reporter;
(3) a suspect is told so with the next ping. A tick that comes far too late means that this very process was frozen: the
probe under way is dropped and nobody is accused for it.

SWIM: Das, Gupta, Motivala 2002. Differences: dead members are pinged now and then for ever, so long partitions heal; the
signed records travel opaque; a peer at a new address is a move.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from . import limits


class State(IntEnum):
    """Numbers as on the wire; at equal counters the higher one wins."""

    ALIVE = 1
    SUSPECT = 2
    DEAD = 3
    LEFT = 4


@dataclass(frozen=True, kw_only=True)
class MembershipConfig:
    """Knobs, each with its trade-off. Presets below are differences from the defaults (a local network)."""

    probe_interval_s: float = 1.0
    """One probe per interval: shorter finds deaths sooner and sends more (two small messages per peer and interval)."""
    probe_timeout_s: float = 0.5
    """Direct ping; then k others are asked. About the 99th percentile of the round trip, plus scheduling delays."""
    indirect_probes: int = 3
    """k. More survive more loss on the way, and send more when somebody really is dead."""
    suspicion_mult: float = 4.0
    """Least suspicion timeout = mult * max(1, log10 n) * interval."""
    suspicion_max_mult: float = 4.0
    """The timeout starts at this times the least and shrinks to the least as independent reporters agree."""
    retransmit_mult: float = 4.0
    """A rumour is told mult * ceil(log10(n + 1)) times: enough to reach all with high probability."""
    awareness_max: int = 8
    """Local health runs from 0 to this; interval and timeout are multiplied by 1 + health."""
    sync_interval_s: float = 30.0
    """Whole tables are exchanged with one member this often; mends what rumours missed."""
    redial_dead_every_s: float = 5.0
    """One dead or left member is pinged this often, so that partitions heal."""


PRESETS: dict[str, MembershipConfig] = {
    "local": MembershipConfig(
        probe_interval_s=0.5,
        probe_timeout_s=0.35,
        suspicion_mult=3.0,
        suspicion_max_mult=2.0,
        sync_interval_s=10.0,
        redial_dead_every_s=2.0,
    ),
    "lan": MembershipConfig(),
    "wan": MembershipConfig(
        probe_interval_s=5.0, probe_timeout_s=3.0, suspicion_mult=6.0, suspicion_max_mult=6.0, sync_interval_s=60.0
    ),
}


@dataclass(frozen=True)
class Record:
    """What is said about one member. `signed`: opaque bytes that prove it; `reporter`: who says so (suspect, dead)."""

    peer: str
    state: State
    incarnation: int
    counter: int
    boot_id: bytes = b""
    addresses: tuple[str, ...] = ()
    reporter: str = ""
    samples_per_s: float = 0.0
    signed: bytes = b""

    @property
    def rank(self) -> tuple[int, int, int]:
        return (self.incarnation, self.counter, self.state)


# --- events and actions -----------------------------------------------------------------------------------------------


class Kind(IntEnum):
    """Numbers as on the wire."""

    PING = 1
    ACK = 2
    PING_REQ = 3
    NACK = 4
    SYNC = 5
    SYNC_REPLY = 6


@dataclass(frozen=True)
class Message:
    kind: Kind
    nonce: int = 0
    target: str = ""
    rumours: tuple[Record, ...] = ()


@dataclass(frozen=True)
class Send:
    to: str
    message: Message


@dataclass(frozen=True)
class Sign:
    """Sign this record (about ourselves, or our report of another) and hand it back with `signed`."""

    record: Record


@dataclass(frozen=True)
class Changed:
    """A member's state as this peer sees it changed."""

    peer: str
    old: State | None
    new: State
    reason: str


@dataclass(frozen=True)
class Heard:
    """An address of a member is new."""

    peer: str
    addresses: tuple[str, ...]


Action = Send | Sign | Changed | Heard


@dataclass
class _Member:
    record: Record
    since: float
    suspicion: Suspicion | None = None


@dataclass
class Suspicion:
    """Lifeguard's dynamic suspicion timeout."""

    started: float
    least_s: float
    most_s: float
    confirmations_wanted: int
    reporters: set[str] = field(default_factory=set)

    def timeout_s(self) -> float:
        """Shrinks from `most_s` to `least_s` with the logarithm of the number of independent reporters."""
        confirmed = max(0, len(self.reporters) - 1)
        if self.confirmations_wanted < 1:
            return self.least_s
        share = math.log(confirmed + 1) / math.log(self.confirmations_wanted + 1)
        return max(self.least_s, self.most_s - share * (self.most_s - self.least_s))


@dataclass
class _Probe:
    target: str
    nonce: int
    started: float
    direct_until: float
    ends: float
    asked: bool = False
    nacks_wanted: int = 0
    nacks: int = 0
    acked: bool = False


class Membership:
    """One peer's view of all. `handle` methods take `now` (monotonic seconds) and return actions."""

    def __init__(self, me: Record, config: MembershipConfig, rng: random.Random) -> None:
        """`me`: our own first record (ALIVE); it is signed by the first action that `tick` returns."""
        self.config = config
        self.me = me
        self.awareness = 0
        self._rng = rng
        self._members: dict[str, _Member] = {}
        self._order: list[str] = []
        self._probe: _Probe | None = None
        self._next_probe = 0.0
        self._next_sync = 0.0
        self._next_redial = 0.0
        self._last_tick: float | None = None
        self._told: dict[str, int] = {}  # peer whose record is still told → how often it was
        self._relayed: dict[int, tuple[str, int, str, float]] = {}  # our nonce → (asker, their nonce, target, nack at)
        self._out: list[Action] = []
        self._announced = False

    # ------------------------------------------------------------------------------------------------ readers

    def state(self, peer: str) -> State | None:
        member = self._members.get(peer)
        return member.record.state if member else None

    def record(self, peer: str) -> Record | None:
        member = self._members.get(peer)
        return member.record if member else None

    def members(self) -> Mapping[str, Record]:
        """All others ever heard of, in any state."""
        return {peer: member.record for peer, member in sorted(self._members.items())}

    def alive(self) -> set[str]:
        """Others that are alive or only suspect."""
        return {p for p, m in self._members.items() if m.record.state in (State.ALIVE, State.SUSPECT)}

    def dead(self) -> frozenset[str]:
        """Others that are dead or have left."""
        return frozenset(p for p, m in self._members.items() if m.record.state in (State.DEAD, State.LEFT))

    @property
    def size(self) -> int:
        """Alive members, this one included."""
        return 1 + len(self.alive())

    def _interval(self) -> float:
        return self.config.probe_interval_s * (1 + self.awareness)

    # ------------------------------------------------------------------------------------------------ time

    def tick(self, now: float) -> list[Action]:
        """Call at least a few times per probe timeout."""
        self._out = []
        if not self._announced:
            self._announced = True
            self._out.append(Sign(self.me))
        if self._last_tick is not None and now - self._last_tick > max(1.0, 2 * self.config.probe_interval_s):
            self._woke(now)
        self._last_tick = now
        self._advance_probe(now)
        self._expire_suspicions(now)
        for nonce, (asker, theirs, target, nack_at) in list(self._relayed.items()):
            if now >= nack_at:
                del self._relayed[nonce]
                self._send(asker, Message(Kind.NACK, theirs, target))
        if now >= self._next_probe and self._probe is None:
            self._start_probe(now)
        if now >= self._next_sync:
            self._next_sync = now + self.config.sync_interval_s * (0.75 + 0.5 * self._rng.random())
            if peers := sorted(self.alive()):
                self._send(self._rng.choice(peers), self._table(Kind.SYNC))
        if now >= self._next_redial:
            self._next_redial = now + self.config.redial_dead_every_s
            if gone := sorted(self.dead()):
                self._send(self._rng.choice(gone), self._table(Kind.SYNC))
        return self._out

    def next_tick(self) -> float:
        """When the next call of `tick` is useful, at the latest."""
        times = [self._next_probe, self._next_sync, self._next_redial]
        if self._probe is not None:
            times = [self._probe.ends if self._probe.asked else self._probe.direct_until]
        times += [m.suspicion.started + m.suspicion.timeout_s() for m in self._members.values() if m.suspicion]
        times += [entry[3] for entry in self._relayed.values()]
        return min(times)

    def _woke(self, now: float) -> None:
        """This process did not run for a while: what looks like others' silence was our own."""
        self._probe = None
        self._aware(+1)
        self._next_probe = now + self.config.probe_timeout_s
        for member in self._members.values():
            if member.suspicion is not None:
                member.suspicion.started = now

    def _aware(self, change: int) -> None:
        self.awareness = min(self.config.awareness_max, max(0, self.awareness + change))

    # ------------------------------------------------------------------------------------------------ probing

    def _start_probe(self, now: float) -> None:
        self._next_probe = now + self._interval()
        target = self._next_target()
        if target is None:
            return
        timeout = self.config.probe_timeout_s * (1 + self.awareness)
        nonce = self._rng.getrandbits(63)
        self._probe = _Probe(target, nonce, now, now + timeout, now + max(self._interval(), 2 * timeout))
        self._send(target, Message(Kind.PING, nonce), about=target)

    def _next_target(self) -> str | None:
        """Round robin over a shuffled list, which bounds the time until everybody was probed."""
        alive = self.alive()
        while self._order:
            peer = self._order.pop()
            if peer in alive:
                return peer
        self._order = sorted(alive)
        self._rng.shuffle(self._order)
        return self._order.pop() if self._order else None

    def _advance_probe(self, now: float) -> None:
        probe = self._probe
        if probe is None:
            return
        if probe.acked:
            self._probe = None
            self._aware(-1)
        elif now >= probe.ends:
            self._probe = None
            missed = probe.nacks_wanted - probe.nacks
            # No nack from those who were asked: the trouble may well be ours.
            self._aware(missed if probe.nacks_wanted else +1)
            self._suspect(probe.target, now, self.me.peer, "no ack to a ping, direct or indirect")
        elif now >= probe.direct_until and not probe.asked:
            probe.asked = True
            others = sorted(p for p in self.alive() if p != probe.target)
            chosen = self._rng.sample(others, min(self.config.indirect_probes, len(others)))
            probe.nacks_wanted = len(chosen)
            for peer in chosen:
                self._send(peer, Message(Kind.PING_REQ, probe.nonce, probe.target))
            self._send(probe.target, Message(Kind.PING, probe.nonce), about=probe.target)

    # ------------------------------------------------------------------------------------------------ suspicion

    def _suspicion(self, now: float) -> Suspicion:
        config, n = self.config, self.size + 1
        least = config.suspicion_mult * max(1.0, math.log10(max(1, n))) * config.probe_interval_s
        wanted = min(config.indirect_probes, n - 2)
        return Suspicion(now, least, least * config.suspicion_max_mult, wanted)

    def _suspect(self, peer: str, now: float, reporter: str, reason: str) -> None:
        member = self._members.get(peer)
        if member is None or member.record.state not in (State.ALIVE, State.SUSPECT):
            return
        if member.suspicion is None:
            member.suspicion = self._suspicion(now)
        if reporter not in member.suspicion.reporters:
            member.suspicion.reporters.add(reporter)
            if reporter == self.me.peer or member.record.state is State.ALIVE:
                record = replace(member.record, state=State.SUSPECT, reporter=reporter, signed=b"")
                self._adopt(record, now, reason, sign=reporter == self.me.peer)

    def _expire_suspicions(self, now: float) -> None:
        for peer, member in sorted(self._members.items()):
            suspicion = member.suspicion
            if suspicion is None or now - suspicion.started < suspicion.timeout_s():
                continue
            member.suspicion = None
            record = replace(member.record, state=State.DEAD, reporter=self.me.peer, signed=b"")
            waited = f"{now - suspicion.started:.1f} s without refutation, {len(suspicion.reporters)} reporters"
            self._adopt(record, now, waited, sign=True)

    # ------------------------------------------------------------------------------------------------ messages

    def received(self, now: float, peer: str, message: Message) -> list[Action]:
        """A message from an admitted peer, its rumours verified."""
        self._out = []
        for record in message.rumours:
            self._rumour(now, record)
        if message.kind is Kind.PING:
            self._send(peer, Message(Kind.ACK, message.nonce), about=peer)
        elif message.kind is Kind.ACK:
            self._on_ack(now, message.nonce)
        elif message.kind is Kind.PING_REQ:
            self._on_ping_req(now, peer, message)
        elif message.kind is Kind.NACK:
            if self._probe is not None and message.nonce == self._probe.nonce:
                self._probe.nacks += 1
        elif message.kind is Kind.SYNC:
            self._send(peer, self._table(Kind.SYNC_REPLY))
        return self._out

    def _on_ack(self, now: float, nonce: int) -> None:
        if self._probe is not None and nonce == self._probe.nonce:
            self._probe.acked = True
        elif (relayed := self._relayed.pop(nonce, None)) is not None:
            asker, theirs, _, _ = relayed
            self._send(asker, Message(Kind.ACK, theirs))

    def _on_ping_req(self, now: float, peer: str, message: Message) -> None:
        if message.target not in self._members or len(self._relayed) >= limits.MEMBERS_MAX:
            return
        nonce = self._rng.getrandbits(63)
        self._relayed[nonce] = (peer, message.nonce, message.target, now + 0.8 * self.config.probe_timeout_s)
        self._send(message.target, Message(Kind.PING, nonce), about=message.target)

    def introduce(self, now: float, peer: str) -> list[Action]:
        """A peer that was just connected to: exchange tables with it."""
        self._out = []
        self._send(peer, self._table(Kind.SYNC))
        return self._out

    def expect(self, now: float, peers: Iterable[str]) -> list[Action]:
        """These peers should be here (a commit names them): whoever was never heard of is probed, and may turn out dead."""
        self._out = []
        for peer in sorted(peers):
            if peer != self.me.peer and peer not in self._members and len(self._members) < limits.MEMBERS_MAX:
                self._adopt(Record(peer, State.ALIVE, 0, 0), now, "named by a commit, not heard of yet")
        return self._out

    def signed(self, now: float, record: Record) -> list[Action]:
        """A record that `Sign` asked for, with its signature: it can be told now."""
        self._out = []
        if record.peer == self.me.peer:
            if record.rank >= self.me.rank:
                self.me = record
                self._told[record.peer] = 0
        elif (member := self._members.get(record.peer)) is not None and member.record.rank == record.rank:
            member.record = record
            self._told[record.peer] = 0
        return self._out

    # ------------------------------------------------------------------------------------------------ rumours

    def _rumour(self, now: float, record: Record) -> None:
        if record.peer == self.me.peer:
            return self._about_me(record)
        member = self._members.get(record.peer)
        if member is None:
            if len(self._members) >= limits.MEMBERS_MAX:
                return
            if record.state is State.SUSPECT:
                record = replace(record, state=State.SUSPECT)
            self._adopt(record, now, "heard of it")
            return
        if record.state is State.SUSPECT and record.rank == member.record.rank:
            return self._suspect(record.peer, now, record.reporter, "another reporter")
        if record.rank <= member.record.rank:
            return
        if record.state is State.SUSPECT:
            member.suspicion = member.suspicion or self._suspicion(now)
            member.suspicion.reporters.add(record.reporter)
        else:
            member.suspicion = None
        if record.state in (State.SUSPECT, State.DEAD):  # those records name no addresses
            record = replace(record, addresses=record.addresses or member.record.addresses)
        self._adopt(record, now, f"{record.state.name.lower()} says {record.reporter[-6:] or 'itself'}")

    def _about_me(self, record: Record) -> None:
        """Refute: our own record must outrank whatever is said of us, even what we said in an earlier process."""
        mine = self.me
        worse = record.state is not State.ALIVE and mine.state is State.ALIVE and record.rank >= (
            mine.incarnation, mine.counter, 0
        )  # fmt: skip
        other = record.state is State.ALIVE and record.boot_id != mine.boot_id and record.rank >= mine.rank
        if not (worse or other):
            return
        if worse:
            self._aware(+1)
        if record.incarnation > mine.incarnation:
            return  # somebody knows a later life of ours; the handshake tells the node, which starts a new one
        self.me = replace(mine, counter=max(mine.counter, record.counter) + 1, signed=b"")
        self._out.append(Sign(self.me))

    def update_me(self, **changes: object) -> list[Action]:
        """Tell others new addresses, speed or LEFT about ourselves."""
        self._out = []
        self.me = replace(self.me, counter=self.me.counter + 1, signed=b"", **changes)  # type: ignore[arg-type]
        self._out.append(Sign(self.me))
        return self._out

    def _adopt(self, record: Record, now: float, reason: str, *, sign: bool = False) -> None:
        member = self._members.get(record.peer)
        old = member.record if member else None
        if member is None:
            self._members[record.peer] = _Member(record, now)
            if record.state is State.SUSPECT:
                self._members[record.peer].suspicion = self._suspicion(now)
                self._members[record.peer].suspicion.reporters.add(record.reporter)  # type: ignore[union-attr]
        else:
            member.record = record
        if old is None or old.state is not record.state:
            self._members[record.peer].since = now
            self._out.append(Changed(record.peer, old.state if old else None, record.state, reason))
        if record.addresses and (old is None or old.addresses != record.addresses):
            self._out.append(Heard(record.peer, record.addresses))
        if sign:
            self._out.append(Sign(record))
        elif record.signed:
            self._told[record.peer] = 0

    # ------------------------------------------------------------------------------------------------ sending

    def _send(self, to: str, message: Message, about: str = "") -> None:
        if not message.rumours:
            message = replace(message, rumours=self._rumours(about))
        self._out.append(Send(to, message))

    def _rumours(self, about: str) -> tuple[Record, ...]:
        """What to tell with a message: what is said of its receiver first (so it can refute), then the least told."""
        limit = self.config.retransmit_mult * math.ceil(math.log10(self.size + 1) or 1)
        chosen: list[Record] = []
        member = self._members.get(about)
        if member is not None and member.record.state is not State.ALIVE and member.record.signed:
            chosen.append(member.record)
        for peer in sorted(self._told, key=lambda p: (self._told[p], p)):
            if len(chosen) >= limits.RUMOURS_PER_MESSAGE_MAX:
                break
            record = self.me if peer == self.me.peer else self._members[peer].record
            if not record.signed or record in chosen:
                continue
            chosen.append(record)
            self._told[peer] += 1
            if self._told[peer] >= limit:
                del self._told[peer]
        return tuple(chosen)

    def _table(self, kind: Kind) -> Message:
        """Everybody's record, ours first; a random part of it where there are too many."""
        records = [m.record for m in self._members.values() if m.record.signed]
        room = limits.RUMOURS_PER_MESSAGE_MAX - 1
        if len(records) > room:
            records = self._rng.sample(sorted(records, key=lambda r: r.peer), room)
        mine = [self.me] if self.me.signed else []
        return Message(kind, rumours=tuple([*mine, *records]))
