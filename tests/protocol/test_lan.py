"""What is believed of multicast DNS, and that announcing and withdrawing leave nothing behind."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zeroconf import NonUniqueNameException

from shoal.protocol import lan, limits
from shoal.protocol.identity import Identity
from shoal.protocol.invite import check_address
from shoal.protocol.lan import SERVICE, Lan, read_service

RUN = bytes(range(32))
TEXT = {b"run": RUN.hex()[:16].encode()}
ANN, BOB, CAT = (Identity.generate(bytes([n]) * 32).peer_id for n in range(3))
WORD = RUN.hex()[:16]


def named(peer: str) -> str:
    return f"{peer}.{SERVICE}"


def test_a_service_of_our_run_is_read() -> None:
    assert read_service(named(ANN), TEXT, ["10.0.0.1", "fd00::1"], 7, WORD) == (ANN, ["10.0.0.1:7", "[fd00::1]:7"])


@pytest.mark.parametrize(
    ("name", "text", "hosts", "port"),
    [
        (named(ANN), {b"run": b"0" * 16}, ["10.0.0.1"], 7),
        (named(ANN), {b"run": None}, ["10.0.0.1"], 7),
        (named(ANN), {}, ["10.0.0.1"], 7),
        (named(ANN), TEXT, ["10.0.0.1"], 0),
        (named(ANN), TEXT, ["10.0.0.1"], 65536),
        (named(ANN), TEXT, ["10.0.0.1"], -1),
        (named(ANN), TEXT, [], 7),
        (named(ANN), TEXT, ["0.0.0.0", "::", "fe80::1", "printer.local", "", "1.2.3.4:5", "::1%eth0"], 7),
        (named("printer"), TEXT, ["10.0.0.1"], 7),
        (named(ANN[:-1] + "l"), TEXT, ["10.0.0.1"], 7),
        (f"{ANN}._http._tcp.local.", TEXT, ["10.0.0.1"], 7),
        (ANN, TEXT, ["10.0.0.1"], 7),
        ("", TEXT, ["10.0.0.1"], 7),
        ("." * 300, TEXT, ["10.0.0.1"], 7),
    ],
)
def test_anything_else_is_nobody(name: str, text: dict[bytes, bytes | None], hosts: list[str], port: int) -> None:
    assert read_service(name, text, hosts, port, WORD) == ("", [])


def test_addresses_are_bounded_and_bad_ones_left_out() -> None:
    hosts = ["fe80::1", *(f"10.0.0.{n}" for n in range(1, 20))]
    peer, addresses = read_service(named(ANN), TEXT, hosts, 7, WORD)
    assert peer == ANN and addresses == [f"10.0.0.{n}:7" for n in range(1, limits.ADDRESSES_MAX)]


@given(
    st.text(max_size=80) | st.sampled_from([named(ANN), named(BOB)]),
    st.dictionaries(
        st.binary(max_size=4) | st.just(b"run"), st.none() | st.binary(max_size=20) | st.just(TEXT[b"run"])
    ),
    st.lists(st.text(max_size=50) | st.ip_addresses().map(str) | st.just("fe80::1%" + "x" * 300), max_size=12),
    st.integers(-(2**40), 2**40) | st.integers(1, 65535),
)
def test_whatever_is_read_can_be_dialled(
    name: str, text: dict[bytes, bytes | None], hosts: list[str], port: int
) -> None:
    peer, addresses = read_service(name, text, hosts, port, WORD)
    assert (peer == "") == (addresses == [])
    assert peer in ("", ANN, BOB) and len(addresses) <= limits.ADDRESSES_MAX
    assert all(check_address(a) == a for a in addresses)


def test_news_is_reported_once_and_never_about_ourselves() -> None:
    here, told = Lan(ANN, RUN, 7, ["10.0.0.1"]), []

    def tell(peer: str, addresses: list[str]) -> None:
        told.append((peer, addresses))

    here.heard(named(ANN), TEXT, ["10.0.0.1"], 7, tell)
    here.heard(named(BOB), TEXT, ["10.0.0.2"], 7, tell)
    here.heard(named(BOB), TEXT, ["10.0.0.2"], 7, tell)
    here.heard(named(BOB), {b"run": b"x"}, ["10.0.0.3"], 7, tell)
    here.heard(named(BOB), TEXT, ["10.0.0.4"], 8, tell)  # it moved
    assert told == [(BOB, ["10.0.0.2:7"]), (BOB, ["10.0.0.4:8"])]
    assert here.found == {BOB: ["10.0.0.4:8"]}


def test_a_flood_of_peers_is_bounded_and_known_ones_may_still_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LAN_FOUND_MAX", 1)
    here, told = Lan(ANN, RUN, 7, []), []
    for peer, host in ((BOB, "10.0.0.2"), (CAT, "10.0.0.3"), (BOB, "10.0.0.4")):
        here.heard(named(peer), TEXT, [host], 7, lambda p, a: told.append((p, a)))
    assert told == [(BOB, ["10.0.0.2:7"]), (BOB, ["10.0.0.4:7"])]


# --- zeroconf's side, without a network --------------------------------------------------------------------------------


class FakeZeroconf:
    """Stands for AsyncZeroconf: keeps what is registered, and can fail to."""

    made: list[FakeZeroconf]
    error: Exception | None = None

    def __init__(self, **_: object) -> None:
        self.zeroconf, self.services, self.closed = self, [], False
        FakeZeroconf.made.append(self)

    async def async_register_service(self, info: object, cooperating_responders: bool) -> asyncio.Future[None]:
        assert cooperating_responders
        if FakeZeroconf.error is not None:
            raise FakeZeroconf.error
        self.services.append(info)
        sent = asyncio.get_running_loop().create_future()
        sent.set_result(None)
        return sent

    async def async_unregister_all_services(self) -> None:
        self.services.clear()

    async def async_close(self) -> None:
        self.closed = True


class FakeBrowser:
    def __init__(self, zeroconf: FakeZeroconf, service: str, handlers: list) -> None:
        self.changed, self.cancelled = handlers[0], False
        zeroconf.browser = self

    async def async_cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeZeroconf]:
    FakeZeroconf.made, FakeZeroconf.error = [], None
    monkeypatch.setattr(lan, "AsyncZeroconf", FakeZeroconf)
    monkeypatch.setattr(lan, "AsyncServiceBrowser", FakeBrowser)
    return FakeZeroconf


def test_the_announcement_names_peer_run_and_dialable_addresses(fake: type[FakeZeroconf]) -> None:
    async def scenario() -> None:
        here = Lan(ANN, RUN, 7, ["10.0.0.1", "[fd00::1]", "box.example.org", "0.0.0.0", "fe80::1%eth0"])
        await here.start(lambda *_: None)
        (net,) = fake.made
        (info,) = net.services
        assert info.name == named(ANN) and info.port == 7 and info.properties[b"run"] == TEXT[b"run"]
        assert info.parsed_addresses() == ["10.0.0.1", "fd00::1"]
        assert read_service(info.name, info.properties, info.parsed_addresses(), info.port, WORD)[0] == ANN
        await here.close()
        assert net.closed and net.browser.cancelled and not net.services
        await here.close()  # again: nothing to do

    asyncio.run(scenario())


def test_without_an_address_it_only_browses(fake: type[FakeZeroconf]) -> None:
    async def scenario() -> None:
        here = Lan(ANN, RUN, 7, ["box.example.org"])
        await here.start(lambda *_: None)
        assert fake.made[0].services == [] and not fake.made[0].browser.cancelled
        await here.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [NonUniqueNameException(), OSError("no such device")])
def test_a_network_that_does_not_take_it_is_an_oserror_and_nothing_stays(
    fake: type[FakeZeroconf], error: Exception
) -> None:
    async def scenario() -> None:
        fake.error = error
        with pytest.raises(OSError, match=type(error).__name__):
            await Lan(ANN, RUN, 7, ["10.0.0.1"]).start(lambda *_: None)
        assert fake.made[0].closed

    asyncio.run(scenario())


class FakeInfo:
    """Stands for AsyncServiceInfo: what the network answers about a name."""

    answers: dict[str, object]

    def __init__(self, service: str, name: str) -> None:
        self.name, self.properties, self.port = name, TEXT, 7

    async def async_request(self, zeroconf: object, milliseconds: int) -> bool:
        answer = FakeInfo.answers[self.name]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        self.hosts = answer
        return bool(answer)

    def parsed_addresses(self) -> object:
        return self.hosts


def test_names_are_looked_up_and_failures_end_nothing(
    fake: type[FakeZeroconf], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        told: list[str] = []
        here = Lan(ANN, RUN, 7, [])
        await here.start(lambda peer, _: told.append(peer))
        monkeypatch.setattr(lan, "AsyncServiceInfo", FakeInfo)
        never = asyncio.Event()
        FakeInfo.answers = {
            "broken": OSError("gone"),
            "silent": [],
            "slow": never,
            named(BOB): ["10.0.0.2"],
            named(CAT): ["10.0.0.3"],
        }
        browser = fake.made[0].browser
        for name in ("broken", "silent", "slow", named(BOB)):
            browser.changed(None, SERVICE, name, lan.ServiceStateChange.Added)
        browser.changed(None, SERVICE, named(CAT), lan.ServiceStateChange.Removed)
        monkeypatch.setattr(limits, "LAN_LOOKUPS_MAX", 4)
        browser.changed(None, SERVICE, named(CAT), lan.ServiceStateChange.Added)  # too many at once: dropped
        for _ in range(5):
            await asyncio.sleep(0)
        assert told == [BOB] and len(here._looking) == 1
        await here.close()
        assert not here._looking
        await here._look(named(CAT), lambda peer, _: told.append(peer))  # a late event: nothing is asked
        assert told == [BOB]

    asyncio.run(scenario())


# --- the real thing ----------------------------------------------------------------------------------------------------


def own_address() -> str:
    """This machine's address towards others (no packet is sent), or loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def multicast_works(host: str) -> bool:
    """Whether a packet to mDNS's group, on a port of our own, comes back to this machine."""
    group = socket.inet_aton("224.0.0.251")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.bind(("", 0))
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group + socket.inet_aton(host))
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(host))
            probe.sendto(b"shoal", ("224.0.0.251", probe.getsockname()[1]))
            return probe.recv(16) == b"shoal"
        except OSError:
            return False


def test_two_peers_of_one_machine_find_each_other_where_multicast_works() -> None:
    """Elsewhere the announcement is made unheard, or OSError says that it cannot be made."""
    host = own_address()
    works = multicast_works(host)

    async def scenario() -> None:
        found: dict[str, list[str]] = {}
        both = asyncio.Event()

        def tell(peer: str, addresses: list[str]) -> None:
            found[peer] = addresses
            if len(found) == 2:
                both.set()

        peers = [Lan(ANN, RUN, 7, [host]), Lan(BOB, RUN, 8, [host]), Lan(CAT, bytes(32), 9, [host])]
        try:
            for peer in peers:
                await asyncio.wait_for(peer.start(tell), 30)
            if works:
                await asyncio.wait_for(both.wait(), 30)
                assert found == {ANN: [f"{host}:7"], BOB: [f"{host}:8"]}  # CAT is of another run
        except OSError as error:
            assert "multicast DNS" in str(error) and not works
        finally:
            for peer in peers:
                await asyncio.wait_for(peer.close(), 30)

    asyncio.run(scenario())
