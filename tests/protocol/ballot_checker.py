"""A model checker for the ballot: random schedules of delay, loss, duplication, crash, restart, mute peers, wrong
verdicts.

One schedule is one seed. A few peers run the real `Ballot` over several rounds in virtual time; faults stop at some
point, and from then on every round must be decided within a bounded number of attempts. What is checked, after every
action:

    agreement    of all commits for one round and lineage, those that are not marked split are one
    commits      votes of a majority (or marked split), counted here anew; updates come from a roster of the round, one
                 per origin, each dot at most once along a lineage
    durability   a promise or vote is on disk before a message reveals it
    promises     no vote below an attempt that was promised, one value per attempt, joins carry the last vote
    residual     learned - adopted - damped, equal to one kept by hand, to the bit
    liveness     everybody who is alive gets to the last round

Crashes fall between any two actions of one reply; what was not persisted is gone. The exchange is modelled: an update
arrives when somebody alive holds it.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from shoal.protocol.ballot import (
    Ballot,
    CloseRound,
    Decided,
    Held,
    LocalResult,
    MembersDead,
    NeedLocalResult,
    Persist,
    Phase,
    Received,
    Send,
    StartExchange,
    StopExchange,
    Tick,
    WakeAt,
)
from shoal.protocol.ballot_messages import Commit, Convene, Encoding, Exchange, Header, Join, Roster, Value, Vote
from shoal.protocol.ballot_record import BallotRecord, decode_record
from shoal.protocol.ballot_rules import electorate_after
from shoal.protocol.deadlines import Timing, Wait
from shoal.protocol.version import NO_HEAD, Dot, sha256
from shoal.protocol.wire_pb2 import Signed, UpdateHeader

TIMING = Timing(
    local_s=1.0, join_s=1.6, roster_s=2.2, exchange_s=2.0, propose_s=2.6, vote_s=0.8, commit_s=1.4, retry_s=0.3
)
GENESIS = sha256(b"genesis")
# Attempts per member that a round may take once faults have stopped: every convener has its turn a few times.
ATTEMPTS_ENOUGH = 4
WIDTH = 3  # coordinates of an update


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Faults:
    """What one schedule does; drawn from its seed unless given."""

    peers: int
    observers: int
    rounds: int
    loss: float
    starving: float  # extra loss of votes and commits: many attempts then decide the same round
    duplicate: float
    delay_max: float
    crashes: int  # that restart, at any time
    crash_rate: float  # chance of one more, per event, between two of its actions
    deaths: int  # that do not (known to membership a little later)
    mutes: int  # peers that receive but send nothing, for a while
    lasting_mutes: int  # the same, and it never ends
    wrong_verdicts: int
    dense: bool
    until: float  # virtual seconds

    @classmethod
    def draw(cls, rng: random.Random) -> Faults:
        peers = rng.choice((1, 2, 3, 3, 3, 4, 4, 5, 5, 6, 7))
        minority = (peers - 1) // 2
        verdicts = rng.randrange(1, 5) if rng.random() < 0.3 else 0
        deaths = rng.randrange(0, minority + 1) if rng.random() < 0.5 else 0
        if rng.random() < 0.1:
            deaths = peers - 1  # all but one
        return cls(
            peers=peers,
            observers=rng.choice((0, 0, 0, 1)),
            rounds=rng.choice((1, 1, 2, 2, 3)),
            loss=rng.choice((0.0, 0.05, 0.2, 0.5)),
            starving=rng.choice((0.0, 0.0, 0.5, 0.9)),
            duplicate=rng.choice((0.0, 0.1)),
            delay_max=rng.choice((0.05, 0.3, 2.0)),
            crashes=rng.choice((0, 1, 2, 4)),
            crash_rate=rng.choice((0.0, 0.01, 0.05)),
            deaths=deaths,
            mutes=rng.choice((0, 0, 1, 2)),
            lasting_mutes=1 if minority > deaths and rng.random() < 0.2 else 0,
            wrong_verdicts=verdicts,
            dense=rng.random() < 0.2,
            until=rng.choice((2.0, 6.0, 12.0)),
        )


def _add(a: tuple[int, ...], b: tuple[int, ...], sign: int = 1) -> tuple[int, ...]:
    return tuple(x + sign * y for x, y in zip(a, b, strict=True))


_ZERO = (0,) * WIDTH


@dataclass
class Disk:
    """What survives a crash."""

    record: bytes | None = None
    chain: list[Commit] = field(default_factory=list)
    journal: dict[tuple[int, bytes], tuple[Header, tuple[int, ...]]] = field(default_factory=dict)
    seq: int = 0
    learned: tuple[int, ...] = _ZERO
    adopted: tuple[int, ...] = _ZERO
    damped: tuple[int, ...] = _ZERO
    by_hand: tuple[int, ...] = _ZERO  # the residual, moved along with every event


@lru_cache(maxsize=256)
def on_disk(encoded: bytes | None) -> BallotRecord | None:
    return decode_record(encoded) if encoded is not None else None


class Peer:
    """A peer's volatile half: gone at a crash."""

    def __init__(self, name: str, disk: Disk) -> None:
        self.name = name
        self.disk = disk
        self.life = 0
        self.up = True
        self.muted = False
        self.timing = TIMING
        self.dead_view: frozenset[str] = frozenset()
        self.ballot: Ballot
        self.previous: Ballot | None = None
        self.held: set[bytes] = set()
        self.exchange: Roster | None = None
        self.wake_at: float | None = None


