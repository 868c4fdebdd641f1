"""The local control socket: how `shoal status` and its siblings talk to a running daemon.

A Unix socket of mode 0600 in the data directory: whoever may read the identity may control the node, nobody else, and
nothing listens on the network. One JSON object a line each way: {"method", "params"} → {"ok"} or {"error"}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from ...protocol.errors import ExitCode, ShoalError

REQUEST_BYTES_MAX = 64 * 1024
REPLY_BYTES_MAX = 16 * 1024 * 1024
REQUEST_SECONDS = 60.0
# The kernel's limit on a Unix socket's path is 108 bytes with the final NUL.
PATH_BYTES_MAX = 100

Method = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def _short(path: Path) -> Path:
    """A socket path that fits: where `path` is too long, one in the temporary directory that `path` fixes."""
    if len(os.fsencode(path)) <= PATH_BYTES_MAX:
        return path
    import hashlib

    name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}-{name}.sock"


class ControlServer:
    """Serves methods by name; unexpected exceptions of a method are the caller's `failed`."""

    def __init__(self, path: Path, methods: Mapping[str, Method], failed: Callable[[BaseException], None]) -> None:
        self._path = _short(path)
        self._methods = methods
        self._failed = failed
        self._server: asyncio.AbstractServer | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. A socket left by a dead daemon is replaced: the data directory's lock says that it is dead."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, self._path, limit=REQUEST_BYTES_MAX)
        finally:
            os.umask(before)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            line = await asyncio.wait_for(reader.readuntil(b"\n"), REQUEST_SECONDS)
            writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
            await asyncio.wait_for(writer.drain(), REQUEST_SECONDS)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError, ConnectionError):
            pass  # a caller that left or sends nonsense
        finally:
            self._open.discard(task)
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            method = self._methods[request["method"]]
            params = dict(request.get("params") or {})
        except (ValueError, KeyError, TypeError):
            return {
                "error": {
                    "what": "unknown request",
                    "values": f"known: {', '.join(self._methods)}",
                    "todo": "",
                    "code": 2,
                }
            }
        try:
            return {"ok": await method(params)}
        except ShoalError as error:
            return {"error": {"what": error.what, "values": error.values, "todo": error.todo, "code": int(error.code)}}
        except Exception as error:
            self._failed(error)
            return {"error": {"what": "the daemon failed", "values": repr(error), "todo": "See its log.", "code": 1}}

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for task in list(self._open):
                if task is not asyncio.current_task():
                    task.cancel()
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()


def not_running(path: Path, why: str) -> ShoalError:
    return ShoalError(
        "There is no running node with this data directory",
        values=f"{path.parent}: {why}",
        todo="Start it with `shoal up` or `shoal join`, or name another --data-dir.",
        code=ExitCode.NOT_RUNNING,
    )


async def call(path: Path, method: str, params: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Ask a running daemon. Raises ShoalError: NOT_RUNNING, or what the daemon answered."""

    async def ask() -> dict[str, Any]:
        reader, writer = await asyncio.open_unix_connection(_short(path), limit=REPLY_BYTES_MAX)
        try:
            writer.write(json.dumps({"method": method, "params": params}).encode() + b"\n")
            return json.loads(await reader.readuntil(b"\n"))
        finally:
            writer.close()

    try:
        reply = await asyncio.wait_for(ask(), timeout_s)
    except (FileNotFoundError, ConnectionError) as error:
        raise not_running(path, error.strerror or type(error).__name__) from None
    except (asyncio.IncompleteReadError, asyncio.TimeoutError, ValueError) as error:
        raise not_running(path, f"it does not answer ({type(error).__name__} after {timeout_s:g} s)") from None
    if "error" in reply:
        fault = reply["error"]
        raise ShoalError(fault["what"], values=fault["values"], todo=fault["todo"], code=ExitCode(fault["code"]))
    return reply["ok"]


def call_blocking(path: Path, method: str, params: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """`call` for programs without an event loop."""
    return asyncio.run(call(path, method, params, timeout_s=timeout_s))
