"""Where results go."""

from __future__ import annotations

from pathlib import Path

from ...protocol.errors import ExitCode, ShoalError


def free_folder(folder: Path) -> None:
    """Raises ShoalError unless a result can be written there: it must be new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ShoalError(
            f"{folder} is in the way.",
            values="found an existing file or a folder that is not empty, expected a new or empty folder",
            todo="Choose another folder, or remove this one.",
            code=ExitCode.FAILED,
        )
