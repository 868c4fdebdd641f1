"""Does a long run grow? Resident memory, open files and threads of a process that trains, over its inner steps.

"learner" is the language-model learner by itself, driven as a node drives it: rounds of ten steps, the merged parameters
loaded after each, a snapshot every round, an evaluation every tenth; rewards are the task's and a reward file's, in its
worker process. "node" is a whole `shoal` daemon with the same learner, alone in its run, which also journals, commits and
saves every round.

    python benchmarks/soak.py [--what learner node] [--steps 2000] [--out docs/soak]

Writes soak-WHAT.json and soak-WHAT.png. Growth is the mean of the last tenth less that of the tenth behind the first
fifth, when everything has been allocated once. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROUND_STEPS = 10
EVALUATE_ROUNDS = 10
SAMPLES_MAX = 400  # measurements of a run
POLL_SECONDS = 0.2

REWARDS = """
async def letters(completions, **kwargs):
    kwargs["log_metric"]("length", sum(map(len, completions)) / len(completions))
    return [0.1 * len(set(text)) for text in completions]
"""
TABLES: dict[str, dict[str, Any]] = {
    "model": {"tiny": {"hidden": 32, "layers": 2, "heads": 2, "mlp": 64}},
    "task": {"options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, "eval_size": 16},
    "rewards": {"functions": ["task", "letters"]},
    "grpo": {"num_generations": 8, "prompts_per_step": 4, "max_completion_length": 4, "learning_rate": 3e-4},
    "warmup": {"steps": 100, "learning_rate": 3e-3},
}


def measure(pid: int) -> dict[str, float]:
    """Resident memory in MiB, open files and threads of a process. Raises OSError when it has ended."""
    status = Path(f"/proc/{pid}/status").read_text()

    def field(name: str) -> int:
        match = re.search(rf"{name}:\s+(\d+)", status)
        assert match, f"no {name} in /proc/{pid}/status"
        return int(match[1])

    files = len(os.listdir(f"/proc/{pid}/fd"))
    return {"rss_mib": round(field("VmRSS") / 1024, 2), "files": files, "threads": field("Threads")}


def learner_steps(steps: int, folder: Path) -> Iterator[int]:
    """Run the learner in this process; yields the number of steps done after each one."""
    from shoal.node.rl.build import build_learner
    from shoal.node.rl.config import GrpoConfig, ModelConfig, RewardsConfig, TaskConfig, WarmupConfig

    file = folder / "rewards.py"
    file.write_text(REWARDS)
    learner = build_learner(
        model=ModelConfig(**TABLES["model"]),
        task=TaskConfig(**TABLES["task"]),
        rewards=RewardsConfig(**TABLES["rewards"]),
        grpo=GrpoConfig(**TABLES["grpo"]),
        warmup=WarmupConfig(**TABLES["warmup"]),
        run_seed=0,
        peer_seed=1,
        rewards_file=file,
        device="cpu",
        threads=1,
    )
    try:
        learner.load(learner.initial())
        learner.warmup()
        theta = learner.theta()
        for step in range(steps):
            round_, within = divmod(step, ROUND_STEPS)
            if within == 0:
                learner.load(theta)
                if round_ % EVALUATE_ROUNDS == 0:
                    learner.evaluate()
                learner.begin(round_)
            learner.step()
            if within == ROUND_STEPS - 1:
                theta = theta - learner.finish().delta
                learner.snapshot()
            yield step + 1
    finally:
        learner.close()


def soak_learner(steps: int) -> list[dict[str, float]]:
    """One row a measurement: step and what `measure` gives."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        every = max(1, steps // SAMPLES_MAX)
        for step in learner_steps(steps, Path(folder)):
            if step % every == 0:
                rows.append({"step": step, **measure(os.getpid())})
    return rows


