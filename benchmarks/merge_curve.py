"""Reward against rounds when several replicas average what they learned, in one process and without a network.

Each replica runs GRPO with its own AdamW on its own shard; after every round the deltas, weighted by samples, move the
shared parameters (outer SGD, rate 1). `--density` below 1 sends only the largest entries, at `--bits` bits, and keeps
the rest as residual (error feedback). Replicas take turns on one thread, so "seconds a replica" (CPU time) is what one
peer would compute alone. Uses plain numpy for the exchange, not shoal's codec: it answers what merging does to learning.

    python benchmarks/merge_curve.py --replicas 3 --rounds 20 --density 0.1 --bits 4
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np

from shoal.node.rl.build import build_learner
from shoal.node.rl.config import GrpoConfig, ModelConfig, RewardsConfig, TaskConfig, WarmupConfig, demo_defaults

CHUNK = 4096  # entries that compete for a place in the update


def compress(vector: np.ndarray, density: float, bits: int) -> np.ndarray:
    """What arrives of fp32 [d]: per chunk the largest entries, each rounded to one of 2**bits levels."""
    if density >= 1:
        return vector
    padded = np.zeros(-(-len(vector) // CHUNK) * CHUNK, dtype=np.float32)
    padded[: len(vector)] = vector
    rows = padded.reshape(-1, CHUNK)
    k = max(1, round(density * CHUNK))
    kept = np.argpartition(-np.abs(rows), k - 1, axis=1)[:, :k]
    values = np.take_along_axis(rows, kept, axis=1)
    scale = np.abs(values).max(axis=1, keepdims=True) + 1e-30
    levels = 2 ** (bits - 1) - 1
    values = np.rint(values / scale * levels) / levels * scale
    out = np.zeros_like(rows)
    np.put_along_axis(out, kept, values.astype(np.float32), axis=1)
    return out.reshape(-1)[: len(vector)]


def run(args: argparse.Namespace) -> dict[str, float]:
    """One curve; prints a line a round to stderr and returns the summary."""
    tables = demo_defaults()
    for assignment in args.set:
        path, _, value = assignment.partition("=")
        table, *middle, key = path.split(".")
        target = tables[table]
        for name in middle:
            target = target.setdefault(name, {})
        target[key] = json.loads(value)
    target_samples = args.samples or tables["rounds"]["target_samples"][str(args.replicas)]
    rounds = args.rounds or tables["rounds"]["count"]
    learners = [
        build_learner(
            model=ModelConfig(**tables["model"]),
            task=TaskConfig(**tables["task"]),
            rewards=RewardsConfig(**tables["rewards"]),
            grpo=GrpoConfig(**tables["grpo"]),
            warmup=WarmupConfig(**tables["warmup"]),
            run_seed=args.seed,
            peer_seed=1000 * args.seed + i,
            device="cpu",
            threads=1,
        )
        for i in range(args.replicas)
    ]
    warmup = learners[0].warmup()
    theta = learners[0].theta()
    for i, learner in enumerate(learners):
        learner.set_shard((i,), args.replicas)
    residuals = [np.zeros_like(theta) for _ in learners]
    print(f"warm-up: {json.dumps({k: round(v, 3) for k, v in warmup.items()})}", file=sys.stderr)
    start, rewards, metrics = time.process_time(), [], dict(warmup)
    for round_ in range(rounds):
        results, round_rewards = [], []
        for learner in learners:
            learner.load(theta)
            learner.begin(round_)
            samples = 0
            while samples < target_samples / args.replicas:
                stats = learner.step()
                samples += stats.samples
                round_rewards.append(stats.metrics["reward"])
            results.append(learner.finish())
        total = sum(r.weight for r in results) or 1
        step = np.zeros_like(theta)
        for i, result in enumerate(results):
            learned = result.delta * (result.weight / total) + residuals[i]
            sent = compress(learned, args.density, args.bits)
            residuals[i] = learned - sent
            step += sent
        theta = theta - step
        rewards.append(float(np.mean(round_rewards)))
        line = f"round {round_ + 1:3d}  reward {rewards[-1]:.3f}  inner {len(round_rewards) / args.replicas:.0f}"
        if (round_ + 1) % args.evaluate_every == 0 or round_ + 1 == rounds:
            learners[0].load(theta)
            metrics = learners[0].evaluate()
            line += f"  held out: accuracy {metrics['accuracy']:.3f} reward {metrics['reward']:.3f}"
        elapsed = (time.process_time() - start) / args.replicas
        print(f"{line}  {elapsed:.1f} s a replica", file=sys.stderr, flush=True)
    return {
        "replicas": args.replicas,
        "rounds": rounds,
        "density": args.density,
        "bits": args.bits,
        "parameters": learners[0].layout.size,
        "warmup_seconds": warmup["seconds"],
        "reward_before": warmup["reward_after"],
        "accuracy_before": warmup["accuracy_after"],
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
        "reward_held_out": metrics["reward"],
        "accuracy_held_out": metrics["accuracy"],
        "seconds_a_replica": (time.process_time() - start) / args.replicas,
    }


def main() -> None:
    """Parse the command line and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=0, help="0: the demo's")
    parser.add_argument(
        "--samples", type=int, default=0, help="completions a round, all replicas together; 0: the demo's"
    )
    parser.add_argument("--density", type=float, default=1.0, help="fraction of the entries sent")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=4, help="rounds")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=JSON", help="replace a demo default")
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()
