"""The sparse exchange over streams in memory: honest rings, and everything that a hostile or dying peer can do to one."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shoal.aggregation.compress import Compression
from shoal.node.swarm import ring_exchange
from shoal.node.swarm.ring_exchange import RingExchange, Transfer
from shoal.node.swarm.updates import UpdateStore
from shoal.protocol import limits
from shoal.protocol.ballot_messages import Encoding, Header
from shoal.protocol.ballot_wire import decode_header
from shoal.protocol.errors import PeerFault
from shoal.protocol.identity import Identity
from shoal.protocol.signing import sign_body
from shoal.protocol.transport import DialError, Stream, StreamClosed
from shoal.protocol.version import sha256
from shoal.protocol.wire_pb2 import Dot, PullRequest, PushDone, PushHave, PushHello, Signed, UpdateHeader, UpdateStart

from .memory import InlineClock, MemoryNet, Serve, run

RUN, BASE = sha256(b"run"), sha256(b"base")
KEY = (3, BASE, 1)
D = 10_000


@functools.cache
def identity(number: int) -> Identity:
    return Identity.generate(bytes([number]) * 32)


@functools.cache
def update(number: int, *, size: int = 700, claimed: int | None = None, run_id: bytes = RUN) -> tuple[Header, bytes]:
    """The update of one peer: header and payload. `claimed`: a size that the header says instead."""
    payload = bytes([number]) * size
    header = UpdateHeader(
        dot=Dot(peer=identity(number).peer_id, incarnation=1, seq=1),
        previous_head=bytes(32),
        round=KEY[0],
        base_lineage=BASE,
        weight=5,
        encoding=Encoding.SPARSE.value,  # pyright: ignore[reportArgumentType]
        payload_hash=sha256(payload),
        payload_size=size if claimed is None else claimed,
    )
    signed = sign_body(identity(number), "update", "origin", run_id, header.SerializeToString())
    return decode_header(signed, run_id), payload


@dataclass
class Peer:
    """One exchange with its store, and what it reported."""

    number: int
    store: UpdateStore
    exchange: RingExchange
    dead: set[str] = field(default_factory=set)
    troubles: list[tuple[str, BaseException]] = field(default_factory=list)
    arrivals: int = 0
    sent: int = 0

    @property
    def id(self) -> str:
        return identity(self.number).peer_id

    def charged(self) -> list[tuple[str, str]]:
        """Who was charged with which kind of fault."""
        return [(who, e.kind) for who, e in self.troubles if isinstance(e, PeerFault)]


def peer(number: int, net: MemoryNet, *, folder: Path | None = None, memory_bytes_max: int = 2**20) -> Peer:
    store = UpdateStore(
        run_id=RUN, d=D, compression=Compression(0.10, 4), bytes_max=2**20, folder=folder,
        memory_bytes_max=memory_bytes_max,
    )  # fmt: skip
    me = identity(number).peer_id

    async def before_payload() -> None:
        made.sent += 1

    def arrived() -> None:
        made.arrivals += 1

    exchange = RingExchange(
        me=me,
        clock=InlineClock(),
        open_stream=net.opener(me),
        store=store,
        is_dead=lambda p: p in made.dead,
        on_arrival=arrived,
        on_trouble=lambda where, error: made.troubles.append((where, error)),
        before_payload=before_payload,
    )
    made = Peer(number, store, exchange)
    net.handlers[me, "Push"] = exchange.serve_push
    net.handlers[me, "Pull"] = exchange.serve_pull
    return made


def transfer(numbers: Sequence[int], *, key: tuple[int, bytes, int] = KEY, without: Sequence[int] = ()) -> Transfer:
    headers = [update(n)[0] for n in numbers if n not in without]
    return Transfer(key, tuple(identity(n).peer_id for n in numbers), {h.update_hash: h for h in headers})


def has_own(*peers: Peer) -> None:
    for one in peers:
        one.store.put(*update(one.number))


async def until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    """Virtual seconds."""
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not happen")


async def stopped(*peers: Peer) -> None:
    for one in peers:
        one.exchange.end("test over")
    await asyncio.sleep(0)
    await asyncio.sleep(0)


# --- honest rings -----------------------------------------------------------------------------------------------------


def test_everybody_ends_with_everything_and_each_update_crosses_each_link_once() -> None:
    async def test() -> None:
        net = MemoryNet({})
        ring = [peer(n, net) for n in range(1, 6)]
        has_own(*ring)
        for one in ring:
            one.exchange.begin(transfer(range(1, 6)))
        await until(lambda: all(not one.exchange.missing() for one in ring), 2)
        assert all(len(one.exchange.held()) == 5 and one.arrivals == 4 for one in ring)
        assert [one.sent for one in ring] == [4] * 5 and not any(one.troubles for one in ring)
        # the next attempt has nothing to send
        for one in ring:
            one.exchange.begin(transfer(range(1, 6), key=(3, BASE, 2)))
        await asyncio.sleep(5)
        assert [one.sent for one in ring] == [4] * 5
        await stopped(*ring)
        assert not net.server_errors and ring[0].exchange.held() == ring[0].exchange.missing() == []

    run(test())


def test_what_arrives_later_is_forwarded_when_it_arrives() -> None:
    async def test() -> None:
        net = MemoryNet({})
        a, b = peer(1, net), peer(2, net)
        has_own(a)
        for one in (a, b):
            one.exchange.begin(transfer([1, 2, 3]))  # 3 is silent
        await until(lambda: len(b.exchange.held()) == 1)
        b.store.put(*update(2))
        b.exchange._note_arrival()
        await until(lambda: len(a.exchange.held()) == 2)
        await stopped(a, b)
        assert not a.charged() and not b.charged()

    run(test())


def test_dead_and_unreachable_successors_are_passed_over() -> None:
    async def test() -> None:
        net = MemoryNet({})
        a, d = peer(1, net), peer(4, net)
        a.dead = {identity(2).peer_id}
        has_own(a, d)
        for one in (a, d):
            one.exchange.begin(transfer([1, 2, 3, 4], without=[2, 3]))
        await until(lambda: not a.exchange.missing() and not d.exchange.missing(), 2)
        assert identity(2).peer_id not in net.opened
        assert [type(e) for _, e in a.troubles] == [DialError]
        await stopped(a, d)

    run(test())


def test_a_ring_where_nobody_can_be_reached_just_ends() -> None:
    async def test() -> None:
        net = MemoryNet({})
        a = peer(1, net)
        has_own(a)
        a.exchange.begin(transfer([1, 2, 3], without=[2, 3]))
        await until(lambda: not a.exchange._tasks, 5)
        assert len(a.troubles) == 2
        a.exchange.begin(transfer([1]))
        assert not a.exchange._tasks  # alone there is nothing to do
        a.exchange.begin(transfer([1, 2], without=[1, 2]))
        assert not a.exchange._tasks

    run(test())


def test_a_successor_that_dies_in_the_middle_is_replaced_by_the_next() -> None:
    async def dying(_: str, stream: Stream) -> None:
        await stream.recv(1)
        await stream.send(PushHave().SerializeToString())
        await stream.recv(1)
        stream.cancel("connection reset")

    async def test() -> None:
        net = MemoryNet({(identity(2).peer_id, "Push"): dying})
        a, c = peer(1, net), peer(3, net)
        has_own(a, c)
        for one in (a, c):
            one.exchange.begin(transfer([1, 2, 3], without=[2]))
        await until(lambda: not a.exchange.missing() and not c.exchange.missing(), 2)
        assert isinstance(a.troubles[0][1], StreamClosed) and not a.charged()
        await stopped(a, c)

    run(test())


@pytest.mark.parametrize("answer", [b"\xff junk", None], ids=["junk", "silence"])
def test_a_successor_that_answers_with_junk_or_not_at_all_is_passed_over(answer: bytes | None) -> None:
    async def mute(_: str, stream: Stream) -> None:
        await stream.recv(1)
        if answer is not None:
            await stream.send(answer)
        await stream.recv(1000)

    async def test() -> None:
        net = MemoryNet({(identity(2).peer_id, "Push"): mute})
        a, c = peer(1, net), peer(3, net)
        has_own(a, c)
        for one in (a, c):
            one.exchange.begin(transfer([1, 2, 3], without=[2]))
        await until(lambda: not a.exchange.missing() and not c.exchange.missing(), 60)
        who = identity(2).peer_id
        assert set(a.charged()) == ({(who, "bad_message")} if answer else set())
        await stopped(a, c)

    run(test())


def test_a_successor_that_claims_junk_hashes_gets_what_it_lacks() -> None:
    got: list[bytes] = []

    async def odd(_: str, stream: Stream) -> None:
        await stream.recv(1)
        await stream.send(PushHave(update_hashes=[b"x", bytes(32)]).SerializeToString())
        got.append(await stream.recv(1))
        got.append(await stream.recv(1))
        with pytest.raises(StreamClosed):
            await stream.recv(1)
        await stream.send(PushDone(received=1).SerializeToString())

    async def test() -> None:
        net = MemoryNet({(identity(2).peer_id, "Push"): odd})
        a = peer(1, net)
        has_own(a)
        a.exchange.begin(transfer([1, 2], without=[2]))
        await until(lambda: not a.exchange._tasks)
        assert UpdateStart.FromString(got[0]).payload_size == 700 and got[1] == update(1)[1] and not a.troubles

    run(test())


# --- updates that are lost here ---------------------------------------------------------------------------------------


def damage(folder: Path) -> None:
    for path in folder.glob("*.update"):
        path.write_bytes(b"")


def test_a_lost_update_costs_its_place_in_the_push_and_is_pulled_again(tmp_path: Path) -> None:
    """Peer 2 cannot read what it has of 1 any more: it goes on with its own, and forwards 1's once it is back."""

    async def test() -> None:
        net = MemoryNet({})
        a, c = peer(1, net), peer(3, net)
        b = peer(2, net, folder=tmp_path, memory_bytes_max=0)
        has_own(a, b, c)
        b.store.put(*update(1))
        b.store.put(*update(3))
        damage(tmp_path)
        for one in (a, c):
            one.exchange.begin(transfer([1, 2, 3], key=(3, BASE, 2), without=[2]))
        b.exchange.begin(transfer([1, 2, 3], key=(3, BASE, 2), without=[2]))
        assert not b.exchange.missing()  # as far as it knows
        await until(lambda: not b.exchange.missing() and b.arrivals == 1, 30)
        await until(lambda: not c.exchange.missing(), 30)
        await stopped(a, b, c)
        troubles = [e for one in (a, b, c) for _, e in one.troubles]
        assert all(isinstance(e, StreamClosed | DialError) for e in troubles) and not net.server_errors

    run(test())


