"""What the stream tests share: a loop whose time jumps to the next timer, a clock on it, and streams in memory."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from shoal.protocol.transport import DialError, Stream, StreamClosed

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Never sleeps: what it would have waited is added to the loop's time."""

    skipped = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("every task waits for something that cannot happen any more")
        self.skipped += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumps = _JumpingSelector()
        super().__init__(self.jumps)

    def time(self) -> float:
        return 1000.0 + self.jumps.skipped


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in virtual time; a task of it that outlives it is an error (servers of a `MemoryNet` are just ended)."""
    loop = VirtualLoop()
    try:
        result = loop.run_until_complete(work)
        servers = [task for task in asyncio.all_tasks(loop) if task.get_name() == "serving"]
        for task in servers:
            task.cancel()
        if servers:
            loop.run_until_complete(asyncio.wait(servers))
        left = asyncio.all_tasks(loop)
        assert not left, f"tasks left behind: {left}"
        return result
    finally:
        loop.close()


class InlineClock:
    """Loop time; blocking work runs inline, as in a simulation."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, callback)

    async def run(self, work: Callable[[], T], *, cost_s: float = 0.0) -> T:
        await asyncio.sleep(cost_s)
        return work()


class MemoryStream(Stream):
    """One end of a stream. `limit` frames wait before `send` blocks."""

    def __init__(self, inbox: asyncio.Queue[bytes | StreamClosed], outbox: asyncio.Queue[bytes | StreamClosed]) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._closed: StreamClosed | None = None
        self.other: MemoryStream | None = None

    async def send(self, frame: bytes) -> None:
        if self._closed is not None and not self._closed.clean:
            raise self._closed
        await self._outbox.put(frame)

    async def recv(self, timeout_s: float) -> bytes:
        if self._closed is not None and self._inbox.empty():
            raise self._closed
        item = await asyncio.wait_for(self._inbox.get(), timeout_s)
        if isinstance(item, StreamClosed):
            self._closed = item
            raise item
        return item

    async def done_sending(self) -> None:
        await self._outbox.put(StreamClosed("ended", clean=True))

    def cancel(self, reason: str) -> None:
        for end in (self, self.other):
            if end is None or end._closed is not None:
                continue
            end._closed = StreamClosed(reason)
            for queue in (end._inbox,):
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(end._closed)


def pair(limit: int = 4) -> tuple[MemoryStream, MemoryStream]:
    there: asyncio.Queue[bytes | StreamClosed] = asyncio.Queue(limit)
    back: asyncio.Queue[bytes | StreamClosed] = asyncio.Queue(limit)
    one, other = MemoryStream(back, there), MemoryStream(there, back)
    one.other, other.other = other, one
    return one, other


Serve = Callable[[str, Stream], Awaitable[None]]


class MemoryNet:
    """Opens streams to handlers by peer name, or by (peer, method). A handler that ends with an exception breaks its
    stream."""

    def __init__(self, handlers: dict[str, Serve] | dict[tuple[str, str], Serve] | dict[Any, Serve]) -> None:
        self.handlers: dict[Any, Serve] = {**handlers}
        self.opened: list[str] = []
        self.server_errors: list[BaseException] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def opener(self, me: str) -> Callable[[str, str, float], Awaitable[Stream]]:
        """`open` as it is called by `me`."""

        async def open_(peer: str, method: str, timeout_s: float) -> Stream:
            return await self.open(peer, method, timeout_s, me=me)

        return open_

    async def open(self, peer: str, method: str, timeout_s: float, *, me: str = "client") -> Stream:
        self.opened.append(peer)
        handler = self.handlers.get((peer, method), self.handlers.get(peer))
        if handler is None:
            raise DialError("unreachable", peer)
        mine, theirs = pair()

        async def serving() -> None:
            try:
                await handler(me, theirs)
            except (StreamClosed, asyncio.CancelledError):
                theirs.cancel("over")
            except Exception as error:
                self.server_errors.append(error)
                theirs.cancel(str(error))

        task = asyncio.ensure_future(serving())
        task.set_name("serving")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return mine
