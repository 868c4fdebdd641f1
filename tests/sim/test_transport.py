"""The virtual transport: the contract it shares with the real one, and what cuts, pauses and crashes do to it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.node.swarm.mesh import Mesh
from shoal.protocol import limits
from shoal.protocol.admission import Admission, Bans
from shoal.protocol.errors import ShoalError
from shoal.protocol.grpc_transport import GrpcTransport
from shoal.protocol.handshake import Self
from shoal.protocol.identity import Identity
from shoal.protocol.transport import Call, Connection, DialError, Gate, Handler, Stream, StreamClosed, Transport
from shoal.protocol.wire_pb2 import Convene, Envelope
from shoal.sim.clock import SimClock
from shoal.sim.link import Link
from shoal.sim.loop import SimLoop
from shoal.sim.network import Network, SimHost
from shoal.sim.stream import MESSAGES, WINDOW_BYTES
from shoal.sim.transport import SimConnection, SimTransport

IDENTITIES = [Identity.generate(bytes([n]) * 32) for n in (1, 2, 3)]
ALICE, BOB, EVE = IDENTITIES
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


# --- one contract, two transports -------------------------------------------------------------------------------------


class Real:
    """Sockets on this machine."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.made: list[Transport] = []

    def transport(self, identity: Identity) -> Transport:
        self.made.append(GrpcTransport(identity))
        return self.made[-1]

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            try:
                await test()
            finally:
                await asyncio.gather(*(transport.close() for transport in self.made))

        asyncio.run(asyncio.wait_for(main(), 60))


class Virtual(Real):
    """Two machines, one for each identity; Bob's is 10.0.0.2."""

    host = ""

    def __init__(self, link: Link | None = None, seed: int = 1) -> None:
        super().__init__()
        self.loop = SimLoop()
        self.network = Network(self.loop, random.Random(seed), link or Link(latency_ms=(5, 20), bandwidth_mbps=100))
        self.hosts = [self.network.add_host(name) for name in ("alice", "bob")]
        for host in self.hosts:
            host.begin_life(host.name)
        self.events: list[tuple[str, str, str, str, int]] = []
        self.network.on_event = lambda *event: self.events.append(event)

    def transport(self, identity: Identity) -> SimTransport:
        host = self.hosts[0 if identity is ALICE else 1]
        with host.inside():
            self.made.append(made := SimTransport(self.network, host, identity))
        return made

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            try:
                await test()
            finally:
                await asyncio.gather(*(transport.close() for transport in self.made))
                await asyncio.sleep(1)  # word of it arrives
                assert asyncio.all_tasks() == {asyncio.current_task()}

        try:
            self.loop.run_until_complete(main())
            assert self.loop.errors == []
        finally:
            self.loop.finish()


@pytest.fixture(params=[Real, Virtual])
def world(request: pytest.FixtureRequest) -> Real:
    return request.param()


async def pair(world: Real, handler: Handler = echo, gate: Gate = open_gate) -> tuple[Transport, Transport, str]:
    """Alice, and Bob who serves, at an address."""
    alice, bob = world.transport(ALICE), world.transport(BOB)
    port = await bob.listen(world.host, 0, gate, handler)
    return alice, bob, f"{world.host or '10.0.0.2'}:{port}"


async def dialed(world: Real, handler: Handler = echo, gate: Gate = open_gate) -> Connection:
    alice, _, address = await pair(world, handler, gate)
    return await alice.dial(address, BOB.peer_id, timeout_s=S)


