"""`shoal demo`: a whole swarm on this machine, with real processes, real sockets and one real death.

Covers: writing the configuration, starting the peers, printing the reward as it goes, killing one peer with SIGKILL in the
middle of an exchange and starting it again, comparing all states at the end. Does not cover: any networking or training of
its own; everything it knows it reads from the peers' control sockets and metrics files, as any user could.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..aggregation.compress import parse_compression
from ..protocol.errors import ExitCode, ShoalError
from .commands.demo_options import DemoOptions
from .observe.control import call
from .rl.config import demo_defaults
from .store.metrics import read_metrics

POLL_SECONDS = 0.25
# No phase below has a fixed budget while something moves; these bound the time in which *nothing* moves.
STALL_SECONDS = 180.0
LEAVE_SECONDS = 30.0


@dataclass
class DemoPeer:
    """One child process and what was last heard of it."""

    index: int
    data_dir: Path
    process: asyncio.subprocess.Process | None = None
    status: dict[str, Any] = field(default_factory=dict)
    peer_id: str = ""

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def refresh(self) -> bool:
        """Ask for the status; False when the peer does not answer (yet)."""
        try:
            self.status = await call(self.data_dir / "control.sock", "status", {}, timeout_s=5.0)
        except (ShoalError, OSError, asyncio.TimeoutError):
            return False
        self.peer_id = self.status.get("peer_id", self.peer_id)
        return True


class Demo:
    """Runs the peers of one demonstration; `run` returns the summary that `--json` prints."""

    def __init__(self, options: DemoOptions, directory: Path) -> None:
        self.options = options
        self.directory = directory
        self.defaults = demo_defaults()
        self.rounds: int = options.rounds or self.defaults["rounds"]["count"]
        self.peers = [DemoPeer(i, directory / f"peer{i}") for i in range(options.peers)]
        self.printed_round = 0
        self.killed_round = 0
        self.kill_round = max(2, self.rounds // 3) if options.kill and options.peers > 2 and self.rounds > 3 else 0
        self.moved_at = time.monotonic()
        self.moved_what: object = None

    # ------------------------------------------------------------------------------------------------ processes

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _config_text(self) -> str:
        # Whatever the number of rounds, every peer makes about the same number of samples in all.
        each = self.defaults["rounds"]["samples_per_peer"]
        together = {"ring": self.options.peers, "gossip": 1, "hybrid": min(self._ring_size_max, self.options.peers)}[
            self.options.mode
        ]
        sync: dict[str, object] = {
            "mode": self.options.mode,
            "rounds_max": self.rounds,
            "target_samples": max(1, together * each // self.rounds),
        }
        if self.options.mode == "hybrid":
            sync["ring_size_max"] = self._ring_size_max
        tables = {k: v for k, v in self.defaults.items() if k != "rounds"}
        tables |= {"sync": sync, "membership": {"preset": "local"}}
        top = {"seed": self.options.seed, "name": "demo", "compression": self.compression}
        lines = ["[run]", *(f"{k} = {toml_value(v)}" for k, v in top.items())]
        for name, table in tables.items():
            lines += [f"[run.{name}]", *(f"{k} = {toml_value(v)}" for k, v in table.items())]
        return "\n".join(lines) + "\n"

    @property
    def _ring_size_max(self) -> int:
        """In hybrid mode: two rings, however few the peers."""
        return max(2, -(-self.options.peers // 2))

    @property
    def gossips(self) -> bool:
        """Then there are no rounds of all: the story goes by the number of updates that each peer has published."""
        return self.options.mode != "ring"

    @property
    def _word(self) -> str:
        return "update" if self.options.mode == "gossip" else "round"

    def _done(self, peer: DemoPeer) -> int:
        """Rounds, or own updates, that a peer has on disk."""
        if self.options.mode == "hybrid":  # an update is published in the middle of its round
            return max((int(r.get("published", 0)) for r in read_metrics(peer.data_dir)), default=0)
        return int(peer.status.get("published" if self.gossips else "saved_round") or 0)

    def _records(self) -> dict[str, list[dict[str, Any]]]:
        """The history of each peer, with "step": the round of a record, or which of its own updates it tells of."""
        step = "published" if self.gossips else "round"
        return {p.peer_id: [{**r, "step": r[step]} for r in read_metrics(p.data_dir) if step in r] for p in self.peers}

    def _reward(self, records: list[dict[str, Any]], step: int) -> tuple[float, int]:
        """Mean reward of all samples of a step, and their number."""
        rewards = [(r["reward"], r["samples"]) for r in records if r["step"] == step and r.get("samples")]
        samples = sum(n for _, n in rewards)
        return (sum(x * n for x, n in rewards) / samples if samples else float("nan")), samples

    @property
    def compression(self) -> str:
        return self.options.compression or "demo"

    async def _start(self, peer: DemoPeer, arguments: list[str], **extra: str) -> None:
        peer.data_dir.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SHOAL_NODE__DATA_DIR": str(peer.data_dir),
            "SHOAL_NODE__LISTEN": "127.0.0.1",
            "SHOAL_NODE__PORT": "0",
            "SHOAL_NODE__ANNOUNCE": "",
            "SHOAL_NODE__THREADS": "1",
            "SHOAL_NODE__LAN_DISCOVERY": "false",
            "SHOAL_NODE__EXIT_WHEN_FINISHED": "false",
            "SHOAL_NODE__WAIT_FOR_START": "true",
            # The founder measures for all: the state is the same on every peer.
            "SHOAL_NODE__EVAL_EVERY_ROUNDS": "0" if peer.index == 0 else "-1",
            **extra,
        }
        with open(peer.data_dir / "output.log", "ab") as output:
            peer.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "shoal.node.cli", *arguments,
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
                start_new_session=True,
            )  # fmt: skip

    async def _founder(self) -> None:
        config = self.directory / "demo.toml"
        config.write_text(self._config_text())
        await self._start(self.peers[0], ["up", "--config", str(config)])
        self._say("warming up: a short supervised stage, so that reinforcement learning has answers to reward")
        while True:
            await self._watch()
            if self.peers[0].status.get("ready"):
                return

    async def _invite(self) -> str:
        """An invite of its own for each newcomer: a token belongs to the first peer that uses it."""
        reply = await call(self.peers[0].data_dir / "control.sock", "invite", {}, timeout_s=5.0)
        return str(reply["invite"])

    async def _watch(self) -> None:
        """One poll of everybody. Raises ShoalError when a peer ended by itself or nothing moves any more."""
        await asyncio.sleep(POLL_SECONDS)
        running = [p for p in self.peers if p.running]
        await asyncio.gather(*(p.refresh() for p in running))
        for peer in self.peers:
            if peer.process is not None and not peer.running and peer.process.returncode != -signal.SIGKILL:
                tail = (peer.data_dir / "output.log").read_text(errors="replace")[-1500:]
                raise ShoalError(
                    f"peer {peer.index} ended by itself",
                    values=f"exit code {peer.process.returncode}, expected it to run; its last output:\n{tail}",
                    todo=f"read {peer.data_dir}/output.log",
                )
        told = ("round", "phase", "samples", "vector_hash")
        moved = [(p.index, *(p.status.get(name) for name in told)) for p in running]
        if moved != self.moved_what:
            self.moved_what, self.moved_at = moved, time.monotonic()
        elif time.monotonic() - self.moved_at > STALL_SECONDS:
            raise ShoalError(
                "the demo stalled",
                values=f"no peer reported progress for {STALL_SECONDS:.0f} s; last seen {moved}",
                todo=f"read the logs below {self.directory}",
            )
        self._print_rounds()

    def _print_rounds(self) -> None:
        alive = [p for p in self.peers if p.running and p.status]
        done = min((self._done(p) for p in alive), default=0)
        if done <= self.printed_round:
            return
        everything = [r for rs in self._records().values() for r in rs]
        for round_ in range(self.printed_round + 1, done + 1):
            reward, samples = self._reward(everything, round_)
            records = [r for r in everything if r["step"] == round_]
            updates = len(records) if self.gossips else max((int(r.get("updates", 0)) for r in records), default=0)
            bar = "█" * round(30 * max(0.0, reward)) if reward == reward else ""
            self._say(
                f"{self._word} {round_:3d}/{self.rounds}  reward {reward:5.3f} {bar:<30}"
                f"  {updates} updates, {samples} samples"
            )
            self.printed_round = round_

    # ------------------------------------------------------------------------------------------------ the story

    async def run(self) -> dict[str, Any]:
        await self._founder()
        self._say(f"peer 0 is up: {self.peers[0].peer_id}")
        victim = self.peers[-1]
        for peer in self.peers[1:]:
            hold = (
                {"SHOAL_NODE__TEST_HOLD": f"exchanging@{self.kill_round}"} if self.kill_round and peer is victim else {}
            )
            await self._start(peer, ["join", await self._invite()], **hold)
        while not all(p.status.get("ready") for p in self.peers):
            await self._watch()
        self._say(f"{len(self.peers)} peers are ready; training starts")
        if self.options.kill and not self.kill_round:
            self._say("nobody will be killed: that takes at least 3 peers and 4 rounds")
        started = time.monotonic()
        for peer in self.peers:
            await call(peer.data_dir / "control.sock", "start", {}, timeout_s=10.0)
        restarted = False
        while not self._over(killing=bool(self.kill_round) and not restarted):
            await self._watch()
            if self.kill_round and not self.killed_round and (victim.data_dir / "holding").exists():
                self.killed_round = self.kill_round
                assert victim.process is not None
                victim.process.send_signal(signal.SIGKILL)
                await victim.process.wait()
                victim.status = {}
                when = f"the exchange of round {self.kill_round}"
                if self.gossips:
                    when = f"an exchange, near its {self._word} {self.kill_round}"
                self._say(f"killed peer {victim.index} in the middle of {when}")
            lead = max(self._done(p) for p in self.peers)
            if self.killed_round and not restarted and lead >= self.killed_round + 1:
                restarted = True
                (victim.data_dir / "holding").unlink(missing_ok=True)
                await self._start(victim, ["up"], SHOAL_NODE__WAIT_FOR_START="false")
                self._say(f"started peer {victim.index} again, from its own disk")
        return await self._summary(time.monotonic() - started)

    def _over(self, *, killing: bool) -> bool:
        """Whether all have reached the last round, and, where nothing closes a round, have the same updates."""
        running = [p for p in self.peers if p.running]
        if not all(p.status.get("finished") for p in running):
            return False
        return not self.gossips or (not killing and len({p.status["vector_hash"] for p in running}) == 1)

    async def _summary(self, seconds: float) -> dict[str, Any]:
        for peer in self.peers:
            await peer.refresh()
        records = self._records()
        everything = [r for rs in records.values() for r in rs]
        hashes = {p.peer_id: p.status["state_hash"] for p in self.peers}
        vectors = {p.status["vector_hash"] for p in self.peers}
        accuracy = [r["eval_accuracy"] for r in read_metrics(self.peers[0].data_dir) if "eval_accuracy" in r]
        if self.gossips:
            accuracy.append(await self._evaluate())
        d = int(self.peers[0].status["parameters"])
        totals = {name: sum(int(p.status["bytes"][name]) for p in self.peers) for name in ("round", "state", "control")}
        # Each round's dense cost is for the peers that took part in it; the rejoined peer's missed rounds do not count.
        rosters = {r["round"]: int(r["roster"]) for r in everything if "roster" in r}
        if self.gossips:  # as many updates as there are peers make one round
            published = sum(self._done(p) for p in self.peers)
            rosters = dict.fromkeys(range(round(published / len(self.peers))), len(self.peers))
        return {
            "peers": len(self.peers),
            "rounds": self.rounds,
            "mode": self.options.mode,
            "compression": self.compression,
            "parameters": d,
            "reward_first": self._reward(everything, min(r["step"] for r in everything if r.get("samples")))[0],
            "reward_last": self._reward(everything, self.rounds)[0],
            "accuracy_first": accuracy[0] if accuracy else None,
            "accuracy_last": accuracy[-1] if accuracy else None,
            "state_hashes": hashes,
            "identical": len(set(hashes.values())) == 1 and len(vectors) == 1,
            "killed": self.killed_round > 0,
            "rejoined": self.killed_round > 0 and bool(self.peers[-1].status.get("finished")),
            "bytes_sent": totals["round"] + totals["control"],
            "bytes_state": totals["state"],
            "bytes_dense": sum(2 * (n - 1) * 4 * d for n in rosters.values()),
            "warmup_seconds": self.peers[0].status.get("warmup_seconds", 0.0),
            "seconds": round(seconds, 1),
        }

    async def _evaluate(self) -> float:
        """Held-out accuracy of the state that all have now: the first peer leaves with it and `shoal eval` measures it."""
        peer = self.peers[0]
        assert peer.process is not None
        peer.process.terminate()
        await asyncio.wait_for(peer.process.wait(), LEAVE_SECONDS)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "shoal.node.cli", "eval", "--data-dir", str(peer.data_dir), "--json",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        output, _ = await asyncio.wait_for(process.communicate(), STALL_SECONDS)
        return float(json.loads(output.splitlines()[-1])["accuracy"])

    async def close(self) -> None:
        """End every child: a clean leave first, then SIGKILL for whatever is left."""
        running = [p for p in self.peers if p.running]
        for peer in running:
            assert peer.process is not None
            peer.process.terminate()
        waits = [asyncio.wait_for(p.process.wait(), LEAVE_SECONDS) for p in running if p.process is not None]
        await asyncio.gather(*waits, return_exceptions=True)
        for peer in running:
            if peer.running and peer.process is not None:
                peer.process.kill()
                await peer.process.wait()


def toml_value(value: object) -> str:
    """A TOML literal for the plain values of a configuration table."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {toml_value(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)


