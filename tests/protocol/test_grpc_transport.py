"""The real transport on 127.0.0.1: proof of identity, limits, the gate, flat memory under a stranger's bytes."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from shoal.protocol import grpc_transport as module
from shoal.protocol import limits
from shoal.protocol.errors import ExitCode, ShoalError
from shoal.protocol.grpc_transport import CLIENT_OPTIONS, SERVICE, GrpcTransport, split_address
from shoal.protocol.identity import Identity
from shoal.protocol.transport import Call, DialError, Stream, StreamClosed

ALICE, BOB, EVE = (Identity.generate(bytes([n]) * 32) for n in (1, 2, 3))
S = 10.0  # a deadline that only a hang reaches


def open_gate(call: Call) -> str | None:
    return None


async def echo(call: Call, stream: Stream) -> None:
    while True:
        try:
            await stream.send(await stream.recv(S))
        except StreamClosed as end:
            assert end.clean
            return


async def pair(
    handler: Callable[[Call, Stream], Awaitable[None]] = echo, gate: Callable[[Call], str | None] = open_gate
) -> tuple[GrpcTransport, GrpcTransport, str]:
    """Alice dials Bob, who serves."""
    alice, bob = GrpcTransport(ALICE), GrpcTransport(BOB)
    _started.extend((alice, bob))
    port = await bob.listen("127.0.0.1", 0, gate, handler)
    return alice, bob, f"127.0.0.1:{port}"


_started: list[GrpcTransport] = []


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run to the end under a deadline; a test that fails half-way leaves nothing running."""

    async def main() -> None:
        try:
            await asyncio.wait_for(test(), 60)  # type: ignore[arg-type]
        finally:
            await asyncio.gather(*(transport.close() for transport in _started))
            _started.clear()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    """Yield to the loop until something is so; the test's own deadline ends it."""
    while not condition():
        await asyncio.sleep(0.005)


def test_frames_go_both_ways_and_are_counted() -> None:
    async def test() -> None:
        calls: list[Call] = []

        async def handler(call: Call, stream: Stream) -> None:
            calls.append(call)
            await echo(call, stream)

        alice, bob, address = await pair(handler)
        connection = await alice.dial(address, BOB.peer_id, timeout_s=S)
        assert connection.peer_id == BOB.peer_id and connection.binding == bob.binding != alice.binding
        stream = await connection.open("Echo", b"\0token\xff", timeout_s=S)
        for frame in (b"", b"x", bytes(limits.FRAME_BYTES_MAX)):
            await stream.send(frame)
            assert await stream.recv(S) == frame
        await stream.done_sending()
        with pytest.raises(StreamClosed) as end:
            await stream.recv(S)
        assert end.value.clean
        assert calls[0].method == "Echo" and calls[0].token == b"\0token\xff"
        assert calls[0].remote.startswith("127.0.0.1:")
        total = 1 + limits.FRAME_BYTES_MAX
        assert (alice.sent_bytes, alice.received_bytes, bob.sent_bytes, bob.received_bytes) == (total,) * 4
        await connection.close()
        await asyncio.gather(alice.close(), bob.close())

    run(test)


def test_a_read_that_times_out_loses_nothing() -> None:
    async def test() -> None:
        go = asyncio.Event()
        heard: list[bytes] = []

        async def handler(call: Call, stream: Stream) -> None:
            with pytest.raises(asyncio.TimeoutError):
                await stream.recv(0.01)
            heard.append(await stream.recv(S))
            await go.wait()
            await stream.send(b"late")

        alice, bob, address = await pair(handler)
        stream = await (await alice.dial(address, BOB.peer_id, timeout_s=S)).open("X", b"", timeout_s=S)
        with pytest.raises(asyncio.TimeoutError):
            await stream.recv(0.05)
        await stream.send(b"hello")
        go.set()
        assert await stream.recv(S) == b"late" and heard == [b"hello"]
        stream.cancel("done")
        stream.cancel("twice is safe")
        await asyncio.gather(alice.close(), bob.close())

    run(test)


def test_another_peer_at_the_address_is_refused() -> None:
    async def test() -> None:
        alice, bob, address = await pair()
        with pytest.raises(DialError) as caught:
            await alice.dial(address, EVE.peer_id, timeout_s=S)
        assert caught.value.kind == "wrong_peer"
        assert BOB.peer_id in caught.value.detail and EVE.peer_id in caught.value.detail
        await asyncio.gather(alice.close(), bob.close())

    run(test)


