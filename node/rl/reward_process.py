"""The node's side of a reward worker: start it, call functions in it, end what overruns. The other is `reward_worker.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...protocol.errors import ExitCode, ShoalError

START_SECONDS_MAX = 120.0  # importing the reward file; it may pull in heavy libraries
REPLY_BYTES_MAX = 64 << 20
# Async functions end themselves at the time limit; after this much longer one of them must be blocking the others.
SLACK_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Called:
    """What one call gave.

    Attributes:
        values: per function its list of numbers and None, or the error that it ended with.
        metrics: what the functions logged, averaged by name.
    """

    values: dict[str, list[float | None] | Exception]
    metrics: dict[str, float]


class RewardWorker:
    """The process that runs a reward file. One call at a time; killed and started anew when a call overruns."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._process: subprocess.Popen[bytes] | None = None
        self._is_async: dict[str, bool] = {}
        self.own: list[str] = []  # functions that the file itself defines

    def start(self) -> list[str]:
        """Start the process and return the names of what can be called.

        Raises:
            ShoalError: the file is missing or cannot be imported.
        """
        script = Path(__file__).with_name("reward_worker.py")
        command = [sys.executable, str(script), str(self._file.absolute())]
        # A session of its own: killing the group also ends what reward functions started, and Ctrl-C is the node's.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        try:
            hello = self._exchange(None, START_SECONDS_MAX)
            if "error" in hello:
                raise RuntimeError(hello["error"])
        except (RuntimeError, TimeoutError) as error:
            self.close()
            raise ShoalError(
                f"The reward file {self._file} cannot be loaded.",
                values=f"{error}",
                todo="Correct the file; it must be importable with this Python.",
                code=ExitCode.CONFIG,
            ) from error
        self._is_async, self.own = hello["functions"], hello["own"]
        return sorted(self._is_async)

    def call(
        self,
        functions: Sequence[str],
        arguments: dict[str, Any],
        *,
        timeout_seconds: float,
        state: dict[str, Any] | None = None,
    ) -> Called:
        """Call functions with the same arguments: sync ones one after the other, async ones together.

        Args:
            timeout_seconds: for each function; one that overruns is ended and has a TimeoutError for its values.
            state: attributes of `trainer_state`.
        """
        values: dict[str, list[float | None] | Exception] = {}
        metrics: dict[str, float] = {}
        try:
            if self._process is None or self._process.poll() is not None:
                self.start()
        except ShoalError as error:  # it could be loaded before
            return Called(values={name: RuntimeError(error.values) for name in functions}, metrics={})
        waiting = [name for name in functions if self._is_async[name]]
        parts = [[name] for name in functions if name not in waiting] + ([waiting] if waiting else [])
        for part in parts:
            request = {"functions": part, "arguments": arguments, "timeout_seconds": timeout_seconds}
            limit = timeout_seconds + (SLACK_SECONDS if part is waiting else 0.0)
            try:
                if self._process is None or self._process.poll() is not None:
                    self.start()
                line = json.dumps({**request, "state": state or {}}, default=str).encode() + b"\n"
                reply = self._exchange(line, limit)
            except (RuntimeError, TimeoutError, ShoalError) as error:
                values |= {name: error for name in part}
                continue
            metrics |= reply["metrics"]
            for name, result in reply["results"].items():
                if "timeout" in result:
                    values[name] = TimeoutError(f"no answer in {timeout_seconds:g} s")
                else:
                    values[name] = RuntimeError(result["error"]) if "error" in result else result["values"]
        return Called(values=values, metrics=metrics)

    def close(self) -> None:
        """Kill the process with all that it started, and reap it."""
        if self._process is not None:
            self._kill()
            self._process.wait(timeout=10)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except OSError:
                        pass  # unsent bytes for a process that is gone
            self._process = None

    def _kill(self) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._process.kill()  # not yet, or no longer, the leader of a group

    def _exchange(self, request: bytes | None, timeout_seconds: float) -> dict[str, Any]:
        """Send a line, read a line, in a thread: killing the process is what ends a blocked read or write."""
        process, lines, errors = self._process, [], []
        assert process is not None and process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def run() -> None:
            try:
                if request is not None:
                    stdin.write(request)
                    stdin.flush()
                lines.append(stdout.readline(REPLY_BYTES_MAX))
            except (OSError, ValueError) as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="reward-worker", daemon=True)
        thread.start()
        thread.join(timeout_seconds)
        if thread.is_alive():
            self._kill()
            thread.join(10)
            self.close()
            raise TimeoutError(f"no answer in {timeout_seconds:g} s")
        if errors or not lines[0].endswith(b"\n"):
            self._kill()
            code = process.wait(timeout=10)
            self.close()
            raise RuntimeError(f"the reward process ended (exit status {code})" if not errors else str(errors[0]))
        return json.loads(lines[0])