def test_frames_go_both_ways_and_are_counted(world: Real) -> None:
    async def test() -> None:
        calls: list[Call] = []

        async def handler(call: Call, stream: Stream) -> None:
            calls.append(call)
            await echo(call, stream)

        alice, bob, address = await pair(world, handler)
        connection = await alice.dial(address, BOB.peer_id, timeout_s=S)
        assert connection.peer_id == BOB.peer_id and connection.binding == bob.binding != alice.binding
        assert connection.address == address and len(connection.binding) == 32
        stream = await connection.open("Echo", b"\0token\xff", timeout_s=S)
        for frame in (b"", b"x", bytes(limits.FRAME_BYTES_MAX)):
            await stream.send(frame)
            assert await stream.recv(S) == frame
        await stream.done_sending()
        for _ in range(2):
            with pytest.raises(StreamClosed) as end:
                await stream.recv(S)
            assert end.value.clean
        with pytest.raises(StreamClosed):
            await stream.send(b"too late")
        assert calls[0].method == "Echo" and calls[0].token == b"\0token\xff"
        host, _, port = calls[0].remote.rpartition(":")
        assert host == (world.host or "10.0.0.1") and 1024 < int(port) < 65_536
        total = 1 + limits.FRAME_BYTES_MAX
        assert (alice.sent_bytes, alice.received_bytes, bob.sent_bytes, bob.received_bytes) == (total,) * 4
        await connection.close()

    world.run(test)


def test_a_read_that_times_out_loses_nothing(world: Real) -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def handler(call: Call, stream: Stream) -> None:
            with pytest.raises(asyncio.TimeoutError):
                await stream.recv(0.01)
            frame = await stream.recv(S)
            await go.wait()
            await stream.send(frame)

        stream = await (await dialed(world, handler)).open("X", b"", timeout_s=S)
        with pytest.raises(asyncio.TimeoutError):
            await stream.recv(0.1)
        await stream.send(b"late")
        with pytest.raises(asyncio.TimeoutError):
            await stream.recv(0.1)
        go.set()
        assert await stream.recv(S) == b"late"

    world.run(test)


def test_who_is_not_there_cannot_be_dialed(world: Real) -> None:
    async def test() -> None:
        alice, bob, address = await pair(world)
        with pytest.raises(DialError) as wrong:
            await alice.dial(address, EVE.peer_id, timeout_s=S)
        assert wrong.value.kind == "wrong_peer"
        assert BOB.peer_id in wrong.value.detail and EVE.peer_id in wrong.value.detail
        await bob.close()
        for nowhere in (address, "nonsense", address.rpartition(":")[0]):
            with pytest.raises(DialError) as refused:
                await alice.dial(nowhere, BOB.peer_id, timeout_s=S)
            assert refused.value.kind == "unreachable" and refused.value.detail.startswith(nowhere)

    world.run(test)


def test_a_taken_port_is_refused_in_the_same_words() -> None:
    said: list[ShoalError] = []
    for world in (Real(), Virtual()):

        async def test(world: Real = world) -> None:
            _, _, address = await pair(world)
            with pytest.raises(ShoalError) as taken:
                await world.transport(BOB).listen(world.host, int(address.rpartition(":")[2]), open_gate, echo)
            said.append(taken.value)

        world.run(test)
    real, virtual = said
    assert (real.what, real.todo, real.code) == (virtual.what, virtual.todo, virtual.code)
    assert "Address already in use" in real.values and "Address already in use" in virtual.values


def test_the_gate_refuses_before_anything_is_read(world: Real) -> None:
    async def test() -> None:
        served: list[Call] = []

        async def handler(call: Call, stream: Stream) -> None:
            served.append(call)

        def gate(call: Call) -> str | None:
            return None if call.token == b"good" else "no session"

        connection = await dialed(world, handler, gate)
        stream = await connection.open("X", b"bad", timeout_s=S)
        with pytest.raises(StreamClosed, match="unauthenticated: no session") as refused:
            await stream.recv(S)
        assert not refused.value.clean and not served
        stream = await connection.open("X", b"good", timeout_s=S)
        with pytest.raises(StreamClosed) as ended:
            await stream.recv(S)
        assert ended.value.clean and [call.token for call in served] == [b"good"]

    world.run(test)


def test_what_was_sent_before_the_handler_ended_is_read(world: Real) -> None:
    async def test() -> None:
        async def handler(call: Call, stream: Stream) -> None:
            for n in range(20):
                await stream.send(bytes([n]))

        stream = await (await dialed(world, handler)).open("X", b"", timeout_s=S)
        assert [await stream.recv(S) for _ in range(20)] == [bytes([n]) for n in range(20)]
        with pytest.raises(StreamClosed) as ended:
            await stream.recv(S)
        assert ended.value.clean

    world.run(test)


