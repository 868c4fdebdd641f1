"""What goes into a `Ballot` and what comes out: frozen events and actions, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .ballot_messages import Commit, Header, Message, Roster
from .ballot_record import BallotRecord
from .deadlines import Wait


class Phase(Enum):
    """Where a member stands in the round."""

    TRAINING = "training"  # the round is open (an observer stays here until it is decided)
    CONVENING = "convening"  # joining an attempt, no roster yet
    EXCHANGING = "exchanging"  # roster known, updates under way
    VOTING = "voting"  # voted, no commit yet
    DECIDED = "decided"


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tick:
    """Time passed. Due at every `WakeAt`; more are harmless."""


@dataclass(frozen=True)
class CloseRound:
    """This node thinks that the round should close: sample target reached, or time is up."""

    reason: str


@dataclass(frozen=True)
class Newcomer:
    """A peer asks to be let in that stands no more than a moment behind this round."""

    peer: str


@dataclass(frozen=True)
class LocalResult:
    """Local training has stopped and the update, if any, is in the journal and may be published."""

    header: Header | None


@dataclass(frozen=True)
class Received:
    """A message from `peer`, decoded, its signatures and limits checked."""

    peer: str
    message: Message


@dataclass(frozen=True)
class Held:
    """All updates held complete and verified (hashes; others than the roster's do no harm). Dense: hashes of all
    reduced chunks of the exchange in progress, in order, once it is complete."""

    update_hashes: tuple[bytes, ...]
    chunk_hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class MembersDead:
    """The peers that membership now considers dead or gone: the whole set, so that recoveries are seen too."""

    dead: frozenset[str]


@dataclass(frozen=True)
class ExchangeFailed:
    """The exchange of this attempt cannot complete any more (dense: a partial sum is lost)."""

    attempt: int
    reason: str


Event = Tick | CloseRound | Newcomer | LocalResult | Received | Held | MembersDead | ExchangeFailed


# --- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Persist:
    """Make `record` durable before any later action of the list is carried out."""

    record: BallotRecord


@dataclass(frozen=True)
class Send:
    """Sign (by type) and send, best effort, never to oneself."""

    to: tuple[str, ...]
    message: Message


@dataclass(frozen=True)
class NeedLocalResult:
    """Stop the inner steps and answer with `LocalResult`."""

    reason: str


@dataclass(frozen=True)
class StartExchange:
    roster: Roster


@dataclass(frozen=True)
class StopExchange:
    reason: str


@dataclass(frozen=True)
class Decided:
    """The round's commit. Emitted once; the ballot then only answers stragglers."""

    commit: Commit


@dataclass(frozen=True)
class WakeAt:
    """Next `Tick` wanted at this time; replaces earlier ones. Absent from a reply: none wanted."""

    at: float


@dataclass(frozen=True)
class Measured:
    """One arrival, for `Deadlines.observe`."""

    wait: Wait
    seconds: float


@dataclass(frozen=True)
class Note:
    """A decision and its reason, for the log."""

    reason: str


Action = Persist | Send | NeedLocalResult | StartExchange | StopExchange | Decided | WakeAt | Measured | Note
