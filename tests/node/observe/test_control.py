"""The control socket: private, bounded, and with an answer for everything."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path

import pytest

from shoal.node.observe import control
from shoal.node.observe.control import ControlServer, call
from shoal.protocol.errors import ExitCode, ShoalError


async def echo(params):
    return {"params": params}


async def refuse(params):
    raise ShoalError("No", values="1, expected 2", todo="Do.", code=ExitCode.REFUSED)


async def break_(params):
    raise ZeroDivisionError("boom")


def serving(path: Path, story, failed=lambda error: None, **methods):
    """Run `story()` beside a server."""

    async def run():
        server = ControlServer(path, {"echo": echo, "refuse": refuse, "break": break_, **methods}, failed)
        await server.start()
        try:
            return await asyncio.wait_for(story(), 20)
        finally:
            await server.close()

    return asyncio.run(run())


async def raw(path: Path, line: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(line)
    try:
        return await reader.readline()
    finally:
        writer.close()


def test_a_call_and_its_answer(tmp_path):
    path = tmp_path / "control.sock"
    assert serving(path, lambda: call(path, "echo", {"a": 1}, timeout_s=5)) == {"params": {"a": 1}}
    assert not path.exists()


def test_the_socket_is_private(tmp_path):
    path = tmp_path / "control.sock"

    async def story():
        return stat.S_IMODE(path.stat().st_mode)

    assert serving(path, story) == 0o600


def test_errors_keep_their_three_parts_and_code(tmp_path):
    path = tmp_path / "control.sock"
    with pytest.raises(ShoalError) as caught:
        serving(path, lambda: call(path, "refuse", {}, timeout_s=5))
    error = caught.value
    assert (error.what, error.values, error.todo, error.code) == ("No", "1, expected 2", "Do.", ExitCode.REFUSED)


def test_an_unexpected_failure_is_told_to_both_sides(tmp_path):
    path, seen = tmp_path / "control.sock", []
    with pytest.raises(ShoalError, match="boom"):
        serving(path, lambda: call(path, "break", {}, timeout_s=5), seen.append)
    assert isinstance(seen[0], ZeroDivisionError)


NONSENSE = [b"\n", b"{}\n", b"[1]\n", b'{"method": 1}\n', b'{"method": "echo", "params": 3}\n', b"[" * 9000 + b"\n"]


@pytest.mark.parametrize("line", NONSENSE)
def test_nonsense_is_answered_with_an_error(tmp_path, line):
    path = tmp_path / "control.sock"
    answer = json.loads(serving(path, lambda: raw(path, line)))
    assert answer["error"]["code"] == ExitCode.USAGE and "echo" in answer["error"]["values"]


def test_an_oversized_request_is_dropped(tmp_path):
    path = tmp_path / "control.sock"

    async def story():
        try:
            dropped = await raw(path, b"x" * (2 * control.REQUEST_BYTES_MAX) + b"\n")
        except ConnectionError:
            dropped = b""
        return dropped, await call(path, "echo", {}, timeout_s=5)

    assert serving(path, story) == (b"", {"params": {}})


def test_callers_over_the_limit_are_turned_away(tmp_path, monkeypatch):
    path = tmp_path / "control.sock"
    monkeypatch.setattr(control, "CALLERS_MAX", 2)
    started, release = asyncio.Event(), asyncio.Event()

    async def wait(params):
        started.set()
        await release.wait()
        return {}

    async def story():
        held = [asyncio.ensure_future(call(path, "wait", {}, timeout_s=15)) for _ in range(2)]
        await started.wait()
        await asyncio.sleep(0)
        with pytest.raises(ShoalError):
            while True:  # until both calls above hold their places
                await call(path, "echo", {}, timeout_s=5)
        release.set()
        return await asyncio.gather(*held)

    assert serving(path, story, wait=wait) == [{}, {}]


def test_a_method_that_never_ends_has_a_deadline(tmp_path, monkeypatch):
    path = tmp_path / "control.sock"
    monkeypatch.setattr(control, "REQUEST_SECONDS", 0.2)

    async def forever(params):
        await asyncio.Event().wait()

    with pytest.raises(ShoalError, match="too busy") as caught:
        serving(path, lambda: call(path, "forever", {}, timeout_s=15), forever=forever)
    assert caught.value.code == ExitCode.FAILED


def test_no_daemon(tmp_path):
    with pytest.raises(ShoalError, match="no running node") as caught:
        asyncio.run(call(tmp_path / "control.sock", "status", {}, timeout_s=5))
    assert caught.value.code == ExitCode.NOT_RUNNING


def test_a_socket_left_by_a_killed_daemon(tmp_path):
    path = tmp_path / "control.sock"

    async def die():
        server = await asyncio.start_unix_server(lambda r, w: None, path)
        server.close()

    asyncio.run(die())
    if not path.exists():  # newer Pythons remove it on close
        import socket

        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    with pytest.raises(ShoalError) as caught:
        asyncio.run(call(path, "echo", {}, timeout_s=5))
    assert caught.value.code == ExitCode.NOT_RUNNING
    assert serving(path, lambda: call(path, "echo", {}, timeout_s=5)) == {"params": {}}


def test_a_daemon_that_is_silent_is_said_to_be(tmp_path):
    path = tmp_path / "control.sock"

    async def story():
        server = await asyncio.start_unix_server(lambda r, w: None, path)
        try:
            await call(path, "echo", {}, timeout_s=0.2)
        finally:
            server.close()

    with pytest.raises(ShoalError, match="did not answer within 0.2 s"):
        asyncio.run(story())


def test_a_data_directory_with_a_long_path(tmp_path):
    folder = tmp_path / ("x" * 150)
    folder.mkdir()
    path = folder / "control.sock"
    places = []

    async def story():
        place = Path((folder / "control.sock.at").read_text())
        places.append(place)
        modes = stat.S_IMODE(place.parent.stat().st_mode), stat.S_IMODE(place.stat().st_mode)
        return modes, await call(path, "echo", {}, timeout_s=5)

    assert serving(path, story) == ((0o700, 0o600), {"params": {}})
    assert not places[0].parent.exists() and os.listdir(folder) == []


def test_the_folder_of_a_killed_daemon_is_swept_away_and_no_other(tmp_path):
    folder = tmp_path / ("x" * 150)
    folder.mkdir()
    precious = tmp_path / "precious"
    precious.mkdir()
    (folder / "control.sock.at").write_text(str(precious / "socket"))
    path = folder / "control.sock"
    assert serving(path, lambda: call(path, "echo", {}, timeout_s=5)) == {"params": {}}
    assert precious.exists()


def test_closing_under_a_waiting_caller_prints_no_traceback(tmp_path):
    path, told = tmp_path / "control.sock", []

    async def story():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        server = ControlServer(path, {"echo": echo}, told.append)
        await server.start()
        reader, writer = await asyncio.open_unix_connection(path)
        while not server._open:
            await asyncio.sleep(0)
        await server.close()
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()

    asyncio.run(story())
    assert told == []
