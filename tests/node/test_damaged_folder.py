"""Whatever has become of one file of the data directory, a start says so or does without it: nothing is silently believed.

A real node on a real disk, on its own, that leaves as soon as it is ready.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.node.config import Config, NodeConfig, RunConfig
from shoal.node.host import real_host
from shoal.node.node import Node
from shoal.node.observe.logs import Say
from shoal.node.store.disk import RealDisk
from shoal.protocol.errors import ExitCode, ShoalError
from shoal.protocol.identity import Identity
from shoal.protocol.transport import Connection, DialError, Gate, Handler

RUN = RunConfig.model_validate({"learner": "quadratic", "quadratic": {"dimension": 8}, "sync": {"target_samples": 8}})
OLDER, NEWEST = "older checkpoint", "newest checkpoint"
# What a node has on disk while it is down.
FILES = [
    OLDER, NEWEST, "commits", "genesis", "identity", "journal/journal", "lock", "log.jsonl", "manifest.json",
    "metrics.jsonl", "peers.json", "recording", "secrets.json",
]  # fmt: skip
# Nothing is lost with these, as long as they can be written: what was in them is for people, or read only in need.
SILENT = {
    OLDER: {"empty", "truncated", "random", "folder", "unreadable"},
    "lock": {"empty", "truncated", "random"},
    "log.jsonl": {"empty", "truncated", "random"},
    "metrics.jsonl": {"empty", "truncated", "random"},
    "recording": {"empty"},
}
# Without these a node would be another one, or in another run: it must not start.
NEEDED = {"genesis", "identity", "manifest.json", "secrets.json"}


class Denying(RealDisk):
    """One path may not be touched, as if it were another user's: root, who may run the tests, is never denied anything."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def _check(self, path: Path) -> None:
        if path == self._path:
            raise PermissionError(13, os.strerror(13), str(path))

    def open(self, path: Path, *, fresh: bool = False) -> int:
        self._check(path)
        return super().open(path, fresh=fresh)

    def read(self, path: Path) -> bytes:
        self._check(path)
        return super().read(path)

    def names(self, folder: Path) -> list[str]:
        self._check(folder)
        return super().names(folder)


class NoNetwork:
    """A transport without anybody: gRPC's event loops are process-wide, and every start here has a loop of its own."""

    binding = bytes(32)
    sent_bytes = received_bytes = 0

    def __init__(self, identity: Identity) -> None: ...

    async def listen(self, host: str, port: int, gate: Gate, handler: Handler) -> int:
        return port or 20_000

    async def dial(self, address: str, peer_id: str, *, timeout_s: float) -> Connection:
        raise DialError("unreachable", f"{address}: No route to host")

    async def close(self) -> None: ...


class Told:
    """What one start came to: an error, or what was said above info before the node was ready and left."""

    def __init__(self) -> None:
        self.error: ShoalError | None = None
        self.said = ""

    def say(self, event: str, *, level: str = "info", **values: Any) -> None:
        if level in ("warning", "error"):
            self.said += f"{event} {values}\n"


def start(folder: Path, *, rounds: int = 0, unreadable: Path | None = None) -> Told:
    """One life: until ready, or for so many rounds more."""
    told = Told()
    config = Config(
        run=RUN,
        node=NodeConfig(
            data_dir=str(folder), listen="127.0.0.1", port=0, lan_discovery=False, wait_for_start=not rounds,
            log_level="warning", record_bytes_max=2**20,
        ),
    )  # fmt: skip

    async def live() -> int:
        real = real_host()

        def logs(*arguments: Any) -> Say:
            real.logs(*arguments)("the log begins", level="info")
            return told.say

        disk = Denying(unreadable) if unreadable else real.disk
        host = dataclasses.replace(real, logs=logs, disk=disk, transport=NoNetwork)

        async def ready(node: Node) -> None:
            assert node.rounds is not None
            leaving = asyncio.ensure_future(leave(node, node.rounds.state.round + rounds))
            node.closers.append(leaving.cancel)

        async def leave(node: Node, round_: int) -> None:
            while node.rounds is None or node.rounds.state.round < round_:
                await asyncio.sleep(0.01)  # poll interval; a node that ends by itself ends this, too
            node.leave()

        return await Node(config, None, host, on_ready=ready).run()

    try:
        assert asyncio.run(live()) == ExitCode.OK
    except ShoalError as error:
        told.error = error
    return told


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a node that has lived three rounds."""
    folder = tmp_path_factory.mktemp("lived") / "node"
    assert start(folder, rounds=3).error is None
    assert start(folder).error is None
    return folder


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def truncated(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data.rstrip(b"\0")) * 2 // 3])


def random_bytes(path: Path) -> None:
    path.write_bytes(bytes((i * 2654435761 >> 7) & 0xFF for i in range(max(64, path.stat().st_size))))


def a_folder(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": emptied,
    "truncated": truncated,
    "random": random_bytes,
    "folder": a_folder,
}


def named(folder: Path, name: str) -> Path:
    checkpoints = sorted((folder / "checkpoints").iterdir())
    return {OLDER: checkpoints[0], NEWEST: checkpoints[-1]}.get(name, folder / name)


def test_the_list_above_is_all_that_a_node_keeps(lived: Path) -> None:
    assert {named(lived, name) for name in FILES} == {path for path in lived.rglob("*") if path.is_file()}


@pytest.mark.parametrize("how", [*DAMAGE, "unreadable"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_said_or_done_without(
    lived: Path, tmp_path: Path, name: str, how: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "node"
    shutil.copytree(lived, folder)
    path = named(folder, name)
    if how in DAMAGE:
        DAMAGE[how](path)
    elif name in ("identity", "log.jsonl", "metrics.jsonl"):
        monkeypatch.setattr(os, "open", denying(os.open, path))
    before = path.read_bytes() if path.is_file() else None
    # Metrics are first touched by a round.
    told = start(folder, rounds=int(name == "metrics.jsonl"), unreadable=path if how == "unreadable" else None)
    said = told.said + capfd.readouterr().err
    if name in NEEDED:
        assert told.error is not None
    if told.error is not None:
        assert told.error.code in (ExitCode.DISK, ExitCode.CONFIG) and str(path) in told.error.values
        assert before is None or path.read_bytes() == before, "what a person may want to mend is left alone"
    elif how in SILENT.get(name, ()):
        assert not said
    else:
        assert path.name in said
    if told.error is None:
        assert start(folder).error is None, "what was mended once stays so"


def denying(real: Callable[..., int], path: Path) -> Callable[..., int]:
    def opened(file: Any, *arguments: Any, **options: Any) -> int:
        if Path(file) == path:
            raise PermissionError(13, os.strerror(13), str(path))
        return real(file, *arguments, **options)

    return opened