def soak_node(steps: int) -> list[dict[str, float]]:
    """The same for a daemon in a process of its own, asked from outside; a step is one that a committed round holds."""
    from shoal.node.store.metrics import read_metrics

    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rewards.py").write_text(REWARDS)
        samples = ROUND_STEPS * TABLES["grpo"]["num_generations"] * TABLES["grpo"]["prompts_per_step"]
        (folder / "run.toml").write_text(_toml({**TABLES, "sync": {"target_samples": samples}}))
        command = [sys.executable, "-m", "shoal.node.cli", "up", "--config", str(folder / "run.toml")]
        command += ["--data-dir", str(folder / "data"), "--port", "0", "--set", "node.lan_discovery=false"]
        command += ["--set", "node.listen=127.0.0.1", "--set", "node.threads=1", "--set", "node.log_level=warning"]
        command += ["--set", f"node.eval_every_rounds={EVALUATE_ROUNDS}"]
        command += ["--set", f"node.rewards_file={folder / 'rewards.py'}"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            while not rows or rows[-1]["step"] < steps:
                if process.poll() is not None:
                    raise SystemExit(f"the node has ended with status {process.returncode}")
                done = sum(record.get("steps", 0) for record in read_metrics(folder / "data"))
                if done > (rows[-1]["step"] if rows else 0):
                    rows.append({"step": done, **measure(process.pid)})
                time.sleep(POLL_SECONDS)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    return rows


def _toml(run: dict[str, dict[str, Any]]) -> str:
    def value(v: Any) -> str:
        if isinstance(v, dict):
            return "{ " + ", ".join(f"{k} = {value(x)}" for k, x in v.items()) + " }"
        return json.dumps(v)

    tables = [
        f"[run.{name}]\n" + "".join(f"{k} = {value(v)}\n" for k, v in table.items()) for name, table in run.items()
    ]
    return "[run]\nseed = 0\n" + "".join(tables)


def growth(rows: list[dict[str, float]]) -> dict[str, float]:
    """By quantity: mean of the last tenth less the mean of the tenth that begins after the first fifth."""
    tenth = max(1, len(rows) // 10)
    early, late = rows[2 * tenth : 3 * tenth], rows[-tenth:]

    def mean(part: list[dict[str, float]], name: str) -> float:
        return sum(row[name] for row in part) / len(part)

    return {name: round(mean(late, name) - mean(early, name), 2) for name in ("rss_mib", "files", "threads")}


def draw(rows: list[dict[str, float]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(7, 4.4), dpi=130, sharex=True, height_ratios=[2, 1])
    steps = [row["step"] for row in rows]
    axes[0].plot(steps, [row["rss_mib"] for row in rows])
    axes[0].set_ylim(0, 1.2 * max(row["rss_mib"] for row in rows))
    axes[0].set_ylabel("resident, MiB")
    axes[0].set_title(title)
    for name, style in (("files", "C1"), ("threads", "C2")):
        axes[1].plot(steps, [row[name] for row in rows], style, label="open files" if name == "files" else name)
    axes[1].set_ylim(0, None)
    axes[1].set_xlabel("inner steps")
    axes[1].legend(loc="lower right")
    for one in axes:
        one.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=["learner", "node"], default=["learner", "node"])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("docs/soak"))
    options = parser.parse_args()
    kinds: dict[str, Callable[[int], list[dict[str, float]]]] = {"learner": soak_learner, "node": soak_node}
    options.out.mkdir(parents=True, exist_ok=True)
    for what in options.what:
        rows = kinds[what](options.steps)
        result = {"what": what, "steps": rows[-1]["step"], "growth": growth(rows), "tables": TABLES, "rows": rows}
        path = options.out / f"soak-{what}.json"
        path.write_text(json.dumps(result) + "\n")
        draw(rows, f"The {what} over {rows[-1]['step']:.0f} inner steps", path.with_suffix(".png"))
        print(
            json.dumps({"what": what, "steps": rows[-1]["step"], "last": rows[-1], "growth": result["growth"]}),
            flush=True,
        )


if __name__ == "__main__":
    main()
