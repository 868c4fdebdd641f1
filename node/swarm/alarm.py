"""An event that one task waits for with a deadline, without a task of its own for every wait (`asyncio.wait_for` makes one)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...protocol.transport import Timer


class Alarm:
    """For one waiter at a time."""

    def __init__(self, call_later: Callable[[float, Callable[[], None]], Timer]) -> None:
        """`call_later`: the clock's."""
        self._call_later = call_later
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake whoever waits, or whoever waits next."""
        self._is_set = True
        self._wake()

    async def wait(self, seconds: float) -> None:
        """Until `set`, which is undone by this, or for so long."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            timer = self._call_later(max(0.0, seconds), self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        self._is_set = False

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
