"""The commands: help worth reading, one JSON object at the end, three-part errors with their exit codes, no traceback."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

import shoal.node.daemon
import shoal.node.demo
from shoal.node import cli
from shoal.node.commands.demo_options import DemoOptions
from shoal.node.commands.show import describe_peers, describe_status
from shoal.node.config import RunConfig, manifest_bytes
from shoal.node.observe.control import ControlServer
from shoal.protocol.errors import ExitCode, ShoalError

COMMANDS = [
    "demo",
    "up",
    "join",
    "status",
    "peers",
    "invite",
    "leave",
    "doctor",
    "eval",
    "export",
    "dpo",
    "reward-model",
]
DOCS = Path(__file__).parents[2] / "docs" / "commands.md"

STATUS = {
    "peer_id": "12D3KooWabc",
    "name": "sums",
    "run_id": "5f" * 32,
    "ready": True,
    "phase": "training",
    "addresses": ["127.0.0.1:7447"],
    "uptime_seconds": 3.0,
    "warnings": ["the disk is slow"],
    "round": 4,
    "published": None,
    "rounds_max": 16,
    "state_hash": "ab" * 32,
    "samples": 100,
    "swarm_samples": 300,
    "target_samples": 4096,
    "metrics": {"reward": 0.5},
    "electorate": ["a", "b"],
    "member": False,
    "alive": 1,
    "alone": True,
    "bytes": {"round": 1234, "control": 5, "state": 6},
    "disk_trouble": "No space left on device",
}
PEER = {
    "peer_id": "12D3KooWother",
    "state": "dead",
    "addresses": [],
    "connected": False,
    "round": 3,
    "same_state": False,
    "samples_per_s": 2.5,
    "last_error": "refused\x1b[2J",
}


@contextmanager
def daemon(data_dir: Path, **answers: dict):
    """A control socket that answers, in a thread of its own."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    asked: list[str] = []

    def method(name):
        async def answer(params):
            asked.append(name)
            return answers[name]

        return answer

    server = ControlServer(data_dir / "control.sock", {name: method(name) for name in answers}, lambda error: None)

    def serve():
        asyncio.set_event_loop(loop)
        loop.run_until_complete(server.start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(server.close())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(10)
    try:
        yield asked
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def last_json(text: str) -> dict:
    return json.loads(text.strip().splitlines()[-1])


# --- help -------------------------------------------------------------------------------------------------------------


def test_every_command_is_listed():
    assert list(cli.shoal.commands) and set(cli.shoal.commands) == set(COMMANDS)
    assert cli.shoal.list_commands(None) == [*COMMANDS, "sim"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_json_and_an_example(command, capsys):
    assert cli.run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "--json" in text and re.search(rf"Examples?: .*shoal {command}\b", text)


def test_the_group_says_what_to_do_first_and_what_exit_codes_mean(capsys):
    assert cli.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert "shoal demo" in text
    for code in ExitCode:
        assert re.search(rf"^\s*{int(code)}  {code.name.lower().replace('_', ' ')}$", text, re.MULTILINE)


def test_the_documentation_knows_every_command_option_and_exit_code():
    text = DOCS.read_text()
    for name, command in cli.shoal.commands.items():
        section = text.split(f"## shoal {name}\n")[1].split("\n## ")[0]
        for parameter in command.params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                assert f"`{option}" in section or f"{option}" in section, f"{name} {option}"
    for code in ExitCode:
        assert re.search(rf"^\| {int(code)} \|", text, re.MULTILINE), code


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert "0.1.0" in capsys.readouterr().out


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_shoal_error_is_three_lines_one_json_object_and_its_code(capsys, tmp_path):
    code = cli.run(["status", "--data-dir", str(tmp_path), "--json"])
    out, err = capsys.readouterr()
    assert code == ExitCode.NOT_RUNNING
    error = last_json(out)["error"]
    assert error["code"] == ExitCode.NOT_RUNNING
    assert err.splitlines() == [f"shoal: {error['what']}", f"  {error['values']}", f"  {error['todo']}"]


def test_a_usage_error(capsys):
    assert cli.run(["up", "--port", "many", "--json"]) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert "many" in last_json(out)["error"]["what"] and "--help" in err
    assert cli.run(["dance"]) == ExitCode.USAGE


def test_the_unexpected_is_one_line_and_a_crash_file(capsys, monkeypatch, tmp_path):
    def boom(config, invite, *, given_run=False):
        raise ZeroDivisionError("round zero")

    monkeypatch.setattr(shoal.node.daemon, "run_daemon", boom)
    monkeypatch.setattr(cli.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)
    assert cli.run(["up", "--json"]) == ExitCode.FAILED
    out, err = capsys.readouterr()
    assert "unexpected ZeroDivisionError: round zero" in err and "Traceback" not in err
    assert last_json(out)["error"]["code"] == 1
    (crash,) = tmp_path.glob("shoal-crash-*.txt")
    assert str(crash) in err and "Traceback" in crash.read_text()
    monkeypatch.setenv("SHOAL_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli.run(["up"])


def test_a_crash_on_a_full_disk_is_still_said(capsys, monkeypatch):
    def boom(config, invite, *, given_run=False):
        raise ZeroDivisionError

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shoal.node.daemon, "run_daemon", boom)
    monkeypatch.setattr(cli.tempfile, "NamedTemporaryFile", full)
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)
    assert cli.run(["up"]) == ExitCode.FAILED
    assert "no crash file could be written" in capsys.readouterr().err


def test_ctrl_c(monkeypatch, capsys):
    def interrupted(config, invite, *, given_run=False):
        raise KeyboardInterrupt

    monkeypatch.setattr(shoal.node.daemon, "run_daemon", interrupted)
    assert cli.run(["up"]) == cli.INTERRUPTED
    assert cli.run(["up", "--json"]) == cli.INTERRUPTED
    assert last_json(capsys.readouterr().out)["error"]["code"] == cli.INTERRUPTED


def test_a_reader_that_goes_away_is_no_crash():
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-m", "shoal.node.cli", "up", "--print-config"]
    done = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert done.returncode == ExitCode.FAILED and done.stderr == ""


def test_a_closed_stdout_is_no_crash():
    program = [sys.executable, "-m", "shoal.node.cli", "up", "--print-config"]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *program], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == ExitCode.OK and done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_output_to_a_full_disk_is_an_error_in_three_parts():
    program = [sys.executable, "-m", "shoal.node.cli", "up", "--print-config"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == ExitCode.DISK and done.stderr.startswith("shoal: The disk is full\n"), done.stderr
    assert len(done.stderr.splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[node]\nprot = 1", "the nearest known one is port"),
        ("[node]\nport = true", "expected a valid integer"),
        ("[run.sync]\nouter_lr = -1", "greater than 0"),
        (None, "No such file"),
    ],
)
def test_up_with_a_mistake_in_the_file(tmp_path, capsys, text, words):
    path = tmp_path / "run.toml"
    if text is not None:
        path.write_text(text)
    assert cli.run(["up", "--config", str(path)]) == ExitCode.CONFIG
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err and len(err.splitlines()) == 3


