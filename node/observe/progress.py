"""Progress on stderr: a bar where there is a terminal, a plain line now and then where there is none.

Nothing here touches stdout, which belongs to the command's result.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

PLAIN_SECONDS = 5.0


class Bar:
    """`bar(done, total)`; total 0 means that the end is not known. Where stderr is no terminal: at most one line in
    `PLAIN_SECONDS`, so that a log shows that something moves, and little more."""

    def __init__(
        self, title: str, stream: TextIO | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._title = title
        self._stream = stream or sys.stderr
        self._monotonic = monotonic
        self._progress: Progress | None = None
        self._said_at: float | None = None
        if self._stream.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
            console = Console(file=self._stream)
            self._progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
            self._task = self._progress.add_task(title, total=None)
            self._progress.start()

    def __call__(self, done: float, total: float, text: str = "") -> None:
        if self._progress is not None:
            description = f"{self._title} {text}".strip()
            self._progress.update(self._task, completed=done, total=total or None, description=description)
            return
        now = self._monotonic()
        if self._said_at is None or now - self._said_at >= PLAIN_SECONDS:
            self._said_at = now
            share = f"{100 * done / total:.0f} %" if total else f"{done:g}"
            print(f"{self._title}: {share} {text}".rstrip(), file=self._stream, flush=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


@contextmanager
def bar(title: str) -> Iterator[Bar]:
    """A bar that ends with the block."""
    one = Bar(title)
    try:
        yield one
    finally:
        one.close()