def test_half_closing_leaves_the_way_back(world: Real) -> None:
    async def test() -> None:
        async def handler(call: Call, stream: Stream) -> None:
            total = 0
            with pytest.raises(StreamClosed) as ended:
                while True:
                    total += len(await stream.recv(S))
            assert ended.value.clean
            await stream.send(str(total).encode())

        stream = await (await dialed(world, handler)).open("X", b"", timeout_s=S)
        for n in range(50):
            await stream.send(bytes(n * 100))
        await stream.done_sending()
        assert await stream.recv(S) == b"122500"

    world.run(test)


def test_giving_a_stream_up_ends_the_handler(world: Real) -> None:
    async def test() -> None:
        started, ended = asyncio.Event(), asyncio.Event()

        async def handler(call: Call, stream: Stream) -> None:
            started.set()
            try:
                await stream.recv(S)
            finally:
                ended.set()

        connection = await dialed(world, handler)
        stream = await connection.open("X", b"", timeout_s=S)
        reading = asyncio.ensure_future(stream.recv(S))
        await started.wait()
        stream.cancel("enough")
        stream.cancel("twice is safe")
        with pytest.raises(StreamClosed):
            await reading
        for use in (stream.recv(S), stream.send(b"")):
            with pytest.raises(StreamClosed) as closed:
                await use
            assert not closed.value.clean
        await asyncio.wait_for(ended.wait(), S)

    world.run(test)


def test_the_accepting_side_gives_up_with_a_reason(world: Real) -> None:
    async def test() -> None:
        accepted: list[Stream] = []

        async def handler(call: Call, stream: Stream) -> None:
            if call.method == "Inside":
                stream.cancel("no more")
                for use in (stream.send(b""), stream.recv(S), stream.done_sending()):
                    with pytest.raises(StreamClosed, match="no more"):
                        await use
                return
            accepted.append(stream)
            await stream.send(b"here")
            await stream.recv(S)

        connection = await dialed(world, handler)
        stream = await connection.open("Inside", b"", timeout_s=S)
        with pytest.raises(StreamClosed, match="cancelled: no more"):
            await stream.recv(S)
        stream = await connection.open("Outside", b"", timeout_s=S)
        assert await stream.recv(S) == b"here"
        accepted[0].cancel("banned\nnow")
        with pytest.raises(StreamClosed, match=r"cancelled: banned\?now"):  # a stranger's text is made harmless
            await stream.recv(S)

    world.run(test)


def test_a_handlers_own_error_ends_its_stream_only(world: Real) -> None:
    async def test() -> None:
        async def handler(call: Call, stream: Stream) -> None:
            if call.method == "Broken":
                raise ZeroDivisionError("why")
            await echo(call, stream)

        connection = await dialed(world, handler)
        with pytest.raises(StreamClosed, match="unknown: .*ZeroDivisionError"):
            await (await connection.open("Broken", b"", timeout_s=S)).recv(S)
        stream = await connection.open("Echo", b"", timeout_s=S)
        await stream.send(b"x")
        assert await stream.recv(S) == b"x"
        if isinstance(world, Virtual):  # the simulation's report has it
            assert len(world.loop.errors) == 1 and "ZeroDivisionError: why" in world.loop.errors.pop()

    world.run(test)


def test_limits(world: Real) -> None:
    async def test() -> None:
        ended = asyncio.Event()

        async def handler(call: Call, stream: Stream) -> None:
            await ended.wait()

        connection = await dialed(world, handler)
        streams = [await connection.open("X", b"", timeout_s=S) for _ in range(limits.STREAMS_PER_CONNECTION_MAX)]
        with pytest.raises(ValueError, match="limit"):
            await streams[0].send(bytes(limits.FRAME_BYTES_MAX + 1))
        with pytest.raises(asyncio.TimeoutError):
            await connection.open("X", b"", timeout_s=0)
        # Who does not read holds the sender up, and giving up frees it.
        filling = asyncio.ensure_future(_fill(streams[0]))
        sent = -1
        while sent != (sent := world.made[0].sent_bytes):
            await asyncio.wait({filling}, timeout=0.2)
        assert not filling.done() and sent < 64 * 1024**2
        streams[0].cancel("enough")
        with pytest.raises(StreamClosed):
            await filling
        ended.set()

    world.run(test)


