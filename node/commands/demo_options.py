"""The flags of `shoal demo` as one value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """See `shoal demo --help`."""

    peers: int = 3
    rounds: int | None = None
    mode: str = "ring"
    compression: str | None = None
    seed: int = 0
    kill: bool = True
    json: bool = False
    directory: Path | None = None

    @property
    def keep(self) -> bool:
        """Whether the peers' folders stay after a run without trouble."""
        return self.directory is not None
