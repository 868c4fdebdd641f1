"""Virtual time: order, timers, deadlocks, runaways, pauses, and the same trace whatever the hash seed."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.sim.loop import SWEEP_TIMERS_MIN, Deadlock, Runaway, SimLoop, nanoseconds
from shoal.sim.process import PROCESS, Process


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    made = SimLoop()
    yield made
    made.close()


@contextmanager
def inside(process: Process) -> Iterator[None]:
    """Schedule in the name of a process."""
    token = PROCESS.set(process)
    try:
        yield
    finally:
        PROCESS.reset(token)


# --- time and order ---------------------------------------------------------------------------------------------------


def test_a_year_passes_at_once(loop: SimLoop) -> None:
    async def wait() -> float:
        await asyncio.sleep(365 * 86_400)
        return asyncio.get_running_loop().time()

    assert loop.run_until_complete(wait()) == 365 * 86_400
    assert loop.events < 10


def test_equal_times_run_in_the_order_they_were_set(loop: SimLoop) -> None:
    seen: list[str] = []
    loop.call_at(1.0, seen.append, "a")
    loop.call_later(1.0, seen.append, "b")
    loop.call_at(0.5, lambda: loop.call_at(1.0, seen.append, "d"))
    loop.post(nanoseconds(1.0), seen.append, ("c",))
    loop.call_soon(seen.append, "first")
    loop.run_until(2.0)
    assert seen == ["first", "a", "b", "c", "d"] and loop.time() == 2.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_timers_fire_in_order_and_never_early(times: list[float]) -> None:
    loop = SimLoop()
    fired: list[float] = []

    def fire(when: float) -> None:
        assert when <= loop.time() <= when + 2e-9 + when * 1e-15
        fired.append(when)

    for when in times:
        loop.call_at(when, fire, when)
    loop.run_until(1e6)
    assert fired == sorted(times, key=nanoseconds)  # within one nanosecond: as they were set
    loop.close()


@given(st.floats(0, 1e7))
def test_a_timer_at_a_float_time_has_come_when_it_fires(when: float) -> None:
    assert nanoseconds(when) / 1e9 >= when


def test_run_until_stops_exactly_there(loop: SimLoop) -> None:
    seen: list[int] = []
    for second in range(5):
        loop.call_at(float(second), seen.append, second)
    loop.run_until(2.0)
    assert seen == [0, 1, 2] and loop.now_ns == 2_000_000_000
    loop.run_until(10.0)
    assert seen == [0, 1, 2, 3, 4] and loop.time() == 10.0


def test_cancelled_timers_do_not_pile_up(loop: SimLoop) -> None:
    kept = [loop.call_at(1.0, int) for _ in range(10)]
    for n in range(20 * SWEEP_TIMERS_MIN):
        loop.call_at(1000.0 + n, int).cancel()
    assert len(loop._timers) <= 2 * SWEEP_TIMERS_MIN
    loop.run_until(2.0)
    assert loop.events == len(kept)


def test_after_step_sees_every_stride_th_callback_and_may_end_the_run(loop: SimLoop) -> None:
    looks: list[int] = []
    loop.after_step, loop.stride = lambda: looks.append(loop.events), 3
    for _ in range(10):
        loop.call_soon(int)
    loop.run_until(1.0)
    assert looks == [3, 6, 9]

    def violated() -> None:
        raise AssertionError("invariant")

    loop.after_step, loop.stride = violated, 1
    loop.call_soon(int)
    with pytest.raises(AssertionError, match="invariant"):
        loop.run_until(2.0)


def test_asyncio_itself_runs_on_it(loop: SimLoop) -> None:
    async def main() -> list[Any]:
        event, queue, lock = asyncio.Event(), asyncio.Queue[int](1), asyncio.Lock()

        async def producer() -> None:
            for n in range(3):
                async with lock:
                    await queue.put(n)
                    await asyncio.sleep(1)
            event.set()

        async def numbers() -> Any:
            for n in range(3):
                yield n

        task = asyncio.ensure_future(producer())
        got = [await queue.get() for _ in range(3)]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(event.wait(), 0.5)
        await event.wait()
        await task
        async for n in numbers():
            got.append(n)
        done, pending = await asyncio.wait({loop.create_task(asyncio.sleep(n, n)) for n in (3, 1, 2)}, timeout=2.5)
        assert [t.result() for t in sorted(done, key=hash)] == [1, 2]
        for other in pending:
            other.cancel()
        results = await asyncio.gather(asyncio.sleep(1, "x"), *pending, return_exceptions=True)
        assert isinstance(results[1], asyncio.CancelledError)
        return [*got, results[0], loop.time()]

    assert loop.run_until_complete(main()) == [0, 1, 2, 0, 1, 2, "x", 6.5]


# --- what can go wrong ------------------------------------------------------------------------------------------------


def test_a_deadlock_names_who_waits(loop: SimLoop) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"waiting: forever \(never:"):
        loop.run_until_complete(loop.create_task(never(), name="forever"))
    loop.finish()
    assert loop.errors == []


def test_a_runaway_is_found(loop: SimLoop) -> None:
    small = SimLoop(instant_events_max=1000)

    def again() -> None:
        small.call_soon(again)

    small.call_at(1.5, again)
    with pytest.raises(Runaway, match=r"at 1\.5.*again"):
        small.run_until(2.0)
    small.close()


def test_errors_are_collected(loop: SimLoop) -> None:
    async def fails() -> None:
        raise ValueError("unseen")

    def breaks() -> None:
        raise KeyError("callback")

    loop.call_at(1.0, breaks)
    loop.create_task(fails())
    loop.run_until(2.0)
    gc.collect()
    assert len(loop.errors) == 2
    assert any("callback" in text and text.startswith("1.000000 s") for text in loop.errors)
    assert any("unseen" in text for text in loop.errors)


def test_an_error_of_a_killed_process_is_no_news(loop: SimLoop) -> None:
    process = Process("p")

    def breaks() -> None:
        raise KeyError("callback")

    with inside(process):
        loop.call_soon(breaks)
    process.killed = True
    loop.run_until(1.0)
    assert loop.errors == []


def test_threads_and_own_tasks_are_refused(loop: SimLoop) -> None:
    with pytest.raises(RuntimeError, match="Clock.run"):
        loop.run_in_executor(None, int)
    with pytest.raises(RuntimeError, match="reproducible"):
        loop.set_task_factory(None)

    async def nested() -> None:
        loop.run_until(1.0)

    with pytest.raises(RuntimeError, match="already"):
        loop.run_until_complete(nested())


def test_finish_ends_every_task_and_says_which_does_not(loop: SimLoop) -> None:
    ended: list[str] = []

    async def tidy() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            ended.append("tidy")

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass

    loop.create_task(tidy())
    loop.create_task(stubborn(), name="mule")
    loop.run_until(1.0)
    loop.finish()
    assert ended == ["tidy"] and loop.is_closed()
    assert len(loop.errors) == 1 and "mule" in loop.errors[0]


# --- processes --------------------------------------------------------------------------------------------------------


def test_a_paused_process_loses_nothing_and_runs_in_order_later(loop: SimLoop) -> None:
    process, seen = Process("p"), list[tuple[str, float]]()
    note = lambda what: seen.append((what, loop.time()))  # noqa: E731

    async def work() -> None:
        for n in range(4):
            note(f"p{n}")
            await asyncio.sleep(1)

    with inside(process):
        loop.create_task(work())
        loop.call_at(2.5, note, "timer")
    loop.call_at(1.5, loop.hold, process)
    loop.call_at(2.2, note, "other")
    loop.call_at(10.0, loop.release, process)
    loop.run_until(20.0)
    assert seen == [("p0", 0), ("p1", 1), ("other", 2.2), ("timer", 10), ("p2", 10), ("p3", 11)]
    assert process.tasks() == []


def test_what_a_process_sets_off_is_its_own(loop: SimLoop) -> None:
    process, seen = Process("p"), list[str]()

    async def child() -> None:
        await asyncio.sleep(1)
        seen.append("child")

    async def parent() -> None:
        loop.call_soon(lambda: loop.call_later(1, seen.append, "timer"))
        await asyncio.gather(child(), child())

    with inside(process):
        loop.create_task(parent(), name="parent")
    loop.run_until(0.5)
    assert [t.get_name() for t in process.tasks()][0] == "parent" and len(process.tasks()) == 3
    loop.bury(process)
    loop.run_until(5.0)
    assert seen == [] and process.dead
    loop.finish()


def test_a_future_wakes_its_waiter_in_the_waiters_name(loop: SimLoop) -> None:
    """A delivery from outside must not get past a pause."""
    process, seen = Process("p"), list[float]()
    future = loop.create_future()

    async def wait() -> None:
        await future
        seen.append(loop.time())

    with inside(process):
        loop.create_task(wait())
    loop.run_until(1.0)
    loop.hold(process)
    loop.call_at(2.0, future.set_result, None)
    loop.call_at(3.0, loop.release, process)
    loop.run_until(4.0)
    assert seen == [3.0]


def test_ended_tasks_are_forgotten(loop: SimLoop) -> None:
    process = Process("p")

    async def many() -> None:
        for _ in range(1000):
            await loop.create_task(asyncio.sleep(0.001))

    with inside(process):
        loop.create_task(many())
    loop.run_until(10.0)
    assert len(process._tasks) < 200


# --- the same in every process ----------------------------------------------------------------------------------------

_PROGRAM = """
import asyncio, random
from shoal.sim.loop import SimLoop

loop, rng, trace = SimLoop(), random.Random(3), []

async def work(n, depth):
    await asyncio.sleep(rng.choice([0, 0.5, 1]))
    trace.append((n, loop.time()))
    if depth:
        tasks = {loop.create_task(work(10 * n + k, depth - 1)) for k in range(6)}
        while tasks:
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            trace.append([t.result() for t in done])   # a set: in the order in which it iterates
            if rng.random() < 0.3:
                for task in tasks:
                    task.cancel()
                    trace.append(task.get_name())
                await asyncio.gather(*tasks, return_exceptions=True)
                break
    futures = {loop.create_future() for _ in range(20)}
    for k, future in enumerate(futures):
        future.set_result(k)
    trace.append([f.result() for f in futures])
    for future in asyncio.as_completed({loop.create_task(asyncio.sleep(0, k)) for k in range(9)}):
        trace.append(await future)
    return n

junk = [object() for _ in range(int(__import__("os").environ["PYTHONHASHSEED"]) * 977)]  # move addresses
loop.run_until_complete(work(1, 2))
print(loop.events, trace)
"""


def test_sets_of_tasks_iterate_alike_whatever_the_hash_seed() -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in (1, 2)
    ]
    assert runs[0] == runs[1] and len(runs[0]) > 400