def test_someone_elses_certificate_is_of_no_use_without_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eve shows Bob's certificate when it is read, but cannot finish TLS with it: the pinned root is not hers."""

    async def test() -> None:
        alice, bob, _ = await pair()
        eve = GrpcTransport(EVE)
        port = await eve.listen("127.0.0.1", 0, open_gate, echo)
        der = module.x509.load_pem_x509_certificate(bob._certificate.pem).public_bytes(module.Encoding.DER)

        async def bobs(address: str) -> bytes:
            return der

        monkeypatch.setattr(module, "_read_certificate", bobs)
        with pytest.raises(DialError) as caught:
            await alice.dial(f"127.0.0.1:{port}", BOB.peer_id, timeout_s=S)
        assert caught.value.kind == "unreachable" and eve.received_bytes == 0  # at once, not after S
        await asyncio.gather(alice.close(), bob.close(), eve.close())

    run(test)


def test_a_certificate_without_proof_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        alice, bob, address = await pair()

        async def garbage(address: str) -> bytes:
            return b"not a certificate"

        monkeypatch.setattr(module, "_read_certificate", garbage)
        with pytest.raises(DialError) as caught:
            await alice.dial(address, BOB.peer_id, timeout_s=S)
        assert caught.value.kind == "tls"
        await asyncio.gather(alice.close(), bob.close())

    run(test)


@pytest.mark.parametrize("address", ["a..b:80", "x" * 64 + ":80", "127.0.0.1", "127.0.0.1:1", "nowhere.invalid:80", ""])
def test_addresses_that_lead_nowhere(address: str) -> None:
    async def test() -> None:
        alice = GrpcTransport(ALICE)
        with pytest.raises(DialError) as caught:
            await alice.dial(address, BOB.peer_id, timeout_s=S)
        assert caught.value.kind == "unreachable"
        await alice.close()

    run(test)


def test_silence_and_nonsense_instead_of_tls() -> None:
    async def test() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
            writer.close()

        alice = GrpcTransport(ALICE)
        for serve, kinds, timeout_s in ((silent, {"timeout"}, 0.2), (nonsense, {"tls", "unreachable"}, S)):
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(DialError) as caught:
                await alice.dial(f"127.0.0.1:{port}", BOB.peer_id, timeout_s=timeout_s)
            assert caught.value.kind in kinds
            server.close()
        await alice.close()

    run(test)


def test_a_second_bind_says_who_has_the_port() -> None:
    async def test() -> None:
        _, bob, address = await pair()
        port = split_address(address)[1]
        for host in ("127.0.0.1", ""):
            with pytest.raises(ShoalError) as caught:
                await GrpcTransport(EVE).listen(host, port, open_gate, echo)
            assert caught.value.code is ExitCode.ADDRESS
            assert str(port) in caught.value.values and "in use" in caught.value.values.lower()
        assert f"pid {psutil.Process().pid}" in caught.value.values
        with pytest.raises(ShoalError) as caught:
            await GrpcTransport(EVE).listen("192.0.2.1", 0, open_gate, echo)
        assert "assign" in caught.value.values
        await bob.close()

    run(test)


def test_the_owner_of_a_port_is_unknown_where_the_system_hides_it(tmp_path: Path) -> None:
    assert module._owner_of(1, tmp_path) == ""
    (tmp_path / "net").mkdir()
    row = "0: 00000000:1F90 00000000:0000 0A 0:0 0:0 0 0 0 4242 1"
    (tmp_path / "net" / "tcp").write_text(f"header\n{row}\n")
    (tmp_path / "7").mkdir()  # without fd: ended
    (tmp_path / "8" / "fd").mkdir(parents=True)
    (tmp_path / "8" / "comm").write_text("other\n")
    assert module._owner_of(8080, tmp_path) == ""
    (tmp_path / "8" / "fd" / "3").symlink_to("socket:[4242]")
    assert module._owner_of(8080, tmp_path) == "other, pid 8"
    free = socket.socket()
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    assert "a moment ago" in module._why_not_bound("127.0.0.1", port)


