"""What a data directory says about its run: gone on with, or refused in words when a file of it is damaged or lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.node.config import Config, RunConfig, manifest_bytes, run_id_of
from shoal.node.run import Run
from shoal.node.store.checkpoint import Checkpoint, Checkpoints
from shoal.node.store.datadir import DataDir
from shoal.node.swarm.manifest import RunInfo, make_genesis
from shoal.protocol.errors import ExitCode, ShoalError
from shoal.protocol.identity import Identity

from .store.test_store import state

CONFIG = Config(run=RunConfig(learner="quadratic"))


def randomly(size: int) -> bytes:
    return bytes(range(size))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a founder whose run has begun and who is down now."""
    data = DataDir(tmp_path / "node")
    run = Run(CONFIG, None, data, randomly)
    assert run.choose(given_run=True)
    run.genesis = make_genesis(Identity.generate(b"\1" * 32), run.id, b"\2" * 32)
    run.save()
    Checkpoints(data.checkpoints).save(Checkpoint(state(), b"", {}, {}, {}))
    data.close()
    return tmp_path / "node"


def start(folder: Path) -> Run:
    data = DataDir(folder)
    try:
        run = Run(Config(), None, data, randomly)
        assert not run.choose(given_run=False)
        return run
    finally:
        data.close()


def test_a_restart_goes_on_with_the_run_on_disk(folder: Path) -> None:
    run = start(folder)
    assert run.id == run_id_of(manifest_bytes(CONFIG.run)) and run.config.run.learner == "quadratic"
    assert run.genesis is not None and run.admission.key == randomly(32)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "noise": lambda data: bytes(b ^ 0xA5 for b in data),
    "other object": lambda data: b'{"a": 1}',
    "list": lambda data: b"[1, null]",
}


@pytest.mark.parametrize("name", ["manifest.json", "genesis", "secrets.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_left_as_it_is(folder: Path, name: str, damage: str) -> None:
    harmed = DAMAGE[damage]((folder / name).read_bytes())
    (folder / name).write_bytes(harmed)
    with pytest.raises(ShoalError) as error:
        start(folder)
    assert error.value.code == ExitCode.DISK and name in error.value.values
    assert (folder / name).read_bytes() == harmed


def test_another_runs_manifest_beside_this_ones_genesis_is_refused(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(manifest_bytes(RunConfig(learner="quadratic", seed=5)))
    with pytest.raises(ShoalError, match="damaged"):
        start(folder)


def test_no_new_run_is_founded_over_the_checkpoints_of_one_whose_manifest_is_lost(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    with pytest.raises(ShoalError, match=r"manifest\.json") as error:
        start(folder)
    assert error.value.code == ExitCode.DISK


def test_a_lost_admission_key_is_said_and_a_lost_genesis_can_be_asked_for(folder: Path) -> None:
    (folder / "genesis").unlink()
    assert start(folder).genesis is None
    (folder / "secrets.json").unlink()
    with pytest.raises(ShoalError, match="admission key"):
        start(folder)


def test_a_manifest_of_another_version_is_told_from_a_liars(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    run = Run(CONFIG, None, data, randomly)
    with pytest.raises(ShoalError, match="does not understand") as error:
        run.learned(RunInfo(b'{"key_of_tomorrow": 1}', b"", b"", None))
    assert error.value.code == ExitCode.MISMATCH
    data.close()
