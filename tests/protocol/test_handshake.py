"""The handshake as an attacker sees it: every frame replayed, relayed, forged, resized or out of turn gets nowhere."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol import limits
from shoal.protocol.admission import Admission, Bans
from shoal.protocol.errors import ExitCode, PeerFault
from shoal.protocol.handshake import (
    INCARNATION_KNOWN_MAX,
    INCARNATION_MAX,
    Dialed,
    Dialer,
    Other,
    Refuse,
    Refused,
    Self,
    check_addresses,
    refuse,
    transcript,
)
from shoal.protocol.identity import Identity
from shoal.protocol.wire_pb2 import Challenge, Hello, Proof, Refusal, Welcome

ALICE, BOB, EVE = (Identity.generate(bytes([n]) * 32) for n in (1, 2, 3))
RUN, BINDING, OTHER_BINDING = b"r" * 32, b"b" * 32, b"c" * 32
SESSION = b"s" * 32
K = b"k" * 32


def side(identity: Identity, admission: Admission | None = None, **changes: object) -> Self:
    boot = identity.public_bytes[-16:]
    me = Self(identity, RUN, boot, 7, ("10.0.0.1:7000",), admission or Admission())
    return dataclasses.replace(me, **changes)  # type: ignore[arg-type]


def ends(
    alice: Self | None = None, bob: Self | None = None, *, expected: str = BOB.peer_id, seed: int = 1
) -> tuple[Dialer, Dialed]:
    rng = random.Random(seed).randbytes
    return Dialer(alice or side(ALICE), expected, BINDING, rng), Dialed(bob or side(BOB), BINDING, rng)


def challenge(dialer: Dialer, dialed: Dialed) -> bytes:
    answer = dialed.on_hello(dialer.hello())
    assert isinstance(answer, bytes)
    return answer


def welcome(dialed: Dialed) -> bytes:
    return dialed.welcome(SESSION, incarnation_known=7, seq_known=3, observed="1.2.3.4:5")


def refusal(dialer: Dialer, answer: bytes | Other | Refuse, at: Callable[[bytes], object]) -> Refused:
    """What the dialer raises on a refusal."""
    assert isinstance(answer, Refuse)
    with pytest.raises(Refused) as caught:
        at(answer.frame)
    assert caught.value.reason == answer.reason
    return caught.value


# --- the way it should go ---------------------------------------------------------------------------------------------


def test_four_frames() -> None:
    dialer, dialed = ends()
    frames = [dialer.hello(), challenge(dialer, dialed)]
    frames.append(dialer.on_challenge(frames[1]))
    assert dialed.on_proof(frames[2]) == Other(ALICE.peer_id, ALICE.public_bytes[-16:], 7, ("10.0.0.1:7000",))
    frames.append(welcome(dialed))
    got, other = dialer.on_welcome(frames[3])
    assert other == Other(BOB.peer_id, BOB.public_bytes[-16:], 7, ("10.0.0.1:7000",))
    assert (got.session, got.incarnation_known, got.seq_known) == (SESSION, 7, 3)
    assert got.admission_key == b"" and got.observed == "1.2.3.4:5"
    assert max(map(len, frames)) < 1024


def test_a_token_brings_the_key_and_a_member_needs_none() -> None:
    founder = Admission("token", key=K)
    newcomer = Admission("token", token=founder.new_token(random.Random(1).randbytes))
    for admission, key in ((newcomer, K), (Admission("token", key=K), b"")):
        dialer, dialed = ends(side(ALICE, admission), side(BOB, founder))
        proof = dialer.on_challenge(challenge(dialer, dialed))
        assert isinstance(dialed.on_proof(proof), Other)
        assert dialer.on_welcome(welcome(dialed))[0].admission_key == key
    secret = newcomer.token[8:]
    dialer, dialed = ends(side(ALICE, newcomer), side(BOB, founder))
    answer = challenge(dialer, dialed)
    assert not any(secret in frame for frame in (dialer.hello(), answer, dialer.on_challenge(answer)))


# --- refusals show both values ----------------------------------------------------------------------------------------


def test_wrong_run() -> None:
    dialer, dialed = ends(bob=side(BOB, run_id=b"q" * 32))
    error = refusal(dialer, dialed.on_hello(dialer.hello()), dialer.on_challenge)
    assert error.code is ExitCode.MISMATCH and error.reason == Refusal.WRONG_RUN and error.permanent
    assert RUN.hex() in error.values and (b"q" * 32).hex() in error.values


def test_wrong_protocol() -> None:
    dialer, dialed = ends(side(ALICE, protocol=limits.PROTOCOL_VERSION + 1))
    error = refusal(dialer, dialed.on_hello(dialer.hello()), dialer.on_challenge)
    assert error.code is ExitCode.MISMATCH and error.reason == Refusal.WRONG_PROTOCOL
    assert f"mine protocol {limits.PROTOCOL_VERSION + 1}; theirs protocol {limits.PROTOCOL_VERSION}" in error.values
    # another version's fields may have other sizes, and still the version is what is said
    answer = ends()[1].on_hello(b"\1" + Hello(protocol=99, nonce=b"short").SerializeToString())
    assert isinstance(answer, Refuse) and answer.reason == Refusal.WRONG_PROTOCOL


def test_wrong_peer() -> None:
    dialer, dialed = ends(bob=side(EVE))
    error = refusal(dialer, dialed.on_hello(dialer.hello()), dialer.on_challenge)
    assert error.reason == Refusal.WRONG_PEER and BOB.peer_id in error.values and EVE.peer_id in error.values


def test_banned() -> None:
    bans = Bans()
    bans.add(ALICE.peer_id, "equivocation")
    dialer, dialed = ends(bob=side(BOB, bans=bans))
    error = refusal(dialer, dialed.on_hello(dialer.hello()), dialer.on_challenge)
    assert error.code is ExitCode.REFUSED and error.reason == Refusal.BANNED and "equivocation" in error.values


def test_the_same_identity_in_another_process() -> None:
    dialer, dialed = ends(side(BOB, boot_id=b"2" * 16))
    error = refusal(dialer, dialed.on_hello(dialer.hello()), dialer.on_challenge)
    assert error.reason == Refusal.IDENTITY_IN_USE and error.permanent


def test_busy_is_not_permanent() -> None:
    dialer, dialed = ends()
    error = refusal(dialer, refuse(Refusal.BUSY, "16 at once", ""), dialer.on_challenge)
    assert not error.permanent and error.todo


def test_an_unknown_reason_and_a_strangers_text_are_harmless() -> None:
    dialer, _ = ends()
    text = "\x1b[31m" + "x" * 9999 + "\r\n"
    frame = b"\0" + Refusal(reason=77, theirs=text[:2000], todo="\x07").SerializeToString()  # type: ignore[arg-type]
    with pytest.raises(Refused) as caught:
        dialer.on_challenge(frame)
    assert "\x1b" not in caught.value.values and "\r" not in caught.value.values and caught.value.todo == "?"
    assert len(caught.value.values) < 2 * limits.REASON_CHARS_MAX


# --- not admitted -----------------------------------------------------------------------------------------------------


def test_not_on_the_allowlist() -> None:
    listed = Admission("allowlist", frozenset({BOB.peer_id}))
    dialer, dialed = ends(side(ALICE, listed), side(BOB, listed))
    answer = dialed.on_proof(dialer.on_challenge(challenge(dialer, dialed)))
    error = refusal(dialer, answer, dialer.on_welcome)
    assert error.reason == Refusal.NOT_ADMITTED and "allowlist" in error.values
    with pytest.raises(RuntimeError):
        welcome(dialed)


@pytest.mark.parametrize(
    "token", [b"", bytes(40), Admission("token", key=b"x" * 32).new_token(random.Random(2).randbytes)]
)
def test_wrong_tokens(token: bytes) -> None:
    founder = side(BOB, Admission("token", key=K))
    dialer, dialed = ends(side(ALICE, Admission("token", token=token)), founder)
    # Not even the dialed side's proof is good for whoever has no token of this run: both ends prove.
    with pytest.raises(Refused) as caught:
        dialer.on_challenge(challenge(dialer, dialed))
    assert caught.value.reason == Refusal.NOT_ADMITTED
    # one that does not care what the dialed side proves
    dialer, dialed = ends(side(ALICE, Admission("token", token=token)), founder)
    dialer._me = side(ALICE)
    answer = dialed.on_proof(dialer.on_challenge(challenge(dialer, dialed)))
    assert refusal(dialer, answer, dialer.on_welcome).reason == Refusal.NOT_ADMITTED


def test_a_token_that_somebody_else_has_used() -> None:
    founder = Admission("token", key=K)
    token = founder.new_token(random.Random(1).randbytes)
    for identity, admitted in ((ALICE, True), (EVE, False), (ALICE, True)):
        dialer, dialed = ends(side(identity, Admission("token", token=token)), side(BOB, founder))
        answer = dialed.on_proof(dialer.on_challenge(challenge(dialer, dialed)))
        assert isinstance(answer, Other) is admitted
        if not admitted:
            assert "another identity" in refusal(dialer, answer, dialer.on_welcome).values


def test_an_impostor_of_the_swarm_gets_no_proof_from_a_newcomer() -> None:
    token = Admission("token", key=K).new_token(random.Random(1).randbytes)
    dialer, dialed = ends(side(ALICE, Admission("token", token=token)), side(BOB, Admission()))
    with pytest.raises(Refused) as caught:
        dialer.on_challenge(challenge(dialer, dialed))
    assert caught.value.reason == Refusal.NOT_ADMITTED and caught.value.code is ExitCode.REFUSED


# --- attacks ----------------------------------------------------------------------------------------------------------


def test_a_replayed_proof_fails() -> None:
    """Eve has recorded a whole handshake of Alice and plays it again."""
    dialer, dialed = ends(seed=1)
    hello, proof = dialer.hello(), dialer.on_challenge(challenge(dialer, dialed))
    again = Dialed(side(BOB), BINDING, random.Random(2).randbytes)
    assert isinstance(again.on_hello(hello), bytes)
    answer = again.on_proof(proof)
    assert isinstance(answer, Refuse) and answer.reason == Refusal.BAD_PROOF
    with pytest.raises(RuntimeError):
        welcome(again)


def test_a_replayed_challenge_fails() -> None:
    dialer, dialed = ends(seed=1)
    recorded = challenge(dialer, dialed)
    with pytest.raises(PeerFault, match="bad_signature"):
        ends(seed=2)[0].on_challenge(recorded)


def test_frames_are_good_for_one_turn_only() -> None:
    dialer, dialed = ends()
    hello = dialer.hello()
    answer = challenge(dialer, dialed)
    with pytest.raises(PeerFault, match="second Hello"):
        dialed.on_hello(hello)
    with pytest.raises(PeerFault, match="before Challenge"):
        dialer.on_welcome(b"\4" + Welcome(session=SESSION).SerializeToString())
    proof = dialer.on_challenge(answer)
    with pytest.raises(PeerFault, match="second Challenge"):
        dialer.on_challenge(answer)
    assert isinstance(dialed.on_proof(proof), Other)
    with pytest.raises(PeerFault, match="second one"):
        dialed.on_proof(proof)
    with pytest.raises(PeerFault, match="before Challenge"):
        Dialed(side(BOB), BINDING, random.Random(1).randbytes).on_proof(proof)


def test_a_relay_between_two_honest_peers_fails() -> None:
    """Eve passes the frames of Alice and Bob on, unchanged. Alice saw Eve's certificate, Bob has his own."""
    rng = random.Random(1).randbytes
    dialer = Dialer(side(ALICE), BOB.peer_id, OTHER_BINDING, rng)
    dialed = Dialed(side(BOB), BINDING, rng)
    answer = dialed.on_hello(dialer.hello())
    assert isinstance(answer, bytes)
    with pytest.raises(PeerFault, match="bad_signature"):
        dialer.on_challenge(answer)