def test_a_lost_update_is_left_out_of_what_is_pulled(tmp_path: Path) -> None:
    async def test() -> None:
        net = MemoryNet({})
        a, c = peer(1, net), peer(3, net)
        b = peer(2, net, folder=tmp_path, memory_bytes_max=0)
        b.store.put(*update(1))
        b.store.put(*update(3))
        lost = update(1)[0].update_hash
        (tmp_path / f"{lost.hex()}.update").unlink()
        hashes = [update(n)[0].update_hash for n in (1, 3)]
        assert await c.exchange.pull(hashes, [b.id]) == [lost]
        has_own(a)
        assert await c.exchange.pull(hashes, [b.id, a.id]) == []
        assert not c.charged() and not net.server_errors
        # asked between its look and its read: still no error
        b.store.put(*update(1))
        damage(tmp_path)
        assert b.store.has(lost)
        stream = await net.open(b.id, "Pull", 1)
        await stream.send(PullRequest(update_hashes=hashes).SerializeToString())
        with pytest.raises(StreamClosed) as closed:
            await stream.recv(1)
        assert closed.value.clean and not net.server_errors and not b.troubles

    run(test())


# --- whoever pushes to us ---------------------------------------------------------------------------------------------


def hello(key: tuple[int, bytes, int] = KEY) -> bytes:
    return PushHello(round=key[0], base_lineage=key[1], attempt=key[2]).SerializeToString()


