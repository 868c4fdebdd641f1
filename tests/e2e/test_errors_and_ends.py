"""What a person meets: three-part errors with their exit codes and no traceback; a clean leave; the same round afterwards."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.node.store.checkpoint import Checkpoints
from shoal.node.store.journal import Journal
from shoal.protocol.errors import ExitCode
from shoal.protocol.identity import Identity

from .harness import DEADLINE_S, QUADRATIC, Node, swarm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

TINY = '[run]\nlearner = "quadratic"\n[run.quadratic]\ndimension = 16\n[run.admission]\nmode = "open"\n'


def shoal(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    config = any("--config" in a for a in arguments)
    env = {
        **os.environ,
        "SHOAL_NODE__DATA_DIR": str(directory / "node"),
        "SHOAL_NODE__LISTEN": "127.0.0.1",
        **({} if config else {"SHOAL_NODE__PORT": "0"}),
        "SHOAL_NODE__LAN_DISCOVERY": "false",
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-m", "shoal.node.cli", *arguments], env=env, capture_output=True, text=True, timeout=100
    )


def assert_three_parts(result: subprocess.CompletedProcess[str], code: ExitCode, *words: str) -> None:
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr and "unexpected" not in result.stderr
    lines = result.stderr[result.stderr.index("shoal: ") :].strip().splitlines()
    assert len(lines) >= 3, lines
    for word in words:
        assert word in result.stderr, f"{word!r} is not in:\n{result.stderr}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[run]\nsead = 3\n", ["sead", "seed"]),
        ('[node]\nport = "many"\n', ["port", "many"]),
        ("[node]\nport = 99999\n", ["port", "99999"]),
        ('[run]\ncompression = "shrt"\n', ["shrt", "short"]),
        ('[node]\nrewards_file = "/nowhere/rewards.py"\n', ["/nowhere/rewards.py"]),
        ("[run\n", ["TOML"]),
        ('[run.admission]\nmode = "open"\nallow = ["x"]\n', ["allow"]),
    ],
)
def test_any_mistake_in_the_file_is_explained(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "run.toml").write_text(text)
    assert_three_parts(shoal(tmp_path, "up", "--config", str(tmp_path / "run.toml")), ExitCode.CONFIG, *words)


def test_a_missing_file_and_a_taken_port_are_explained(tmp_path: Path) -> None:
    assert_three_parts(shoal(tmp_path, "up", "--config", str(tmp_path / "none.toml")), ExitCode.CONFIG, "none.toml")
    (tmp_path / "run.toml").write_text(TINY)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = shoal(tmp_path, "up", "--config", str(tmp_path / "run.toml"), SHOAL_NODE__PORT=str(port))
        assert_three_parts(result, ExitCode.ADDRESS, str(port), "in use")


def test_wrong_and_unreachable_invites_are_explained(tmp_path: Path) -> None:
    assert_three_parts(shoal(tmp_path, "join", "http://example"), ExitCode.USAGE, "shoal://")
    peer = Identity.generate(b"\1" * 32).peer_id
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        where = f"127.0.0.1:{nobody.getsockname()[1]}"
        result = shoal(tmp_path, "join", f"shoal://{peer}@{where}/{'00' * 32}", SHOAL_NODE__BOOTSTRAP_SECONDS_MAX="1")
        assert_three_parts(result, ExitCode.UNREACHABLE, where)


def test_other_runs_identities_models_and_strangers_are_refused(tmp_path: Path) -> None:
    with swarm(tmp_path, admission="token") as one:
        founder = one.found()
        peer, rest = one.invite.removeprefix("shoal://").split("@", 1)
        address, tail = rest.split("/", 1)
        run, token = tail.split("#token=")
        other_run = shoal(tmp_path, "join", f"shoal://{peer}@{address}/{'11' * 32}#token={token}")
        assert_three_parts(other_run, ExitCode.MISMATCH, "11" * 32, run)
        stranger = Identity.generate(b"\2" * 32).peer_id
        wrong_peer = shoal(
            tmp_path, "join", f"shoal://{stranger}@{address}/{run}#token={token}", SHOAL_NODE__BOOTSTRAP_SECONDS_MAX="1"
        )
        assert_three_parts(wrong_peer, ExitCode.UNREACHABLE, stranger, peer)
        forged = shoal(tmp_path, "join", f"shoal://{peer}@{address}/{run}#token={'ab' * 40}")
        assert_three_parts(forged, ExitCode.REFUSED, "token")
        # A founder has several addresses as a rule; each refuses, and none is merely unreachable.
        twice = f"{address},localhost:{address.rpartition(':')[2]}"
        assert_three_parts(shoal(tmp_path, "join", f"shoal://{peer}@{twice}/{run}"), ExitCode.REFUSED, "token")
        bare = shoal(tmp_path, "join", f"shoal://{peer}@{address}/{run}")
        assert_three_parts(bare, ExitCode.REFUSED, "no token was shown")
        one.join()
        used = shoal(tmp_path, "join", one.invite)
        assert_three_parts(used, ExitCode.REFUSED, "another identity")
        with socket.socket() as nobody:  # that another address is unreachable keeps nobody waiting
            nobody.bind(("127.0.0.1", 0))
            more = f"{address},127.0.0.1:{nobody.getsockname()[1]}"
            used = shoal(tmp_path, "join", f"shoal://{peer}@{more}/{run}#token={token}")
            assert_three_parts(used, ExitCode.REFUSED, "another identity")
        member = one.nodes[1].status()
        assert member is not None
        elsewhere = f"shoal://{member['peer_id']}@{member['addresses'][0]}/{run}#token={token}"
        assert_three_parts(shoal(tmp_path, "join", elsewhere), ExitCode.REFUSED, "another identity")
        # The same identity from a copied directory, on another port: a second live process.
        copy = tmp_path / "copy"
        copy.mkdir(mode=0o700)
        for name in ("identity", "secrets.json"):
            (copy / name).write_bytes((one.nodes[1].data_dir / name).read_bytes())
            (copy / name).chmod(0o600)
        twin = shoal(tmp_path, "join", one.invite, SHOAL_NODE__DATA_DIR=str(copy))
        assert_three_parts(twin, ExitCode.REFUSED, "identity")
        # The same data directory twice on one machine.
        second = shoal(tmp_path, "up", SHOAL_NODE__DATA_DIR=str(founder.data_dir))
        assert_three_parts(second, ExitCode.LOCKED, str(founder.data_dir))
        assert founder.alive and one.nodes[1].alive


def test_another_base_model_is_refused(tmp_path: Path) -> None:
    """The manifest says `tiny` of one shape; a joiner that points at other weights is told both hashes."""
    shape = "[run.model.tiny]\nhidden = 16\nlayers = 1\nheads = 2\nmlp = 16\n[run.task]\neval_size = 4\n"
    (tmp_path / "run.toml").write_text(f'[run]\nlearner = "grpo"\n{shape}[run.admission]\nmode = "open"\n')
    (tmp_path / "other.toml").write_text("")
    founder = Node(tmp_path, "n0").start(
        "up", "--config", str(tmp_path / "run.toml"), SHOAL_NODE__WAIT_FOR_START="true"
    )
    try:
        deadline = time.monotonic() + 100
        while not (founder.status() or {}).get("ready"):
            assert time.monotonic() < deadline and founder.alive, founder.tail()
            time.sleep(0.2)  # poll interval of a bounded wait
        from shoal.node.rl.config import ModelConfig, TinyConfig
        from shoal.node.rl.export import export_merged
        from shoal.node.rl.models import load_model

        other = load_model(ModelConfig(tiny=TinyConfig(hidden=16, layers=1, heads=2, mlp=16)), seed=99)
        export_merged(other, tmp_path / "other")
        result = shoal(
            tmp_path, "join", founder.ask("invite")["invite"], SHOAL_NODE__MODEL_PATH=str(tmp_path / "other")
        )
        assert_three_parts(result, ExitCode.MISMATCH, "base model", "node.model_path")
    finally:
        founder.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_clean_leave_and_the_restart_goes_on(tmp_path: Path, number: int) -> None:
    with swarm(tmp_path) as one:
        founder, second = one.found(), one.join()
        one.wait(lambda: bool((second.status() or {}).get("member")), "the second is a member")
        one.wait_round(max(one.rounds()) + 2)
        second.signal(number)
        assert second.wait_exit(30) == 0, second.tail()
        peer = second.status()
        assert peer is None
        saved = Checkpoints(second.data_dir / "checkpoints").newest()
        journal = Journal(second.data_dir / "journal")
        last = journal.last_seq
        journal.close()
        assert saved is not None and saved.state.round > 0
        one.wait(
            lambda: any(p["state"] == "left" for p in founder.ask("peers")["peers"]), "the founder heard the goodbye"
        )
        one.wait_round(one.rounds([founder])[0] + 2, [founder])
        second.start("up")
        one.wait(lambda: bool((second.status() or {}).get("member")), "the second is a member again")
        together = max(one.rounds()) + 2
        one.wait_round(together)
        one.assert_same_history(from_round=together)
        one.wait(lambda: (second.status() or {"seq": 0})["seq"] > last, "the second publishes again, under a new dot")
        assert second.ask("book")["exact"]


def test_everything_is_killed_and_the_swarm_forms_again(tmp_path: Path) -> None:
    with swarm(tmp_path) as one:
        one.found()
        one.join()
        one.join()
        one.wait(lambda: len((one.nodes[0].status() or {})["electorate"]) == 3, "three members")
        one.wait_round(max(one.rounds()) + 2)
        before = max(one.rounds())
        # A node keeps its port over restarts; otherwise nobody could be found where the others remember it.
        ports = [str((n.status() or {})["addresses"][0]).rpartition(":")[2] for n in one.nodes]
        for node in one.nodes:
            node.kill()
        for node, port in zip(one.nodes, ports, strict=True):
            node.start("up", SHOAL_NODE__PORT=port)
        one.wait_round(before + 3)
        one.assert_same_history(from_round=before + 2)
        assert all(n.ask("book")["exact"] for n in one.nodes)
        assert all((n.status() or {})["incarnation"] > 0 for n in one.nodes)


def test_a_full_disk_stops_publishing_and_not_training(tmp_path: Path) -> None:
    """The file size limit of the process stands in for a full disk: appends to the journal fail with EFBIG."""
    with swarm(tmp_path, dimension=4000) as one:
        first = one.found()
        one.join()
        second = one.join()
        one.wait(lambda: len((first.status() or {})["electorate"]) == 3, "three members")
        one.wait_round(max(one.rounds()) + 1)
        assert second.process is not None
        import resource

        resource.prlimit(second.process.pid, resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
        one.wait(lambda: bool((second.status() or {}).get("disk_trouble")), "the trouble is shown")
        assert second.alive
        one.wait_round(one.rounds([first])[0] + 3, one.nodes[:2])
        resource.prlimit(second.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        one.wait(lambda: not (second.status() or {"disk_trouble": "x"})["disk_trouble"], "it is mended")
        one.wait(lambda: bool((second.status() or {}).get("member")), "the second is a member again")
        together = max(one.rounds()) + 2
        one.wait_round(together)
        one.assert_same_history(from_round=together)
        assert second.ask("book")["exact"]


def test_a_node_that_leaves_on_a_full_disk_says_what_is_not_saved(tmp_path: Path) -> None:
    """A disk that is full for many rounds is said once each time, and that it is mended; the last one ends in code 8."""
    import resource

    (tmp_path / "run.toml").write_text(TINY + "[run.sync]\ntarget_samples = 8\n")
    node = Node(tmp_path, "node")
    # A pipe, because the limit that stands in for a full disk holds for a log on disk, too.
    node.start("up", "--config", str(tmp_path / "run.toml"), stderr=subprocess.PIPE)
    assert node.process is not None

    def wait_rounds(more: int) -> None:
        target = int((node.status() or {})["round"]) + more
        wait(lambda: int((node.status() or {"round": -1})["round"]) >= target)

    try:
        wait(lambda: int((node.status() or {}).get("round", 0)) >= 1)
        for full in (True, False, True):
            limit = 1024 if full else resource.RLIM_INFINITY
            resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            wait(lambda full=full: bool((node.status() or {"disk_trouble": not full})["disk_trouble"]) == full)
            wait_rounds(4)
        node.signal(signal.SIGTERM)
        _, stderr = node.process.communicate(timeout=30)
    finally:
        if node.alive:
            node.kill()
    text = stderr.decode()
    assert node.process.returncode == ExitCode.DISK, text
    ending = text[text.index("shoal: ") :]
    assert "Left without saving" in ending and os.strerror(errno.EFBIG) in ending and "Traceback" not in text
    for event in ("not saved", "publishing nothing"):
        said = [line for line in text.splitlines() if event in line and "over" not in line]
        assert len(said) == 2, said
        assert len([line for line in text.splitlines() if f"over: {event}" in line]) == 1


def wait(condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # poll interval of a bounded wait


def test_an_invite_leads_a_restart_to_a_member_that_moved(tmp_path: Path) -> None:
    """Both have new ports: nothing that either remembers of the other is right any more."""
    with swarm(tmp_path) as one:
        founder, second = one.found(), one.join()
        one.wait(lambda: bool((second.status() or {}).get("member")), "the second is a member")
        before = (founder.status() or {})["addresses"]
        for node in one.nodes:
            node.kill()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", int(before[0].rpartition(":")[2])))
            founder.start("up")
            one.wait(lambda: bool((founder.status() or {}).get("ready")), "the founder is back")
            assert (founder.status() or {})["addresses"] != before
            second.start("join", founder.ask("invite")["invite"])
            one.wait(lambda: (founder.status() or {}).get("alive") == 2, "the founder sees the second again")
        together = max(one.rounds()) + 2
        one.wait_round(together)
        one.assert_same_history(from_round=together)


NOBODY = f"shoal://{Identity.generate(b'1' * 32).peer_id}@127.0.0.1:1/{'00' * 32}"
# Its imports and the making of its model take seconds, in a thread that nothing can stop.
LOADING = '[run]\nlearner = "grpo"\n[run.admission]\nmode = "open"\n'
BEGUN = {
    "join": (["join", NOBODY], "no peer answered yet"),
    "up": (["up", "--config", "run.toml"], "loading the model"),
    "demo": (["demo", "--dir", "demo"], "warming up"),
    "sim": (["sim", "lan", "--seeds", "0..99", "--until", "3"], "seed 0: ok"),
}


@pytest.mark.parametrize(
    ("command", "number"),
    [("sim", signal.SIGINT), *((c, n) for c in ("join", "up", "demo") for n in (signal.SIGINT, signal.SIGTERM))],
)
def test_a_command_that_is_ended_before_it_is_done_is_quiet_and_leaves_nothing_running(
    tmp_path: Path, command: str, number: int
) -> None:
    arguments, begun = BEGUN[command]
    (tmp_path / "run.toml").write_text(LOADING)
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal.node.cli", *arguments],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "SHOAL_NODE__DATA_DIR": "node",
             "SHOAL_NODE__LISTEN": "127.0.0.1", "SHOAL_NODE__PORT": "0", "SHOAL_NODE__LAN_DISCOVERY": "false"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = ""
        while begun not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        process.send_signal(number)
        said += process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said and "ignored" not in said
    assert not running_in(tmp_path)


def running_in(folder: Path) -> list[str]:
    """Commands of processes that work in this folder or were told of it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if str(folder) in command or (entry / "cwd").resolve().is_relative_to(folder):
                found.append(command)
        except OSError:
            continue  # ended meanwhile, or another user's
    return found


