"""The ballot's messages to protobuf and back: signatures, limits, and that the signer is who the message says.

Everything that a ballot receives has come through `decode`: after it only the round's own rules (ballot.py) are left to
check. All faults are the remote's (`PeerFault`): "bad_message" for form and limits, "bad_signature" from signing.py,
"wrong_signer" when message and session name different peers.

Who signs what: see wire.proto. Convene and Holding are not signed: the session they arrive on names the sender.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as WireMessage

from . import limits, wire_pb2
from .ballot_messages import (
    Commit,
    Convene,
    Exchange,
    Header,
    Holding,
    Join,
    Message,
    Propose,
    Roster,
    RosterEntry,
    Value,
    Vote,
    VotedFor,
    decode_value,
    parse_header,
)
from .errors import PeerFault
from .identity import Identity
from .signing import sign_body, verify_body
from .version import HASH_BYTES

# Which bodies of an Envelope are the ballot's.
BODIES: Final = frozenset({"convene", "join", "roster", "holding", "propose", "vote", "commit"})
# Set in Join.voted_attempt when that vote was cast in a split attempt; attempts stay far below.
SPLIT_VOTE: Final = 1 << 31


W = TypeVar("W", bound=WireMessage)


# --- out --------------------------------------------------------------------------------------------------------------


def encode(message: Message, identity: Identity, run_id: bytes) -> wire_pb2.Envelope:
    """Sign and wrap a message of this peer. Votes and headers that carry their signed bytes are sent as they are."""

    def signed(type_: str, role: str, body: WireMessage) -> wire_pb2.Signed:
        return sign_body(identity, type_, role, run_id, body.SerializeToString(deterministic=True))

    match message:
        case Convene():
            return wire_pb2.Envelope(
                convene=wire_pb2.Convene(
                    round=message.round,
                    base_lineage=message.base_lineage,
                    attempt=message.attempt,
                    reason=message.reason,
                )
            )
        case Join():
            voted = message.voted
            join = wire_pb2.Join(
                peer=message.peer,
                round=message.round,
                base_lineage=message.base_lineage,
                attempt=message.attempt,
                header=_signed_header(message.header),
                voted_attempt=0 if voted is None else (voted.attempt + 1) | (SPLIT_VOTE if voted.split else 0),
                voted_value=voted.value.encoded if voted is not None else b"",
                state_hash=message.state_hash,
                observer=message.observer,
            )
            return wire_pb2.Envelope(join=signed("join", "member", join))
        case Roster():
            roster = wire_pb2.Roster(
                convener=message.convener,
                round=message.round,
                base_lineage=message.base_lineage,
                attempt=message.attempt,
                entries=[wire_pb2.RosterEntry(peer=e.peer, header=_signed_header(e.header)) for e in message.entries],
                joiners=message.joiners,
                exchange=message.exchange.value,  # pyright: ignore[reportArgumentType]
                reason=message.reason[: limits.REASON_CHARS_MAX],
                bound_value=message.bound_value.encoded if message.bound_value is not None else b"",
            )
            return wire_pb2.Envelope(roster=signed("roster", "convener", roster))
        case Holding():
            return wire_pb2.Envelope(
                holding=wire_pb2.Holding(
                    peer=message.peer,
                    round=message.round,
                    base_lineage=message.base_lineage,
                    attempt=message.attempt,
                    update_hashes=message.update_hashes,
                    chunk_hashes=message.chunk_hashes,
                )
            )
        case Propose():
            propose = wire_pb2.Propose(
                convener=message.convener,
                round=message.round,
                base_lineage=message.base_lineage,
                attempt=message.attempt,
                value=message.value.encoded,
            )
            return wire_pb2.Envelope(propose=signed("propose", "convener", propose))
        case Vote():
            return wire_pb2.Envelope(vote=wire_pb2.Signed.FromString(message.signed))
        case Commit():
            return wire_pb2.Envelope(commit=encode_commit(message))


def vote_signer(identity: Identity, run_id: bytes) -> Callable[[Vote], bytes]:
    """The `sign_vote` of this peer's ballots. Ed25519 is deterministic: equal votes have equal bytes."""

    def sign(vote: Vote) -> bytes:
        body = wire_pb2.Vote(
            peer=vote.peer,
            round=vote.round,
            base_lineage=vote.base_lineage,
            attempt=vote.attempt,
            value_hash=vote.value_hash,
            split=vote.split,
        )
        signed = sign_body(identity, "vote", "member", run_id, body.SerializeToString(deterministic=True))
        return signed.SerializeToString(deterministic=True)

    return sign