def test_a_relay_as_eve_herself_fails() -> None:
    """Alice means Eve; Eve passes it on to Bob to be taken for Alice there."""
    dialer, dialed = ends(expected=EVE.peer_id)
    answer = dialed.on_hello(dialer.hello())
    assert isinstance(answer, Refuse) and answer.reason == Refusal.WRONG_PEER
    # with `dialed` rewritten, Bob's transcript is not the one that Alice signs
    hello = Hello.FromString(dialer.hello()[1:])
    hello.dialed = BOB.peer_id
    dialed = Dialed(side(BOB), BINDING, random.Random(3).randbytes)
    relayed = dialed.on_hello(b"\1" + hello.SerializeToString())
    assert isinstance(relayed, bytes)
    with pytest.raises(PeerFault, match="bad_signature"):
        dialer.on_challenge(relayed)


def test_another_signer_fails() -> None:
    """Eve claims to be Alice and signs with her own key; and Eve claims to be Bob."""
    dialer, dialed = ends()
    answer = challenge(dialer, dialed)
    dialer._me = side(EVE)
    proof = dialed.on_proof(dialer.on_challenge(answer))
    assert isinstance(proof, Refuse) and proof.reason == Refusal.BAD_PROOF
    dialer, dialed = ends()
    parsed = Challenge.FromString(challenge(dialer, dialed)[1:])
    parsed.proof = EVE.sign(b"x")
    with pytest.raises(PeerFault, match="bad_signature"):
        dialer.on_challenge(b"\2" + parsed.SerializeToString())


