"""The interfaces that everything above the wire uses: streams of frames, connections, time.

Covers: `Stream`, `Connection`, `Transport`, `Clock`. Does not cover: who a peer is (handshake.py), whether it may enter
(admission.py), or any real socket (grpc_transport.py; the simulator has the in-memory twin).

A transport authenticates only the *dialed* side: `dial` takes the expected peer id, and `Connection.binding` is the hash
of the certificate that the dialed side proved. The handshake above it authenticates the dialer. The accepting side
decides from `Call.method` and `Call.token` alone, before a byte of the stream is read, whether to serve it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")

HANDSHAKE_METHOD = "Handshake"


class StreamClosed(Exception):
    """The stream ended: by a half-close (`clean`), an error, a cancelled call or a lost connection."""

    def __init__(self, reason: str, *, clean: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.clean = clean


class DialError(Exception):
    """No connection: `kind` is "unreachable", "timeout", "wrong_peer" (its certificate proves another id) or "tls"."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class Stream(Protocol):
    """An ordered, reliable, flow-controlled sequence of frames both ways. One reader and one writer at a time.

    `send_now` and `each` are there for streams that can do without a task for every frame; others inherit them.
    """

    async def send(self, frame: bytes) -> None:
        """Queue one frame (at most FRAME_BYTES_MAX). Waits for flow control. Raises StreamClosed."""
        ...

    def send_now(self, frame: bytes) -> bool:
        """`send` where that needs no waiting. False: nothing was sent, and `send` is to be awaited or says what is wrong."""
        return False

    async def recv(self, timeout_s: float) -> bytes:
        """The next frame. Raises StreamClosed at the end (`clean` after a half-close) and asyncio.TimeoutError."""
        ...

    async def each(self, take: Callable[[bytes], bool], timeout_s: float) -> None:
        """Give every frame to `take` as it comes, until that returns False. Raises what `recv` and what `take` raises."""
        while take(await self.recv(timeout_s)):
            pass

    async def done_sending(self) -> None:
        """Half-close: the other side's `recv` raises a clean StreamClosed after the last frame."""
        ...

    def cancel(self, reason: str) -> None:
        """Give the stream up at once, both directions. Safe to call twice."""
        ...


@dataclass(frozen=True)
class Call:
    """An incoming stream before anything of it was read."""

    method: str
    token: bytes  # session token from the metadata; empty in the handshake
    remote: str  # address of the caller as seen here, for limits and logs only


Handler = Callable[[Call, Stream], Awaitable[None]]
# Decides before anything is read; a text refuses the call with that reason.
Gate = Callable[[Call], str | None]


class Connection(Protocol):
    """A dialed connection, its server side proven to be `peer_id`."""

    peer_id: str
    address: str
    binding: bytes  # sha-256 of the dialed side's TLS certificate (32 bytes)

    async def open(self, method: str, token: bytes, *, timeout_s: float) -> Stream:
        """Start a stream. Raises StreamClosed, asyncio.TimeoutError."""
        ...

    async def close(self) -> None: ...


class Transport(Protocol):
    """Listens and dials. One per node."""

    binding: bytes  # sha-256 of our own certificate

    @property
    def sent_bytes(self) -> int:
        """Bytes of frames handed to the network since the start."""
        ...

    @property
    def received_bytes(self) -> int: ...

    async def listen(self, host: str, port: int, gate: Gate, handler: Handler) -> int:
        """Serve; returns the bound port. Raises ShoalError(ADDRESS) when it cannot bind."""
        ...

    async def dial(self, address: str, peer_id: str, *, timeout_s: float) -> Connection:
        """Connect and prove that the other side is `peer_id`. Raises DialError."""
        ...

    async def close(self) -> None:
        """Stop listening, cancel every stream, close every connection."""
        ...


class Timer(Protocol):
    """What `Clock.call_later` returns."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Time and blocking work. In the simulator both are virtual."""

    def now(self) -> float:
        """Monotonic seconds. Equals the running loop's time()."""
        ...

    def wall(self) -> float:
        """Unix seconds, shown to people and never used for a decision."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call it after so long, without a task that sleeps."""
        ...

    async def run(self, work: Callable[[], T], *, cost_s: float = 0.0) -> T:
        """Run blocking work: in a worker thread here, inline with a virtual cost in the simulator."""
        ...
