"""The pytest plugin as somebody has it who installed shoal: the fixture, the option, the command of a test that failed."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

THREE_TESTS = """
def test_fine(simulation):
    sim = simulation(seed=3)
    sim.add_peers(2)
    assert sim.run(until_s=5).seed == sim.seed

def test_fails(simulation):
    assert simulation().seed == 77

def test_without():
    assert False
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(test_mine=THREE_TESTS)
    return pytester


def test_a_failing_test_prints_the_command_that_replays_it(project):
    result = project.runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*shoal: replay*", "pytest test_mine.py::test_fails --shoal-seed 0"])
    assert result.stdout.str().count("shoal: replay") == 1


def test_the_option_wins_over_the_tests_own_seed(project):
    result = project.runpytest("--shoal-seed", "77", "-k", "fine or fails", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)


def test_of_many_simulations_the_last_is_named_and_all_are_listed(pytester):
    pytester.makepyfile(
        """
        def test_hunt(simulation):
            for seed in (4, 5):
                assert simulation(seed=seed).seed != 5
        """
    )
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["pytest *::test_hunt --shoal-seed 5", "(2 simulations were made*All: ?4, 5?)"])


def test_options_reach_the_simulation(pytester):
    pytester.makepyfile(
        """
        def test_it(simulation):
            sim = simulation(run={"quadratic": {"dimension": 5}})
            assert sim.run_config.quadratic.dimension == 5
        """
    )
    pytester.runpytest("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_it_is_named_in_the_help_and_the_fixtures(pytester):
    pytester.runpytest("--help").stdout.fnmatch_lines(["*--shoal-seed*N*"])
    pytester.runpytest("--fixtures").stdout.fnmatch_lines(["simulation*plugin.py*"])


def test_loading_it_loads_nothing_heavy():
    program = (
        "import sys, shoal.sim.plugin;"
        "print(sorted({'numpy', 'torch', 'pydantic', 'grpc', 'cryptography', 'asyncio'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"