async def _run(options: DemoOptions, directory: Path) -> tuple[dict[str, Any], int]:
    demo = Demo(options, directory)
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(demo.run())
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, task.cancel)
    try:
        summary = await task
        return summary, ExitCode.OK if summary["identical"] else ExitCode.FAILED
    finally:
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(name)
        await demo.close()


def run_demo(options: DemoOptions) -> int:
    """Run the demonstration; returns the exit code. Prints one JSON line on stdout with `--json`.

    Raises:
        ShoalError: CONFIG for an unknown compression and FAILED for a folder in use, before anything is started or
            written; FAILED when a peer ends by itself or nothing moves any more.
        KeyboardInterrupt: it was ended by SIGINT or SIGTERM, and all peers have left.
    """
    if options.compression is not None:
        parse_compression(options.compression)
    if options.directory is not None and options.directory.exists() and os.listdir(options.directory):
        raise ShoalError(
            f"{options.directory} is in the way",
            values="found a folder that is not empty, expected a new or empty one",
            todo="Choose another --dir, or remove this one: the demonstration would go on with the peers in it.",
        )
    kept = options.directory is not None or options.keep
    directory = Path(options.directory or tempfile.mkdtemp(prefix="shoal-demo-"))
    directory.mkdir(parents=True, exist_ok=True)
    done = False
    try:
        summary, code = asyncio.run(_run(options, directory))
        done = code == ExitCode.OK
    except asyncio.CancelledError:
        print("stopped; every peer was asked to leave", file=sys.stderr)
        raise KeyboardInterrupt from None
    finally:
        if done and not kept:
            shutil.rmtree(directory, ignore_errors=True)
        else:
            print(f"logs and states are in {directory}", file=sys.stderr)
    if options.json:
        print(json.dumps(summary))
    else:
        print(describe(summary))
    return int(code)


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def describe(summary: dict[str, Any]) -> str:
    """The summary for a person."""
    ratio = summary["bytes_dense"] / max(1, summary["bytes_sent"])
    same = "identical on all peers" if summary["identical"] else "DIFFERENT"
    accuracy = ""
    if summary["accuracy_last"] is not None:
        accuracy = f"; held-out greedy accuracy {summary['accuracy_first']:.2f} -> {summary['accuracy_last']:.2f}"
    return "\n".join(
        [
            f"{summary['rounds']} rounds of {summary['peers']} peers in {summary['seconds']:.0f} s"
            f" (after {summary['warmup_seconds']:.0f} s of supervised warm-up)",
            f"reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f}{accuracy}",
            f"version vectors and state hashes: {same} ({next(iter(summary['state_hashes'].values()))[:16]}…)",
            f"killed in the middle of an exchange: {_yes(summary['killed'])};"
            f" came back and caught up: {_yes(summary['rejoined'])}",
            f"sent {summary['bytes_sent']:,} bytes in rounds; a dense fp32 ring would have sent"
            f" {summary['bytes_dense']:,} ({ratio:.0f} x); state downloads {summary['bytes_state']:,} bytes",
        ]
    )