class Schedule:
    """One seed: build, `run`, and a `Violation` is raised or not."""

    def __init__(self, seed: int, faults: Faults | None = None, *, monitors: bool = True) -> None:
        """`monitors=False` checks outcomes alone (agreement, commits, residual), not the rules that lead to them."""
        self.rng = random.Random(seed)
        self.faults = faults or Faults.draw(self.rng)
        self.monitors = monitors
        self.now = 0.0
        self.steps = 0
        self.forked = self.split_seen = False
        self.attempt_at_peace: dict[tuple[int, bytes], int] = defaultdict(lambda: -1)
        self.attempts_needed = 0
        self._queue: list[tuple[float, int, Any]] = []
        self._order = 0
        names = [f"p{i}" for i in range(self.faults.peers)]
        extra = [f"x{i}" for i in range(self.faults.observers)]
        self.founders = frozenset(names)
        self.peers = {name: Peer(name, Disk()) for name in names + extra}
        self.peace = False
        # What the monitors remember.
        self.commits: dict[tuple[int, bytes], dict[bytes, tuple[Value, bool]]] = defaultdict(dict)
        self.rostered: dict[tuple[int, bytes], set[tuple[Dot, bytes]]] = defaultdict(set)
        self.promised: dict[tuple[str, int, bytes], int] = defaultdict(lambda: -1)
        self.votes: dict[tuple[str, int, bytes], dict[tuple[int, bool], bytes]] = defaultdict(dict)
        self.roster_of: dict[tuple[int, bytes, int], Roster] = {}

    # ------------------------------------------------------------------------------------------------ engine

    def at(self, time: float, *what: Any) -> None:
        self._order += 1
        heapq.heappush(self._queue, (time, self._order, what))

    def run(self) -> None:
        faults, rng = self.faults, self.rng
        for peer in self.peers.values():
            skew = rng.choice((0.5, 1.0, 1.0, 1.5))
            peer.timing = replace(TIMING, **{f"{wait.value}_s": TIMING.after(wait, 0) * skew for wait in Wait})
            self.open_round(peer)
        names = sorted(self.founders)
        dying = rng.sample(names, faults.deaths)
        for name in dying:
            self.at(rng.uniform(0.0, faults.until), "die", name)
        self.dying = frozenset(dying)
        staying = [name for name in names if name not in dying]
        for _ in range(faults.crashes):
            self.at(rng.uniform(0.0, faults.until), "crash", rng.choice(sorted(self.peers)), rng.uniform(0.05, 3.0))
        for _ in range(faults.mutes):
            begin = rng.uniform(0.0, faults.until)
            self.at(begin, "mute", rng.choice(names), rng.uniform(0.5, 4.0))
        self.mute_for_good = frozenset(rng.sample(staying, faults.lasting_mutes))
        for name in self.mute_for_good:
            self.at(rng.uniform(0.0, faults.until), "mute", name, None)
        for _ in range(faults.wrong_verdicts):
            victims = frozenset(name for name in names if rng.random() < 0.5)
            self.at(rng.uniform(0.0, faults.until), "verdict", rng.choice(names), victims, rng.uniform(0.5, 4.0))
        self.at(faults.until, "peace")
        limit = faults.until + 150.0
        while self._queue:
            self.now, _, what = heapq.heappop(self._queue)
            if self.now > limit or (self.forked and self.peace):
                break
            self.step(*what)
            if self.peace and self.finished():
                return
        self.check_liveness()

    def step(self, kind: str, *args: Any) -> None:
        self.steps += 1
        getattr(self, f"on_{kind}")(*args)

    def finished(self) -> bool:
        return all(len(peer.disk.chain) >= self.faults.rounds for peer in self.reachable())

    def reachable(self) -> Iterable[Peer]:
        """Those who must get to the end: founders who live and speak."""
        return (p for n, p in self.peers.items() if n in self.founders and p.up and n not in self.mute_for_good)

    # ------------------------------------------------------------------------------------------------ rounds

    def position(self, peer: Peer) -> tuple[int, bytes, frozenset[str]]:
        """Next round of a peer, its base lineage and electorate."""
        if not peer.disk.chain:
            return 1, GENESIS, self.founders
        last = peer.disk.chain[-1].value
        return last.round + 1, last.lineage, electorate_after(last)

    def open_round(self, peer: Peer) -> None:
        round_, lineage, electorate = self.position(peer)
        record = on_disk(peer.disk.record)
        peer.ballot = Ballot(
            me=peer.name,
            electorate=electorate,
            round_=round_,
            base_lineage=lineage,
            base_state_hash=sha256(b"state", lineage),
            timing=peer.timing,
            sign_vote=lambda vote: vote.peer.encode(),
            record=record if record is not None and record.concerns(round_, lineage) else None,
            dead=peer.dead_view,
        )
        peer.exchange = None
        peer.wake_at = None
        self.event(peer, Tick())
        if self.rng.random() < (1.0 if self.peace else 0.7) and round_ <= self.faults.rounds:
            self.at(self.now + self.rng.uniform(0.05, 1.0), "close", peer.name, peer.life, round_)

    def on_close(self, name: str, life: int, round_: int) -> None:
        peer = self.peers[name]
        if peer.up and peer.life == life and peer.ballot.round == round_:
            self.event(peer, CloseRound("time"))

    def event(self, peer: Peer, event: Any, ballot: Ballot | None = None) -> None:
        """Feed one event and carry out the actions, with a chance to crash between any two of them."""
        ballot = ballot or peer.ballot
        actions = ballot.handle(self.now, event)
        life, wake = peer.life, None
        crashing = not self.peace and self.rng.random() < self.faults.crash_rate
        cut = self.rng.randrange(len(actions) + 1) if crashing else -1
        for i, action in enumerate(actions):
            if i == cut:
                return self.on_crash(peer.name, self.rng.choice((0.05, 0.5, 3.0)))
            if isinstance(action, WakeAt):
                wake = action.at
            else:
                self.act(peer, ballot, action)
                if peer.life != life or not peer.up:
                    return None
        if (
            ballot is peer.ballot
            and wake is not None
            and (peer.wake_at is None or wake < peer.wake_at or peer.wake_at <= self.now)
        ):
            peer.wake_at = wake
            self.at(wake, "wake", peer.name, peer.life, wake)
        return None

    def on_wake(self, name: str, life: int, due: float) -> None:
        peer = self.peers[name]
        if peer.up and peer.life == life and peer.wake_at == due:
            peer.wake_at = None
            self.event(peer, Tick())

    def act(self, peer: Peer, ballot: Ballot, action: Any) -> None:
        match action:
            case Persist(record):
                peer.disk.record = record.encode()
            case Send(to, message):
                self.monitor(peer, message)
                for other in to:
                    self.send(peer, other, message)
            case NeedLocalResult():
                self.at(self.now + self.rng.choice((0.01, 0.2, 1.5)), "local", peer.name, peer.life, ballot.round)
            case StartExchange(roster):
                if peer.exchange is not None:
                    raise Violation("an exchange was started twice")
                peer.exchange = roster
                self.note_roster(roster)
                self.begin_exchange(peer, roster)
            case StopExchange():
                if peer.exchange is None:
                    raise Violation("an exchange was stopped that did not run")
                peer.exchange = None
            case Decided(commit):
                self.apply(peer, commit)
            case _:
                pass

    # ------------------------------------------------------------------------------------------------ network

    def send(self, peer: Peer, to: str, message: Any) -> None:
        if to == peer.name:
            raise Violation("a message to oneself")
        if peer.muted:
            return
        rng, faults = self.rng, self.faults
        if self.peace:
            self.at(self.now + rng.uniform(0.001, 0.05), "deliver", peer.name, to, message)
            return
        loss = max(faults.loss, faults.starving) if isinstance(message, Vote | Commit) else faults.loss
        for _ in range(2 if rng.random() < faults.duplicate else 1):
            if rng.random() >= loss:
                self.at(self.now + rng.uniform(0.001, faults.delay_max), "deliver", peer.name, to, message)

    def on_deliver(self, source: str, to: str, message: Any) -> None:
        peer = self.peers[to]
        if not peer.up:
            return
        if isinstance(message, tuple):  # "which commit follows the state that I have?"
            _, round_, lineage = message
            for commit in peer.disk.chain:
                if (commit.round, commit.base_lineage) == (round_, lineage):
                    self.send(peer, source, commit)
            return
        current = peer.ballot
        if message.round == current.round:
            self.event(peer, Received(source, message))
        elif message.round > current.round:
            self.send(peer, source, ("want", current.round, current.base_lineage))
        elif peer.previous is not None and peer.previous.concerns(message):
            self.event(peer, Received(source, message), peer.previous)
        elif not isinstance(message, Commit):
            for commit in peer.disk.chain:
                if (commit.round, commit.base_lineage) == (message.round, message.base_lineage):
                    self.send(peer, source, commit)

    # ------------------------------------------------------------------------------------------------ faults

    def on_crash(self, name: str, back_after: float) -> None:
        peer = self.peers[name]
        if not peer.up or self.peace:
            return
        self.kill(peer)
        self.at(self.now + back_after, "restart", name)
        if self.rng.random() < 0.5:  # membership may notice
            self.at(self.now + self.rng.uniform(0.1, 1.0), "detect")

    def on_die(self, name: str) -> None:
        peer = self.peers[name]
        if peer.up:
            self.kill(peer)
        self.at(self.now + self.rng.uniform(0.1, 3.0), "detect")

    def kill(self, peer: Peer) -> None:
        peer.up = False
        peer.life += 1
        peer.held, peer.previous, peer.exchange, peer.wake_at = set(), None, None, None

    def on_restart(self, name: str) -> None:
        peer = self.peers[name]
        if peer.up or (name in self.dying and (self.peace or name not in self._doomed())):
            return
        peer.up = True
        peer.dead_view = frozenset()
        peer.held = {header.update_hash for header, _ in peer.disk.journal.values()}
        self.open_round(peer)

    def _doomed(self) -> frozenset[str]:
        """Who will die for good but has not yet: may come back from a crash until then."""
        return frozenset(what[1] for _, _, what in self._queue if what[0] == "die")

    def on_detect(self) -> None:
        """Membership tells everybody the truth."""
        down = frozenset(name for name, peer in self.peers.items() if not peer.up)
        for peer in list(self.peers.values()):
            if peer.up and peer.dead_view != down:
                peer.dead_view = down
                self.event(peer, MembersDead(down))

    def on_verdict(self, name: str, victims: frozenset[str], seconds: float) -> None:
        peer = self.peers[name]
        if peer.up and not self.peace:
            peer.dead_view = victims - {name}
            self.event(peer, MembersDead(peer.dead_view))
            self.at(self.now + seconds, "detect")

    def on_mute(self, name: str, seconds: float | None) -> None:
        self.peers[name].muted = True
        if seconds is not None:
            self.at(self.now + seconds, "speak", name)

    def on_speak(self, name: str) -> None:
        self.peers[name].muted = name in self.mute_for_good

    def on_peace(self) -> None:
        """Faults stop: who can come back is back, verdicts are right, messages are quick."""
        self.peace = True
        for name in sorted(self.peers):
            self.peers[name].muted = name in self.mute_for_good
            if not self.peers[name].up and name not in self.dying:
                self.on_restart(name)
        for name in sorted(self.dying):
            if self.peers[name].up:
                self.kill(self.peers[name])
        for peer in self.peers.values():
            key = (peer.ballot.round, peer.ballot.base_lineage)
            self.attempt_at_peace[key] = max(self.attempt_at_peace[key], peer.ballot.attempt)
        self.at(self.now + 1.0, "detect")
        for peer in list(self.peers.values()):  # some clock always closes a round
            if peer.up:
                self.at(self.now + 1.0, "close", peer.name, peer.life, peer.ballot.round)

    # ------------------------------------------------------------------------------------------------ updates

    def on_local(self, name: str, life: int, round_: int) -> None:
        peer = self.peers[name]
        if not peer.up or peer.life != life or peer.ballot.round != round_ or peer.ballot.phase is Phase.DECIDED:
            return
        key = (round_, peer.ballot.base_lineage)
        if key not in peer.disk.journal:
            self.learn(peer, key)
        header = peer.disk.journal[key][0]
        peer.held.add(header.update_hash)
        self.event(peer, LocalResult(header))

    def learn(self, peer: Peer, key: tuple[int, bytes]) -> None:
        """One local result: part of delta + residual becomes an update, journaled before anybody sees it."""
        disk, rng = peer.disk, self.rng
        disk.learned = _add(disk.learned, tuple(rng.randrange(-9, 10) for _ in range(WIDTH)))
        owed = _add(_add(disk.learned, disk.adopted, -1), disk.damped, -1)
        sent = tuple(x if rng.random() < 0.6 else 0 for x in owed)
        disk.by_hand = _add(owed, sent, -1)
        disk.seq += 1
        dot = Dot(peer.name, 1, disk.seq)
        payload_hash = sha256(repr(sent).encode())
        wire = UpdateHeader(
            previous_head=NO_HEAD,
            round=key[0],
            base_lineage=key[1],
            weight=rng.randrange(1, 9),
            encoding="DENSE" if self.faults.dense else "SPARSE",
            payload_hash=payload_hash,
        )
        wire.dot.peer, wire.dot.incarnation, wire.dot.seq = dot.peer, dot.incarnation, dot.seq
        signed = Signed(body=wire.SerializeToString(deterministic=True), signature=bytes(64))
        header = Header(
            dot=dot,
            previous_head=NO_HEAD,
            round=key[0],
            base_lineage=key[1],
            weight=wire.weight,
            encoding=Encoding(wire.encoding),
            payload_hash=payload_hash,
            payload_size=0,
            scale=0.0,
            signed=signed.SerializeToString(deterministic=True),
        )
        disk.journal[key] = (header, sent)

    def apply(self, peer: Peer, commit: Commit) -> None:
        """The commit and the state after it become durable; the next round opens."""
        disk = peer.disk
        self.check_commit(peer, commit)
        key = (commit.round, commit.base_lineage)
        if key in disk.journal:
            header, sent = disk.journal[key]
            if header.update_hash in {update.update_hash for update in commit.value.updates}:
                disk.adopted = _add(disk.adopted, sent)
            else:
                disk.by_hand = _add(disk.by_hand, sent)
        derived = _add(_add(disk.learned, disk.adopted, -1), disk.damped, -1)
        if derived != disk.by_hand:
            raise Violation(f"residual {disk.by_hand}, expected {derived}")
        disk.chain.append(commit)
        peer.previous = peer.ballot
        self.at(self.now, "next", peer.name, peer.life, commit.round)

    def on_next(self, name: str, life: int, round_: int) -> None:
        peer = self.peers[name]
        if peer.up and peer.life == life and peer.ballot.round == round_:
            self.open_round(peer)

    def begin_exchange(self, peer: Peer, roster: Roster) -> None:
        if roster.exchange is Exchange.RING_DENSE:
            self.at(self.now + self.rng.uniform(0.05, 0.5), "dense", peer.name, peer.life, roster)
            return
        for hash_ in roster.headers:
            if hash_ not in peer.held:
                self.at(self.now + self.rng.uniform(0.01, 0.4), "fetch", peer.name, peer.life, roster, hash_)
        self.event_later(peer)

    def event_later(self, peer: Peer) -> None:
        self.at(self.now, "held", peer.name, peer.life)

    def on_held(self, name: str, life: int) -> None:
        peer = self.peers[name]
        if peer.up and peer.life == life:
            self.event(peer, Held(tuple(sorted(peer.held))))

    def on_fetch(self, name: str, life: int, roster: Roster, hash_: bytes) -> None:
        peer = self.peers[name]
        if not peer.up or peer.life != life or peer.exchange is not roster or hash_ in peer.held:
            return
        sources = [p for p in self.peers.values() if p.up and hash_ in p.held]
        if not sources or (not self.peace and self.rng.random() < self.faults.loss):
            self.at(self.now + 0.3, "fetch", name, life, roster, hash_)
            return
        peer.held.add(hash_)
        self.event(peer, Held(tuple(sorted(peer.held))))

    def on_dense(self, name: str, life: int, roster: Roster) -> None:
        peer = self.peers[name]
        if not peer.up or peer.life != life or peer.exchange is not roster:
            return
        ring = [self.peers[p] for p in roster.peers]
        if all(p.up and p.exchange == roster for p in ring):
            chunks = tuple(sha256(repr((roster.attempt, i)).encode(), roster.base_lineage) for i in range(len(ring)))
            self.event(peer, Held((), chunks))
        else:
            self.at(self.now + 0.2, "dense", name, life, roster)

    # ------------------------------------------------------------------------------------------------ monitors

    def monitor(self, peer: Peer, message: Any) -> None:
        """The rules of promise, vote and roster, as seen in what one peer sends."""
        if isinstance(message, Commit):
            return
        about = (message.round, message.base_lineage)
        if isinstance(message, Roster):
            self.note_roster(message)
            first = self.roster_of.setdefault((*about, message.attempt), message)
            if self.monitors and first != message:
                raise Violation(f"two rosters in attempt {message.attempt}")
        if not self.monitors or not isinstance(message, Join | Vote | Convene) or getattr(message, "observer", False):
            return
        record = on_disk(peer.disk.record)
        if record is None or not record.concerns(*about):
            raise Violation(f"{peer.name} reveals attempt {message.attempt} with nothing on disk")
        key = (peer.name, *about)
        if record.promised < message.attempt:
            raise Violation(f"{peer.name} reveals attempt {message.attempt}, {record.promised} is on disk")
        if isinstance(message, Join):
            if message.attempt < self.promised[key]:
                raise Violation(f"{peer.name} joins {message.attempt} after {self.promised[key]}")
            self.promised[key] = message.attempt
            cast = [attempt for attempt, split in self.votes[key] if not split]
            told = message.voted.attempt if message.voted is not None and not message.voted.split else -1
            if cast and told < max(cast):
                raise Violation(f"{peer.name} voted in {max(cast)} and joins with {told}")
        if isinstance(message, Vote):
            if message.attempt < self.promised[key]:
                raise Violation(f"{peer.name} votes in {message.attempt} after promising {self.promised[key]}")
            slot = record.voted_split if message.split else record.voted
            if slot is None or (slot.attempt, slot.value.hash) != (message.attempt, message.value_hash):
                raise Violation(f"{peer.name} reveals a vote that is not on disk")
            before = self.votes[key].setdefault((message.attempt, message.split), message.value_hash)
            if before != message.value_hash:
                raise Violation(f"{peer.name} votes twice in attempt {message.attempt}")

    def note_roster(self, roster: Roster) -> None:
        self.rostered[roster.round, roster.base_lineage] |= {(h.dot, h.update_hash) for h in roster.headers.values()}

    def check_commit(self, peer: Peer, commit: Commit) -> None:
        value, about = commit.value, (commit.round, commit.base_lineage)
        round_, lineage, electorate = self.position(peer)
        if about != (round_, lineage):
            raise Violation("a commit for another round was taken")
        voters = {vote.peer for vote in commit.votes}
        if not voters or not voters <= electorate or len(voters) != len(commit.votes):
            raise Violation("votes from outside the electorate")
        split = all(vote.split for vote in commit.votes)
        if not split and 2 * len(voters) <= len(electorate):
            raise Violation(f"{len(voters)} of {len(electorate)} decided without a mark")
        if not {(u.dot, u.update_hash) for u in value.updates} <= self.rostered[about]:
            raise Violation("a committed update was on no roster")
        dots = [u.dot for c in [*peer.disk.chain, commit] for u in c.value.updates]
        if len(set(dots)) != len(dots):
            raise Violation("an update was committed twice")
        if len({u.dot.peer for u in value.updates}) != len(value.updates):
            raise Violation("two updates of one origin in one round")
        self.split_seen |= split
        if self.peace and not self.split_seen:  # the two sides of a split wait for each other's news, not for attempts
            needed = commit.attempt - self.attempt_at_peace[about]
            self.attempts_needed = max(self.attempts_needed, needed)
            if needed > ATTEMPTS_ENOUGH * len(electorate):
                raise Violation(f"{needed} attempts after the faults")
        known = self.commits[about]
        known[value.hash] = (value, split and known.get(value.hash, (value, True))[1])
        if sum(not marked for _, marked in known.values()) > 1:
            raise Violation(f"round {round_} was decided twice")
        self.forked |= len(known) > 1

    def viable(self, peer: Peer) -> bool:
        """The peer's round can be decided: a majority speaks, or half is dead and most of the others speak.

        An electorate shrinks with every round that somebody missed, so a mute or dead peer can come to weigh more.
        """
        electorate = [self.peers[name] for name in self.position(peer)[2]]
        speaking = sum(p.up and p.name not in self.mute_for_good for p in electorate)
        alive = sum(p.up for p in electorate)
        return 2 * speaking > len(electorate) or (2 * alive <= len(electorate) and 2 * speaking > alive)

    def check_liveness(self) -> None:
        if self.forked:  # only after a split; which side stands is CommitLog.resolve_conflict's
            return
        if not any(self.viable(p) for p in self.reachable() if len(p.disk.chain) < self.faults.rounds):
            return
        stuck = {p.name: (len(p.disk.chain), p.ballot.attempt, p.ballot.phase.value) for p in self.reachable()}
        raise Violation(f"no decision {self.now - self.faults.until:.0f} s after the faults: {stuck}")


def check(seed: int, faults: Faults | None = None, *, monitors: bool = True) -> Schedule:
    """Run one schedule. Raises Violation with the seed in its text."""
    schedule = Schedule(seed, faults, monitors=monitors)
    try:
        schedule.run()
    except Violation as violation:
        raise Violation(
            f"seed {seed}: {violation}\n  {schedule.faults}\n  again: python tests/protocol/ballot_checker.py {seed} 1"
        ) from None
    return schedule


def check_many(first: int, count: int) -> list[str]:
    """Problems of the seeds first … first + count - 1, as text."""
    problems = []
    for seed in range(first, first + count):
        try:
            check(seed)
        except Violation as violation:
            problems.append(str(violation))
    return problems


if __name__ == "__main__":  # python tests/protocol/ballot_checker.py FIRST_SEED COUNT
    found = check_many(int(sys.argv[1]), int(sys.argv[2]))
    print("\n".join(found))
    sys.exit(1 if found else 0)