async def _fill(stream: Stream) -> None:
    while True:
        await stream.send(bytes(limits.PAYLOAD_FRAME_BYTES))


# --- in virtual time: dialing -----------------------------------------------------------------------------------------


def test_one_stream_more_waits_for_room() -> None:
    world = Virtual()

    async def test() -> None:
        async def handler(call: Call, stream: Stream) -> None:
            await stream.recv(S)

        connection = await dialed(world, handler)
        streams = [await connection.open("X", b"", timeout_s=S) for _ in range(limits.STREAMS_PER_CONNECTION_MAX)]
        before = world.loop.time()
        with pytest.raises(asyncio.TimeoutError):
            await connection.open("X", b"", timeout_s=2.0)
        assert world.loop.time() == before + 2.0
        waiting = [asyncio.ensure_future(connection.open("X", b"", timeout_s=S)) for _ in range(2)]
        await asyncio.sleep(1)
        streams[0].cancel("room")
        await asyncio.wait(waiting, timeout=0.1)
        assert [w.done() for w in waiting] == [True, False]
        await connection.close()
        with pytest.raises(StreamClosed, match="unavailable"):
            await waiting[1]

    world.run(test)


def test_silence_is_a_timeout_and_ends_when_the_cut_does() -> None:
    world = Virtual()

    async def test() -> None:
        alice, _, address = await pair(world)
        for one_way in (False, True):
            world.network.cut("x", *([h] for h in world.hosts), one_way=one_way)
            before = world.loop.time()
            with pytest.raises(DialError) as late:
                await alice.dial(address, BOB.peer_id, timeout_s=3.0)
            assert late.value.kind == "timeout" and world.loop.time() == before + 3.0
        world.loop.call_later(2.0, world.network.mend, "x")
        assert (await alice.dial(address, BOB.peer_id, timeout_s=S)).peer_id == BOB.peer_id
        assert world.loop.time() < before + 3.0 + 4.0
        world.hosts[1].pause()
        with pytest.raises(DialError) as late:
            await alice.dial(address, BOB.peer_id, timeout_s=3.0)
        assert late.value.kind == "timeout"
        world.loop.call_later(2.0, world.hosts[1].resume)
        await alice.dial(address, BOB.peer_id, timeout_s=S)

    world.run(test)


def test_a_dial_nobody_waits_for_leaves_nothing() -> None:
    world = Virtual()

    async def test() -> None:
        alice, _, address = await pair(world)
        dialing = asyncio.ensure_future(alice.dial(address, BOB.peer_id, timeout_s=S))
        await asyncio.sleep(0.01)
        dialing.cancel()
        await asyncio.sleep(5)
        assert not any(host.ends for host in world.hosts)

        # Cancelled in the very instant in which the connection is there.
        def gone(*event: Any) -> None:
            if event[0] == "open" and event[3] == "":
                dialing.cancel()

        world.network.on_event = gone
        dialing = asyncio.ensure_future(alice.dial(address, BOB.peer_id, timeout_s=S))
        with pytest.raises(asyncio.CancelledError):
            await dialing
        await asyncio.sleep(5)
        assert not any(host.ends for host in world.hosts)

    world.run(test)


def test_a_port_is_free_again_and_an_address_must_be_ones_own() -> None:
    world = Virtual()

    async def test() -> None:
        _, bob, address = await pair(world)
        port = int(address.rpartition(":")[2])
        await bob.close()
        assert await world.transport(BOB).listen("10.0.0.2", port, open_gate, echo) == port
        assert await world.transport(BOB).listen("", 0, open_gate, echo) != port
        with pytest.raises(ShoalError, match="Cannot assign requested address"):
            await world.transport(BOB).listen("10.0.0.1", 0, open_gate, echo)

    world.run(test)


