"""`shoal sim`: run a scenario, for one seed or many, and say what was found.

Registered as an entry point (group `shoal.commands`), since the command line must not know the simulator. Heavy imports happen
inside, so that `shoal --help` stays quick.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..protocol.errors import ExitCode

if TYPE_CHECKING:
    from .report import Report
    from .scenario import Scenario

SEEDS_MAX = 100_000


def _seeds(context: click.Context, parameter: click.Parameter, value: str | None) -> range | None:
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", value)
    if not found or int(found[1]) > int(found[2]):
        raise click.BadParameter(f"found {value!r}, expected A..B with A <= B, such as 0..99")
    seeds = range(int(found[1]), int(found[2]) + 1)
    if len(seeds) > SEEDS_MAX:
        raise click.BadParameter(f"found {len(seeds)} seeds, expected at most {SEEDS_MAX}")
    return seeds


@click.command()
@click.argument("scenario", required=False)
@click.option("--seed", default=None, type=click.IntRange(0, 2**63 - 1), help="Of everything random. [default: 0]")
@click.option("--seeds", default=None, metavar="A..B", callback=_seeds, help="One run for each, both ends included.")
@click.option(
    "--until",
    default=None,
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Virtual seconds. [default: the scenario's]",
)
@click.option("--list", "list_", is_flag=True, help="The shipped scenarios, and what each shows.")
@click.option(
    "--report", "folder", type=click.Path(path_type=Path), default=None, help="Write report.json and report.html here."
)
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object on stdout.")
def sim(
    scenario: str | None,
    seed: int | None,
    seeds: range | None,
    until: float | None,
    list_: bool,
    folder: Path | None,
    as_json: bool,
) -> int:
    """Run a swarm in virtual time: real nodes, simulated network, disks and clocks, faults on a schedule.

    SCENARIO is a TOML file or the name of a shipped one (--list). The same seed gives the same run, event for event: equal
    trace hashes. Exit code 1 means that an invariant was broken or something expected did not come true.

    \b
    Examples: shoal sim partition-heal --seed 7 --report ./report
              shoal sim my-scenario.toml --seeds 0..99 --json
    """
    if list_:
        return _list(as_json)
    if scenario is None:
        raise click.UsageError("found no SCENARIO, expected a TOML file or a name; --list shows the names")
    if seed is not None and seeds is not None:
        raise click.UsageError("found --seed and --seeds, expected one of them")
    from .scenario_file import load_scenario

    loaded = load_scenario(scenario)
    if seeds is None:
        report = _play(loaded, scenario, seed or 0, until)
        _keep(report, folder)
        click.echo(json.dumps(report.summary()) if as_json else report.describe())
        return ExitCode.OK if report.ok else ExitCode.FAILED
    return _many(loaded, scenario, seeds, until, folder, as_json)


def _list(as_json: bool) -> int:
    from .scenario_file import library, load_scenario

    found = {name: load_scenario(name) for name in library()}
    if as_json:
        listed = [{"name": n, "about": s.about, "until_s": s.until_s} for n, s in found.items()]
        click.echo(json.dumps({"scenarios": listed}))
        return ExitCode.OK
    width = max(len(name) for name in found)
    for name, each in found.items():
        click.echo(f"{name:<{width}}  {each.about}")
    return ExitCode.OK


def _replay(scenario: str, seed: int, until: float | None) -> str:
    shorter = f" --until {until:g}" if until is not None else ""
    return f"shoal sim {shlex.quote(scenario)} --seed {seed}{shorter}"


def _play(loaded: Scenario, scenario: str, seed: int, until: float | None) -> Report:
    replay = _replay(scenario, seed, until)
    try:
        return loaded.play(seed, until_s=until, replay=replay)
    except KeyboardInterrupt:
        # The nodes end in the middle of what they do; what their coroutines say of it is worth nothing.
        sys.unraisablehook = lambda _: None
        raise
    except Exception:
        click.echo(f"the simulation itself failed; replay: {replay}", err=True)
        raise


def _keep(report: Report, folder: Path | None) -> None:
    if folder is not None:
        page = report.write(folder)[-1]
        click.echo(f"report: {page}", err=True)


def _many(
    loaded: Scenario, scenario: str, seeds: range, until: float | None, folder: Path | None, as_json: bool
) -> int:
    """A line for every seed; the whole report of those that failed. Reports of all go to folders of their own."""
    runs: list[dict[str, Any]] = []
    for seed in seeds:
        report = _play(loaded, scenario, seed, until)
        _keep(report, folder / f"seed-{seed}" if folder is not None else None)
        kept = (
            "seed",
            "ok",
            "identical",
            "trace_hash",
            "events",
            "loss_last",
            "violations",
            "unmet",
            "errors",
            "replay",
        )
        summary = report.summary()
        runs.append({key: summary[key] for key in kept})
        if not report.ok:
            click.echo(report.describe(), err=as_json)
        elif as_json:
            click.echo(f"seed {seed}: ok", err=True)
        else:
            click.echo(f"seed {seed}: ok, trace {report.trace_hash[:16]}, {report.wall_seconds:.1f} s")
    failed = [run["seed"] for run in runs if not run["ok"]]
    if as_json:
        click.echo(json.dumps({"scenario": loaded.title, "ok": not failed, "failed": failed, "runs": runs}))
    else:
        click.echo(f"{len(runs) - len(failed)} of {len(runs)} seeds ok" + (f"; failed: {failed}" if failed else ""))
    return ExitCode.FAILED if failed else ExitCode.OK
