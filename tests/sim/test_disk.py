"""The simulated disk: a crash keeps what was synced and invents nothing; the store recovers from a crash at any call."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.store.checkpoint import Checkpoint, Checkpoints
from shoal.node.store.commits import CommitFile
from shoal.node.store.datadir import DataDir
from shoal.node.store.disk import Disk, write_all, write_atomic
from shoal.node.store.journal import Journal, JournalFull, OwnUpdate
from shoal.node.store.metrics import append_metrics
from shoal.node.swarm.state import SharedState
from shoal.protocol.ballot_record import BallotRecord
from shoal.protocol.errors import ExitCode, ShoalError
from shoal.protocol.version import Dot, VersionVector, sha256
from shoal.sim.disk import SYNC_BYTES, UNSYNCED_MAX, MemoryDisk

ROOT = Path("/p0")
BASE = sha256(b"base")


def disk_with_folder() -> MemoryDisk:
    disk = MemoryDisk()
    disk.make_folder(ROOT)
    return disk


def put(disk: Disk, name: str, data: bytes, *, sync: bool = True) -> None:
    descriptor = disk.open(ROOT / name)
    write_all(disk, descriptor, data, 0)
    if sync:
        disk.sync(descriptor)
        disk.sync_folder(ROOT)
    disk.close(descriptor)


# --- crashes -----------------------------------------------------------------------------------------------------------


def test_a_crash_forgets_what_was_not_synced() -> None:
    outcomes = set()
    for seed in range(60):
        disk = disk_with_folder()
        put(disk, "kept", b"kept")
        put(disk, "loose", b"loose", sync=False)
        disk.crash(random.Random(seed))
        assert disk.read(ROOT / "kept") == b"kept"
        outcomes.add(disk.read(ROOT / "loose") if disk.exists(ROOT / "loose") else None)
    assert {None, b"", b"loose"} < outcomes  # lost with its name, lost, there; and some parts of it
    assert all(found is None or len(found) <= 5 for found in outcomes)


def test_a_rename_that_was_not_synced_is_done_or_not_and_never_half() -> None:
    found = set()
    for seed in range(40):
        disk = disk_with_folder()
        put(disk, "file", b"old")
        put(disk, "file.tmp", b"new")
        disk.replace(ROOT / "file.tmp", ROOT / "file")
        disk.crash(random.Random(seed))
        found.add((disk.read(ROOT / "file"), tuple(disk.names(ROOT))))
    assert found == {(b"old", ("file", "file.tmp")), (b"new", ("file",))}


def test_the_same_seed_is_the_same_crash() -> None:
    def crashed(seed: int) -> list[tuple[str, bytes]]:
        disk = disk_with_folder()
        for name in "abcdef":
            put(disk, name, name.encode() * 20, sync=name < "c")
            put(disk, name, b"later", sync=False)
        disk.crash(random.Random(seed))
        return [(name, disk.read(ROOT / name)) for name in disk.names(ROOT)]

    assert crashed(1) == crashed(1) != crashed(2)


_FILE_OPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 30), st.binary(min_size=1, max_size=12)),
        st.tuples(st.just("truncate"), st.integers(0, 40), st.none()),
        st.tuples(st.just("allocate"), st.integers(0, 40), st.none()),
        st.tuples(st.just("sync"), st.none(), st.none()),
    ),
    max_size=25,
)


@given(_FILE_OPS, st.integers(0, 2**32))
def test_every_byte_after_a_crash_is_the_synced_one_or_one_written_since(ops: list[tuple], seed: int) -> None:
    disk = disk_with_folder()
    put(disk, "file", b"")
    descriptor = disk.open(ROOT / "file")
    synced, allowed, sizes = b"", {}, {0}
    for kind, at, data in ops:
        if kind == "write":
            write_all(disk, descriptor, data, at)
            for place, byte in enumerate(data, at):
                allowed.setdefault(place, set()).add(byte)
        elif kind == "truncate":
            disk.truncate(descriptor, at)
        elif kind == "allocate":
            disk.allocate(descriptor, at, 5)
        else:
            disk.sync(descriptor)
            synced, allowed, sizes = disk.read(ROOT / "file"), {}, set()
        sizes.add(disk.size(descriptor))
    disk.crash(random.Random(seed))
    left = disk.read(ROOT / "file")
    if not allowed and sizes <= {len(synced)}:
        assert left == synced
    touched_size = max([len(synced), *sizes])
    assert len(left) <= touched_size
    for place, byte in enumerate(left):
        original = synced[place] if place < len(synced) else 0
        assert byte in {original, 0, *allowed.get(place, ())}
    disk.crash(random.Random(seed + 1))
    assert disk.read(ROOT / "file") == left  # what survived one crash is durable


def test_what_nobody_syncs_is_written_back_in_the_end() -> None:
    disk = disk_with_folder()
    for number in range(3 * UNSYNCED_MAX):
        append_metrics(ROOT, {"round": number}, disk)
    disk.crash(random.Random(0))
    lines = disk.read(ROOT / "metrics.jsonl").splitlines()
    assert lines[: UNSYNCED_MAX - 1] == [b'{"round":%d}' % number for number in range(UNSYNCED_MAX - 1)]


# --- dead processes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["crash", "mute"])
def test_nothing_that_a_dead_process_still_does_reaches_the_disk(end: str) -> None:
    disk = disk_with_folder()
    mine = disk.mount()
    put(mine, "file", b"file")
    descriptor = mine.open(ROOT / "file")
    mine.lock(descriptor)
    disk.crash(random.Random(0)) if end == "crash" else disk.mute()
    written = disk.written_bytes
    # Its clean-up runs into nothing: no error, no effect.
    write_all(mine, descriptor, b"goodbye", 0)
    mine.truncate(descriptor, 0)
    mine.sync(descriptor)
    mine.close(descriptor)
    mine.close(descriptor)
    mine.unlink(ROOT / "file")
    write_atomic(mine, ROOT / "other", b"goodbye")
    mine.make_folder(ROOT / "sub")
    mine.sync_folder(ROOT / "sub")
    assert disk.names(ROOT) == ["file"] and disk.read(ROOT / "file") == b"file"
    assert (disk.written_bytes, disk.take_delay()) == (written, 0.0)
    # Its next life has the disk, and the lock, for itself.
    again = disk.mount()
    number = again.open(ROOT / "file")
    again.lock(number)
    write_all(mine, number, b"goodbye", 0)
    assert again.read(ROOT / "file") == b"file"


def test_a_mute_keeps_what_was_written_as_the_system_does_for_a_killed_process() -> None:
    disk = disk_with_folder()
    put(disk.mount(), "file", b"loose", sync=False)
    disk.mute()
    assert disk.read(ROOT / "file") == b"loose"


def test_a_process_that_used_the_disk_itself_is_silent_by_its_descriptors() -> None:
    disk = disk_with_folder()
    put(disk, "file", b"file")
    descriptor = disk.open(ROOT / "file")
    disk.crash(random.Random(0))
    write_all(disk, descriptor, b"goodbye", 0)
    disk.close(descriptor)
    assert disk.read(ROOT / "file") == b"file"


def test_a_lost_disk_is_empty_and_a_node_starts_anew_on_it() -> None:
    disk = MemoryDisk()
    data = DataDir(ROOT, disk.mount())
    data.write(data.manifest, b"m")
    disk.lose()
    data.write(data.manifest, b"late")
    assert disk.names(ROOT) == [] and not disk.exists(ROOT)
    again = DataDir(ROOT, disk.mount())
    assert again.read(again.manifest) == b""


# --- full, broken, slow ------------------------------------------------------------------------------------------------


def test_a_full_disk_takes_what_fits_and_what_was_freed() -> None:
    disk = disk_with_folder()
    put(disk, "file", bytes(100))
    disk.fill(limit_bytes=110)
    assert disk.free_bytes(ROOT) == 10
    descriptor = disk.open(ROOT / "more")
    assert disk.write(descriptor, bytes(25), 0) == 10
    for call in (
        lambda: disk.write(descriptor, b"x", 10),
        lambda: disk.allocate(descriptor, 0, 11),
        lambda: disk.truncate(descriptor, 11),
    ):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.ENOSPC
    write_all(disk, descriptor, bytes(10), 0)  # in place: needs nothing
    disk.unlink(ROOT / "file")
    write_all(disk, descriptor, bytes(90), 10)
    disk.fill()
    with pytest.raises(OSError):
        disk.write(descriptor, b"x", 100)
    disk.free()
    write_all(disk, descriptor, b"x", 100)


def test_a_node_refuses_to_start_on_a_full_disk() -> None:
    disk = disk_with_folder()
    disk.fill()
    with pytest.raises(ShoalError) as caught:
        DataDir(ROOT / "node", disk)
    assert caught.value.code is ExitCode.DISK


def test_a_broken_disk_can_be_read() -> None:
    disk = disk_with_folder()
    put(disk, "file", b"file")
    descriptor = disk.open(ROOT / "file")
    disk.break_()
    for call in (
        lambda: disk.write(descriptor, b"x", 0),
        lambda: disk.sync(descriptor),
        lambda: disk.open(ROOT / "new"),
        lambda: disk.unlink(ROOT / "file"),
        lambda: disk.replace(ROOT / "file", ROOT / "new"),
        lambda: disk.sync_folder(ROOT),
    ):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EIO
    assert disk.read(ROOT / "file") == b"file"
    disk.break_(False)
    write_all(disk, descriptor, b"x", 0)


def test_a_slow_disk_says_what_it_took() -> None:
    disk = disk_with_folder()
    put(disk, "file", bytes(1000))
    assert disk.take_delay() == 0.0
    disk.slow(mb_per_s=2)
    put(disk, "file", bytes(1000))
    assert disk.take_delay() == pytest.approx((1000 + SYNC_BYTES) / 2e6)
    assert disk.take_delay() == 0.0 and disk.delay_s(2_000_000) == pytest.approx(1.0)
    assert (disk.written_bytes, disk.syncs) == (2000, 2)


def test_reserved_space_takes_no_memory() -> None:
    disk = disk_with_folder()
    descriptor = disk.open(ROOT / "file")
    disk.allocate(descriptor, 0, 2**44 // 1024)
    disk.truncate(descriptor, 2**40 // 128)
    assert disk.size(descriptor) == 2**33 and disk.pread(descriptor, 3, 2**32) == bytes(3)


# --- the store, cut at any call ----------------------------------------------------------------------------------------


class PowerCut(BaseException):
    """The machine stops here. Not an Exception: no handler of the store may outlive it."""


class Cut:
    """A disk whose power goes at the n-th call that changes something."""

    CHANGES = frozenset({"open", "write", "allocate", "truncate", "sync", "replace", "unlink", "sync_folder"})

    def __init__(self, disk: Disk, at: int) -> None:
        self._disk, self._left = disk, at

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._disk, name)
        if name not in self.CHANGES:
            return call

        def counted(*args: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                raise PowerCut
            return call(*args, **named)

        return counted


def state(round_: int) -> SharedState:
    return SharedState.make(
        theta=np.full(4, round_, np.float32), outer=None, round_=round_, lineage=sha256(bytes([round_])),
        vector=VersionVector({}), electorate=["a"], total_weight=1,
    )  # fmt: skip


class Said:
    """What one peer relied on, because the store had returned."""

    def __init__(self) -> None:
        self.updates: dict[Dot, bytes] = {}
        self.ballot = 0
        self.checkpoint = 0
        self.commits: list[bytes] = []
        self.life = 0


def live(disk: Disk, said: Said) -> None:
    """One life: check what is there, then rounds of promise, update, commit, checkpoint and compaction."""
    data = DataDir(ROOT, disk)
    journal = Journal(data.journal, disk)
    commits = CommitFile(data.commits, kept=4, disk=disk)
    checkpoints = Checkpoints(data.checkpoints, keep=2, disk=disk)
    newest = checkpoints.newest(_never)
    reached = newest.state.round if newest is not None else 0
    assert reached >= said.checkpoint
    there = {update.dot: update.signed for update in journal.updates}
    oldest = checkpoints.oldest_round()
    for dot, signed in said.updates.items():
        assert there.get(dot, signed) == signed
        assert dot in there or dot.seq <= oldest, f"{dot} is in no checkpoint and not in the journal"
    assert journal.incarnation >= said.life and journal.last_seq >= max((d.seq for d in said.updates), default=0)
    assert (
        commits.records[-len(said.commits[-4:]) :] == said.commits[-4:] or commits.records[-5:-1] == said.commits[-4:]
    )
    if said.ballot:
        known = [journal.ballot_record(round_, BASE) for round_ in (said.ballot, said.ballot + 1)]
        assert any(record is not None for record in known)
    said.updates.update(there)  # replayed, so others may have it now
    said.commits = list(commits.records)
    if not journal.incarnation:
        journal.start_incarnation(now_wall=1000.0)
    said.life = journal.incarnation
    for round_ in range(reached + 1, reached + 5):
        journal.save_ballot(BallotRecord(round_, BASE, promised=1))
        said.ballot = round_
        if journal.last_seq < round_:
            update = journal.say("me", _update(round_))
            assert update.dot not in said.updates, "a dot was issued twice"
            said.updates[update.dot] = update.signed
        commits.append(b"commit %d" % round_)
        said.commits.append(b"commit %d" % round_)
        checkpoints.save(Checkpoint(state(round_), b"", {}, {}, {}))
        said.checkpoint = round_
        oldest = checkpoints.oldest_round()
        journal.compact({u.dot for u in journal.updates if u.round > oldest})
    journal.close()
    commits.close()
    data.close()


def _never(text: str) -> None:
    raise AssertionError(text)


def _update(round_: int) -> Callable[[Dot, bytes], OwnUpdate]:
    return lambda dot, head: OwnUpdate(
        dot,
        round_,
        BASE,
        b"signed %d" % dot.seq,
        b"payload" * 9,
        sha256(head, b"next"),
        np.ones(4, np.float32),
        np.ones(4, int),
    )


def test_a_whole_life_is_cut_at_every_call_and_the_next_one_goes_on() -> None:
    at, ended = 0, False
    while not ended:
        at += 1
        disk, said, rng = MemoryDisk(), Said(), random.Random(at)
        try:
            live(Cut(disk.mount(), at), said)  # type: ignore[arg-type]
            ended = True
        except PowerCut:
            pass
        disk.crash(rng)
        live(disk.mount(), said)
    assert at > 80


@given(st.lists(st.integers(1, 120), max_size=5), st.integers(0, 2**32))
def test_the_store_recovers_from_any_crashes(cuts: list[int], seed: int) -> None:
    disk, said, rng = MemoryDisk(), Said(), random.Random(seed)
    for at in cuts:
        try:
            live(Cut(disk.mount(), at), said)  # type: ignore[arg-type]
        except PowerCut:
            pass
        disk.crash(rng)
    live(disk.mount(), said)


def test_a_disk_that_fills_or_breaks_in_between_costs_no_said_word() -> None:
    for fault in (MemoryDisk.fill, MemoryDisk.break_):
        disk, said = MemoryDisk(), Said()
        live(disk.mount(), said)
        mine = disk.mount()
        data = DataDir(ROOT, mine)
        journal = Journal(data.journal, mine)
        fault(disk)
        with pytest.raises((JournalFull, OSError)):
            for round_ in range(100_000):
                journal.say("me", _update(said.checkpoint + 1 + round_))
                said.updates[journal.updates[-1].dot] = journal.updates[-1].signed
                if round_ > 20:
                    Checkpoints(data.checkpoints, disk=mine).save(Checkpoint(state(99), b"", {}, {}, {}))
        disk.free()
        disk.break_(False)
        disk.crash(random.Random(1))
        live(disk.mount(), said)
