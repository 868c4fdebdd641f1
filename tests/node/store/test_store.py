"""Data directory, checkpoints, commit file, metrics: locked, atomic, bounded, and honest about damage."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.store import checkpoint as checkpoint_module
from shoal.node.store import datadir as datadir_module
from shoal.node.store import metrics as metrics_module
from shoal.node.store.checkpoint import Checkpoint, Checkpoints, read_state_file, state_file
from shoal.node.store.commits import CommitFile
from shoal.node.store.datadir import DataDir
from shoal.node.store.disk import REAL_DISK, write_atomic
from shoal.node.store.metrics import append_metrics, read_metrics
from shoal.node.swarm.state import SharedState
from shoal.protocol.errors import ExitCode, ShoalError
from shoal.protocol.version import VersionVector, sha256


def state(round_: int = 3, d: int = 5, outer: bool = False) -> SharedState:
    return SharedState.make(
        theta=np.arange(d, dtype=np.float32) + round_,
        outer=np.ones(d, np.float32) if outer else None,
        round_=round_,
        lineage=sha256(bytes([round_])),
        vector=VersionVector({("a", 1): (round_, sha256(b"h"))}),
        electorate=["b", "a"],
        total_weight=7,
    )


def checkpoint(round_: int, **changes: Any) -> Checkpoint:
    values: dict[str, Any] = {
        "state": state(round_, outer=True),
        "commit": b"commit",
        "book": {"learned": np.arange(5), "index": b"[]"},
        "learner": {"rng": b"\0\1", "m": np.ones(5, np.float32)},
        "extra": {"x": [1, 2]},
    }
    return Checkpoint(**{**values, **changes})


def test_a_checkpoint_comes_back_to_the_bit(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    saved = checkpoint(4)
    store.save(saved)
    loaded = store.newest()
    assert loaded is not None and loaded.state.hash == saved.state.hash and loaded.commit == b"commit"
    assert loaded.state.outer is not None and loaded.state.vector == saved.state.vector
    assert loaded.learner["rng"] == b"\0\1" and np.array_equal(loaded.learner["m"], np.ones(5))
    assert loaded.book["index"] == b"[]" and loaded.extra == {"x": [1, 2]}


def test_old_checkpoints_go_and_readers_keep_what_they_opened(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=2)
    first = store.save(checkpoint(1))
    with open(first, "rb") as pinned:
        for round_ in (2, 3, 4):
            store.save(checkpoint(round_))
        assert [p.name for p in store.paths()] == ["round-0000000004.safetensors", "round-0000000003.safetensors"]
        assert len(pinned.read()) > 0


def test_a_damaged_newest_is_set_aside_and_the_one_before_is_used(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=3)
    store.save(checkpoint(1))
    newest = store.save(checkpoint(2))
    data = bytearray(newest.read_bytes())
    data[-3] ^= 1  # in theta or outer: the state hash does not fit any more
    newest.write_bytes(data)
    warnings: list[str] = []
    loaded = store.newest(warnings.append)
    assert loaded is not None and loaded.state.round == 1 and "set aside" in warnings[0]
    assert newest.with_name(newest.name + ".damaged").exists()


def test_nothing_valid_is_an_error_and_nothing_at_all_is_none(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    assert store.newest() is None
    (tmp_path / "round-0000000001.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ShoalError) as caught:
        store.newest()
    assert caught.value.code is ExitCode.DISK


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Checkpoints(tmp_path)
    store.save(checkpoint(1))

    def full(descriptor: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(REAL_DISK, "write", full)
    with pytest.raises(OSError):
        store.save(checkpoint(2))
    monkeypatch.undo()
    loaded = store.newest()
    assert loaded is not None and loaded.state.round == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_a_state_file_from_a_peer_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(state_file(state(3)))
    assert read_state_file(path, 5).hash == state(3).hash
    with pytest.raises(ValueError, match="expected finite fp32"):
        read_state_file(path, 6)
    for damage in (b"", b"\xff" * 40, state_file(state(3))[:-4]):
        path.write_bytes(damage)
        with pytest.raises(ValueError):
            read_state_file(path, 5)
    from safetensors.numpy import save

    path.write_bytes(
        save({"theta": np.zeros(5, np.float32)}, metadata={"format": checkpoint_module.FORMAT, "state": "{}"})
    )
    with pytest.raises(ValueError, match="damaged"):
        read_state_file(path, 5)
    path.write_bytes(save({"theta": np.zeros(5, np.float32)}, metadata={"format": "other"}))
    with pytest.raises(ValueError, match="not a shoal"):
        read_state_file(path, 5)


def test_the_data_directory_is_private_and_used_once(tmp_path: Path) -> None:
    first = DataDir(tmp_path / "node")
    assert (tmp_path / "node").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ShoalError) as caught:
        DataDir(tmp_path / "node")
    assert caught.value.code is ExitCode.LOCKED and str(os.getpid()) in caught.value.values
    (first.checkpoints / "x.tmp").write_text("left over")
    first.close()
    first.close()
    again = DataDir(tmp_path / "node")
    assert not list(again.checkpoints.iterdir())
    again.close()


def test_a_path_that_cannot_be_a_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ShoalError) as caught:
        DataDir(tmp_path / "file" / "node")
    assert caught.value.code is ExitCode.DISK


def test_too_little_space_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datadir_module, "FREE_BYTES_MIN", 2**62)
    with pytest.raises(ShoalError, match="Free some space"):
        DataDir(tmp_path / "node")


def test_write_atomic_replaces_or_leaves(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomic(REAL_DISK, path, b"one")
    write_atomic(REAL_DISK, path, b"two")
    assert path.read_bytes() == b"two" and path.stat().st_mode & 0o777 == 0o600


def test_commits_are_appended_cut_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "commits"
    commits = CommitFile(path, kept=4)
    for i in range(9):
        commits.append(b"commit%d" % i)
    commits.close()
    with open(path, "ab") as file:
        file.write(b"\0\0\0\7torn")
    again = CommitFile(path, kept=4)
    assert again.records == [b"commit%d" % i for i in range(5, 9)] and again.cut_bytes == 8
    again.append(b"next")
    again.replace([b"new"])
    again.append(b"newer")
    again.close()
    assert CommitFile(path).records == [b"new", b"newer"]


def test_large_commits_are_halved_by_their_bytes(tmp_path: Path) -> None:
    commits = CommitFile(tmp_path / "commits", kept=100, bytes_max=1000)
    for i in range(50):
        commits.append(bytes([i]) * 300)
        assert (tmp_path / "commits").stat().st_size <= 2000 + 312
    assert [c[0] for c in commits.records[-3:]] == [47, 48, 49] and len(commits.records) <= 7
    for i in range(3):
        commits.append(bytes([i]) * 5000)  # larger than all that is kept: the newest one is
    assert [len(c) for c in commits.records] == [5000]
    commits.close()


def test_metrics_survive_a_torn_line_and_stay_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_metrics(tmp_path) == []
    append_metrics(tmp_path, {"round": 1, "reward": 0.1})
    with open(tmp_path / metrics_module.METRICS_FILE, "ab") as file:
        file.write(b'{"round": 2, "rew')
    append_metrics(tmp_path, {"round": 2, "reward": 0.2})
    append_metrics(tmp_path, {"round": 2, "reward": 0.3})
    assert read_metrics(tmp_path) == [{"round": 1, "reward": 0.1}, {"round": 2, "reward": 0.3}]
    monkeypatch.setattr(metrics_module, "METRICS_BYTES_MAX", 60)
    append_metrics(tmp_path, {"round": 3})
    assert [r["round"] for r in read_metrics(tmp_path)] == [2, 3]


def test_equal_states_are_equal_files_in_every_process() -> None:
    """Newcomers compare chunk hashes of several peers: a writer with a random order would make honest peers disagree."""
    code = (
        "import hashlib, numpy as np\n"
        "from shoal.node.store.checkpoint import serialize\n"
        "a = {'theta': np.arange(5, dtype=np.float32), 'outer': np.ones(5, np.float32), 'n': np.arange(3)}\n"
        "print(hashlib.sha256(b''.join(serialize(a, {'x': 'y', 'format': 'z', 'state': '{}', 'w': ''}))).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in (1, 2, 3)
    }
    assert len(found) == 1


@given(
    st.dictionaries(
        st.text("abc/", min_size=1, max_size=5),
        st.tuples(
            st.sampled_from(["f4", "f8", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=5,
    )
)
def test_what_is_written_is_what_safetensors_reads(described: dict[str, tuple[str, list[int]]]) -> None:
    rng = np.random.default_rng(0)
    arrays = {name: np.asarray(rng.integers(0, 2, shape)).astype(dtype) for name, (dtype, shape) in described.items()}
    from safetensors.numpy import load

    loaded = load(b"".join(checkpoint_module.serialize(arrays, {"k": "v"})))
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype and loaded[name].shape == array.shape
        assert np.array_equal(loaded[name], array)


def test_a_dtype_that_a_checkpoint_cannot_hold_is_said() -> None:
    with pytest.raises(ValueError, match="complex128"):
        checkpoint_module.serialize({"z": np.zeros(1, complex)}, {})


def test_a_resync_to_an_earlier_round_is_what_a_restart_finds(tmp_path: Path) -> None:
    """The losers of a fork adopt a state of a lower round; their own branch's files must not win by their number."""
    store = Checkpoints(tmp_path, keep=2)
    for round_ in (8, 9, 10):
        store.save(checkpoint(round_))
    adopted = checkpoint(7)
    store.save(adopted)
    loaded = store.newest()
    assert loaded is not None and loaded.state.hash == adopted.state.hash
    assert [p.name for p in store.paths()] == ["round-0000000007.safetensors"]


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_checkpoint_cut_at_any_step_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The disk fails at the n-th call of each kind that saving makes, for every n."""
    store = Checkpoints(tmp_path)
    store.save(checkpoint(1))
    real = getattr(os, step)
    for fail_at in range(1, 30):
        calls = 0

        def failing(*args: Any, fail_at: int = fail_at) -> Any:
            nonlocal calls
            calls += 1
            if calls == fail_at:
                if step == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        monkeypatch.setattr(datadir_module.os, step, failing)
        try:
            store.save(checkpoint(2))
            saved = True
        except OSError as error:
            assert error.errno == errno.ENOSPC
            saved = False
        monkeypatch.undo()
        loaded = store.newest()
        assert loaded is not None and loaded.state.round in ({2} if saved else {1, 2})
        assert not list(tmp_path.glob("*.tmp"))
        if saved:
            return
        for path in store.paths():
            if path.name != "round-0000000001.safetensors":
                path.unlink()
    raise AssertionError("never saved")


@given(st.data())
def test_any_damage_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any byte of a checkpoint changed, or any tail cut: the one before is used, or (in padding) the same state is read."""
    folder = tmp_path_factory.mktemp("damage")
    store = Checkpoints(folder)
    store.save(checkpoint(1))
    path = store.save(checkpoint(2))
    good = path.read_bytes()
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(good) - 1))
        path.write_bytes(good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :])
    else:
        path.write_bytes(good[: data.draw(st.integers(0, len(good) - 1))])
    loaded = store.newest()
    assert loaded is not None and loaded.state.hash in (state(1, outer=True).hash, state(2, outer=True).hash)
    assert loaded.commit == b"commit" and loaded.extra == {"x": [1, 2]} and loaded.state.electorate == ("a", "b")
    assert loaded.state.total_weight == 7 and loaded.learner["rng"] == b"\0\1"
    assert np.array_equal(loaded.learner["m"], np.ones(5)) and np.array_equal(loaded.book["learned"], np.arange(5))


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["round", "lineage", "vector", "electorate", "total_weight", "hash"]), inner
            )
        ),
    )
)
def test_any_metadata_from_a_peer_ends_in_the_declared_error(
    tmp_path_factory: pytest.TempPathFactory, described: Any
) -> None:  # fmt: skip
    path = tmp_path_factory.mktemp("hostile") / "state"
    arrays = {"theta": np.zeros(5, np.float32)}
    metadata = {"format": checkpoint_module.FORMAT, "state": json.dumps(described)}
    path.write_bytes(b"".join(checkpoint_module.serialize(arrays, metadata)))
    with pytest.raises(ValueError):
        read_state_file(path, 5)


