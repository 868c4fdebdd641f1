"""Who asks to be let in and may be: also a peer that is behind the open round by no more than its distance. Pure.

A newcomer shows itself for the round after its own state. In a fast swarm that round is long over when its word arrives (20
rounds a second, 60 ms away: three rounds late, every time), so who follows the chain closely counts as standing at its tip.
Once named it is a member, and members are waited for up to a deadline. So that nobody who never comes, by bad luck or on
purpose, makes the others wait again and again, whoever was named and did not take part in the next round is not named again
for a while, which doubles.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ...protocol import limits
from ...protocol.ballot_messages import Value

# A base that was the newest here so long ago is near: the way there, the way back, and a few rounds to catch up on.
NEAR_SECONDS = 2.0
# Not named again for this long after the first time in vain.
PAUSE_SECONDS = 2.0
PAUSE_SECONDS_MAX = 120.0


@dataclass
class _Missed:
    times: int  # in a row
    until: float


class Newcomers:
    """What one peer knows of those outside the electorate."""

    def __init__(self) -> None:
        self._left: deque[tuple[float, bytes]] = deque(
            maxlen=limits.ROSTER_MAX
        )  # lineages that were ours, and until when
        self._named: frozenset[str] = frozenset()  # by the last commit
        self._missed: dict[str, _Missed] = {}

    def committed(self, now: float, value: Value) -> None:
        """The state has followed this commit."""
        self._left.append((now, value.base_lineage))
        for peer in self._named - set(value.roster):
            times = self._missed[peer].times + 1 if peer in self._missed else 1
            pause = min(PAUSE_SECONDS * 2.0 ** (times - 1), PAUSE_SECONDS_MAX)
            self._missed[peer] = _Missed(times, now + pause)
        for peer in self._named & self._missed.keys() & set(value.roster):
            del self._missed[peer]
        self._named = frozenset(value.joiners)
        for peer, missed in list(self._missed.items()):
            if now > missed.until + 2 * PAUSE_SECONDS_MAX or len(self._missed) > limits.MEMBERS_MAX:
                del self._missed[peer]

    def near(self, now: float, lineage: bytes) -> bool:
        """Whether this was our lineage until a moment ago."""
        return any(was == lineage and now - until <= NEAR_SECONDS for until, was in self._left)

    def unready(self, now: float) -> frozenset[str]:
        """Who is not to be named now."""
        return frozenset(peer for peer, missed in self._missed.items() if now < missed.until)
