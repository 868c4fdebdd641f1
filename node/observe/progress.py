"""Progress on stderr: a bar where there is a terminal, a plain line now and then where there is none.

Nothing here touches stdout, which belongs to the command's result.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

PLAIN_SECONDS = 5.0

Update = "Callable[[float, float], None]"


class Bar:
    """`bar(done, total)`; total 0 means that the end is not known."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._progress: Progress | None = None
        self._said = 0.0
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
            self._progress = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task(title, total=None)
            self._progress.start()

    def __call__(self, done: float, total: float, text: str = "") -> None:
        if self._progress is not None:
            description = f"{self._title} {text}".strip()
            self._progress.update(self._task, completed=done, total=total or None, description=description)
            return
        now = time.monotonic()
        if now - self._said >= PLAIN_SECONDS:
            self._said = now
            share = f"{100 * done / total:.0f} %" if total else f"{done:g}"
            print(f"{self._title}: {share} {text}".rstrip(), file=sys.stderr, flush=True)

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
