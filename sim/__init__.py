"""The network in one process: virtual time, links and faults around the real node code.

    from shoal.sim import Link, Simulation

The names are loaded when they are asked for: importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .link import Link
    from .report import Report
    from .simulation import Simulation

__all__ = ["Link", "Report", "Simulation"]
_HOME = {"Link": ".link", "Report": ".report", "Simulation": ".simulation"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)
