"""The process that runs a user's reward file: reads calls from stdin, writes results to stdout, one JSON line each.

Run as a script, with the file as its argument. Imports nothing of shoal, so that it starts fast. Being a process of its
own, with the main thread free, it may use signals (as some answer checkers do) and can be killed when it overruns.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_functions(file: Path) -> dict[str, Callable[..., Any]]:
    """The public functions that a file defines (not those it imports), by name."""
    spec = importlib.util.spec_from_file_location("shoal_reward_file", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == spec.name and not name.startswith("_")
    }


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> list[Any]:
    """Call a sync or async reward function; its numbers become plain floats."""
    result = function(**arguments)
    if inspect.isawaitable(result):

        async def finish() -> Any:
            return await result

        result = asyncio.run(finish())
    return [None if value is None else float(value) for value in result]


def main() -> None:
    """Serve until stdin closes."""
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
    answer({"functions": sorted(functions)})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer({"values": call(functions[request["function"]], request["arguments"])})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