def test_the_transcript_covers_everything() -> None:
    hello = Hello(protocol=1, run_id=RUN, dialer="a", dialed="b", nonce=b"n", boot_id=b"o", incarnation=1,
                  token_id=b"t", addresses=["x:1"])  # fmt: skip
    answer = Challenge(nonce=b"m", boot_id=b"p", incarnation=2)
    seen = {transcript(hello, answer, BINDING), transcript(hello, answer, OTHER_BINDING)}
    for message in (hello, answer):
        for name in ("protocol", "run_id", "dialer", "dialed", "nonce", "boot_id", "incarnation", "token_id"):
            if name not in message.DESCRIPTOR.fields_by_name:
                continue
            changed = type(message)()
            changed.CopyFrom(message)  # type: ignore[arg-type]
            old = getattr(message, name)
            setattr(changed, name, old + 1 if isinstance(old, int) else old + old)
            pair = (changed, answer) if message is hello else (hello, changed)
            seen.add(transcript(*pair, BINDING))  # type: ignore[arg-type]
    hello.addresses.append("y:2")
    seen.add(transcript(hello, answer, BINDING))
    assert len(seen) == 2 + 8 + 3 + 1


# --- hostile bytes ----------------------------------------------------------------------------------------------------

GOOD_HELLO = Hello.FromString(ends()[0].hello()[1:])


