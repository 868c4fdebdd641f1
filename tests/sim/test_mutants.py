"""Bugs planted in one line each are caught, each by the schedule that showed it first. `make check` hunts with more seeds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .mutants import MUTANTS, ROOT, Mutant, caught_at


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_planted_bug_is_caught(mutant: Mutant) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.mutants", mutant.name, str(mutant.seed)],
        cwd=ROOT, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout.strip(), done.stderr[-2000:]


@pytest.mark.long
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_planted_bug_is_caught_by_fresh_seeds(mutant: Mutant) -> None:
    assert caught_at(mutant, range(10_000, 10_040)) is not None