@pytest.mark.parametrize("mode", ["ring", "gossip"])
def test_a_node_that_has_not_begun_to_train_leaves_at_once(tmp_path: Path, mode: str) -> None:
    template = QUADRATIC.replace("[run.sync]", f'[run.sync]\nmode = "{mode}"')
    with swarm(tmp_path, template) as one:
        founder = one.found(SHOAL_NODE__WAIT_FOR_START="true", SHOAL_NODE__LEAVE_GRACE_SECONDS="3600")
        founder.signal(signal.SIGTERM)
        assert founder.wait_exit(30) == 0, founder.tail()


def test_a_damaged_journal_or_commit_file_is_said_and_the_node_goes_on(tmp_path: Path) -> None:
    with swarm(tmp_path, QUADRATIC) as s:
        node = s.found()
        s.wait_round(2)
        node.kill()
        for path in (node.data_dir / "journal" / "journal", node.data_dir / "commits"):
            whole = bytearray(path.read_bytes())
            whole[10] ^= 0x55
            path.write_bytes(whole)
        node.start("up")
        s.wait(lambda: bool((node.status() or {}).get("ready")), "it is ready again")
        warnings = (node.status() or {})["warnings"]
        assert sum("no whole record; they were cut off" in text for text in warnings) == 2
        s.wait_round(3)
