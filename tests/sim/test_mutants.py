"""Bugs planted in one line each are caught, each by the schedule that showed it first. `make check` hunts with more seeds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .hunt import broken
from .mutants import CAUGHT, ENVIRONMENT, MUTANTS, ROOT, SIMULATED, Mutant, caught_at


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_planted_bug_is_caught(mutant: Mutant) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.mutants", mutant.name, str(mutant.seed)],
        cwd=ROOT, capture_output=True, text=True, timeout=110, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == CAUGHT and done.stdout.strip(), done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "byzantine", "mode"), sorted({(m.seed, m.byzantine, m.mode) for m in SIMULATED}, key=str)
)
def test_without_its_bug_the_schedule_breaks_nothing(seed: int, byzantine: str | None, mode: str) -> None:
    assert not broken(seed, byzantine, mode)


def test_there_are_enough_of_them() -> None:
    assert len(SIMULATED) >= 22 and len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.long
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("mutant", SIMULATED, ids=lambda m: m.name)
def test_a_planted_bug_is_caught_by_fresh_seeds(mutant: Mutant) -> None:
    assert caught_at(mutant, range(10_000, 10_040)) is not None