def start(number: int, **changes: int) -> bytes:
    header, payload = update(number)
    return UpdateStart(
        header=Signed.FromString(header.signed), **{"payload_size": len(payload), **changes}
    ).SerializeToString()


async def pushed(
    frames: Sequence[bytes],
    *,
    by: int = 1,
    end: str = "clean",
    own: Sequence[int] = (),
    transfer_: Transfer | None = None,
) -> tuple[Peer, MemoryNet, PushDone | None]:
    """What comes of a push of these frames to peer 2; the answer only when it ended well."""
    net = MemoryNet({})
    b = peer(2, net)
    b.dead = {identity(1).peer_id, identity(3).peer_id}  # so that it neither pushes nor pulls itself
    for number in own:
        b.store.put(*update(number))
    b.exchange.begin(transfer_ or transfer([1, 2, 3]))
    stream = await net.open(b.id, "Push", 1, me=identity(by).peer_id)
    answer = None
    try:
        await stream.send(hello())
        have = PushHave.FromString(await stream.recv(1))
        assert list(have.update_hashes) == b.exchange.held()
        for frame in frames:
            await stream.send(frame)
        if end == "clean":
            await stream.done_sending()
        elif end == "death":
            stream.cancel("connection reset")
        answer = PushDone.FromString(await stream.recv(2000))
    except StreamClosed:
        pass
    await stopped(b)
    return b, net, answer