# --- in virtual time: cuts, pauses, crashes ---------------------------------------------------------------------------


@dataclass
class Watched:
    """A dialed stream on which both ends read, with when and how each ended."""

    world: Virtual
    connection: SimConnection
    stream: Stream
    dialer: list[tuple[str, float]] = field(default_factory=list)
    acceptor: list[tuple[str, float]] = field(default_factory=list)


async def watched(world: Virtual, method: str = "X") -> Watched:
    ends: list[tuple[str, float]] = []

    async def handler(call: Call, stream: Stream) -> None:
        try:
            while True:
                await stream.recv(3600)
        except asyncio.CancelledError:
            ends.append(("cancelled", world.loop.time()))
            raise

    connection: Any = await dialed(world, handler)
    made = Watched(world, connection, await connection.open(method, b"", timeout_s=S), acceptor=ends)

    async def read() -> None:
        try:
            while True:
                await made.stream.recv(3600)
        except StreamClosed as closed:
            made.dialer.append((closed.reason, world.loop.time()))

    with world.hosts[0].inside():
        world.loop.create_task(read())
    await asyncio.sleep(1)
    return made


@pytest.mark.parametrize("one_way", [False, True])
def test_keepalive_breaks_what_stays_cut(one_way: bool) -> None:
    world = Virtual()

    async def test() -> None:
        seen = await watched(world)
        at = world.loop.time()
        world.network.cut("x", *([h] for h in world.hosts), one_way=one_way)
        await asyncio.sleep(30)
        ((reason, when),) = seen.dialer
        assert reason.startswith("unavailable") and 5 <= when - at <= 15
        ((_, when),) = seen.acceptor
        assert 5 <= when - at <= 15
        with pytest.raises(StreamClosed, match="unavailable"):
            await seen.connection.open("X", b"", timeout_s=S)
        assert not any(host.ends for host in world.hosts)

    world.run(test)


@pytest.mark.parametrize("method", ["X", MESSAGES])
def test_a_short_cut_breaks_nothing(method: str) -> None:
    """Streams catch up afterwards; messages are lost for good."""
    world = Virtual()

    async def test() -> None:
        heard: list[bytes] = []

        async def handler(call: Call, stream: Stream) -> None:
            while True:
                heard.append(await stream.recv(S))

        stream = await (await dialed(world, handler)).open(method, b"", timeout_s=S)
        for n in range(60):
            if n == 20:
                world.network.cut("x", *([h] for h in world.hosts))
            if n == 40:
                world.network.mend("x")
            await stream.send(bytes([n]))
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        sent = [bytes([n]) for n in range(60)]
        assert heard == (sent if method == "X" else sent[:20] + sent[40:])
        stream.cancel("done")

    world.run(test)


def test_a_healed_path_resets_what_the_other_side_gave_up() -> None:
    world = Virtual()

    async def test() -> None:
        seen = await watched(world)
        world.network.cut("x", *([h] for h in world.hosts))
        while not (seen.dialer or seen.acceptor):
            await asyncio.sleep(0.1)
        world.network.mend("x")
        await asyncio.sleep(0.2)
        assert len(seen.dialer) == len(seen.acceptor) == 1

    world.run(test)


def test_a_killed_process_is_noticed_at_once_and_one_without_power_is_not() -> None:
    for silent in (False, True):
        world = Virtual()

        async def test(world: Virtual = world, silent: bool = silent) -> None:
            seen = await watched(world)
            at = world.loop.time()
            world.hosts[1].kill(silent=silent)
            await asyncio.sleep(30)
            ((reason, when),) = seen.dialer
            assert reason.startswith("unavailable")
            assert 5 <= when - at <= 15 if silent else when - at < 0.1
            with pytest.raises(DialError) as error:
                await world.made[0].dial("10.0.0.2:20000", BOB.peer_id, timeout_s=S)
            assert error.value.kind == ("timeout" if silent else "unreachable")
            world.hosts[1].begin_life("again")
            with pytest.raises(DialError) as error:
                await world.made[0].dial("10.0.0.2:20000", BOB.peer_id, timeout_s=S)
            assert error.value.kind == "unreachable"

        world.run(test)


