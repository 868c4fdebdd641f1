"""A gossip log as plain arrays and bytes: for checkpoints and newcomers. Pure; knows the form, not the meaning.

The state at the floor is believed by its hash, which two peers with one frontier find alike. The log above it proves
itself: signed headers as opaque bytes, payloads by their hashes. Every reader of foreign bytes here raises
PeerFault("bad_snapshot") and allocates in proportion to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from ..protocol import limits as bounds
from ..protocol.ballot_messages import Header, parse_header
from ..protocol.errors import PeerFault
from ..protocol.version import HASH_BYTES, VersionVector, sha256
from ..protocol.wire_pb2 import Signed
from .forks import Fork, Key

Parts = Mapping[str, "np.ndarray | bytes"]
Logged = tuple[tuple[Header, bytes], ...]  # (header, payload), in the order in which they can be added

# Hybrid mode: of each origin's inner updates in the sum at the floor the newest so many are remembered by name.
INNER_KEPT = 64


def join_inner(one: Iterable[int], two: Iterable[int]) -> tuple[int, ...]:
    """The newest INNER_KEPT of both, ascending: whatever the order of joins, of the union."""
    return tuple(sorted({*one, *two})[-INNER_KEPT:])


@dataclass(frozen=True)
class Snapshot:
    """One log.

    Attributes:
        acc: int64 [d] in units of 2^-40, the sum of what is at or below `floor`.
        floor: what `acc` includes.
        weight: total weight of it.
        frontier: what is final.
        base: 32 bytes, the log's merged base.
        limits: chains frozen without a proof, and where.
        kept: included updates above the floor.
        retracted: updates taken back and kept.
        proofs: of equivocation, sorted by dot.
        inner: hybrid mode: the newest inner updates in `acc`, by chain, ascending.
    """

    acc: np.ndarray
    floor: VersionVector
    weight: int
    frontier: VersionVector
    base: bytes
    limits: Mapping[Key, int]
    kept: Logged = ()
    retracted: Logged = ()
    proofs: tuple[Fork, ...] = ()
    inner: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)

    def _state(self) -> dict[str, Any]:
        inner = {"inner": sorted([p, i, list(seqs)] for (p, i), seqs in self.inner.items())} if self.inner else {}
        return inner | {
            "base": self.base.hex(),
            "floor": _rows(self.floor),
            "frontier": _rows(self.frontier),
            "limits": sorted([peer, incarnation, seq] for (peer, incarnation), seq in self.limits.items()),
            "weight": self.weight,
        }

    @property
    def hash(self) -> bytes:
        """sha-256 (32 bytes) of all but the log and the proofs: what two peers must agree on to be believed."""
        return sha256(b"shoal/v1/gossip-snapshot\0", _text(self._state()), b"\0", self.acc.astype("<i8").tobytes())

    def to_parts(self) -> dict[str, np.ndarray | bytes]:
        """Named arrays and bytes."""
        parts: dict[str, np.ndarray | bytes] = {"acc": self.acc.copy()}
        for name, logged in (("kept", self.kept), ("retracted", self.retracted)):
            for number, (header, payload) in enumerate(logged):
                parts[f"{name}/{number}/signed"] = header.signed
                parts[f"{name}/{number}/payload"] = payload
        for number, fork in enumerate(self.proofs):
            parts[f"proofs/{number}/first"] = fork.first.signed
            parts[f"proofs/{number}/second"] = fork.second.signed
        counts = {name: len(getattr(self, name)) for name in ("kept", "retracted", "proofs")}
        parts["index"] = _text(self._state() | counts)
        return parts

    @classmethod
    def from_parts(cls, parts: Parts, d: int) -> Snapshot:
        """Inverse of `to_parts` for d coordinates. Signatures and chains are for the caller to check.

        Raises:
            PeerFault("bad_snapshot"): anything is missing, misshapen or more than is named.
        """
        try:
            index = json.loads(_bytes(parts, "index"))
            acc = parts["acc"]
            if not isinstance(acc, np.ndarray) or acc.dtype != np.int64 or acc.shape != (d,):
                raise ValueError(f"its sum is not int64 [{d}]")
            counts = [_count(index[name]) for name in ("kept", "retracted", "proofs")]
            if len(parts) != 2 + 2 * sum(counts):
                raise ValueError(f"{len(parts)} parts, its index names {2 + 2 * sum(counts)}")
            kept, retracted = (
                tuple(
                    (_header(parts, f"{name}/{n}/signed"), _bytes(parts, f"{name}/{n}/payload")) for n in range(count)
                )
                for name, count in zip(("kept", "retracted"), counts)
            )
            snapshot = cls(
                acc=acc.copy(),
                floor=_vector(index["floor"]),
                weight=_count(index["weight"]),
                frontier=_vector(index["frontier"]),
                base=_hash(index["base"]),
                limits={_key(peer, incarnation): _count(seq) for peer, incarnation, seq in index["limits"]},
                inner={_key(peer, number): tuple(map(_count, seqs)) for peer, number, seqs in index.get("inner", ())},
                kept=kept,
                retracted=retracted,
                proofs=tuple(
                    Fork(_header(parts, f"proofs/{n}/first"), _header(parts, f"proofs/{n}/second"))
                    for n in range(counts[2])
                ),
            )
            if _text(snapshot._state()) != _text({name: index[name] for name in snapshot._state()}):
                raise ValueError("its index is not in canonical form")
        except (KeyError, TypeError, ValueError, RecursionError, PeerFault) as error:
            raise PeerFault("bad_snapshot", str(error)) from None
        return snapshot


def _text(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _rows(vector: VersionVector) -> list[list[object]]:
    return [[peer, incarnation, seq, head.hex()] for (peer, incarnation), (seq, head) in sorted(vector.entries.items())]


def _bytes(parts: Parts, name: str) -> bytes:
    value = parts[name]
    if not isinstance(value, bytes):
        raise ValueError(f"{name} is not bytes")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= bounds.INT64_MAX:
        raise ValueError(f"{value!r} is no count")
    return value


def _key(peer: object, incarnation: object) -> Key:
    if not isinstance(peer, str) or not 0 < len(peer) <= bounds.PEER_ID_CHARS_MAX:
        raise ValueError("a peer id of impossible length")
    return peer, _count(incarnation)


def _hash(text: str) -> bytes:
    value = bytes.fromhex(text)
    if len(value) != HASH_BYTES:
        raise ValueError(f"a hash of {len(value)} bytes")
    return value


def _vector(rows: list[tuple[object, object, object, str]]) -> VersionVector:
    vector = VersionVector({_key(peer, number): (_count(seq), _hash(head)) for peer, number, seq, head in rows})
    if any(seq == 0 for seq, _ in vector.entries.values()):
        raise ValueError("a vector has an entry of seq 0")
    return vector


def _header(parts: Parts, name: str) -> Header:
    try:
        return parse_header(Signed.FromString(_bytes(parts, name)))
    except DecodeError:
        raise ValueError(f"{name} does not decode") from None
