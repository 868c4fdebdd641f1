"""Data directory, checkpoints, commit file, metrics: locked, atomic, bounded, and honest about damage."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.node.store import checkpoint as checkpoint_module
from shoal.node.store import datadir as datadir_module
from shoal.node.store import metrics as metrics_module
from shoal.node.store.checkpoint import Checkpoint, Checkpoints, read_state_file, state_file
from shoal.node.store.commits import CommitFile
from shoal.node.store.datadir import DataDir, write_atomic
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

    def full(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(datadir_module.os, "write", full)
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
    write_atomic(path, b"one")
    write_atomic(path, b"two")
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
    assert again.records == [b"commit%d" % i for i in range(5, 9)]
    again.append(b"next")
    again.replace([b"new"])
    again.append(b"newer")
    again.close()
    assert CommitFile(path).records == [b"new", b"newer"]


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
