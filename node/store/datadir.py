"""A node's data directory: made private, locked while in use, its file names in one place.

identity        Ed25519 key (0600)           lock            flock of the running daemon, holds its pid
manifest.json   the run's manifest           genesis         signed Genesis
journal/        own updates, ballot record   commits         commit records
checkpoints/    states                       peers.json      peer cache
updates/        received updates, cache      download-*      unfinished state downloads
secrets.json    admission key, bindings      metrics.jsonl   history of rounds
control.sock    local control socket         log.jsonl       structured log
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ...protocol.errors import ExitCode, ShoalError

TEMPORARY = ".tmp"
# Below this a start is refused: a checkpoint could not be written.
FREE_BYTES_MIN = 16 * 1024 * 1024


def disk_error(path: Path, error: OSError) -> ShoalError:
    """The three-part form of a failed write."""
    if error.errno == errno.ENOSPC:
        todo = f"Free some space on the disk of {path}, or use another --data-dir."
    else:
        todo = f"Check owner and permissions of {path}."
    return ShoalError(
        "The data directory cannot be written",
        values=f"{path}: {error.strerror}",
        todo=todo,
        code=ExitCode.DISK,
    )


def write_atomic(path: Path, data: bytes | Sequence[bytes | memoryview], mode: int = 0o600) -> None:
    """Replace `path` by `data` or leave it as it was: temporary file beside it, fsync, rename, fsync of the folder.

    `data` may come in parts, so that a large file need not be joined in memory first.

    Raises OSError; the temporary file is removed then.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        try:
            for part in (data,) if isinstance(data, bytes) else data:
                view = memoryview(part)
                while view:
                    view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class DataDir:
    """An open, locked data directory."""

    def __init__(self, path: Path) -> None:
        """Make it if needed and lock it.

        Raises:
            ShoalError: LOCKED when another process has it, DISK when it cannot be written or is full.
        """
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise disk_error(path, error) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._lock, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise ShoalError(
                "The data directory is in use by another process",
                values=f"{path} is locked by process {holder}",
                todo="Stop that process with `shoal leave`, or use another --data-dir.",
                code=ExitCode.LOCKED,
            ) from None
        except OSError as error:  # a filesystem that cannot lock
            os.close(self._lock)
            raise disk_error(path, error) from None
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
            for folder in (self.checkpoints, self.journal, self.updates):
                folder.mkdir(mode=0o700, exist_ok=True)
            for folder in (path, self.checkpoints, self.journal):
                for leftover in folder.glob(f"*{TEMPORARY}"):
                    leftover.unlink()
            free = shutil.disk_usage(path).free
            if free < FREE_BYTES_MIN:
                raise OSError(errno.ENOSPC, f"{free} bytes free, at least {FREE_BYTES_MIN} are needed")
        except OSError as error:
            os.close(self._lock)
            raise disk_error(path, error) from None

    def close(self) -> None:
        """Unlock."""
        if self._lock >= 0:
            os.close(self._lock)
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

    def write(self, path: Path, data: bytes) -> None:
        """`write_atomic` with a three-part error."""
        try:
            write_atomic(path, data)
        except OSError as error:
            raise disk_error(path, error) from None
