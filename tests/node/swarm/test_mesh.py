"""Nodes over real sockets on 127.0.0.1: messages, streams, restarts, bans, twins, strangers."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from shoal.node.swarm import link as link_module
from shoal.node.swarm import links as links_module
from shoal.node.swarm import mesh as mesh_module
from shoal.node.swarm.link import Breaker, Link, SessionStream, Traffic
from shoal.node.swarm.mesh import Mesh
from shoal.protocol import limits
from shoal.protocol.admission import Admission, Bans
from shoal.protocol.clock import RealClock
from shoal.protocol.errors import PeerFault
from shoal.protocol.grpc_transport import GrpcTransport
from shoal.protocol.handshake import Refused, Self
from shoal.protocol.identity import Identity
from shoal.protocol.transport import DialError, Stream, StreamClosed
from shoal.protocol.wire_pb2 import Convene, Envelope, Refusal, Welcome

RUN = b"r" * 32
S = 10.0  # a deadline that only a hang reaches


@dataclass
class Node:
    """A mesh with everything that it was given and has received."""

    mesh: Mesh
    transport: GrpcTransport
    me: Self
    port: int
    heard: list[tuple[str, str]] = field(default_factory=list)
    welcomes: list[tuple[str, Welcome]] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.me.identity.peer_id

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def say(self, to: Node | str, text: str) -> None:
        self.mesh.post(to if isinstance(to, str) else to.id, Envelope(convene=Convene(reason=text)))

    async def hears(self, text: str) -> str:
        """Who said it."""
        await until(lambda: any(t == text for _, t in self.heard))
        return next(p for p, t in self.heard if t == text)


async def until(condition: Callable[[], Any]) -> None:
    """Yield to the loop until something is so; the test's own deadline ends it."""
    while not condition():
        await asyncio.sleep(0.005)


_nodes: list[Node] = []


