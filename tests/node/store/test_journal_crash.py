"""The journal on a disk that loses, tears or reorders everything not fsynced, killed at every system call.

The law: whatever moment the machine stops at, a restart finds every record that was reported durable, possibly the one
under way, in order, and never issues a dot again that somebody could have seen.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from shoal.node.store.disk import RealDisk
from shoal.node.store.journal import FILE, WASTE_BYTES_MAX, Journal, JournalFull, OwnUpdate
from shoal.protocol.ballot_record import BallotRecord
from shoal.protocol.version import Dot, sha256

BASE = sha256(b"base")


class PowerCut(BaseException):
    """The machine stops: nothing after this line runs. Not an Exception: no handler of the journal may outlive it."""


@dataclass
class Inode:
    """One file: its durable bytes, and the changes since its last fsync."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[str, int, bytes]] = field(default_factory=list)


def _applied(durable: bytes, changes: list[tuple[str, int, bytes]]) -> bytearray:
    data = bytearray(durable)
    for kind, at, piece in changes:
        if kind == "truncate":
            del data[at:]
            data.extend(bytes(at - len(data)))
        else:
            data.extend(bytes(max(0, at + len(piece) - len(data))))
            data[at : at + len(piece)] = piece
    return data


class CrashingDisk(RealDisk):
    """Works on real files, keeps what would survive a power cut beside them, and cuts the power at one call."""

    def __init__(self, folder: Path, cut_at: int) -> None:
        self.folder, self.cut_at, self.calls = folder, cut_at, 0
        self.by_inode: dict[int, Inode] = {}
        self.entries_durable: dict[str, int] = {}  # name → inode, as of the folder's last fsync

    def _tick(self) -> None:
        self.calls += 1
        if self.calls == self.cut_at:
            raise PowerCut

    def _inode(self, descriptor: int) -> Inode:
        return self.by_inode.setdefault(os.fstat(descriptor).st_ino, Inode())

    def open(self, path: Path, *, fresh: bool = False) -> int:
        if not fresh:
            return super().open(path)
        self._tick()
        descriptor = super().open(path, fresh=True)
        self.by_inode[os.fstat(descriptor).st_ino] = Inode()
        return descriptor

    def write(self, descriptor: int, data: bytes, offset: int) -> int:
        # Never all at once: the caller comes back for the rest, and the cut may fall between.
        self._tick()
        half = (len(data) + 1) // 2
        written = super().write(descriptor, data[:half], offset)
        self._inode(descriptor).pending.append(("write", offset, data[:half]))
        return written

    def sync(self, descriptor: int) -> None:
        self._tick()  # what is durable is kept here, so the real disk need not be waited for
        inode = self._inode(descriptor)
        inode.durable, inode.pending = _applied(inode.durable, inode.pending), []

    def allocate(self, descriptor: int, offset: int, size: int) -> None:
        self._tick()
        super().allocate(descriptor, offset, size)
        self._inode(descriptor).pending.append(("write", offset, bytes(size)))

    def truncate(self, descriptor: int, size: int) -> None:
        self._tick()
        super().truncate(descriptor, size)
        self._inode(descriptor).pending.append(("truncate", size, b""))

    def replace(self, source: Path, target: Path) -> None:
        self._tick()
        super().replace(source, target)

    def sync_folder(self, folder: Path) -> None:
        self._tick()
        self.entries_durable = {path.name: path.stat().st_ino for path in folder.iterdir()}

    def survivors(self, rng: random.Random) -> dict[str, bytes]:
        """The folder after the power cut: any of the folder's states since its last fsync, any part of unsynced writes."""
        present = {path.name: path.stat().st_ino for path in self.folder.iterdir()}
        entries = rng.choice([self.entries_durable, present])
        found = {}
        for name, number in entries.items():
            inode = self.by_inode.get(number, Inode())
            kept = []
            for kind, at, piece in inode.pending:
                fate = rng.choice(["lost", "kept", "torn"])
                if fate == "torn" and kind == "write" and piece:
                    start = rng.randrange(len(piece))
                    stop = rng.randrange(start, len(piece)) + 1
                    kept.append((kind, at + start, piece[start:stop]))
                elif fate != "lost":
                    kept.append((kind, at, piece))
            found[name] = bytes(_applied(inode.durable, kept))
        return found


def update(dot: Dot, round_: int, variant: int) -> OwnUpdate:
    return OwnUpdate(
        dot, round_, BASE, b"signed %d %d" % (dot.seq, variant), bytes([dot.seq]) * 40,
        sha256(b"head", bytes([dot.seq]), bytes([variant])), np.full(6, variant, np.float32), np.full(6, -variant),
    )  # fmt: skip


