"""The node's side of a reward worker: start it, call functions in it, end what overruns.

The other side is `reward_worker.py`, behind `reward_guard.py`, which ends whatever the functions have started. The two
sides speak over pipes of their own, so that neither what a reward file prints nor what it reads from stdin is in the way.
Every request has a number and its answer repeats it; answers with another one are dropped.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...protocol.errors import ExitCode, ShoalError

START_SECONDS_MAX = 120.0  # importing the reward file; it may pull in heavy libraries
REPLY_BYTES_MAX = 64 << 20
# Async functions end themselves at the time limit; after this much longer one of them must be blocking the others.
SLACK_SECONDS = 2.0
END_SECONDS = 10.0  # for the guard to end everything
READ_BYTES = 1 << 16


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
    """The process that runs a reward file. One call at a time; ended and started anew when a call overruns."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._process: subprocess.Popen[bytes] | None = None
        self._send = self._receive = -1  # our ends of the pipes, while there is a process
        self._unread = bytearray()
        self._requests = 0
        self._is_async: dict[str, bool] = {}
        self.own: list[str] = []  # functions that the file itself defines

    def start(self) -> list[str]:
        """Start the process and return the names of what can be called.

        Raises:
            ShoalError: the file is missing or cannot be imported.
        """
        self.close()
        requests, self._send = os.pipe()
        self._receive, answers = os.pipe()
        guard, script = (str(Path(__file__).with_name(name)) for name in ("reward_guard.py", "reward_worker.py"))
        command = [sys.executable, "-I", guard, str(os.getpid()), f"{requests},{answers}"]
        command += [sys.executable, script, str(self._file.absolute()), str(requests), str(answers)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the file prints goes to stderr: this program's stdout is for results
                pass_fds=(requests, answers),
                start_new_session=True,  # Ctrl-C is the node's
            )
        finally:
            os.close(requests)
            os.close(answers)
        for ours in (self._send, self._receive):
            os.set_blocking(ours, False)
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
            self._restart()
        except ShoalError as error:  # it could be loaded before
            return Called(values={name: RuntimeError(error.values) for name in functions}, metrics={})
        waiting = [name for name in functions if self._is_async[name]]
        parts = [[name] for name in functions if name not in waiting] + ([waiting] if waiting else [])
        for part in parts:
            request = {"functions": part, "arguments": arguments, "timeout_seconds": timeout_seconds}
            limit = timeout_seconds + (SLACK_SECONDS if part is waiting else 0.0)
            try:
                self._restart()
                reply = self._exchange({**request, "state": state or {}}, limit)
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
        """End the process with all that it started, and reap it."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:  # the guard itself is stopped or stuck
                try:
                    os.killpg(self._process.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    self._process.kill()
                self._process.wait(END_SECONDS)
            self._process = None
        for descriptor in (self._send, self._receive):
            if descriptor >= 0:
                os.close(descriptor)
        self._send = self._receive = -1
        self._unread.clear()

    def _restart(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self.start()

    def _exchange(self, request: dict[str, Any] | None, timeout_seconds: float) -> dict[str, Any]:
        """Send a request (None: wait for the greeting) and return its answer; ends the process if there is none.

        Raises:
            TimeoutError: no answer in time.
            RuntimeError: the process ended, or sent something else.
        """
        deadline = time.monotonic() + timeout_seconds
        self._requests += request is not None
        number = 0 if request is None else self._requests
        unsent = b"" if request is None else json.dumps({"id": number, **request}, default=str).encode() + b"\n"
        try:
            while True:
                unsent = self._pass_on(unsent, deadline)
                while (end := self._unread.find(b"\n")) >= 0:
                    line = bytes(self._unread[:end])
                    del self._unread[: end + 1]
                    answer = json.loads(line)
                    if answer["id"] == number:
                        return answer
        except TimeoutError:
            self.close()
            raise TimeoutError(f"no answer in {timeout_seconds:g} s") from None
        except EOFError:
            raise RuntimeError(f"the reward process ended (exit status {self._status()})") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.close()
            raise RuntimeError(f"the reward process sent no answer: {type(error).__name__}: {error}") from error

    def _pass_on(self, unsent: bytes, deadline: float) -> bytes:
        """Wait for either pipe and move what it takes or gives; returns what is still to be sent."""
        poll = select.poll()
        poll.register(self._receive, select.POLLIN)
        if unsent:
            poll.register(self._send, select.POLLOUT)
        left = deadline - time.monotonic()
        ready = dict(poll.poll(1000 * left)) if left > 0 else {}
        if not ready:
            raise TimeoutError
        if self._send in ready:
            try:
                unsent = unsent[os.write(self._send, unsent) :]
            except BrokenPipeError:
                raise EOFError from None
        if self._receive in ready:
            read = os.read(self._receive, READ_BYTES)
            if not read:
                raise EOFError
            self._unread += read
            if len(self._unread) > REPLY_BYTES_MAX:
                raise ValueError(f"an answer of more than {REPLY_BYTES_MAX} bytes")
        return unsent

    def _status(self) -> int | None:
        """How a process that closed its pipes has ended."""
        assert self._process is not None
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.close()
