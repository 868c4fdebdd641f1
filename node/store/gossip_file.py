"""Gossip mode on disk and for newcomers: the log in a checkpoint, and the snapshot at the floor as a file of its own.

A checkpoint holds the whole log, packed into a few arrays however many updates it has. The file that newcomers download is
the state at the floor alone: theta0, the sum, and what it includes. Peers with one frontier make the same bytes; the log
above it comes by the usual exchange, where every update proves itself.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...aggregation.snapshots import Snapshot
from ...protocol.errors import PeerFault
from ...protocol.version import sha256
from .checkpoint import read_arrays, serialize
from .disk import Disk

FORMAT = "shoal-gossip-snapshot-1"
# Of a snapshot file, per coordinate: theta0 (fp32) and the sum (int64).
BYTES_EACH = 12
_LENGTH = struct.Struct("<Q")


def pack(parts: Mapping[str, np.ndarray | bytes]) -> dict[str, np.ndarray | bytes]:
    """`Snapshot.to_parts` with all its byte strings in one; `unpack` is the inverse."""
    names = [name for name, part in parts.items() if isinstance(part, bytes)]
    packed: dict[str, np.ndarray | bytes] = {n: p for n, p in parts.items() if not isinstance(p, bytes)}
    packed["names"] = json.dumps(names).encode()
    packed["bytes"] = b"".join(_framed(parts[name] for name in names))
    return packed


def _framed(pieces: Iterable[np.ndarray | bytes]) -> Iterator[bytes]:
    for piece in pieces:
        assert isinstance(piece, bytes)
        yield _LENGTH.pack(len(piece))
        yield piece


def unpack(packed: Mapping[str, np.ndarray | bytes]) -> dict[str, np.ndarray | bytes]:
    """Raises KeyError, ValueError or struct.error for what `pack` did not make."""
    names, data = json.loads(bytes(packed["names"])), bytes(packed["bytes"])
    parts: dict[str, np.ndarray | bytes] = {n: p for n, p in packed.items() if n not in ("names", "bytes")}
    at = 0
    for name in names:
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + size > len(data):
            raise ValueError(f"{name} of {size} bytes ends after the packed bytes")
        parts[name] = data[at : at + size]
        at += size
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes too many")
    return parts


def floor_only(snapshot: Snapshot) -> Snapshot:
    """Without the log and the proofs: what peers must agree on."""
    return replace(snapshot, kept=(), retracted=(), proofs=())


def file_hash(theta0: np.ndarray, snapshot: Snapshot) -> bytes:
    """32 bytes that name the file of `snapshot_parts`."""
    return sha256(b"shoal/v1/gossip-file\0", theta0.astype("<f4").tobytes(), snapshot.hash)


def snapshot_parts(theta0: np.ndarray, snapshot: Snapshot) -> list[bytes | memoryview]:
    """The file that newcomers download, in pieces. `snapshot`: from `floor_only`."""
    packed = pack(snapshot.to_parts())
    arrays = {n: p if isinstance(p, np.ndarray) else np.frombuffer(p, np.uint8) for n, p in packed.items()}
    return serialize({"theta0": theta0, **arrays}, {"format": FORMAT})


def read_snapshot_file(path: Path, d: int, disk: Disk) -> tuple[np.ndarray, Snapshot]:
    """(theta0 fp32 [d], snapshot) from a file that a peer gave: hostile. Raises ValueError with what is wrong."""
    arrays, metadata = read_arrays(path, disk)
    if metadata.get("format") != FORMAT or arrays.keys() != {"theta0", "acc", "names", "bytes"}:
        raise ValueError("not a shoal gossip snapshot")
    theta0 = arrays.pop("theta0")
    if theta0.shape != (d,) or theta0.dtype != np.float32 or not np.isfinite(theta0).all():
        raise ValueError(f"theta0 has shape {theta0.shape} and dtype {theta0.dtype}, expected finite fp32 [{d}]")
    packed = {n: a if n == "acc" else a.tobytes() for n, a in arrays.items()}
    try:
        snapshot = Snapshot.from_parts(unpack(packed), d)
    except (KeyError, TypeError, struct.error, RecursionError, PeerFault) as error:
        raise ValueError(f"damaged snapshot: {error!r}") from None
    if snapshot.kept or snapshot.retracted or snapshot.proofs:
        raise ValueError("a log where only the state at its floor belongs")
    return theta0, snapshot
