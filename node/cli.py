"""The `shoal` command: flags and help. What commands do is in `commands/`, the daemon and the demo.

Heavy imports happen inside the commands, so that `--help` is quick. A `ShoalError` becomes three lines on stderr (and
one JSON object on stdout with --json) and its exit code; anything unexpected becomes one line and a crash file.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click

from ..protocol.errors import ExitCode, ShoalError
from .commands import tune
from .commands.options import data_dir_of, data_dir_option, json_option

COMMANDS_GROUP = "shoal.commands"  # entry points of this group are commands, too
INTERRUPTED = 130  # what a shell expects of a command that Ctrl-C ended
# docs/commands.md has the causes.
CODES = "\b\nExit codes:\n" + "\n".join(f"{int(c):3d}  {c.name.lower().replace('_', ' ')}" for c in ExitCode)


class Group(click.Group):
    """Commands in the order of a first day with shoal; then those that other packages bring (entry points).

    The simulator's is one of them: the node does not know it, since imports point the other way.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        own = ["demo", "up", "join", "status", "peers", "invite", "leave", "doctor", "eval", "export"]
        own += ["dpo", "reward-model"]
        return own + sorted(e.name for e in entry_points(group=COMMANDS_GROUP) if e.name not in own)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        return next((e.load() for e in entry_points(group=COMMANDS_GROUP) if e.name == cmd_name), None)


@click.group(
    cls=Group, epilog=CODES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="shoal")
def shoal() -> None:
    """Post-train a language model together, with nobody in charge.

    \b
    shoal demo                        see a whole swarm on this machine
    shoal up --config run.toml        found a run (or go on with the one on disk)
    shoal join 'shoal://…'            join one, from its invite
    shoal status                      what the node here is doing
    shoal sim partition-heal          a swarm in virtual time, with faults on a schedule

    Progress and logs go to stderr, results to stdout; with --json the last line of stdout is one JSON object.
    SHOAL_NODE__… variables override the file, and SHOAL_DEBUG=1 shows tracebacks.
    """


@shoal.command()
@click.option(
    "--peers", default=3, show_default=True, type=click.IntRange(1, 16), help="How many peers, each a process."
)
@click.option("--rounds", default=None, type=click.IntRange(1, 10_000), help="Rounds to run. [default: tuned]")
@click.option(
    "--mode",
    default="ring",
    show_default=True,
    type=click.Choice(["ring", "gossip", "hybrid"]),
    help="How updates are exchanged.",
)
@click.option("--compression", default=None, help="Preset or density/bits, such as long or 0.05/4. [default: demo]")
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the model, the data and the split."
)
@click.option("--kill/--no-kill", default=True, show_default=True, help="Kill one peer mid-exchange and restart it.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), default=None, help="Keep logs and states here.")
@json_option
def demo(**options: Any) -> int:
    """Run a swarm on this machine: real processes, TLS sockets, GRPO on a tiny model, one peer killed on the way.

    The first minute is a short supervised warm-up, so that reinforcement learning has something to reward. Then every
    line shows a round with its mean reward. At the end all peers must hold the same bits.

    \b
    Example: shoal demo --peers 4 --rounds 12 --json
    """
    from .commands.demo_options import DemoOptions
    from .demo import run_demo

    return run_demo(DemoOptions(json=options.pop("as_json"), **options))


def _overrides(sets: tuple[str, ...], data_dir: Path | None, port: int | None) -> list[str]:
    listed = list(sets)
    if data_dir is not None:
        listed.append(f"node.data_dir={json.dumps(str(data_dir))}")
    if port is not None:
        listed.append(f"node.port={port}")
    return listed


def _node_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        json_option,
        click.option(
            "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a key, such as node.threads=2."
        ),
        click.option("--port", type=click.IntRange(0, 65535), default=None, help="TCP port; 0 takes a free one."),
        data_dir_option,
        click.option("--config", type=click.Path(path_type=Path), default=None, help="TOML file."),
    ):
        function = option(function)
    return function


@shoal.command()
@_node_options
@click.option("--print-config", is_flag=True, help="Print every key with its meaning and default, and exit.")
def up(
    config: Path | None,
    data_dir: Path | None,
    port: int | None,
    sets: tuple[str, ...],
    print_config: bool,
    as_json: bool,
) -> int:
    """Found a run, or go on with the one in the data directory. Runs until Ctrl-C or SIGTERM.

    [run] tables in the file are the manifest: what is trained and how. [node] tables are this machine's own.

    \b
    Examples: shoal up --config run.toml
              shoal up --data-dir /data/shoal        (after a restart: same state, same round)
              shoal up --print-config > run.toml
    """
    from .config_file import example_config, load_config

    if print_config:
        click.echo(json.dumps({"config": example_config()}) + "\n" if as_json else example_config(), nl=False)
        return ExitCode.OK
    loaded = load_config(config, _overrides(sets, data_dir, port), os.environ)
    from .daemon import run_daemon

    given = bool(loaded.model_fields_set & {"run"})
    code = run_daemon(loaded, None, given_run=given)
    if as_json:
        click.echo(json.dumps({"left": True}))
    return code


