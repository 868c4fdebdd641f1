"""Scores completions: the task's own score, exact match, format, and functions of the user's reward file.

A reward file has TRL-style functions, `def f(prompts, completions, **kwargs) -> list[float | None]`, sync or async;
data set columns and `completion_ids` arrive as keyword arguments, and a conversational prompt makes conversational
completions. The file runs in a worker process of its own (`reward_worker.py`), with a time limit that really ends it.
A function that raises, overruns or returns nonsense is counted by name and taken as "does not apply"; it never stops
training. `None` means "does not apply".
"""

from __future__ import annotations

import json
import logging
import math
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...protocol.errors import ExitCode, ShoalError
from .config import RewardsConfig
from .tasks import Example, Task, extract_answer

BUILT_IN = ("task", "exact", "format")
START_SECONDS_MAX = 120.0  # importing the reward file; it may pull in heavy libraries
REPLY_BYTES_MAX = 64 << 20

log = logging.getLogger(__name__)
_ONE_ANSWER = re.compile(r"\s*(?:<think>.*?</think>\s*)?<answer>(?:(?!</?answer>).)+</answer>\s*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Rewards of one batch.

    Attributes:
        total: weighted sum per completion; None where no function applies.
        means: mean per function over the completions it applies to.
        failures: why a function gave nothing for this batch, by name.
    """

    total: list[float | None]
    means: dict[str, float]
    failures: dict[str, str] = field(default_factory=dict)


class Rewards:
    """The run's reward functions with their weights. Close it to end the worker process.

    Attributes:
        failures: batches for which a function failed since the start, by name.
        last_failure: the latest reason, by name.
    """

    def __init__(self, config: RewardsConfig, task: Task, file: Path | None = None) -> None:
        """
        Args:
            config: names and weights (the same on all peers).
            task: gives "task" its score.
            file: this node's reward file; needed for names that are not built in.

        Raises:
            ShoalError: a function is in neither place, or the file cannot be loaded.
        """
        self._config = config
        self._task = task
        self._weights = config.weights or [1.0] * len(config.functions)
        self.failures = dict.fromkeys(config.functions, 0)
        self.last_failure: dict[str, str] = {}
        own = [name for name in config.functions if name not in BUILT_IN]
        self._worker: RewardWorker | None = None
        if own and file is None:
            raise ShoalError(
                "The run uses reward functions that are not built in.",
                values=f"found {own}, built in are {list(BUILT_IN)}, and this node has no reward file",
                todo="Give the file that defines them (node.rewards_file), or use built-in names.",
                code=ExitCode.CONFIG,
            )
        if own and file is not None:
            self._worker = RewardWorker(file)
            known = self._worker.start()
            missing = [name for name in own if name not in known]
            if missing:
                self._worker.close()
                raise ShoalError(
                    f"The reward file {file} lacks functions that the run uses.",
                    values=f"missing {missing}, found {sorted(known)}",
                    todo="Define them there, each as f(prompts, completions, **kwargs) -> list of numbers or None.",
                    code=ExitCode.CONFIG,
                )

    def score(
        self,
        examples: Sequence[Example],
        prompts: Sequence[Any],
        completions: Sequence[Any],
        texts: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
    ) -> Scored:
        """Score one batch; all arguments have one entry per completion.

        Args:
            examples: where the prompt came from.
            prompts: texts or conversations, as the reward functions see them.
            completions: the same for completions.
            texts: completions as plain text.
            completion_ids: their token ids.
        """
        values: dict[str, list[float | None]] = {}
        failed: dict[str, str] = {}
        for name in self._config.functions:
            try:
                if name in BUILT_IN:
                    raw: Any = [self._built_in(name, t, e) for t, e in zip(texts, examples, strict=True)]
                else:
                    assert self._worker is not None
                    arguments = {
                        "prompts": list(prompts),
                        "completions": list(completions),
                        "completion_ids": list(completion_ids),
                        **_columns(examples),
                    }
                    raw = self._worker.call(name, arguments, timeout_seconds=self._config.timeout_seconds)
                values[name] = _checked(raw, len(texts))
            except Exception as error:  # a reward is the user's code or a task's parser: anything may come out of it
                failed[name] = f"{type(error).__name__}: {error}"
                self.failures[name] += 1
                self.last_failure[name] = failed[name]
                if self.failures[name].bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... time
                    log.warning("reward %r failed (%d times so far): %s", name, self.failures[name], failed[name])
                values[name] = [None] * len(texts)
        return Scored(
            total=[self._combine([values[f][i] for f in self._config.functions]) for i in range(len(texts))],
            means={name: _mean(column) for name, column in values.items()},
            failures=failed,
        )

    def close(self) -> None:
        """End the worker process, if there is one."""
        if self._worker is not None:
            self._worker.close()

    def _built_in(self, name: str, text: str, example: Example) -> float:
        if name == "task":
            return self._task.score(text, example)
        if name == "exact":
            return float(extract_answer(text, self._task.config.extract) == example.answer.strip())
        return float(_ONE_ANSWER.fullmatch(text) is not None)

    def _combine(self, row: list[float | None]) -> float | None:
        known = [w * v for w, v in zip(self._weights, row, strict=True) if v is not None]
        return math.fsum(known) if known else None


class RewardWorker:
    """The process that runs a reward file. One call at a time; killed and started anew when a call overruns."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> list[str]:
        """Start the process and return the names of the file's functions.

        Raises:
            ShoalError: the file is missing or cannot be imported.
        """
        script = Path(__file__).with_name("reward_worker.py")
        command = [sys.executable, str(script), str(self._file)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
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
        return hello["functions"]

    def call(self, function: str, arguments: dict[str, Any], *, timeout_seconds: float) -> Any:
        """The function's return value.

        Raises:
            RuntimeError: it raised, or the process died.
            TimeoutError: it overran; the process is killed.
        """
        if self._process is None or self._process.poll() is not None:
            self.start()
        request = json.dumps({"function": function, "arguments": arguments}, default=str).encode() + b"\n"
        reply = self._exchange(request, timeout_seconds)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["values"]

    def close(self) -> None:
        """Kill the process and reap it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except OSError:
                        pass  # unsent bytes for a process that is gone
            self._process = None

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
            process.kill()
            thread.join(10)
            self.close()
            raise TimeoutError(f"no answer in {timeout_seconds:g} s")
        if errors or not lines[0].endswith(b"\n"):
            code = process.poll()
            self.close()
            raise RuntimeError(f"the reward process ended (exit status {code})" if not errors else str(errors[0]))
        return json.loads(lines[0])


def _columns(examples: Sequence[Example]) -> dict[str, list[Any]]:
    names = {"answer": None} | {k: None for e in examples for k in e.columns}
    return {k: [e.answer if k == "answer" else e.columns.get(k) for e in examples] for k in names}


def _checked(raw: Any, n: int) -> list[float | None]:
    if not isinstance(raw, list) or len(raw) != n:
        found = f"{len(raw)} values" if isinstance(raw, list) else f"a {type(raw).__name__}"
        raise ValueError(f"returned {found} for {n} completions")
    for value in raw:
        if value is not None and (isinstance(value, str) or not math.isfinite(float(value))):
            raise ValueError(f"returned {value!r} where a finite number or None is expected")
    return [None if value is None else float(value) for value in raw]


def _mean(column: list[float | None]) -> float:
    known = [v for v in column if v is not None]
    return math.fsum(known) / len(known) if known else math.nan
