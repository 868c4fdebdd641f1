"""Records and Swim messages as bytes: round trips, who may sign what, limits, and any bytes at all."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol import limits
from shoal.protocol.errors import PeerFault
from shoal.protocol.identity import Identity
from shoal.protocol.membership import Kind, Message, Record, State
from shoal.protocol.membership_wire import (
    decode,
    encode,
    open_record,
    open_summary,
    sign_record,
)
from shoal.protocol.signing import sign_body
from shoal.protocol.wire_pb2 import MemberRecord, Signed, Summary, Swim

RUN = b"r" * 32
ALICE, BOB, EVE = (Identity.generate(bytes([n]) * 32) for n in (1, 2, 3))
WORD = Record(
    ALICE.peer_id, State.ALIVE, 5, 3, b"b" * 16, ("a.example:1", "[2001:db8::1]:2"), samples_per_s=2.5
)  # fmt: skip
REPORT = Record(ALICE.peer_id, State.SUSPECT, 5, 3, reporter=BOB.peer_id)


def signed_by(identity: Identity, role: str, **fields: object) -> Signed:
    wire = MemberRecord(**{"peer": ALICE.peer_id, "state": 1, "incarnation": 5, "counter": 3, **fields})  # type: ignore[arg-type]
    return sign_body(identity, "member", role, RUN, wire.SerializeToString())


@pytest.mark.parametrize(
    ("identity", "record"),
    [
        (ALICE, WORD),
        (ALICE, replace(WORD, state=State.LEFT)),
        (BOB, REPORT),
        (BOB, replace(REPORT, state=State.DEAD)),
    ],
)
def test_round_trip(identity: Identity, record: Record) -> None:
    signed = sign_record(identity, RUN, record)
    assert replace(signed, signed=b"") == record
    message = Message(Kind.ACK, 2**63, "target", (signed, record), Summary(round=4, lineage=b"l" * 32))
    wire = Swim.FromString(encode(message).SerializeToString())
    assert decode(wire, RUN) == replace(message, rumours=(signed,))  # what is not signed is not sent


@pytest.mark.parametrize("state", ["alive", "left"])
def test_only_the_subject_says_that_it_lives_or_leaves(state: str) -> None:
    number = State[state.upper()]
    open_record(signed_by(ALICE, state, state=number), RUN)
    for forged in (
        signed_by(EVE, state, state=number),
        signed_by(EVE, state, state=number, reporter=EVE.peer_id),
        signed_by(ALICE, "dead", state=number),
    ):
        with pytest.raises(PeerFault, match="bad_signature"):
            open_record(forged, RUN)
    with pytest.raises(PeerFault, match="bad_signature"):
        open_record(signed_by(ALICE, state, state=number), b"other run".ljust(32))


@pytest.mark.parametrize("state", ["suspect", "dead"])
def test_reports_are_signed_by_their_reporter_and_are_never_about_itself(state: str) -> None:
    number = State[state.upper()]
    opened = open_record(signed_by(BOB, state, state=number, reporter=BOB.peer_id, addresses=["x"], boot_id=b"1"), RUN)
    assert opened.reporter == BOB.peer_id and opened.addresses == () and opened.boot_id == b""
    with pytest.raises(PeerFault, match="bad_signature"):
        open_record(signed_by(EVE, state, state=number, reporter=BOB.peer_id), RUN)
    for reporter in ("", ALICE.peer_id):
        with pytest.raises(PeerFault, match="without a reporter"):
            open_record(signed_by(ALICE, state, state=number, reporter=reporter), RUN)


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({"state": 0}, "bad_rumour", "state 0"),
        ({"state": 9}, "bad_rumour", "state 9"),
        ({"peer": ""}, "bad_rumour", "impossible length"),
        ({"peer": "x" * (limits.PEER_ID_CHARS_MAX + 1)}, "bad_rumour", "impossible length"),
        ({"peer": "nobody"}, "bad_peer_id", "Ed25519"),
        ({"reporter": "x" * (limits.PEER_ID_CHARS_MAX + 1)}, "bad_rumour", "reporter of impossible length"),
        ({"counter": 0}, "bad_rumour", "impossible numbers"),
        ({"counter": limits.INT64_MAX + 1}, "bad_rumour", "impossible numbers"),
        ({"incarnation": limits.INT64_MAX + 1}, "bad_rumour", "impossible numbers"),
        ({"boot_id": b"short"}, "bad_rumour", "boot id of 5 bytes"),
        ({"addresses": ["a:1"] * (limits.ADDRESSES_MAX + 1)}, "bad_rumour", "9 addresses"),
        ({"addresses": ["nowhere"]}, "bad_rumour", "not host:port"),
        ({"samples_per_s": -1.0}, "bad_rumour", "impossible speed"),
        ({"samples_per_s": math.inf}, "bad_rumour", "impossible speed"),
        ({"samples_per_s": math.nan}, "bad_rumour", "impossible speed"),
    ],
)
def test_what_no_honest_peer_signs(fields: dict[str, object], kind: str, says: str) -> None:
    with pytest.raises(PeerFault, match=says) as caught:
        open_record(signed_by(ALICE, "alive", **fields), RUN)
    assert caught.value.kind == kind


def test_a_record_cannot_carry_more_than_the_largest_honest_one() -> None:
    """Records are kept and passed on as they came: padding in unknown fields would be kept by everybody."""
    host = ".".join(["h" * 63] * 3 + ["h" * 61])
    largest = replace(
        WORD,
        incarnation=limits.INT64_MAX,
        counter=limits.INT64_MAX,
        addresses=tuple(f"{host}:{60000 + n}" for n in range(limits.ADDRESSES_MAX)),
    )
    assert open_record(Signed.FromString(sign_record(ALICE, RUN, largest).signed), RUN).addresses == largest.addresses
    padding = b"\xfa\x07\xe0\x12" + bytes(2400)  # field 127, which nobody knows
    body = MemberRecord(peer=ALICE.peer_id, state=MemberRecord.ALIVE, counter=1).SerializeToString() + padding
    assert len(body) > limits.MEMBER_RECORD_BYTES_MAX
    with pytest.raises(PeerFault, match="record of"):
        open_record(sign_body(ALICE, "member", "alive", RUN, body), RUN)
    assert limits.RUMOURS_PER_MESSAGE_MAX * (limits.MEMBER_RECORD_BYTES_MAX + 80) < limits.MESSAGE_BYTES_MAX


def test_a_record_that_is_no_protobuf() -> None:
    with pytest.raises(PeerFault, match="bad_rumour"):
        open_record(sign_body(ALICE, "member", "alive", RUN, b"\xff"), RUN)


@pytest.mark.parametrize(
    "wire",
    [
        Swim(),
        Swim(kind=7),  # type: ignore[arg-type]
        Swim(kind=Swim.PING, target="x" * (limits.PEER_ID_CHARS_MAX + 1)),
        Swim(kind=Swim.PING, rumours=[Signed()] * (limits.RUMOURS_PER_MESSAGE_MAX + 1)),
        Swim(kind=Swim.PING, rumours=[Signed()]),
    ],
)
def test_messages_over_their_limits(wire: Swim) -> None:
    with pytest.raises(PeerFault, match="bad_rumour"):
        decode(wire, RUN)


@pytest.mark.parametrize(
    "summary",
    [
        Summary(lineage=b"x"),
        Summary(state_hash=b"x" * 33),
        Summary(round=2**63),
        Summary(open_round=2**63),
        Summary(total_weight=2**64 - 1),
        Summary(samples=limits.WEIGHT_MAX + 1),
    ],
)
def test_impossible_summaries(summary: Summary) -> None:
    with pytest.raises(PeerFault, match="bad_summary"):
        decode(Swim(kind=Swim.PING, summary=summary), RUN)


def test_a_kept_summary_has_nothing_that_nobody_knows() -> None:
    padded = Summary.FromString(Summary(round=1).SerializeToString() + b"\xfa\x07\x03abc")
    assert padded.ByteSize() > open_summary(padded).ByteSize() == Summary(round=1).ByteSize()


@given(st.binary(max_size=300))
def test_any_bytes_as_a_message_are_a_message_or_a_fault(data: bytes) -> None:
    wire = Swim()
    try:
        wire.ParseFromString(data)
    except Exception:
        return  # the mesh's decoder says so of the whole envelope
    try:
        assert decode(wire, RUN).kind in Kind
    except PeerFault as fault:
        assert fault.kind in ("bad_rumour", "bad_signature", "bad_summary", "bad_peer_id")


@given(st.binary(max_size=300), st.sampled_from(["alive", "dead"]))
def test_any_signed_bytes_as_a_record_are_a_record_or_a_fault(body: bytes, role: str) -> None:
    try:
        open_record(sign_body(ALICE, "member", role, RUN, body), RUN)
    except PeerFault as fault:
        assert fault.kind in ("bad_rumour", "bad_signature", "bad_peer_id")


@given(
    st.builds(
        MemberRecord,
        peer=st.sampled_from([ALICE.peer_id, BOB.peer_id, "x", ""]),
        state=st.integers(0, 5),
        incarnation=st.integers(0, 2**64 - 1),
        counter=st.integers(0, 2**64 - 1),
        boot_id=st.sampled_from([b"", b"1" * 16, b"1"]),
        addresses=st.lists(st.sampled_from(["a:1", "[::1]:2", "", "a:99999", "[::g]:1"]), max_size=10),
        reporter=st.sampled_from([ALICE.peer_id, BOB.peer_id, "", "é" * 20]),
        samples_per_s=st.floats(),
    )
)
def test_any_fields_make_a_record_within_limits_or_a_fault(wire: MemberRecord) -> None:
    role = {1: "alive", 2: "suspect", 3: "dead", 4: "left"}.get(wire.state, "alive")
    try:
        record = open_record(sign_body(ALICE, "member", role, RUN, wire.SerializeToString()), RUN)
    except PeerFault:
        return
    assert (record.peer if record.is_word else record.reporter) == ALICE.peer_id
    assert 0 < record.counter <= limits.INT64_MAX and len(record.addresses) <= limits.ADDRESSES_MAX
    assert math.isfinite(record.samples_per_s) and record.samples_per_s >= 0