def encode_commit(commit: Commit) -> wire_pb2.Commit:
    return wire_pb2.Commit(
        attempt=commit.attempt,
        value=commit.value.encoded,
        votes=[wire_pb2.Signed.FromString(vote.signed) for vote in commit.votes],
    )


def _signed_header(header: Header | None) -> wire_pb2.Signed | None:
    return wire_pb2.Signed.FromString(header.signed) if header is not None else None


# --- in ---------------------------------------------------------------------------------------------------------------


def decode(envelope: wire_pb2.Envelope, peer: str, run_id: bytes) -> Message:
    """The message that `peer` (of the session) sent, checked. Raises PeerFault.

    The envelope's body must be one of `BODIES` (ValueError otherwise: routing is the caller's).
    """
    match envelope.WhichOneof("body"):
        case "convene":
            wire = envelope.convene
            _check_place(wire)
            _need(len(wire.reason) <= limits.REASON_CHARS_MAX, f"reason of {len(wire.reason)} characters")
            return Convene(wire.round, wire.base_lineage, wire.attempt, wire.reason)
        case "join":
            return _join(_open(envelope.join, wire_pb2.Join(), peer, "join", "member", run_id), peer, run_id)
        case "roster":
            return _roster(_open(envelope.roster, wire_pb2.Roster(), peer, "roster", "convener", run_id), peer, run_id)
        case "holding":
            return _holding(envelope.holding, peer)
        case "propose":
            wire = _open(envelope.propose, wire_pb2.Propose(), peer, "propose", "convener", run_id)
            _check_place(wire)
            _check_signer(wire.convener, peer)
            return Propose(peer, wire.round, wire.base_lineage, wire.attempt, _value(wire.value, wire))
        case "vote":
            vote = _vote(envelope.vote, run_id)
            _check_signer(vote.peer, peer)
            return vote
        case "commit":
            return decode_commit(envelope.commit, run_id)
        case other:
            raise ValueError(f"envelope with {other}: not a message of the ballot")


def decode_commit(wire: wire_pb2.Commit, run_id: bytes) -> Commit:
    """A commit with all its votes' signatures checked; whether they are enough is `commit.check_commit`'s. Raises
    PeerFault."""
    _need(wire.attempt <= limits.ATTEMPTS_MAX, f"attempt {wire.attempt}")
    _need(len(wire.votes) <= limits.ROSTER_MAX, f"commit with {len(wire.votes)} votes")
    return Commit(wire.attempt, decode_value(wire.value), tuple(_vote(signed, run_id) for signed in wire.votes))


def decode_header(signed: wire_pb2.Signed, run_id: bytes) -> Header:
    """An update's header, its origin's signature checked. Raises PeerFault."""
    return _decode_header(signed.body, signed.signature, run_id)


@lru_cache(maxsize=limits.HEADERS_DECODED_MAX)  # keeps no failures
def _decode_header(body: bytes, signature: bytes, run_id: bytes) -> Header:
    signed = wire_pb2.Signed(body=body, signature=signature)
    header = parse_header(signed)
    verify_body(signed, header.dot.peer, "update", "origin", run_id)
    return header


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise PeerFault("bad_message", what)


def _check_hash(value: bytes, what: str) -> None:
    _need(len(value) == HASH_BYTES, f"{what} of {len(value)} bytes")


def _check_hashes(values: Iterable[bytes], limit: int, what: str) -> tuple[bytes, ...]:
    found = tuple(values)
    _need(len(found) <= limit, f"{len(found)} {what}, limit {limit}")
    for value in found:
        _check_hash(value, what)
    return found


def _check_peer(peer: str) -> None:
    _need(0 < len(peer) <= limits.PEER_ID_CHARS_MAX, f"peer id of {len(peer)} characters")


def _check_place(
    wire: wire_pb2.Convene | wire_pb2.Join | wire_pb2.Roster | wire_pb2.Holding | wire_pb2.Propose | wire_pb2.Vote,
) -> None:
    """Round, base lineage and attempt are possible."""
    _check_hash(wire.base_lineage, "base lineage")
    _need(wire.attempt <= limits.ATTEMPTS_MAX, f"attempt {wire.attempt}, limit {limits.ATTEMPTS_MAX}")
    _need(wire.round <= limits.INT64_MAX, f"round {wire.round}")


def _check_signer(named: str, signer: str) -> None:
    if named != signer:
        raise PeerFault("wrong_signer", f"message names {named[:64]}, it is {signer}'s")


