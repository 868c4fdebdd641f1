"""Runs the same task with one peer and with several, until all peers of a run together have scored so many completions.

Each peer is a `shoal` process of its own on this machine. Every run is evaluated before it begins and at its end, on the
same held-out prompts; compare.json and compare.png hold the curves over completions scored.

    python examples/smollm2/compare.py --config examples/smollm2/run.toml --peers 1 2 --samples 5000 --work /tmp/compare \\
                                       --out examples/smollm2 [--seeds 0 1]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tomllib
from model_path import model_path

from shoal.node.observe.control import call_blocking
from shoal.node.store.metrics import read_metrics
from shoal.protocol.errors import ShoalError

POLL_SECONDS = 1.0


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """One peer in a process of its own; it trains when it is told to."""
    folder.mkdir(parents=True)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SHOAL_NODE__DATA_DIR": str(folder),
        "SHOAL_NODE__MODEL_PATH": os.environ.get("SHOAL_NODE__MODEL_PATH") or str(model_path()),
        "SHOAL_NODE__LISTEN": "127.0.0.1",
        "SHOAL_NODE__PORT": "0",
        "SHOAL_NODE__LAN_DISCOVERY": "false",
        "SHOAL_NODE__THREADS": "1",
        "SHOAL_NODE__WAIT_FOR_START": "true",
    }
    with (folder / "output").open("wb") as output:
        command = [sys.executable, "-m", "shoal.node.cli", *arguments]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)


def ask(folder: Path, method: str) -> dict[str, Any]:
    """A daemon's answer; empty while it does not listen."""
    try:
        return call_blocking(folder / "control.sock", method, {}, timeout_s=30.0)
    except (ShoalError, OSError, TimeoutError):
        return {}


def steps_done(folders: list[Path]) -> int:
    """Inner steps of all peers together in committed rounds, those without any signal included."""
    return sum(record.get("steps", 0) for folder in folders for record in read_metrics(folder))


def run(config: Path, peers: int, samples: int, seed: int, work: Path) -> dict[str, Any]:
    """One run to its end."""
    grpo = tomllib.loads(config.read_text())["run"]["grpo"]
    per_step = grpo["num_generations"] * grpo["prompts_per_step"]
    shutil.rmtree(work, ignore_errors=True)
    folders, processes = [work / f"peer{i}" for i in range(peers)], []
    options = ["--set", f"run.seed={seed}", "--set", "run.sync.rounds_max=0"]
    try:
        processes.append(start(folders[0], "up", "--config", str(config), *options))
        wait(lambda: ask(folders[0], "status").get("ready"), processes)
        for folder in folders[1:]:
            processes.append(start(folder, "join", ask(folders[0], "invite")["invite"]))
            wait(lambda folder=folder: ask(folder, "status").get("ready"), processes)
        begun = time.monotonic()
        for folder in folders:
            ask(folder, "start")
        wait(lambda: steps_done(folders) * per_step >= samples, processes)
        seconds = time.monotonic() - begun
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(120)
    finally:
        for process in processes:
            process.kill()
    return {
        "peers": peers,
        "seed": seed,
        "seconds": round(seconds),
        **curve(folders, per_step),
        **evaluations(folders[0]),
    }


def wait(condition: Any, processes: list[subprocess.Popen[bytes]]) -> None:
    while not condition():
        if any(process.poll() is not None for process in processes):
            raise SystemExit("a peer has ended; see the file `output` in its folder")
        time.sleep(POLL_SECONDS)


def curve(folders: list[Path], per_step: int) -> dict[str, Any]:
    """By round: completions scored by all peers up to its end, and their mean reward in it."""
    rounds: dict[int, list[tuple[int, float]]] = {}
    for folder in folders:
        for record in read_metrics(folder):
            if record.get("steps"):
                rounds.setdefault(record["round"], []).append((record["steps"], record["reward"]))
    points, done = [], 0
    for number, rows in sorted(rounds.items()):
        steps = sum(n for n, _ in rows)
        done += steps
        reward = sum(n * reward for n, reward in rows) / steps
        points.append({"round": number, "samples": done * per_step, "reward": round(reward, 4)})
    return {"steps": done, "samples": done * per_step, "curve": points}


def evaluations(folder: Path) -> dict[str, Any]:
    """Held-out figures of the first state and of the last one."""
    first = next(record for record in read_metrics(folder) if "eval_accuracy" in record)
    command = [sys.executable, "-m", "shoal.node.cli", "eval", "--data-dir", str(folder), "--json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SHOAL_NODE__THREADS": "1"}
    env.setdefault("SHOAL_NODE__MODEL_PATH", str(model_path()))
    last = json.loads(subprocess.run(command, env=env, capture_output=True, check=True).stdout.splitlines()[-1])
    return {
        "accuracy": [first["eval_accuracy"], last["accuracy"]],
        "sampled": [first["eval_reward"], last["reward"]],
        "held_out": int(first["eval_n"]),
    }


def draw(runs: list[dict[str, Any]], path: Path, title: str) -> None:
    """Curves over completions scored, one colour for each number of peers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), dpi=130)
    labelled = set()
    for row in runs:
        label = f"{row['peers']} peer{'s' * (row['peers'] > 1)}"
        axes.plot(
            [p["samples"] for p in row["curve"]],
            [p["reward"] for p in row["curve"]],
            color=f"C{row['peers'] - 1}",
            marker="o",
            ms=3,
            label=None if label in labelled else label,
        )
        labelled.add(label)
    axes.set_xlabel("completions scored by all peers together")
    axes.set_ylabel("mean reward of sampled completions")
    axes.set_title(title)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--peers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--samples", type=int, default=5000, help="of all peers together, in each run")
    parser.add_argument("--work", type=Path, required=True, help="folder for the peers' data; emptied before each run")
    parser.add_argument("--name", default="compare", help="of the JSON and PNG file")
    parser.add_argument("--title", default="SmolLM2-135M + LoRA")
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    path = options.out / f"{options.name}.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    for seed in options.seeds:
        for peers in options.peers:
            if any((row["peers"], row["seed"]) == (peers, seed) for row in runs):
                continue  # an earlier call has done it
            row = run(options.config, peers, options.samples, seed, options.work / f"{peers}-{seed}")
            runs.append(row)
            path.write_text(json.dumps({"config": options.config.name, "runs": runs}, indent=1) + "\n")
            print(json.dumps({k: v for k, v in row.items() if k != "curve"}), flush=True)
    draw(runs, path.with_suffix(".png"), options.title)


if __name__ == "__main__":
    main()
