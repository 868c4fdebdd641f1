"""The driver of membership: real signatures and real asyncio, messages handed over in memory, time that tests move."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from shoal.node.swarm.members import Members
from shoal.protocol.errors import PeerFault
from shoal.protocol.identity import Identity
from shoal.protocol.membership import PRESETS, State
from shoal.protocol.wire_pb2 import Envelope, Signed, Summary, Swim

RUN = b"r" * 32


class HandClock:
    """Time moves when `run` says so; sleepers wake in order."""

    def __init__(self) -> None:
        self.time = 100.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.time + seconds, future))
        await future

    def call_later(self, seconds: float, callback: Callable[[], None]) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: None if done.cancelled() else callback())
        self._sleepers.append((self.time + seconds, future))
        return future

    async def run(self, work: Callable[[], Any], *, cost_s: float = 0.0) -> Any:
        return work()

    async def pass_(self, seconds: float) -> None:
        end = self.time + seconds
        while True:
            for _ in range(3):
                await asyncio.sleep(0)
            due = min(self._sleepers, key=lambda s: s[0], default=None)
            if due is None or due[0] > end:
                self.time = end
                return
            self._sleepers.remove(due)
            self.time = max(self.time, due[0])
            if not due[1].cancelled():
                due[1].set_result(None)


class Swarm:
    """Nodes by name; what one posts the others receive at the next turn of the loop."""

    def __init__(self, names: str, **options: Any) -> None:
        self.clock = HandClock()
        self.identities = {n: Identity.generate(n.encode() * 32) for n in names}
        self.ids = {n: i.peer_id for n, i in self.identities.items()}
        self.members: dict[str, Members] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.changes: list[tuple[str, str, State | None, State]] = []
        self.heard: list[tuple[str, str, tuple[str, ...]]] = []
        self.faults: list[PeerFault] = []
        self.posted: list[tuple[str, str, Swim]] = []
        for name in names:
            self.start(name, **options)

    def name(self, peer: str) -> str:
        return next(n for n, p in self.ids.items() if p == peer)

    def start(self, name: str, boot: bytes = b"b" * 16, **options: Any) -> None:
        def changed(peer: str, old: State | None, new: State, reason: str) -> None:
            assert reason
            self.changes.append((name, self.name(peer), old, new))

        self.members[name] = Members(
            identity=self.identities[name],
            run_id=RUN,
            config=PRESETS["local"],
            rng=random.Random(name),
            clock=self.clock,
            incarnation=1,
            boot_id=boot,
            addresses=(f"{name}.example:1",),
            post=lambda peer, envelope: self._post(name, peer, envelope),
            heard=lambda peer, addresses: self.heard.append((name, self.name(peer), addresses)),
            changed=changed,
            summary=lambda: Summary(round=ord(name)),
            **options,
        )
        self.tasks[name] = asyncio.ensure_future(self.members[name].run())

    def kill(self, name: str) -> None:
        self.tasks.pop(name).cancel()
        del self.members[name]

    def _post(self, sender: str, peer: str, envelope: Envelope) -> None:
        wire = Swim.FromString(envelope.swim.SerializeToString())
        self.posted.append((sender, self.name(peer), wire))

        def arrive() -> None:
            receiver = self.members.get(self.name(peer))
            if receiver is not None:
                try:
                    receiver.received(self.ids[sender], wire)
                except PeerFault as fault:
                    self.faults.append(fault)

        asyncio.get_running_loop().call_soon(arrive)

    def alive(self, name: str) -> str:
        return "".join(sorted(self.name(p) for p in self.members[name].alive()))


def run(test: Callable[[], Any]) -> None:
    async def main() -> None:
        await test()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_they_find_each_other_through_one_and_carry_summaries_addresses_and_speed() -> None:
    async def test() -> None:
        swarm = Swarm("abc")
        a, b, c = (swarm.members[n] for n in "abc")
        b.introduce(swarm.ids["a"])
        c.introduce(swarm.ids["a"])
        await swarm.clock.pass_(3)
        assert [swarm.alive(n) for n in "abc"] == ["bc", "ac", "ab"]
        assert a.summaries() == {swarm.ids["b"]: Summary(round=ord("b")), swarm.ids["c"]: Summary(round=ord("c"))}
        assert c.last_summary(swarm.ids["b"]) == Summary(round=ord("b")) and c.last_summary("nobody") is None
        assert c.known_dot(swarm.ids["b"]) == (1, 0) and c.known_dot("nobody") == (0, 0)
        assert ("c", "b", ("b.example:1",)) in swarm.heard
        a.set_speed(10.0)
        a.set_speed(11.0)  # not worth a rumour
        a.set_speed(float("nan"))
        a.set_addresses(("new.example:1",))
        a.set_addresses(("new.example:1",))
        assert a.machine.me.counter == 3
        b.new_life(7)
        await swarm.clock.pass_(2)
        view = c.members()[swarm.ids["a"]]
        assert (view.samples_per_s, view.addresses) == (10.0, ("new.example:1",))
        assert a.known_dot(swarm.ids["b"]) == (7, 0)
        assert not swarm.faults

    run(test)


def test_a_death_and_a_return_reach_the_callbacks() -> None:
    async def test() -> None:
        swarm = Swarm("abcd")
        for name in "bcd":
            swarm.members[name].introduce(swarm.ids["a"])
        await swarm.clock.pass_(3)
        swarm.kill("d")
        await swarm.clock.pass_(5)
        assert [swarm.alive(n) for n in "abc"] == ["bc", "ac", "ab"]
        assert swarm.members["a"].dead() == {swarm.ids["d"]}
        assert ("a", "d", State.SUSPECT, State.DEAD) in swarm.changes
        assert swarm.ids["d"] not in swarm.members["a"].summaries()
        assert swarm.members["a"].last_summary(swarm.ids["d"]) is not None
        swarm.start("d", boot=b"c" * 16)
        await swarm.clock.pass_(4)  # the others dial the dead now and then
        assert [swarm.alive(n) for n in "abcd"] == ["bcd", "acd", "abd", "abc"]
        assert ("a", "d", State.DEAD, State.ALIVE) in swarm.changes and not swarm.faults

    run(test)


def test_a_goodbye_is_heard_at_once() -> None:
    async def test() -> None:
        swarm = Swarm("abc")
        for name in "bc":
            swarm.members[name].introduce(swarm.ids["a"])
        await swarm.clock.pass_(3)
        swarm.members["c"].leave()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        swarm.kill("c")
        assert all(swarm.members[n].dead() == {swarm.ids["c"]} for n in "ab")
        await swarm.clock.pass_(10)
        assert not [change for change in swarm.changes if change[3] in (State.SUSPECT, State.DEAD)]

    run(test)


def test_expected_peers_are_probed() -> None:
    async def test() -> None:
        swarm = Swarm("ab")
        swarm.members["a"].expect([swarm.ids["a"], swarm.ids["b"]])
        await swarm.clock.pass_(3)
        assert swarm.alive("a") == "b" and swarm.alive("b") == "a"

    run(test)


def test_hostile_messages_are_faults_and_change_nothing() -> None:
    async def test() -> None:
        swarm = Swarm("ab")
        a, b = swarm.members["a"], swarm.members["b"]
        b.introduce(swarm.ids["a"])
        await swarm.clock.pass_(1)
        before = a.members()
        good = swarm.posted[0][2]
        forged = Signed.FromString(good.rumours[0].SerializeToString())
        forged.signature = bytes(64)
        for wire in (
            Swim(),
            Swim(kind=Swim.PING, summary=Summary(lineage=b"x")),
            Swim(kind=Swim.SYNC, rumours=[*good.rumours, forged]),
        ):
            with pytest.raises(PeerFault):
                a.received(swarm.ids["b"], wire)
        assert a.members() == before

    run(test)


def test_news_of_who_may_not_enter_is_dropped() -> None:
    async def test() -> None:
        banned: set[str] = set()
        swarm = Swarm("abc", admissible=lambda peer: peer not in banned)
        banned.add(swarm.ids["c"])
        for name in "bc":
            swarm.members[name].introduce(swarm.ids["a"])
        await swarm.clock.pass_(3)
        assert swarm.alive("a") == "b" and swarm.alive("b") == "a" and not swarm.faults

    run(test)
