"""Everybody this peer ever heard of, bounded: the newest word of each, what others report of it, its state. No decisions.

When the table is full the member that is gone longest makes room; while nobody is gone, newcomers have to wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from . import limits
from .membership_events import MemberView, Record, State
from .overlay import Overlay
from .suspicion import Suspicion
from .wire_pb2 import Summary


@dataclass(slots=True)
class Member:
    """One member.

    Attributes:
        word: the newest that it signed itself; unsigned, with counter 0, for one that is only expected.
        report: a suspect or dead report about exactly that word, to pass on.
        suspicion: running while it is suspect.
    """

    word: Record
    since: float
    report: Record | None = None
    suspicion: Suspicion | None = None
    dead: bool = False
    summary: Summary | None = None
    summary_at: float = 0.0
    table_sent_at: float = -math.inf

    @property
    def state(self) -> State:
        if self.word.state is State.LEFT:
            return State.LEFT
        if self.dead:
            return State.DEAD
        return State.SUSPECT if self.suspicion is not None else State.ALIVE

    def records(self) -> Iterator[Record]:
        """What can be told of it."""
        yield from (r for r in (self.word, self.report) if r is not None and r.signed)

    def view(self) -> MemberView:
        word = self.word
        return MemberView(
            self.state,
            word.incarnation,
            word.counter,
            word.boot_id,
            word.addresses,
            self.since,
            word.samples_per_s,
            self.summary,
            self.summary_at,
        )


class Table:
    """Members by peer id. Call `settle` after changing one."""

    def __init__(self, me: str = "") -> None:
        """`me`: whose table it is; not a member of it."""
        self._me = me
        self._members: dict[str, Member] = {}
        self.overlay = Overlay()  # of those alive, and of us
        self.overlay.add(me)
        self._neighbours: set[str] | None = None
        self.alive: set[str] = set()  # or suspect
        self.suspects: set[str] = set()
        self.gone: set[str] = set()  # dead or left

    def __contains__(self, peer: str) -> bool:
        return peer in self._members

    def __len__(self) -> int:
        return len(self._members)

    def get(self, peer: str) -> Member | None:
        return self._members.get(peer)

    def items(self) -> list[tuple[str, Member]]:
        """In the order of peer ids."""
        return sorted(self._members.items())

    def add(self, peer: str, member: Member) -> tuple[bool, str | None]:
        """Whether there was room, and who was forgotten to make some."""
        forgotten = None
        if len(self._members) >= limits.MEMBERS_MAX:
            if not self.gone:
                return False, None
            forgotten = min(self.gone, key=lambda p: (self._members[p].since, p))
            del self._members[forgotten]
            self.gone.discard(forgotten)
        self._members[peer] = member
        self.settle(peer)
        return True, forgotten

    def settle(self, peer: str) -> None:
        """Sort a member into `alive`, `suspects` and `gone` by its state."""
        state = self._members[peer].state
        (self.suspects.add if state is State.SUSPECT else self.suspects.discard)(peer)
        alive = state in (State.ALIVE, State.SUSPECT)
        (self.gone.discard if alive else self.gone.add)(peer)
        if alive == (peer in self.alive):
            return
        self._neighbours = None
        if alive:
            self.alive.add(peer)
            self.overlay.add(peer)
        else:
            self.alive.discard(peer)
            self.overlay.discard(peer)

    def neighbours(self) -> set[str]:
        """Live members to watch and to stay connected to (overlay.py); all while they are few. Not to be changed."""
        if self._neighbours is None:
            self._neighbours = self.overlay.around(self._me)
        return self._neighbours
