"""The update store: nothing unchecked gets in, nothing grows past its bound, two headers under one dot are a proof."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.aggregation.compress import Compression
from shoal.node.swarm.updates import SUFFIX, UpdateStore
from shoal.protocol import limits
from shoal.protocol.ballot_messages import Encoding, Header, update_hash
from shoal.protocol.ballot_wire import parse_header
from shoal.protocol.errors import PeerFault
from shoal.protocol.identity import Identity
from shoal.protocol.signing import sign_body
from shoal.protocol.version import sha256
from shoal.protocol.wire_pb2 import Dot as WireDot
from shoal.protocol.wire_pb2 import Signed, UpdateHeader

RUN = sha256(b"run")
D = 10_000
SETTING = Compression(0.10, 4)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.open(tmp_path_factory.mktemp("identity") / "identity")


def signed(
    origin: Identity, seq: int, payload: bytes, *, round_: int = 1, size: int | None = None, dense: bool = False,
    run_id: bytes = RUN, weight: int = 5,
) -> Signed:  # fmt: skip
    encoding = Encoding.DENSE if dense else Encoding.SPARSE
    header = UpdateHeader(
        dot=WireDot(peer=origin.peer_id, incarnation=1, seq=seq),
        previous_head=bytes(32),
        round=round_,
        base_lineage=sha256(b"base"),
        weight=weight,
        encoding=encoding.value,  # pyright: ignore[reportArgumentType]
        payload_hash=sha256(payload),
        payload_size=len(payload) if size is None else size,
    )
    return sign_body(origin, "update", "origin", run_id, header.SerializeToString())


def make(**more) -> tuple[UpdateStore, list[tuple[Header, Header]]]:
    proofs: list[tuple[Header, Header]] = []
    values = {"run_id": RUN, "d": D, "compression": SETTING, "bytes_max": 10_000, **more}
    return UpdateStore(**values, equivocation=lambda a, b: proofs.append((a, b))), proofs


def receive(store: UpdateStore, wire: Signed, payload: bytes, piece: int = 100) -> Header:
    receiving = store.begin(wire)
    for at in range(0, len(payload), piece):
        receiving.feed(payload[at : at + piece])
    return receiving.finish()


def test_what_was_received_is_held_by_its_hash(origin: Identity) -> None:
    store, proofs = make()
    wire = signed(origin, 1, b"p" * 777)
    header = receive(store, wire, b"p" * 777)
    assert header.update_hash == update_hash(wire) and store.has(header.update_hash)
    assert store.load(header.update_hash) == (header, b"p" * 777)
    receive(store, wire, b"p" * 777)  # again: nothing changes
    assert not proofs
    with pytest.raises(KeyError):
        store.load(sha256(b"unknown"))


def test_a_dense_update_has_no_payload_of_its_own(origin: Identity) -> None:
    store, _ = make()
    receiving = store.begin(signed(origin, 1, b"d" * 4 * D, dense=True))
    assert receiving.size == 0
    with pytest.raises(PeerFault):
        receiving.feed(b"x")
    receiving = store.begin(signed(origin, 1, b"d" * 4 * D, dense=True))
    assert store.load(receiving.finish().update_hash)[1] == b""


def test_another_signer_another_run_or_a_broken_signature_gets_nowhere(origin: Identity, tmp_path: Path) -> None:
    store, _ = make()
    wire = signed(origin, 1, b"p")
    other = Identity.open(tmp_path / "identity")
    forged = sign_body(other, "update", "origin", RUN, wire.body)
    for bad in (
        forged,
        signed(origin, 1, b"p", run_id=sha256(b"other run")),
        Signed(body=wire.body, signature=bytes(64)),
    ):
        with pytest.raises(PeerFault):
            store.begin(bad)


def test_a_size_that_no_honest_peer_can_have_is_refused_before_a_byte(origin: Identity) -> None:
    store, _ = make()
    most = store.payload_bytes_max(Encoding.SPARSE)
    store.begin(signed(origin, 1, b"", size=most))
    with pytest.raises(PeerFault, match="at most"):
        store.begin(signed(origin, 2, b"", size=most + 1))
    with pytest.raises(PeerFault):
        store.begin(signed(origin, 3, b"", size=4 * D + 1, dense=True))


def test_a_byte_too_many_too_few_or_wrong_is_the_senders_fault(origin: Identity) -> None:
    store, _ = make()
    wire = signed(origin, 1, b"payload")
    receiving = store.begin(wire)
    receiving.feed(b"payloa")
    with pytest.raises(PeerFault, match="6 of 7"):
        receiving.finish()
    with pytest.raises(PeerFault, match="8 bytes"):
        receiving.feed(b"d!")
    for bad in (b"Payload", b"payloax"):
        receiving = store.begin(wire)
        receiving.feed(bad)
        with pytest.raises(PeerFault):
            receiving.finish()
    receiving = store.begin(wire)
    with pytest.raises(PeerFault):
        receiving.feed(b"")  # would go on for ever
    assert not store.has(update_hash(wire))


@given(st.binary(max_size=200), st.binary(max_size=80))
def test_any_bytes_for_a_header_end_in_the_declared_error(body: bytes, signature: bytes) -> None:
    store, _ = make()
    with pytest.raises(PeerFault):
        store.begin(Signed(body=body, signature=signature))


def test_two_headers_under_one_dot_are_handed_over_once_before_any_payload(origin: Identity) -> None:
    store, proofs = make()
    first, second, third = (signed(origin, 1, b"payload", weight=w) for w in (1, 2, 3))
    receive(store, first, b"payload")
    receiving = store.begin(second)
    assert [(a.update_hash, b.update_hash) for a, b in proofs] == [(update_hash(first), update_hash(second))]
    receiving.feed(b"payload")
    receiving.finish()  # a commit may name this variant: it is held all the same
    assert store.has(update_hash(first)) and store.has(update_hash(second))
    store.begin(second)
    assert len(proofs) == 1
    store.begin(third)
    assert len(proofs) == 2


def test_a_dot_is_remembered_longer_than_its_payload(origin: Identity) -> None:
    store, proofs = make()
    receive(store, signed(origin, 1, b"a"), b"a")
    store.drop_before(100)
    store.begin(signed(origin, 1, b"b", round_=101))
    assert len(proofs) == 1


def test_what_nobody_asked_for_is_a_proof_under_a_known_dot_and_else_forgotten(origin: Identity) -> None:
    store, proofs = make()
    store.witness(parse_header(signed(origin, 1, b"one")))
    store.suspect(Signed.FromString(parse_header(signed(origin, 1, b"one")).signed))
    store.suspect(signed(origin, 2, b"of another dot"))
    assert not proofs and len(store._headers) == 1
    other = signed(origin, 1, b"two")
    store.suspect(other)
    assert [(a.dot, a.dot == b.dot, a.signed != b.signed) for a, b in proofs] == [(parse_header(other).dot, True, True)]
    with pytest.raises(PeerFault):
        store.suspect(Signed(body=other.body, signature=bytes(64)))


def test_remembered_headers_are_bounded(origin: Identity) -> None:
    store, _ = make()
    header = parse_header(signed(origin, 1, b""))
    for seq in range(limits.HEADERS_KEPT_MAX + 50):
        store.witness(replace(header, dot=replace(header.dot, seq=seq + 1)))
    for i in range(limits.HEADERS_KEPT_MAX + 50):
        store.witness(replace(header, dot=replace(header.dot, seq=limits.HEADERS_KEPT_MAX + 50), signed=b"%d" % i))
    assert len(store._headers) == limits.HEADERS_KEPT_MAX and len(store._proved) == limits.HEADERS_KEPT_MAX


def test_the_oldest_rounds_go_first_and_the_present_round_stays_whole(origin: Identity) -> None:
    store, _ = make(bytes_max=2500)
    old = [receive(store, signed(origin, s, b"o" * 1000, round_=s), b"o" * 1000) for s in (1, 2)]
    new = [receive(store, signed(origin, s, bytes([s]) * 1000, round_=9), bytes([s]) * 1000) for s in (3, 4, 5)]
    assert not any(store.has(h.update_hash) for h in old)
    assert all(store.has(h.update_hash) for h in new)  # over the bound, but one round is kept whole
    store.drop_before(9)
    assert all(store.has(h.update_hash) for h in new)
    store.drop_before(10)
    assert not any(store.has(h.update_hash) for h in new) and store._bytes == 0


def test_beyond_the_memory_bound_payloads_live_in_files(origin: Identity, tmp_path: Path) -> None:
    (tmp_path / f"left{SUFFIX}").write_bytes(b"over")
    store, _ = make(bytes_max=5000, memory_bytes_max=1500, folder=tmp_path)
    assert not list(tmp_path.iterdir())
    held = [receive(store, signed(origin, s, bytes([s]) * 1000, round_=s), bytes([s]) * 1000) for s in range(1, 6)]
    assert store._memory_bytes == 1000 and len(list(tmp_path.iterdir())) == 4
    for s, header in enumerate(held, 1):
        assert store.load(header.update_hash)[1] == bytes([s]) * 1000
    receive(store, signed(origin, 6, b"\6" * 1000, round_=6), b"\6" * 1000)
    assert not store.has(held[0].update_hash) and len(list(tmp_path.iterdir())) == 4
    store.drop_before(100)
    assert not list(tmp_path.iterdir()) and (store._bytes, store._memory_bytes) == (0, 0)


def test_a_damaged_or_missing_file_is_not_held_and_a_full_disk_keeps_memory(origin: Identity, tmp_path: Path) -> None:
    store, _ = make(memory_bytes_max=0, folder=tmp_path)
    one = receive(store, signed(origin, 1, b"one"), b"one")
    two = receive(store, signed(origin, 2, b"two"), b"two")
    (tmp_path / f"{one.update_hash.hex()}{SUFFIX}").write_bytes(b"eno")
    (tmp_path / f"{two.update_hash.hex()}{SUFFIX}").unlink()
    for header in (one, two):
        with pytest.raises(KeyError):
            store.load(header.update_hash)
        assert not store.has(header.update_hash)
    assert store._bytes == 0
    (tmp_path / "gone").mkdir()
    store, _ = make(memory_bytes_max=0, folder=tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    kept = receive(store, signed(origin, 3, b"three"), b"three")
    assert store.load(kept.update_hash)[1] == b"three"
