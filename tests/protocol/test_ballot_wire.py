"""The ballot's messages survive the wire, and nothing else does."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocol import limits, wire_pb2
from shoal.protocol.ballot_messages import (
    Commit,
    CommittedUpdate,
    Convene,
    Encoding,
    Exchange,
    Header,
    Holding,
    Join,
    Propose,
    Roster,
    RosterEntry,
    Value,
    Vote,
    VotedFor,
    decode_value,
    parse_header,
    update_hash,
)
from shoal.protocol.ballot_record import BallotRecord, decode_record
from shoal.protocol.ballot_wire import BODIES, SPLIT_VOTE, decode, decode_header, encode, vote_signer
from shoal.protocol.errors import ExitCode, PeerFault, ShoalError
from shoal.protocol.identity import Identity
from shoal.protocol.signing import sign_body
from shoal.protocol.version import NO_HEAD, Dot, sha256

EXAMPLES = 10_000 if os.environ.get("SHOAL_LONG") else 150
RUN = sha256(b"run")
BASE = sha256(b"base")
STATE = sha256(b"state")
ME, OTHER = (Identity.generate(bytes([i]) * 32) for i in (1, 2))
A, B = ME.peer_id, OTHER.peer_id


def header_body(peer=A, **changes):
    fields = {
        "dot": wire_pb2.Dot(peer=peer, incarnation=1, seq=7),
        "previous_head": NO_HEAD,
        "round": 3,
        "base_lineage": BASE,
        "weight": 12,
        "encoding": Encoding.SPARSE.value,
        "payload_hash": sha256(b"payload"),
        "payload_size": 1000,
    }
    return wire_pb2.UpdateHeader(**(fields | changes)).SerializeToString()


def signed_header(identity=ME, **changes) -> wire_pb2.Signed:
    return sign_body(identity, "update", "origin", RUN, header_body(identity.peer_id, **changes))


def header(identity=ME, **changes) -> Header:
    return decode_header(signed_header(identity, **changes), RUN)


def value(**changes) -> Value:
    mine = header()
    fields = {
        "round": 3,
        "base_lineage": BASE,
        "previous_state_hash": STATE,
        "updates": (CommittedUpdate(mine.dot, mine.update_hash, mine.weight),),
        "roster": tuple(sorted((A, B))),
        "joiners": ("joiner",),
        "exchange": Exchange.RING_SPARSE,
    }
    return Value(**(fields | changes))


def vote(identity=ME, **changes) -> Vote:
    bare = Vote(identity.peer_id, 3, BASE, 2, value().hash, **changes)
    return replace(bare, signed=vote_signer(identity, RUN)(bare))


def messages():
    mine, theirs = header(), header(OTHER)
    entries = (RosterEntry(A, mine), RosterEntry(B, theirs))
    roster = Roster(A, 3, BASE, 2, entries, ("joiner",), Exchange.RING_SPARSE, "2 of 2 joined")
    return [
        Convene(3, BASE, 2, "time"),
        Join(A, 3, BASE, 2, None, None, STATE),
        Join(A, 3, BASE, 2, mine, VotedFor(1, value()), STATE),
        Join(A, 3, BASE, 2, mine, VotedFor(0, value(split=True), split=True), STATE),
        Join(A, 3, BASE, 0, None, None, STATE, observer=True),
        roster,
        replace(roster, entries=(entries[0], RosterEntry(B, None)), exchange=Exchange.NOTHING, bound_value=value()),
        Holding(A, 3, BASE, 2, (mine.update_hash, theirs.update_hash), (sha256(b"0"), sha256(b"1"))),
        Propose(A, 3, BASE, 2, value()),
        vote(),
        Commit(2, value(), (vote(), vote(OTHER))),
    ]


@pytest.mark.parametrize("message", messages(), ids=lambda m: type(m).__name__)
def test_a_message_comes_back_equal(message):
    envelope = wire_pb2.Envelope.FromString(encode(message, ME, RUN).SerializeToString())
    assert envelope.WhichOneof("body") in BODIES
    assert decode(envelope, A, RUN) == message
    if not isinstance(message, Commit):  # which proves itself, whoever brings it
        kinds = set()
        for peer, run_id in ((B, RUN), (A, sha256(b"another run"))):
            try:
                decode(envelope, peer, run_id)
            except PeerFault as fault:
                kinds.add(fault.kind)
        assert kinds or isinstance(message, Convene)


def test_votes_come_back_with_their_exact_bytes():
    cast = vote(split=True)
    assert decode(encode(cast, ME, RUN), A, RUN).signed == cast.signed == vote(split=True).signed


def test_another_body_is_a_routing_mistake():
    with pytest.raises(ValueError, match="swim"):
        decode(wire_pb2.Envelope(swim=wire_pb2.Swim()), A, RUN)


def bad(envelope: wire_pb2.Envelope, kind="bad_message") -> str:
    with pytest.raises(PeerFault) as caught:
        decode(envelope, A, RUN)
    assert caught.value.kind == kind
    return caught.value.detail


def resigned(name: str, role: str, change) -> wire_pb2.Envelope:
    """A message of that body, changed by its sender and properly signed."""
    source = next(e for e in (encode(m, ME, RUN) for m in messages()[2:]) if e.WhichOneof("body") == name)
    body = type_of(name).FromString(getattr(source, name).body)
    change(body)
    return wire_pb2.Envelope(**{name: sign_body(ME, name, role, RUN, body.SerializeToString())})


def type_of(name: str):
    return {"join": wire_pb2.Join, "roster": wire_pb2.Roster, "propose": wire_pb2.Propose, "vote": wire_pb2.Vote}[name]


JOIN_LIES = [
    (lambda j: setattr(j, "attempt", limits.ATTEMPTS_MAX + 1), "bad_message"),
    (lambda j: setattr(j, "round", 2**63), "bad_message"),
    (lambda j: setattr(j, "base_lineage", b"short"), "bad_message"),
    (lambda j: setattr(j, "state_hash", b""), "bad_message"),
    (lambda j: setattr(j, "peer", B), "wrong_signer"),
    (lambda j: setattr(j, "voted_attempt", 9), "bad_message"),
    (lambda j: setattr(j, "voted_attempt", SPLIT_VOTE), "bad_message"),
    (lambda j: setattr(j, "voted_attempt", 0), "bad_message"),
    (lambda j: setattr(j, "voted_value", b"junk"), "bad_message"),
    (lambda j: setattr(j, "voted_value", value(round=4).encoded), "bad_message"),
    (lambda j: setattr(j, "observer", True), "bad_message"),
    (lambda j: j.header.CopyFrom(signed_header(OTHER)), "wrong_signer"),
    (lambda j: j.header.CopyFrom(signed_header(round=4)), "bad_message"),
    (lambda j: setattr(j.header, "signature", bytes(64)), "bad_signature"),
    (lambda j: setattr(j.header, "body", b"\xff"), "bad_message"),
    (lambda j: setattr(j.header, "body", bytes(limits.HEADER_BYTES_MAX + 1)), "bad_message"),
]


@pytest.mark.parametrize(("change", "kind"), JOIN_LIES)
def test_lies_in_a_join(change, kind):
    bad(resigned("join", "member", change), kind)


ROSTER_LIES = [
    (lambda r: setattr(r, "convener", B), "wrong_signer"),
    (lambda r: r.ClearField("entries"), "bad_message"),
    (lambda r: r.entries.add(peer=A), "bad_message"),
    (lambda r: r.entries.add(peer=""), "bad_message"),
    (lambda r: r.entries.add(peer="p" * 65), "bad_message"),
    (lambda r: r.joiners.extend(f"p{i}" for i in range(limits.ROSTER_MAX)), "bad_message"),
    (lambda r: r.joiners.append(A), "bad_message"),
    (lambda r: setattr(r, "exchange", 0), "bad_message"),
    (lambda r: setattr(r, "exchange", 99), "bad_message"),
    (lambda r: setattr(r, "reason", "r" * 513), "bad_message"),
    (lambda r: setattr(r, "bound_value", b"junk"), "bad_message"),
    (lambda r: r.entries[0].header.CopyFrom(signed_header(OTHER)), "wrong_signer"),
]


@pytest.mark.parametrize(("change", "kind"), ROSTER_LIES)
def test_lies_in_a_roster(change, kind):
    bad(resigned("roster", "convener", change), kind)


def test_lies_in_other_messages():
    bad(resigned("propose", "convener", lambda p: setattr(p, "convener", B)), "wrong_signer")
    bad(resigned("propose", "convener", lambda p: setattr(p, "value", value(base_lineage=STATE).encoded)))
    bad(resigned("vote", "member", lambda v: setattr(v, "value_hash", b"")))
    bad(resigned("vote", "member", lambda v: setattr(v, "peer", "")))
    bad(resigned("vote", "member", lambda v: setattr(v, "peer", B)), "bad_signature")
    bad(encode(vote(OTHER), ME, RUN), "wrong_signer")
    bad(wire_pb2.Envelope(vote=wire_pb2.Signed(body=bytes(limits.HEADER_BYTES_MAX + 1))))
    bad(wire_pb2.Envelope(convene=wire_pb2.Convene(base_lineage=BASE, reason="r" * 513)))
    many = [sha256(bytes([i % 256, i // 256])) for i in range(limits.ROSTER_MAX + 1)]
    bad(wire_pb2.Envelope(holding=wire_pb2.Holding(peer=A, base_lineage=BASE, update_hashes=many)))
    bad(wire_pb2.Envelope(holding=wire_pb2.Holding(peer=A, base_lineage=BASE, chunk_hashes=[b"short"])))
    commit = encode(messages()[-1], ME, RUN).commit
    bad(
        wire_pb2.Envelope(commit=wire_pb2.Commit(value=commit.value, votes=[commit.votes[0]] * (limits.ROSTER_MAX + 1)))
    )
    bad(wire_pb2.Envelope(commit=wire_pb2.Commit(value=commit.value, attempt=limits.ATTEMPTS_MAX + 1)))
    bad(wire_pb2.Envelope(join=wire_pb2.Signed(body=bytes(limits.SIGNED_BODY_BYTES_MAX + 1))))


HEADER_LIES = [
    {"previous_head": b""},
    {"dot": wire_pb2.Dot(peer="", seq=1)},
    {"dot": wire_pb2.Dot(peer=A, seq=0)},
    {"dot": wire_pb2.Dot(peer=A, seq=1, incarnation=2**63)},
    {"weight": limits.WEIGHT_MAX + 1},
    {"payload_size": limits.UPDATE_BYTES_MAX + 1},
    {"encoding": 0},
    {"scale": float("nan")},
]


@pytest.mark.parametrize("changes", HEADER_LIES)
def test_lies_in_a_header(changes):
    with pytest.raises(PeerFault, match="bad_message"):
        parse_header(wire_pb2.Signed(body=header_body(**changes)))


def test_the_update_hash_covers_body_and_signature_alone():
    signed = signed_header()
    padded = wire_pb2.Signed.FromString(signed.SerializeToString() + b"\x9a\x06\x03abc")  # an unknown field
    assert update_hash(padded) == update_hash(signed) == header().update_hash
    assert decode_header(padded, RUN).signed == signed.SerializeToString()


# --- values -----------------------------------------------------------------------------------------------------------

VALUE_LIES = [
    {"roster": ()},
    {"roster": (B, A) if A < B else (A, B)},
    {"roster": (A,), "joiners": (A,)},
    {"roster": ("somebody",)},  # the update's origin is not on it
    {"joiners": tuple(sorted(f"p{i}" for i in range(limits.ROSTER_MAX)))},
    {"joiners": ("p" * 65,)},
    {"previous_state_hash": b""},
    {"chunk_hashes": (b"short",)},
    {"chunk_hashes": (STATE,) * (limits.CHUNKS_MAX + 1)},
    {"ring": ("p",) * (limits.ROSTER_MAX + 1)},
    {"updates": (CommittedUpdate(Dot(A, 1, 1), STATE, limits.WEIGHT_MAX + 1),)},
    {"updates": (CommittedUpdate(Dot(A, 1, 1), STATE, 1), CommittedUpdate(Dot(A, 1, 2), BASE, 1))},
]


@pytest.mark.parametrize("changes", VALUE_LIES)
def test_lies_in_a_value(changes):
    with pytest.raises(PeerFault, match="bad_message"):
        decode_value(value(**changes).encoded)


def test_a_value_has_one_encoding():
    good = value()
    assert decode_value(good.encoded) == good
    for encoded in (
        good.encoded + b"\x9a\x06\x03abc",  # an unknown field
        good.encoded + good.encoded[:2],  # the first field once more
        b"\xff",
        bytes(limits.SIGNED_BODY_BYTES_MAX + 1),
        wire_pb2.Value(base_lineage=BASE, previous_state_hash=STATE, roster=[A], exchange=77).SerializeToString(),
    ):
        with pytest.raises(PeerFault, match="bad_message"):
            decode_value(encoded)


def test_the_largest_honest_messages_fit_a_frame():
    """A roster of ROSTER_MAX with all headers, and a commit with all votes."""
    names = sorted(("12D3Koo" + f"{i:045d}") for i in range(limits.ROSTER_MAX))
    signed = signed_header().SerializeToString()
    entries = [wire_pb2.RosterEntry(peer=n, header=wire_pb2.Signed.FromString(signed)) for n in names]
    roster = wire_pb2.Roster(convener=A, base_lineage=BASE, entries=entries, reason="r" * 512)
    updates = tuple(CommittedUpdate(Dot(n, 2**40, 2**40), STATE, 2**40) for n in names)
    largest = value(
        roster=tuple(names), joiners=(), updates=updates, ring=tuple(names), chunk_hashes=(STATE,) * len(names)
    )
    votes = [wire_pb2.Signed.FromString(vote(split=True).signed)] * limits.ROSTER_MAX
    commit = wire_pb2.Commit(attempt=5, value=largest.encoded, votes=votes)
    assert decode_value(largest.encoded) == largest
    assert roster.ByteSize() < limits.MESSAGE_BYTES_MAX - 1024
    assert commit.ByteSize() < limits.MESSAGE_BYTES_MAX - 1024


# --- records ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        BallotRecord(3, BASE),
        BallotRecord(3, BASE, 0, header=header()),
        BallotRecord(3, BASE, 9, VotedFor(7, value()), None, header()),
        BallotRecord(3, BASE, 9, VotedFor(0, value()), VotedFor(8, value(split=True), True)),
    ],
)
def test_a_record_comes_back_and_any_damage_shows(record):
    encoded = record.encode()
    assert decode_record(encoded) == record
    for at in range(0, len(encoded), 7):
        damaged = bytearray(encoded)
        damaged[at] ^= 1
        with pytest.raises(ShoalError) as caught:
            decode_record(bytes(damaged))
        assert caught.value.code is ExitCode.DISK


def test_a_record_of_another_layout_is_named_as_such():
    body = b"shoal-ballot-1\0\0" + b"short"
    with pytest.raises(ShoalError, match="another version"):
        decode_record(body + sha256(body))


# --- fuzz -------------------------------------------------------------------------------------------------------------

ENVELOPES = [encode(m, ME, RUN).SerializeToString() for m in messages()]
VALUES = [value().encoded, value(split=True, ring=(A, B), chunk_hashes=(STATE, BASE)).encoded]


def mutate(data: bytes, cuts: list[tuple[int, int, bytes]]) -> bytes:
    for start, length, patch in cuts:
        at = start % (len(data) + 1)
        data = data[:at] + patch + data[at + length :]
    return data


CUTS = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 40), st.binary(max_size=8)), max_size=4)


def receive(data: bytes) -> None:
    """As a node does: parse the frame, decode if it is the ballot's. Anything but PeerFault is a crash."""
    try:
        envelope = wire_pb2.Envelope.FromString(data)
    except Exception:  # the mesh's own check
        return
    if envelope.WhichOneof("body") in BODIES:
        try:
            decode(envelope, A, RUN)
        except PeerFault:
            pass


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.sampled_from(ENVELOPES), CUTS)
def test_mutated_messages_never_crash_the_decoder(data, cuts):
    receive(mutate(data, cuts))


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.sampled_from(sorted(BODIES)), st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_never_crash_the_decoder(name, data, sign):
    """Also when the sender signs its junk."""
    signed = sign_body(ME, name, {"roster": "convener", "propose": "convener"}.get(name, "member"), RUN, data)
    body = signed.SerializeToString() if sign and name not in ("convene", "holding", "commit") else data
    number = wire_pb2.Envelope.DESCRIPTOR.fields_by_name[name].number
    size = len(body)
    receive(bytes([number << 3 | 2, *([size & 127 | 128, size >> 7] if size > 127 else [size])]) + body)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.sampled_from(VALUES), CUTS)
def test_a_mutated_value_is_refused_or_canonical(data, cuts):
    mutated = mutate(data, cuts)
    try:
        found = decode_value(mutated)
    except PeerFault:
        return
    assert found.encoded == mutated


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.binary(max_size=200))
def test_an_arbitrary_header_is_a_fault_or_a_header(data):
    try:
        parse_header(wire_pb2.Signed(body=data))
    except PeerFault:
        pass
