"""The disk's contract, once for the real one and the simulated one: the simulator is only worth what these have in common."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.store.disk import TEMPORARY, Disk, RealDisk, write_all, write_atomic
from shoal.sim.disk import MemoryDisk


class Place(NamedTuple):
    disk: Disk
    folder: Path


@pytest.fixture(params=["real", "memory", "mounted"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A disk with an empty folder on it."""
    if request.param == "real":
        return Place(RealDisk(), tmp_path)
    memory = MemoryDisk()
    disk, folder = memory.mount() if request.param == "mounted" else memory, Path("/p0")
    disk.make_folder(folder)
    return Place(disk, folder)


def test_bytes_are_read_where_they_were_written(place: Place) -> None:
    disk, path = place.disk, place.folder / "file"
    descriptor = disk.open(path)
    assert (disk.size(descriptor), disk.read(path), disk.pread(descriptor, 4, 0)) == (0, b"", b"")
    write_all(disk, descriptor, b"hello", 0)
    write_all(disk, descriptor, memoryview(b"J"), 0)
    write_all(disk, descriptor, b"!", 8)
    assert disk.read(path) == b"Jello\0\0\0!"
    assert disk.pread(descriptor, 3, 1) == b"ell" and disk.pread(descriptor, 99, 8) == b"!"
    assert disk.pread(descriptor, 5, 100) == b""
    disk.sync(descriptor)
    disk.close(descriptor)
    again = disk.open(path)
    assert again not in (0, 1, 2) and disk.size(again) == 9
    disk.close(again)


def test_files_shrink_grow_and_reserve_zeros(place: Place) -> None:
    disk, path = place.disk, place.folder / "file"
    descriptor = disk.open(path)
    write_all(disk, descriptor, b"hello", 0)
    disk.truncate(descriptor, 2)
    disk.truncate(descriptor, 4)
    assert disk.read(path) == b"he\0\0"
    disk.allocate(descriptor, 4, 3)
    assert disk.size(descriptor) == 7 and disk.read(path) == b"he" + bytes(5)
    disk.allocate(descriptor, 0, 2)  # already there
    assert disk.pread(descriptor, 9, 3) == bytes(4)
    write_all(disk, descriptor, b"x", 6)
    assert disk.read(path) == b"he\0\0\0\0x"
    disk.close(descriptor)


def test_fresh_empties_the_same_file(place: Place) -> None:
    disk, path = place.disk, place.folder / "file"
    first = disk.open(path)
    write_all(disk, first, b"hello", 0)
    second = disk.open(path, fresh=True)
    assert disk.size(first) == 0
    write_all(disk, second, b"new", 0)
    assert disk.pread(first, 9, 0) == b"new"
    disk.close(first)
    disk.close(second)


def test_names_come_sorted_and_go(place: Place) -> None:
    disk, folder = place
    assert disk.names(folder) == [] and disk.names(folder / "missing") == []
    for name in ("b", "a", "c"):
        disk.close(disk.open(folder / name))
    disk.make_folder(folder / "deep" / "er")
    disk.make_folder(folder / "deep")
    disk.close(disk.open(folder / "deep" / "x"))
    assert disk.names(folder) == ["a", "b", "c", "deep"] and disk.names(folder / "deep") == ["er", "x"]
    assert disk.exists(folder / "a") and disk.exists(folder / "deep") and not disk.exists(folder / "d")
    disk.unlink(folder / "a")
    disk.unlink(folder / "a")
    disk.sync_folder(folder)
    assert disk.names(folder) == ["b", "c", "deep"]
    assert disk.free_bytes(folder) > 0


def test_a_rename_replaces_and_open_files_live_on(place: Place) -> None:
    disk, folder = place
    old, new = disk.open(folder / "old"), disk.open(folder / "new")
    write_all(disk, old, b"old", 0)
    write_all(disk, new, b"new", 0)
    disk.replace(folder / "new", folder / "old")
    assert disk.names(folder) == ["old"] and disk.read(folder / "old") == b"new"
    assert disk.pread(old, 9, 0) == b"old"  # who has it open keeps it
    write_all(disk, new, b"newer", 0)
    assert disk.read(folder / "old") == b"newer"
    disk.unlink(folder / "old")
    assert disk.pread(new, 9, 0) == b"newer"
    disk.close(old)
    disk.close(new)


