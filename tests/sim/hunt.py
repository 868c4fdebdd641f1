"""Runs random fault schedules and prints what they break.

    python -m tests.sim.hunt 0 200 [--byzantine KIND]

Each broken one is a line that begins with its seed; `run_random(seed)` replays it.
"""

from __future__ import annotations

import argparse
import sys
import traceback

from shoal.sim.byzantine import KINDS
from shoal.sim.schedules import run_random


def broken(seed: int, byzantine: str | None = None) -> str:
    """What one seed breaks, in one line; "" for nothing."""
    try:
        report = run_random(seed, byzantine=byzantine)
    except Exception:
        return f"{seed} ({byzantine}): {traceback.format_exc(limit=-3)}"
    found = [f"invariant {v['invariant']} at {v['at_s']:.1f} s: {v['peer']} {v['text']}" for v in report.violations]
    found += [error[-600:] for error in report.errors]
    return f"{seed} ({byzantine}): {'; '.join(found[:3])}" if found else ""


def hunt(first: int, count: int, byzantine: str | None = None) -> list[str]:
    """Lines of the broken ones among `count` seeds from `first` on."""
    return [line for seed in range(first, first + count) if (line := broken(seed, byzantine))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--byzantine", choices=KINDS)
    options = parser.parse_args()
    lines = hunt(options.first, options.count, options.byzantine)
    print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