# --- up, join, demo ---------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch):
    """What the commands hand to the daemon and the demo."""
    calls = []

    def run_daemon(config, invite, *, given_run=False):
        calls.append((config, invite, given_run))
        return 0

    def run_demo(options):
        calls.append(options)
        return 0

    monkeypatch.setattr(shoal.node.daemon, "run_daemon", run_daemon)
    monkeypatch.setattr(shoal.node.demo, "run_demo", run_demo)
    return calls


def test_up_puts_file_environment_and_flags_together(tmp_path, started, monkeypatch, capsys):
    path = tmp_path / "run.toml"
    path.write_text("[run]\nseed = 9\n[node]\nport = 1\nthreads = 1")
    monkeypatch.setenv("SHOAL_NODE__THREADS", "2")
    home = tmp_path / "a 'quoted' folder"
    arguments = ["up", "--config", str(path), "--port", "0", "--data-dir", str(home), "--set", "run.name=x", "--json"]
    assert cli.run(arguments) == 0
    ((config, invite, given_run),) = started
    assert invite is None and given_run
    assert (config.run.seed, config.run.name, config.node.port, config.node.threads) == (9, "x", 0, 2)
    assert config.node.data_dir == str(home)
    assert last_json(capsys.readouterr().out) == {"left": True}


def test_up_without_run_tables_may_go_on_with_what_is_on_disk(started):
    assert cli.run(["up"]) == 0
    assert started[0][2] is False


def test_print_config_starts_nothing(started, capsys):
    assert cli.run(["up", "--print-config"]) == 0
    assert "[run.grpo]" in capsys.readouterr().out and not started
    assert cli.run(["up", "--print-config", "--json"]) == 0
    assert "[run.grpo]" in last_json(capsys.readouterr().out)["config"] and not started


def test_an_empty_invite_or_folder_is_a_mistake_and_founds_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["join", "", "--data-dir", "node"]) == ExitCode.USAGE
    assert cli.run(["up", "--data-dir", "", "--set", "run.learner=quadratic"]) == ExitCode.USAGE
    assert list(tmp_path.iterdir()) == []


def test_the_daemon_allows_itself_more_open_files():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = min(256, before[1]) if before[1] != resource.RLIM_INFINITY else 256
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
    try:
        shoal.node.daemon._allow_open_files()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == before[1]
        assert soft == (shoal.node.daemon.OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, 16_384))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_join_hands_the_invite_on(started):
    assert cli.run(["join", "shoal://x@h:1/aa", "--port", "5"]) == 0
    config, invite, _ = started[0]
    assert invite == "shoal://x@h:1/aa" and config.node.port == 5
    assert cli.run(["join"]) == ExitCode.USAGE


def test_demo_options(started, tmp_path):
    flags = ["--peers", "4", "--rounds", "12", "--no-kill", "--compression", "long", "--seed", "3", "--json"]
    assert cli.run(["demo", *flags, "--dir", str(tmp_path), "--mode", "ring"]) == 0
    assert started == [
        DemoOptions(
            peers=4, rounds=12, mode="ring", compression="long", seed=3, kill=False, json=True, directory=tmp_path
        )
    ]
    assert started[0].keep and not DemoOptions().keep
    assert cli.run(["demo", "--peers", "0"]) == ExitCode.USAGE


