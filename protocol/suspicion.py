"""Lifeguard's dynamic suspicion timeout of one member. Pure: time comes in.

A suspicion starts with a long timeout that shrinks as others report the same independently:

    timeout = max(least, most - (most - least) · log(c + 1) / log(wanted + 1))

c: reporters beyond the first; wanted: how many are needed for the least timeout (Dadgar, Phillips, Currey 2018, section
IV-B). One thing is added: a death that others declared makes the timeout the least, and never shorter, so that whoever
is accused by mistake has the time to refute with every single member.
"""

from __future__ import annotations

import math


class Suspicion:
    """One member under suspicion."""

    def __init__(self, now: float, *, least_s: float, most_s: float, wanted: int) -> None:
        self._started, self._least_s, self._most_s, self._wanted = now, least_s, most_s, wanted
        self._hurried = False
        self.asked = False  # whether the member was told of it since, and so could answer for itself
        self._reporters: set[str] = set()

    @property
    def reporters(self) -> int:
        """Independent reporters so far; more than `wanted` beyond the first are not counted."""
        return len(self._reporters)

    def confirm(self, reporter: str) -> bool:
        """True when this is news that should be passed on."""
        if reporter in self._reporters or len(self._reporters) > max(0, self._wanted):
            return False
        self._reporters.add(reporter)
        return True

    def hurry(self) -> None:
        """Somebody's timeout has run out: ours becomes the least."""
        self._hurried = True

    def restart(self, now: float) -> None:
        """The time until now does not count: the member was heard from, or this process did not run."""
        self._started = now

    def shift(self, seconds: float) -> None:
        """This process did not run for so long."""
        self._started += seconds

    def waited_s(self, now: float) -> float:
        return now - self._started

    def deadline(self) -> float:
        """When the member is dead unless it refutes."""
        return self._started + self._timeout_s()

    def _timeout_s(self) -> float:
        if self._hurried or self._wanted < 1:
            return self._least_s
        confirmed = max(0, len(self._reporters) - 1)
        share = math.log(confirmed + 1) / math.log(self._wanted + 1)
        return max(self._least_s, self._most_s - share * (self._most_s - self._least_s))
