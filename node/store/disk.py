"""The disk as the node uses it: every call that reads or changes something. Real here, virtual in the simulator.

Descriptors are plain integers, paths are `Path`s. What a call promises is what POSIX promises: a file's bytes are safe after
`sync`, a name after `sync_folder`, and nothing before. All calls raise OSError.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

TEMPORARY = ".tmp"


class Disk(Protocol):
    """System calls by their own names, in plain words."""

    def open(self, path: Path, *, fresh: bool = False) -> int:
        """For reading and writing, made if it is not there (mode 0600); `fresh`: emptied. Its folder must be there."""
        ...

    def read(self, path: Path) -> bytes:
        """The whole file. Raises FileNotFoundError."""
        ...

    def exists(self, path: Path) -> bool: ...

    def names(self, folder: Path) -> list[str]:
        """What is in a folder, sorted; nothing where there is no folder."""
        ...

    def make_folder(self, path: Path) -> None:
        """With its parents, mode 0700 (they: as the umask says), durable; nothing when it is there."""
        ...

    def free_bytes(self, folder: Path) -> int: ...

    def lock(self, descriptor: int) -> None:
        """Exclusive, as long as the descriptor is open. Raises BlockingIOError when another process has it."""
        ...

    def pread(self, descriptor: int, size: int, offset: int) -> bytes: ...

    def size(self, descriptor: int) -> int: ...

    def write(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        """Bytes written, perhaps fewer than given."""
        ...

    def allocate(self, descriptor: int, offset: int, size: int) -> None:
        """Reserve space; the file grows to hold it."""
        ...

    def truncate(self, descriptor: int, size: int) -> None: ...

    def sync(self, descriptor: int) -> None: ...

    def close(self, descriptor: int) -> None: ...

    def replace(self, source: Path, target: Path) -> None:
        """Within one folder. Raises FileNotFoundError."""
        ...

    def unlink(self, path: Path) -> None:
        """Nothing when it is not there."""
        ...

    def sync_folder(self, folder: Path) -> None:
        """Make renames and new names in `folder` durable."""
        ...


class RealDisk:
    """`Disk` on this machine."""

    def open(self, path: Path, *, fresh: bool = False) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if fresh else 0), 0o600)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def exists(self, path: Path) -> bool:
        return path.exists()

    def names(self, folder: Path) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def make_folder(self, path: Path) -> None:
        new = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in new:
            with contextlib.suppress(PermissionError):  # a parent that may be written and not read cannot be synced
                self.sync_folder(folder.parent)

    def free_bytes(self, folder: Path) -> int:
        return shutil.disk_usage(folder).free

    def lock(self, descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def pread(self, descriptor: int, size: int, offset: int) -> bytes:
        return os.pread(descriptor, size, offset)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def write(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(descriptor, data, offset)

    def allocate(self, descriptor: int, offset: int, size: int) -> None:
        """Where the system cannot reserve space a full disk is found by the write itself."""
        if not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(descriptor, offset, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


REAL_DISK = RealDisk()


def write_all(disk: Disk, descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write every byte, in as many calls as it takes. Raises OSError; part of it may then be there."""
    view = memoryview(data)
    while view:
        written = disk.write(descriptor, view, offset)
        view, offset = view[written:], offset + written


def write_atomic(disk: Disk, path: Path, data: bytes | Sequence[bytes | memoryview]) -> None:
    """Replace `path` by `data` or leave it as it was: temporary file beside it, sync, rename, sync of the folder.

    `data` may come in parts, so that a large file need not be joined in memory first.

    Raises OSError; the temporary file is removed then.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        descriptor = disk.open(temporary, fresh=True)
        try:
            offset = 0
            for part in (data,) if isinstance(data, bytes) else data:
                write_all(disk, descriptor, part, offset)
                offset += len(part)
            disk.sync(descriptor)
        finally:
            disk.close(descriptor)
        disk.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
        raise
    disk.sync_folder(path.parent)
