"""Membership records and messages to bytes and back: limits checked, every rumour's signature verified. No state."""

from __future__ import annotations

import math

from google.protobuf.message import DecodeError

from . import limits
from .errors import PeerFault
from .identity import Identity
from .invite import check_address
from .membership import Kind, Message, Record, State
from .signing import sign_body, verify_body
from .wire_pb2 import MemberRecord, Signed, Swim

_ROLES = {State.ALIVE: "alive", State.SUSPECT: "suspect", State.DEAD: "dead", State.LEFT: "left"}


def _need(condition: bool, detail: str) -> None:
    if not condition:
        raise PeerFault("bad_rumour", detail)


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
    return Record(**{**record.__dict__, "signed": signed.SerializeToString(deterministic=True)})


def open_record(signed: Signed, run_id: bytes) -> Record:
    """Verify one rumour. Raises PeerFault("bad_rumour" or "bad_signature")."""
    wire = MemberRecord()
    try:
        wire.ParseFromString(signed.body)
    except DecodeError as error:
        raise PeerFault("bad_rumour", str(error)) from None
    _need(wire.state in set(State), f"state {wire.state}")
    state = State(wire.state)
    _need(0 < len(wire.peer) <= limits.PEER_ID_CHARS_MAX, "peer id of impossible length")
    _need(max(wire.incarnation, wire.counter) <= limits.INT64_MAX, "impossible numbers")
    _need(len(wire.boot_id) in (0, 16), f"boot id of {len(wire.boot_id)} bytes")
    _need(len(wire.addresses) <= limits.ADDRESSES_MAX, f"{len(wire.addresses)} addresses")
    _need(math.isfinite(wire.samples_per_s) and wire.samples_per_s >= 0, "impossible speed")
    try:
        addresses = tuple(check_address(a) for a in wire.addresses)
    except ValueError as error:
        raise PeerFault("bad_rumour", str(error)) from None
    own = state in (State.ALIVE, State.LEFT)
    signer = wire.peer if own else wire.reporter
    _need(bool(signer) and (own or signer != wire.peer), "a report without a reporter")
    verify_body(signed, signer, "member", _ROLES[state], run_id)
    return Record(
        peer=wire.peer,
        state=state,
        incarnation=wire.incarnation,
        counter=wire.counter,
        boot_id=wire.boot_id,
        addresses=addresses,
        reporter="" if own else wire.reporter,
        samples_per_s=wire.samples_per_s,
        signed=Signed(body=signed.body, signature=signed.signature).SerializeToString(deterministic=True),
    )


def encode(message: Message) -> Swim:
    """To the wire; rumours without a signature are left out."""
    return Swim(
        kind=message.kind.value,  # pyright: ignore[reportArgumentType]
        nonce=message.nonce,
        target=message.target,
        rumours=[Signed.FromString(r.signed) for r in message.rumours if r.signed],
    )


def decode(wire: Swim, run_id: bytes) -> Message:
    """From the wire. Raises PeerFault."""
    _need(wire.kind in set(Kind), f"kind {wire.kind}")
    _need(len(wire.rumours) <= limits.RUMOURS_PER_MESSAGE_MAX, f"{len(wire.rumours)} rumours")
    _need(len(wire.target) <= limits.PEER_ID_CHARS_MAX, "target of impossible length")
    return Message(
        Kind(wire.kind), wire.nonce, wire.target, tuple(open_record(signed, run_id) for signed in wire.rumours)
    )
