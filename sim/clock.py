"""A host's clock in virtual time. Blocking work runs inline and takes the virtual time that it is said to cost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, TypeVar

from .loop import SimLoop, nanoseconds
from .process import PROCESS, Process, SimFuture, SimHandle

T = TypeVar("T")

EPOCH = 1_800_000_000.0  # unix seconds at virtual time 0


class _Job:
    """One piece of blocking work."""

    __slots__ = ("work", "cost_s", "result", "context", "process")

    def __init__(self, work: Callable[[], Any], cost_s: float, result: SimFuture) -> None:
        self.work, self.cost_s, self.result = work, cost_s, result
        self.context: Context = copy_context()
        self.process: Process | None = PROCESS.get()


class SimClock:
    """Implements `Clock`. Work is done one piece at a time, in the order handed in, as by the daemon's one worker thread:
    who gives up waiting for it does not stop it once it has begun, and what has not begun is dropped with its waiter.
    All of its effects happen at its end. Work of a process that is killed meanwhile has none.

    Attributes:
        skew_s, drift_ppm: the wall clock is off by so many seconds, and runs so many microseconds per second too fast.
    """

    def __init__(self, loop: SimLoop, write_delay_s: Callable[[], float] = lambda: 0.0) -> None:
        """
        Args:
            write_delay_s: asked after each piece of work: what the disk took for it.
        """
        self._loop = loop
        self._write_delay_s = write_delay_s
        self._queue: deque[_Job] = deque()
        self._current: _Job | None = None
        self.skew_s = 0.0
        self.drift_ppm = 0.0

    @property
    def busy(self) -> bool:
        """Whether a piece of work is under way or waits."""
        return self._current is not None

    def now(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return EPOCH + self._loop.time() * (1 + self.drift_ppm * 1e-6) + self.skew_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> SimHandle:
        return self._loop.call_later(seconds, callback)

    async def run(self, work: Callable[[], T], *, cost_s: float = 0.0) -> T:
        """Even work that costs nothing gives way once, as handing it to a thread would."""
        job = _Job(work, cost_s, self._loop.create_future())
        self._queue.append(job)
        if self._current is None:
            self._begin()
        return await job.result

    def reset(self) -> None:
        """A new process: nobody's work is under way."""
        self._queue.clear()
        self._current = None

    def _begin(self) -> None:
        self._current = None
        while self._queue:
            job = self._queue.popleft()
            if not job.result.cancelled():
                self._current = job
                self._loop.post(self._loop.now_ns + nanoseconds(job.cost_s), self._do, (job,), job.process)
                return

    def _do(self, job: _Job) -> None:
        if job is not self._current or (job.process is not None and job.process.killed):
            return
        error: BaseException | None = None
        value = None
        try:
            value = job.context.run(job.work)
        except Exception as raised:
            error = raised
        delay = self._write_delay_s()
        if delay > 0:
            self._loop.post(self._loop.now_ns + nanoseconds(delay), self._done, (job, value, error), job.process)
        else:
            self._done(job, value, error)

    def _done(self, job: _Job, value: Any, error: BaseException | None) -> None:
        if job is not self._current:
            return
        self._begin()
        if error is None:
            if not job.result.done():
                job.result.set_result(value)
        elif not job.result.done():
            job.result.set_exception(error)
        else:
            context = {"message": "in blocking work that nobody waits for", "exception": error, "handle": job}
            self._loop.call_exception_handler(context)
