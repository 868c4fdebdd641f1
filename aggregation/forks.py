"""Two chains under one name: the head after a header, and the proof of equivocation.

Pure. Does not verify signatures: whoever takes a header or a proof from the wire does that first. A head covers the body
that its origin signed, not the signature: two valid signatures under one body are one update, not a fork.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..protocol.ballot_messages import Header
from ..protocol.errors import PeerFault
from ..protocol.version import Dot, next_head
from ..protocol.wire_pb2 import Signed

Key = tuple[str, int]  # (peer, incarnation): one chain


def head_of(header: Header) -> bytes:
    """The head (32 bytes) of its origin's chain after this header."""
    return next_head(header.previous_head, Signed.FromString(header.signed).body)


@dataclass(frozen=True)
class Fork:
    """Two different headers that one origin signed under one dot: the proof.

    Raises:
        PeerFault("bad_proof"): they are not under one dot, or give the same head.
    """

    first: Header
    second: Header

    def __post_init__(self) -> None:
        if self.first.dot != self.second.dot:
            raise PeerFault("bad_proof", f"headers of {self.first.dot} and {self.second.dot} prove nothing")
        if head_of(self.first) == head_of(self.second):
            raise PeerFault("bad_proof", f"the two headers of {self.first.dot} are one")

    @property
    def dot(self) -> Dot:
        return self.first.dot