def test_a_push_is_taken_and_counted() -> None:
    b, net, answer = run(pushed([start(1), update(1)[1][:300], update(1)[1][300:], start(3), update(3)[1]]))
    assert answer is not None and answer.received == 2 and b.arrivals == 2 and not net.server_errors
    assert b.store.load(update(1)[0].update_hash)[1] == update(1)[1]


def test_an_update_that_is_there_already_is_said_and_may_come_again() -> None:
    b, net, answer = run(pushed([start(1), update(1)[1]], own=[1]))
    assert answer is not None and not net.server_errors


def resigned(number: int) -> bytes:
    """The header of one peer, signed by another."""
    body = Signed.FromString(update(number)[0].signed).body
    wrong = sign_body(identity(9), "update", "origin", RUN, body)
    return UpdateStart(header=wrong, payload_size=700).SerializeToString()


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ([b"\xff junk"], "bad_message"),
        ([b""], "unsolicited_update"),
        ([start(4), b"4" * 700], "unsolicited_update"),
        ([resigned(1)], "unsolicited_update"),  # the roster names the signature too
        ([start(1, payload_size=699)], "bad_message"),
        ([start(1, payload_size=2**60)], "bad_message"),
        ([start(1), b""], "bad_payload"),
        ([start(1), bytes(701)], "bad_payload"),
        ([start(1), bytes(699), b"more"], "bad_payload"),
        ([start(1), bytes(700)], "bad_payload"),  # another hash than the header's
    ],
)
def test_a_hostile_push_is_the_pushers_fault_and_leaves_nothing(frames: list[bytes], kind: str) -> None:
    b, net, answer = run(pushed(frames))
    assert answer is None and b.arrivals == 0 and b.exchange.held() == []
    assert not any(b.store.has(update(n)[0].update_hash) for n in (1, 2, 3, 4))
    (fault,) = net.server_errors
    assert isinstance(fault, PeerFault) and fault.kind == kind


@pytest.mark.parametrize("end", ["death", "clean", "silence"])
def test_half_a_payload_leaves_nothing_and_is_nobodys_fault(end: str) -> None:
    b, net, answer = run(pushed([start(1), bytes(100)], end=end))
    assert answer is None and b.arrivals == 0
    assert all(isinstance(e, asyncio.TimeoutError) for e in net.server_errors)
    assert len(net.server_errors) == (end == "silence")


def test_a_pusher_that_falls_silent_between_updates_is_let_go_at_last() -> None:
    b, net, answer = run(pushed([start(1), update(1)[1]], end="silence"))
    assert answer is None and b.arrivals == 1
    assert [type(e) for e in net.server_errors] in ([asyncio.TimeoutError], [TimeoutError])


def test_a_header_that_the_roster_names_and_no_honest_peer_signs() -> None:
    """A convener's roster can name anything; the store still looks at signature and size itself."""
    too_long, _ = update(1, claimed=10**9)
    other_run, _ = update(1, run_id=sha256(b"another run"))
    for header in (too_long, other_run):
        asked = Transfer(KEY, transfer([1, 2, 3]).order, {header.update_hash: header})
        first = UpdateStart(header=Signed.FromString(header.signed), payload_size=header.payload_size)
        b, net, answer = run(pushed([first.SerializeToString()], transfer_=asked))
        assert answer is None and b.arrivals == 0
        (fault,) = net.server_errors
        assert isinstance(fault, PeerFault) and fault.kind in ("bad_payload", "bad_signature")


