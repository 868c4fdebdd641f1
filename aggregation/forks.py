"""Two chains under one name: the head after a header, the proof of equivocation, and the search for where chains part.

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


class Bisection:
    """Finds the first seq at which two chains under one key differ, by asking for O(log seq) of the other's heads.

    `while (seq := search.question) is not None: search.answer(<our head at seq>, <theirs>)`; then `search.first` is the
    disputed seq, whose two headers are the proof. Equal heads at one seq mean equal chains up to it, so halving is sound.
    """

    def __init__(self, same: int, differ: int) -> None:
        """`same`: highest seq at which both are known to agree (0: nothing). `differ`: one at which they do not."""
        if not 0 <= same < differ:
            raise ValueError(f"chains that agree at {same} cannot first differ by {differ}")
        self._same = same
        self.first = differ  # so far

    @property
    def question(self) -> int | None:
        """The next seq to ask about; None when `first` is final."""
        return (self._same + self.first) // 2 if self.first - self._same > 1 else None

    def answer(self, ours: bytes | None, theirs: bytes | None) -> None:
        """Heads at `question`. None: that side keeps it no more and counts it as final, so both are taken to agree there."""
        seq = self.question
        if seq is None:
            raise ValueError("nothing was asked")
        if ours is None or theirs is None or ours == theirs:
            self._same = seq
        else:
            self.first = seq
