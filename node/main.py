"""Entry point of the `shoal` command. Imports nothing by itself, so that Ctrl-C is quiet from the first moment on."""

from __future__ import annotations

import sys


def main() -> None:
    """Run one command and exit with its code."""
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()
