"""The local control socket: how `shoal status` and its siblings talk to a running daemon.

A Unix socket of mode 0600 in the data directory: whoever may read the identity may control the node, nobody else, and
nothing listens on the network. One JSON object a line each way: {"method", "params"} → {"ok"} or {"error"}.

The kernel allows a socket's path about a hundred bytes. Where the data directory's is longer, the socket lies in a
fresh private folder of the temporary directory, and a file beside the socket's place says where.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from ...protocol.errors import ExitCode, ShoalError

REQUEST_BYTES_MAX = 64 * 1024
REPLY_BYTES_MAX = 16 * 1024 * 1024
REQUEST_SECONDS = 60.0
CALLERS_MAX = 32  # at once; a local script gone wild must not fill the daemon with open sockets
PATH_BYTES_MAX = 100  # macOS has 104 bytes with the final NUL, Linux 108
FOLDER_PREFIX = "shoal-control-"

Method = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= PATH_BYTES_MAX


def _record(path: Path) -> Path:
    """The file that says where the socket is, when it is not at `path`."""
    return path.with_name(path.name + ".at")


def _find(path: Path) -> Path:
    """Where the socket of a daemon is. Raises FileNotFoundError."""
    return path if _fits(path) else Path(_record(path).read_text())


def _remove(path: Path) -> None:
    """Remove a socket, its record and its private folder, as far as they are there."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with contextlib.suppress(FileNotFoundError):
        folder = Path(_record(path).read_text()).parent
        # Only what `start` made: the record might be damaged.
        if folder.name.startswith(FOLDER_PREFIX) and folder.is_dir() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)
        _record(path).unlink()


class ControlServer:
    """Serves methods by name. What a method fails with unexpectedly goes to `failed` as well as to the caller.

    Args:
        path: where the socket belongs. Its folder is private, and locked by this process.
        methods: by name; each takes the params and returns what the caller gets.
        failed: told of every exception that is no ShoalError.
    """

    def __init__(self, path: Path, methods: Mapping[str, Method], failed: Callable[[BaseException], None]) -> None:
        self._path = path
        self._methods = methods
        self._failed = failed
        self._server: asyncio.AbstractServer | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. A socket left by a dead daemon is replaced: the data directory's lock says that it is dead."""
        _remove(self._path)
        place = self._path
        if not _fits(place):
            place = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX)) / "socket"
            _record(self._path).write_text(str(place))
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, place, limit=REQUEST_BYTES_MAX)
        finally:
            os.umask(before)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= CALLERS_MAX:
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            line = await asyncio.wait_for(reader.readuntil(b"\n"), REQUEST_SECONDS)
            writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
            await asyncio.wait_for(writer.drain(), REQUEST_SECONDS)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError, ConnectionError):
            pass  # a caller that left or sends nonsense
        except asyncio.CancelledError:
            pass  # closing; asyncio's streams would print a traceback for a handler that ends cancelled
        finally:
            self._open.discard(task)
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            method = self._methods[request["method"]]
            params = dict(request.get("params") or {})
        except (ValueError, KeyError, TypeError, RecursionError):
            known = f"got {line[:80]!r}, known methods: {', '.join(self._methods)}"
            return _error("The daemon does not know this request", known, "Is it of another version?", ExitCode.USAGE)
        try:
            return {"ok": await asyncio.wait_for(method(params), REQUEST_SECONDS)}
        except ShoalError as error:
            return _error(error.what, error.values, error.todo, error.code)
        except asyncio.TimeoutError:
            late = f"{request['method']} took longer than {REQUEST_SECONDS:.0f} s"
            return _error("The daemon is too busy to answer", late, "Try again; see its log.", ExitCode.FAILED)
        except Exception as error:
            self._failed(error)
            return _error("The daemon failed", f"{request['method']}: {error!r}", "See its log.", ExitCode.FAILED)

    async def close(self) -> None:
        """Stop listening and drop every caller but the one on whose behalf this is called."""
        if self._server is not None:
            self._server.close()
            for task in list(self._open):
                if task is not asyncio.current_task():
                    task.cancel()
            _remove(self._path)
            self._server = None


def _error(what: str, values: str, todo: str, code: ExitCode) -> dict[str, Any]:
    return {"error": {"what": what, "values": values, "todo": todo, "code": int(code)}}


def not_running(path: Path, why: str) -> ShoalError:
    """What a command says that found no daemon at `path`."""
    return ShoalError(
        "There is no running node with this data directory",
        values=f"asked {path}: {why}",
        todo="Start it with `shoal up` or `shoal join`, or name another --data-dir.",
        code=ExitCode.NOT_RUNNING,
    )


async def call(path: Path, method: str, params: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Ask the daemon whose socket belongs at `path`.

    Raises:
        ShoalError: what the daemon answered; NOT_RUNNING when there is none or it does not answer in time.
    """

    async def ask() -> dict[str, Any]:
        reader, writer = await asyncio.open_unix_connection(_find(path), limit=REPLY_BYTES_MAX)
        try:
            writer.write(json.dumps({"method": method, "params": params}).encode() + b"\n")
            return json.loads(await reader.readuntil(b"\n"))
        finally:
            writer.close()

    try:
        reply = await asyncio.wait_for(ask(), timeout_s)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        raise not_running(path, f"it ended while answering ({type(error).__name__})") from None
    except (asyncio.TimeoutError, TimeoutError):
        raise not_running(path, f"a node has it open but did not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise not_running(path, error.strerror or type(error).__name__) from None
    if "error" in reply:
        fault = reply["error"]
        raise ShoalError(fault["what"], values=fault["values"], todo=fault["todo"], code=ExitCode(fault["code"]))
    return reply["ok"]


def call_blocking(path: Path, method: str, params: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """`call` for programs without an event loop."""
    return asyncio.run(call(path, method, params, timeout_s=timeout_s))
