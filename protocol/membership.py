"""SWIM with Lifeguard as a pure state machine: who is alive, without anybody in charge. (now, event) → actions.

Theory of operation. Every probe interval one member, in shuffled turns, is pinged. No ack within the timeout: k helpers are
asked to ping it for us, and say so (nack) if they get no answer either. Still nothing at the end: it is *suspect*, and dead
unless it refutes within the suspicion timeout. News (rumours) rides on every message, a bounded number of times each, the
least told first; whole tables are exchanged on first contact and now and then.

What counts is the *word* of each member, signed by itself: alive or left, ordered by (life, counter, state). Only the
subject can sign one, so old news can neither bury nor revive it. What others say, a *report* (suspect or dead, signed by its
reporter), counts only against exactly the newest word; a newer word refutes it. A restarted process begins with counter 1,
hears of its earlier words, and signs one above them.

    word newer than known        → adopted; suspicion and reports are void
    report on the newest word    → suspect; each new reporter shortens the timeout; "dead" makes it the least
    suspicion timeout            → dead, by our own clock only, and only after we asked: every member hears the accused
                                   before it believes
    old word or report received  → answered with the newer word; about ourselves: refuted
    heard from a suspect itself  → its timeout begins anew: whoever speaks is not dead
    dead or left                 → dialled now and then for ever; its newer word makes it alive again

Lifeguard (Dadgar, Phillips, Currey 2018): local health stretches our interval and timeout (awareness.py); the suspicion
timeout shrinks with independent reporters (suspicion.py); a suspect is told so with the next ping. A tick that comes too
late means that this very process did not run: that time counts for nobody, and after a long stop the probe under way is
dropped and suspicions start over.

SWIM: Das, Gupta, Motivala 2002. It leaves open, and here is added: signatures, redialling the dead, moves (the same
peer at a new address), words that are only expected (a commit names a peer that nobody spoke to).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from . import limits
from .awareness import Awareness
from .membership_config import PRESETS, MembershipConfig
from .membership_events import (
    Action,
    Changed,
    Event,
    Expected,
    Heard,
    Introduced,
    Kind,
    Leave,
    MemberView,
    Message,
    Received,
    Record,
    Send,
    SetMe,
    State,
    Tick,
)
from .membership_table import Member, Table
from .probing import FEW, Probe, Relay, Relays, Turns
from .rumours import Rumours, retransmits
from .suspicion import Suspicion

# A whole table is sent to one peer at most this often, however often it asks.
TABLE_SECONDS_MIN = 1.0
# How often a first contact is repeated that is not answered.
INTRODUCTION_TRIES = 5
# In a swarm so large that not everybody is a neighbour, this share of probes goes to members drawn from all: nobody can
# hide among neighbours of its own choice.
STRAY_SHARE = 1 / 32
# Up to so many members whole tables are exchanged at the configured interval; it grows by one interval each time the swarm
# doubles beyond that (memberlist's rule), because tables grow with it.
SYNC_UNSCALED_MAX = 32
# About so many members ask a suspect as soon as they hear that it is one; in larger swarms the rest ask at the end of the
# timeout, if its newer word has not come by itself until then.
ASKED_AT_ONCE = 32
# Members that are told goodbye; they pass it on.
GOODBYES = 8


class Membership:
    """One peer's view of all."""

    def __init__(
        self, me: Record, config: MembershipConfig, rng: random.Random, sign: Callable[[Record], Record]
    ) -> None:
        """
        Args:
            me: our own first word (ALIVE).
            sign: returns the record with `signed` filled in: our words, and our reports of others. Pure.
        """
        self.config = config
        self.awareness = Awareness(config.awareness_max)
        self.me = sign(me)
        self._sign, self._rng = sign, rng
        self._table = Table(me.peer)
        self._rumours = Rumours()
        self._turns = Turns(rng)
        self._probe: Probe | None = None
        self._relays = Relays()
        self._introducing: dict[str, tuple[float, int]] = {}  # peer → (when to repeat, tries left)
        self._next_probe = self._next_sync = self._next_redial = -math.inf
        self._last_tick: float | None = None
        self._promised = math.inf  # the tick that `due` asked for
        self._out: list[Action] = []
        self._rumours.tell((me.peer, False))

    # ------------------------------------------------------------------------------------------------ readers

    def members(self) -> Mapping[str, MemberView]:
        """All others ever heard of, in any state."""
        return {peer: member.view() for peer, member in self._table.items()}

    def member(self, peer: str) -> MemberView | None:
        member = self._table.get(peer)
        return member.view() if member else None

    def state(self, peer: str) -> State | None:
        member = self._table.get(peer)
        return member.state if member else None

    def alive(self) -> set[str]:
        """Others that are alive or only suspect."""
        return set(self._table.alive)

    def neighbours(self) -> frozenset[str]:
        """Live others that this one watches; all of them in a small swarm (overlay.py)."""
        return frozenset(self._table.neighbours())

    @property
    def sparse(self) -> bool:
        """Whether the swarm is so large that not everybody is a neighbour."""
        return len(self._table.neighbours()) < len(self._table.alive)

    def dead(self) -> frozenset[str]:
        """Others that are dead or have left."""
        return frozenset(self._table.gone)

    @property
    def size(self) -> int:
        """Alive members, this one included."""
        return 1 + len(self._table.alive)

    # ------------------------------------------------------------------------------------------------ events

    def handle(self, now: float, event: Event) -> list[Action]:
        """What to do now. `now`: monotonic seconds, never less than before."""
        self._out = []
        if isinstance(event, Tick):
            self._tick(now)
        elif isinstance(event, Received):
            self._received(now, event.peer, event.message)
        elif isinstance(event, Introduced):
            self._introduce(now, event.peer)
        elif isinstance(event, Expected):
            self._expect(now, event.peers)
        elif isinstance(event, SetMe):
            changes = {name: value for name, value in vars(event).items() if value is not None}
            self._speak(self.me.counter + 1, **changes)
        elif self.me.state is not State.LEFT:
            self._leave()
        return self._out

    def due(self) -> float:
        """When the next Tick is needed: for a driver that would rather sleep than tick every `tick_s`. To be asked after every
        event, because each may bring it forward. A tick that comes later than asked for is taken for a stop of this process."""
        times = [self._relays.next_at()]
        if self.me.state is not State.LEFT:
            probe = self._probe
            times += [self._next_sync, self._next_redial, *(at for at, _ in self._introducing.values())]
            times.append(self._next_probe if probe is None else probe.ends if probe.asked else probe.direct_until)
            times += [self._suspicion_of(peer).deadline() for peer in self._table.suspects]
        at = min(times)
        if self._last_tick is not None:
            at = max(at, self._last_tick + self.config.tick_s)
        self._promised = min(self._promised, at)
        return at

    def _tick(self, now: float) -> None:
        self._account_for_a_stop(now)
        for relay in self._relays.due(now):
            self._send(relay.asker, Message(Kind.NACK, relay.nonce, relay.target), "no answer from it yet")
        if self.me.state is State.LEFT:
            return
        self._advance_probe(now)
        self._expire_suspicions(now)
        if now >= self._next_probe and self._probe is None:
            self._start_probe(now)
        if now >= self._next_sync:
            scale = max(1.0, 1.0 + math.ceil(math.log2(self.size / SYNC_UNSCALED_MAX)))
            self._next_sync = now + scale * self.config.sync_interval_s * (0.75 + 0.5 * self._rng.random())
            if self._table.alive:
                self._send_table(now, self._rng.choice(sorted(self._table.alive)), Kind.SYNC, "now and then")
        if now >= self._next_redial:
            self._next_redial = now + self.config.redial_dead_every_s
            if self._table.gone:
                self._greet(self._rng.choice(sorted(self._table.gone)), "is it back?")
        for peer, (at, tries) in list(self._introducing.items()):
            if now >= at:
                del self._introducing[peer]
                self._introduce(now, peer, tries - 1)

    def _account_for_a_stop(self, now: float) -> None:
        """Silence while this process did not run says nothing about others."""
        late = 0.0
        if self._last_tick is not None:
            asked_for = self._last_tick + self.config.tick_s if self._promised == math.inf else self._promised
            late = now - asked_for
        self._last_tick, self._promised = now, math.inf
        if late <= self.config.probe_timeout_s:
            return
        for peer in self._table.suspects:
            self._suspicion_of(peer).shift(late)
        if self._probe is not None:
            self._probe.shift(late)
        if late > 2 * self.config.probe_interval_s:
            self._probe = None
            self.awareness.change(+1)
            self._next_probe = now + self.config.probe_timeout_s  # let what is queued be read first
            for peer in self._table.suspects:
                self._suspicion_of(peer).restart(now)

    def _suspicion_of(self, peer: str) -> Suspicion:
        member = self._table.get(peer)
        assert member is not None and member.suspicion is not None
        return member.suspicion

    # ------------------------------------------------------------------------------------------------ probing

    def _start_probe(self, now: float) -> None:
        interval = self.awareness.scale(self.config.probe_interval_s)
        timeout = self.awareness.scale(self.config.probe_timeout_s)
        self._next_probe = now + interval
        near, alive = self._table.neighbours(), self._table.alive
        stray = len(near) < len(alive) and self._rng.random() < STRAY_SHARE
        target = self._rng.choice(sorted(alive)) if stray else self._turns.next(near)
        if target is not None:
            nonce = self._rng.getrandbits(63)
            self._probe = Probe(target, nonce, now + timeout, now + max(interval, 2 * timeout))
            self._send(target, Message(Kind.PING, nonce), "its turn")

    def _advance_probe(self, now: float) -> None:
        probe = self._probe
        if probe is None:
            return
        if now >= probe.ends:
            self._probe = None
            # No nack from those who were asked: the trouble may well be ours.
            self.awareness.change(len(probe.helpers) - len(probe.nacks) if probe.helpers else +1)
            if (member := self._table.get(probe.target)) is not None:
                self._suspect(now, member, self._report(member, State.SUSPECT), "no ack to a ping, direct or indirect")
        elif now >= probe.direct_until and not probe.asked:
            probe.asked = True
            helpers = self._helpers(probe.target)
            probe.helpers = set(helpers)
            for peer in helpers:
                self._send(peer, Message(Kind.PING_REQ, probe.nonce, probe.target), "no direct ack in time")
            self._send(probe.target, Message(Kind.PING, probe.nonce), "no ack in time")

    def _helpers(self, target: str) -> list[str]:
        """Whom to ask to ping `target`: neighbours, those first that are its neighbours too and so connected to it."""
        near, wanted = self._table.neighbours() - {target}, self.config.indirect_probes
        both = sorted(near & self._table.overlay.around(target))
        helpers = self._rng.sample(both, min(wanted, len(both)))
        if len(helpers) < wanted and (others := sorted(near - set(both))):
            helpers += self._rng.sample(others, min(wanted - len(helpers), len(others)))
        return helpers

    def _on_ack(self, peer: str, nonce: int) -> None:
        if self._probe is not None and self._probe.acked_by(peer, nonce):
            self._probe = None
            self.awareness.change(-1)
        elif (relay := self._relays.acked(peer, nonce)) is not None:
            self._send(relay.asker, Message(Kind.ACK, relay.nonce), f"{relay.target[-6:]} answered")

    def _on_ping_req(self, now: float, peer: str, message: Message) -> None:
        nonce, timeout = self._rng.getrandbits(63), self.config.probe_timeout_s
        ends = now + timeout * (1 + self.config.awareness_max)
        relay = Relay(peer, message.nonce, message.target, now + 0.8 * timeout, ends)
        if message.target in self._table and self._relays.add(nonce, relay):
            self._send(message.target, Message(Kind.PING, nonce), f"for {peer[-6:]}")
        else:
            self._send(peer, Message(Kind.NACK, message.nonce, message.target), "not known here, or too busy")

    # ------------------------------------------------------------------------------------------------ suspicion

    def _report(self, member: Member, state: State) -> Record:
        """Our own report; unsigned, and so kept to ourselves, for one that never spoke."""
        word = member.word
        report = Record(word.peer, state, word.incarnation, word.counter, reporter=self.me.peer)
        return self._sign(report) if word.signed else report

    def _suspect(self, now: float, member: Member, report: Record, reason: str) -> None:
        """Start, confirm or hurry the suspicion of a live member."""
        peer, old, ask = member.word.peer, member.state, False
        if old not in (State.ALIVE, State.SUSPECT):
            return
        known = report.reporter == self.me.peer or report.reporter in self._table
        if member.suspicion is None:
            n = self.size
            least = self.config.suspicion_mult * max(1.0, math.log10(n)) * self.config.probe_interval_s
            wanted = min(self.config.indirect_probes, n - 2)
            most = least * self.config.suspicion_max_mult
            member.suspicion = Suspicion(now, least_s=least, most_s=most, wanted=wanted)
            ask = report.reporter == self.me.peer or self._rng.random() < ASKED_AT_ONCE / n
            near = self._table.neighbours()
            if self._rng.random() < FEW / (1 + len(near)) and peer in near:
                self._turns.hasten(peer)  # a second opinion, if it does not answer
        elif not known:
            return  # a stranger's name is no independent reporter
        if member.suspicion.confirm(report.reporter):
            member.report = report
            self._tell(report)
        if report.state is State.DEAD and known:
            member.suspicion.hurry()
        if ask:
            self._ask(peer, member.suspicion)
        self._settle(now, peer, member, old, reason)

    def _ask(self, peer: str, suspicion: Suspicion) -> None:
        """Tell a suspect so: its answer carries a newer word."""
        suspicion.asked = True
        self._send(peer, Message(Kind.PING, self._rng.getrandbits(63)), "suspect: does it refute?")

    def _expire_suspicions(self, now: float) -> None:
        for peer in sorted(self._table.suspects):
            member, suspicion = self._table.get(peer), self._suspicion_of(peer)
            if member is None or now < suspicion.deadline():
                continue
            if not suspicion.asked:
                suspicion.shift(now - suspicion.deadline() + self.awareness.scale(2 * self.config.probe_timeout_s))
                self._ask(peer, suspicion)
                continue
            waited = f"{suspicion.waited_s(now):.1f} s without refutation, {suspicion.reporters} reporters"
            self._bury(now, member, self._report(member, State.DEAD), waited)

    def _bury(self, now: float, member: Member, report: Record, reason: str) -> None:
        old = member.state
        member.suspicion, member.dead, member.report = None, True, report
        self._tell(report)
        self._settle(now, report.peer, member, old, reason)

    def _settle(self, now: float, peer: str, member: Member, old: State | None, reason: str) -> None:
        self._table.settle(peer)
        if member.state is not old:
            member.since = now
            self._out.append(Changed(peer, old, member.state, reason))

    # ------------------------------------------------------------------------------------------------ news

    def _received(self, now: float, peer: str, message: Message) -> None:
        before = {record.peer for record in message.rumours if record.peer in self._table}
        corrections: dict[Record, None] = {}
        for record in message.rumours:
            newer = self._news(now, record, fresh=record.peer not in before)
            if newer is not None and len(corrections) < limits.CORRECTIONS_MAX:
                corrections[newer] = None
        member = self._table.get(peer)
        if member is not None:
            if message.summary is not None:
                member.summary, member.summary_at = message.summary, now
            if member.suspicion is not None:
                member.suspicion.restart(now)
        first = list(corrections)
        if message.kind is Kind.PING:
            mine = [self.me] if self.me.state is State.LEFT else []
            self._send(peer, Message(Kind.ACK, message.nonce), "pinged", [*mine, *first])
        elif message.kind is Kind.SYNC:
            self._send_table(now, peer, Kind.SYNC_REPLY, "asked for", first)
        elif first:
            self._send(peer, Message(Kind.SYNC_REPLY), "its news is old", first)
        if message.kind is Kind.ACK:
            self._on_ack(peer, message.nonce)
        elif message.kind is Kind.NACK and self._probe is not None:
            self._probe.nack(peer, message.nonce)
        elif message.kind is Kind.PING_REQ:
            self._on_ping_req(now, peer, message)
        probing = message.kind not in (Kind.SYNC, Kind.SYNC_REPLY)
        if probing and self.me.state is not State.LEFT and (member is None or not member.word.signed):
            self._greet(peer, "who is it?")

    def _news(self, now: float, record: Record, *, fresh: bool) -> Record | None:
        """Take one word or report in. Returns a newer word than it, to send back.

        `fresh`: the message is the first that names this member, so its death is history and not an accusation.
        """
        if record.peer == self.me.peer:
            return self._about_me(record)
        member = self._table.get(record.peer)
        if member is not None and record is member.word:
            return None  # most of what is told
        if record.is_word:
            if member is None or record.rank > member.word.rank:
                self._take_word(now, member, record)
            elif record.rank < member.word.rank:
                return member.word
        elif member is not None and member.word.signed:
            if record.life < member.word.life:
                return member.word
            if record.life == member.word.life:  # a later one than any word that we know proves nothing
                says = f"{record.reporter[-6:]} says {record.state.name.lower()}"
                if fresh and record.state is State.DEAD and member.state is State.ALIVE:
                    self._bury(now, member, record, says)
                else:
                    self._suspect(now, member, record, says)
        return None

    def _take_word(self, now: float, member: Member | None, word: Record) -> None:
        peer, old = word.peer, member.state if member else None
        moved = member is None or member.word.addresses != word.addresses
        if member is None:
            member = Member(word, now)
            added, forgotten = self._table.add(peer, member)
            if forgotten is not None:
                self._rumours.drop((forgotten, False))
                self._rumours.drop((forgotten, True))
            if not added:
                return
        member.word, member.report, member.suspicion, member.dead = word, None, None, False
        self._rumours.drop((peer, True))
        self._tell(word)
        back = old in (State.DEAD, State.LEFT) and word.state is State.ALIVE
        self._settle(now, peer, member, old, "its own word" if old else "heard of it")
        if word.addresses and (moved or back):
            self._out.append(Heard(peer, word.addresses, "it is back" if back else "its addresses are new"))
        if back and self._rng.random() < FEW / self.size:
            self._send_table(now, peer, Kind.SYNC, "it is back")

    def _about_me(self, record: Record) -> Record | None:
        """Our word must outrank whatever is said of us, even what we said in an earlier process."""
        mine = self.me
        if mine.state is State.LEFT or record.incarnation > mine.incarnation:
            return None  # a later life of ours is the handshake's business: the node starts a new one
        if record.is_word:
            if record.rank < mine.rank:
                return mine
            if (record.rank, record.boot_id) != (mine.rank, mine.boot_id):  # an earlier process said it
                return self._speak(record.counter + 1)
        elif record.life < mine.life:
            return mine
        elif record.life == mine.life:
            self.awareness.change(+1)
            return self._speak(mine.counter + 1)
        return None

    def _speak(self, counter: int, **changes: object) -> Record:
        """Our newest word."""
        self.me = self._sign(replace(self.me, counter=counter, signed=b"", **changes))  # type: ignore[arg-type]
        self._rumours.tell((self.me.peer, False))
        return self.me

    def _leave(self) -> None:
        self._speak(self.me.counter + 1, state=State.LEFT)
        self._probe = None
        alive = sorted(self._table.alive)
        for peer in self._rng.sample(alive, min(GOODBYES, len(alive))):
            self._send(peer, Message(Kind.SYNC_REPLY), "goodbye", [self.me])

    def _expect(self, now: float, peers: Iterable[str]) -> None:
        """Whoever was never heard of is probed, and may turn out dead."""
        for peer in sorted(set(peers) - {self.me.peer}):
            if peer not in self._table:
                member = Member(Record(peer, State.ALIVE, 0, 0), now)
                if self._table.add(peer, member)[0]:
                    self._settle(now, peer, member, None, "named by a commit, not heard of yet")

    def _introduce(self, now: float, peer: str, tries: int = INTRODUCTION_TRIES) -> None:
        """Exchange tables with a peer; again while it has not answered."""
        member = self._table.get(peer)
        if tries < INTRODUCTION_TRIES and (tries < 1 or (member is not None and member.word.signed)):
            return
        self._send_table(now, peer, Kind.SYNC, "first contact")
        if len(self._introducing) < limits.INTRODUCTIONS_MAX:
            self._introducing[peer] = (now + 2 * self.config.probe_timeout_s, tries)

    # ------------------------------------------------------------------------------------------------ sending

    def _tell(self, record: Record) -> None:
        if record.signed:
            self._rumours.tell((record.peer, not record.is_word))

    def _lookup(self, peer: str, report: bool) -> Record | None:
        if peer == self.me.peer:
            return self.me
        member = self._table.get(peer)
        return None if member is None else member.report if report else member.word

    def _send(self, to: str, message: Message, reason: str, first: Iterable[Record] = ()) -> None:
        """With news: `first`, then what is reported of the receiver (so it can refute), then the least told."""
        about = self._lookup(to, True) if to != self.me.peer else None
        chosen = dict.fromkeys([*first, *([about] if about is not None and about.signed else [])])
        room = limits.RUMOURS_PER_MESSAGE_MAX - len(chosen)
        for peer, report in self._rumours.pick(room, retransmits(self.config.retransmit_mult, self.size)):
            record = self._lookup(peer, report)
            if record is not None and record.signed:
                chosen[record] = None
        self._out.append(Send(to, replace(message, rumours=tuple(chosen)), reason))

    def _about_both(self, peer: str) -> list[Record]:
        member = self._table.get(peer)
        return [self.me, *(member.records() if member else ())]

    def _greet(self, to: str, reason: str) -> None:
        """Our word, and all we know of the receiver; asks for its table."""
        self._send(to, Message(Kind.SYNC), reason, self._about_both(to))

    def _send_table(self, now: float, to: str, kind: Kind, reason: str, first: Iterable[Record] = ()) -> None:
        """The whole table in as many messages as it takes, ours and the receiver's records first."""
        member = self._table.get(to)
        records = dict.fromkeys([*first, *self._about_both(to)])
        if kind is Kind.SYNC if member is None else now - member.table_sent_at >= TABLE_SECONDS_MIN:
            if member is not None:
                member.table_sent_at = now
            for _, other in self._table.items():
                records.update(dict.fromkeys(other.records()))
        rows, page = list(records), limits.RUMOURS_PER_MESSAGE_MAX
        for start in range(0, len(rows), page):
            # Only the first asks for an answer.
            message = Message(kind if start == 0 else Kind.SYNC_REPLY, rumours=tuple(rows[start : start + page]))
            self._out.append(Send(to, message, f"table: {reason}"))


__all__ = [
    "PRESETS",
    "Action",
    "Changed",
    "Event",
    "Expected",
    "Heard",
    "Introduced",
    "Kind",
    "Leave",
    "MemberView",
    "Membership",
    "MembershipConfig",
    "Message",
    "Received",
    "Record",
    "Send",
    "SetMe",
    "State",
    "Tick",
]