def test_demo_says_what_is_wrong_before_anything_is_started_or_written(tmp_path, capsys):
    there = tmp_path / "there"
    assert cli.run(["demo", "--compression", "shrt", "--dir", str(there)]) == ExitCode.CONFIG
    assert "'short'" in capsys.readouterr().err and not there.exists()
    (tmp_path / "peer0").mkdir()
    assert cli.run(["demo", "--dir", str(tmp_path)]) == ExitCode.FAILED
    assert "in the way" in capsys.readouterr().err and os.listdir(tmp_path) == ["peer0"]


# --- asking a running node --------------------------------------------------------------------------------------------


def test_status(tmp_path, capsys):
    with daemon(tmp_path, status=STATUS):
        assert cli.run(["status", "--data-dir", str(tmp_path)]) == 0
        text = capsys.readouterr().out
        assert cli.run(["status", "--data-dir", str(tmp_path), "--json"]) == 0
    assert last_json(capsys.readouterr().out) == STATUS
    for words in ("round 4 of 16", "300 of 4096", "reward 0.5", "ALONE", "not a member", "DISK", "the disk is slow"):
        assert words in text


def test_the_data_directory_may_come_from_the_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SHOAL_NODE__DATA_DIR", str(tmp_path))
    with daemon(tmp_path, status=STATUS):
        assert cli.run(["status"]) == 0


def test_status_while_starting():
    early = {k: STATUS[k] for k in ("peer_id", "name", "run_id", "phase", "uptime_seconds", "warnings")}
    assert "training since 3 s" in describe_status(early)


def test_status_of_gossip_mode_counts_updates():
    text = describe_status({**STATUS, "published": 3})
    assert "4 updates included, 3 of 16 published here" in text and "100 of 4096 samples for the next update" in text
    assert "round" not in text.replace("in rounds", "") and "electorate" not in text and "member" not in text


def test_peers(tmp_path, capsys):
    with daemon(tmp_path, peers={"peers": [PEER]}):
        assert cli.run(["peers", "--data-dir", str(tmp_path)]) == 0
        text = capsys.readouterr().out
        assert cli.run(["peers", "--data-dir", str(tmp_path), "--json"]) == 0
    assert last_json(capsys.readouterr().out) == {"peers": [PEER]}
    assert "dead" in text and "refused" in text and "\x1b" not in text
    assert describe_peers([]) == "nobody else is known"


def test_invite_is_one_line(tmp_path, capsys):
    with daemon(tmp_path, invite={"invite": "shoal://x"}):
        assert cli.run(["invite", "--data-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "shoal://x\n"


def test_leave_waits_until_the_data_directory_is_free(tmp_path, capsys):
    with open(tmp_path / "lock", "w") as lock, daemon(tmp_path, leave={"grace_seconds": 1.0}) as asked:
        fcntl.flock(lock, fcntl.LOCK_EX)
        timer = threading.Timer(0.3, lambda: fcntl.flock(lock, fcntl.LOCK_UN))
        timer.start()
        assert cli.run(["leave", "--data-dir", str(tmp_path), "--json"]) == 0
        timer.join()
    assert asked == ["leave"] and last_json(capsys.readouterr().out)["gone"] is True


def test_leave_that_does_not_end_is_a_failure(tmp_path, capsys):
    with open(tmp_path / "lock", "w") as lock, daemon(tmp_path, leave={"grace_seconds": -14.8}):
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cli.run(["leave", "--data-dir", str(tmp_path)]) == ExitCode.FAILED
        assert cli.run(["leave", "--data-dir", str(tmp_path), "--no-wait"]) == 0
    assert "still leaving" in capsys.readouterr().out


def test_doctor(tmp_path, capsys, monkeypatch):
    assert cli.run(["doctor", "--data-dir", str(tmp_path), "--port", "0", "--json"]) == 0
    findings = last_json(capsys.readouterr().out)["findings"]
    assert {"name", "status", "detail", "todo"} == set(findings[0])
    (tmp_path / "identity").write_bytes(b"")
    (tmp_path / "identity").chmod(0o644)
    assert cli.run(["doctor", "--data-dir", str(tmp_path), "--port", "0"]) == ExitCode.FAILED
    assert "chmod 600" in capsys.readouterr().out


# --- reading what was learned -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["eval"], ["export", "--out", "x"]])
def test_no_state_to_read(tmp_path, capsys, command):
    assert cli.run([*command, "--data-dir", str(tmp_path)]) == ExitCode.CONFIG
    assert "has no manifest" in capsys.readouterr().err
    (tmp_path / "manifest.json").write_bytes(manifest_bytes(RunConfig()))
    assert cli.run([*command, "--data-dir", str(tmp_path)]) == ExitCode.CONFIG
    assert "has no checkpoint" in capsys.readouterr().err


def test_errors_are_of_one_family():
    error = ShoalError("a", values="b", todo="c", code=ExitCode.DISK)
    assert str(error) == "a\n  b\n  c"
