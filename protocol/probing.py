"""Probes: whom to ping next, the probe under way, and pings made for others. Pure: time and randomness come in.

A probe is answered by an ack of its target, or of a helper that was asked for one. Helpers that get no ack say so (nack):
one that says nothing hints that the trouble is on our side. What nobody who was asked says is not counted.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from . import limits

# A suspect is probed next by about this many members, not by all at once.
FEW = 8


class Turns:
    """Round robin over a shuffled list: everybody is probed at least once in 2(n - 1) turns (Das et al. 2002)."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._order: list[str] = []

    def next(self, alive: set[str]) -> str | None:
        """The next member of `alive`; None when it is empty."""
        for _ in range(2):
            while self._order:
                peer = self._order.pop()
                if peer in alive:
                    return peer
            self._order = sorted(alive)
            self._rng.shuffle(self._order)
        return None

    def hasten(self, peer: str) -> None:
        """It is next."""
        if not self._order or self._order[-1] != peer:
            self._order.append(peer)


@dataclass
class Probe:
    """The one under way."""

    target: str
    nonce: int
    direct_until: float
    ends: float
    helpers: set[str] = field(default_factory=set)
    nacks: set[str] = field(default_factory=set)
    asked: bool = False

    def acked_by(self, peer: str, nonce: int) -> bool:
        return nonce == self.nonce and (peer == self.target or peer in self.helpers)

    def nack(self, peer: str, nonce: int) -> None:
        if nonce == self.nonce and peer in self.helpers:
            self.nacks.add(peer)

    def shift(self, seconds: float) -> None:
        self.direct_until += seconds
        self.ends += seconds


@dataclass
class Relay:
    """A ping made for another."""

    asker: str
    nonce: int  # the asker's
    target: str
    nack_at: float
    ends: float
    nacked: bool = False


class Relays:
    """Pings made for others, by our own nonce. Bounded, for each asker too."""

    def __init__(self) -> None:
        self._relays: dict[int, Relay] = {}
        self._askers: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._relays)

    def add(self, nonce: int, relay: Relay) -> bool:
        """False when there is no room."""
        if len(self._relays) >= limits.RELAYS_MAX or self._askers[relay.asker] >= limits.RELAYS_PER_PEER_MAX:
            return False
        self._relays[nonce] = relay
        self._askers[relay.asker] += 1
        return True

    def acked(self, peer: str, nonce: int) -> Relay | None:
        """The relay that an ack ends; late ones, after our nack, are passed on too."""
        relay = self._relays.get(nonce)
        if relay is None or relay.target != peer:
            return None
        self._remove(nonce)
        return relay

    def next_at(self) -> float:
        """When `due` has something to do."""
        return min((r.ends if r.nacked else r.nack_at for r in self._relays.values()), default=math.inf)

    def due(self, now: float) -> Iterable[Relay]:
        """Those whose asker must be told that there is no answer yet; forgets those that are over."""
        for nonce, relay in list(self._relays.items()):
            if not relay.nacked and now >= relay.nack_at:
                relay.nacked = True
                yield relay
            if now >= relay.ends:
                self._remove(nonce)

    def _remove(self, nonce: int) -> None:
        asker = self._relays.pop(nonce).asker
        self._askers[asker] -= 1
        if not self._askers[asker]:
            del self._askers[asker]
