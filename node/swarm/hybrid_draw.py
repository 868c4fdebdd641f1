"""Who is in a ring with whom: collecting requests and drawing rings, asking for a ring. Pure: time and live peers are given.

Theory of operation. For every round all live peers stand in an order that its number seeds; every ceil(n / size)-th of them
make a ring, and the first of each ring draws it (protocol/rings.py, `rings_of`). A peer asks the drawer of its place, again
and again until the draw comes; a drawer that does not answer is passed over for the next of the same ring, at last for the
asker itself. So whoever asks is drawn, if only alone. The drawer waits for those it expects, but not longer than those before
them took: views of who is alive may differ, and then a ring is a little smaller or larger and nothing else.

Does not cover: what a ring then does (hybrid.py).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ...protocol.deadlines import Deadlines, Wait
from ...protocol.rings import Draw, make_draw, rings_of

# A request is repeated this often; one that was not for three times as long has been given up.
REPEAT_SECONDS = 0.5
STALE_SECONDS = 3 * REPEAT_SECONDS
# Draws that can still be told to a member that has missed them.
DRAWS_KEPT = 16


@dataclass
class _Waiting:
    round: int
    nonce: bytes
    since: float
    heard: float


class Drawer:
    """Collects others' requests, and draws."""

    def __init__(self, me: str, size_max: int, deadlines: Deadlines | None = None) -> None:
        """`deadlines`: how long requests took to come, after the first; its own table, in which JOIN stands for a request."""
        self.me, self._size_max = me, size_max
        self._deadlines = deadlines or Deadlines()
        self._waiting: dict[str, _Waiting] = {}
        self._drawn: list[Draw] = []

    @property
    def patience(self) -> float:
        """Seconds that a ring is waited for, from the first request."""
        return self._deadlines.seconds(Wait.JOIN)[0]

    def requested(self, now: float, peer: str, round_: int, nonce: bytes, alive: Collection[str]) -> Draw | None:
        """A peer asks. The draw that it is in, if there is one now: to be told to all its members.

        Args:
            alive: all others that are alive.
        """
        for draw in self._drawn:
            if draw.members.get(peer) == nonce:
                return draw
        before = self._waiting.get(peer)
        if before is not None and before.nonce == nonce:
            before.heard, before.round = now, round_
        else:
            self._waiting[peer] = _Waiting(round_, nonce, now, now)
            if len(self._waiting) > 1:
                self._deadlines.observe(Wait.JOIN, now - min(w.since for w in self._waiting.values()))
        self._waiting = {p: w for p, w in self._waiting.items() if now - w.heard < STALE_SECONDS}
        draw = self._due(now, {*alive, self.me})
        return draw if draw is not None and peer in draw.members else None

    def _due(self, now: float, peers: set[str]) -> Draw | None:
        waiting = self._waiting
        round_ = max(w.round for w in waiting.values())
        expected = self._expected(peers, round_)
        full = len(waiting) >= self._size_max
        late = now - min(w.since for w in waiting.values()) >= self.patience
        if not (full or late or expected <= waiting.keys()):
            return None
        chosen = sorted(waiting, key=lambda p: (p not in expected, waiting[p].since, p))[: self._size_max]
        draw = make_draw(round_, self.me, max(len(peers), len(chosen)), {p: waiting[p].nonce for p in chosen})
        for peer in chosen:
            del waiting[peer]
        self._drawn = [draw, *self._drawn][:DRAWS_KEPT]
        return draw

    def _expected(self, peers: set[str], round_: int) -> set[str]:
        """The rest of our own ring: those before us were passed over by whoever asks us."""
        ring = place_of(self.me, peers, round_, self._size_max)
        behind = set(ring[ring.index(self.me) :])
        return behind - {self.me} | ({self.me} if ring[0] == self.me else set())


class Seeker:
    """One peer's search for one ring."""

    def __init__(self, me: str, round_: int, nonce: bytes, patience: float, now: float) -> None:
        """
        Args:
            nonce: 32 random bytes.
            patience: seconds after which a drawer is passed over.
        """
        self.me, self.round, self.nonce = me, round_, nonce
        self._patience, self.since = patience, now
        self._asking: str | None = None
        self._asked_at = now
        self._passed: set[str] = set()

    def ask(self, now: float, alive: Collection[str], size_max: int) -> str:
        """Whom to ask now; possibly ourselves."""
        asking = self._asking
        if asking is not None and asking != self.me and (asking not in alive or now - self._asked_at > self._patience):
            self._passed.add(asking)
            asking = None
        if asking is None:
            ring = place_of(self.me, {*alive, self.me}, self.round, size_max)
            ahead = ring[: ring.index(self.me)]
            asking = next((peer for peer in ahead if peer not in self._passed), self.me)
            self._asking, self._asked_at = asking, now
        return asking


def place_of(me: str, peers: Collection[str], round_: int, size_max: int) -> list[str]:
    """The ring of `me` in a round among these peers, `me` included; its drawer first."""
    return next(ring for ring in rings_of(peers, round_, size_max) if me in ring)
