"""The process that runs a file of reward functions: reads calls from a pipe, writes results to another, one JSON line each.

Run by `reward_guard.py` as a script, with the file and the numbers of the two pipes as arguments. Imports nothing of
shoal, so that it starts fast. Being a process of its own, with the main thread free, it may use signals (as some answer
checkers do) and can be killed when it overruns.

A call names functions and gives what TRL gives: `prompts`, `completions`, `completion_ids`, the columns, `trainer_state`,
`log_metric` and `log_extra`. Async functions of one call run concurrently, each with the time limit of its own; a sync
function is ended from outside. Functions may fork: a child has no part in the pipes, and one that comes back from a
function ends there.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

METRICS_MAX = 64  # names that `log_metric` takes per call


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


def leave_pipes_to_the_parent(*pipes: int) -> None:
    """In every fork, put nothing in the place of the pipes: it must neither take requests nor hold up their end."""
    nothing = os.open(os.devnull, os.O_RDWR)

    def replace() -> None:
        for pipe in pipes:
            os.dup2(nothing, pipe, inheritable=False)

    for pipe in pipes:
        os.set_inheritable(pipe, False)
    os.register_at_fork(after_in_child=replace)


def main() -> None:
    """Serve until the node closes its end."""
    file, requests, answers = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    leave_pipes_to_the_parent(requests, answers)
    me = os.getpid()

    def answer(number: int, value: dict[str, Any]) -> None:
        if os.getpid() != me:
            os._exit(0)
        line = json.dumps({"id": number, **value}).encode() + b"\n"
        while line:
            line = line[os.write(answers, line) :]

    try:
        functions = load_functions(file)
    except Exception as error:
        answer(0, {"error": f"{type(error).__name__}: {error}"})
        return
    own = sorted(name for name, function in functions.items() if is_own(function))
    answer(0, {"functions": {name: is_async(function) for name, function in functions.items()}, "own": own})
    loop = asyncio.new_event_loop()  # one for all calls: clients that a file keeps open belong to a loop
    asyncio.set_event_loop(loop)
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            request = json.loads(line)
            answer(request["id"], call(functions, request, loop))


if __name__ == "__main__":
    main()
