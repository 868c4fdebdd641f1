"""A host's clock in virtual time. Blocking work runs inline and takes the virtual time that it is said to cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from .loop import SimLoop

T = TypeVar("T")

EPOCH = 1_800_000_000.0  # unix seconds at virtual time 0


class SimClock:
    """Implements `Clock`. Work is done one piece at a time, in the order handed in, as by the daemon's one worker thread.

    `skew_s` moves the wall clock; `write_delay_s` is asked after each piece of work what the disk took for it.
    """

    def __init__(self, loop: SimLoop, write_delay_s: Callable[[], float] = lambda: 0.0) -> None:
        self._loop = loop
        self._write_delay_s = write_delay_s
        self._free_at = 0.0
        self.skew_s = 0.0

    def now(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return EPOCH + self._loop.time() + self.skew_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def run(self, work: Callable[[], T], *, cost_s: float = 0.0) -> T:
        now = self._loop.time()
        self._free_at = max(now, self._free_at) + cost_s
        # Even work that costs nothing gives way once, as handing it to a thread would.
        await asyncio.sleep(self._free_at - now)
        result = work()
        delay = self._write_delay_s()
        if delay > 0:
            self._free_at = max(self._free_at, self._loop.time()) + delay
            await asyncio.sleep(self._free_at - self._loop.time())
        return result

    def reset(self) -> None:
        """A new process: nobody's work is under way."""
        self._free_at = 0.0
