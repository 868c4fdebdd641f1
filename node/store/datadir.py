"""A node's data directory: made private, locked while in use, its file names in one place.

identity        Ed25519 key (0600)           lock            flock of the running daemon, holds its pid
manifest.json   the run's manifest           genesis         signed Genesis
journal/        own updates, ballot record   commits         commit records
checkpoints/    states                       peers.json      peer cache
updates/        received updates, cache      download-*      unfinished state downloads
recording       what was said, if wanted
secrets.json    admission key, bindings      metrics.jsonl   history of rounds
control.sock    local control socket         log.jsonl       structured log
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from ...protocol.errors import ExitCode, ShoalError
from .disk import REAL_DISK, TEMPORARY, Disk, write_atomic

# Below this a start is refused: a checkpoint could not be written.
FREE_BYTES_MIN = 16 * 1024 * 1024


def disk_error(path: Path, error: OSError) -> ShoalError:
    """The three-part form of a failed read or write."""
    where = error.filename or path
    if error.errno == errno.ENOSPC:
        todo = f"Free some space on the disk of {path}, or use another --data-dir."
    elif error.errno == errno.EROFS:
        todo = f"Mount the disk of {path} for writing, or use another --data-dir."
    elif error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST):
        todo = f"Move {where} away: it is not of the kind that shoal keeps there."
    else:
        todo = f"Check owner and permissions of {where}."
    return ShoalError(
        "The data directory cannot be used",
        values=f"{where}: {error.strerror}",
        todo=todo,
        code=ExitCode.DISK,
    )


def damaged(path: Path, why: str) -> ShoalError:
    """The three-part form of a file that was written whole and cannot be read: it is never guessed at or made anew."""
    return ShoalError(
        "A file of the data directory is damaged",
        values=f"{path}: {why}",
        todo="Restore it from a backup, or join the run anew with another --data-dir.",
        code=ExitCode.DISK,
    )


@contextlib.contextmanager
def usable(path: Path) -> Iterator[None]:
    """What fails inside is said in the three-part form. Raises ShoalError(DISK)."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error) from None


class DataDir:
    """An open, locked data directory."""

    def __init__(self, path: Path, disk: Disk = REAL_DISK) -> None:
        """Make it if needed and lock it.

        Raises:
            ShoalError: LOCKED when another process has it, DISK when it cannot be written or is full.
        """
        self.path, self.disk = path, disk
        try:
            disk.make_folder(path)
            self._lock = disk.open(path / "lock")
        except OSError as error:
            raise disk_error(path, error) from None
        try:
            disk.lock(self._lock)
        except BlockingIOError:
            holder = disk.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            disk.close(self._lock)
            raise ShoalError(
                "The data directory is in use by another process",
                values=f"{path} is locked by process {holder}",
                todo="Stop that process with `shoal leave`, or use another --data-dir.",
                code=ExitCode.LOCKED,
            ) from None
        except OSError as error:  # a filesystem that cannot lock
            disk.close(self._lock)
            raise disk_error(path, error) from None
        try:
            disk.truncate(self._lock, 0)
            disk.write(self._lock, f"{os.getpid()}\n".encode(), 0)
            for folder in (self.checkpoints, self.journal, self.updates):
                disk.make_folder(folder)
            for folder in (path, self.checkpoints, self.journal):
                for name in disk.names(folder):
                    if name.endswith(TEMPORARY):
                        disk.unlink(folder / name)
            free = disk.free_bytes(path)
            if free < FREE_BYTES_MIN:
                raise OSError(errno.ENOSPC, f"{free} bytes free, at least {FREE_BYTES_MIN} are needed")
        except OSError as error:
            disk.close(self._lock)
            raise disk_error(path, error) from None

    def close(self) -> None:
        """Unlock."""
        if self._lock >= 0:
            self.disk.close(self._lock)
            self._lock = -1

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def updates(self) -> Path:
        """Cache of received updates: of no use to the next process, which empties it."""
        return self.path / "updates"

    @property
    def recording(self) -> Path:
        return self.path / "recording"

    @property
    def identity(self) -> Path:
        return self.path / "identity"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def genesis(self) -> Path:
        return self.path / "genesis"

    @property
    def commits(self) -> Path:
        return self.path / "commits"

    @property
    def peers(self) -> Path:
        return self.path / "peers.json"

    @property
    def secrets(self) -> Path:
        return self.path / "secrets.json"

    @property
    def control(self) -> Path:
        return self.path / "control.sock"

    def read(self, path: Path) -> bytes:
        """The file's bytes; empty where there is none. Raises ShoalError(DISK), also for an empty file: none is written so."""
        try:
            data = self.disk.read(path)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise disk_error(path, error) from None
        if not data:
            raise damaged(path, "it is empty")
        return data

    def write(self, path: Path, data: bytes) -> None:
        """`write_atomic` with a three-part error."""
        with usable(path):
            write_atomic(self.disk, path, data)