@pytest.mark.parametrize(
    ("by", "key", "seconds"),
    [
        (7, KEY, 1.0),  # not in the roster
        (1, (3, BASE, 0), 1.0),  # an attempt that is over
        (1, (3, BASE, 2), ring_exchange.EARLY_PUSH_SECONDS + 1),  # one that never comes
        (1, (4, BASE, 1), ring_exchange.EARLY_PUSH_SECONDS + 1),
    ],
)
def test_pushes_of_strangers_and_of_other_attempts_are_not_read(
    by: int, key: tuple[int, bytes, int], seconds: float
) -> None:
    async def test() -> None:
        net = MemoryNet({})
        b = peer(2, net)
        b.dead = {identity(1).peer_id, identity(3).peer_id}
        b.exchange.begin(transfer([1, 2, 3]))
        stream = await net.open(b.id, "Push", 1, me=identity(by).peer_id)
        await stream.send(hello(key))
        await stream.send(start(1))
        with pytest.raises(StreamClosed, match="no such attempt"):
            await stream.recv(seconds)
        await stopped(b)
        assert b.arrivals == 0 and not net.server_errors

    run(test())


def test_a_push_that_is_early_waits_for_the_roster() -> None:
    async def early(before: Transfer | None) -> None:
        net = MemoryNet({})
        b = peer(2, net)
        b.dead = {identity(1).peer_id, identity(3).peer_id}
        if before is not None:
            b.exchange.begin(before)
        stream = await net.open(b.id, "Push", 1, me=identity(1).peer_id)
        await stream.send(hello())
        await asyncio.sleep(3)
        b.exchange.begin(transfer([1, 2, 3]))
        assert not PushHave.FromString(await stream.recv(1)).update_hashes
        await stream.send(start(1))
        await stream.send(update(1)[1])
        await until(lambda: b.arrivals == 1)
        # and the attempt's end ends it
        b.exchange.end("committed")
        with pytest.raises(StreamClosed, match="committed"):
            await stream.recv(1)
        await stopped(b)

    run(early(None))
    run(early(transfer([1, 2, 3], key=(3, BASE, 0))))


def test_a_hello_that_is_junk_is_charged() -> None:
    async def test() -> None:
        net = MemoryNet({})
        b = peer(2, net)
        for method in ("Push", "Pull"):
            stream = await net.open(b.id, method, 1)
            await stream.send(b"\xff junk")
            with pytest.raises(StreamClosed):
                await stream.recv(1)
        assert [e.kind for e in net.server_errors if isinstance(e, PeerFault)] == ["bad_message"] * 2

    run(test())


# --- whoever we pull from ---------------------------------------------------------------------------------------------


def sends(*frames: bytes, end: str = "clean") -> Serve:
    """A holder that answers a pull with these frames."""

    async def serve(_: str, stream: Stream) -> None:
        await stream.recv(1)
        for frame in frames:
            await stream.send(frame)
        if end == "clean":
            await stream.done_sending()
        elif end == "death":
            stream.cancel("connection reset")
            return
        try:
            await stream.recv(10_000)
            await stream.recv(10_000)
        except StreamClosed:
            pass

    return serve


@pytest.mark.parametrize(
    ("serve", "kind"),
    [
        (sends(), None),
        (sends(b"\xff junk"), "bad_message"),
        (sends(start(4), update(4)[1]), "unsolicited_update"),
        (sends(resigned(1)), "unsolicited_update"),
        (sends(start(1, payload_size=1)), "bad_message"),
        (sends(start(1), bytes(700)), "bad_payload"),
        (sends(start(1), bytes(701)), "bad_payload"),
        (sends(start(1), b""), "bad_payload"),
        (sends(start(1), bytes(10)), None),  # ends early
        (sends(start(1), bytes(10), end="death"), None),
        (sends(start(1), bytes(10), end="silence"), None),
        (sends(end="death"), None),
        (sends(end="silence"), None),
        # more than was asked: its first update is taken, the same again is not read
        (sends(start(1), update(1)[1], start(1), update(1)[1], end="silence"), None),
        (sends(start(1), update(1)[1], start(1), update(1)[1]), None),
    ],
)
def test_a_holder_that_lies_or_dies_costs_one_try(serve: Serve, kind: str | None) -> None:
    async def test() -> None:
        bad = identity(3).peer_id
        net = MemoryNet({(bad, "Pull"): serve})
        a, b = peer(1, net), peer(2, net)
        has_own(a)
        wanted = update(1)[0].update_hash
        gone = identity(8).peer_id
        b.dead = {identity(7).peer_id}
        assert await b.exchange.pull([wanted], [b.id, identity(7).peer_id, gone, bad, a.id]) == []
        assert b.store.load(wanted)[1] == update(1)[1] and b.arrivals == 1
        assert b.charged() == ([(bad, kind)] if kind else []) and identity(7).peer_id not in net.opened

    run(test())


