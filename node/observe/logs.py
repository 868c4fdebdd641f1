"""Structured logs: JSON lines in a file of bounded size, readable lines on stderr. structlog does the work.

Every event is a short phrase with values, never a sentence with values inside: `log("round committed", round=7)`.
"""

from __future__ import annotations

import logging
import logging.handlers
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

LOG_FILE = "log.jsonl"
LOG_BYTES_MAX = 8 * 1024 * 1024
LOG_FILES_KEPT = 3

Say = Callable[..., None]


def set_up_logs(data_dir: Path, level: str, peer: str) -> Say:
    """Returns `say(event, level="info", **values)`. stderr shows `level` and above, the file info (or debug) and above."""
    shared: list[Any] = [
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.add_log_level,
        structlog.processors.format_exc_info,
    ]

    def formatter(renderer: Any) -> structlog.stdlib.ProcessorFormatter:
        return structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )

    file = logging.handlers.RotatingFileHandler(
        data_dir / LOG_FILE, maxBytes=LOG_BYTES_MAX, backupCount=LOG_FILES_KEPT, delay=True
    )
    file.setFormatter(formatter(structlog.processors.JSONRenderer()))
    file.setLevel(logging.DEBUG if level == "debug" else logging.INFO)
    # A full disk must not stop the node, nor fill stderr with tracebacks of the logger.
    file.handleError = lambda record: None  # type: ignore[method-assign]
    screen = logging.StreamHandler(sys.stderr)
    screen.setFormatter(formatter(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=28)))
    screen.setLevel(level.upper())
    root = logging.getLogger("shoal")
    root.handlers[:] = [file, screen]
    root.setLevel(logging.DEBUG)
    root.propagate = False
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    log = structlog.get_logger("shoal").bind(peer=peer[-6:])

    def say(event: str, *, level: str = "info", **values: Any) -> None:
        getattr(log, level)(event, **values)

    return say
