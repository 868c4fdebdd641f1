"""What goes into the membership state machine and what comes out: records, messages, events, actions. Plain values.

Wire form, signatures and limits are membership_wire.py's; the rules are membership.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from .wire_pb2 import Summary


class State(IntEnum):
    """Numbers as on the wire."""

    ALIVE = 1
    SUSPECT = 2
    DEAD = 3
    LEFT = 4


@dataclass(frozen=True)
class Record:
    """What is said about one member: by itself (alive, left: its *word*) or by a reporter (suspect, dead: a *report*).

    Attributes:
        incarnation, counter: the life, and SWIM's incarnation number within it; a word's rank is (life, counter, state).
        boot_id: of the process that signed a word (16 bytes).
        addresses, samples_per_s: words only.
        reporter: reports only: who says so.
        signed: opaque bytes that prove it; empty for what only this peer thinks.
    """

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
    def is_word(self) -> bool:
        return self.state in (State.ALIVE, State.LEFT)

    @property
    def life(self) -> tuple[int, int]:
        return (self.incarnation, self.counter)

    @property
    def rank(self) -> tuple[int, int, int]:
        return (self.incarnation, self.counter, self.state)


@dataclass(frozen=True)
class MemberView:
    """A member as this peer sees it.

    Attributes:
        since: when its state last changed (monotonic seconds).
        summary, summary_at: what it last said it has, and when that came (monotonic seconds); None: nothing yet.
    """

    state: State
    incarnation: int
    counter: int
    boot_id: bytes
    addresses: tuple[str, ...]
    since: float
    samples_per_s: float
    summary: Summary | None
    summary_at: float


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
    """One Swim message. `rumours`: words and reports, each signed. `summary` is never changed once it is in here."""

    kind: Kind
    nonce: int = 0
    target: str = ""
    rumours: tuple[Record, ...] = ()
    summary: Summary | None = None


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tick:
    """Time has passed; at least every `tick_s`."""


@dataclass(frozen=True)
class Received:
    """A message from an admitted peer, its signatures verified."""

    peer: str
    message: Message


@dataclass(frozen=True)
class Introduced:
    """A peer that was just connected to."""

    peer: str


@dataclass(frozen=True)
class Expected:
    """These peers should be here (a commit names them)."""

    peers: tuple[str, ...]


@dataclass(frozen=True)
class SetMe:
    """Tell others what is new about ourselves; None: as before."""

    addresses: tuple[str, ...] | None = None
    samples_per_s: float | None = None
    incarnation: int | None = None


@dataclass(frozen=True)
class Leave:
    """Say goodbye. Only pings are answered afterwards."""


Event = Tick | Received | Introduced | Expected | SetMe | Leave


# --- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    to: str
    message: Message
    reason: str


@dataclass(frozen=True)
class Changed:
    """A member's state as this peer sees it changed. `old` is None for a member not heard of before."""

    peer: str
    old: State | None
    new: State
    reason: str


@dataclass(frozen=True)
class Heard:
    """A member is back, or somewhere else: dial it at these addresses, whatever failed before."""

    peer: str
    addresses: tuple[str, ...]
    reason: str


Action = Send | Changed | Heard