def test_any_address_binds_what_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        alice, bob = GrpcTransport(ALICE), GrpcTransport(BOB)
        port = await bob.listen("", 0, open_gate, echo)
        connection = await alice.dial(f"127.0.0.1:{port}", BOB.peer_id, timeout_s=S)
        await connection.close()
        await bob.close()
        # a machine without IPv6
        really = grpc.aio.server

        def server(options: Any) -> Any:
            made = really(options=options)
            bind = made.add_secure_port

            def add_secure_port(address: str, credentials: Any) -> int:
                if "[" in address:
                    raise RuntimeError("no IPv6")
                return bind(address, credentials)

            monkeypatch.setattr(made, "add_secure_port", add_secure_port, raising=False)
            return made

        monkeypatch.setattr(grpc.aio, "server", server)
        bob = GrpcTransport(BOB)
        port = await bob.listen("", 0, open_gate, echo)
        await alice.dial(f"127.0.0.1:{port}", BOB.peer_id, timeout_s=S)
        await asyncio.gather(alice.close(), bob.close())
        if socket.has_ipv6 and _has_ipv6():
            monkeypatch.undo()
            bob = GrpcTransport(BOB)
            port = await bob.listen("::1", 0, open_gate, echo)
            await (await alice.dial(f"[::1]:{port}", BOB.peer_id, timeout_s=S)).close()
            await bob.close()

    run(test)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_the_other_side_goes_away_and_comes_back() -> None:
    async def test() -> None:
        alice, bob, address = await pair()
        connection = await alice.dial(address, BOB.peer_id, timeout_s=S)
        stream = await connection.open("Echo", b"", timeout_s=S)
        await stream.send(b"x")
        assert await stream.recv(S) == b"x"
        await bob.close()
        with pytest.raises(StreamClosed) as end:
            await stream.recv(S)
        assert not end.value.clean
        with pytest.raises(StreamClosed):
            await stream.send(b"x")
        # the same port, another certificate: the old connection is of no use, a new one is
        bob = GrpcTransport(BOB)
        await bob.listen("127.0.0.1", split_address(address)[1], open_gate, echo)
        with pytest.raises((StreamClosed, asyncio.TimeoutError)):
            await connection.open("Echo", b"", timeout_s=0.5)
        await connection.close()
        connection = await alice.dial(address, BOB.peer_id, timeout_s=S)
        stream = await connection.open("Echo", b"", timeout_s=S)
        await stream.send(b"y")
        assert await stream.recv(S) == b"y"
        await asyncio.gather(alice.close(), bob.close())

    run(test)


def test_a_connection_that_closes_while_a_stream_is_opened() -> None:
    """gRPC's own wait would never end."""

    async def test() -> None:
        alice, bob, address = await pair()
        for _ in range(5):
            connection = await alice.dial(address, BOB.peer_id, timeout_s=S)
            opening = asyncio.ensure_future(connection.open("Echo", b"", timeout_s=2 * S))
            await asyncio.sleep(0)
            await connection.close()
            with pytest.raises(StreamClosed):
                stream = await asyncio.wait_for(opening, S)
                await stream.recv(S)  # it may just have been opened
        await asyncio.gather(alice.close(), bob.close())

    run(test)


def test_opening_has_a_deadline() -> None:
    async def test() -> None:
        alice, bob, address = await pair()
        connection = await alice.dial(address, BOB.peer_id, timeout_s=S)
        with pytest.raises(asyncio.TimeoutError):
            await connection.open("Echo", b"", timeout_s=0)
        await asyncio.gather(alice.close(), bob.close())

    run(test)


def test_the_caller_gives_up() -> None:
    async def test() -> None:
        ended = asyncio.Event()

        async def handler(call: Call, stream: Stream) -> None:
            try:
                await stream.recv(S)
            finally:
                ended.set()

        alice, bob, address = await pair(handler)
        connection = await alice.dial(address, BOB.peer_id, timeout_s=S)
        stream = await connection.open("X", b"", timeout_s=S)
        reading = asyncio.ensure_future(stream.recv(S))
        await until(lambda: bool(bob._server) and not reading.done())
        await asyncio.sleep(0)
        stream.cancel("enough")
        with pytest.raises(StreamClosed):
            await reading
        with pytest.raises(StreamClosed):
            await stream.recv(S)
        with pytest.raises(StreamClosed):
            await stream.send(b"")
        # a task that is cancelled itself stays cancelled
        stream = await connection.open("X", b"", timeout_s=S)
        reading = asyncio.ensure_future(stream.recv(S))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        stream.cancel("done")
        await asyncio.gather(alice.close(), bob.close())

    run(test)


