"""Lines and paths: how long, how fast, what is lost, what is cut; hosts and their processes; the clock."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.sim.clock import EPOCH, SimClock
from shoal.sim.link import Link, Way
from shoal.sim.loop import SimLoop
from shoal.sim.network import HEADER_BYTES, Network, Path, SimHost

MS = 1_000_000


class World:
    """A network of hosts with nothing on them."""

    def __init__(self, *links: Link, seed: int = 1) -> None:
        self.loop = SimLoop()
        self.network = Network(self.loop, random.Random(seed))
        self.hosts = [self.network.add_host(f"h{n}", link=link) for n, link in enumerate(links)]
        self.arrived: list[tuple[Any, float]] = []  # what, and when in ms

    def path(self, a: int, b: int) -> Path:
        return self.hosts[a].path_to(self.hosts[b])

    def carry(self, a: int, b: int, size: int, name: Any = "") -> None:
        self.path(a, b).carry(size - HEADER_BYTES, 0, self.note, (name,))

    def note(self, name: Any) -> None:
        self.arrived.append((name, self.loop.now_ns / MS))

    def run(self, seconds: float = 1000.0) -> list[tuple[Any, float]]:
        self.loop.run_until(self.loop.time() + seconds)
        got, self.arrived = self.arrived, []
        return got


# --- latency ----------------------------------------------------------------------------------------------------------


@given(
    low=st.floats(0.01, 100),
    span=st.floats(0, 100),
    distribution=st.sampled_from(["uniform", "exponential", "lognormal"]),
    seed=st.integers(0, 99),
)
def test_latencies_stay_in_their_bounds(low: float, span: float, distribution: Any, seed: int) -> None:
    link = Link(latency_ms=(low, low + span), distribution=distribution)
    rng = random.Random(seed)
    draw = Way.between(link, link).latency(rng, 0.5)
    draws = [draw() / MS for _ in range(100)]
    top = low + span if distribution == "uniform" or span == 0 else 10 * (low + span)
    assert all(0 <= d <= top * (1 + 1e-9) for d in draws)
    if distribution != "lognormal":
        assert all(d >= low * (1 - 1e-9) for d in draws)


def test_distributions_are_what_they_are_called() -> None:
    def draws(distribution: Any) -> list[float]:
        link = Link(latency_ms=(20, 80), distribution=distribution)
        draw = Way.between(link, link).latency(random.Random(1), 0.0)
        return sorted(draw() / MS for _ in range(20_000))

    uniform, exponential, lognormal = draws("uniform"), draws("exponential"), draws("lognormal")
    assert abs(sum(uniform) / len(uniform) - 50) < 1
    assert abs(sum(exponential) / len(exponential) - 80) < 2
    assert abs(lognormal[1000] - 20) < 1 and abs(lognormal[-1000] - 80) < 4 and abs(lognormal[10_000] - 40) < 1


def test_with_jitter_a_path_has_its_own_distance_the_same_both_ways() -> None:
    world = World(*[Link(latency_ms=(10, 200), jitter_ms=1)] * 3)
    means = {
        (a, b): sum(world.path(a, b).latency_ns() / MS for _ in range(200)) / 200
        for a in range(3)
        for b in range(3)
        if a != b
    }
    for (a, b), mean in means.items():
        assert abs(mean - means[b, a]) < 0.2
    assert len({round(mean) for mean in means.values()}) == 3


def test_a_path_is_half_of_either_end() -> None:
    world = World(Link(latency_ms=10), Link(latency_ms=30))
    world.carry(0, 1, 100)
    assert world.run() == [("", 20.0)]
    assert world.path(0, 0).latency_ns() < MS  # at home


def test_a_loss_delays_a_stream_by_round_trips() -> None:
    world = World(*[Link(latency_ms=10, loss=0.3)] * 2)
    for n in range(2000):
        world.carry(0, 1, 100, n)
    times = Counter(round(at) for _, at in world.run())
    assert sum(times.values()) == 2000 and all(at % 20 == 10 for at in times)
    assert abs(times[10] / 2000 - 0.7) < 0.04 and abs(times[30] / 2000 - 0.21) < 0.04


@pytest.mark.parametrize(
    "figures",
    [
        {"latency_ms": -1},
        {"latency_ms": (5, 2)},
        {"latency_ms": float("nan")},
        {"jitter_ms": -1},
        {"loss": 1.0},
        {"loss": -0.1},
        {"duplicate": 1.5},
        {"reorder": float("nan")},
        {"bandwidth_mbps": 0},
        {"up_mbps": -3},
        {"distribution": "zipf"},
        {"latency_ms": (0, 5), "distribution": "lognormal"},
    ],
)
def test_nonsense_is_refused(figures: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Link(**figures)


# --- bandwidth --------------------------------------------------------------------------------------------------------


def test_an_uplink_is_shared_and_a_downlink_too() -> None:
    fast, slow = Link(latency_ms=0, bandwidth_mbps=None), Link(latency_ms=0, up_mbps=8, down_mbps=80)  # 1 and 10 MB/s
    world = World(slow, fast, fast)
    world.carry(0, 1, 100_000, "a")
    world.carry(0, 2, 100_000, "b")
    assert world.run() == [("a", 100.0), ("b", 200.0)]
    world.carry(1, 0, 100_000, "a")
    world.carry(2, 0, 100_000, "b")
    assert [(name, round(at, 3) % 1000) for name, at in world.run()] == [("a", 10.0), ("b", 20.0)]


def test_a_downlink_serves_in_order_of_arrival() -> None:
    """What was sent first from afar does not hold up what comes from next door."""
    world = World(Link(latency_ms=0, bandwidth_mbps=8), Link(latency_ms=400), Link(latency_ms=2))
    world.carry(1, 0, 100_000, "far")
    world.carry(2, 0, 100_000, "near")
    assert world.run() == [("near", 101.0), ("far", 300.0)]


def test_a_packet_does_not_wait_behind_bulk_but_uses_its_share() -> None:
    world = World(*[Link(latency_ms=0, up_mbps=8)] * 2)
    world.carry(0, 1, 1_000_000, "bulk")
    world.carry(0, 1, 1000, "packet")
    world.carry(0, 1, 1_000_000, "more")
    assert world.run() == [("packet", 1.0), ("bulk", 1000.0), ("more", 2001.0)]


def test_an_override_has_a_bandwidth_of_its_own() -> None:
    world = World(*[Link(latency_ms=0)] * 3)
    world.network.override("slow", world.hosts[:1], world.hosts[1:2], Link(latency_ms=5, bandwidth_mbps=8))
    for target in (1, 2):
        for name in "ab":
            world.carry(0, target, 100_000, f"{name}{target}")
    assert world.run() == [("a2", 0), ("b2", 0), ("a1", 105.0), ("b1", 205.0)]


# --- messages ---------------------------------------------------------------------------------------------------------


def cast(world: World, count: int) -> list[int]:
    """Messages 0 … count−1, a millisecond apart; returns what arrived, in order."""
    path, last = world.path(0, 1), 0

    def one(n: int) -> None:
        nonlocal last
        _, last = path.cast(100, last, world.note, (n,))

    for n in range(count):
        world.loop.post(world.loop.now_ns + n * MS, one, (n,))
    return [name for name, _ in world.run()]


def test_messages_are_lost_and_duplicated_as_often_as_asked() -> None:
    got = Counter(cast(World(*[Link(latency_ms=(1, 50), loss=0.2, duplicate=0.1)] * 2), 5000))
    assert abs(len(got) / 5000 - 0.8) < 0.02
    assert abs(sum(n == 2 for n in got.values()) / len(got) - 0.1) < 0.02 and max(got.values()) == 2


def test_messages_keep_their_order_unless_reordered() -> None:
    assert cast(World(*[Link(latency_ms=(1, 50))] * 2), 500) == list(range(500))
    got = cast(World(*[Link(latency_ms=(1, 50), reorder=0.1)] * 2), 500)
    assert sorted(got) == list(range(500)) and 20 < sum(b < a for a, b in zip(got, got[1:])) < 80


# --- cuts and overrides -----------------------------------------------------------------------------------------------


def test_cuts_add_up_and_may_be_one_way() -> None:
    world = World(*[Link()] * 4)
    network, (a, b, c, d) = world.network, world.hosts
    paths = {(x, y): x.path_to(y) for x in world.hosts for y in world.hosts}

    def cut() -> set[str]:
        assert all(path.cut == network.is_cut(*ends) for ends, path in paths.items())
        return {f"{x.name[1]}{y.name[1]}" for (x, y), path in paths.items() if path.cut}

    assert cut() == set()
    network.cut("one", [a], [b, c], one_way=True)
    assert cut() == {"01", "02"}
    network.cut("two", [a, b], [c, d])
    assert cut() == {"01", "02", "03", "12", "13", "20", "21", "30", "31"}
    network.mend("one")
    assert cut() == {"02", "03", "12", "13", "20", "21", "30", "31"}
    network.mend("one")
    network.mend("two")
    assert cut() == set()
    network.cut("self", [a, b], [a, b])
    assert cut() == {"01", "10"}  # nobody is cut off from himself


def test_a_cut_loses_messages_at_once() -> None:
    world = World(*[Link(latency_ms=1)] * 2)
    world.network.cut("x", world.hosts[:1], world.hosts[1:])
    assert cast(world, 10) == []
    world.network.mend("x")
    assert cast(world, 10) == list(range(10))


def test_the_newest_override_wins_and_each_can_go() -> None:
    world = World(*[Link(latency_ms=1)] * 2)
    network, (a, b) = world.network, world.hosts

    def latencies() -> tuple[float, float]:
        return a.path_to(b).latency_ns() / MS, b.path_to(a).latency_ns() / MS

    assert latencies() == (1, 1)
    network.override("slow", [a], [b], Link(latency_ms=10))
    network.override("slower", [b], [a], Link(latency_ms=100), one_way=True)
    assert latencies() == (10, 100)
    network.restore("slow")
    assert latencies() == (1, 100)
    network.restore("slow")
    network.restore("slower")
    assert latencies() == (1, 1)


def test_hosts_have_addresses_and_names_of_their_own() -> None:
    world = World(*[Link()] * 300)
    assert world.hosts[0].address == "10.0.0.1" and world.hosts[299].address == "10.0.1.44"
    assert world.network.at_address("10.0.1.44:7447") == (world.hosts[299], 7447)
    for address in ("10.9.9.9:1", "10.0.0.1", "", ":", "name:7"):
        assert world.network.at_address(address)[0] is None
    with pytest.raises(ValueError, match="h3"):
        world.network.add_host("h3")


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def host() -> Iterator[tuple[SimLoop, SimHost]]:
    world = World(Link())
    yield world.loop, world.hosts[0]
    world.loop.finish()


def test_a_killed_process_unwinds_and_then_is_no_more(host: tuple[SimLoop, SimHost]) -> None:
    loop, machine = host
    seen: list[str] = []

    async def work() -> None:
        loop.call_later(5, seen.append, "timer of the dead")
        try:
            await asyncio.sleep(100)
        finally:
            seen.append("unwound")

    life = machine.begin_life("first")
    with machine.inside():
        loop.create_task(work())
    loop.run_until(1.0)
    machine.kill()
    assert life.killed and machine.life is None
    loop.run_until(1.0)
    assert seen == ["unwound"] and life.dead
    loop.run_until(10.0)
    assert seen == ["unwound"] and loop.errors == []


def test_a_paused_process_can_be_killed(host: tuple[SimLoop, SimHost]) -> None:
    loop, machine = host
    life = machine.begin_life("first")
    with machine.inside():
        loop.create_task(asyncio.sleep(5))
    machine.pause()
    loop.run_until(10.0)
    assert life.paused and len(life.tasks()) == 1
    machine.kill()
    loop.run_until(11.0)
    assert life.dead and not life.tasks()


def test_a_task_that_survives_its_death_is_reported(host: tuple[SimLoop, SimHost]) -> None:
    loop, machine = host

    async def mule() -> None:
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass

    machine.begin_life("stubborn")
    with machine.inside():
        task = loop.create_task(mule(), name="mule")
    loop.run_until(1.0)
    machine.kill()
    loop.run_until(30.0)
    assert len(loop.errors) == 1 and "stubborn was killed, and mule" in loop.errors[0]
    task._log_destroy_pending = False  # type: ignore[attr-defined]


# --- the clock --------------------------------------------------------------------------------------------------------


def test_work_is_done_one_piece_at_a_time_in_order(host: tuple[SimLoop, SimHost]) -> None:
    loop, machine = host
    clock, seen = SimClock(loop), list[tuple[str, float]]()

    async def main() -> None:
        def work(name: str) -> str:
            seen.append((name, clock.now()))
            return name

        jobs = [
            asyncio.ensure_future(clock.run(lambda n=n: work(n), cost_s=c)) for n, c in (("a", 2), ("b", 0), ("c", 1))
        ]
        await asyncio.sleep(0)
        assert clock.busy
        assert await asyncio.gather(*jobs) == ["a", "b", "c"]
        assert not clock.busy

    loop.run_until_complete(main())
    assert seen == [("a", 2.0), ("b", 2.0), ("c", 3.0)]


def test_work_that_has_begun_is_done_though_nobody_waits(host: tuple[SimLoop, SimHost]) -> None:
    loop, machine = host
    clock, seen = SimClock(loop), list[str]()

    def fails() -> None:
        raise ValueError("seen by nobody")

    async def main() -> None:
        begun = asyncio.ensure_future(clock.run(lambda: seen.append("begun"), cost_s=2))
        waiting = asyncio.ensure_future(clock.run(lambda: seen.append("waiting"), cost_s=2))
        failing = asyncio.ensure_future(clock.run(fails, cost_s=1))
        await asyncio.sleep(1)
        begun.cancel()
        waiting.cancel()
        with pytest.raises(ValueError, match="nobody"):
            await failing
        assert clock.now() == 3.0
        failing = asyncio.ensure_future(clock.run(fails, cost_s=1))
        await asyncio.sleep(0.5)
        failing.cancel()
        await asyncio.sleep(1)

    loop.run_until_complete(main())
    assert seen == ["begun"]
    assert len(loop.errors) == 1 and "nobody waits" in loop.errors[0]
    loop.errors.clear()


def test_a_slow_disk_holds_the_worker_up(host: tuple[SimLoop, SimHost]) -> None:
    loop, machine = host
    delays = [3.0, 0.0]
    clock = SimClock(loop, lambda: delays.pop(0))

    async def main() -> list[float]:
        async def one() -> float:
            await clock.run(int, cost_s=1)
            return clock.now()

        return list(await asyncio.gather(one(), one()))

    assert loop.run_until_complete(main()) == [4.0, 5.0]


def test_work_stops_with_its_process(host: tuple[SimLoop, SimHost]) -> None:
    loop, machine = host
    clock, seen = SimClock(loop), list[tuple[str, float]]()

    def begin(name: str, cost_s: float) -> None:
        with machine.inside():
            loop.create_task(clock.run(lambda: seen.append((name, clock.now())), cost_s=cost_s))

    machine.begin_life("one")
    begin("paused", 1)
    loop.run_until(0.5)
    machine.pause()
    loop.run_until(5.0)
    assert seen == []
    machine.resume()
    begin("killed", 5)
    begin("never begun", 5)
    loop.run_until(7.0)
    machine.kill()
    clock.reset()
    machine.begin_life("two")
    begin("next life", 1)
    loop.run_until(20.0)
    assert seen == [("paused", 5.0), ("next life", 8.0)]


def test_the_wall_clock_may_be_wrong_and_time_is_not(host: tuple[SimLoop, SimHost]) -> None:
    loop, _ = host
    clock = SimClock(loop)
    clock.skew_s, clock.drift_ppm = -100.0, 50.0
    loop.run_until_complete(clock.sleep(1000.0))
    assert clock.now() == 1000.0
    assert clock.wall() == pytest.approx(EPOCH + 1000.0 - 100.0 + 0.05, abs=1e-6)
