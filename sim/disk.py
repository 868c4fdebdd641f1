"""A disk in memory that forgets what was not synced, fills up, gets slow, or is lost. Implements `Disk`.

Two pictures are kept: what a running process sees, and what would be there after the power went. `sync` copies one file's
bytes from the first to the second, `sync_folder` the names of one folder. A crash goes back to the second picture; of a file
that was being written some of the unsynced bytes may have arrived.
"""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

SYNC_BYTES = 64 * 1024  # a sync costs as much as writing this much


class _File:
    """One inode."""

    __slots__ = ("data", "durable", "writes")

    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = b""
        self.writes: list[tuple[int, bytes]] = []  # since the last sync


class MemoryDisk:
    """One peer's disk, over all its lives."""

    def __init__(self) -> None:
        self._names: dict[str, _File] = {}  # as a process sees it
        self._durable: dict[str, _File] = {}
        self._folders: set[str] = set()
        self._open: dict[int, _File] = {}
        self._next = 3
        self._dead_below = 0  # descriptors of processes that are gone
        self._full = False
        self._broken = False
        self._ns_per_byte = 0.0
        self._pending_bytes = 0
        self.written_bytes = 0
        self.syncs = 0

    # ------------------------------------------------------------------------------------------------ faults

    def fill(self) -> None:
        """Nothing may grow from now on."""
        self._full = True

    def free(self) -> None:
        """There is space again."""
        self._full = False

    def break_(self, broken: bool = True) -> None:
        """Every write fails with EIO."""
        self._broken = broken

    def slow(self, mb_per_s: float | None) -> None:
        """Writes take time; None: they do not."""
        self._ns_per_byte = 0.0 if mb_per_s is None else 1000.0 / mb_per_s

    def take_delay(self) -> float:
        """Seconds that the writes since the last call took."""
        pending, self._pending_bytes = self._pending_bytes, 0
        return pending * self._ns_per_byte / 1e9

    def crash(self, rng: random.Random) -> None:
        """The process is gone and the power with it: what was not synced is lost, or half there."""
        self._dead_below = self._next
        self._open.clear()
        for file in self._durable.values():
            image = bytearray(file.durable)
            for offset, data in file.writes[: rng.randrange(len(file.writes) + 1)]:
                kept = data[: rng.randrange(len(data) + 1)]
                _put(image, offset, kept)
            file.data, file.durable, file.writes = image, bytes(image), []
        self._names = dict(self._durable)
        self._pending_bytes = 0

    def lose(self) -> None:
        """A new, empty disk."""
        self._names.clear()
        self._durable.clear()
        self._folders.clear()
        self._open.clear()

    # ------------------------------------------------------------------------------------------------ calls

    def open(self, path: Path, *, fresh: bool = False) -> int:
        name = str(path)
        if name not in self._names:
            self._grow()
            self._names[name] = _File()
        if fresh:
            self._names[name] = _File()
        descriptor, self._next = self._next, self._next + 1
        self._open[descriptor] = self._names[name]
        return descriptor

    def read(self, path: Path) -> bytes:
        file = self._names.get(str(path))
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return bytes(file.data)

    def exists(self, path: Path) -> bool:
        return str(path) in self._names or str(path) in self._folders

    def names(self, folder: Path) -> list[str]:
        prefix = f"{folder}/"
        return sorted(n[len(prefix) :] for n in self._names if n.startswith(prefix) and "/" not in n[len(prefix) :])

    def make_folder(self, path: Path) -> None:
        self._folders.add(str(path))

    def free_bytes(self, folder: Path) -> int:
        return 0 if self._full else 2**40

    def lock(self, descriptor: int) -> None:
        """A peer's disk has one process at a time by construction."""

    def pread(self, descriptor: int, size: int, offset: int) -> bytes:
        return bytes(self._file(descriptor).data[offset : offset + size])

    def size(self, descriptor: int) -> int:
        return len(self._file(descriptor).data)

    def write(self, descriptor: int, data: Any, offset: int) -> int:
        file, data = self._file(descriptor), bytes(data)
        if offset + len(data) > len(file.data):
            self._grow()
        self._check()
        _put(file.data, offset, data)
        file.writes.append((offset, data))
        self.written_bytes += len(data)
        self._pending_bytes += len(data)
        return len(data)

    def allocate(self, descriptor: int, offset: int, size: int) -> None:
        """Reserved space reads as zeros; it is not kept, so that a thousand disks fit into memory."""
        self._grow()

    def truncate(self, descriptor: int, size: int) -> None:
        file = self._file(descriptor)
        self._check()
        if size > len(file.data):
            self._grow()
            file.data.extend(bytes(size - len(file.data)))
        del file.data[size:]
        # Seen as one write of the whole: a crash before the sync finds the old bytes or the new size.
        file.writes = [(0, bytes(file.data))] if file.data else []

    def sync(self, descriptor: int) -> None:
        file = self._file(descriptor)
        self._check()
        file.durable, file.writes = bytes(file.data), []
        self.syncs += 1
        self._pending_bytes += SYNC_BYTES

    def close(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)

    def replace(self, source: Path, target: Path) -> None:
        self._check()
        self._names[str(target)] = self._names.pop(str(source))

    def unlink(self, path: Path) -> None:
        self._names.pop(str(path), None)

    def sync_folder(self, folder: Path) -> None:
        self._check()
        prefix = f"{folder}/"
        for name in [n for n in self._durable if _within(n, prefix)]:
            del self._durable[name]
        self._durable |= {n: f for n, f in self._names.items() if _within(n, prefix)}

    # ------------------------------------------------------------------------------------------------ inside

    def _file(self, descriptor: int) -> _File:
        if descriptor < self._dead_below:
            return _File()  # a dead process may still think that it writes
        try:
            return self._open[descriptor]
        except KeyError:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None

    def _check(self) -> None:
        if self._broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _grow(self) -> None:
        self._check()
        if self._full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _within(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and "/" not in name[len(prefix) :]


def _put(image: bytearray, offset: int, data: bytes) -> None:
    if offset > len(image):
        image.extend(bytes(offset - len(image)))
    image[offset : offset + len(data)] = data
