"""The real transport: grpc.aio over TLS, one bidirectional stream of raw frames per call.

Covers: listening with the identity-bound certificate, dialing with the expected peer id pinned, keepalive and limits,
the gate that decides from metadata before a byte of a stream is read. Does not cover: who the dialer is (handshake.py).

gRPC for Python has no callback to verify a certificate. So the dialer first reads the certificate with the standard
`ssl` module, checks that libp2p's extension proves the expected peer id, and then gives gRPC that one certificate as
its only root: whoever answers must hold its key. No generated stubs: the frames are bytes, decoded where their limits
are known.

Every process makes a new leaf, so after a restart of the other side the pinned root no longer matches and streams fail
as "unavailable"; the mesh then dials anew.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

# gRPC writes its own lines to stderr, among the node's; what matters of them comes back as errors.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from . import limits
from .errors import ExitCode, PeerFault, ShoalError
from .handshake import plain
from .identity import CERTIFICATE_NAME, Identity, make_certificate, verify_certificate
from .transport import Call, DialError, Gate, Handler, Stream, StreamClosed
from .version import sha256

SERVICE = "/shoal.v1.Peer/"
_TOKEN_KEY = "shoal-token-bin"
_EOF: Any = getattr(grpc.aio, "EOF")  # noqa: B009 (missing from the type stubs)

# Both ends name the same numbers; a ping more often than the server allows would end in GOAWAY too_many_pings.
_KEEPALIVE: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", limits.KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", limits.KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_FRAMES: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", limits.FRAME_BYTES_MAX),
    ("grpc.max_send_message_length", limits.FRAME_BYTES_MAX),
    # Frames are compressed already; identity only, so that no frame can grow after it was measured.
    ("grpc.compression_enabled_algorithms_bitset", 1),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_KEEPALIVE,
    *_FRAMES,
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", limits.STREAMS_PER_CONNECTION_MAX),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", limits.KEEPALIVE_TIME_MS // 2),
    ("grpc.max_metadata_size", 8 * 1024),
    # A stranger that connects and says nothing: peers finish TLS at once and keep a control stream open.
    ("grpc.server_handshake_timeout_ms", int(limits.HANDSHAKE_SECONDS_MAX * 1000)),
    ("grpc.max_connection_idle_ms", limits.CONNECTION_IDLE_MS),
    ("grpc.max_allowed_incoming_connections", limits.CONNECTIONS_INCOMING_MAX),
]
CLIENT_OPTIONS: list[tuple[str, Any]] = [
    *_KEEPALIVE,
    *_FRAMES,
    ("grpc.ssl_target_name_override", CERTIFICATE_NAME),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", int(limits.RECONNECT_BACKOFF_SECONDS_MAX * 1000)),
    ("grpc.enable_http_proxy", 0),
    # Channels to one address must not share a connection: each has its own pinned certificate.
    ("grpc.use_local_subchannel_pool", 1),
]


def split_address(address: str) -> tuple[str, int]:
    """Host (without brackets) and port of `host:port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


# Handlers that were given up may take so long to end when the transport closes.
CLOSE_SECONDS = 1.0


class _Counter:
    sent = 0
    received = 0


def _closed(error: BaseException) -> StreamClosed:
    if isinstance(error, grpc.aio.AioRpcError):
        return StreamClosed(f"{error.code().name.lower()}: {plain(error.details() or '')}")
    return StreamClosed(f"failed: {error}")


class _Reader:
    """Reads frames one at a time. A read that outlasts its deadline goes on for the next call: cancelling it would end
    the whole gRPC call. The pending read is owned here and dropped with the stream."""

    def __init__(self, read: Callable[[], Awaitable[Any]]) -> None:
        self._read = read
        self._pending: asyncio.Future[Any] | None = None

    async def next(self, timeout_s: float) -> Any:
        """Raises what the read raises, StreamClosed when the stream was given up, asyncio.TimeoutError."""
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._read())
            self._pending.add_done_callback(_look)
        pending = self._pending
        done, _ = await asyncio.wait({pending}, timeout=timeout_s)
        if not done:
            raise asyncio.TimeoutError
        self._pending = None
        if pending.cancelled():
            raise StreamClosed("cancelled: the stream was given up")
        return pending.result()

    def drop(self) -> None:
        if self._pending is not None:
            self._pending.cancel()


def _look(work: asyncio.Future[Any]) -> None:
    """A read or write that nobody waits for any more may fail unseen: its stream is over."""
    if not work.cancelled():
        work.exception()


def _check_size(frame: bytes) -> None:
    """An oversized frame is our own mistake, found before gRPC breaks the stream over it."""
    if len(frame) > limits.FRAME_BYTES_MAX:
        raise ValueError(f"frame of {len(frame)} bytes, limit {limits.FRAME_BYTES_MAX}")


async def _end_of(call: Any) -> StreamClosed:
    """Why a dialed call is over."""
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return StreamClosed("the other side is done", clean=True)
    return StreamClosed(f"{code.name.lower()}: {plain(await call.details() or '')}")


class _ClientStream(Stream):
    """A dialed stream."""

    def __init__(self, call: Any, count: _Counter) -> None:
        self._call, self._count = call, count
        self._reader = _Reader(call.read)

    async def send(self, frame: bytes) -> None:
        _check_size(frame)
        # A task of its own: when the stream is given up meanwhile, gRPC cancels the write, and whoever waits for it
        # must not take that for its own cancellation.
        writing = asyncio.ensure_future(self._call.write(frame))
        writing.add_done_callback(_look)
        try:
            await asyncio.wait({writing})
        finally:
            writing.cancel()
        if writing.cancelled():
            raise StreamClosed("cancelled: the stream was given up")
        try:
            writing.result()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            # The call's own status says why; the write only that it could not.
            raise await _end_of(self._call) if self._call.done() else _closed(error) from None
        self._count.sent += len(frame)

    async def recv(self, timeout_s: float) -> bytes:
        try:
            frame = await self._reader.next(timeout_s)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise _closed(error) from None
        if frame is _EOF:
            raise await _end_of(self._call)
        self._count.received += len(frame)
        return frame

    async def done_sending(self) -> None:
        try:
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise _closed(error) from None

    def cancel(self, reason: str) -> None:
        self._call.cancel()
        self._reader.drop()


class _ServerStream(Stream):
    """An accepted stream. Half-closing our side happens when the handler returns, as gRPC servers do."""

    def __init__(self, context: Any, count: _Counter) -> None:
        self._context, self._count = context, count
        self.reader = _Reader(context.read)
        self._task = asyncio.current_task()
        self.cancelled: str | None = None

    async def send(self, frame: bytes) -> None:
        self._check()
        _check_size(frame)
        try:
            await self._context.write(frame)
        except (grpc.aio.BaseError, grpc.RpcError, asyncio.InvalidStateError) as error:
            raise _closed(error) from None
        self._count.sent += len(frame)

    async def recv(self, timeout_s: float) -> bytes:
        self._check()
        try:
            frame = await self.reader.next(timeout_s)
        except (grpc.aio.BaseError, grpc.RpcError, asyncio.InvalidStateError) as error:
            raise _closed(error) from None
        if frame is _EOF:
            raise StreamClosed("the other side is done", clean=True)
        self._count.received += len(frame)
        return frame

    async def done_sending(self) -> None:
        self._check()

    def cancel(self, reason: str) -> None:
        if self.cancelled is None:
            self.cancelled = reason
            if self._task is not None and self._task is not asyncio.current_task():
                self._task.cancel()

    def _check(self) -> None:
        if self.cancelled is not None:
            raise StreamClosed(f"cancelled: {self.cancelled}")


class _Service(grpc.GenericRpcHandler):
    """Routes every method of the service to one handler, behind the gate."""

    def __init__(self, gate: Gate, handler: Handler, count: _Counter) -> None:
        self._gate, self._handler, self._count = gate, handler, count
        self._serving: dict[_ServerStream, asyncio.Task[Any] | None] = {}  # in the order opened

    def service(self, handler_call_details: Any) -> Any:
        if not handler_call_details.method.startswith(SERVICE):
            return None
        method = handler_call_details.method[len(SERVICE) :]

        async def serve(_requests: Any, context: Any) -> None:
            token = next((v for k, v in context.invocation_metadata() if k == _TOKEN_KEY), b"")
            call = Call(method[:32], token if isinstance(token, bytes) else b"", _readable(context.peer()))
            refusal = self._gate(call)
            if refusal is not None:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
            stream = _ServerStream(context, self._count)
            self._serving[stream] = asyncio.current_task()
            try:
                await self._handler(call, stream)
            except asyncio.CancelledError:
                if stream.cancelled is None:
                    raise
            finally:
                self._serving.pop(stream, None)
                stream.reader.drop()
            if stream.cancelled is not None:
                await context.abort(grpc.StatusCode.CANCELLED, stream.cancelled[:200])

        return grpc.stream_stream_rpc_method_handler(serve)

    async def end(self, reason: str) -> None:
        """Give up what is being served, and let it end: what gRPC itself has to cancel it prints a traceback for."""
        tasks = [task for task in self._serving.values() if task is not None]
        for stream in list(self._serving):
            stream.cancel(reason)
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)


def _readable(peer: str) -> str:
    """ "ipv4:1.2.3.4:5" → "1.2.3.4:5"; the brackets of IPv6 come percent-encoded."""
    return peer.partition(":")[2].replace("%5B", "[").replace("%5D", "]")


class _Connection:
    """A dialed channel whose other side is proven to be `peer_id`."""

    def __init__(self, channel: Any, peer_id: str, address: str, binding: bytes, transport: GrpcTransport) -> None:
        self._channel, self._count, self._transport = channel, transport._count, transport
        self.peer_id, self.address, self.binding = peer_id, address, binding

    async def open(self, method: str, token: bytes, *, timeout_s: float) -> _ClientStream:
        try:
            call = self._channel.stream_stream(SERVICE + method)(metadata=((_TOKEN_KEY, token),) if token else ())
        except grpc.aio.UsageError:
            raise StreamClosed("unavailable: the connection is closed") from None
        # `wait_for_connection` alone never wakes when the channel is closed before the metadata left (a peer that
        # restarts does that: the reader of its control stream closes the channel), so the call's end is waited for too.
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        call.add_done_callback(lambda _: ended.done() or ended.set_result(None))
        connected = asyncio.ensure_future(call.wait_for_connection())
        connected.add_done_callback(_look)
        try:
            await asyncio.wait({connected, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if call.done() and await call.code() is not grpc.StatusCode.OK:  # done and OK: there may be frames to read
                raise await _end_of(call)
            if not connected.done() and not call.done():
                raise asyncio.TimeoutError
        except BaseException:
            call.cancel()
            raise
        finally:
            connected.cancel()
        return _ClientStream(call, self._count)

    async def close(self) -> None:
        self._transport._connections.pop(self, None)
        await self._channel.close(None)


class GrpcTransport:
    """`Transport` over real sockets. One per node."""

    def __init__(self, identity: Identity) -> None:
        self._certificate = make_certificate(identity)
        self.binding = self._certificate.binding
        self._count = _Counter()
        self._server: Any = None
        self._service: _Service | None = None
        self._connections: dict[_Connection, None] = {}  # in the order dialed

    @property
    def sent_bytes(self) -> int:
        return self._count.sent

    @property
    def received_bytes(self) -> int:
        return self._count.received

    async def listen(self, host: str, port: int, gate: Gate, handler: Handler) -> int:
        credentials = grpc.ssl_server_credentials([(self._certificate.key_pem, self._certificate.pem)])
        hosts = [host] if host else ["[::]", "0.0.0.0"]  # bind what exists: not every machine has IPv6
        cause = ""
        for candidate in hosts:
            server = grpc.aio.server(options=SERVER_OPTIONS)
            service = _Service(gate, handler, self._count)
            server.add_generic_rpc_handlers((service,))
            literal = f"[{candidate}]" if ":" in candidate and not candidate.startswith("[") else candidate
            try:
                bound = server.add_secure_port(f"{literal}:{port}", credentials)
                await server.start()
            except RuntimeError:
                cause = _why_not_bound(candidate, port)
                await server.stop(None)
                continue
            self._server, self._service = server, service
            return bound
        raise ShoalError(
            "The address cannot be listened on",
            values=f"wanted {host or 'any address'} port {port}; {cause}",
            todo="Choose another with --port (0 takes a free one), or stop the process that has it: `ss -ltnp`.",
            code=ExitCode.ADDRESS,
        )

    async def dial(self, address: str, peer_id: str, *, timeout_s: float) -> _Connection:
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            der = await asyncio.wait_for(_read_certificate(address), timeout_s)
        except asyncio.TimeoutError:
            raise DialError("timeout", f"{address} did not answer in {timeout_s:g} s") from None
        except ssl.SSLError as error:
            raise DialError("tls", f"{address}: {error.reason}") from None
        except (OSError, ValueError) as error:  # ValueError: no port, or a name that cannot be encoded
            raise DialError("unreachable", f"{address}: {getattr(error, 'strerror', None) or error}") from None
        try:
            proven = verify_certificate(der)
        except PeerFault as fault:
            raise DialError("tls", f"{address}: {fault}") from None
        if proven != peer_id:
            raise DialError("wrong_peer", f"{address} is {proven}, expected {peer_id}")
        pem = x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM)
        # The scheme keeps gRPC from reading a host called "unix" or "ipv6" as one.
        channel = grpc.aio.secure_channel(
            f"dns:///{address}", grpc.ssl_channel_credentials(pem), options=CLIENT_OPTIONS
        )
        try:
            await asyncio.wait_for(_connected(channel, address), deadline - asyncio.get_running_loop().time())
        except BaseException as error:
            await channel.close(None)
            if isinstance(error, asyncio.TimeoutError):
                raise DialError("timeout", f"{address}: no gRPC connection in {timeout_s:g} s") from None
            raise
        connection = _Connection(channel, peer_id, address, sha256(der), self)
        self._connections[connection] = None
        return connection

    async def close(self) -> None:
        for connection in list(self._connections):
            await connection.close()
        if self._server is not None and self._service is not None:
            await self._service.end("the other side is closing")
            await self._server.stop(None)
            self._server = None


async def _connected(channel: grpc.aio.Channel, address: str) -> None:
    """Wait until the channel can be used. `channel_ready` goes on waiting after a failure; whoever showed its certificate a
    moment ago and now refuses has just died, and is not worth it. Raises DialError."""
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            raise DialError("unreachable", f"{address} ended the connection")
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)


async def _read_certificate(address: str) -> bytes:
    """DER of the leaf that `address` presents. Nothing is trusted here: the caller checks it."""
    host, port = split_address(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.transport.abort()
    if not der:
        raise OSError(f"{address} presents no certificate")
    return der


def _why_not_bound(host: str, port: int) -> str:
    """The system's own words for why an address cannot be bound; gRPC does not pass them on."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((host.strip("[]"), port))
    except OSError as error:
        owner = _owner_of(port)
        return f"{error.strerror}{f': {owner} has it' if owner else ''}"
    return "it was in use a moment ago"


def _owner_of(port: int, proc: Path = Path("/proc")) -> str:
    """Process that listens on a port ("python3, pid 12"), or "" where the system does not show it to us."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        try:
            rows = [line.split() for line in (proc / "net" / table).read_text().splitlines()[1:]]
        except OSError:
            continue
        sockets |= {
            f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
        }
    for process in proc.glob("[0-9]*") if sockets else ():
        try:
            if any(os.readlink(open_file) in sockets for open_file in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()}, pid {process.name}"
        except OSError:
            continue  # ended, or another user's
    return ""
