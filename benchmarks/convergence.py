"""Does a compressed exchange learn as well as a dense one? Curves against rounds and bytes, over several seeds.

Some replicas of a learner take turns in one process; after every round their deltas are merged as peers in ring mode merge
them: `aggregation/` books, compresses, decodes and sums, so the numbers are those of a run with no fault and equal peers.
"Without feedback" starts every replica's book anew in each round, so that what compression leaves out is lost; a run has no
such setting, only this benchmark. There is no network and no time here, and every replica makes the same number of steps.

    python benchmarks/convergence.py run quadratic       # also: bandit, grpo. Takes up again where it was stopped
    python benchmarks/convergence.py run grpo --seconds-max 200      # no new run after so long
    python benchmarks/convergence_report.py              # tables and plots from the figures on disk

Bytes are what all replicas together would send: a sparse payload travels n - 1 hops of the all-gather ring; dense fp32
travels as a ring all-reduce, 2 (n - 1) times the vector. Headers, votes and commits are not in it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.aggregation.book import Book
from shoal.aggregation.compress import PRESETS, decode, encode
from shoal.aggregation.merge import OuterSgd, merge_round
from shoal.node.bandit import BanditLearner
from shoal.node.learner import Learner
from shoal.node.quadratic import QuadraticLearner
from shoal.node.swarm.local_work import CONTRIBUTION_MAX
from shoal.protocol.version import Dot

REPLICAS = 4
SEEDS = 5
FOLDER = Path(__file__).parents[1] / "docs" / "convergence"
SCRATCH = Path(__file__).parents[1] / "build" / "convergence"  # what can be made anew
FP32_BYTES = 4

Evaluate = Callable[[np.ndarray], dict[str, float]]  # of the shared theta, fp32 [d]
Make = Callable[[int], tuple[list[Learner], np.ndarray, Evaluate]]  # seed -> replicas, first theta, measure


@dataclass(frozen=True)
class Exchange:
    """How a round's deltas travel: a preset of compress.py, and whether what it leaves out is sent later."""

    preset: str
    feedback: bool

    @property
    def name(self) -> str:
        return self.preset if self.feedback else f"{self.preset} without feedback"


EXCHANGES = (
    Exchange("dense", True),
    Exchange("short", True),
    Exchange("long", True),
    Exchange("short", False),
    Exchange("long", False),
    Exchange("dense", False),
)
LABELS = {"dense": "dense", "short": "10 %-4-bit", "long": "2 %-4-bit"}


def label(name: str) -> str:
    preset, _, rest = name.partition(" ")
    return f"{LABELS[preset]} {rest}".strip()


@dataclass(frozen=True)
class Study:
    """One learner under one division of the inner steps into rounds.

    Attributes:
        marks: rounds after which the shared parameters are measured; the last is the end.
        measure: the figure that is compared.
        lower_is_better: of that figure.
        log: whether it is plotted on a logarithmic axis.
    """

    learner: str
    inner_steps: int
    marks: tuple[int, ...]
    measure: str
    lower_is_better: bool
    log: bool
    exchanges: tuple[Exchange, ...] = EXCHANGES

    @property
    def name(self) -> str:
        return f"{self.learner} {self.inner_steps}x{self.marks[-1]}"


def evenly(rounds: int, count: int) -> tuple[int, ...]:
    """About `count` rounds from 1 to `rounds`, the last included."""
    return tuple(sorted({max(1, round(rounds * (i + 1) / count)) for i in range(count)}))


# --- one run ----------------------------------------------------------------------------------------------------------


