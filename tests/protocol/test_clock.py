"""The real clock: the loop's time, and one worker for blocking work."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from shoal.protocol.clock import RealClock


def test_time_is_the_loops_and_work_is_serial_in_one_other_thread() -> None:
    async def main() -> None:
        clock = RealClock()
        before = clock.now()
        await clock.sleep(0)
        assert before <= clock.now() <= asyncio.get_running_loop().time()
        assert abs(clock.wall() - time.time()) < 60
        order: list[int] = []

        def work(n: int) -> int:
            order.append(n)
            return threading.get_ident()

        threads = await asyncio.gather(*(clock.run(lambda n=n: work(n), cost_s=1.0) for n in range(8)))
        assert order == list(range(8)) and len(set(threads)) == 1 and threads[0] != threading.get_ident()
        clock.close()

    asyncio.run(main())


def test_errors_of_work_come_back_and_close_drops_what_has_not_begun() -> None:
    async def main() -> None:
        clock = RealClock()
        with pytest.raises(ZeroDivisionError):
            await clock.run(lambda: 1 / 0)
        begun, go = threading.Event(), threading.Event()

        def hold() -> str:
            begun.set()
            go.wait(10)
            return "done"

        first = asyncio.ensure_future(clock.run(hold))
        second = asyncio.ensure_future(clock.run(lambda: "never"))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait, 10)
        clock.close()
        go.set()
        assert await first == "done"
        with pytest.raises(asyncio.CancelledError):
            await second

    asyncio.run(main())