def test_the_dead_do_not_speak() -> None:
    """Nothing that a killed process still does in `finally` reaches anybody."""
    world = Virtual()

    async def test() -> None:
        heard: list[bytes] = []
        tried: list[str] = []

        async def handler(call: Call, stream: Stream) -> None:
            while True:
                heard.append(await stream.recv(S))

        alice, _, address = await pair(world, handler)

        async def live() -> None:
            connection = await alice.dial(address, BOB.peer_id, timeout_s=S)
            stream = await connection.open("X", b"", timeout_s=S)
            try:
                await stream.send(b"alive")
                await asyncio.sleep(100)
            finally:
                for goodbye in (
                    stream.send(b"goodbye"),
                    connection.open("Y", b"", timeout_s=S),
                    alice.dial(address, BOB.peer_id, timeout_s=S),
                    alice.listen("", 7000, open_gate, echo),
                ):
                    try:
                        await goodbye
                    except (StreamClosed, DialError, ShoalError) as error:
                        tried.append(type(error).__name__)
                await alice.close()

        with world.hosts[0].inside():
            world.loop.create_task(live())
        await asyncio.sleep(2)
        world.hosts[0].kill()
        sent = len(world.events)
        await asyncio.sleep(10)
        assert heard == [b"alive"]
        assert tried == ["StreamClosed", "StreamClosed", "DialError", "ShoalError"]
        assert not [event for event in world.events[sent:] if event[0] in ("send", "open")]

    world.run(test)


def test_a_paused_process_wakes_to_a_broken_connection_or_to_its_frames() -> None:
    for seconds in (4, 40):
        world = Virtual()

        async def test(world: Virtual = world, seconds: int = seconds) -> None:
            heard: list[tuple[bytes, float]] = []

            async def handler(call: Call, stream: Stream) -> None:
                while True:
                    heard.append((await stream.recv(3600), world.loop.time()))

            connection = await dialed(world, handler)
            stream = await connection.open("X", b"", timeout_s=S)
            await asyncio.sleep(1)
            world.hosts[1].pause()
            await stream.send(b"a")
            await stream.send(b"b")
            at = world.loop.time()
            with pytest.raises((asyncio.TimeoutError, StreamClosed)) as ended:
                await stream.recv(seconds)
            if seconds == 4:
                assert ended.type is asyncio.TimeoutError
            else:
                assert ended.type is StreamClosed and 5 <= world.loop.time() - at <= 15
                await asyncio.sleep(seconds - (world.loop.time() - at))
            assert heard == []
            world.hosts[1].resume()
            await asyncio.sleep(0)
            await asyncio.sleep(0.5)
            assert heard == ([(b"a", at + seconds), (b"b", at + seconds)] if seconds == 4 else [])
            stream.cancel("done")

        world.run(test)


def test_a_new_process_has_a_new_certificate() -> None:
    world = Virtual()
    first, second = world.transport(BOB), world.transport(BOB)
    assert first.binding != second.binding and len(first.binding) == 32
    again = Virtual().transport(BOB)
    assert again.binding == first.binding  # the same in the same simulation
    world.loop.finish()


