"""Draws, seals and combined updates: the honest ones survive the wire, and no other does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.ballot_messages import CommittedUpdate, Exchange, Value
from shoal.protocol.errors import PeerFault
from shoal.protocol.identity import Identity
from shoal.protocol.rings import (
    COMBINED_LIFE,
    Combined,
    Seal,
    check_value,
    decode_combined,
    decode_draw,
    decode_seal,
    in_order,
    make_draw,
    rings_of,
    verify_combined,
)
from shoal.protocol.version import Dot, sha256
from shoal.protocol.wire_pb2 import Signed

RUN = sha256(b"run")
MEMBERS = sorted((Identity.generate(bytes([n]) * 32) for n in range(5)), key=lambda identity: identity.peer_id)
STRANGER = Identity.generate(b"x" * 32)
DRAW = make_draw(7, STRANGER.peer_id, 40, {m.peer_id: sha256(m.peer_id.encode()) for m in MEMBERS})
LINEAGE = DRAW.lineage(RUN)
DOT = Dot(MEMBERS[1].peer_id, COMBINED_LIFE | 3, 9)


def value(**changes: object) -> Value:
    updates = tuple(CommittedUpdate(Dot(m.peer_id, 3, 1), sha256(m.peer_id.encode()), 8) for m in MEMBERS[:4])
    roster = tuple(m.peer_id for m in MEMBERS)
    return replace(Value(7, LINEAGE, LINEAGE, updates, roster, (), Exchange.RING_SPARSE), **changes)  # type: ignore[arg-type]


def sealed(by: list[Identity], dot: Dot = DOT, **changes: object) -> Combined:
    combined = replace(Combined(DRAW, value(), (True, True, False, True), b"a sum"), **changes)  # type: ignore[arg-type]
    seals = [
        (
            m.peer_id,
            Seal(m.peer_id, LINEAGE, combined.value.hash, combined.sum_hash, dot).sign(m, RUN),
        )
        for m in by
    ]
    return replace(combined, seals=in_order(seals))


def test_a_combined_update_with_seals_of_more_than_half_of_its_ring_is_taken() -> None:
    combined = sealed(MEMBERS[2:])
    assert verify_combined(combined.encode(), DOT, RUN) == combined
    assert combined.dots == tuple(Dot(m.peer_id, 3, 1) for m in (MEMBERS[0], MEMBERS[1], MEMBERS[3]))


@pytest.mark.parametrize(
    ("combined", "dot", "why"),
    [
        (sealed(MEMBERS[:2]), DOT, "2 of 5 have sealed"),
        (sealed(MEMBERS), replace(DOT, seq=10), "is another's"),
        (sealed(MEMBERS), Dot(MEMBERS[2].peer_id, DOT.incarnation, 9), "is another's"),
        (sealed(MEMBERS, Dot(DOT.peer, 3, 9)), Dot(DOT.peer, 3, 9), "not of a chain of combined updates"),
        (
            sealed(MEMBERS, Dot(STRANGER.peer_id, DOT.incarnation, 1)),
            Dot(STRANGER.peer_id, DOT.incarnation, 1),
            "a ring that it is not in",
        ),
        (sealed([*MEMBERS[:2], STRANGER]), DOT, "from outside the ring"),
        (replace(sealed(MEMBERS), sum=b"another"), DOT, "is another's"),
        (replace(sealed(MEMBERS), counted=(True,) * 4), DOT, "is another's"),
        (replace(sealed(MEMBERS), value=value(previous_state_hash=RUN)), DOT, "is another's"),
        (replace(sealed(MEMBERS), seals=sealed(MEMBERS).seals[::-1]), DOT, "not sorted"),
        (replace(sealed(MEMBERS), seals=(sealed(MEMBERS).seals[0],) * 3), DOT, "repeat"),
        (replace(sealed(MEMBERS), counted=(True,)), DOT, "1 marks for 4 updates"),
    ],
)
def test_every_other_combined_update_is_refused(combined: Combined, dot: Dot, why: str) -> None:
    with pytest.raises(PeerFault, match=why):
        verify_combined(combined.encode(), dot, RUN)


def test_a_value_must_be_what_the_ring_can_have_decided() -> None:
    check_value(value(), DRAW, RUN)
    stranger = tuple(sorted([*(m.peer_id for m in MEMBERS), STRANGER.peer_id]))
    for wrong in (
        value(round=8),
        value(base_lineage=RUN),
        value(split=True),
        value(joiners=(STRANGER.peer_id,)),
        value(roster=stranger),
        value(exchange=Exchange.RING_DENSE),
    ):
        with pytest.raises(PeerFault):
            check_value(wrong, DRAW, RUN)


def test_one_lineage_for_each_draw_and_run() -> None:
    other = make_draw(7, STRANGER.peer_id, 40, {**DRAW.members, MEMBERS[0].peer_id: RUN})  # the same, drawn again
    assert len({DRAW.lineage(RUN), other.lineage(RUN), DRAW.lineage(sha256(b"another"))}) == 3
    assert decode_draw(DRAW.encoded) == DRAW


def test_draws_that_hang_together_alone_are_taken() -> None:
    nonce = b"n" * 32
    with pytest.raises(PeerFault, match="members"):
        make_draw(1, "ada", 1, {})
    with pytest.raises(PeerFault, match="peers"):
        make_draw(1, "ada", 1, {"ada": nonce, "bob": nonce})
    with pytest.raises(PeerFault, match="nonce"):
        make_draw(1, "ada", 1, {"ada": b"short"})
    with pytest.raises(PeerFault, match="round 0"):
        make_draw(0, "ada", 1, {"ada": nonce})
    with pytest.raises(PeerFault):
        make_draw(1, "ada", 300, {f"peer{n}": nonce for n in range(257)})


def test_a_seal_of_another_hand_is_refused() -> None:
    seal = Seal(MEMBERS[0].peer_id, LINEAGE, RUN, RUN, DOT)
    assert decode_seal(seal.sign(MEMBERS[0], RUN), RUN) == seal
    with pytest.raises(PeerFault):
        decode_seal(seal.sign(MEMBERS[1], RUN), RUN)
    with pytest.raises(PeerFault):
        decode_seal(seal.sign(MEMBERS[0], sha256(b"another run")), RUN)


@given(st.binary(max_size=200) | st.randoms().map(lambda rng: _damaged(rng)))
def test_no_bytes_crash_a_decoder(data: bytes) -> None:
    for decode in (decode_draw, decode_combined, lambda d: verify_combined(d, DOT, RUN)):
        try:
            decode(data)
        except PeerFault:
            continue
        assert data in (DRAW.encoded, b"") or decode is decode_combined
    try:
        decode_seal(Signed(body=data, signature=b"s" * 64), RUN)
    except PeerFault:
        return
    raise AssertionError("a seal that nobody signed was taken")


def _damaged(rng: random.Random) -> bytes:
    data = bytearray(sealed(MEMBERS[:3]).encode())
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randint(len(data) // 2, len(data))])


@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 10**9))
def test_rings_differ_by_one_at_most_and_everybody_is_in_one(peers: int, size_max: int, round_: int) -> None:
    names = [f"peer{n}" for n in range(peers)]
    rings = rings_of(names, round_, size_max)
    assert sorted(p for ring in rings for p in ring) == sorted(names)
    sizes = [len(ring) for ring in rings]
    assert max(sizes) <= size_max and max(sizes) - min(sizes) <= 1
    assert rings == rings_of(reversed(names), round_, size_max)  # type: ignore[arg-type]


def test_rings_are_drawn_anew_for_every_round() -> None:
    names = [f"peer{n}" for n in range(12)]
    together = [{frozenset(ring) for ring in rings_of(names, round_, 4)} for round_ in range(1, 21)]
    assert len({frozenset(rings) for rings in together}) == 20
    met = {other for rings in together for ring in rings if "peer0" in ring for other in ring}
    assert met == set(names)  # whoever learns with few in a round learns with all in twenty
