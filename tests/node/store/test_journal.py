"""The journal: what was said is said again to the byte, a torn or failing disk never reuses a dot."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.node.store.disk import RealDisk
from shoal.node.store.journal import FILE, Journal, JournalFull, OwnUpdate
from shoal.protocol.ballot_record import BallotRecord
from shoal.protocol.version import NO_HEAD, Dot, sha256


def update(journal: Journal, round_: int, size: int = 8) -> OwnUpdate:
    dot = journal.next_dot("peer")
    return OwnUpdate(
        dot, round_, sha256(b"base"), b"signed%d" % dot.seq, b"p" * dot.seq, sha256(bytes([dot.seq])),
        np.arange(size, dtype=np.float32) * dot.seq, np.arange(size) * -(2**41),
    )  # fmt: skip


def same(a: OwnUpdate, b: OwnUpdate) -> bool:
    fields = ("dot", "round", "base_lineage", "signed", "payload", "head")
    return (
        all(getattr(a, f) == getattr(b, f) for f in fields)
        and np.array_equal(a.delta, b.delta)
        and np.array_equal(a.learned, b.learned)
    )


def test_a_new_journal_starts_an_incarnation_above_all_known(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.incarnation == 0 and not journal.updates
    first = journal.start_incarnation()
    assert journal.start_incarnation(first + 1000) == first + 1001
    assert journal.start_incarnation(5) == first + 1002
    journal.close()
    assert Journal(tmp_path).incarnation == first + 1002


def test_a_restart_replays_the_same_bytes(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.start_incarnation()
    said = [update(journal, 1)]
    journal.append_update(said[0])
    said.append(update(journal, 2))
    journal.append_update(said[1])
    record = BallotRecord(2, sha256(b"base"), promised=3)
    journal.save_ballot(record)
    journal.close()
    again = Journal(tmp_path)
    assert len(again.updates) == 2 and all(same(a, b) for a, b in zip(again.updates, said))
    assert again.next_dot("peer").seq == 3 and again.last_head == said[1].head
    assert again.ballot_record(2, sha256(b"base")) == record
    assert again.ballot_record(3, sha256(b"base")) is None


def test_a_dot_is_taken_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.start_incarnation()
    one = update(journal, 1)
    journal.append_update(one)
    with pytest.raises(ValueError, match="does not follow"):
        journal.append_update(one)


def test_compaction_keeps_seq_head_ballot_and_what_is_named(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.start_incarnation()
    said = []
    for round_ in range(1, 6):
        said.append(update(journal, round_, size=1000))
        journal.append_update(said[-1])
    journal.save_ballot(BallotRecord(5, sha256(b"base"), promised=1))
    size = os.path.getsize(tmp_path / FILE)
    journal.compact({said[4].dot})
    journal.compact({said[4].dot})  # nothing left to drop
    assert os.path.getsize(tmp_path / FILE) < size
    journal.append_update(update(journal, 6))
    journal.close()
    again = Journal(tmp_path)
    assert [u.dot.seq for u in again.updates] == [5, 6] and again.last_seq == 6
    assert again.ballot_record(5, sha256(b"base")) is not None
    journal = again
    journal.compact(set())
    journal.close()
    empty = Journal(tmp_path)
    assert not empty.updates and empty.last_seq == 6 and empty.last_head != NO_HEAD


def test_what_damage_cuts_off_is_counted_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.start_incarnation()
    journal.append_update(update(journal, 1))
    journal.close()
    path = tmp_path / FILE
    whole = bytearray(path.read_bytes())
    used = len(whole.rstrip(b"\0"))
    whole[10] ^= 0x55  # in the first record, so that nothing can be read
    path.write_bytes(whole)
    damaged = Journal(tmp_path)
    assert damaged.incarnation == 0 and damaged.cut_bytes == used
    damaged.start_incarnation()
    damaged.close()
    assert Journal(tmp_path).cut_bytes == 0


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.binary(max_size=40))
def test_any_torn_tail_leaves_a_prefix(tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes) -> None:
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder)
    journal.start_incarnation()
    for round_ in (1, 2, 3):
        journal.append_update(update(journal, round_))
    journal.close()
    path = folder / FILE
    data = path.read_bytes().rstrip(b"\0")
    path.write_bytes(data[: cut % (len(data) + 1)] + junk)
    again = Journal(folder)
    seqs = [u.dot.seq for u in again.updates]
    assert seqs == list(range(1, len(seqs) + 1))
    if again.incarnation:
        assert again.next_dot("peer").seq == len(seqs) + 1
        again.append_update(update(again, 9))
        again.close()
        assert [u.dot.seq for u in Journal(folder).updates] == [*seqs, len(seqs) + 1]


class FailingFiles(RealDisk):
    """A disk that fails at a given call, possibly after writing a part."""

    def __init__(self, fail_at: int, kind: str) -> None:
        self.calls, self.fail_at, self.kind = 0, fail_at, kind

    def _count(self) -> bool:
        self.calls += 1
        return self.calls == self.fail_at

    def allocate(self, descriptor: int, offset: int, size: int) -> None:
        if self._count():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(descriptor, offset, size)

    def write(self, descriptor: int, data: bytes, offset: int) -> int:
        if self._count():
            if self.kind == "torn":
                super().write(descriptor, data[: len(data) // 2], offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        if self._count():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(descriptor)


@pytest.mark.parametrize("kind", ["clean", "torn"])
@pytest.mark.parametrize("fail_at", range(1, 12))
def test_a_disk_that_fails_at_any_call_never_yields_half_a_record(tmp_path: Path, fail_at: int, kind: str) -> None:
    files = FailingFiles(fail_at, kind)
    said: list[OwnUpdate] = []
    journal = Journal(tmp_path, files)
    failures = 0
    for round_ in range(5):
        try:
            if not journal.incarnation or round_ == 0:
                journal.start_incarnation()
            one = update(journal, round_)
            journal.append_update(one)
            said.append(one)
        except JournalFull:
            failures += 1
    assert failures <= 1
    journal.close()
    again = Journal(tmp_path)
    # A record whose fsync failed was wiped; what was reported as durable is there, in order, once.
    assert [u.dot for u in again.updates] == [u.dot for u in said]
    assert len({u.dot for u in again.updates}) == len(said)


def test_dots_name_their_origin_and_life(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    life = journal.start_incarnation()
    assert journal.next_dot("p") == Dot("p", life, 1)
