"""Commit records on disk: appended and fsynced, so that a restarted peer knows the decided rounds and can find a fork.

Form: `length (4) | sha-256 of the body, 8 bytes | body`, the body a serialized `Commit`. A torn tail is cut off at opening.
Every append is one write and one fdatasync; a record that failed leaves the file as it was. The file is halved when it
holds twice the records, or twice the bytes, that are kept. What a record proves, and which lineage it belongs to, is
protocol/commit.py's business.
"""

from __future__ import annotations

import contextlib
import struct
from itertools import accumulate
from pathlib import Path

from ...protocol import limits
from ...protocol.version import sha256
from .disk import REAL_DISK, TEMPORARY, Disk, write_all

_HEAD = struct.Struct(">I8s")


class CommitFile:
    """Oldest first. `append` blocks and fsyncs."""

    def __init__(
        self,
        path: Path,
        kept: int = limits.COMMIT_RECORDS_KEPT,
        disk: Disk = REAL_DISK,
        *,
        bytes_max: int = limits.COMMIT_RECORDS_BYTES_MAX,
    ) -> None:
        """Open or make the file. Raises OSError."""
        self._path, self._kept, self._bytes_max, self._disk = path, kept, bytes_max, disk
        self.records: list[bytes] = []
        self._descriptor = disk.open(path)
        data = disk.read(path)
        end = 0
        while end + _HEAD.size <= len(data):
            size, checksum = _HEAD.unpack_from(data, end)
            body = data[end + _HEAD.size : end + _HEAD.size + size]
            if len(body) != size or sha256(body)[:8] != checksum:
                break
            self.records.append(body)
            end += _HEAD.size + size
        self.cut_bytes = len(data) - end  # from the first record that could not be read on
        disk.truncate(self._descriptor, end)
        self._end = end
        disk.sync_folder(path.parent)

    def append(self, commit: bytes) -> None:
        """Raises OSError; the file then ends where it did."""
        record = _framed(commit)
        try:
            self._write(self._descriptor, record, self._end)
        except OSError:
            with contextlib.suppress(OSError):  # a torn record is told by its checksum; the next one overwrites it
                self._disk.truncate(self._descriptor, self._end)
            raise
        self._end += len(record)
        self.records.append(commit)
        if len(self.records) > 2 * self._kept or self._end > 2 * self._bytes_max:
            with contextlib.suppress(OSError):  # the record is safe; a longer file can be halved next time
                self.replace(self._newest())

    def _newest(self) -> list[bytes]:
        """The last one, and those before it that are to be kept with it, oldest first."""
        sizes = accumulate(len(commit) for commit in reversed(self.records))
        count = sum(1 for size in sizes if size <= self._bytes_max)
        return self.records[-max(1, min(count, self._kept)) :]

    def replace(self, commits: list[bytes]) -> None:
        """Start again with these records (after a state download, or to bound the file). Raises OSError."""
        data = b"".join(_framed(c) for c in commits)
        temporary = self._path.with_name(self._path.name + TEMPORARY)
        descriptor = self._disk.open(temporary, fresh=True)
        try:
            self._write(descriptor, data, 0)
            self._disk.replace(temporary, self._path)
        except OSError:
            self._disk.close(descriptor)
            self._disk.unlink(temporary)
            raise
        # From here on the old file has no name: what is appended must go to the new one.
        self._disk.close(self._descriptor)
        self._descriptor, self._end, self.records = descriptor, len(data), list(commits)
        self._disk.sync_folder(self._path.parent)

    def _write(self, descriptor: int, data: bytes, offset: int) -> None:
        write_all(self._disk, descriptor, data, offset)
        self._disk.sync(descriptor)

    def close(self) -> None:
        self._disk.close(self._descriptor)


def _framed(commit: bytes) -> bytes:
    return _HEAD.pack(len(commit), sha256(commit)[:8]) + commit
