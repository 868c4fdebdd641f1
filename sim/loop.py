"""An asyncio event loop whose time is a number: it runs what is ready, then jumps to the next timer.

Covers: callbacks, timers, tasks and futures in virtual nanoseconds; pausing and burying the callbacks of one process;
reproducible order. Does not cover: sockets, threads, signals, subprocesses (asking for one raises).

Theory of operation. `ready` is a FIFO of callbacks of the present instant, `timers` a heap ordered by (nanosecond, serial
number), so equals fire in the order they were set. Nothing else decides an order: tasks and futures made by this loop
hash by a serial number of the loop instead of by address, so `asyncio.wait` and every other set of them iterate in the
same order in every run. (Sets of strings do not: those are the program's own business.)

Whose callback is it? `PROCESS` in the callback's context says so; tasks, timers and done-callbacks inherit it. While a
process is paused its callbacks go to `Process.held` instead of running, in order; once it is dead they go nowhere.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
import traceback
import weakref
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from typing import Any, TypeVar

from .process import NOWHERE, PROCESS, Process, SimFuture, SimHandle, SimTask

T = TypeVar("T")

# A thousand nodes that start at one instant need some hundred thousand callbacks in it.
INSTANT_EVENTS_MAX = 2_000_000
# Cancelled timers are swept out of the heap when there are this many and they are more than half of it.
SWEEP_TIMERS_MIN = 1024
# What is kept of errors, each a few hundred bytes.
ERRORS_MAX = 1000
FINISH_SECONDS = 60.0


class Deadlock(RuntimeError):
    """Nothing is ready, no timer is set, and the result that was asked for is not there."""


class Runaway(RuntimeError):
    """So many callbacks at one instant that time would never move on."""


class SimLoop(asyncio.AbstractEventLoop):
    """Virtual time, starting at 0.

    Attributes:
        now_ns: virtual nanoseconds since the start.
        events: callbacks run so far.
        after_step: called after every `stride` callbacks; what it raises ends the run.
        ran: whose callback that was (None: the simulation's own); one that works in the name of another process says so here.
        errors: what nobody caught, as text, with the virtual time.
    """

    def __init__(self, *, instant_events_max: int = INSTANT_EVENTS_MAX) -> None:
        self.now_ns = 0
        self.events = 0
        self.after_step: Callable[[], object] | None = None
        self.ran: Process | None = None
        self.stride = 1
        self.errors: list[str] = []
        self.errors_dropped = 0
        self._now = 0.0
        self._instant_events_max = instant_events_max
        self._ready: deque[SimHandle] = deque()
        self._timers: list[tuple[int, int, SimHandle]] = []
        self._cancelled_timers = 0
        self._serial = 0
        self._running = self._stopping = self._closed = False
        self._debug = False
        self._exception_handler: Callable[[Any, dict[str, Any]], object] | None = None
        self._generators: weakref.WeakSet[Any] = weakref.WeakSet()

    def next_serial(self) -> int:
        """A number that nothing else of this loop has."""
        self._serial += 1
        return self._serial

    # ------------------------------------------------------------------------------------------------ scheduling

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        if context is None:
            context = copy_context()
        handle = SimHandle(self, callback, args, context, context.get(PROCESS), self.now_ns, False)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        # Not through the float time: its rounding must not make equal delays unequal.
        return self._set(self.now_ns + nanoseconds(delay), callback, args, context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        return self._set(nanoseconds(when), callback, args, context)

    def _set(
        self, at_ns: int, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> SimHandle:
        if context is None:
            context = copy_context()
        handle = SimHandle(self, callback, args, context, context.get(PROCESS), at_ns, True)
        self._serial += 1
        heapq.heappush(self._timers, (at_ns, self._serial, handle))
        return handle

    def post(
        self, at_ns: int, callback: Callable[..., object], args: tuple[Any, ...] = (), process: Process | None = None
    ) -> SimHandle:
        """`call_at` of the simulation's own machinery: in nanoseconds, without a context, in the name of `process`."""
        handle = SimHandle(self, callback, args, None, process, at_ns, True)
        self._serial += 1
        heapq.heappush(self._timers, (at_ns, self._serial, handle))
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        """There is one thread; code that uses this by habit runs unchanged."""
        return self.call_soon(callback, *args, context=context)

    def timer_cancelled(self) -> None:
        self._cancelled_timers += 1
        if self._cancelled_timers >= SWEEP_TIMERS_MIN and 2 * self._cancelled_timers > len(self._timers):
            self._timers[:] = [entry for entry in self._timers if not entry[2].is_cancelled]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    def create_future(self) -> SimFuture:
        future = SimFuture(loop=self)
        self._serial += 1
        future.serial = self._serial
        return future

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
        **options: Any,
    ) -> SimTask:
        self._serial += 1
        serial = self._serial
        if context is not None:  # Python 3.11 and newer
            options["context"] = context
        process = PROCESS.get() if context is None else context.get(PROCESS)
        task = SimTask(coro, serial=serial, process=process, loop=self, name=name or f"task-{serial}", **options)
        if process is not None:
            process.adopt(task)
        return task

    def set_task_factory(self, factory: Any) -> None:
        raise RuntimeError("the simulator makes its own tasks: their order must be reproducible")

    def get_task_factory(self) -> None:
        return None

    # ------------------------------------------------------------------------------------------------ running

    def run_until(self, at_s: float) -> None:
        """Run everything due up to and including `at_s` virtual seconds; then that is the time."""
        until_ns = nanoseconds(at_s)
        self._run(until_ns)
        if until_ns > self.now_ns and not self._stopping:
            self.now_ns, self._now = until_ns, until_ns / 1e9

    def run_until_complete(self, future: Any) -> Any:
        """The result of a coroutine or future. Raises Deadlock when it can never come."""
        is_new = not asyncio.isfuture(future)
        future = asyncio.ensure_future(future, loop=self)
        future.add_done_callback(self._stop_for)
        try:
            self._run(None)
        except BaseException:
            if is_new and future.done() and not future.cancelled():
                future.exception()  # seen: the run's own error is the one to raise
            raise
        finally:
            future.remove_done_callback(self._stop_for)
        if not future.done():
            raise Deadlock(self._waiting())
        return future.result()

    def run_forever(self) -> None:
        """Run until `stop`, or until nothing is left to run."""
        self._run(None)

    def stop(self) -> None:
        self._stopping = True

    def _stop_for(self, _: Any) -> None:
        self._stopping = True

    def _run(self, until_ns: int | None) -> None:
        """Run what is due by `until_ns` (None: whatever comes), until `stop` or until nothing is."""
        if self._closed:
            raise RuntimeError("the loop is closed")
        if self._running or events._get_running_loop() is not None:
            raise RuntimeError("a loop is running in this thread already")
        ready, timers, pop = self._ready, self._timers, heapq.heappop
        in_instant = since_look = 0
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._generators.add, finalizer=self._close_generator)
        self._running, self._stopping = True, False
        events._set_running_loop(self)
        try:
            while not self._stopping:
                if not ready:
                    while timers and timers[0][2].is_cancelled:
                        pop(timers)
                        self._cancelled_timers -= 1
                    if not timers:
                        return
                    at_ns = timers[0][0]
                    if until_ns is not None and at_ns > until_ns:
                        return
                    if at_ns > self.now_ns:
                        self.now_ns, self._now = at_ns, at_ns / 1e9
                        in_instant = 0
                    while timers and timers[0][0] <= at_ns:
                        handle = pop(timers)[2]
                        handle.in_heap = False
                        if handle.is_cancelled:
                            self._cancelled_timers -= 1
                        else:
                            ready.append(handle)
                handle = ready.popleft()
                if handle.is_cancelled:
                    continue
                process = handle.process
                if process is not None and process.held is not None:
                    process.held.append(handle)
                    continue
                self.ran = process
                try:
                    if handle.context is None:
                        handle.callback(*handle.args)
                    else:
                        handle.context.run(handle.callback, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"in {handle!r}", "exception": error, "handle": handle})
                self.events += 1
                in_instant += 1
                if in_instant > self._instant_events_max:
                    raise Runaway(
                        f"{in_instant} callbacks at {self._now:.9f} s and time does not move; the last was {handle!r}"
                    )
                if self.after_step is not None:
                    since_look += 1
                    if since_look >= self.stride:
                        since_look = 0
                        self.after_step()
        finally:
            self._running = False
            events._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _waiting(self) -> str:
        """Who waits, for the message of a deadlock."""
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: getattr(task, "serial", 0))
        shown = [f"{task.get_name()} ({_where(task)})" for task in tasks[:20]]
        more = f" and {len(tasks) - 20} more" if len(tasks) > 20 else ""
        return f"at {self._now:.9f} s nothing is ready and no timer is set; waiting: {', '.join(shown)}{more}"

    # ------------------------------------------------------------------------------------------------ processes

    def hold(self, process: Process) -> None:
        """Nothing of this process runs until `release`, and nothing of it is lost."""
        if process.held is None:
            process.held = []

    def release(self, process: Process) -> None:
        """Let it run again. What was held back comes in its order, after what is ready now."""
        held = process.held
        if isinstance(held, list):
            process.held = None
            self._ready.extend(held)

    def bury(self, process: Process) -> None:
        """Nothing of this process runs ever again."""
        process.held = NOWHERE

    # ------------------------------------------------------------------------------------------------ errors

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._exception_handler is not None:
            self._exception_handler(self, context)
        else:
            self.default_exception_handler(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Collect it in `errors`. What a killed process dies of is nobody's news."""
        subject = context.get("task") or context.get("future") or context.get("handle")
        process = getattr(subject, "process", None)
        if process is not None and process.killed:
            return
        if len(self.errors) >= ERRORS_MAX:
            self.errors_dropped += 1
            return
        whose = f" [{process.name}]" if process is not None else ""
        error = context.get("exception")
        if isinstance(error, asyncio.CancelledError):
            return  # a gather that was cancelled with its life: nobody is left to look at it
        trace = "".join(traceback.format_exception(error)).rstrip() if error is not None else ""
        self.errors.append(f"{self._now:.6f} s{whose} {context.get('message', '')}\n{trace}".rstrip())

    def set_exception_handler(self, handler: Callable[[Any, dict[str, Any]], object] | None) -> None:
        self._exception_handler = handler

    def get_exception_handler(self) -> Callable[[Any, dict[str, Any]], object] | None:
        return self._exception_handler

    # ------------------------------------------------------------------------------------------------ the end

    def finish(self) -> None:
        """Cancel every task, run them to their ends, close. What does not end is an entry in `errors`."""
        if self._closed:
            return
        self.after_step = None
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: getattr(task, "serial", 0))
        for task in tasks:
            process = getattr(task, "process", None)
            if process is not None and process.held is not None:
                process.held = None if not isinstance(process.held, list) else process.held
                self.release(process)
            task.cancel()
        deadline = self._now + FINISH_SECONDS
        while (left := [task for task in tasks if not task.done()]) and self._now < deadline:
            self.run_until(self._now + 1.0)
        if left:
            self.errors.append(f"{len(left)} tasks do not end: {', '.join(task.get_name() for task in left[:20])}")
        self.run_until_complete(self.shutdown_asyncgens())
        self.close()

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def get_debug(self) -> bool:
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        self._debug = enabled

    def _close_generator(self, generator: Any) -> None:
        self._generators.discard(generator)
        if not self._closed:
            self.create_task(generator.aclose())

    async def shutdown_asyncgens(self) -> None:
        generators = list(self._generators)
        self._generators.clear()
        await asyncio.gather(*(generator.aclose() for generator in generators), return_exceptions=True)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None: ...

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        raise RuntimeError("there are no threads in a simulation: run blocking work through Clock.run")


def nanoseconds(seconds: float) -> int:
    """The first nanosecond that is not before `seconds`: a timer never fires early, whatever floats round to."""
    ns = int(seconds * 1e9)
    while ns / 1e9 < seconds:
        ns += 1
    return ns


def _where(task: asyncio.Task[Any]) -> str:
    stack = task.get_stack(limit=1)
    return f"{stack[-1].f_code.co_name}:{stack[-1].f_lineno}" if stack else "not started"
