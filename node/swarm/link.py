"""What the mesh keeps per peer: addresses, a queue, a circuit breaker, open streams; and what it counts. No dialing.

`Breaker` is pure: it is told `now` and given the generator. `SessionStream` is what users of the mesh read and write.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ...protocol import limits
from ...protocol.admission import Session
from ...protocol.transport import Connection, Stream, StreamClosed

BACKOFF_SECONDS_MIN = 0.25
# A peer that answers keepalive and does not read: one frame takes 1.5 s at 1 Mbit/s.
SEND_SECONDS_MAX = 30.0

_serial = itertools.count()


@dataclass
class Traffic:
    """Frame bytes by stream method, and faults by kind and by peer. Bounded: strangers cannot make it grow."""

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    sent_to: Counter[str] = field(default_factory=Counter)  # by peer
    received_from: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    charged: Counter[str] = field(default_factory=Counter)  # by peer

    def charge(self, peer: str, kind: str) -> None:
        self.faults[kind] += 1
        self.charged[peer] += 1
        if len(self.charged) > limits.CHARGED_MAX:
            self.charged = Counter(dict(self.charged.most_common(limits.CHARGED_MAX // 2)))

    def forget(self, peer: str) -> None:
        """Drop the byte counts of one peer; the sums by method stay."""
        self.sent_to.pop(peer, None)
        self.received_from.pop(peer, None)


class SessionStream:
    """A stream to or from an admitted peer: counts bytes, and looks at the session on every frame.

    Sending has a deadline of its own, so that no peer blocks us by not reading.
    """

    def __init__(self, stream: Stream, traffic: Traffic, method: str, peer: str, session: Session | None) -> None:
        """`session`: of an accepted stream; None on one that we opened."""
        self._stream, self._traffic, self._method, self._peer = stream, traffic, method, peer
        self.session = session
        self.serial = next(_serial)
        self.given_up = False

    @property
    def live(self) -> bool:
        return self.session is None or self.session.live

    def _check(self) -> None:
        if not self.live:
            self._stream.cancel("session ended")
            raise StreamClosed("unauthenticated: session ended")

    def send_now(self, frame: bytes) -> bool:
        if not (self.live and self._stream.send_now(frame)):
            return False
        self._count_sent(frame)
        return True

    async def send(self, frame: bytes) -> None:
        self._check()
        if self.send_now(frame):
            return
        # Not `wait_for`: it makes a task for every frame.
        task, late = asyncio.current_task(), []
        assert task is not None
        timer = asyncio.get_running_loop().call_later(SEND_SECONDS_MAX, _too_late, task, late)
        try:
            await self._stream.send(frame)
        except asyncio.CancelledError:
            # Somebody may have cancelled the task as well (known from Python 3.11 on): then it is to end.
            if not late or (sys.version_info >= (3, 11) and task.uncancel() > 0):
                raise
            self._stream.cancel("the other side does not read")
            raise StreamClosed(f"timeout: the other side did not read for {SEND_SECONDS_MAX:g} s") from None
        finally:
            timer.cancel()
        self._count_sent(frame)

    def _count_sent(self, frame: bytes) -> None:
        self._traffic.sent[self._method] += len(frame)
        self._traffic.sent_to[self._peer] += len(frame)

    async def recv(self, timeout_s: float) -> bytes:
        frame = await self._stream.recv(timeout_s)
        self._count(frame)
        return frame

    async def each(self, take: Callable[[bytes], bool], timeout_s: float) -> None:
        def counted(frame: bytes) -> bool:
            self._count(frame)
            return take(frame)

        await self._stream.each(counted, timeout_s)

    def _count(self, frame: bytes) -> None:
        """A frame has come. Raises StreamClosed when the session is over."""
        self._check()
        self._traffic.received[self._method] += len(frame)
        self._traffic.received_from[self._peer] += len(frame)

    async def done_sending(self) -> None:
        await self._stream.done_sending()

    def cancel(self, reason: str) -> None:
        self.given_up = True
        self._stream.cancel(reason)


def _too_late(task: asyncio.Task[None], late: list[bool]) -> None:
    late.append(True)
    task.cancel()


@dataclass(slots=True)
class Breaker:
    """Keeps a dead peer from costing anybody time: after a failure, no attempt before `retry_at`."""

    failures: int = 0
    retry_at: float = 0.0
    last_error: str = ""

    def failed(self, now: float, rng: random.Random, error: str) -> None:
        """Exponential with jitter, up to RECONNECT_BACKOFF_SECONDS_MAX: a healed partition is noticed within that."""
        self.failures += 1
        backoff = BACKOFF_SECONDS_MIN * 2 ** min(self.failures, 16) * (0.5 + rng.random())
        self.retry_at = now + min(backoff, limits.RECONNECT_BACKOFF_SECONDS_MAX)
        self.last_error = error

    def reset(self) -> None:
        """News of the peer, or a connection. The last error stays until there is a connection."""
        self.failures, self.retry_at = 0, 0.0


@dataclass(slots=True)
class Link:
    """Everything about one peer. `used_at`: when something was last sent on it or came on it (monotonic seconds)."""

    addresses: list[str] = field(default_factory=list)
    used_at: float = 0.0
    breaker: Breaker = field(default_factory=Breaker)
    connection: Connection | None = None
    token: bytes = b""  # our session there
    boot_id: bytes = b""  # of the process behind `connection`
    control: SessionStream | None = None  # on our connection
    accepted: list[SessionStream] = field(default_factory=list)  # control streams that the peer opened
    sender: asyncio.Task[None] | None = None
    called: asyncio.Future[None] | None = None  # done when the peer opens a control stream; set by who waits for one
    _queue: deque[tuple[float, bytes]] | None = None
    _lock: asyncio.Lock | None = None
    _streams: weakref.WeakSet[SessionStream] | None = None

    # Made when first used: most members of a large swarm are only heard of.

    @property
    def queue(self) -> deque[tuple[float, bytes]]:
        """Messages to be sent, and when they were queued."""
        if self._queue is None:
            self._queue = deque(maxlen=limits.MESSAGE_QUEUE_MAX)
        return self._queue

    @property
    def lock(self) -> asyncio.Lock:
        """Held while dialing."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    @property
    def streams(self) -> weakref.WeakSet[SessionStream]:
        """All but control streams, either way."""
        if self._streams is None:
            self._streams = weakref.WeakSet()
        return self._streams

    @property
    def dialing(self) -> bool:
        return self._lock is not None and self._lock.locked()

    def remember(self, *addresses: str) -> None:
        """Newest first, at most ADDRESSES_MAX."""
        self.addresses = list(dict.fromkeys([*addresses, *self.addresses]))[: limits.ADDRESSES_MAX]

    def accept(self, stream: SessionStream) -> None:
        """The peer opened a control stream."""
        self.accepted.append(stream)
        if self.called is not None and not self.called.done():
            self.called.set_result(None)

    def incoming(self) -> SessionStream | None:
        """The newest control stream that the peer opened and that is live."""
        return next((s for s in reversed(self.accepted) if s.live), None)

    def cancel_streams(self, reason: str) -> None:
        """End all streams at once, oldest first (a WeakSet has no order of its own)."""
        control = [self.control] if self.control is not None else []
        for stream in sorted([*(self._streams or ()), *self.accepted, *control], key=lambda s: s.serial):
            stream.cancel(reason)

    def quiet(self) -> bool:
        """Whether nothing of ours is under way but what may come on control streams."""
        sending = self.sender is not None and not self.sender.done()
        ours = any(s.session is None and not s.given_up for s in self._streams or ())
        return not (self._queue or sending or ours or self.dialing)

    def idle(self) -> bool:
        """Whether nothing is lost but addresses when this is forgotten."""
        sending = self.sender is not None and not self.sender.done()
        return not (self.connection or self.accepted or self._queue or sending or self.dialing)
