"""Signatures are good for one type, role, run, signer and body, and for nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol import limits, signing
from shoal.protocol.errors import PeerFault
from shoal.protocol.identity import Identity
from shoal.protocol.signing import covered, sign_body, verify_body
from shoal.protocol.wire_pb2 import Signed

ALICE, BOB = (Identity.generate(bytes([n]) * 32) for n in (1, 2))
RUN, OTHER_RUN = bytes(32), b"\1" * 32


def test_covered_bytes_are_the_documented_ones() -> None:
    assert covered("update", "origin", RUN, b"body") == b"shoal/v1/update/origin\0" + RUN + b"body"


@given(st.binary(max_size=200))
def test_round_trip(body: bytes) -> None:
    signed = sign_body(ALICE, "vote", "member", RUN, body)
    for _ in range(2):  # the second time from the cache
        assert verify_body(signed, ALICE.peer_id, "vote", "member", RUN) == body


@pytest.mark.parametrize(
    ("signer", "type_", "role", "run"),
    [
        (BOB.peer_id, "vote", "member", RUN),
        (ALICE.peer_id, "join", "member", RUN),
        (ALICE.peer_id, "vote", "convener", RUN),
        (ALICE.peer_id, "vote", "member", OTHER_RUN),
    ],
)
def test_a_signature_serves_one_purpose(signer: str, type_: str, role: str, run: bytes) -> None:
    signed = sign_body(ALICE, "vote", "member", RUN, b"x")
    verify_body(signed, ALICE.peer_id, "vote", "member", RUN)  # cached: the cache must not blur purposes
    with pytest.raises(PeerFault, match="bad_signature"):
        verify_body(signed, signer, type_, role, run)


@given(st.binary(max_size=70), st.binary(max_size=40))
def test_other_signatures_are_faults(signature: bytes, body: bytes) -> None:
    with pytest.raises(PeerFault, match="bad_signature"):
        verify_body(Signed(body=body, signature=signature), ALICE.peer_id, "vote", "member", RUN)


def test_limits_and_bad_signers() -> None:
    large = Signed(body=bytes(limits.SIGNED_BODY_BYTES_MAX + 1), signature=bytes(64))
    with pytest.raises(PeerFault, match="bad_signature"):
        verify_body(large, ALICE.peer_id, "vote", "member", RUN)
    with pytest.raises(PeerFault, match="bad_peer_id"):
        verify_body(Signed(body=b"", signature=bytes(64)), "nobody", "vote", "member", RUN)


def test_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SIGNATURES_KEPT_MAX", 3)
    signing._verified.clear()
    for n in range(6):
        verify_body(sign_body(ALICE, "vote", "member", RUN, bytes([n])), ALICE.peer_id, "vote", "member", RUN)
    assert len(signing._verified) == 3
