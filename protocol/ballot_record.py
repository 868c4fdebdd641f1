"""What a member must still know of a round after a crash: promise, votes, own header. Bytes and back.

One record is kept, that of the open round. It may be replaced by the next round's only when the state that the commit
leads to is durable: a member that lost both would be free to break its promises.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from .ballot_messages import Header, VotedFor, decode_value, parse_header
from .errors import ExitCode, PeerFault, ShoalError
from .version import HASH_BYTES, sha256
from .wire_pb2 import Signed

_MAGIC = b"shoal-ballot-1\0\0"
_FIXED = struct.Struct(">Q32sq")  # round, base lineage, promised attempt (-1: none)
_VOTE = struct.Struct(">qI")  # attempt (-1: none), bytes of the value
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class BallotRecord:
    """`promised` is -1 before the first join. `voted`, `voted_split`: the last vote in an attempt with a majority on
    its roster, and in one without (the two never stand in for each other, or a split could overrule a majority)."""

    round: int
    base_lineage: bytes
    promised: int = -1
    voted: VotedFor | None = None
    voted_split: VotedFor | None = None
    header: Header | None = None

    def concerns(self, round_: int, base_lineage: bytes) -> bool:
        return (self.round, self.base_lineage) == (round_, base_lineage)

    def encode(self) -> bytes:
        """Canonical bytes with their own checksum."""
        parts = [_MAGIC, _FIXED.pack(self.round, self.base_lineage, self.promised)]
        for vote in (self.voted, self.voted_split):
            value = vote.value.encoded if vote else b""
            parts += [_VOTE.pack(vote.attempt if vote else -1, len(value)), value]
        signed = self.header.signed if self.header else b""
        parts += [_LENGTH.pack(len(signed)), signed]
        return b"".join([*parts, sha256(*parts)])


def decode_record(encoded: bytes) -> BallotRecord:
    """A record from its bytes. Raises ShoalError (code DISK) when they are not what `encode` wrote."""
    body, checksum = encoded[:-HASH_BYTES], encoded[-HASH_BYTES:]
    found = sha256(body)
    if found != checksum or not body.startswith(_MAGIC):
        raise ShoalError(
            "The ballot record on disk is damaged",
            values=f"checksum {found.hex()[:16]}, expected {checksum.hex()[:16]}",
            todo="Restore the data directory, or start with a new incarnation: a vote may be forgotten.",
            code=ExitCode.DISK,
        )
    try:
        round_, base_lineage, promised = _FIXED.unpack_from(body, at := len(_MAGIC))
        at += _FIXED.size
        votes: list[VotedFor | None] = []
        for split in (False, True):
            attempt, size = _VOTE.unpack_from(body, at)
            at += _VOTE.size
            votes.append(VotedFor(attempt, decode_value(body[at : at + size]), split) if attempt >= 0 else None)
            at += size
        (size,) = _LENGTH.unpack_from(body, at)
        signed = body[at + _LENGTH.size : at + _LENGTH.size + size]
        header = parse_header(Signed.FromString(signed)) if size else None
    except (struct.error, PeerFault, DecodeError) as error:
        raise ShoalError(
            "The ballot record on disk was written by another version of shoal",
            values=f"found {error}, expected the layout {_MAGIC.rstrip(bytes(1)).decode()}",
            todo="Start the version that wrote it, or start with a new incarnation.",
            code=ExitCode.DISK,
        ) from None
    return BallotRecord(round_, base_lineage, promised, votes[0], votes[1], header)
