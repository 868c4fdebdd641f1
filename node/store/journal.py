"""The fsynced journal of what this peer has said: its own updates and the ballot record of the open round.

Invariant: before the first byte of an update leaves, its signed bytes and the delta it was made from are on disk, so that a
restart says the same bytes again and never issues a second update under one dot. A promise or a vote is durable before the
message that reveals it.

Form: one file of records `length (4) | kind (1) | sha-256 of kind and body, 16 bytes | body`, appended and fsynced; the
file is preallocated in steps, so that a full disk is found before a record is half written. A torn or zero tail ends the
reading. Records that a checkpoint covers are dropped by rewriting the file (temporary, fsync, rename, fsync of the
folder); until that last step is known to be on disk nothing more is appended, or a crash could bring the old file back
without what was said since. Every call goes through `Disk`.

Does not cover: what the records mean to the round (protocol/ballot_record.py) or the residual (aggregation/book.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...protocol.ballot_record import BallotRecord, decode_record
from ...protocol.version import NO_HEAD, Dot
from .disk import REAL_DISK, TEMPORARY, Disk, write_all

_RECORD = struct.Struct(">IB16s")
_IDENTITY, _UPDATE, _BALLOT = 1, 2, 3
_UPDATE_FIXED = struct.Struct(">QQQ32s32sIIQ")
PREALLOCATE_BYTES = 1024 * 1024
RECORD_BYTES_MAX = 2**31  # a length above this is damage, not a record
FILE = "journal"
# `compact` rewrites the file for superseded ballot records alone when they are this much.
WASTE_BYTES_MAX = 4 * 1024 * 1024


class JournalFull(Exception):
    """A record could not be made durable: the disk is full or broken. Nothing of it counts."""


@dataclass(frozen=True)
class OwnUpdate:
    """One own update as it was published, and what is needed to book it again.

    Attributes:
        signed: the exact `Signed` header message.
        payload: the encoded update; for a dense one the fp32 vector.
        head: the origin's head after it.
        delta: fp32 [d], what the inner steps of its round came to.
        learned: int64 [d] in 2^-40 units, all that this peer has learned in all its rounds, this one included. Rounds that
            ended in no update are in it, and in the payload, but in no delta: a book that goes on from an older checkpoint
            is right only with this.
    """

    dot: Dot
    round: int
    base_lineage: bytes
    signed: bytes
    payload: bytes
    head: bytes
    delta: np.ndarray
    learned: np.ndarray


class Journal:
    """An open journal. Methods block (run them in a worker thread); one at a time, whichever thread calls."""

    def __init__(self, folder: Path, disk: Disk = REAL_DISK) -> None:
        """Open or make the journal in `folder` and read what it holds. Raises OSError, ShoalError (ballot record damaged)."""
        self._folder = folder
        self._disk = disk
        self._path = folder / FILE
        self.incarnation = 0
        self.last_seq = 0
        self.last_head = NO_HEAD
        self.updates: list[OwnUpdate] = []
        self.on_update: Callable[[OwnUpdate], None] = lambda update: None  # told of each that has become durable
        self.trouble = ""  # why the last record could not be made durable
        self.on_trouble: Callable[[str], None] = lambda why: None  # told each time, and "" when it is over
        self._ballot: BallotRecord | None = None
        self._lock = threading.RLock()
        self._descriptor = disk.open(self._path)
        self._end = self._allocated = 0
        self._superseded = 0  # bytes of ballot records that a later one replaced
        self._ballot_size = 0
        self._renamed = True  # the folder entry of the file may not be on disk yet
        self.cut_bytes = 0  # of the file, from the first record that could not be read on
        self._replay()

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    # ------------------------------------------------------------------------------------------------ reading

    def _replay(self) -> None:
        data = self._disk.read(self._path)
        self._allocated = len(data)
        at = 0
        while at + _RECORD.size <= len(data):
            size, kind, checksum = _RECORD.unpack_from(data, at)
            body = data[at + _RECORD.size : at + _RECORD.size + size]
            if kind == 0 or size > RECORD_BYTES_MAX or len(body) != size or _checksum(kind, body) != checksum:
                break
            self._take(kind, body)
            at += _RECORD.size + size
        self._end = at
        if at:  # what a killed process had written but not synced is in the page cache only; what is replayed must stay
            self._disk.sync(self._descriptor)
        # What follows is a torn write: it must not be read as records after a later, shorter append.
        if data.count(0, at) != len(data) - at:
            self.cut_bytes = len(data.rstrip(b"\0")) - at
            self._disk.truncate(self._descriptor, at)
            self._disk.sync(self._descriptor)
            self._allocated = at

    def _take(self, kind: int, body: bytes) -> None:
        if kind == _IDENTITY:
            self.incarnation, self.last_seq = struct.unpack(">QQ", body[:16])
            self.last_head = body[16:48]
        elif kind == _UPDATE:
            update = _decode_update(body)
            self.updates.append(update)
            self.incarnation, self.last_seq, self.last_head = update.dot.incarnation, update.dot.seq, update.head
        elif kind == _BALLOT:
            self._note_ballot(decode_record(body), len(body))

    def _note_ballot(self, record: BallotRecord, size: int) -> None:
        self._superseded += self._ballot_size
        self._ballot, self._ballot_size = record, size

    def ballot_record(self, round_: int, base_lineage: bytes) -> BallotRecord | None:
        """What was last made durable of this round, if anything."""
        record = self._ballot
        return record if record is not None and record.concerns(round_, base_lineage) else None

    # ------------------------------------------------------------------------------------------------ writing

    def start_incarnation(self, known: int = 0, *, now_wall: float = 0.0) -> int:
        """Begin a new life, above every one that is known of: no journal, a lost one, or one older than the swarm knows.

        Wall time (unix seconds) makes it new even if nobody can be asked; `known` makes it new even if the clock is wrong.

        Raises JournalFull: the old life goes on.
        """
        with self._lock:
            incarnation = max(int(now_wall), known + 1, self.incarnation + 1)
            self._append(_IDENTITY, struct.pack(">QQ", incarnation, 0) + NO_HEAD)
            self.incarnation, self.last_seq, self.last_head = incarnation, 0, NO_HEAD
            return incarnation

    def next_dot(self, peer: str) -> Dot:
        """The name of the next update. It is taken for good only by `append_update`."""
        return Dot(peer, self.incarnation, self.last_seq + 1)

    def append_update(self, update: OwnUpdate) -> None:
        """Make an own update durable. Raises JournalFull; then its dot was not used. ValueError for a dot that was."""
        with self._lock:
            if (update.dot.incarnation, update.dot.seq) != (self.incarnation, self.last_seq + 1):
                raise ValueError(f"{update.dot} does not follow seq {self.last_seq} of incarnation {self.incarnation}")
            if not self.incarnation:
                raise ValueError("no incarnation has been started")
            self._append(_UPDATE, _encode_update(update))
            self.updates.append(update)
            self.last_seq, self.last_head = update.dot.seq, update.head
            self.on_update(update)

    def say(self, peer: str, build: Callable[[Dot, bytes], OwnUpdate]) -> OwnUpdate:
        """Make the next update from its dot and the head before it, and make it durable; no new life can begin in between.

        Raises JournalFull: the dot was not used.
        """
        with self._lock:
            update = build(self.next_dot(peer), self.last_head)
            self.append_update(update)
            return update

    def save_ballot(self, record: BallotRecord) -> None:
        """Make promise and votes durable. Raises JournalFull."""
        body = record.encode()
        with self._lock:
            self._append(_BALLOT, body)
            self._note_ballot(record, len(body))

    def _append(self, kind: int, body: bytes) -> None:
        record = _framed(kind, body)
        try:
            if self._renamed:
                self._disk.sync_folder(self._folder)
                self._renamed = False
            if self._end + len(record) > self._allocated:
                grow = max(PREALLOCATE_BYTES, len(record))
                self._disk.allocate(self._descriptor, self._allocated, grow)
                self._allocated += grow
            write_all(self._disk, self._descriptor, record, self._end)
            self._disk.sync(self._descriptor)
        except OSError as error:
            self._undo()
            self.trouble = f"{self._path}: {error.strerror or error}"
            self.on_trouble(self.trouble)
            raise JournalFull(self.trouble) from None
        self._end += len(record)
        if self.trouble:
            self.trouble = ""
            self.on_trouble("")

    def _undo(self) -> None:
        """Wipe a record that may be half there: later it must not be found complete."""
        try:
            self._disk.truncate(self._descriptor, self._end)
            self._allocated = self._end
            self._disk.sync(self._descriptor)
        except OSError:
            pass  # the checksum still tells a torn record; the next append overwrites it

    def compact(self, keep: set[Dot]) -> None:
        """Drop updates other than `keep` (a checkpoint has the rest). Best effort: on a full disk the old file stays."""
        with self._lock:
            kept = [u for u in self.updates if u.dot in keep]
            if len(kept) == len(self.updates) and self._superseded < WASTE_BYTES_MAX:
                return
            parts = [(_UPDATE, _encode_update(u)) for u in kept]
            # An update record restores seq and head from itself; the identity record must come last to win.
            parts.append((_IDENTITY, struct.pack(">QQ", self.incarnation, self.last_seq) + self.last_head))
            if self._ballot is not None:
                parts.append((_BALLOT, self._ballot.encode()))
            with contextlib.suppress(OSError):
                self._rewrite(parts)
                self.updates = kept

    def _rewrite(self, parts: list[tuple[int, bytes]]) -> None:
        temporary = self._path.with_name(FILE + TEMPORARY)
        descriptor = self._disk.open(temporary, fresh=True)
        try:
            end = 0
            for kind, body in parts:
                record = _framed(kind, body)
                write_all(self._disk, descriptor, record, end)
                end += len(record)
            self._disk.sync(descriptor)
            self._disk.replace(temporary, self._path)
        except OSError:
            self._disk.close(descriptor)
            with contextlib.suppress(OSError):
                self._disk.unlink(temporary)
            raise
        # From here on the old file has no name: what is appended must go to the new one, and only once its name is safe.
        self._disk.close(self._descriptor)
        self._descriptor, self._end, self._allocated, self._renamed = descriptor, end, end, True
        self._superseded = 0
        with contextlib.suppress(OSError):  # the next append tries again, and fails if this does
            self._disk.sync_folder(self._folder)
            self._renamed = False

    def close(self) -> None:
        if self._descriptor >= 0:
            self._disk.close(self._descriptor)
            self._descriptor = -1


def _framed(kind: int, body: bytes) -> bytes:
    return _RECORD.pack(len(body), kind, _checksum(kind, body)) + body


def _checksum(kind: int, body: bytes) -> bytes:
    return hashlib.sha256(bytes([kind]) + body).digest()[:16]


def _encode_update(update: OwnUpdate) -> bytes:
    peer = update.dot.peer.encode()
    arrays = update.delta.astype("<f4").tobytes() + update.learned.astype("<i8").tobytes()
    fixed = _UPDATE_FIXED.pack(
        update.dot.incarnation, update.dot.seq, update.round, update.base_lineage, update.head,
        len(peer), len(update.signed), len(update.payload),
    )  # fmt: skip
    return fixed + peer + update.signed + update.payload + arrays


def _decode_update(body: bytes) -> OwnUpdate:
    incarnation, seq, round_, base, head, peer_size, signed_size, payload_size = _UPDATE_FIXED.unpack_from(body)
    at = _UPDATE_FIXED.size
    peer = body[at : at + peer_size].decode()
    signed = body[at + peer_size : at + peer_size + signed_size]
    at += peer_size + signed_size
    payload = body[at : at + payload_size]
    at += payload_size
    d = (len(body) - at) // 12
    delta = np.frombuffer(body, "<f4", d, at).astype(np.float32)
    learned = np.frombuffer(body, "<i8", d, at + 4 * d).astype(np.int64)
    return OwnUpdate(Dot(peer, incarnation, seq), round_, base, signed, payload, head, delta, learned)
