"""Everybody's updates as chains, and the version vector that names their tops. Pure bookkeeping: no sums, no rules.

A chain is one origin's updates in seq order. What is at or below its *floor* is compacted: included, but kept no more.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..protocol.ballot_messages import Header
from ..protocol.version import NO_HEAD, Dot, VersionVector, sha256
from .contributions import Record
from .forks import Key

Top = tuple[int, bytes]  # (seq, head)
NOTHING: Top = (0, NO_HEAD)
_ENTRY = b"shoal/v1/vector-entry\0"
_DIGEST_RANGE = 2**256


class _Chain:
    """`records[i]` has seq floor + 1 + i."""

    __slots__ = ("floor", "records")

    def __init__(self, floor: Top) -> None:
        self.floor = floor
        self.records: list[Record] = []


class Chains:
    """What is included. Adding and asking cost nothing that grows with the number of chains."""

    def __init__(self) -> None:
        self._chains: dict[Key, _Chain] = {}
        self._by_peer: dict[str, list[Key]] = {}
        self._tops: dict[Key, Top] = {}  # the vector, mutable
        self._vector: VersionVector | None = None
        self._met = 0  # chains in `_tops` when it was last sorted
        self._digest = 0
        self._digested: dict[Key, int] = {}  # what each entry has put into the digest
        self._undigested: set[Key] = set()
        self.count = 0  # kept records
        self.included = 0  # updates that the vector names, kept or not

    # ------------------------------------------------------------------------------------------------ readers

    @property
    def vector(self) -> VersionVector:
        if self._vector is None:
            if self._met != len(
                self._tops
            ):  # in the order of the keys: what is hashed and sent must be, again and again
                self._tops = dict(sorted(self._tops.items()))
                self._met = len(self._tops)
            self._vector = VersionVector(dict(self._tops))
        return self._vector

    @property
    def digest(self) -> bytes:
        """32 bytes, equal for equal vectors; costs what changed since it was last asked for.

        A sum of hashes modulo 2^256: good for "is there anything to exchange", never for trust. An origin could search
        (2^32 work or more) for two sets of its own updates with one digest; they stay unexchanged between two peers
        until either learns anything else.
        """
        for key in self._undigested:
            new = 0
            if key in self._tops:
                seq, head = self._tops[key]
                new = int.from_bytes(sha256(_ENTRY, f"{key[0]} {key[1]} {seq} ".encode(), head), "little")
            self._digest = (self._digest + new - self._digested.get(key, 0)) % _DIGEST_RANGE
            self._digested[key] = new
        self._undigested.clear()
        return self._digest.to_bytes(32, "little")

    def keys_of(self, peer: str) -> list[Key]:
        """The peer's chains, by incarnation."""
        return sorted(self._by_peer.get(peer, ()))

    def top(self, key: Key) -> Top:
        return self._tops.get(key, NOTHING)

    def floor(self, key: Key) -> Top:
        chain = self._chains.get(key)
        return chain.floor if chain is not None else NOTHING

    def floors(self) -> dict[Key, Top]:
        """Floors above zero, by key."""
        return {key: self._chains[key].floor for key in sorted(self._chains) if self._chains[key].floor[0]}

    def records(self, key: Key) -> list[Record]:
        """Kept ones, in seq order; not to be changed."""
        chain = self._chains.get(key)
        return chain.records if chain is not None else []

    def kept(self) -> Iterator[Record]:
        """All kept ones: origins in the order in which they were met, each in seq order."""
        for chain in self._chains.values():
            yield from chain.records

    def record(self, key: Key, seq: int) -> Record | None:
        """The included update, if it is kept."""
        chain = self._chains.get(key)
        if chain is None or not 0 < seq - chain.floor[0] <= len(chain.records):
            return None
        return chain.records[seq - chain.floor[0] - 1]

    def head_at(self, key: Key, seq: int) -> bytes | None:
        """Head of the chain after `seq` (0: 32 zero bytes); None where it is not included, or compacted away."""
        if seq == 0:
            return NO_HEAD
        floor, head = self.floor(key)
        if seq == floor:
            return head
        record = self.record(key, seq)
        return record.top[1] if record is not None else None

    # ------------------------------------------------------------------------------------------------ with a peer

    def lacks(self, theirs: VersionVector, bytes_max: int) -> list[Header]:
        """Headers that a peer with this vector can add, in order; up to `bytes_max` of update in all, but at least one.

        Origins in the order in which they were met, each in seq order. Leaves out chains that the peer's differ from
        (`disagreements`) or whose next update is compacted here (`compacted_for`).
        """
        lacking: list[Header] = []
        room = bytes_max
        for key, (top, _) in self._tops.items():
            seq, head = theirs.entries.get(key, NOTHING)
            if seq >= top or seq < self._chains[key].floor[0] or self.head_at(key, seq) != head:
                continue
            chain = self._chains[key]
            for record in chain.records[seq - chain.floor[0] :]:
                room -= record.size
                if room < 0 and lacking:
                    return lacking
                lacking.append(record.header)
        return lacking

    def weight_beyond(self, theirs: VersionVector) -> int:
        """Weight of kept updates that a peer with this vector lacks: one side's concurrent weight (heal.py)."""
        weight = 0
        for key, (top, _) in self._tops.items():
            seq = theirs.entries.get(key, NOTHING)[0]
            if seq < top:
                chain = self._chains[key]
                weight += sum(record.header.weight for record in chain.records[max(0, seq - chain.floor[0]) :])
        return weight

    def compacted_for(self, theirs: VersionVector) -> list[Key]:
        """Chains whose next update a peer with this vector cannot get here any more: it needs a snapshot."""
        return [key for key, chain in self._chains.items() if theirs.seq(*key) < chain.floor[0]]

    def disagreements(self, theirs: VersionVector) -> list[tuple[Key, int]]:
        """(key, seq) where our head is another than theirs: the chain is to be fetched from its start.

        Where their chain is the longer one, only they can see it, in our vector.
        """
        found: list[tuple[Key, int]] = []
        for key, top in theirs.entries.items():
            if top == self._tops.get(key):
                continue
            ours = self.head_at(key, top[0])
            if ours is not None and ours != top[1]:
                found.append((key, top[0]))
        return found

    # ------------------------------------------------------------------------------------------------ changes

    def begin(self, key: Key, floor: Top) -> None:
        """A new chain whose updates up to `floor` are compacted."""
        self._chain(key).floor = floor
        self._set_top(key, floor)

    def push(self, record: Record) -> None:
        """Include the next update of its chain."""
        self._chain(record.key).records.append(record)
        self.count += 1
        self._set_top(record.key, record.top)

    def _chain(self, key: Key) -> _Chain:
        chain = self._chains.get(key)
        if chain is None:
            chain = self._chains[key] = _Chain(NOTHING)
            self._by_peer.setdefault(key[0], []).append(key)
        return chain

    def cut(self, key: Key, seq: int) -> list[Record]:
        """Take out the kept updates above `seq`; gives them in seq order."""
        chain = self._chains.get(key)
        if chain is None:
            return []
        at = max(0, seq - chain.floor[0])
        taken = chain.records[at:]
        if taken:
            del chain.records[at:]
            self.count -= len(taken)
            self._set_top(key, chain.records[-1].top if chain.records else chain.floor)
        return taken

    def compact(self, key: Key, seq: int) -> list[Record]:
        """Keep nothing at or below `seq`, which is included; gives what was kept. The vector stays."""
        chain = self._chains[key]
        count = max(0, seq - chain.floor[0])
        gone = chain.records[:count]
        if gone:
            del chain.records[:count]
            self.count -= len(gone)
            chain.floor = gone[-1].top
        return gone

    def _set_top(self, key: Key, top: Top) -> None:
        self.included += top[0] - self._tops.get(key, NOTHING)[0]
        if top[0]:
            self._tops[key] = top
        else:
            del self._tops[key]
            self._met = -1
        self._undigested.add(key)
        self._vector = None


def dots_of(records: list[Record]) -> list[Dot]:
    """Their names, in the same order."""
    return [record.header.dot for record in records]
