"""A disk in memory that forgets what was not synced, fills up, fails, gets slow, or is lost. Implements `Disk`.

What a process sees is kept, with how to take back every change since the last sync: a crash takes all of it back and then
lets any part of it have arrived, in the way of a page cache that writes in its own order. File contents and the names in a
folder are apart: a file that was synced without its folder has no name after the crash.

Not modelled: bit rot, and the order between two folders.
"""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import NamedTuple

SYNC_BYTES = 64 * 1024  # a sync costs as much as writing this much
# Older changes than these count as written back by the system, so that a log that nobody syncs does not pile up.
UNSYNCED_MAX = 64
PLENTY_BYTES = 2**40


class _Change(NamedTuple):
    """One change of a file and how to take it back."""

    at: int
    new: bytes | None  # None: the size became `at`
    old: bytes
    stored: int  # bytes stored before
    size: int  # size before


class _File:
    """One inode. Bytes between `len(data)` and `size` are zeros that take no memory."""

    __slots__ = ("changes", "data", "locked_by", "size")

    def __init__(self) -> None:
        self.data = bytearray()
        self.size = 0
        self.changes: list[_Change] = []  # since the last sync
        self.locked_by: int | None = None

    def read(self, at: int, size: int) -> bytes:
        found = bytes(self.data[at : at + size])
        return found + bytes(max(0, min(size, self.size - at) - len(found)))

    def write(self, at: int, new: bytes) -> None:
        self._remember(_Change(at, new, bytes(self.data[at : at + len(new)]), len(self.data), self.size))
        if at > len(self.data):
            self.data.extend(bytes(at - len(self.data)))
        self.data[at : at + len(new)] = new
        self.size = max(self.size, at + len(new))

    def resize(self, size: int) -> None:
        self._remember(_Change(size, None, bytes(self.data[size:]), len(self.data), self.size))
        del self.data[size:]
        self.size = size

    def _remember(self, change: _Change) -> None:
        self.changes.append(change)
        if len(self.changes) > UNSYNCED_MAX:
            del self.changes[0]

    def crash(self, rng: random.Random) -> None:
        """Back to the last sync, then each change lost, whole, or (if it wrote) in part."""
        changes, self.changes = self.changes, []
        for change in reversed(changes):
            self.data[change.at : change.at + len(change.old)] = change.old
            del self.data[change.stored :]
            self.size = change.size
        for change in changes:
            fate = rng.choice(("lost", "whole", "part"))
            if fate == "lost":
                continue
            if change.new is None:
                self.resize(change.at)
            elif fate == "whole" or not change.new:
                self.write(change.at, change.new)
            else:
                start = rng.randrange(len(change.new))
                stop = rng.randrange(start, len(change.new)) + 1
                self.write(change.at + start, change.new[start:stop])
        self.changes = []
        self.locked_by = None


_Entries = list[tuple[str, "_File | None"]]  # names given or taken away, all at once


class _Platter:
    """What the processes of one peer share: everything that a power cut leaves, and what it does not."""

    def __init__(self, *, gone: bool = False) -> None:
        self.gone = gone  # seen by a dead process only: nothing it does is an error, and nothing of it is kept
        self.names: dict[str, _File] = {}  # as a process sees it
        self.durable: dict[str, _File] = {}
        self.renames: dict[str, list[_Entries]] = {}  # folder → changes of names since its last sync
        self.folders: set[str] = set()
        self.open: dict[int, _File] = {}
        self.next = 3
        self.dead_below = 0  # descriptors of processes that are gone
        self.limit: int | None = None
        self.broken = False
        self.ns_per_byte = 0.0
        self.unpaid_bytes = 0
        self.written_bytes = 0
        self.syncs = 0

    def file(self, descriptor: int) -> _File:
        if descriptor in self.open:
            return self.open[descriptor]
        if self.gone or 0 <= descriptor < self.dead_below:
            return _File()
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def check(self) -> None:
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def room(self) -> int:
        """Bytes by which files may still grow."""
        if self.limit is None:
            return PLENTY_BYTES
        return max(0, self.limit - self.used())

    def used(self) -> int:
        files = {id(file): file.size for held in (self.names, self.open) for file in held.values()}
        return sum(files.values())

    def rename(self, folder: str, entries: _Entries) -> None:
        _apply(self.names, entries)
        pending = self.renames.setdefault(folder, [])
        pending.append(entries)
        if len(pending) > UNSYNCED_MAX:
            _apply(self.durable, pending.pop(0))


