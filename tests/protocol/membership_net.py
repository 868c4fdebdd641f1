"""A network of membership machines in virtual time: one heap of ticks and deliveries, one seed, no waiting.

Faults are plain attributes: `loss`, `delay`, `cut` pairs, `kill`, `freeze`. Records are "signed" by their own text.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.protocol import membership as m
from shoal.protocol.membership import PRESETS, Membership, MembershipConfig, Record, State

LOCAL = PRESETS["local"]


def sign(record: Record) -> Record:
    return replace(record, signed=f"{record.peer}|{record.state}|{record.life}|{record.reporter}".encode())


def word(peer: str, counter: int = 1, life: int = 1, state: State = State.ALIVE, **more: Any) -> Record:
    """What `peer` signs of itself."""
    return sign(
        Record(peer, state, life, counter, more.pop("boot_id", peer.encode()), more.pop("at", (f"{peer}:1",)), **more)
    )


def report(peer: str, reporter: str, counter: int = 1, life: int = 1, state: State = State.SUSPECT) -> Record:
    """What `reporter` signs of another."""
    return sign(Record(peer, state, life, counter, reporter=reporter))


@dataclass
class Node:
    machine: Membership
    boot: int
    frozen_until: float = 0.0
    backlog: list[tuple[str, m.Message]] = field(default_factory=list)


class Net:
    """Peers "p0", "p1" …; `run` moves time; `changes` is what everybody saw: (at, observer, change)."""

    def __init__(self, n: int, config: MembershipConfig = LOCAL, seed: int = 1, *, meet: bool = True) -> None:
        self.config, self.rng, self.now = config, random.Random(seed), 0.0
        self.loss = 0.0
        self.delay: Callable[[], float] = lambda: self.rng.uniform(0.001, 0.01)
        self.stall: Callable[[], float] = lambda: 0.0  # extra time before a tick or a message is handled
        self.cut: set[tuple[str, str]] = set()
        self.nodes: dict[str, Node] = {}
        self.changes: list[tuple[float, str, m.Changed]] = []
        self.heard: list[tuple[str, m.Heard]] = []
        self.sent = 0
        self.largest = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._boots = itertools.count(1)
        for index in range(n):
            self.start(f"p{index}")
        if meet:
            for index in range(1, n):
                self.introduce(f"p{index}", "p0")
            self.run(5.0)

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._serial), what))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self.now, _, what = heapq.heappop(self._heap)
            what()
        self.now = end

    # --- peers

    def start(self, peer: str, life: int = 1, at: str = "") -> None:
        """A process; again: a restart with a new boot id, counter 1 and nothing remembered."""
        boot = next(self._boots)
        me = Record(peer, State.ALIVE, life, 1, b"%016d" % boot, (at or f"{peer}:{boot}",))
        node = Node(Membership(me, self.config, random.Random(self.rng.random()), sign), boot)
        self.nodes[peer] = node
        self.at(self.now + self.rng.uniform(0, self.config.tick_s), lambda: self._tick(peer, boot))

    def kill(self, peer: str) -> float:
        del self.nodes[peer]
        return self.now

    def freeze(self, peer: str, seconds: float) -> None:
        """SIGSTOP, then SIGCONT: what arrives meanwhile waits."""
        self.nodes[peer].frozen_until = self.now + seconds

    def introduce(self, peer: str, other: str) -> None:
        self.do(peer, m.Introduced(other))

    def partition(self, *sides: list[str]) -> None:
        self.cut = {(a, b) for one in sides for other in sides if one is not other for a in one for b in other}

    # --- views

    def state(self, observer: str, peer: str) -> State | None:
        return self.nodes[observer].machine.state(peer)

    def whole(self) -> bool:
        """Everybody sees exactly everybody else alive, and nobody even suspect."""
        peers = set(self.nodes)
        return all(
            node.machine.alive() == peers - {p} and all(self.state(p, q) is State.ALIVE for q in peers - {p})
            for p, node in self.nodes.items()
        )

    def all_see(self, peer: str, state: State) -> bool:
        return all(self.state(p, peer) is state for p in self.nodes if p != peer)

    def until(self, condition: Callable[[], bool], limit_s: float) -> float:
        """Seconds until `condition` holds."""
        started = self.now
        while not condition():
            assert self.now - started < limit_s, f"not within {limit_s} s"
            self.run(0.05)
        return self.now - started

    def count(self, new: State, *, of: str | None = None) -> int:
        return sum(c.new is new and of in (None, c.peer) for _, _, c in self.changes)

    # --- inside

    def do(self, peer: str, event: m.Event) -> list[m.Action]:
        actions = self.nodes[peer].machine.handle(self.now, event)
        for action in actions:
            if isinstance(action, m.Send):
                assert action.reason and action.to != peer
                self.sent += 1
                self.largest = max(self.largest, len(action.message.rumours))
                self._deliver(peer, action.to, action.message)
            elif isinstance(action, m.Changed):
                assert action.reason and action.old is not action.new
                self.changes.append((self.now, peer, action))
            else:
                self.heard.append((peer, action))
        return actions

    def _deliver(self, sender: str, to: str, message: m.Message) -> None:
        if self.rng.random() < self.loss or (sender, to) in self.cut or to not in self.nodes:
            return
        boot = self.nodes[to].boot

        def arrive() -> None:
            node = self.nodes.get(to)
            if node is None or node.boot != boot or (sender, to) in self.cut:
                return
            if self.now < node.frozen_until:
                return node.backlog.append((sender, message))
            self.do(to, m.Received(sender, message))

        self.at(self.now + self.delay() + self.stall(), arrive)

    def _tick(self, peer: str, boot: int) -> None:
        node = self.nodes.get(peer)
        if node is None or node.boot != boot:
            return
        if self.now < node.frozen_until:
            return self.at(node.frozen_until, lambda: self._tick(peer, boot))
        self.do(peer, m.Tick())
        backlog, node.backlog = node.backlog, []
        for sender, message in backlog:
            self.do(peer, m.Received(sender, message))
        self.at(self.now + self.config.tick_s + self.stall(), lambda: self._tick(peer, boot))