def test_two_updates_one_after_the_other_and_what_nobody_has() -> None:
    async def test() -> None:
        net = MemoryNet({})
        a, b = peer(1, net), peer(2, net)
        for number in (1, 3):
            a.store.put(*update(number))
        hashes = [update(n)[0].update_hash for n in (1, 3, 4)]
        assert await b.exchange.pull(hashes, [a.id]) == [hashes[2]]
        assert await b.exchange.pull(hashes[:2], [a.id]) == [] and net.opened == [a.id]
        # asked twice in one request: sent once
        sent = a.sent
        stream = await net.open(a.id, "Pull", 1)
        await stream.send(PullRequest(update_hashes=[hashes[0]] * 5).SerializeToString())
        await until(lambda: a.sent > sent)
        await asyncio.sleep(1)
        assert a.sent == sent + 1
        stream.cancel("enough")

    run(test())


def test_too_much_is_not_served() -> None:
    async def test() -> None:
        net = MemoryNet({})
        a = peer(1, net)
        stream = await net.open(a.id, "Pull", 1)
        asked = [sha256(bytes([n % 256, n // 256])) for n in range(limits.ROSTER_MAX + 1)]
        await stream.send(PullRequest(update_hashes=asked).SerializeToString())
        with pytest.raises(StreamClosed):
            await stream.recv(1)
        (fault,) = net.server_errors
        assert isinstance(fault, PeerFault) and fault.kind == "bad_message"

    run(test())


def test_what_nobody_pushes_is_pulled_from_its_origin_after_a_while() -> None:
    async def test() -> None:
        net = MemoryNet({})
        a, b, c = peer(1, net), peer(2, net), peer(3, net)
        has_own(a, b, c)
        for one in (a, c):
            del net.handlers[one.id, "Push"]
        b.exchange.begin(transfer([1, 2, 3]))
        await until(lambda: not b.exchange.missing(), ring_exchange.STALL_SECONDS + 1)
        assert net.opened.count(a.id) == 2 and net.opened.count(c.id) == 2  # one push that failed, one pull each
        assert not b.charged()
        await stopped(b)

    run(test())


def test_while_updates_arrive_nothing_is_pulled() -> None:
    async def test() -> None:
        net = MemoryNet({})
        a, b = peer(1, net), peer(2, net)
        a.store.put(*update(1))
        a.store.put(*update(3))
        b.dead = {identity(3).peer_id}
        b.exchange.begin(transfer([2, 1, 3], without=[2]))
        stream = await net.open(b.id, "Push", 1, me=a.id)
        await stream.send(hello())
        await stream.recv(1)
        await asyncio.sleep(ring_exchange.STALL_SECONDS / 2)
        await stream.send(start(1))
        await stream.send(update(1)[1])
        await asyncio.sleep(ring_exchange.STALL_SECONDS)  # the first look comes after an arrival
        assert b.arrivals == 1
        await until(lambda: not b.exchange.missing(), 2 * ring_exchange.STALL_SECONDS)
        await stopped(b)

    run(test())


def test_an_error_of_our_own_is_reported_as_such() -> None:
    async def test() -> None:
        net = MemoryNet({})
        a = peer(1, net)
        has_own(a)

        async def broken(peer_: str, method: str, timeout_s: float) -> Stream:
            raise ZeroDivisionError(f"{method} to {peer_[-6:]}")

        a.exchange._open = broken
        a.exchange.begin(transfer([1, 2]))
        await until(lambda: not a.exchange._tasks, 10)
        assert {where for where, _ in a.troubles} == {"push", "repair"}
        assert all(isinstance(e, ZeroDivisionError) for _, e in a.troubles)

    run(test())