@shoal.command()
@click.argument("invite")
@_node_options
def join(
    invite: str, config: Path | None, data_dir: Path | None, port: int | None, sets: tuple[str, ...], as_json: bool
) -> int:
    """Join a run from its INVITE (quote it: it may contain a #). Nothing else needs to be configured.

    Connects, checks that both sides are who they say and are admitted, receives the manifest, loads the model,
    downloads the state from several peers at once, and enters the next round.

    \b
    Example: shoal join 'shoal://12D3Koo…@203.0.113.7:7447/5f…#token=…' --data-dir /data/shoal
    """
    from .config_file import load_config

    loaded = load_config(config, _overrides(sets, data_dir, port), os.environ)
    from .daemon import run_daemon

    code = run_daemon(loaded, invite)
    if as_json:
        click.echo(json.dumps({"left": True}))
    return code


def _ask(data_dir: Path | None, method: str, timeout_s: float = 15.0) -> dict[str, Any]:
    from .observe.control import call_blocking

    return call_blocking(data_dir_of(data_dir) / "control.sock", method, {}, timeout_s=timeout_s)


@shoal.command()
@data_dir_option
@json_option
def status(data_dir: Path | None, as_json: bool) -> int:
    """What the running node does: round, phase, reward, progress to the round's target, bytes, trouble.

    \b
    Example: shoal status --data-dir /data/shoal --json
    """
    from .commands.show import describe_status

    found = _ask(data_dir, "status")
    click.echo(json.dumps(found) if as_json else describe_status(found))
    return ExitCode.OK


@shoal.command()
@data_dir_option
@json_option
def peers(data_dir: Path | None, as_json: bool) -> int:
    """Everybody the running node knows: state, round, whether their state is the same, addresses, last error.

    \b
    Example: shoal peers --json | tail -1
    """
    from .commands.show import describe_peers

    found = _ask(data_dir, "peers")
    click.echo(json.dumps(found) if as_json else describe_peers(found["peers"]))
    return ExitCode.OK


@shoal.command()
@data_dir_option
@json_option
def invite(data_dir: Path | None, as_json: bool) -> int:
    """Print an invite to the run: one line that is all a newcomer needs.

    In token admission every call makes a new token, good for the first peer that uses it. Treat it as a secret.

    \b
    Example: shoal join "$(ssh host shoal invite)"
    """
    found = _ask(data_dir, "invite")
    click.echo(json.dumps(found) if as_json else found["invite"])
    return ExitCode.OK


@shoal.command()
@data_dir_option
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until the node has ended.")
@json_option
def leave(data_dir: Path | None, wait: bool, as_json: bool) -> int:
    """Ask the running node to leave: push what it learned, say goodbye, checkpoint, exit. Like SIGTERM.

    \b
    Example: shoal leave --data-dir /data/shoal
    """
    from .commands.show import wait_until_gone

    found = _ask(data_dir, "leave")
    if wait:
        found["gone"] = wait_until_gone(data_dir_of(data_dir), found["grace_seconds"] + 15.0)
    click.echo(json.dumps(found) if as_json else ("left" if found.get("gone", True) else "still leaving"))
    return ExitCode.OK if found.get("gone", True) else ExitCode.FAILED


@shoal.command()
@data_dir_option
@click.option("--port", default=7447, show_default=True, type=click.IntRange(0, 65535), help="Port to test.")
@json_option
def doctor(data_dir: Path | None, port: int, as_json: bool) -> int:
    """Check this machine: Python, device, clock, disk, port, addresses that others can reach, optional parts.

    Changes nothing. Exit code 1 if something would keep a node from running.

    \b
    Example: shoal doctor --data-dir /data/shoal --port 7447
    """
    from .doctor import describe, examine

    findings = examine(data_dir_of(data_dir), port)
    click.echo(json.dumps({"findings": [f.as_dict() for f in findings]}) if as_json else describe(findings))
    return ExitCode.FAILED if any(f.status == "bad" for f in findings) else ExitCode.OK