def test_what_is_not_there_is_said(place: Place) -> None:
    disk, folder = place
    for call in (
        lambda: disk.read(folder / "none"),
        lambda: disk.replace(folder / "none", folder / "other"),
        lambda: disk.open(folder / "missing" / "file"),
        lambda: disk.sync_folder(folder / "missing"),
    ):
        with pytest.raises(FileNotFoundError):
            call()
    descriptor = disk.open(folder / "file")
    disk.close(descriptor)
    for call in (
        lambda: disk.write(descriptor, b"x", 0),
        lambda: disk.sync(descriptor),
        lambda: disk.close(descriptor),
    ):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EBADF


def test_a_lock_is_one_descriptors_until_it_is_closed(place: Place) -> None:
    disk, path = place.disk, place.folder / "lock"
    first, second = disk.open(path), disk.open(path)
    disk.lock(first)
    disk.lock(first)
    with pytest.raises(BlockingIOError):
        disk.lock(second)
    disk.close(first)
    disk.lock(second)
    disk.close(second)


def test_an_atomic_replacement_leaves_nothing_behind(place: Place) -> None:
    disk, path = place.disk, place.folder / "file"
    write_atomic(disk, path, b"one")
    write_atomic(disk, path, [b"t", memoryview(b"w"), b"o"])
    assert disk.read(path) == b"two" and disk.names(place.folder) == ["file"]
    with pytest.raises(OSError):
        write_atomic(disk, place.folder / "missing" / "file", b"x")


_OPS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.sampled_from("abc"), st.booleans()),
        st.tuples(
            st.just("write"), st.integers(0, 5), st.tuples(st.integers(0, 40), st.binary(min_size=1, max_size=20))
        ),
        st.tuples(st.just("truncate"), st.integers(0, 5), st.integers(0, 50)),
        st.tuples(st.just("allocate"), st.integers(0, 5), st.tuples(st.integers(0, 30), st.integers(1, 30))),
        st.tuples(st.just("replace"), st.sampled_from("abc"), st.sampled_from("abc")),
        st.tuples(st.just("unlink"), st.sampled_from("abc"), st.none()),
        st.tuples(st.just("sync"), st.integers(0, 5), st.none()),
        st.tuples(st.just("sync_folder"), st.none(), st.none()),
        st.tuples(st.just("close"), st.integers(0, 5), st.none()),
    ),
    max_size=40,
)


def _do(disk: Disk, folder: Path, descriptors: list[int], op: tuple) -> object:
    """One call; what it gave, or the number of its error."""
    kind, one, two = op
    try:
        if kind == "open":
            descriptors.append(disk.open(folder / one, fresh=two))
        elif kind == "replace":
            disk.replace(folder / one, folder / two)
        elif kind == "unlink":
            disk.unlink(folder / one)
        elif kind == "sync_folder":
            disk.sync_folder(folder)
        elif one < len(descriptors):
            descriptor = descriptors[one]
            if kind == "write":
                write_all(disk, descriptor, two[1], two[0])
            elif kind == "truncate":
                disk.truncate(descriptor, two)
            elif kind == "allocate":
                disk.allocate(descriptor, *two)
            elif kind == "sync":
                disk.sync(descriptor)
            elif kind == "close":
                disk.close(descriptors.pop(one))
    except OSError as error:
        return error.errno
    return [
        [(name, disk.read(folder / name)) for name in disk.names(folder)],
        [(disk.size(d), disk.pread(d, 100, 0)) for d in descriptors],
    ]


@given(_OPS)
def test_any_calls_see_the_same_on_both(tmp_path_factory: pytest.TempPathFactory, ops: list[tuple]) -> None:
    real, memory = RealDisk(), MemoryDisk()
    folder = tmp_path_factory.mktemp("disk")
    memory.make_folder(folder)
    open_real: list[int] = []
    open_memory: list[int] = []
    try:
        for op in ops:
            assert _do(real, folder, open_real, op) == _do(memory, folder, open_memory, op)
    finally:
        for descriptor in open_real:
            with contextlib.suppress(OSError):
                real.close(descriptor)


def test_a_failed_replacement_leaves_the_file_and_no_temporary_one(place: Place) -> None:
    disk, path = place.disk, place.folder / "file"
    write_atomic(disk, path, b"one")

    class Torn:
        def __getattr__(self, name: str) -> object:
            return getattr(disk, name)

        def write(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
            if offset:
                raise OSError(errno.ENOSPC, "No space left on device")
            return disk.write(descriptor, memoryview(data)[:1], offset)

    with pytest.raises(OSError):
        write_atomic(Torn(), path, b"two")  # type: ignore[arg-type]
    assert disk.read(path) == b"one" and disk.names(place.folder) == ["file"]
    assert not disk.exists(path.with_name(path.name + TEMPORARY))
