"""Who may enter: the modes, tokens and their owners, sessions and bans; all without a network."""

from __future__ import annotations

import json
import random

import pytest

from shoal.protocol import admission, limits
from shoal.protocol.admission import Admission, Bans, Sessions
from shoal.protocol.errors import PeerFault

K, T = b"k" * 32, b"transcript"


def rng(seed: int = 1):
    return random.Random(seed).randbytes


def newcomer(founder: Admission) -> Admission:
    return Admission("token", token=founder.new_token(rng()))


def test_open_admits_everybody_and_proves_nothing() -> None:
    open_ = Admission()
    assert open_.check("anyone", "dialer", b"", T, b"") is None
    assert open_.prove("dialer", b"", T) == b"" == open_.token_id == open_.new_token(rng())


def test_allowlist() -> None:
    listed = Admission("allowlist", frozenset({"alice"}))
    assert listed.check("alice", "dialer", b"", T, b"") is None
    assert "allowlist" in str(listed.check("bob", "dialed", b"", T, b""))


def test_token_and_member_prove_themselves_to_each_other() -> None:
    founder = Admission("token", key=K)
    new = newcomer(founder)
    assert len(new.token_id) == admission.TOKEN_ID_BYTES and founder.token_id == b""
    assert founder.check("new", "dialer", new.token_id, T, new.prove("dialer", new.token_id, T)) is None
    assert new.check("founder", "dialed", new.token_id, T, founder.prove("dialed", new.token_id, T)) is None
    assert founder.bindings == {new.token_id: "new"}
    # members, without a token
    other = Admission("token", key=K)
    assert other.check("founder", "dialer", b"", T, founder.prove("dialer", b"", T)) is None


def test_a_token_belongs_to_the_first_identity_that_uses_it() -> None:
    founder = Admission("token", key=K)
    new = newcomer(founder)
    proof = new.prove("dialer", new.token_id, T)
    assert founder.check("first", "dialer", new.token_id, T, proof) is None
    assert founder.check("first", "dialer", new.token_id, T, proof) is None  # again, as the same
    assert "another identity" in str(founder.check("second", "dialer", new.token_id, T, proof))


def test_what_does_not_prove_admission() -> None:
    founder, new = Admission("token", key=K), newcomer(Admission("token", key=K))
    good = new.prove("dialer", new.token_id, T)
    for role, token_id, transcript, proof in (
        ("dialer", new.token_id, T, b""),
        ("dialer", new.token_id, b"another transcript", good),
        ("dialed", new.token_id, T, good),  # reflected
        ("dialer", b"12345678", T, good),
        ("dialer", b"", T, good),  # a token is not membership
        ("dialer", new.token_id, T, Admission("token", key=b"x" * 32).prove("dialer", new.token_id, T)),
    ):
        assert founder.check("new", role, token_id, transcript, proof) is not None
    assert founder.bindings == {}
    # with neither key nor token nothing can be proven, and nothing checked
    nobody = Admission("token")
    assert nobody.prove("dialer", b"", T) == b""
    assert nobody.check("x", "dialed", b"", T, b"") is not None
    with pytest.raises(ValueError, match="admission key"):
        nobody.new_token(rng())


def test_revoked_tokens_admit_nobody() -> None:
    founder = Admission("token", key=K)
    new = newcomer(founder)
    proof = new.prove("dialer", new.token_id, T)
    assert founder.check("new", "dialer", new.token_id, T, proof) is None
    assert founder.revoke(new.token) == "new"
    assert "revoked" in str(founder.check("new", "dialer", new.token_id, T, proof))
    assert founder.revoke(b"unknown!") is None


def test_what_other_members_admitted_by_a_token_counts_here() -> None:
    founder, other = Admission("token", key=K), Admission("token", key=K)
    new = newcomer(founder)
    proof = new.prove("dialer", new.token_id, T)
    assert founder.check("first", "dialer", new.token_id, T, proof) is None
    other.hear(new.token_id, "first")
    other.hear(new.token_id, "second")  # the first word stays
    assert other.owner(new.token_id) == "first"
    assert "another identity" in str(other.check("second", "dialer", new.token_id, T, proof))
    assert other.check("first", "dialer", new.token_id, T, proof) is None
    assert other.bindings == {new.token_id: "first"}
    founder.hear(new.token_id, "second")
    assert founder.owner(new.token_id) == "first" and not founder.heard
    assert other.revoke(new.token) == "first"


