"""Records of the DHT are believed only when their subject signed them; the DHT itself may fail in any way."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol import dht, limits
from shoal.protocol.dht import Dht, read_record, sign_addresses
from shoal.protocol.errors import ExitCode, PeerFault, ShoalError
from shoal.protocol.identity import Identity
from shoal.protocol.invite import check_address
from shoal.protocol.signing import sign_body

RUN = bytes(range(32))
ANN, BOB = (Identity.generate(bytes([n]) * 32) for n in range(2))
ADDRESSES = ["10.0.0.1:7", "[fd00::1]:7", "box.example.org:7"]
GOOD = sign_addresses(ANN, RUN, ADDRESSES)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([ANN.peer_id, "a:1"]),
    lambda inner: (
        st.lists(inner, max_size=10) | st.dictionaries(st.sampled_from(["peer", "addresses"]), inner, max_size=2)
    ),
    max_leaves=12,
)


def signed_body(body: object) -> bytes:
    return sign_body(ANN, "dht", "peer", RUN, json.dumps(body).encode()).SerializeToString()


# --- records -----------------------------------------------------------------------------------------------------------


def test_a_record_gives_back_its_addresses() -> None:
    assert read_record(ANN.peer_id, GOOD, RUN) == ADDRESSES
    longest = [f"{'a.' * 126}{n}:65535" for n in range(limits.ADDRESSES_MAX)]
    assert read_record(ANN.peer_id, sign_addresses(ANN, RUN, longest), RUN) == longest


@pytest.mark.parametrize(
    ("peer", "record", "run", "kind"),
    [
        (BOB.peer_id, GOOD, RUN, "bad_signature"),
        (ANN.peer_id, GOOD, bytes(32), "bad_signature"),
        (ANN.peer_id, GOOD[:-1], RUN, "bad_dht_record"),
        (ANN.peer_id, b"", RUN, "bad_signature"),
        (ANN.peer_id, bytes(limits.DHT_RECORD_BYTES_MAX + 1), RUN, "bad_dht_record"),
        ("nobody", GOOD, RUN, "bad_peer_id"),
        (ANN.peer_id, signed_body({"peer": BOB.peer_id, "addresses": []}), RUN, "bad_dht_record"),
        (ANN.peer_id, signed_body({"peer": ANN.peer_id, "addresses": ["a:1"] * 9}), RUN, "bad_dht_record"),
        (ANN.peer_id, signed_body({"peer": ANN.peer_id, "addresses": ["a b:1"]}), RUN, "bad_dht_record"),
        (ANN.peer_id, signed_body({"peer": ANN.peer_id, "addresses": "a:1"}), RUN, "bad_dht_record"),
        (ANN.peer_id, signed_body({"peer": ANN.peer_id, "addresses": [7]}), RUN, "bad_dht_record"),
        (ANN.peer_id, signed_body({"peer": ANN.peer_id}), RUN, "bad_dht_record"),
        (ANN.peer_id, signed_body([]), RUN, "bad_dht_record"),
    ],
)
def test_any_other_record_is_a_fault_of_its_writer(peer: str, record: bytes, run: bytes, kind: str) -> None:
    with pytest.raises(PeerFault) as fault:
        read_record(peer, record, run)
    assert fault.value.kind == kind


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_at_worst_a_fault(record: bytes) -> None:
    with pytest.raises(PeerFault):
        read_record(ANN.peer_id, record, RUN)


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(at: int, change: int) -> None:
    bent = bytearray(GOOD)
    bent[at] ^= change
    with pytest.raises(PeerFault):
        read_record(ANN.peer_id, bytes(bent), RUN)


@given(JSON)
def test_what_a_peer_signs_is_still_checked(body: object) -> None:
    try:
        addresses = read_record(ANN.peer_id, signed_body(body), RUN)
    except PeerFault:
        return
    assert len(addresses) <= limits.ADDRESSES_MAX and all(check_address(a) == a for a in addresses)


def test_deep_nesting_is_a_fault() -> None:
    deep = sign_body(ANN, "dht", "peer", RUN, b"[" * 3000).SerializeToString()
    with pytest.raises(PeerFault, match="bad_dht_record"):
        read_record(ANN.peer_id, deep, RUN)


# --- the node, without a network ---------------------------------------------------------------------------------------


class FakeNode:
    """Stands for hivemind's DHTNode."""

    def __init__(self, stored: object = None, error: Exception | None = None, hangs: bool = False) -> None:
        self.stored, self.error, self.hangs = stored, error, hangs

    async def _answer(self, value: object) -> object:
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return value

    async def store(self, key: str, record: bytes, expires: float, subkey: str) -> object:
        return await self._answer(read_record(subkey, record, RUN) == ADDRESSES)

    async def get(self, key: str, latest: bool) -> object:
        assert RUN.hex() in key and latest
        return await self._answer(self.stored)