@settings(max_examples=60)
@given(
    cuts=st.lists(st.tuples(st.floats(0, 6), st.floats(0, 3), st.booleans()), max_size=4),
    sizes=st.lists(st.sampled_from([0, 1, 100, 1400, 5000, 100_000]), min_size=1, max_size=30),
    loss=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 9),
)
def test_a_stream_delivers_a_prefix_in_order_and_all_of_it_unless_it_breaks(
    cuts: list[tuple[float, float, bool]], sizes: list[int], loss: float, seed: int
) -> None:
    world = Virtual(Link(latency_ms=(1, 200), bandwidth_mbps=20, loss=loss, duplicate=0.2, reorder=0.2), seed)

    async def test() -> None:
        heard: list[bytes] = []
        ends: list[str] = []

        async def handler(call: Call, stream: Stream) -> None:
            try:
                while True:
                    heard.append(await stream.recv(60))
                    await stream.send(heard[-1][:4])
            except StreamClosed as end:
                ends.append("clean" if end.clean else "broken")
            except asyncio.CancelledError:
                ends.append("cancelled")
                raise

        frames = [n.to_bytes(4, "big") + bytes(size) for n, size in enumerate(sizes)]
        stream = await (await dialed(world, handler)).open("X", b"", timeout_s=S)
        for n, (at, length, one_way) in enumerate(cuts):
            ends_of = [[h] for h in world.hosts[:: 1 if n % 2 else -1]]
            world.loop.call_later(at, lambda n=n, e=ends_of, w=one_way: world.network.cut(n, *e, one_way=w))
            world.loop.call_later(at + length, world.network.mend, n)

        async def write() -> None:
            for frame in frames:
                await stream.send(frame)
                await asyncio.sleep(0.2)
            await stream.done_sending()

        writing, echoes = asyncio.ensure_future(write()), list[bytes]()
        try:
            while True:
                echoes.append(await stream.recv(60))
        except StreamClosed as end:
            clean = end.clean
        await asyncio.wait([writing])
        writing.exception()
        assert heard == frames[: len(heard)] and echoes == [frame[:4] for frame in heard[: len(echoes)]]
        assert len(ends) <= 1
        if clean:
            assert len(echoes) == len(frames) and ends == ["clean"]
        if not any(length >= 3 for _, length, _ in cuts) and len(cuts) <= 1:
            assert clean  # shorter than keepalive's patience

    world.run(test)


def test_flow_control_bounds_what_is_under_way() -> None:
    world = Virtual()

    async def test() -> None:
        go = asyncio.Event()

        async def handler(call: Call, stream: Stream) -> None:
            await go.wait()
            for _ in range(50):
                await stream.recv(S)

        connection = await dialed(world, handler)
        for method in ("X", MESSAGES):
            go.clear()
            stream = await connection.open(method, b"", timeout_s=S)
            before = world.made[0].sent_bytes

            async def fill(stream: Stream = stream) -> None:
                for _ in range(50):
                    await stream.send(bytes(100_000))

            filling = asyncio.ensure_future(fill())
            await asyncio.wait({filling}, timeout=60)
            sent = world.made[0].sent_bytes - before
            assert WINDOW_BYTES <= sent < WINDOW_BYTES + limits.FRAME_BYTES_MAX
            go.set()
            await filling
            stream.cancel("done")

    world.run(test)


def test_everything_is_counted_and_traced() -> None:
    world = Virtual(Link(latency_ms=5, loss=0.3, duplicate=0.3))

    async def test() -> None:
        async def handler(call: Call, stream: Stream) -> None:
            while True:
                await stream.recv(60)

        connection = await dialed(world, handler)
        for method in ("X", MESSAGES):
            stream = await connection.open(method, b"", timeout_s=S)
            for _ in range(200):
                await stream.send(bytes(10))
            await asyncio.sleep(5)
        await connection.close()

    world.run(test)
    of = {
        (kind, method): 0
        for kind in ("send", "deliver", "drop", "dup", "open", "break")
        for method in ("", "X", MESSAGES)
    }
    for kind, source, target, method, _ in world.events:
        assert {source, target} == {"alice", "bob"}
        of[kind, method] += 1
    path = world.hosts[0].path_to(world.hosts[1])
    stream, messages = path.counts["X"], path.counts[MESSAGES]
    assert (stream.frames, stream.bytes, stream.lost, stream.duplicated) == (200, 2000, 0, 0)
    assert of["send", "X"] == of["deliver", "X"] == 200 and of["open", "X"] == of["open", ""] == 1
    assert (
        (messages.frames, messages.bytes) == (200, 2000) and 30 < messages.lost < 90 and 20 < messages.duplicated < 80
    )
    assert of["drop", MESSAGES] == messages.lost and of["dup", MESSAGES] == messages.duplicated
    assert of["deliver", MESSAGES] == 200 - messages.lost + messages.duplicated
    assert of["break", ""] == 2
    assert world.network.bytes_by_link() == [["alice", "bob", 4000]]
    assert world.network.sent_by(world.hosts[0]) == 4000 and world.network.sent_by(world.hosts[1]) == 0
    assert world.network.by_method()[MESSAGES] == messages