def test_a_binding_that_came_to_nothing_is_released() -> None:
    founder = Admission("token", key=K)
    new = newcomer(founder)
    proof = new.prove("dialer", new.token_id, T)
    assert founder.check("first", "dialer", new.token_id, T, proof) is None
    founder.release(new.token_id)
    founder.release(b"unknown!")
    assert founder.owner(new.token_id) is None
    assert founder.check("second", "dialer", new.token_id, T, proof) is None


def test_bindings_are_bounded_and_hearsay_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BINDINGS_MAX", 2)
    founder = Admission("token", key=K)
    for name in "abcd":
        founder.hear(name.encode() * 8, name)
    assert founder.heard == {b"c" * 8: "c", b"d" * 8: "d"}
    new = newcomer(founder)
    proof = new.prove("dialer", new.token_id, T)
    assert founder.check("new", "dialer", new.token_id, T, proof) is None  # what others tell keeps nobody out
    founder.bindings[b"e" * 8] = "e"
    assert founder.check("new", "dialer", new.token_id, T, proof) is None
    founder.release(new.token_id)
    founder.bindings[b"f" * 8] = "f"
    assert "too many" in str(founder.check("new", "dialer", new.token_id, T, proof))


def test_admission_survives_a_restart() -> None:
    founder = Admission("token", key=K, bindings={b"a" * 8: "alice"}, heard={b"b" * 8: "bob"}, revoked={b"r" * 8})
    again = Admission("token")
    again.load(json.loads(json.dumps(founder.to_dict())))
    assert again == founder


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_sessions_start_are_found_and_end() -> None:
    sessions = Sessions(rng())
    one, two = sessions.start("alice", b"1", 0.0), sessions.start("alice", b"2", 1.0)
    assert len(one.token) == 32 and one.token != two.token
    assert sessions.find(one.token) is one and sessions.find(b"?") is None
    assert sessions.revoke("alice", but_boot=b"2") == 1
    assert (one.live, two.live) == (False, True) and sessions.find(one.token) is None
    assert sessions.revoke("alice") == 1 and not two.live and sessions.of("alice") == []


def test_the_session_used_longest_ago_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SESSIONS_MAX", 2)
    sessions = Sessions(rng())
    a, b = sessions.start("a", b"", 0.0), sessions.start("b", b"", 1.0)
    sessions.find(a.token)
    sessions.start("c", b"", 2.0)
    assert a.live and not b.live


def test_one_peer_cannot_push_others_out() -> None:
    sessions = Sessions(rng())
    other = sessions.start("other", b"", 0.0)
    mine = [sessions.start("greedy", b"", float(n)) for n in range(3 * limits.SESSIONS_PER_PEER_MAX)]
    assert other.live and sessions.of("greedy") == mine[-limits.SESSIONS_PER_PEER_MAX :]
    assert [s.live for s in mine].count(True) == limits.SESSIONS_PER_PEER_MAX


# --- bans -------------------------------------------------------------------------------------------------------------


def test_bans_keep_their_reason_and_evidence() -> None:
    bans = Bans()
    assert bans.add("mallory", "equivocation" * 100, b"proof") and not bans.add("mallory", "again")
    assert str(bans.reason("mallory")).startswith("equivocation") and bans.reason("alice") is None
    assert len(str(bans.reason("mallory"))) == limits.REASON_CHARS_MAX
    again = Bans.from_dict(json.loads(json.dumps(bans.to_dict())))
    assert again.entries == bans.entries
    assert bans.lift("mallory") and not bans.lift("mallory")


def test_bans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    bans = Bans()
    with pytest.raises(PeerFault, match="evidence_too_large"):
        bans.add("a", "", bytes(limits.EVIDENCE_BYTES_MAX + 1))
    monkeypatch.setattr(limits, "MEMBERS_MAX", 1)
    bans.add("a", "")
    with pytest.raises(PeerFault, match="too_many_bans"):
        bans.add("b", "")