def merged_run(make: Make, study: Study, exchange: Exchange, seed: int) -> dict[str, Any]:
    """One curve: at every mark the round, the bytes so far and what `evaluate` says of the shared parameters."""
    learners, theta, evaluate = make(seed)
    d, hops = theta.size, len(learners) - 1
    books = [Book(d) for _ in learners]
    curve = [{"round": 0, "bytes": 0, **evaluate(theta)}]
    sent, voids = 0, 0
    for round_ in range(1, study.marks[-1] + 1):
        if not exchange.feedback:
            books = [Book(d) for _ in learners]
        updates = []
        for i, (learner, book) in enumerate(zip(learners, books, strict=True)):
            learner.load(theta)
            learner.begin(round_)
            for _ in range(study.inner_steps):
                learner.step()
            result = learner.finish()
            book.learn(result.delta)
            if result.weight <= 0:
                continue
            residual = book.residual_f64()
            if exchange.preset != "dense":
                residual = residual.clip(-CONTRIBUTION_MAX, CONTRIBUTION_MAX)
            payload = encode(residual, PRESETS[exchange.preset])
            update = decode(payload, d, PRESETS[exchange.preset])
            dot = Dot(f"replica-{i}", 0, round_)
            book.record(dot, update)
            updates.append((dot, update, result.weight))
            sent += 0 if exchange.preset == "dense" else hops * len(payload)
        sent += 2 * hops * FP32_BYTES * d if exchange.preset == "dense" else 0
        merged = merge_round(theta, None, updates, OuterSgd())
        theta = merged.theta
        voids += len(merged.voids)
        for dot, _, _ in updates:
            if dot not in merged.voids:
                book = books[int(dot.peer.rpartition("-")[2])]
                book.adopt(dot)
                book.settle([dot])
        if round_ in study.marks:
            curve.append({"round": round_, "bytes": sent, **evaluate(theta)})
    return {"parameters": d, "voids": voids, "curve": curve}


# --- the learners -----------------------------------------------------------------------------------------------------


def make_quadratic(seed: int) -> tuple[list[Learner], np.ndarray, Evaluate]:
    """1,000 coordinates, condition 10, a rate at which 960 steps come near the noise floor but not to it."""
    learners = [
        QuadraticLearner(dimension=1000, condition=10.0, noise=0.05, learning_rate=0.01, seed=seed, peer_seed=i)
        for i in range(REPLICAS)
    ]
    return list(learners), learners[0].initial(), lambda theta: {"loss": learners[0].loss(theta)}


def make_bandit(seed: int) -> tuple[list[Learner], np.ndarray, Evaluate]:
    """1,024 parameters; the reward is exact, over all contexts. Loss: what is missing to the best policy."""
    learners = [BanditLearner(features=64, arms=16, learning_rate=0.5, seed=seed, peer_seed=i) for i in range(REPLICAS)]

    def evaluate(theta: np.ndarray) -> dict[str, float]:
        reward = learners[0].reward(theta)
        return {"reward": reward, "loss": learners[0].best_reward - reward}

    return list(learners), learners[0].initial(), evaluate


