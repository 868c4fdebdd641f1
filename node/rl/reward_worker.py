"""The process that runs a file of reward functions: reads calls from stdin, writes results to stdout, one JSON line each.

Run as a script, with the file as its argument. Imports nothing of shoal, so that it starts fast. Being a process of its
own, with the main thread free, it may use signals (as some answer checkers do) and can be killed when it overruns.

A call names functions and gives what TRL gives: `prompts`, `completions`, `completion_ids`, the columns, `trainer_state`,
`log_metric` and `log_extra`. Async functions of one call run concurrently, each with the time limit of its own; a sync
function is ended from outside.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

METRICS_MAX = 64  # names that `log_metric` takes per call
PARENT_SECONDS = 1.0  # how often to look whether the node still lives


def load_functions(file: Path) -> dict[str, Callable[..., Any]]:
    """What can be called by name: the file's public functions, and callables it imported or made. Classes are not."""
    spec = importlib.util.spec_from_file_location("shoal_reward_file", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.parent))  # a reward file may import what lies beside it, as a script can
    spec.loader.exec_module(module)
    return {
        name: value
        for name, value in vars(module).items()
        if callable(value) and not inspect.isclass(value) and not name.startswith("_")
    }


def is_own(function: Callable[..., Any]) -> bool:
    """Whether the reward file itself defines it; the others are there but not worth showing."""
    return inspect.isfunction(function) and function.__module__ == "shoal_reward_file"


def is_async(function: Callable[..., Any]) -> bool:
    """An async function, or an object whose call is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class Log:
    """`log_metric` and `log_extra`, as reward functions get them."""

    def __init__(self) -> None:
        self.metrics: dict[str, list[float]] = {}

    def metric(self, name: str, value: float) -> None:
        """Log a number; all that one call logs under a name are averaged. What is not finite is left out."""
        number = float(value)
        if math.isfinite(number) and (name in self.metrics or len(self.metrics) < METRICS_MAX):
            self.metrics.setdefault(str(name), []).append(number)

    def extra(self, column: str, values: list[Any]) -> None:
        """TRL shows these beside the completions; there is no such table here, so they go nowhere."""


def plain(values: Any) -> list[float | None]:
    """Numbers of any kind (numpy's, torch's) as floats; None and NaN are both None, as in TRL."""
    numbers = [None if value is None else float(value) for value in values]
    return [None if value is None or math.isnan(value) else value for value in numbers]


def call(
    functions: dict[str, Callable[..., Any]], request: dict[str, Any], loop: asyncio.AbstractEventLoop
) -> dict[str, Any]:
    """Results by name, each {"values": ...} or {"error": ...}; and the metrics that were logged."""
    log = Log()
    arguments = {
        **request["arguments"],
        "trainer_state": SimpleNamespace(**request.get("state", {})),
        "log_metric": log.metric,
        "log_extra": log.extra,
    }

    async def finish(name: str) -> tuple[str, dict[str, Any]]:
        try:
            result = await asyncio.wait_for(functions[name](**arguments), request["timeout_seconds"])
            return name, {"values": plain(result)}
        except asyncio.TimeoutError:
            return name, {"timeout": True}
        except Exception as error:
            return name, {"error": f"{type(error).__name__}: {error}"}

    async def gather(names: list[str]) -> dict[str, Any]:
        return dict(await asyncio.gather(*(finish(name) for name in names)))

    names = request["functions"]
    results: dict[str, Any] = {}
    waiting = [name for name in names if is_async(functions[name])]
    for name in names:
        if name not in waiting:
            try:
                result = functions[name](**arguments)
                if inspect.isawaitable(result):
                    result = loop.run_until_complete(_await(result))
                results[name] = {"values": plain(result)}
            except Exception as error:
                results[name] = {"error": f"{type(error).__name__}: {error}"}
    if waiting:
        results |= loop.run_until_complete(gather(waiting))
    metrics = {name: math.fsum(values) / len(values) for name, values in log.metrics.items()}
    return {"results": results, "metrics": metrics}


async def _await(result: Any) -> Any:
    return await result


def end_with_the_parent(parent: int) -> None:
    """When the node is gone, however it went, so are this process and all that it started."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> None:
    """Serve until stdin closes. The group's leader, so that one signal ends what reward functions started as well."""
    threading.Thread(target=end_with_the_parent, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the user's file prints goes to stderr, not between the answers

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        functions = load_functions(Path(sys.argv[1]))
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    own = sorted(name for name, function in functions.items() if is_own(function))
    answer({"functions": {name: is_async(function) for name, function in functions.items()}, "own": own})
    loop = asyncio.new_event_loop()  # one for all calls: clients that a file keeps open belong to a loop
    asyncio.set_event_loop(loop)
    for line in sys.stdin:
        answer(call(functions, json.loads(line), loop))


if __name__ == "__main__":
    main()