async def node(seed: int, *, listen: bool = True, port: int = 0, announce: bool = True, **changes: Any) -> Node:
    identity = Identity.generate(bytes([seed]) * 32)
    transport = GrpcTransport(identity)
    me = Self(identity, RUN, os.urandom(16), 7, (), Admission(), Bans())
    made = Node(None, transport, replace(me, **changes), 0)  # type: ignore[arg-type]
    made.mesh = Mesh(
        transport=transport,
        clock=RealClock(),
        me=lambda: made.me,
        random_bytes=os.urandom,
        rng=random.Random(seed),
        known=lambda peer: (7, 3),
    )
    _nodes.append(made)
    made.mesh.on_message(lambda peer, envelope: made.heard.append((peer, envelope.convene.reason)))
    made.mesh.on_welcome(lambda peer, welcome: made.welcomes.append((peer, welcome)))
    if listen:
        made.port = await made.mesh.listen("127.0.0.1", port)
        if announce:
            made.me = replace(made.me, addresses=(made.address,))
    return made


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run under a deadline; no error of a mesh goes unseen, nothing is left running."""

    async def main() -> None:
        try:
            await asyncio.wait_for(test(), 60)  # type: ignore[arg-type]
            for made in _nodes:
                assert not made.mesh.failed.done(), made.mesh.failed.exception()
        finally:
            await asyncio.gather(*(made.mesh.close() for made in _nodes))
            _nodes.clear()

    asyncio.run(main())


# --- messages and streams ---------------------------------------------------------------------------------------------


def test_two_nodes_talk_both_ways() -> None:
    async def test() -> None:
        a, b = await node(1), await node(2)
        other = await a.mesh.connect(b.address, b.id)
        assert other.peer == b.id and other.boot_id == b.me.boot_id
        ((peer, welcome),) = a.welcomes
        assert peer == b.id and (welcome.incarnation_known, welcome.seq_known) == (7, 3)
        assert welcome.observed.startswith("127.0.0.1:")
        a.say(b, "hello")
        assert await b.hears("hello") == a.id
        b.say(a, "back")
        assert await a.hears("back") == b.id
        await until(lambda: a.mesh.connected() == [b.id] and b.mesh.connected() == [a.id])
        assert a.mesh.addresses(b.id) == [b.address] and b.mesh.addresses(a.id) == [a.address]
        assert a.mesh.traffic.sent["Control"] > 0 and a.mesh.traffic.received_from[b.id] > 0
        a.say(a, "to myself")
        assert not a.heard[1:]

    run(test)


def test_both_dial_at_once() -> None:
    async def test() -> None:
        a, b = await node(1), await node(2)
        await asyncio.gather(a.mesh.connect(b.address, b.id), b.mesh.connect(a.address, a.id))
        for n in range(20):
            a.say(b, f"a{n}")
            b.say(a, f"b{n}")
        await asyncio.gather(b.hears("a19"), a.hears("b19"))
        assert [t for _, t in b.heard] == [f"a{n}" for n in range(20)]

    run(test)


def test_a_node_that_cannot_be_dialed_is_answered() -> None:
    async def test() -> None:
        a, b = await node(1, listen=False), await node(2)
        await a.mesh.connect(b.address, b.id)
        a.say(b, "hello")
        await b.hears("hello")
        b.say(a, "back")
        assert await a.hears("back") == b.id

    run(test)


def test_messages_dial_on_demand_from_news() -> None:
    async def test() -> None:
        a, b = await node(1), await node(2)
        a.mesh.news(b.id, [b.address])
        a.mesh.news(a.id, ["a:1"])
        a.say(b, "hello")
        assert await b.hears("hello") == a.id and a.mesh.addresses(a.id) == []

    run(test)


def test_who_comes_to_us_is_answered_while_we_still_try_where_it_was() -> None:
    """A restarted peer has a new port; its old address may be one that takes every connection and never answers."""

    async def test() -> None:
        a, b = await node(1), await node(2)
        trying, given_up = asyncio.Event(), asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            trying.set()
            while await reader.read(1024):
                pass
            given_up.set()
            writer.close()

        async with await asyncio.start_server(silent, "127.0.0.1", 0) as old:
            b.mesh.news(a.id, [f"127.0.0.1:{old.sockets[0].getsockname()[1]}"])
            b.say(a, "are you there?")
            await trying.wait()
            await a.mesh.connect(b.address, b.id)
            assert await a.hears("are you there?") == b.id
            b.say(a, "more")
            await a.hears("more")
            assert not given_up.is_set()

    run(test)


def test_bulk_streams() -> None:
    async def test() -> None:
        a, b = await node(1), await node(2)
        got: list[tuple[str, int]] = []

        async def take(peer: str, stream: Stream) -> None:
            total = 0
            try:
                while True:
                    total += len(await stream.recv(S))
            except StreamClosed as end:
                assert end.clean
            await stream.send(b"%d" % total)
            await stream.done_sending()
            got.append((peer, total))

        b.mesh.serve("Push", take)
        a.mesh.news(b.id, [b.address])
        stream = await a.mesh.open(b.id, "Push", S)
        for _ in range(40):
            await stream.send(bytes(limits.PAYLOAD_FRAME_BYTES))
        await stream.done_sending()
        total = 40 * limits.PAYLOAD_FRAME_BYTES
        assert await stream.recv(S) == b"%d" % total
        assert got == [(a.id, total)]
        assert a.mesh.traffic.sent["Push"] == total == b.mesh.traffic.received["Push"]
        assert b.mesh.traffic.received_from[a.id] >= total
        stream = await a.mesh.open(b.id, "Nothing", S)
        with pytest.raises(StreamClosed, match="no method"):
            await stream.recv(S)

    run(test)


def test_a_peer_that_does_not_read_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(link_module, "SEND_SECONDS_MAX", 0.3)
        a, b = await node(1), await node(2)
        stuck = asyncio.Event()

        async def handler(peer: str, stream: Stream) -> None:
            await stuck.wait()

        b.mesh.serve("Push", handler)
        a.mesh.news(b.id, [b.address])
        stream = await a.mesh.open(b.id, "Push", S)
        with pytest.raises(StreamClosed, match="did not read"):
            while True:
                await stream.send(bytes(limits.FRAME_BYTES_MAX))
        stuck.set()

    run(test)


def test_too_large_too_old_and_unsendable_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        a, b = await node(1), await node(2)
        await a.mesh.connect(b.address, b.id)
        a.mesh.post(b.id, Envelope(convene=Convene(reason="x" * limits.MESSAGE_BYTES_MAX)))
        monkeypatch.setattr(mesh_module, "STALE_SECONDS", -1.0)
        a.say(b, "stale")
        await until(lambda: not a.mesh._links.peers[b.id].queue)
        monkeypatch.undo()
        monkeypatch.setattr(limits, "LINKS_MAX", 1)
        a.say("nobody", "no room: the one link is in use")
        a.say(b, "fresh")
        await b.hears("fresh")
        assert [t for _, t in b.heard] == ["fresh"]
        a.mesh.news("another", ["a:1"])
        assert a.mesh.addresses("another") == []

    run(test)


def test_idle_links_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(limits, "LINKS_MAX", 2)
        a = await node(1, listen=False)
        for n in range(5):
            a.mesh.news(f"peer{n}", ["a:1"])
        assert list(a.mesh._links.peers) == ["peer3", "peer4"]

    run(test)


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_dead_peer_opens_the_breaker_and_news_closes_it() -> None:
    async def test() -> None:
        a, b = await node(1), await node(2)
        dead = b.address
        a.mesh.news(b.id, [dead])
        await b.mesh.close()
        with pytest.raises(DialError):
            await a.mesh.open(b.id, "Push")
        assert dead in a.mesh.last_error(b.id)
        a.mesh._links.peers[b.id].breaker.retry_at += 1000
        with pytest.raises(DialError, match="waiting after 1 failures"):
            await a.mesh.open(b.id, "Push")
        a.say(b, "lost")
        await until(lambda: not a.mesh._links.peers[b.id].queue)
        again = await node(2, port=b.port)
        a.mesh.news(b.id, [again.address])
        a.say(b, "found")
        await again.hears("found")
        assert a.mesh.last_error(b.id) == "" == a.mesh.last_error("unknown")
        with pytest.raises(DialError, match="no address"):
            await a.mesh.open(Identity.generate(bytes(32)).peer_id, "Push")

    run(test)


def test_breaker_backs_off_up_to_its_cap() -> None:
    breaker, rng, waits = Breaker(), random.Random(1), []
    for _ in range(30):
        breaker.failed(100.0, rng, "why")
        waits.append(breaker.retry_at - 100.0)
    assert waits[0] <= 0.75 and waits[-1] == limits.RECONNECT_BACKOFF_SECONDS_MAX == max(waits)
    breaker.reset()
    assert (breaker.failures, breaker.retry_at, breaker.last_error) == (0, 0.0, "why")


def test_a_restart_at_the_same_address_is_reconnected_to() -> None:
    async def test() -> None:
        a, b = await node(1), await node(2)
        await a.mesh.connect(b.address, b.id)
        await b.mesh.connect(a.address, a.id)
        a.say(b, "before")
        await b.hears("before")
        await b.mesh.close()
        again = await node(2, port=b.port)
        assert again.port == b.port
        await again.mesh.connect(a.address, a.id)
        a.say(again, "after")
        assert await again.hears("after") == a.id
        again.say(a, "hello again")
        await a.hears("hello again")

    run(test)


def test_open_after_a_restart_finds_the_new_process() -> None:
    """The dead connection may be noticed before, while or after the stream is opened: each way ends at once."""

    async def test() -> None:
        a = await node(1)
        b = await node(2)
        await a.mesh.connect(b.address, b.id)
        for _ in range(8):
            served = asyncio.Event()

            async def handler(peer: str, stream: Stream, served: asyncio.Event = served) -> None:
                served.set()

            await b.mesh.close()
            b = await node(2, port=b.port)
            b.mesh.serve("Push", handler)
            a.mesh.news(b.id, [])  # whatever the reader of the dead control stream has done to the breaker
            stream = await asyncio.wait_for(a.mesh.open(b.id, "Push", S), S / 2)
            await served.wait()
            stream.cancel("done")

    run(test)


def test_a_peer_that_closes_every_connection() -> None:
    async def test() -> None:
        a, b = await node(1), await node(2)
        a.mesh.news(b.id, [b.address])

        async def closed(peer: str, method: str, timeout_s: float) -> None:
            return None

        a.mesh._dialing._open = closed  # type: ignore[method-assign]
        with pytest.raises(StreamClosed, match="closes every connection"):
            await a.mesh.open(b.id, "Push")

    run(test)


def test_our_own_errors_surface() -> None:
    async def test() -> None:
        a, b = await node(1), await node(2)

        def broken(peer: str, envelope: Envelope) -> None:
            raise ZeroDivisionError("ours")

        async def broken_handler(peer: str, stream: Stream) -> None:
            raise KeyError("ours too")

        a.mesh.on_message(broken)
        b.mesh.serve("Push", broken_handler)
        await a.mesh.connect(b.address, b.id)
        stream = await a.mesh.open(b.id, "Push", S)
        with pytest.raises(StreamClosed, match="internal error"):
            await stream.recv(S)
        with pytest.raises(KeyError):
            await b.mesh.failed
        a.say(b, "so that there is a way back")
        await b.hears("so that there is a way back")
        b.say(a, "x")
        with pytest.raises(ZeroDivisionError):
            await a.mesh.failed
        for made in (a, b):
            await made.mesh.close()
        _nodes.clear()

    run(test)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_another_run_and_another_peer_are_refused() -> None:
    async def test() -> None:
        a, b = await node(1, run_id=b"q" * 32), await node(2)
        with pytest.raises(Refused) as caught:
            await a.mesh.connect(b.address, b.id)
        assert caught.value.reason == Refusal.WRONG_RUN
        with pytest.raises(DialError) as dial:
            await a.mesh.connect(b.address, a.id)
        assert dial.value.kind == "wrong_peer"
        a.mesh.news(b.id, [b.address])
        with pytest.raises(DialError, match="another run"):
            await a.mesh.open(b.id, "Push")
        assert b.mesh.traffic.faults["refused_wrong_run"] == 2 and b.mesh.connected() == []

    run(test)


def test_a_token_admits_one_identity_and_brings_the_key() -> None:
    async def test() -> None:
        founder = Admission("token", key=b"k" * 32)
        token = founder.new_token(os.urandom)
        b = await node(2, admission=founder)
        a = await node(1, admission=Admission("token", token=token))
        c = await node(3, admission=Admission("token", token=token))
        await a.mesh.connect(b.address, b.id)
        assert a.me.admission.key == founder.key
        with pytest.raises(Refused) as caught:
            await c.mesh.connect(b.address, b.id)
        assert caught.value.reason == Refusal.NOT_ADMITTED and c.me.admission.key == b""
        # who was admitted can admit
        other = await node(4, admission=Admission("token", token=a.me.admission.new_token(os.urandom)))
        await other.mesh.connect(a.address, a.id)
        assert other.me.admission.key == founder.key

    run(test)


def test_a_second_live_process_with_one_identity_is_refused() -> None:
    async def test() -> None:
        b, first, twin = await node(2), await node(1), await node(1)
        # whoever of the two dialed: b knows the first process from its session or from its own connection
        for dialing, target in ((first, b), (b, first)):
            await dialing.mesh.connect(target.address, target.id)
            with pytest.raises(Refused) as caught:
                await twin.mesh.connect(b.address, b.id)
            assert caught.value.reason == Refusal.IDENTITY_IN_USE and caught.value.permanent
            assert first.address in caught.value.values
            b.mesh._links.sessions.revoke(first.id)
        # the twin itself is refused by its double, too
        with pytest.raises(Refused) as caught:
            await twin.mesh.connect(first.address, first.id)
        assert caught.value.reason == Refusal.IDENTITY_IN_USE
        # the first goes; now it is a move
        await first.mesh.close()
        await twin.mesh.connect(b.address, b.id)
        b.say(twin, "welcome")
        await twin.hears("welcome")

    run(test)


def test_a_twin_of_a_process_that_cannot_be_dialed_waits_for_its_end() -> None:
    async def test() -> None:
        b, first = await node(2), await node(1, listen=False)
        await first.mesh.connect(b.address, b.id)
        await until(lambda: b.mesh._links.peers[first.id].accepted)
        twin = await node(1, listen=False)
        with pytest.raises(Refused) as caught:
            await twin.mesh.connect(b.address, b.id)
        assert caught.value.reason == Refusal.BUSY and not caught.value.permanent
        await first.mesh.close()
        await until(lambda: not b.mesh._links.peers[first.id].accepted)
        await twin.mesh.connect(b.address, b.id)

    run(test)


def test_a_restart_at_the_old_address_does_not_wait_for_keepalive() -> None:
    """The old process is gone, but its stream looks open here: its address answers as the newcomer."""

    async def test() -> None:
        b, first = await node(2), await node(1)
        await first.mesh.connect(b.address, b.id)
        await until(lambda: b.mesh._links.peers[first.id].accepted)
        (ghost,) = b.mesh._links.peers[first.id].accepted
        await first.mesh.close()
        again = await node(1, port=first.port)
        b.mesh._links.peers[first.id].accepted.append(ghost)
        await again.mesh.connect(b.address, b.id)
        assert not ghost.live
        b.say(again, "hello")
        await again.hears("hello")

    run(test)


def test_too_many_handshakes_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        a, b = await node(1), await node(2)
        monkeypatch.setattr(limits, "HANDSHAKES_PER_HOST_MAX", 2)
        connection = await a.transport.dial(b.address, b.id, timeout_s=S)
        held = [await connection.open("Handshake", b"", timeout_s=S) for _ in range(2)]
        await until(lambda: sum(b.mesh._accepting._handshakes.values()) == 2)
        refused = await connection.open("Handshake", b"", timeout_s=S)
        with pytest.raises(StreamClosed, match="busy"):
            await refused.recv(S)
        for stream in held:
            stream.cancel("done")
        await until(lambda: not b.mesh._accepting._handshakes)
        await a.mesh.connect(b.address, b.id)

    run(test)


def test_a_busy_answer_is_a_refusal_that_is_not_permanent() -> None:
    async def test() -> None:
        a = await node(1)

        class Busy:
            peer_id, address, binding = Identity.generate(bytes(32)).peer_id, "x:1", bytes(32)

            async def open(self, method: str, token: bytes, *, timeout_s: float) -> Any:
                return self

            async def send(self, frame: bytes) -> None:
                raise StreamClosed("unauthenticated: busy with other handshakes")

            def cancel(self, reason: str) -> None: ...

        with pytest.raises(Refused) as caught:
            await a.mesh._dialing._greet(Busy())  # type: ignore[arg-type]
        assert caught.value.reason == Refusal.BUSY and not caught.value.permanent

    run(test)


# --- faults and bans --------------------------------------------------------------------------------------------------


def test_faults_are_counted_charged_and_end_what_no_honest_peer_sends() -> None:
    async def test() -> None:
        a, b = await node(1), await node(2)
        kinds = iter(["stale", "bad_signature"])

        def faulty(peer: str, envelope: Envelope) -> None:
            raise PeerFault(next(kinds), "x")

        b.mesh.on_message(faulty)
        await a.mesh.connect(b.address, b.id)
        a.say(b, "1")
        await until(lambda: b.mesh.traffic.faults["stale"] == 1)
        assert b.mesh.connected() == [a.id]
        a.say(b, "2")
        await until(lambda: b.mesh.traffic.faults["bad_signature"] == 1 and not b.mesh.connected())
        assert b.mesh.traffic.charged[a.id] == 2
        await until(lambda: not a.mesh.connected())

    run(test)


def test_a_peer_that_goes_on_with_what_no_honest_peer_sends_is_banned_here() -> None:
    """Not for what it may have run into because of others, nor one that we have no link with."""

    async def test() -> None:
        a, b = await node(1), await node(2)
        await a.mesh.connect(b.address, b.id)
        await until(lambda: b.mesh.connected() == [a.id])
        for _ in range(3 * limits.FAULTS_BEFORE_BAN):
            b.mesh.fault(a.id, PeerFault("bad_chunk", "a sum"))
            b.mesh.fault("unknown", PeerFault("bad_payload", "x"))
            b.mesh.fault(links_module.STRANGER, PeerFault("bad_payload", "x"))
        for n in range(limits.FAULTS_BEFORE_BAN - 1):
            b.mesh.fault(a.id, PeerFault("bad_payload", f"number {n}"))
        assert b.mesh.connected() == [a.id] and not b.me.bans.entries
        b.mesh.fault(a.id, PeerFault("bad_message", "the last"))
        reason, evidence = b.me.bans.entries[a.id]
        assert "bad_message, bad_payload" in reason and b"number 0" in evidence and b"the last" in evidence
        assert list(b.me.bans.entries) == [a.id] and not a.me.bans.entries
        await until(lambda: not a.mesh.connected() and not b.mesh.connected())
        with pytest.raises(Refused) as caught:
            await a.mesh.connect(b.address, b.id)
        assert caught.value.reason == Refusal.BANNED
        b.mesh.fault(a.id, PeerFault("bad_payload", "late"))  # already banned: nothing new
        assert b.me.bans.entries[a.id] == (reason, evidence)

    run(test)


def test_where_no_ban_fits_any_more_the_peer_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        a, b = await node(1), await node(2)
        await a.mesh.connect(b.address, b.id)
        await until(lambda: b.mesh.connected() == [a.id])
        b.me.bans.add("somebody", "x")
        monkeypatch.setattr(limits, "MEMBERS_MAX", 1)
        for _ in range(limits.FAULTS_BEFORE_BAN):
            b.mesh.fault(a.id, PeerFault("bad_payload", "x"))
        assert list(b.me.bans.entries) == ["somebody"]
        await until(lambda: not b.mesh.connected() and not a.mesh.connected())

    run(test)


def test_bytes_that_are_no_message_disconnect() -> None:
    async def test() -> None:
        a, b = await node(1), await node(2)
        await a.mesh.connect(b.address, b.id)
        control = a.mesh._links.peers[b.id].control
        assert control is not None
        await control.send(b"\xff\xff\xff")
        await until(lambda: b.mesh.traffic.faults["bad_envelope"] == 1 and not a.mesh.connected())

    run(test)


def test_faults_of_bulk_streams_and_of_strangers() -> None:
    async def test() -> None:
        a, b = await node(1), await node(2)

        async def handler(peer: str, stream: Stream) -> None:
            await stream.recv(S)
            raise PeerFault("bad_payload", "x")

        async def impatient(peer: str, stream: Stream) -> None:
            await stream.recv(0.01)

        b.mesh.serve("Push", handler)
        b.mesh.serve("Pull", impatient)
        await a.mesh.connect(b.address, b.id)
        stream = await a.mesh.open(b.id, "Push", S)
        await stream.send(b"x")
        with pytest.raises(StreamClosed, match="bad_payload"):
            await stream.recv(S)
        with pytest.raises(StreamClosed, match="ended"):
            await (await a.mesh.open(b.id, "Pull", S)).recv(S)
        assert b.mesh.connected() == [a.id] and b.mesh.traffic.charged[a.id] == 1
        connection = await a.transport.dial(b.address, b.id, timeout_s=S)
        for _ in range(3):
            stream = await connection.open("Handshake", b"", timeout_s=S)
            await stream.send(b"nonsense")
            with pytest.raises(StreamClosed):
                await stream.recv(S)
        assert dict(b.mesh.traffic.charged) == {a.id: 1, links_module.STRANGER: 3}

    run(test)


def test_a_dialed_peer_that_breaks_the_handshake_is_charged() -> None:
    async def test() -> None:
        a = await node(1)
        peer = Identity.generate(bytes([2]) * 32).peer_id

        async def nonsense(call: Any, stream: Stream) -> None:
            await stream.recv(S)
            await stream.send(b"nonsense")
            await stream.recv(S)

        async def nothing(call: Any, stream: Stream) -> None:
            await stream.recv(S)

        for handler, why in ((nonsense, "handshake: bad_handshake"), (nothing, "handshake: the other side is done")):
            bob = GrpcTransport(Identity.generate(bytes([2]) * 32))
            port = await bob.listen("127.0.0.1", 0, lambda call: None, handler)
            with pytest.raises(DialError, match=why):
                await a.mesh.connect(f"127.0.0.1:{port}", peer)
            await bob.close()
        assert a.mesh.traffic.charged[peer] == 1

    run(test)


def test_a_silent_handshake_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(limits, "HANDSHAKE_SECONDS_MAX", 0.2)
        a, b = await node(1), await node(2)

        async def silent(call: Any, stream: Stream) -> None:
            await asyncio.Event().wait()

        bob = GrpcTransport(Identity.generate(bytes([3]) * 32))
        port = await bob.listen("127.0.0.1", 0, lambda call: None, silent)
        with pytest.raises(DialError) as caught:
            await a.mesh.connect(f"127.0.0.1:{port}", Identity.generate(bytes([3]) * 32).peer_id)
        assert caught.value.kind == "timeout"
        await bob.close()
        connection = await a.transport.dial(b.address, b.id, timeout_s=S)
        stream = await connection.open("Handshake", b"", timeout_s=S)
        with pytest.raises(StreamClosed):
            await stream.recv(S)
        assert not b.mesh._accepting._handshakes

    run(test)


def test_a_ban_ends_everything_at_once() -> None:
    async def test() -> None:
        a, b = await node(1), await node(2)
        inside = asyncio.Event()

        async def handler(peer: str, stream: Stream) -> None:
            inside.set()
            await stream.recv(S)

        for each in (a, b):
            each.mesh.serve("Push", handler)
        await a.mesh.connect(b.address, b.id)
        await b.mesh.connect(a.address, a.id)
        theirs = await a.mesh.open(b.id, "Push", S)
        await inside.wait()
        ours = await b.mesh.open(a.id, "Push", S)
        assert b.mesh.ban(a.id, "equivocation", b"proof") and not b.mesh.ban(a.id, "again")
        for stream in (theirs, ours):
            with pytest.raises(StreamClosed):
                await stream.recv(S)
        await until(lambda: not b.mesh.connected() and not a.mesh.connected())
        with pytest.raises(Refused) as caught:
            await a.mesh.connect(b.address, b.id)
        assert caught.value.reason == Refusal.BANNED and "equivocation" in caught.value.values
        with pytest.raises(DialError, match="banned"):
            await b.mesh.connect(a.address, a.id)
        b.say(a, "never")
        await until(lambda: not b.mesh._links.peers[a.id].queue)
        assert b.mesh.ban("somebody unknown", "x")
        assert a.heard == []

    run(test)


def test_a_revoked_session_ends_at_the_next_frame() -> None:
    async def test() -> None:
        a, b = await node(1), await node(2)
        read: list[bytes] = []

        async def handler(peer: str, stream: Stream) -> None:
            while True:
                read.append(await stream.recv(S))

        b.mesh.serve("Push", handler)
        await a.mesh.connect(b.address, b.id)
        stream = await a.mesh.open(b.id, "Push", S)
        await stream.send(b"1")
        await until(lambda: read == [b"1"])
        b.mesh._links.sessions.revoke(a.id)
        await stream.send(b"2")
        with pytest.raises(StreamClosed):
            await stream.recv(S)
        assert read == [b"1"]
        b_link = b.mesh._links.peers[a.id]
        with pytest.raises(StreamClosed, match="session ended"):
            await b_link.accepted[0].send(b"x")

    run(test)


def test_nothing_of_a_stranger_is_read() -> None:
    """Every method but the handshake, with no token and with a stolen-looking one."""

    async def test() -> None:
        a, b = await node(1), await node(2)
        for method in ("Push", "Pull", "State", "Manifest"):
            b.mesh.serve(method, lambda peer, stream: stream.recv(S))  # type: ignore[arg-type,return-value]
        connection = await a.transport.dial(b.address, b.id, timeout_s=S)
        for method in ("Control", "Push", "Pull", "State", "Manifest", "Other"):
            for token in (b"", bytes(32)):
                with pytest.raises(StreamClosed, match="no session|internal"):
                    stream = await connection.open(method, token, timeout_s=S)
                    while True:
                        await stream.send(bytes(limits.FRAME_BYTES_MAX))
        assert b.transport.received_bytes == 0 and b.mesh.connected() == []
        await b.mesh.close()
        assert b.mesh._accepting.gate(None) == "closing"  # type: ignore[arg-type]

    run(test)


# --- bookkeeping ------------------------------------------------------------------------------------------------------


def test_counters_of_strangers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHARGED_MAX", 10)
    traffic = Traffic()
    for n in range(1000):
        traffic.charge(f"peer{n}", "bad_payload")
        traffic.charge("worst", "bad_payload")
    assert len(traffic.charged) <= 10 and traffic.charged["worst"] == 1000
    assert traffic.faults["bad_payload"] == 2000


def test_queues_drop_the_oldest() -> None:
    async def test() -> None:
        link = Link()
        for n in range(limits.MESSAGE_QUEUE_MAX + 5):
            link.queue.append((0.0, b"%d" % n))
        assert len(link.queue) == limits.MESSAGE_QUEUE_MAX and link.queue[0][1] == b"5"
        assert not link.idle() and link.incoming() is None

    asyncio.run(test())


def test_streams_are_cancelled_oldest_first() -> None:
    async def test() -> None:
        order: list[str] = []

        class Noted:
            def __init__(self, name: str) -> None:
                self.name = name

            def cancel(self, reason: str) -> None:
                order.append(self.name)

        link, traffic = Link(), Traffic()
        streams = [SessionStream(Noted(n), traffic, "X", "p", None) for n in "abcd"]  # type: ignore[arg-type]
        link.control, link.accepted = streams[2], [streams[0]]
        link.streams.add(streams[3])
        link.streams.add(streams[1])
        link.cancel_streams("x")
        assert order == ["a", "b", "c", "d"]

    asyncio.run(test())
