"""Commit records on disk: appended and fsynced, so that a restarted peer knows the decided rounds and can find a fork.

Form: `length (4) | sha-256 of the body, 8 bytes | body`, the body a serialized `Commit`. A torn tail is cut off at opening.
The file is halved when it holds twice the records kept. What a record proves is protocol/commit.py's business.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from ...protocol import limits
from ...protocol.version import sha256
from .datadir import write_atomic

_HEAD = struct.Struct(">I8s")


class CommitFile:
    """Oldest first. `append` blocks and fsyncs."""

    def __init__(self, path: Path, kept: int = limits.COMMIT_RECORDS_KEPT) -> None:
        self._path, self._kept = path, kept
        self.records: list[bytes] = []
        end = 0
        if path.exists():
            data = path.read_bytes()
            while end + _HEAD.size <= len(data):
                size, checksum = _HEAD.unpack_from(data, end)
                body = data[end + _HEAD.size : end + _HEAD.size + size]
                if len(body) != size or sha256(body)[:8] != checksum:
                    break
                self.records.append(body)
                end += _HEAD.size + size
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._descriptor, end)
        self._end = end

    def append(self, commit: bytes) -> None:
        """Raises OSError; the file then ends where it did."""
        record = _framed(commit)
        try:
            written = 0
            while written < len(record):
                written += os.pwrite(self._descriptor, record[written:], self._end + written)
            os.fdatasync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(record)
        self.records.append(commit)
        if len(self.records) > 2 * self._kept:
            self.replace(self.records[-self._kept :])

    def replace(self, commits: list[bytes]) -> None:
        """Start again with these records (after a state download, or to bound the file)."""
        data = b"".join(_framed(c) for c in commits)
        write_atomic(self._path, data)
        os.close(self._descriptor)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        self._end = len(data)
        self.records = list(commits)

    def close(self) -> None:
        os.close(self._descriptor)


def _framed(commit: bytes) -> bytes:
    return _HEAD.pack(len(commit), sha256(commit)[:8]) + commit
