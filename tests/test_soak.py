"""A short soak: two hundred steps of the tiny learner, with a reward file, rounds and evaluations, hold nothing back.

`benchmarks/soak.py` does the same for 2,000 steps, and for a whole node.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "soak.py"
# A leak of one copy of the 23,000 parameters a step would be 13 MiB over the steps compared.
GROWTH_MIB_MAX = 6.0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_two_hundred_steps_leave_memory_files_and_threads_as_they_were(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--what", "learner", "--steps", "200", "--out", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "soak-learner.json").read_text())
    assert result["steps"] == 200
    assert result["growth"]["files"] == 0
    assert result["growth"]["threads"] == 0
    assert result["growth"]["rss_mib"] < GROWTH_MIB_MAX
    assert (tmp_path / "soak-learner.png").stat().st_size > 0
