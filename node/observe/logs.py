"""Structured logs: JSON lines in a file of bounded size, readable lines on stderr. structlog does the work.

Every event is a short phrase with values, never a sentence with values inside: `say("round committed", round=7)`.
Bounded in every direction: the file by rotation, each value by length, whatever a peer put into it.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import structlog

LOG_FILE = "log.jsonl"
LOG_BYTES_MAX = 8 * 1024 * 1024
LOG_FILES_KEPT = 3
VALUE_CHARS_MAX = 2000  # a traceback fits; a peer's endless reason does not

Say = Callable[..., None]


def _bounded(logger: Any, name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Cut long values, and let no control character reach a terminal: they may come from a peer."""
    for key, value in event.items():
        if isinstance(value, str):
            cut = value if len(value) <= VALUE_CHARS_MAX else value[:VALUE_CHARS_MAX] + "…"
            event[key] = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in cut)
    return event


class _PrivateFile(logging.handlers.RotatingFileHandler):
    """Mode 0600: invites are in it."""

    def _open(self) -> Any:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return os.fdopen(descriptor, self.mode, encoding="utf-8", errors="backslashreplace")


def set_up_logs(data_dir: Path, level: str, peer: str) -> Say:
    """Returns `say(event, level="info", **values)`.

    stderr shows `level` and above, the file info (or debug) and above. Every line carries the end of `peer`.
    """
    shared: list[Any] = [
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.add_log_level,
        structlog.processors.format_exc_info,
        _bounded,
    ]

    def formatter(renderer: Any) -> structlog.stdlib.ProcessorFormatter:
        return structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )

    file = _PrivateFile(data_dir / LOG_FILE, maxBytes=LOG_BYTES_MAX, backupCount=LOG_FILES_KEPT, delay=True)
    file.setFormatter(formatter(structlog.processors.JSONRenderer()))
    file.setLevel(logging.DEBUG if level == "debug" else logging.INFO)
    # A full disk must not stop the node, nor fill stderr with tracebacks of the logger.
    file.handleError = lambda record: None  # type: ignore[method-assign]
    screen = logging.StreamHandler(sys.stderr)
    screen.setFormatter(formatter(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())))
    screen.setLevel(level.upper())
    root = logging.getLogger("shoal")
    for old in root.handlers:
        old.close()
    root.handlers[:] = [file, screen]
    root.setLevel(logging.DEBUG)
    root.propagate = False
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # a second set-up in one process (tests) must take effect
    )
    log = structlog.get_logger("shoal").bind(peer=peer[-6:])

    def say(event: str, *, level: str = "info", **values: Any) -> None:
        getattr(log, level)(event, **values)

    try:
        os.close(os.open(data_dir / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    except OSError as error:
        say("the log is on stderr only", level="warning", path=str(data_dir / LOG_FILE), cause=error.strerror)
    return say
