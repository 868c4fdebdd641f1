"""docs/simulator.md tells the truth: its examples run as they stand there, and it names every table, key, kind and lie."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from shoal.sim.byzantine import KINDS
from shoal.sim.fault_tables import AnyFault
from shoal.sim.scenario import Expect, LinkTable, PeersTable, Scenario
from shoal.sim.scenario_file import library, parse_scenario

pytest_plugins = ["pytester"]

TEXT = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.S | re.M)
FAULTS = get_args(get_args(AnyFault)[0])


def python_file(name: str) -> str:
    return next(code for kind, code in BLOCKS if kind == "python" and code.startswith(f"# {name}\n"))


def test_the_learner_example_runs(pytester):
    pytester.makepyfile(test_learner=python_file("test_learner.py"))
    pytester.runpytest("-p", "no:cacheprovider").assert_outcomes(passed=1)


@pytest.mark.slow
def test_the_reward_example_runs(pytester):
    pytester.makepyfile(rewards=python_file("rewards.py"), test_reward=python_file("test_reward.py"))
    pytester.runpytest("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_the_scenario_example_comes_out_as_it_says():
    (text,) = [code for kind, code in BLOCKS if kind == "toml"]
    report = parse_scenario(text, "docs").play(0)
    assert report.ok, report.describe()


@pytest.mark.parametrize("table", [Scenario, LinkTable, PeersTable, Expect, *FAULTS], ids=lambda table: table.__name__)
def test_every_key_is_in_the_docs(table):
    tables = {"run", "links", "peers", "faults", "expect", "kind"}  # headings and columns
    missing = [name for name in table.model_fields if f"`{name}`" not in TEXT and name not in tables]
    assert not missing


def test_every_kind_and_every_shipped_scenario_is_in_the_docs():
    kinds = [get_args(fault.model_fields["kind"].annotation)[0] for fault in FAULTS]
    assert not [name for name in (*kinds, *KINDS, *library()) if f"`{name}`" not in TEXT]