# --- the real mesh on top ---------------------------------------------------------------------------------------------


@dataclass
class Node:
    """A mesh on a host of its own."""

    mesh: Mesh
    me: Self
    host: SimHost
    heard: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.me.identity.peer_id

    def say(self, to: Node, text: str) -> None:
        with self.host.inside():
            self.mesh.post(to.id, Envelope(convene=Convene(reason=text)))


async def node(world: Virtual, index: int, life: str = "first") -> Node:
    host, rng = world.hosts[index], random.Random(f"{index} {life}")
    identity = IDENTITIES[index]
    with host.inside():
        transport = SimTransport(world.network, host, identity)
        me = Self(identity, b"r" * 32, rng.randbytes(16), 7, (f"{host.address}:7447",), Admission(), Bans())
        made = Node(None, replace(me), host)  # type: ignore[arg-type]
        made.mesh = Mesh(
            transport=transport,
            clock=SimClock(world.loop),
            me=lambda: made.me,
            random_bytes=rng.randbytes,
            rng=rng,
        )
        made.mesh.on_message(lambda peer, envelope: made.heard.append(envelope.convene.reason))
        made.mesh.serve("Echo", lambda peer, stream: echo(Call("Echo", b"", ""), stream))
        world.loop.create_task(made.mesh.listen("", 7447))
    await asyncio.sleep(0.01)
    return made


def test_two_meshes_talk_part_and_find_each_other_again() -> None:
    world = Virtual(Link(latency_ms=(20, 80), bandwidth_mbps=100))

    async def test() -> None:
        a, b = await node(world, 0), await node(world, 1)
        with a.host.inside():
            connecting = world.loop.create_task(a.mesh.connect("10.0.0.2:7447", b.id))
        assert (await connecting).peer == b.id
        a.say(b, "hello")
        b.say(a, "back")  # on the connection that a opened
        await asyncio.sleep(1)
        assert b.heard == ["hello"] and a.heard == ["back"]
        assert a.mesh.connected() == [b.id] and b.mesh.connected() == [a.id]
        stream = await a.mesh.open(b.id, "Echo")
        await stream.send(b"frame")
        assert await stream.recv(S) == b"frame"
        stream.cancel("done")

        world.network.cut("x", [a.host], [b.host])
        a.say(b, "into the void")
        await asyncio.sleep(20)
        assert a.mesh.connected() == b.mesh.connected() == []
        world.network.mend("x")
        await asyncio.sleep(limits.RECONNECT_BACKOFF_SECONDS_MAX)
        a.say(b, "again")
        await asyncio.sleep(2)
        assert b.heard == ["hello", "again"]

        b.host.kill()
        await asyncio.sleep(1)
        assert a.mesh.connected() == []
        b.host.begin_life("second")
        b = await node(world, 1, "second")
        a.say(b, "welcome back")
        await asyncio.sleep(2)
        assert b.heard == ["welcome back"]
        for end in (a, b):
            assert not end.mesh.failed.done()
            await end.mesh.close()

    world.run(test)


def test_the_same_seed_gives_the_same_trace() -> None:
    def trace(seed: int) -> list[Any]:
        world = Virtual(Link(latency_ms=(5, 50), loss=0.1, duplicate=0.1, reorder=0.1, bandwidth_mbps=10), seed)

        async def test() -> None:
            connection = await dialed(world)
            for method in ("X", MESSAGES):
                stream = await connection.open(method, b"", timeout_s=S)
                for n in range(50):
                    await stream.send(bytes(n * 10))
                await asyncio.sleep(1)
                await stream.done_sending()
                await asyncio.sleep(1)

        stamped: list[Any] = []
        world.network.on_event = lambda *event: stamped.append((world.loop.now_ns, *event))
        world.run(test)
        return stamped

    assert trace(1) == trace(1) != trace(2)
