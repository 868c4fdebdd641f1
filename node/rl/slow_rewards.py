"""Rewards that need a process of their own: "math" (math-verify) and "code" (runs the completion's program).

A reward file like a user's: it is loaded by `reward_worker.py`, in a main thread, because math-verify ends what takes too
long by SIGALRM, which in a thread scores 0 without a word. Imports nothing of shoal.

"code" limits what a program may use (time, memory, file size, open files, its environment, and the network where the
kernel lets it): accidents and endless loops cost nothing. It is no jail for hostile programs: it can read what the node's
user can read. Run nodes whose models write code in a container.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CODE_SECONDS = 5.0  # wall time of one test
CODE_MEMORY_MIB = 512
CODE_AT_ONCE = max(1, min(8, (os.cpu_count() or 2) // 2))
OUTPUT_BYTES_MAX = 1 << 20
PARSE_SECONDS = 3
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def math(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float | None]:
    """1 if the last mathematical expression equals the answer, else 0; None where the answer itself cannot be parsed."""
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

    rewards: list[float | None] = []
    for completion, truth in zip(completions, answer, strict=True):
        gold = parse(truth, parsing_timeout=PARSE_SECONDS) or parse(f"${truth}$", parsing_timeout=PARSE_SECONDS)
        if not gold:
            rewards.append(None)
            continue
        found = parse(_text(completion), parsing_timeout=PARSE_SECONDS)
        rewards.append(float(verify(gold, found, timeout_seconds=PARSE_SECONDS)))
    return rewards


def code(completions: list[Any], tests: list[Any], **kwargs: Any) -> list[float | None]:
    """The fraction of its tests that a program passes; None without tests.

    Args:
        tests: per completion a list of {"input": ..., "output": ...} (what the program reads and must print, compared
            without blanks at the ends of lines) or of texts of Python asserts that run after the program; or one text.
    """
    with ThreadPoolExecutor(CODE_AT_ONCE) as pool:
        return list(pool.map(_passed, map(_text, completions), tests))


def program(text: str) -> str:
    """The last fenced block of a completion, or all of it."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else text


def _passed(text: str, tests: Any) -> float | None:
    tests = [tests] if isinstance(tests, (str, dict)) else list(tests or ())
    return sum(_passes(program(text), test) for test in tests) / len(tests) if tests else None


def _passes(source: str, test: Any) -> bool:
    if isinstance(test, dict):
        status, output = run(source, str(test.get("input", "")))
        return status == 0 and _lines(output) == _lines(str(test["output"]))
    # A program that ends early must not count as one that passed: the word at the end is drawn anew for every test, and
    # comes to the process only after the asserts. (A program that looks for it in the interpreter can still find it.)
    word = os.urandom(16).hex()
    status, output = run(f"{source}\n\n{test}\n\nimport sys as _s; print(_s.stdin.readline().strip())\n", word)
    return status == 0 and output.strip().endswith(word)


def _lines(output: str) -> list[str]:
    return [line.rstrip() for line in output.strip().splitlines()]


def run(source: str, stdin: str = "", *, seconds: float = CODE_SECONDS) -> tuple[int, str]:
    """Run a Python program under limits; its exit status (negative: ended by a signal) and what it printed."""
    limits = json.dumps([int(seconds) + 1, CODE_MEMORY_MIB << 20, OUTPUT_BYTES_MAX])
    with tempfile.TemporaryDirectory(prefix="shoal-code-") as folder:
        Path(folder, "program.py").write_text(source, encoding="utf-8", errors="replace")
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _HARNESS, limits],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=(Path(folder) / "output").open("wb"),  # a file: its size has a limit, a pipe has none
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.communicate(stdin.encode(errors="replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # also what it started
            except ProcessLookupError:
                pass
            process.wait(10)
        printed = (Path(folder) / "output").read_bytes()[:OUTPUT_BYTES_MAX]
    return process.returncode, printed.decode(errors="replace")


# Runs in the program's own process: limits first, then the program in place of everything else. Without a network and in
# a process namespace of its own, so that nothing outlives it, where the kernel gives an unprivileged user these.
_HARNESS = """
import ctypes, json, os, resource, runpy, signal, sys
seconds, memory, size = json.loads(sys.argv[1])
try:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x10000000 | 0x40000000 | 0x20000000) == 0 or libc.unshare(0x40000000 | 0x20000000) == 0:
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 255)
        libc.prctl(1, signal.SIGKILL)
except (AttributeError, OSError):
    pass
for name, value in (("CPU", seconds), ("AS", memory), ("FSIZE", size), ("NOFILE", 64), ("CORE", 0)):
    limit = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    try:
        resource.setrlimit(limit, (value, value))
    except (ValueError, OSError):
        pass
sys.argv[:] = ["program.py"]
runpy.run_path("program.py", run_name="__main__")
"""
