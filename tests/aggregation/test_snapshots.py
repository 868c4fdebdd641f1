"""Snapshots of the update log from hostile hands: refused with one kind of fault, whatever is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.aggregation.forks import Fork
from shoal.aggregation.gossip import UpdateLog
from shoal.protocol.ballot_messages import Header
from shoal.protocol.errors import PeerFault
from shoal.protocol.version import VersionVector

from .origins import RULES, THETA0, chain, log_of, state, up_to

ADA = ("ada", 0)


def a_log() -> UpdateLog:
    """With everything that a snapshot can hold."""
    eve = chain("eve", 3)
    log = log_of(chain("ada", 3), eve, chain("bob", 2))
    log.advance(up_to(log, ADA, 2))
    log.retract(Fork(eve[1][0], chain("eve", 1, seed=1, after=eve[:1])[-1][0]))
    log.freeze({("bob", 0): 2})
    return log


def load(parts: dict[str, Any]) -> UpdateLog:
    return UpdateLog.from_snapshot(THETA0, RULES, parts)


def test_a_snapshot_brings_back_the_log_and_what_was_retracted() -> None:
    log = a_log()
    again = load(log.snapshot().to_parts())
    assert state(again) == state(log) and again.log_bytes == log.log_bytes
    whole = log_of(chain("eve", 3))
    for one in (log, again):
        one.advance(up_to(whole, ("eve", 0), 3))
    assert state(again) == state(log) and log.vector.seq("eve", 0) == 3


def test_two_peers_at_one_frontier_agree_whatever_is_above_it() -> None:
    one, two = log_of(chain("ada", 3)), log_of(chain("ada", 2), chain("bob", 1))
    for log in (one, two):
        log.advance(up_to(two, ADA, 2))
    assert one.snapshot().hash == two.snapshot().hash
    assert one.snapshot().hash != log_of(chain("ada", 3)).snapshot().hash


def test_every_signature_is_asked_for() -> None:
    seen: list[Header] = []
    log = a_log()
    UpdateLog.from_snapshot(THETA0, RULES, log.snapshot().to_parts(), verify=seen.append)
    assert len(seen) == 4 + 2 + 2  # kept, retracted, the proof

    def refuse(header: Header) -> None:
        raise PeerFault("bad_signature", str(header.dot))

    with pytest.raises(PeerFault, match="bad_signature"):
        UpdateLog.from_snapshot(THETA0, RULES, log.snapshot().to_parts(), verify=refuse)


def with_index(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    def changed(parts: dict[str, Any]) -> None:
        index = json.loads(parts["index"])
        change(index)
        parts["index"] = json.dumps(index).encode()

    return changed


def swap(parts: dict[str, Any], one: str, two: str) -> None:
    for end in ("signed", "payload"):
        a, b = f"{one}/{end}", f"{two}/{end}"
        parts[a], parts[b] = parts[b], parts[a]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda parts: parts.pop("acc"),
        lambda parts: parts.pop("index"),
        lambda parts: parts.pop("kept/0/payload"),
        lambda parts: parts.update(acc=b"bytes"),
        lambda parts: parts.update(acc=parts["acc"].astype(np.float64)),
        lambda parts: parts.update(acc=parts["acc"][:3]),
        lambda parts: parts.update(more=b""),
        lambda parts: parts.update(index=b"["),
        lambda parts: parts.update(index=b"[]"),
        lambda parts: parts.update(index=b"[" * 100_000),
        lambda parts: parts.update({"kept/0/signed": b"\xff"}),
        lambda parts: parts.update({"kept/0/signed": b""}),
        lambda parts: parts.update({"kept/0/payload": parts["acc"]}),
        lambda parts: parts.update({"kept/0/payload": b"x"}),
        lambda parts: parts.update({"proofs/0/second": parts["proofs/0/first"]}),
        lambda parts: parts.update({"proofs/0/second": parts["kept/0/signed"]}),
        lambda parts: swap(parts, "retracted/0", "retracted/1"),
        lambda parts: swap(parts, "kept/0", "retracted/1"),
        with_index(lambda index: index.update(kept=-1)),
        with_index(lambda index: index.update(kept=True)),
        with_index(lambda index: index.update(kept=2**62)),
        with_index(lambda index: index.update(weight="1")),
        with_index(lambda index: index.update(weight=2**63)),
        with_index(lambda index: index.update(base="00")),
        with_index(lambda index: index.update(base=5)),
        with_index(lambda index: index.update(floor=5)),
        with_index(lambda index: index["floor"].append(["x" * 65, 0, 1, "00" * 32])),
        with_index(lambda index: index["floor"].append([7, 0, 1, "00" * 32])),
        with_index(lambda index: index["floor"].append(["zoe", 0, 0, "00" * 32])),
        with_index(lambda index: index["floor"].append(["zoe", 0, 1, "00"])),
        with_index(lambda index: index["floor"].append(index["floor"][0])),
        with_index(lambda index: index["floor"].reverse() or index["floor"].insert(0, ["zoe", 0, 1, "00" * 32])),
        with_index(lambda index: index["frontier"].append(["zoe", 0, 1, "00" * 32])),
        with_index(lambda index: index["limits"].append(["zoe", 0])),
        with_index(lambda index: index["limits"].append(["zoe", -1, 0])),
        with_index(lambda index: index.update(limits=[["ada", 0, 0]])),
        with_index(lambda index: index.pop("limits")),
        with_index(lambda index: index.update(floor=[])),
    ],
)
def test_a_spoilt_snapshot_is_the_senders_fault(spoil: Callable[[dict[str, Any]], object]) -> None:
    parts: dict[str, Any] = dict(a_log().snapshot().to_parts())
    assert state(load(dict(parts))) == state(a_log())
    spoil(parts)
    with pytest.raises(PeerFault) as fault:
        load(parts)
    assert fault.value.kind in {"bad_snapshot", "bad_payload"}


@given(st.data())
def test_any_changed_byte_is_found_by_signature_or_hash_or_changes_nothing(data: st.DataObject) -> None:
    log = a_log()
    snapshot = log.snapshot()
    parts: dict[str, Any] = dict(snapshot.to_parts())
    name = data.draw(st.sampled_from(sorted(set(parts) - {"acc"})))
    at = data.draw(st.integers(0, len(parts[name]) - 1))
    spoilt = bytearray(parts[name])
    spoilt[at] ^= data.draw(st.integers(1, 255))
    parts[name] = bytes(spoilt)
    kept = [header for header, _ in snapshot.kept + snapshot.retracted]
    signed = {h.signed for h in [*kept, *(h for fork in snapshot.proofs for h in (fork.first, fork.second))]}

    def verify(header: Header) -> None:
        if header.signed not in signed:
            raise PeerFault("bad_signature", "as its origin did not sign it")

    try:
        again = UpdateLog.from_snapshot(THETA0, RULES, parts, verify=verify)
    except PeerFault:
        return
    assert again.snapshot().hash != snapshot.hash or state(again) == state(log)


def test_a_snapshot_of_nothing() -> None:
    log = log_of()
    assert log.snapshot().floor == VersionVector({})
    assert state(load(log.snapshot().to_parts())) == state(log)