@pytest.mark.parametrize(
    "changes",
    [
        {"nonce": b"x"},
        {"boot_id": b"x" * 17},
        {"run_id": b"x" * 33},
        {"token_id": b"x"},
        {"incarnation": INCARNATION_MAX + 1},
        {"addresses": ["a:1"] * (limits.ADDRESSES_MAX + 1)},
        {"addresses": ["a..b:80"]},
        {"dialer": "nobody"},
    ],
)
def test_impossible_hellos(changes: dict) -> None:
    fields = {f.name: getattr(GOOD_HELLO, f.name) for f in GOOD_HELLO.DESCRIPTOR.fields}
    with pytest.raises(PeerFault):
        ends()[1].on_hello(b"\1" + Hello(**{**fields, **changes}).SerializeToString())


@pytest.mark.parametrize("changes", [{"nonce": b"x"}, {"boot_id": b""}, {"incarnation": INCARNATION_MAX + 1}])
def test_impossible_challenges(changes: dict) -> None:
    dialer, dialed = ends()
    good = Challenge.FromString(challenge(dialer, dialed)[1:])
    fields = {f.name: getattr(good, f.name) for f in good.DESCRIPTOR.fields}
    with pytest.raises(PeerFault):
        dialer.on_challenge(b"\2" + Challenge(**{**fields, **changes}).SerializeToString())


