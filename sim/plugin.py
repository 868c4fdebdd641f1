"""The pytest plugin: a `simulation` fixture, an option for its seed, and the command that replays a test that failed.

    def test_survives_a_kill(simulation):
        sim = simulation()
        peers = sim.add_peers(4)
        sim.kill(peers[1], at_s=20, restart_s=40)
        report = sim.run(until_s=90)
        assert report.identical and not report.violations

Installed with shoal, and so loaded by every pytest run in an environment that has it: importing it must cost nothing, and
changes nothing for tests that do not ask for the fixture.
"""

from __future__ import annotations

import shlex
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from .simulation import Simulation

_SEEDS = pytest.StashKey[list[int]]()


class MakeSimulation(Protocol):
    """What the fixture `simulation` is."""

    def __call__(self, *, seed: int | None = None, **options: Any) -> Simulation:
        """A new simulation; `options` are those of `Simulation`. --shoal-seed wins over `seed`; neither: 0."""
        ...


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shoal", "shoal: simulated swarms")
    group.addoption(
        "--shoal-seed",
        type=int,
        default=None,
        metavar="N",
        help="Seed of every simulation made by the `simulation` fixture, in place of the test's own.",
    )


@pytest.fixture
def simulation(request: pytest.FixtureRequest) -> MakeSimulation:
    """Makes simulations: `simulation(seed=7)`. When the test fails, the command that replays it is printed."""
    seeds = request.node.stash.setdefault(_SEEDS, [])
    forced = request.config.getoption("--shoal-seed")

    def make(*, seed: int | None = None, **options: Any) -> Simulation:
        from .simulation import Simulation

        chosen = forced if forced is not None else seed if seed is not None else 0
        seeds.append(chosen)
        return Simulation(chosen, **options)

    return make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    seeds = item.stash.get(_SEEDS, [])
    if report.failed and seeds:
        text = f"pytest {shlex.quote(item.nodeid)} --shoal-seed {seeds[-1]}"
        if len(set(seeds)) > 1:
            text += f"\n({len(seeds)} simulations were made; this is the seed of the last. All: {seeds})"
        report.sections.append(("shoal: replay", text))
    return report