class MemoryDisk:
    """One peer's disk, over all its lives. Each life should have its own `mount`."""

    def __init__(self, platter: _Platter | None = None) -> None:
        self._platter = platter or _Platter()
        self._mounts: list[MemoryDisk] = []

    def mount(self) -> MemoryDisk:
        """The disk as one process has it: after `crash` or `mute` whatever still runs of the process changes nothing."""
        view = MemoryDisk(self._platter)
        self._mounts.append(view)
        return view

    @property
    def written_bytes(self) -> int:
        """Of all lives."""
        return self._platter.written_bytes

    @property
    def syncs(self) -> int:
        """Syncs of files, of all lives."""
        return self._platter.syncs

    # ------------------------------------------------------------------------------------------------ faults

    def fill(self, limit_bytes: int | None = None) -> None:
        """Files may hold this many bytes together; by default what they hold now. What is deleted can be used again."""
        self._platter.limit = self._platter.used() if limit_bytes is None else limit_bytes

    def free(self) -> None:
        """There is space again."""
        self._platter.limit = None

    def break_(self, broken: bool = True) -> None:
        """Every change fails with EIO; reading goes on."""
        self._platter.broken = broken

    def slow(self, mb_per_s: float | None) -> None:
        """Writes take time; None: they do not."""
        self._platter.ns_per_byte = 0.0 if mb_per_s is None else 1000.0 / mb_per_s

    def delay_s(self, size: int) -> float:
        """Seconds that writing `size` bytes takes."""
        return size * self._platter.ns_per_byte / 1e9

    def take_delay(self) -> float:
        """Seconds that the writes since the last call took."""
        unpaid, self._platter.unpaid_bytes = self._platter.unpaid_bytes, 0
        return self.delay_s(unpaid)

    def mute(self) -> None:
        """From now on nothing that a process does which has the disk now reaches it. What it wrote, the system keeps."""
        for view in self._mounts:
            view._platter = _Platter(gone=True)
        self._mounts.clear()
        platter = self._platter
        platter.dead_below = platter.next
        platter.open.clear()
        platter.unpaid_bytes = 0
        for file in platter.names.values():
            file.locked_by = None

    def crash(self, rng: random.Random) -> None:
        """The process is gone and the power with it: what was not synced is lost, there, or there in part."""
        self.mute()
        platter = self._platter
        for folder in sorted(platter.renames):
            pending = platter.renames[folder]
            for entries in pending[: rng.randrange(len(pending) + 1)]:
                _apply(platter.durable, entries)
        platter.renames.clear()
        for _, file in sorted(platter.durable.items()):
            file.crash(rng)  # a second name of a file finds nothing left to do
        platter.names = dict(platter.durable)

    def lose(self) -> None:
        """A new, empty disk."""
        self.mute()
        for held in (self._platter.names, self._platter.durable, self._platter.renames, self._platter.folders):
            held.clear()

    # ------------------------------------------------------------------------------------------------ calls

    def open(self, path: Path, *, fresh: bool = False) -> int:
        platter, name = self._platter, str(path)
        file = platter.names.get(name)
        if file is None:
            if str(path.parent) not in platter.folders and not platter.gone:
                raise _no_such(path)
            platter.check()
            file = _File()
            platter.rename(str(path.parent), [(name, file)])
        elif fresh:
            platter.check()
            file.resize(0)
        descriptor, platter.next = platter.next, platter.next + 1
        platter.open[descriptor] = file
        return descriptor

    def read(self, path: Path) -> bytes:
        file = self._platter.names.get(str(path))
        if file is None:
            raise _no_such(path)
        return file.read(0, file.size)

    def exists(self, path: Path) -> bool:
        return str(path) in self._platter.names or str(path) in self._platter.folders

    def names(self, folder: Path) -> list[str]:
        prefix = f"{folder}/"
        held = (self._platter.names, self._platter.folders)
        return sorted(n[len(prefix) :] for each in held for n in each if n.startswith(prefix) and _direct(n, prefix))

    def make_folder(self, path: Path) -> None:
        self._platter.check()
        self._platter.folders.update(str(folder) for folder in (path, *path.parents))

    def free_bytes(self, folder: Path) -> int:
        return self._platter.room()

    def lock(self, descriptor: int) -> None:
        file = self._platter.file(descriptor)
        if file.locked_by not in (None, descriptor):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        file.locked_by = descriptor

    def pread(self, descriptor: int, size: int, offset: int) -> bytes:
        return self._platter.file(descriptor).read(offset, size)

    def size(self, descriptor: int) -> int:
        return self._platter.file(descriptor).size

    def write(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        platter, new = self._platter, bytes(data)
        file = platter.file(descriptor)
        platter.check()
        growth = offset + len(new) - file.size
        if growth > 0 and growth > (room := platter.room()):
            new = new[: max(0, len(new) - (growth - room))]
            if not new:
                raise _full()
        file.write(offset, new)
        platter.written_bytes += len(new)
        platter.unpaid_bytes += len(new)
        return len(new)

    def allocate(self, descriptor: int, offset: int, size: int) -> None:
        self._grow(descriptor, offset + size)

    def truncate(self, descriptor: int, size: int) -> None:
        file = self._platter.file(descriptor)
        self._platter.check()
        if size < file.size:
            file.resize(size)
        else:
            self._grow(descriptor, size)

    def _grow(self, descriptor: int, size: int) -> None:
        file = self._platter.file(descriptor)
        self._platter.check()
        if size > file.size:
            if size - file.size > self._platter.room():
                raise _full()
            file.resize(size)

    def sync(self, descriptor: int) -> None:
        file = self._platter.file(descriptor)
        self._platter.check()
        file.changes.clear()
        self._platter.syncs += 1
        self._platter.unpaid_bytes += SYNC_BYTES

    def close(self, descriptor: int) -> None:
        file = self._platter.file(descriptor)
        if file.locked_by == descriptor:
            file.locked_by = None
        self._platter.open.pop(descriptor, None)

    def replace(self, source: Path, target: Path) -> None:
        self._platter.check()
        file = self._platter.names.get(str(source))
        if file is None:
            raise _no_such(source)
        self._platter.rename(str(target.parent), [(str(source), None), (str(target), file)])

    def unlink(self, path: Path) -> None:
        self._platter.check()
        if str(path) in self._platter.names:
            self._platter.rename(str(path.parent), [(str(path), None)])

    def sync_folder(self, folder: Path) -> None:
        self._platter.check()
        if str(folder) not in self._platter.folders and not self._platter.gone:
            raise _no_such(folder)
        for entries in self._platter.renames.pop(str(folder), []):
            _apply(self._platter.durable, entries)


def _apply(names: dict[str, _File], entries: _Entries) -> None:
    for name, file in entries:
        if file is None:
            names.pop(name, None)
        else:
            names[name] = file


def _direct(name: str, prefix: str) -> bool:
    return "/" not in name[len(prefix) :]


def _no_such(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