def test_giving_up_while_the_other_side_does_not_read() -> None:
    async def test() -> None:
        stuck = asyncio.Event()

        async def handler(call: Call, stream: Stream) -> None:
            if call.method == "Full":  # sends until nobody takes any more
                with pytest.raises(StreamClosed):
                    while True:
                        await stream.send(bytes(limits.FRAME_BYTES_MAX))
            await stuck.wait()

        alice, bob, address = await pair(handler)
        connection = await alice.dial(address, BOB.peer_id, timeout_s=S)
        for cancel_task in (False, True):
            stream = await connection.open("X", b"", timeout_s=S)

            async def fill(stream: Stream = stream) -> None:
                while True:
                    await stream.send(bytes(limits.FRAME_BYTES_MAX))

            filling = asyncio.ensure_future(fill())
            sent = -1
            while sent != alice.sent_bytes:  # until flow control holds it
                sent = alice.sent_bytes
                await asyncio.wait({filling}, timeout=0.1)
            if cancel_task:
                filling.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await filling
            else:
                stream.cancel("enough")
                with pytest.raises(StreamClosed):
                    await filling
        stuck.set()
        await asyncio.gather(alice.close(), bob.close())

    run(test)


def test_the_server_gives_a_stream_up_from_outside_and_inside() -> None:
    async def test() -> None:
        streams: list[Stream] = []

        async def handler(call: Call, stream: Stream) -> None:
            if call.method == "Inside":
                stream.cancel("no more")
                for use in (stream.send(b""), stream.recv(S), stream.done_sending()):
                    with pytest.raises(StreamClosed, match="no more"):
                        await use
                return
            streams.append(stream)
            await stream.recv(S)

        alice, bob, address = await pair(handler)
        connection = await alice.dial(address, BOB.peer_id, timeout_s=S)
        stream = await connection.open("Inside", b"", timeout_s=S)
        with pytest.raises(StreamClosed, match="cancelled: no more"):
            await stream.recv(S)
        stream = await connection.open("Outside", b"", timeout_s=S)
        await stream.send(b"")
        stream = await connection.open("Outside", b"", timeout_s=S)
        await until(lambda: len(streams) == 2)
        streams[1].cancel("banned\nnow")
        streams[1].cancel("twice is safe")
        with pytest.raises(StreamClosed, match=r"cancelled: banned\?now"):  # a stranger's text is made harmless
            await stream.recv(S)
        await asyncio.gather(alice.close(), bob.close())

    run(test)


def test_the_handlers_own_error_ends_its_stream_only() -> None:
    async def test() -> None:
        async def handler(call: Call, stream: Stream) -> None:
            if call.method == "Broken":
                raise ZeroDivisionError
            await echo(call, stream)

        alice, bob, address = await pair(handler)
        connection = await alice.dial(address, BOB.peer_id, timeout_s=S)
        with pytest.raises(StreamClosed):
            await (await connection.open("Broken", b"", timeout_s=S)).recv(S)
        stream = await connection.open("Echo", b"", timeout_s=S)
        await stream.send(b"x")
        assert await stream.recv(S) == b"x"
        await asyncio.gather(alice.close(), bob.close())

    run(test)