def joined(node: FakeNode, rng: random.Random | None = None) -> Dht:
    here = Dht(BOB, Path("unused"), RUN, rng or random.Random(1))
    here._node = node
    return here


def test_records_that_do_not_verify_are_left_out() -> None:
    mine = sign_addresses(BOB, RUN, ["10.0.0.2:7"])
    found = {
        ANN.peer_id: SimpleNamespace(value=GOOD),
        BOB.peer_id: SimpleNamespace(value=mine),
        "nobody": SimpleNamespace(value=GOOD),
        5: SimpleNamespace(value=GOOD),
        "text": "not bytes",
    }
    assert asyncio.run(joined(FakeNode(SimpleNamespace(value=found))).find()) == {ANN.peer_id: ADDRESSES}


@pytest.mark.parametrize("stored", [None, SimpleNamespace(value=b"x"), SimpleNamespace(value=None)])
def test_nothing_stored_is_nobody_found(stored: object) -> None:
    assert asyncio.run(joined(FakeNode(stored)).find()) == {}


def records(count: int) -> dict[str, object]:
    """So many true ones."""
    peers = [Identity.generate(n.to_bytes(32, "big")) for n in range(1, count + 1)]
    return {peer.peer_id: sign_addresses(peer, RUN, ADDRESSES) for peer in peers}


def test_as_many_peers_as_are_wanted_are_taken_and_others_another_time() -> None:
    here = joined(FakeNode(SimpleNamespace(value=records(2 * limits.DHT_RECORDS_MAX))))
    first, second = asyncio.run(here.find()), asyncio.run(here.find())
    assert len(first) == len(second) == limits.DHT_RECORDS_MAX and first.keys() != second.keys()


def test_a_flood_of_other_records_does_not_hide_the_true_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put before them, where a reader of the first few would see nothing else; each is looked at, or has an equal chance."""
    flood = {f"flood {n}": b"x" for n in range(limits.DHT_CHECKED_MAX - 3)}
    node = FakeNode(SimpleNamespace(value={**flood, **records(3)}))
    assert asyncio.run(joined(node).find()) == dict.fromkeys(records(3), ADDRESSES)
    checked: list[str] = []

    def read(peer: str, record: bytes, run: bytes) -> list[str]:
        checked.append(peer)
        return read_record(peer, record, run)

    monkeypatch.setattr("shoal.protocol.dht.read_record", read)
    flood = {f"flood {n}": b"x" for n in range(4 * limits.DHT_CHECKED_MAX)}
    here = joined(FakeNode(SimpleNamespace(value={**flood, **records(3)})))
    found = [len(asyncio.run(here.find())) for _ in range(20)]
    assert len(checked) == 20 * limits.DHT_CHECKED_MAX and 5 < sum(found) < 30  # 15 expected, standard deviation 3.4


@pytest.mark.parametrize("node", [FakeNode(error=ConnectionResetError("p2pd died")), FakeNode(hangs=True)])
def test_a_dht_that_fails_or_hangs_is_nobody_found_and_nothing_stored(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dht, "CALL_SECONDS", 0.01)
    clock = SimpleNamespace(get_dht_time=lambda: 0.0)
    monkeypatch.setitem(sys.modules, "hivemind", SimpleNamespace(utils=clock))
    monkeypatch.setitem(sys.modules, "hivemind.utils", clock)

    async def scenario() -> None:
        assert await joined(node).find() == {}
        assert await joined(node).announce(ADDRESSES) is False

    asyncio.run(scenario())


def test_without_hivemind_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hivemind", None)

    async def scenario() -> None:
        here = Dht(ANN, Path("unused"), RUN, random.Random(1))
        with pytest.raises(ShoalError) as error:
            await here.start("/ip4/127.0.0.1/tcp/0", [])
        assert error.value.code is ExitCode.DEPENDENCY and "shoal[dht]" in error.value.todo
        await here.close()

    asyncio.run(scenario())


class FakeP2P:
    """Stands for hivemind's P2P."""

    def __init__(self) -> None:
        self.shut = 0

    async def get_visible_maddrs(self) -> list[str]:
        return ["/ip4/127.0.0.1/tcp/1/p2p/" + ANN.peer_id]

    async def shutdown(self) -> None:
        self.shut += 1