@dataclass
class Said:
    """What left this peer: it was said only after the journal had returned."""

    updates: dict[Dot, bytes] = field(default_factory=dict)
    dropped: set[Dot] = field(default_factory=set)
    lives: list[int] = field(default_factory=list)
    ballot: BallotRecord | None = None


def live(journal: Journal, said: Said, variant: int) -> None:
    """One life: a start, rounds of promise, update and now and then compaction."""
    if not journal.incarnation:
        journal.start_incarnation(said.lives[-1] if said.lives else 0)
        said.lives.append(journal.incarnation)
    for round_ in range(1, 6):
        record = BallotRecord(round_, BASE, promised=variant)
        journal.save_ballot(record)
        said.ballot = record
        one = update(journal.next_dot("me"), round_, variant)
        journal.append_update(one)
        assert one.dot not in said.updates, "a dot was issued twice"
        said.updates[one.dot] = one.signed
        if round_ in (2, 4):
            keep = {u.dot for u in journal.updates[-1:]}
            said.dropped |= {u.dot for u in journal.updates} - keep
            journal.compact(keep)


def check(journal: Journal, said: Said) -> None:
    """Every durable update that was not given up is there, to the byte; the next dot is above everything said."""
    there = {u.dot: u.signed for u in journal.updates}
    for dot, signed in said.updates.items():
        if dot not in said.dropped:
            assert there.get(dot) == signed, f"{dot} was said and is gone or other"
        elif dot in there:
            assert there[dot] == signed
    if said.updates:
        assert journal.next_dot("me") > max(said.updates)
    elif said.lives:
        assert journal.incarnation >= said.lives[-1]
    if said.ballot is not None:
        found = journal.ballot_record(said.ballot.round, BASE)
        later = journal.ballot_record(said.ballot.round + 1, BASE)
        assert later is not None or (found is not None and found.promised >= said.ballot.promised)
    # What is replayed and was under way may be said from now on.
    for one in journal.updates:
        said.updates.setdefault(one.dot, one.signed)


def _cut(folder: Path, disk: CrashingDisk, rng: random.Random) -> None:
    left = disk.survivors(rng)
    for path in folder.iterdir():
        path.unlink()
    for name, data in left.items():
        (folder / name).write_bytes(data)


def _close(journal: Journal | None) -> None:
    if journal is not None:
        journal.close()


