"""Membership records and messages to bytes and back: limits checked, every rumour's signature verified. No state."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from google.protobuf.message import DecodeError

from . import limits
from .errors import PeerFault
from .identity import Identity
from .invite import check_address
from .membership_events import Kind, Message, Record, State
from .signing import sign_body, verify_body
from .wire_pb2 import MemberRecord, Signed, Summary, Swim

_ROLES = {State.ALIVE: "alive", State.SUSPECT: "suspect", State.DEAD: "dead", State.LEFT: "left"}
_STATES = {state.value for state in State}
_KINDS = {kind.value for kind in Kind}


def _need(condition: bool, detail: str, kind: str = "bad_rumour") -> None:
    if not condition:
        raise PeerFault(kind, detail)


def sign_record(identity: Identity, run_id: bytes, record: Record) -> Record:
    """The record with its signed bytes: about ourselves, or our report of another (then `reporter` is us)."""
    wire = MemberRecord(
        peer=record.peer,
        state=record.state.value,  # pyright: ignore[reportArgumentType]
        incarnation=record.incarnation,
        counter=record.counter,
        boot_id=record.boot_id,
        addresses=record.addresses,
        reporter=record.reporter,
        samples_per_s=record.samples_per_s,
    )
    signed = sign_body(identity, "member", _ROLES[record.state], run_id, wire.SerializeToString(deterministic=True))
    return replace(record, signed=signed.SerializeToString(deterministic=True))


def open_record(signed: Signed, run_id: bytes) -> Record:
    """Verify one rumour. Raises PeerFault("bad_rumour", "bad_signature" or "bad_peer_id")."""
    return _open_record(signed.body, signed.signature, run_id)


@lru_cache(maxsize=limits.MEMBER_RECORDS_KEPT_MAX)  # keeps no failures
def _open_record(body: bytes, signature: bytes, run_id: bytes) -> Record:
    signed = Signed(body=body, signature=signature)
    _need(
        len(signed.body) <= limits.MEMBER_RECORD_BYTES_MAX,
        f"record of {len(signed.body)} bytes, limit {limits.MEMBER_RECORD_BYTES_MAX}",
    )
    wire = MemberRecord()
    try:
        wire.ParseFromString(signed.body)
    except DecodeError as error:
        raise PeerFault("bad_rumour", str(error)) from None
    _need(wire.state in _STATES, f"state {wire.state}")
    state = State(wire.state)
    _need(0 < len(wire.peer) <= limits.PEER_ID_CHARS_MAX, "peer id of impossible length")
    _need(len(wire.reporter) <= limits.PEER_ID_CHARS_MAX, "reporter of impossible length")
    # A counter of 0 is what nobody has signed yet.
    _need(wire.incarnation <= limits.INT64_MAX and 0 < wire.counter <= limits.INT64_MAX, "impossible numbers")
    own = state in (State.ALIVE, State.LEFT)
    signer = wire.peer if own else wire.reporter
    _need(bool(signer) and (own or signer != wire.peer), "a report without a reporter")
    verify_body(signed, signer, "member", _ROLES[state], run_id)
    record = Record(
        peer=wire.peer,
        state=state,
        incarnation=wire.incarnation,
        counter=wire.counter,
        signed=signed.SerializeToString(deterministic=True),
    )
    if not own:
        return replace(record, reporter=wire.reporter)
    _need(len(wire.boot_id) in (0, 16), f"boot id of {len(wire.boot_id)} bytes")
    _need(len(wire.addresses) <= limits.ADDRESSES_MAX, f"{len(wire.addresses)} addresses")
    _need(math.isfinite(wire.samples_per_s) and wire.samples_per_s >= 0, "impossible speed")
    try:
        addresses = tuple(check_address(address) for address in wire.addresses)
    except ValueError as error:
        raise PeerFault("bad_rumour", str(error)) from None
    return replace(record, boot_id=wire.boot_id, addresses=addresses, samples_per_s=wire.samples_per_s)


def open_summary(summary: Summary) -> Summary:
    """A copy that can be kept: within its limits and without fields that nobody knows. Raises PeerFault("bad_summary")."""
    for each in (summary.lineage, summary.state_hash):
        _need(len(each) in (0, 32), f"hash of {len(each)} bytes", "bad_summary")
    numbers = max(summary.round, summary.open_round, summary.total_weight)
    _need(numbers <= limits.INT64_MAX, "impossible numbers", "bad_summary")
    _need(summary.samples <= limits.WEIGHT_MAX, f"{summary.samples} samples", "bad_summary")
    kept = Summary()
    kept.CopyFrom(summary)
    kept.DiscardUnknownFields()
    return kept


def encode(message: Message) -> Swim:
    """To the wire; rumours without a signature are left out."""
    wire = Swim(
        kind=message.kind.value,  # pyright: ignore[reportArgumentType]
        nonce=message.nonce,
        target=message.target,
    )
    for record in message.rumours:
        if record.signed:
            wire.rumours.add().MergeFromString(record.signed)
    if message.summary is not None:
        wire.summary.CopyFrom(message.summary)
    return wire


def decode(wire: Swim, run_id: bytes) -> Message:
    """From the wire. Raises PeerFault; then nothing of the message may be used."""
    _need(wire.kind in _KINDS, f"kind {wire.kind}")
    _need(len(wire.rumours) <= limits.RUMOURS_PER_MESSAGE_MAX, f"{len(wire.rumours)} rumours")
    _need(len(wire.target) <= limits.PEER_ID_CHARS_MAX, "target of impossible length")
    return Message(
        Kind(wire.kind),
        wire.nonce,
        wire.target,
        tuple(open_record(signed, run_id) for signed in wire.rumours),
        open_summary(wire.summary) if wire.HasField("summary") else None,
    )