def test_oversized_frames() -> None:
    async def test() -> None:
        outcome: list[BaseException] = []

        async def handler(call: Call, stream: Stream) -> None:
            with pytest.raises(ValueError, match="limit"):
                await stream.send(bytes(limits.FRAME_BYTES_MAX + 1))
            try:
                await stream.recv(S)
            except BaseException as error:
                outcome.append(error)
                raise

        alice, bob, address = await pair(handler)
        connection = await alice.dial(address, BOB.peer_id, timeout_s=S)
        stream = await connection.open("X", b"", timeout_s=S)
        with pytest.raises(ValueError, match="limit"):
            await stream.send(bytes(limits.FRAME_BYTES_MAX + 1))
        # a peer whose own limit is off
        channel = _raw_channel(alice, bob, address, compression=None)
        call = channel.stream_stream(SERVICE + "X")()
        await call.write(bytes(limits.FRAME_BYTES_MAX + 1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
            await call.read()
        assert caught.value.code() is not grpc.StatusCode.OK
        assert bob.received_bytes == 0
        await channel.close()
        await asyncio.gather(alice.close(), bob.close())

    run(test)


def _raw_channel(alice: GrpcTransport, bob: GrpcTransport, address: str, compression: Any) -> Any:
    """gRPC without our limits, as a stranger would use it."""
    options = [(k, v) for k, v in CLIENT_OPTIONS if "length" not in k and "compression" not in k]
    credentials = grpc.ssl_channel_credentials(bob._certificate.pem)
    return grpc.aio.secure_channel(address, credentials, options=options, compression=compression)


def test_compressed_frames_are_refused() -> None:
    async def test() -> None:
        alice, bob, address = await pair()
        channel = _raw_channel(alice, bob, address, grpc.Compression.Gzip)
        call = channel.stream_stream(SERVICE + "X")()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()  # the headers announce it, and that is enough
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert bob.received_bytes == 0
        await channel.close()
        await asyncio.gather(alice.close(), bob.close())

    run(test)


async def _drip(address: str, first: bytes) -> None:
    """A client that keeps a connection busy with a byte now and then, until the other side ends it."""
    reader, writer = await asyncio.open_connection(*split_address(address))
    writer.write(first)

    async def write() -> None:
        while True:
            writer.write(b"\0")
            await asyncio.sleep(0.05)  # far more often than any pause that the server waits for

    dripping = asyncio.ensure_future(write())
    try:
        while await reader.read(1024):
            pass
    except ConnectionError:
        pass
    finally:
        dripping.cancel()
        writer.close()


def test_clients_that_drip_bytes_are_ended_and_so_many_at_once_keep_nobody_out_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the limits of the real server, smaller; those themselves are what the server has."""
    real = dict(module.SERVER_OPTIONS)
    assert real["grpc.server_handshake_timeout_ms"] == limits.HANDSHAKE_SECONDS_MAX * 1000
    assert real["grpc.max_allowed_incoming_connections"] == limits.CONNECTIONS_INCOMING_MAX
    small = {"grpc.server_handshake_timeout_ms": 500, "grpc.max_allowed_incoming_connections": 4}
    monkeypatch.setattr(module, "SERVER_OPTIONS", list((real | small).items()))

    async def test() -> None:
        alice, bob, address = await pair()
        drips = [
            asyncio.ensure_future(_drip(address, first)) for first in (b"", b"\x16", b"\x16\x03\x01\x02\x00", b"GET /")
        ]
        drips += [asyncio.ensure_future(_drip(address, b"")) for _ in range(20)]
        await asyncio.wait(drips)
        for drip in drips:
            drip.result()
        connection = await alice.dial(address, BOB.peer_id, timeout_s=S)
        stream = await connection.open("Echo", b"", timeout_s=S)
        await stream.send(b"here")
        assert await stream.recv(S) == b"here"
        await connection.close()

    run(test)


def test_methods_of_no_service_of_ours() -> None:
    async def test() -> None:
        alice, bob, address = await pair()
        channel = _raw_channel(alice, bob, address, None)
        for method in ("/other.Service/X", "/shoal.v1.Peer"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.stream_stream(method)().read()
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await channel.close()
        await asyncio.gather(alice.close(), bob.close())

    run(test)


def test_a_token_given_as_text_is_no_token() -> None:
    async def test() -> None:
        tokens: list[bytes] = []

        def gate(call: Call) -> str | None:
            tokens.append(call.token)
            return "no"

        alice, bob, address = await pair(gate=gate)
        channel = _raw_channel(alice, bob, address, None)
        for metadata in ((), (("shoal-token-bin", b"\1"),), (("shoal-token", "x"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.stream_stream(SERVICE + "M" * 100)(metadata=metadata).read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert tokens == [b"", b"\1", b""]
        await channel.close()
        await asyncio.gather(alice.close(), bob.close())

    run(test)


@pytest.mark.e2e
def test_memory_stays_flat_while_a_stranger_pushes_bytes_at_every_method() -> None:
    """The gate refuses from metadata: the application reads nothing, and what gRPC buffers is bounded."""

    async def test() -> None:
        methods = ("Control", "Push", "Pull", "Dense", "State", "Manifest")
        alice, bob, address = await pair(gate=lambda call: "no session")
        connection = await alice.dial(address, BOB.peer_id, timeout_s=S)
        process, frame = psutil.Process(), bytes(limits.FRAME_BYTES_MAX)

        async def push(method: str) -> None:
            with pytest.raises(StreamClosed):
                stream = await connection.open(method, b"stolen", timeout_s=S)
                while True:
                    await stream.send(frame)

        for _ in range(5):  # gRPC's own buffers and arenas
            await asyncio.gather(*(push(m) for m in methods))
        grown: list[int] = []
        while len(grown) < 3 and min(grown, default=2**40) >= 16 * 2**20:
            gc.collect()
            before = process.memory_info().rss
            for _ in range(40):
                await asyncio.gather(*(push(m) for m in methods))
            gc.collect()
            grown.append(process.memory_info().rss - before)
        assert bob.received_bytes == 0
        # A busy machine may leave the pushing side's own buffers, which are in this process too, larger once; a leak stays.
        assert grown[-1] < 16 * 2**20, f"grew by {grown} bytes while {alice.sent_bytes} were pushed"
        await asyncio.gather(alice.close(), bob.close())

    run(test)
