"""Real node processes over real sockets, for tests: start, ask, hold in a phase, kill, freeze, wait for a condition.

Waits poll a condition under a deadline; nothing sleeps in the hope that something has happened.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.node.observe.control import call_blocking
from shoal.node.store.metrics import read_metrics
from shoal.protocol.errors import ShoalError

DEADLINE_S = 60.0

QUADRATIC = """
[run]
name = "e2e"
learner = "quadratic"
seed = 3
compression = "{compression}"
[run.quadratic]
dimension = {dimension}
step_seconds = 0.02
[run.sync]
target_samples = {target_samples}
round_seconds_max = {round_seconds}
rounds_max = {rounds}
exchange = "{exchange}"
[run.admission]
mode = "{admission}"
[run.membership]
preset = "local"
"""

LANGUAGE_MODEL = """
[run]
name = "e2e"
learner = "grpo"
seed = 3
compression = "short"
[run.model.tiny]
hidden = 32
layers = 2
heads = 2
mlp = 64
[run.task]
options = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
eval_size = 4
[run.grpo]
num_generations = 8
prompts_per_step = 8
max_completion_length = 3
[run.warmup]
steps = 120
seconds_max = 20.0
learning_rate = 3e-3
[run.sync]
target_samples = {target_samples}
round_seconds_max = {round_seconds}
rounds_max = {rounds}
[run.admission]
mode = "{admission}"
[run.membership]
preset = "local"
"""


class Node:
    """One `shoal` daemon in its own process and data directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.data_dir = directory / name
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self.process: subprocess.Popen[bytes] | None = None
        self.output = directory / f"{name}.out"

    def start(self, *arguments: str, stderr: int | None = None, **environment: str) -> Node:
        """`stderr`: as for Popen; None: into the file `output`."""
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SHOAL_NODE__DATA_DIR": str(self.data_dir),
            "SHOAL_NODE__LISTEN": "127.0.0.1",
            "SHOAL_NODE__PORT": "0",
            "SHOAL_NODE__LAN_DISCOVERY": "false",
            "SHOAL_NODE__EXIT_WHEN_FINISHED": "false",
            **environment,
        }
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shoal.node.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output if stderr is None else stderr,
                env=env,
                start_new_session=True,
            )
        return self

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        return call_blocking(self.data_dir / "control.sock", method, params, timeout_s=5.0)

    def status(self) -> dict[str, Any] | None:
        """The status, or None while the node does not answer."""
        try:
            return self.ask("status")
        except (ShoalError, OSError, TimeoutError):
            return None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(10)

    def strike(self, how: str) -> None:
        """ "kill" it, or "freeze" it."""
        if how == "kill":
            self.kill()
        else:
            self.signal(signal.SIGSTOP)

    def bring_back(self, how: str, *arguments: str) -> None:
        """After `strike` with the same `how`: start it again, with `up` unless told otherwise, or let it go on."""
        self.release()
        if how == "kill":
            self.start(*(arguments or ("up",)))
        else:
            self.signal(signal.SIGCONT)

    def wait_exit(self, timeout_s: float = DEADLINE_S) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def holding(self) -> str | None:
        """The phase in which a test option holds this node, or None."""
        try:
            return (self.data_dir / "holding").read_text()
        except FileNotFoundError:
            return None

    def release(self) -> None:
        (self.data_dir / "holding").unlink(missing_ok=True)

    def log(self) -> list[dict[str, Any]]:
        """The node's structured log."""
        records = []
        for path in sorted(self.data_dir.glob("log*.jsonl*")):
            for line in path.read_text(errors="replace").splitlines():
                try:
                    records.append(json.loads(line))
                except ValueError:
                    continue
        return records

    def tail(self) -> str:
        return self.output.read_text(errors="replace")[-3000:] if self.output.exists() else ""


class Swarm:
    """Nodes of one run."""

    def __init__(self, directory: Path, template: str = QUADRATIC, **settings: Any) -> None:
        self.directory = directory
        defaults = {
            "dimension": 64,
            "target_samples": 48,
            "round_seconds": 5,
            "rounds": 0,
            "exchange": "auto",
            "admission": "open",
            "compression": "short",
        }
        self.config = directory / "run.toml"
        self.config.write_text(template.format(**{**defaults, **settings}))
        self.nodes: list[Node] = []
        self.invite = ""

    def found(self, **environment: str) -> Node:
        node = Node(self.directory, "n0").start("up", "--config", str(self.config), **environment)
        self.nodes.append(node)
        self.wait(lambda: bool((node.status() or {}).get("ready")), "the founder is ready")
        self.invite = node.ask("invite")["invite"]
        return node

    def join(self, *, wait: bool = True, **environment: str) -> Node:
        node = Node(self.directory, f"n{len(self.nodes)}").start("join", self.invite, **environment)
        self.nodes.append(node)
        if wait:
            self.wait(lambda: bool((node.status() or {}).get("ready")), f"{node.name} is ready")
        return node

    def begin(self) -> None:
        """Let every node train; founders with `node.wait_for_start` wait for this."""
        for node in self.nodes:
            node.ask("start")

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s:.0f} s: {what}\n{self.describe()}")
            time.sleep(0.05)  # poll interval of a bounded wait

    def rounds(self, nodes: list[Node] | None = None) -> list[int]:
        return [int((n.status() or {}).get("saved_round", -1)) for n in (nodes or self.nodes)]

    def wait_round(self, round_: int, nodes: list[Node] | None = None, timeout_s: float = DEADLINE_S) -> None:
        self.wait(lambda: min(self.rounds(nodes)) >= round_, f"round {round_}", timeout_s)

    def wait_equal(self, nodes: list[Node] | None = None, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        """Wait until all nodes show one version and one state hash; returns a status."""
        chosen = nodes or self.nodes
        seen: list[dict[str, Any]] = []

        def same() -> bool:
            seen[:] = [s for s in (n.status() for n in chosen) if s]
            keys = {(s["round"], s["lineage"], s["state_hash"], s["vector_hash"]) for s in seen}
            return len(seen) == len(chosen) and len(keys) == 1

        self.wait(same, "equal versions and state hashes", timeout_s)
        return seen[0]

    def assert_same_history(self, *, from_round: int, nodes: list[Node] | None = None) -> None:
        """Every round that two nodes have on record left both with the same bits, `from_round` and later on all of them."""
        chosen = nodes or self.nodes
        histories: list[dict[int, str]] = []

        def together() -> bool:
            # A downloaded state leaves no record of its round, so the first common record may come a little later.
            histories[:] = [{r["round"]: r["state_hash"] for r in read_metrics(n.data_dir)} for n in chosen]
            return any(round_ >= from_round for round_ in set.intersection(*(set(h) for h in histories)))

        self.wait(together, f"a common round from {from_round} on")
        for round_ in set.union(*(set(h) for h in histories)):
            seen = {h[round_] for h in histories if round_ in h}
            assert len(seen) == 1, f"round {round_} has {len(seen)} state hashes: {seen}"

    def describe(self) -> str:
        return "\n".join(f"--- {n.name} {n.status()}\n{n.tail()}" for n in self.nodes)

    def close(self) -> None:
        for node in self.nodes:
            if node.alive and node.process is not None:
                node.signal(signal.SIGCONT)
                node.process.kill()
                node.process.wait(10)


@contextmanager
def swarm(directory: Path, template: str = QUADRATIC, **settings: Any) -> Iterator[Swarm]:
    """A swarm whose processes end with the block, however it ends."""
    one = Swarm(directory, template, **settings)
    try:
        yield one
    finally:
        one.close()
