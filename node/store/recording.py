"""A recording of what this peer said and of the decisions that it followed, to play the run again in the simulator.

For tests and for reports of faults: `node.record_bytes_max` turns it on. One file of records `length (4) | kind (1) | sha-256
of the body, 8 bytes | body`. Bodies: UpdateStart with the payload inside for an own update, in hybrid mode for an own combined
one too; Commit; the bytes of a reduced chunk of a dense round; JSON for an average of two sides (gossip mode). Written, not
synced: it survives the death of the process and not that of the machine. What was journaled just before a death is recorded
again at the next start, so a reader meets records twice.

Does not cover: playing it (sim/replay.py).
"""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...aggregation.snapshots import Snapshot
from ...protocol.wire_pb2 import Signed, UpdateStart
from .disk import REAL_DISK, Disk, write_all
from .journal import OwnUpdate

FILE = "recording"
_RECORD = struct.Struct(">IB8s")
_UPDATE, _COMMIT, _CHUNK, _AVERAGE = 1, 2, 3, 4


class Recording:
    """An open recording. Its methods block, and never raise for a disk that is full: they end the recording."""

    def __init__(self, path: Path, bytes_max: int, *, warn: Callable[[str], None], disk: Disk = REAL_DISK) -> None:
        """Goes on after the last whole record. Raises OSError."""
        self._disk, self._bytes_max, self._warn = disk, bytes_max, warn
        self._descriptor = disk.open(path)
        data = disk.read(path)
        self._end = _whole(data)[1]
        self._ended = False
        self._lock = threading.Lock()  # the event loop and its worker both say things
        if self._end < len(data):
            warn(f"{path} ended in {len(data) - self._end} bytes that are no whole record; they are overwritten")

    def update(self, update: OwnUpdate) -> None:
        """An own update, as published."""
        start = UpdateStart(payload_size=len(update.payload), payload=update.payload)
        start.header.CopyFrom(Signed.FromString(update.signed))
        self._append(_UPDATE, start.SerializeToString())

    def commit(self, commit: bytes) -> None:
        """A commit that was applied, serialized."""
        self._append(_COMMIT, commit)

    def chunk(self, chunk: bytes) -> None:
        """A reduced chunk of a dense round that was applied."""
        self._append(_CHUNK, chunk)

    def average(self, one: Snapshot, one_weight: int, two: Snapshot, two_weight: int) -> None:
        """Two folded sides whose average this peer took; their sums are left out, for they follow from the updates."""
        sides = [
            {"side": json.loads(bytes(s.to_parts()["index"])), "weight": w}
            for s, w in ((one, one_weight), (two, two_weight))
        ]
        self._append(_AVERAGE, json.dumps(sides, sort_keys=True).encode())

    def _append(self, kind: int, body: bytes) -> None:
        record = _RECORD.pack(len(body), kind, hashlib.sha256(body).digest()[:8]) + body
        with self._lock:
            if self._ended:
                return
            if self._end + len(record) > self._bytes_max:
                return self._give_up(f"{self._bytes_max} bytes are full (node.record_bytes_max)")
            try:
                write_all(self._disk, self._descriptor, record, self._end)
            except OSError as error:
                return self._give_up(error.strerror or str(error))
            self._end += len(record)

    def _give_up(self, why: str) -> None:
        self._ended = True
        self._warn(f"the recording ends here and cannot be replayed whole: {why}")

    def close(self) -> None:
        self._disk.close(self._descriptor)


@dataclass(frozen=True)
class Recorded:
    """What a file holds, each record once, in the order of the file.

    Attributes:
        updates: UpdateStart messages with the payload inside.
        commits: serialized Commit messages.
        chunks: of dense rounds.
        averages: JSON, as `Recording.average` writes it.
    """

    updates: tuple[UpdateStart, ...]
    commits: tuple[bytes, ...]
    chunks: tuple[bytes, ...] = ()
    averages: tuple[bytes, ...] = ()


def read_recording(data: bytes) -> Recorded:
    """The whole records of a file's bytes; a torn tail is left out."""
    records = dict.fromkeys(_whole(data)[0])
    return Recorded(
        tuple(UpdateStart.FromString(body) for kind, body in records if kind == _UPDATE),
        *(tuple(body for kind, body in records if kind == wanted) for wanted in (_COMMIT, _CHUNK, _AVERAGE)),
    )


def _whole(data: bytes) -> tuple[list[tuple[int, bytes]], int]:
    """(kind, body) of the whole records, and where they end."""
    found: list[tuple[int, bytes]] = []
    at = 0
    while at + _RECORD.size <= len(data):
        size, kind, checksum = _RECORD.unpack_from(data, at)
        body = data[at + _RECORD.size : at + _RECORD.size + size]
        if len(body) != size or hashlib.sha256(body).digest()[:8] != checksum:
            break
        found.append((kind, body))
        at += _RECORD.size + size
    return found, at