def _open(signed: wire_pb2.Signed, into: W, peer: str, type_: str, role: str, run_id: bytes) -> W:
    """Check size and signature, then decode the body."""
    _need(len(signed.body) <= limits.SIGNED_BODY_BYTES_MAX, f"{type_} of {len(signed.body)} bytes")
    return _parse(verify_body(signed, peer, type_, role, run_id), into, type_)


def _parse(body: bytes, into: W, type_: str) -> W:
    try:
        into.ParseFromString(body)
    except DecodeError:
        raise PeerFault("bad_message", f"{type_} does not decode") from None
    return into


def _value(encoded: bytes, about: wire_pb2.Join | wire_pb2.Roster | wire_pb2.Propose) -> Value:
    value = decode_value(encoded)
    _need((value.round, value.base_lineage) == (about.round, about.base_lineage), "value of another round or lineage")
    return value


def _update(signed: wire_pb2.Signed, peer: str, about: wire_pb2.Join | wire_pb2.Roster, run_id: bytes) -> Header:
    """The header of `peer`'s update for the message's round."""
    header = decode_header(signed, run_id)
    _check_signer(header.dot.peer, peer)
    _need(
        (header.round, header.base_lineage) == (about.round, about.base_lineage), "update of another round or lineage"
    )
    return header


def _join(wire: wire_pb2.Join, peer: str, run_id: bytes) -> Join:
    _check_place(wire)
    _check_signer(wire.peer, peer)
    _check_hash(wire.state_hash, "state hash")
    voted = None
    if wire.voted_attempt:
        attempt = (wire.voted_attempt & (SPLIT_VOTE - 1)) - 1
        _need(0 <= attempt <= wire.attempt, f"vote of attempt {attempt} in a join of {wire.attempt}")
        voted = VotedFor(attempt, _value(wire.voted_value, wire), bool(wire.voted_attempt & SPLIT_VOTE))
    else:
        _need(not wire.voted_value, "a voted value without its attempt")
    header = _update(wire.header, peer, wire, run_id) if wire.HasField("header") else None
    _need(not wire.observer or (voted is None and header is None), "an observer with an update or a vote")
    return Join(peer, wire.round, wire.base_lineage, wire.attempt, header, voted, wire.state_hash, wire.observer)


def _roster(wire: wire_pb2.Roster, peer: str, run_id: bytes) -> Roster:
    _check_place(wire)
    _check_signer(wire.convener, peer)
    count = len(wire.entries) + len(wire.joiners)
    _need(len(wire.entries) > 0 and count <= limits.ROSTER_MAX, f"roster of {count} peers, limit {limits.ROSTER_MAX}")
    _need(len(wire.reason) <= limits.REASON_CHARS_MAX, f"reason of {len(wire.reason)} characters")
    _need(wire.exchange in set(Exchange), f"roster with exchange {wire.exchange}")
    named = [*(entry.peer for entry in wire.entries), *wire.joiners]
    for member in named:
        _check_peer(member)
    _need(len(set(named)) == len(named), "roster names a peer twice")
    return Roster(
        convener=peer,
        round=wire.round,
        base_lineage=wire.base_lineage,
        attempt=wire.attempt,
        entries=tuple(
            RosterEntry(e.peer, _update(e.header, e.peer, wire, run_id) if e.HasField("header") else None)
            for e in wire.entries
        ),
        joiners=tuple(wire.joiners),
        exchange=Exchange(wire.exchange),
        reason=wire.reason,
        bound_value=_value(wire.bound_value, wire) if wire.bound_value else None,
    )


def _holding(wire: wire_pb2.Holding, peer: str) -> Holding:
    _check_place(wire)
    _check_signer(wire.peer, peer)
    return Holding(
        peer,
        wire.round,
        wire.base_lineage,
        wire.attempt,
        _check_hashes(wire.update_hashes, limits.ROSTER_MAX, "update hashes"),
        _check_hashes(wire.chunk_hashes, limits.CHUNKS_MAX, "chunk hashes"),
    )


def _vote(signed: wire_pb2.Signed, run_id: bytes) -> Vote:
    """A vote, signed by the voter that it names."""
    _need(len(signed.body) <= limits.HEADER_BYTES_MAX, f"vote of {len(signed.body)} bytes")
    wire = _parse(signed.body, wire_pb2.Vote(), "vote")
    _check_place(wire)
    _check_peer(wire.peer)
    _check_hash(wire.value_hash, "value hash")
    verify_body(signed, wire.peer, "vote", "member", run_id)
    exact = wire_pb2.Signed(body=signed.body, signature=signed.signature).SerializeToString(deterministic=True)
    return Vote(wire.peer, wire.round, wire.base_lineage, wire.attempt, wire.value_hash, wire.split, exact)
