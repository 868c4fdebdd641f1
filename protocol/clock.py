"""The real `Clock`: the running loop's time and worker threads. The simulator has its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class RealClock:
    """Blocking work runs in one worker thread, in the order it was handed in: a learner is never entered twice."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shoal-work")

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, callback)

    async def run(self, work: Callable[[], T], *, cost_s: float = 0.0) -> T:
        """`cost_s` is for virtual time only."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def close(self) -> None:
        """Let the work under way end; drop what has not begun."""
        self._worker.shutdown(wait=False, cancel_futures=True)