def task_file(path: Path) -> str:
    """JSONL of 4,000 questions "the second largest of four digits", the same ones on every machine."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.Generator(np.random.PCG64(0))
        digits = rng.integers(0, 10, (4000, 4)).tolist()
        lines = [{"prompt": "".join(map(str, row)) + ">", "answer": str(sorted(row)[2])} for row in digits]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def grpo_tables(seed: int) -> dict[str, Any]:
    """A model and a task small enough for dozens of runs on one core; the learner is the real one."""
    from shoal.node.rl.config import GrpoConfig, ModelConfig, RewardsConfig, TaskConfig, TinyConfig, WarmupConfig

    return {
        "model": ModelConfig(tiny=TinyConfig(hidden=48, layers=2, heads=4, mlp=144)),
        "task": TaskConfig(
            name=task_file(SCRATCH / "second-largest.jsonl"), eval_size=256, eval_generations=4, prompt_format="plain"
        ),
        "rewards": RewardsConfig(),
        "grpo": GrpoConfig(
            num_generations=8,
            prompts_per_step=8,
            max_completion_length=2,
            learning_rate=1e-3,
            adam_beta2=0.99,
            warmup_steps=10,
        ),
        "warmup": WarmupConfig(steps=40, seconds_max=600.0, learning_rate=2e-3, batch_size=64),
        "run_seed": seed,
    }


def make_grpo(seed: int) -> tuple[list[Learner], np.ndarray, Evaluate]:
    """The built-in transformer. The result of the warm-up is kept on disk, so that all exchanges start alike."""
    from shoal.node.rl.build import build_learner

    tables = grpo_tables(seed)

    def build(i: int) -> Any:
        return build_learner(**tables, peer_seed=1000 * seed + i, device="cpu", threads=1)

    learners = [build(i) for i in range(REPLICAS)]
    kept = SCRATCH / f"warm-{seed}-{learners[0].layout.size}.npy"
    if not kept.exists():
        founder = build(0)
        founder.warmup()
        np.save(kept, founder.theta())
    for i, learner in enumerate(learners):
        learner.set_shard((i,), REPLICAS)

    def evaluate(theta: np.ndarray) -> dict[str, float]:
        learners[0].load(theta)
        found = learners[0].evaluate()
        return {"reward": found["reward"], "accuracy": found["accuracy"]}

    return learners, np.load(kept), evaluate


MAKE: dict[str, Make] = {"quadratic": make_quadratic, "bandit": make_bandit, "grpo": make_grpo}
STUDIES = (
    # The same 960 inner steps, cut into ever more rounds.
    Study("quadratic", 80, evenly(12, 12), "loss", True, True),
    Study("quadratic", 20, evenly(48, 24), "loss", True, True),
    Study("quadratic", 4, evenly(240, 24), "loss", True, True),
    Study("quadratic", 2, evenly(480, 24), "loss", True, True),
    # The same 240 inner steps.
    Study("bandit", 20, evenly(12, 12), "reward", False, False),
    Study("bandit", 5, evenly(48, 24), "reward", False, False),
    Study("bandit", 1, evenly(240, 24), "reward", False, False),
    Study("grpo", 2, evenly(48, 8), "reward", False, False, EXCHANGES[:5]),
    Study("grpo", 8, evenly(12, 4), "reward", False, False, EXCHANGES[:3]),
    # Three times as long, for the exchange that the 48 rounds leave behind.
    Study("grpo", 2, evenly(144, 12), "reward", False, False, EXCHANGES[:3]),
)


# --- the figures on disk ----------------------------------------------------------------------------------------------


def figures_path(learner: str) -> Path:
    return FOLDER / f"{learner}.json"


def read_figures(learner: str) -> dict[str, Any]:
    """{study: {exchange: {seed: run}}}; empty where nothing ran yet."""
    path = figures_path(learner)
    return json.loads(path.read_text()) if path.exists() else {}


def write_figures(learner: str, figures: dict[str, Any]) -> None:
    """Whole or not at all; a line a run."""
    lines = [
        f" {json.dumps(study)}: {{\n"
        + ",\n".join(
            f"  {json.dumps(exchange)}: {{\n"
            + ",\n".join(f"   {json.dumps(seed)}: {json.dumps(run)}" for seed, run in sorted(runs.items()))
            + "\n  }"
            for exchange, runs in exchanges.items()
        )
        + "\n }"
        for study, exchanges in figures.items()
    ]
    path = figures_path(learner)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    os.replace(path.with_suffix(".new"), path)


def run_missing(learner: str, seeds: int, seconds_max: float) -> int:
    """Make the runs that are not on disk, seed by seed, and save each. Returns how many are still missing."""
    started, longest = time.monotonic(), 0.0
    figures = read_figures(learner)
    missing = [
        (study, exchange, str(seed))
        for study in STUDIES
        if study.learner == learner
        for seed in range(seeds)
        for exchange in study.exchanges
        if str(seed) not in figures.get(study.name, {}).get(exchange.name, {})
    ]
    for done, (study, exchange, seed) in enumerate(missing):
        begun = time.monotonic()
        if begun - started + longest > seconds_max:
            return len(missing) - done
        run = merged_run(MAKE[learner], study, exchange, int(seed))
        figures.setdefault(study.name, {}).setdefault(exchange.name, {})[seed] = run
        write_figures(learner, figures)
        longest = max(longest, time.monotonic() - begun)
        last = {k: round(v, 4) for k, v in run["curve"][-1].items()}
        print(f"{study.name}, {exchange.name}, seed {seed}: {json.dumps(last)}", file=sys.stderr, flush=True)
    return 0


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="make the runs that are missing")
    run.add_argument("learner", choices=sorted(MAKE))
    run.add_argument("--seeds", type=int, default=SEEDS)
    run.add_argument("--seconds-max", type=float, default=math.inf, help="start no run that would end after this")
    args = parser.parse_args()
    print(json.dumps({"missing": run_missing(args.learner, args.seeds, args.seconds_max)}))


if __name__ == "__main__":
    main()