def test_a_failed_start_ends_its_process_and_closing_is_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    p2p, fails = FakeP2P(), [True]

    class Node(FakeNode):
        async def shutdown(self) -> None:
            raise RuntimeError("already down")

    async def create_p2p(**settings: object) -> FakeP2P:
        assert settings["identity_path"] == "key" and settings["initial_peers"] is None
        return p2p

    async def create_node(**settings: object) -> FakeNode:
        if fails.pop():
            raise RuntimeError("no bootstrap peer answers")
        return Node()

    modules = {
        "hivemind": SimpleNamespace(),
        "hivemind.dht": SimpleNamespace(),
        "hivemind.dht.node": SimpleNamespace(DHTNode=SimpleNamespace(create=create_node)),
        "hivemind.p2p": SimpleNamespace(P2P=SimpleNamespace(create=create_p2p)),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    async def scenario() -> None:
        here = Dht(ANN, Path("key"), RUN, random.Random(1))
        with pytest.raises(ShoalError) as error:
            await here.start("/ip4/127.0.0.1/tcp/0", [])
        assert error.value.code is ExitCode.UNREACHABLE and "no bootstrap peer answers" in error.value.values
        assert p2p.shut == 1
        await here.close()
        assert p2p.shut == 1
        fails.append(False)
        assert await here.start("/ip4/127.0.0.1/tcp/0", []) == ["/ip4/127.0.0.1/tcp/1/p2p/" + ANN.peer_id]
        with pytest.raises(RuntimeError, match="already down"):
            await here.close()
        assert p2p.shut == 2  # its process ends even so
        await here.close()

    asyncio.run(scenario())


# --- the real thing ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", [0o400, 0o600], ids=["0400", "0600"])
def test_two_peers_find_each_other_through_a_real_dht(tmp_path: Path, mode: int) -> None:
    """With the identity files that the rest of the node uses, locked by it, under the same peer ids."""
    paths = [tmp_path / f"{name}.key" for name in ("first", "second")]
    identities = [Identity.open(path) for path in paths]
    for path in paths:
        path.chmod(mode)

    async def scenario() -> None:
        first, second = (Dht(i, p, RUN, random.Random(1)) for i, p in zip(identities, paths, strict=True))
        try:
            where = await asyncio.wait_for(first.start("/ip4/127.0.0.1/tcp/0", []), 60)
            assert where and all(identities[0].peer_id in address for address in where)
            await asyncio.wait_for(second.start("/ip4/127.0.0.1/tcp/0", where[:1]), 60)
            assert await first.announce(ADDRESSES[:1]) and await second.announce(ADDRESSES[1:])
            assert await second.find() == {identities[0].peer_id: ADDRESSES[:1]}
            assert await first.find() == {identities[1].peer_id: ADDRESSES[1:]}
            stranger = Dht(identities[1], paths[1], bytes(32), random.Random(1))
            stranger._node = second._node
            assert await stranger.find() == {}  # another run is another key
        finally:
            await second.close()
            await first.close()

    try:
        asyncio.run(scenario())
    finally:
        for identity in identities:
            identity.close()