@pytest.mark.parametrize("seed", range(3))
def test_power_cut_at_any_call_never_reuses_a_dot_nor_loses_what_was_said(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    cut_at = 1
    while True:
        folder = tmp_path / str(cut_at)
        folder.mkdir()
        disk, said, journal = CrashingDisk(folder, cut_at), Said(), None
        try:
            journal = Journal(folder, disk)
            live(journal, said, 1)
            break
        except PowerCut:
            _close(journal)
        _cut(folder, disk, rng)
        # A second life on what is left, cut as well, then a third to its end.
        second = CrashingDisk(folder, rng.randrange(1, 60))
        second.entries_durable = {path.name: path.stat().st_ino for path in folder.iterdir()}
        for path in folder.iterdir():
            second.by_inode[path.stat().st_ino] = Inode(bytearray(path.read_bytes()))
        journal = None
        try:
            journal = Journal(folder, second)
            check(journal, said)
            live(journal, said, 2)
        except PowerCut:
            pass
        _close(journal)
        _cut(folder, second, rng)
        journal = Journal(folder)
        check(journal, said)
        live(journal, said, 3)
        journal.close()
        journal = Journal(folder)
        check(journal, said)
        journal.close()
        cut_at += 1
    assert cut_at > 60  # it was cut in every phase of a whole life
    journal.close()


def test_a_file_cut_at_any_byte_is_a_prefix(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.start_incarnation()
    for round_ in (1, 2, 3):
        journal.append_update(update(journal.next_dot("me"), round_, 1))
    life = journal.incarnation
    journal.close()
    path = tmp_path / FILE
    data = path.read_bytes().rstrip(b"\0")
    found = set()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        again = Journal(tmp_path)
        assert [u.dot.seq for u in again.updates] == list(range(1, len(again.updates) + 1))
        assert again.incarnation in (0, life) and again.last_seq == len(again.updates)
        found.add((again.incarnation, again.last_seq))
        again.close()
    assert found == {(0, 0), (life, 0), (life, 1), (life, 2), (life, 3)}


def test_after_a_compaction_nothing_is_said_before_its_rename_is_durable(tmp_path: Path) -> None:
    """A crash could bring the old file back; what was appended to the new one would be forgotten and its dot reused."""

    class FolderFails(RealDisk):
        broken = False

        def sync_folder(self, folder: Path) -> None:
            if self.broken:
                raise OSError(5, "Input/output error")
            super().sync_folder(folder)

    files = FolderFails()
    journal = Journal(tmp_path, files)
    journal.start_incarnation()
    for round_ in (1, 2):
        journal.append_update(update(journal.next_dot("me"), round_, 1))
    files.broken = True
    journal.compact(set())
    with pytest.raises(JournalFull):
        journal.append_update(update(journal.next_dot("me"), 3, 1))
    files.broken = False
    journal.append_update(update(journal.next_dot("me"), 3, 1))
    journal.close()
    again = Journal(tmp_path)
    assert [u.dot.seq for u in again.updates] == [3]
    again.close()


def test_votes_alone_do_not_grow_the_file_for_ever(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.start_incarnation()
    value = os.urandom(64 * 1024)
    largest = 0
    for round_ in range(1, 200):
        journal.save_ballot(BallotRecord(round_, BASE, promised=1))
        journal._superseded += len(value)  # stands in for votes of large values
        journal.compact(set())
        largest = max(largest, journal._superseded)
    assert largest < WASTE_BYTES_MAX + len(value)
    assert os.path.getsize(tmp_path / FILE) < 2 * 1024 * 1024
    assert journal.ballot_record(199, BASE) is not None
    journal.close()


def test_a_failed_new_life_leaves_the_old_one(tmp_path: Path) -> None:
    class Full(RealDisk):
        broken = False

        def write(self, descriptor: int, data: bytes, offset: int) -> int:
            if self.broken:
                raise OSError(28, "No space left on device")
            return super().write(descriptor, data, offset)

    files = Full()
    journal = Journal(tmp_path, files)
    first = journal.start_incarnation()
    journal.append_update(update(journal.next_dot("me"), 1, 1))
    files.broken = True
    with pytest.raises(JournalFull, match="No space"):
        journal.start_incarnation(first + 10)
    journal.compact(set())  # best effort: the old file stays
    assert (journal.incarnation, journal.last_seq, len(journal.updates)) == (first, 1, 1)
    assert [p.name for p in tmp_path.iterdir()] == [FILE]
    files.broken = False
    journal.append_update(update(journal.next_dot("me"), 2, 1))
    journal.close()


def test_without_preallocation_it_works_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, offset: int, size: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    journal = Journal(tmp_path)
    journal.start_incarnation()
    monkeypatch.delattr(os, "posix_fallocate")
    journal._allocated = journal._end
    journal.append_update(update(journal.next_dot("me"), 1, 1))
    journal.close()
    again = Journal(tmp_path)
    assert again.last_seq == 1
    again.close()


def test_a_journal_without_a_life_takes_no_update(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(ValueError, match="incarnation"):
        journal.append_update(update(Dot("me", 0, 1), 1, 1))
    journal.close()


def _cut_power(descriptor: int) -> None:
    raise PowerCut


def test_what_a_killed_process_had_not_synced_is_made_durable_before_it_is_said_again(tmp_path: Path) -> None:
    """Killed between write and fsync, restarted (which replays and says it), then the power goes."""
    disk, said = CrashingDisk(tmp_path, 0), Said()
    journal = Journal(tmp_path, disk)
    journal.start_incarnation()
    real_sync, disk.sync = disk.sync, _cut_power
    with pytest.raises(PowerCut):
        journal.append_update(update(journal.next_dot("me"), 1, 1))
    journal.close()
    disk.sync = real_sync
    journal = Journal(tmp_path, disk)
    check(journal, said)
    assert len(said.updates) == 1
    journal.close()
    for seed in range(20):
        left = disk.survivors(random.Random(seed))
        folder = tmp_path / str(seed)
        folder.mkdir()
        for name, data in left.items():
            (folder / name).write_bytes(data)
        again = Journal(folder)
        check(again, said)
        again.close()
        (folder / FILE).unlink()
        folder.rmdir()


def test_a_record_behind_a_damaged_one_never_comes_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.start_incarnation()
    ends = []
    for round_ in (1, 2, 3):
        journal.append_update(update(journal.next_dot("me"), round_, 1))
        ends.append(journal._end)
    journal.close()
    path = tmp_path / FILE
    data = bytearray(path.read_bytes())
    data[ends[1] - 1] ^= 1
    path.write_bytes(data)
    journal = Journal(tmp_path)
    assert journal.last_seq == 1
    journal.append_update(update(journal.next_dot("me"), 2, 2))  # as long as the damaged one
    assert journal._end == ends[1]
    journal.close()
    again = Journal(tmp_path)
    assert [u.signed for u in again.updates] == [b"signed 1 1", b"signed 2 2"]
    again.close()
