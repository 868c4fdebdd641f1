"""Processes, and what belongs to them: callbacks, tasks, futures. The parts of the event loop (loop.py) that others name.

Tasks and futures hash by a serial number of their loop instead of by address, so that sets of them iterate in the same
order in every run.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loop import SimLoop


class _Nowhere:
    def append(self, _: Any) -> None: ...


NOWHERE = _Nowhere()


class Process:
    """One life of a host, as far as the loop is concerned.

    Attributes:
        held: where its callbacks go instead of running: None (they run), a list (it is paused) or nowhere (dead).
        killed: its tasks are being cancelled; it must have no effect on anybody any more.
    """

    __slots__ = ("name", "held", "killed", "_tasks", "_sweep_at", "__weakref__")

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: list[SimHandle] | _Nowhere | None = None
        self.killed = False
        self._tasks: list[weakref.ref[SimTask]] = []
        self._sweep_at = 64

    @property
    def paused(self) -> bool:
        return isinstance(self.held, list)

    @property
    def dead(self) -> bool:
        return self.held is NOWHERE

    def tasks(self) -> list[SimTask]:
        """Its tasks that have not ended, oldest first."""
        alive = [task for ref in self._tasks if (task := ref()) is not None and not task.done()]
        self._tasks = [weakref.ref(task) for task in alive]
        self._sweep_at = 2 * len(alive) + 64
        return alive

    def adopt(self, task: SimTask) -> None:
        self._tasks.append(weakref.ref(task))
        if len(self._tasks) > self._sweep_at:
            self.tasks()


# The process in whose name code runs; unset for the simulation itself.
PROCESS: ContextVar[Process | None] = ContextVar("shoal_sim_process", default=None)


class SimHandle:
    """What `call_soon` and `call_at` return: an asyncio handle with the process that it belongs to."""

    __slots__ = ("_loop", "callback", "args", "context", "process", "at_ns", "is_cancelled", "in_heap")

    def __init__(
        self,
        loop: SimLoop,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
        process: Process | None,
        at_ns: int,
        in_heap: bool,
    ) -> None:
        self._loop, self.callback, self.args = loop, callback, args
        self.context, self.process = context, process
        self.at_ns, self.in_heap = at_ns, in_heap
        self.is_cancelled = False

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled = True
            # What it would have called may be large, and the handle may stay in the heap for long.
            self.callback, self.args, self.context = _nothing, (), None
            if self.in_heap:
                self._loop.timer_cancelled()

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.at_ns / 1e9

    def get_context(self) -> Context | None:
        return self.context

    def __repr__(self) -> str:
        return f"<SimHandle {getattr(self.callback, '__qualname__', self.callback)} at {self.at_ns} ns>"


def _nothing() -> None: ...


class SimFuture(asyncio.Future[Any]):
    """A future that hashes by a serial number of its loop."""

    serial: int

    def __hash__(self) -> int:
        return self.serial


class SimTask(asyncio.Task[Any]):
    """A task that hashes by a serial number of its loop and knows whose it is."""

    def __init__(self, coro: Any, *, serial: int, process: Process | None, **options: Any) -> None:
        # Before the base class, which registers the task in a set.
        self.serial = serial
        self.process = process
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.serial