def test_deeply_nested_metadata_ends_in_the_declared_error(tmp_path: Path) -> None:
    path = tmp_path / "state"
    metadata = {"format": checkpoint_module.FORMAT, "state": "[" * 100_000}
    path.write_bytes(b"".join(checkpoint_module.serialize({"theta": np.zeros(5, np.float32)}, metadata)))
    with pytest.raises(ValueError):
        read_state_file(path, 5)


def test_reading_beside_a_running_node_renames_nothing_that_was_pruned(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    store.save(checkpoint(1))
    gone = tmp_path / "round-0000000009.safetensors"

    class Racing(Checkpoints):
        def paths(self) -> list[Path]:
            return [gone, *super().paths()]

    warnings: list[str] = []
    loaded = Racing(tmp_path).newest(warnings.append)
    assert loaded is not None and loaded.state.round == 1 and not warnings


def test_a_commit_that_could_not_be_written_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = CommitFile(tmp_path / "commits", kept=4)
    commits.append(b"one")
    real = os.pwrite

    def torn(descriptor: int, data: bytes, offset: int) -> int:
        real(descriptor, data[:5], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", torn)
    with pytest.raises(OSError):
        commits.append(b"two")
    with pytest.raises(OSError):
        commits.replace([b"three"])
    monkeypatch.undo()
    assert commits.records == [b"one"] and not list(tmp_path.glob("*.tmp"))
    commits.append(b"four")
    commits.close()
    assert CommitFile(tmp_path / "commits").records == [b"one", b"four"]


def test_a_commit_file_cut_at_any_byte_is_a_prefix_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "commits"
    commits = CommitFile(path)
    said = [b"commit one", b"commit two", b"commit three"]
    for commit in said:
        commits.append(commit)
    commits.close()
    data = path.read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        again = CommitFile(path)
        count = len(again.records)
        assert again.records == said[:count]
        again.append(b"next")
        again.close()
        last = CommitFile(path)
        assert last.records == [*said[:count], b"next"]
        last.close()


def test_a_full_disk_while_halving_does_not_fail_the_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = CommitFile(tmp_path / "commits", kept=2)

    def full(source: Any, target: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    for i in range(7):
        commits.append(b"%d" % i)
    assert len(commits.records) == 7
    monkeypatch.undo()
    commits.append(b"7")
    assert commits.records == [b"6", b"7"]
    commits.close()


def test_a_filesystem_that_cannot_lock_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(REAL_DISK, "lock", unsupported)
    with pytest.raises(ShoalError) as caught:
        DataDir(tmp_path / "node")
    assert caught.value.code is ExitCode.DISK


def test_another_process_is_named_and_its_death_frees_the_directory(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from shoal.node.store.datadir import DataDir\n"
        "d = DataDir(pathlib.Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "node")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        with pytest.raises(ShoalError) as caught:
            DataDir(tmp_path / "node")
        assert caught.value.code is ExitCode.LOCKED and str(holder.pid) in caught.value.values
    finally:
        holder.kill()
        holder.communicate(timeout=30)
    DataDir(tmp_path / "node").close()