@pytest.mark.parametrize(
    "changes",
    [
        {"session": b"x"},
        {"admission_key": b"x"},
        {"observed": "x" * (limits.ADDRESS_CHARS_MAX + 1)},
        {"addresses": ["nowhere"]},
        {"incarnation_known": INCARNATION_KNOWN_MAX + 1},  # would push the newcomer out of the range for good
        {"seq_known": 2**64 - 1},
    ],
)
def test_impossible_welcomes(changes: dict) -> None:
    dialer, dialed = ends()
    dialer.on_challenge(challenge(dialer, dialed))
    with pytest.raises(PeerFault, match="bad_handshake"):
        dialer.on_welcome(b"\4" + Welcome(**{"session": SESSION, **changes}).SerializeToString())


def test_frames_of_4_kib_at_most() -> None:
    for feed in (ends()[0].on_challenge, ends()[1].on_hello):
        for tag in (b"\0", b"\1", b"\2"):
            with pytest.raises(PeerFault, match="bad_handshake"):
                feed(tag + bytes(limits.HANDSHAKE_FRAME_BYTES_MAX))
    with pytest.raises(PeerFault):
        check_addresses(["a:1"] * 9)


def _into_dialed_hello(frame: bytes) -> None:
    ends()[1].on_hello(frame)


def _into_dialed_proof(frame: bytes) -> None:
    dialer, dialed = ends()
    challenge(dialer, dialed)
    assert not isinstance(dialed.on_proof(frame), Other)


def _into_dialer_challenge(frame: bytes) -> None:
    ends()[0].on_challenge(frame)


def _into_dialer_welcome(frame: bytes) -> None:
    dialer, dialed = ends()
    dialer.on_challenge(challenge(dialer, dialed))
    dialer.on_welcome(frame)


_messages = st.one_of(
    st.builds(
        Hello,
        protocol=st.just(1),
        run_id=st.binary(max_size=33),
        dialer=st.text(max_size=60),
        nonce=st.binary(max_size=33),
    ),
    st.builds(Challenge, nonce=st.binary(max_size=33), boot_id=st.binary(max_size=17), proof=st.binary(max_size=65)),
    st.builds(Proof, proof=st.binary(max_size=65), admission=st.binary(max_size=33)),
    st.builds(
        Welcome,
        session=st.binary(max_size=33),
        observed=st.text(max_size=300),
        addresses=st.lists(st.text(max_size=20)),
    ),
    st.builds(Refusal, reason=st.integers(0, 9), theirs=st.text(max_size=600), todo=st.text(max_size=600)),
).map(lambda message: message.SerializeToString())
_frames = st.builds(
    lambda tag, body: bytes([tag]) + body, st.integers(0, 5), st.one_of(_messages, st.binary(max_size=200))
)


@pytest.mark.parametrize("feed", [_into_dialed_hello, _into_dialed_proof, _into_dialer_challenge, _into_dialer_welcome])
def test_any_frame_ends_in_a_declared_error_or_no_admission(feed: Callable[[bytes], None]) -> None:
    @given(st.one_of(st.just(b""), _frames, st.binary(max_size=300)))
    def check(frame: bytes) -> None:
        try:
            feed(frame)
        except (PeerFault, Refused):
            pass

    check()


@given(st.integers(0, 3), st.integers(0, 2000), st.integers(1, 255))
def test_a_changed_bit_admits_nobody(which: int, at: int, flip: int) -> None:
    """Every frame of a good handshake, with one byte changed in one of them."""

    def change(turn: int, frame: bytes) -> bytes:
        if turn != which:
            return frame
        place = at % len(frame)
        return frame[:place] + bytes([frame[place] ^ flip]) + frame[place + 1 :]

    dialer, dialed = ends()
    try:
        answer = dialed.on_hello(change(0, dialer.hello()))
        answer = answer.frame if isinstance(answer, Refuse) else answer
        proof = dialed.on_proof(change(2, dialer.on_challenge(change(1, answer))))
        assert isinstance(proof, Other) is (which == 3)
        if isinstance(proof, Other):
            dialer.on_welcome(change(3, welcome(dialed)))
    except (PeerFault, Refused):
        pass
