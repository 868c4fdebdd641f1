"""Runs random fault schedules and prints what they break.

    python -m tests.sim.hunt 0 200 [--byzantine KIND] [--mode gossip|hybrid]

Each broken one is a line that begins with its seed; `run_random(seed)` replays it.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator

from shoal.sim.byzantine import KINDS
from shoal.sim.schedules import run_random


def broken(seed: int, byzantine: str | None = None, mode: str = "ring") -> str:
    """What one seed breaks, in one line; "" for nothing."""
    try:
        report = run_random(seed, byzantine=byzantine, mode=mode)
    except Exception:
        return f"{seed} ({mode}, {byzantine}): {traceback.format_exc(limit=-3)}"
    found = [f"invariant {v['invariant']} at {v['at_s']:.1f} s: {v['peer']} {v['text']}" for v in report.violations]
    found += [error[-600:] for error in report.errors]
    return f"{seed} ({mode}, {byzantine}): {'; '.join(found[:3])}" if found else ""


def hunt(first: int, count: int, byzantine: str | None = None, mode: str = "ring") -> Iterator[str]:
    """Lines of the broken ones among `count` seeds from `first` on."""
    for seed in range(first, first + count):
        if line := broken(seed, byzantine, mode):
            yield line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--byzantine", choices=KINDS)
    parser.add_argument("--mode", choices=("ring", "gossip", "hybrid"), default="ring")
    options = parser.parse_args()
    found = 0
    for line in hunt(options.first, options.count, options.byzantine, options.mode):
        print(line, flush=True)
        found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
