"""Lifeguard's local health multiplier: how much this peer should doubt itself before it doubts others. Pure.

What goes wrong on our side (probes that fail without a word from the helpers, accusations that we have to refute, a stop
of our own process) raises the score; every probe that is answered lowers it. Interval and timeouts of our probes are
multiplied by 1 + score (Dadgar, Phillips, Currey 2018, section IV-A).
"""

from __future__ import annotations


class Awareness:
    """A score from 0 (healthy) to `score_max`."""

    def __init__(self, score_max: int) -> None:
        self._score_max = score_max
        self.score = 0

    def change(self, by: int) -> None:
        """Worse by a positive number, better by a negative one."""
        self.score = min(self._score_max, max(0, self.score + by))

    def scale(self, seconds: float) -> float:
        """A duration as this peer should measure it now."""
        return seconds * (1 + self.score)