@shoal.command("eval")
@data_dir_option
@click.option("--adapter", type=click.Path(path_type=Path), default=None, help="Evaluate this PEFT adapter folder.")
@click.option("--model", default=None, help="Evaluate this model: tiny, folder, .gguf or hub id, without a node.")
@click.option("--task", default=None, help="Other task than the run's: reasoning_gym:<task> or a JSONL file.")
@click.option("--size", default=None, type=click.IntRange(1, 10_000), help="Held-out prompts.")
@click.option("--samples", default=None, type=click.IntRange(1, 64), help="Completions a prompt: pass@k up to that k.")
@click.option("--plot", default=None, type=click.Path(path_type=Path, dir_okay=False), help="Also draw this PNG file.")
@json_option
def evaluate(
    data_dir: Path | None,
    adapter: Path | None,
    model: str | None,
    task: str | None,
    size: int | None,
    samples: int | None,
    plot: Path | None,
    as_json: bool,
) -> int:
    """Held-out greedy accuracy, mean sampled reward and pass@k, at a fixed seed.

    Without --model or --adapter: of the newest state in the data directory; the node need not run.

    \b
    Examples: shoal eval --data-dir /data/shoal --json
              shoal eval --data-dir /data/shoal --adapter ./adapter
              shoal eval --data-dir /data/shoal --samples 8 --plot curve.png
    """
    from .commands.artefacts import run_eval

    found = run_eval(
        data_dir_of(data_dir), adapter=adapter, model=model, task=task, size=size, samples=samples, plot=plot
    )
    click.echo(json.dumps(found) if as_json else "\n".join(f"{k:>12}  {v}" for k, v in found.items()))
    return ExitCode.OK


@shoal.command()
@data_dir_option
@click.option("--out", required=True, type=click.Path(path_type=Path), help="New folder to write.")
@click.option("--merged", is_flag=True, help="Write a whole model with the adapter merged in.")
@json_option
def export(data_dir: Path | None, out: Path, merged: bool, as_json: bool) -> int:
    """Write what was learned: a PEFT adapter folder (LoRA), or an ordinary model folder (--merged, full fine-tuning).

    \b
    Example: shoal export --data-dir /data/shoal --out ./adapter
    """
    from .commands.artefacts import run_export

    found = run_export(data_dir_of(data_dir), out, merged=merged)
    click.echo(
        json.dumps(found) if as_json else f"wrote {found['kind']} of round {found['round']} to {found['folder']}"
    )
    return ExitCode.OK


shoal.add_command(tune.dpo)
shoal.add_command(tune.reward_model)


def _report(error: ShoalError, as_json: bool) -> int:
    click.echo(f"shoal: {error.what}\n  {error.values}\n  {error.todo}", err=True)
    if as_json:
        _json_error(error.what, error.values, error.todo, int(error.code))
    return int(error.code)


def _json_error(what: str, values: str, todo: str, code: int) -> None:
    click.echo(json.dumps({"error": {"what": what, "values": values, "todo": todo, "code": code}}))


def _crash(error: Exception, as_json: bool) -> int:
    if os.environ.get("SHOAL_DEBUG"):
        raise error
    todo = "Please report it with that file; SHOAL_DEBUG=1 shows it here."
    try:
        with tempfile.NamedTemporaryFile("w", prefix="shoal-crash-", suffix=".txt", delete=False) as file:
            traceback.print_exception(error, file=file)
        details = f"details are in {file.name}"
    except OSError as disk:
        details, todo = f"no crash file could be written: {disk}", "SHOAL_DEBUG=1 shows the details here."
    what = f"unexpected {type(error).__name__}: {error}"
    click.echo(f"shoal: {what}\n  {details}\n  {todo}", err=True)
    if as_json:
        _json_error(what, details, todo, int(ExitCode.FAILED))
    return int(ExitCode.FAILED)


def run(arguments: list[str]) -> int:
    """One command; the exit code. Never raises, unless SHOAL_DEBUG is set."""
    as_json = "--json" in arguments
    try:
        return int(shoal.main(args=arguments, prog_name="shoal", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        if as_json:
            _json_error(error.format_message(), "see the line above", "See --help.", int(ExitCode.USAGE))
        return int(ExitCode.USAGE)
    except ShoalError as error:
        return _report(error, as_json)
    except (click.exceptions.Abort, KeyboardInterrupt):
        if as_json:
            _json_error("interrupted", "ended by a signal before it was done", "Run it again.", INTERRUPTED)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()  # its reader has gone (`shoal peers | head`)
        return int(ExitCode.FAILED)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _report(_full(error), as_json)
        return _crash(error, as_json)


def _full(error: OSError) -> ShoalError:
    if error.filename is None:  # what is said of a file has its name; here the output itself goes to a full disk
        _drop_output()
    return ShoalError(
        "The disk is full",
        values=f"{error.filename or 'the output'}: {error.strerror}",
        todo="Free some space there, or write somewhere else.",
        code=ExitCode.DISK,
    )


def _drop_output() -> None:
    """Say nothing more on stdout, not even at exit, where what is still buffered would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def main() -> None:
    """Entry point of the `shoal` command."""
    code = run(sys.argv[1:])
    try:
        if sys.stdout is not None:  # None: started with stdout closed
            sys.stdout.flush()
    except OSError:
        _drop_output()
        code = code or int(ExitCode.FAILED)
    if code == INTERRUPTED:  # a model that is being loaded or measured in a thread is not waited for
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
