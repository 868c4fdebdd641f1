"""What importance correction is worth: GRPO whose completions come from a perturbed or stale copy of the trainer.

The copy honestly reports the log-probs that it sampled from. `noise S`: every weight matrix of the copy is the trainer's
plus fixed Gaussian noise of S times its standard deviation (as a quantized sampler has, in the large).
`stale N`: the copy takes over the trainer's weights every N steps. Each is trained without correction and with each mode
of it, and judged by the trainer's own held-out sampled reward, at equal numbers of samples. `exact` samples from the
trainer. One line of JSON a run is appended to --out; runs that it holds already are not repeated, and --seconds ends
early, so that it can be made in pieces. `--table` prints the means and standard errors as Markdown.

    python benchmarks/sampler_mismatch.py --out mismatch.jsonl
    python benchmarks/sampler_mismatch.py --out mismatch.jsonl --table
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.node.rl.build import build_learner
from shoal.node.rl.config import GrpoConfig, ModelConfig, RewardsConfig, TaskConfig, TinyConfig, WarmupConfig
from shoal.node.rl.learner import GrpoLearner
from shoal.node.rl.models import LoadedModel
from shoal.node.rl.rollout import BuiltInSampler, Rollouts, Sampling, sample

DIGITS = 3
MODES = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
DEFAULT_CASES = ("noise 0.1", "noise 0.2", "noise 0.4", "stale 8", "stale 32")


class PerturbedSampler:
    """A copy of the trainer's model with noise on its weights, or one that takes them over only now and then."""

    is_trainer = False

    def __init__(self, loaded: LoadedModel, *, noise: float, every: int, seed: int) -> None:
        self._loaded, self._every, self._age = loaded, every, 0
        self._copy = copy.deepcopy(loaded.model)
        generator = torch.Generator().manual_seed(seed)
        self._noise = [
            noise * p.detach().std() * torch.randn(p.shape, generator=generator)
            if p.dim() >= 2
            else torch.zeros_like(p)
            for p in loaded.model.parameters()
        ]

    @torch.no_grad()
    def push(self, *, new_round: bool) -> None:
        """Take over the trainer's weights, if it is time."""
        if self._age % self._every == 0:
            for own, theirs, noise in zip(
                self._copy.parameters(), self._loaded.model.parameters(), self._noise, strict=True
            ):
                own.copy_(theirs + noise)
        self._age += 1

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_generations: int,
        max_new_tokens: int,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Rollouts:
        """From the copy."""
        found = sample(
            self._copy, prompts, num_generations=num_generations, max_new_tokens=max_new_tokens, sampling=sampling,
            eos_ids=self._loaded.eos_ids, pad_id=self._loaded.pad_id, generator=generator,
        )  # fmt: skip
        return Rollouts(
            batch=found.batch, sampler_logps=found.sampler_logps, truncated=found.truncated, from_trainer=False
        )


def questions() -> Path:
    """JSONL of 4,000 questions "sort these digits", the same ones on every machine."""
    path = Path(tempfile.gettempdir()) / f"shoal-sort-{DIGITS}.jsonl"
    if not path.exists():
        rows = np.random.default_rng(0).integers(0, 10, (4000, DIGITS)).tolist()
        lines = [{"prompt": "".join(map(str, r)) + ">", "answer": "".join(map(str, sorted(r)))} for r in rows]
        scratch = path.with_suffix(".partial")
        scratch.write_text("".join(json.dumps(line) + "\n" for line in lines))
        scratch.replace(path)
    return path


def tables(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    """The learner's configuration; `mode` "none" switches the correction off."""
    correction: dict[str, Any] = {"vllm_importance_sampling_correction": False}
    if mode not in ("none", "exact"):
        correction = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": mode}
    return {
        "model": ModelConfig(tiny=TinyConfig(hidden=48, layers=2, heads=4, mlp=128)),
        "task": TaskConfig(
            name=str(questions()), prompt_format="plain", extract="whole", eval_size=128, eval_generations=4
        ),
        "rewards": RewardsConfig(),
        "grpo": GrpoConfig(
            num_generations=8,
            prompts_per_step=16,
            max_completion_length=DIGITS + 1,
            learning_rate=args.learning_rate,
            warmup_steps=5,
            adam_beta2=0.99,
            vllm_importance_sampling_clip_max=args.cap,
            **correction,
        ),
        "warmup": WarmupConfig(steps=args.warmup, learning_rate=2e-3, batch_size=64),
    }


def build(args: argparse.Namespace, mode: str, seed: int) -> GrpoLearner:
    return build_learner(**tables(args, mode), run_seed=seed, peer_seed=100 + seed, device="cpu", threads=1)


def run(args: argparse.Namespace, case: str, mode: str, seed: int, start: Any) -> dict[str, Any]:
    """Train from `start`, fp32 [d]; the trainer's held-out metrics afterwards."""
    kind, _, size = case.partition(" ")
    learner = build(args, mode, seed)
    if kind != "exact":
        learner._sampler = PerturbedSampler(
            learner.loaded, noise=float(size) if kind == "noise" else 0.0, every=int(size) if kind == "stale" else 1,
            seed=seed,
        )  # fmt: skip
    assert isinstance(learner._sampler, PerturbedSampler | BuiltInSampler)
    began, curve, weights = time.process_time(), [], []
    learner.load(start)
    learner.begin(0)
    for step in range(args.steps):
        metrics = learner.step().metrics
        weights.append(metrics.get("sampler_weight", 1.0))
        if (step + 1) % args.evaluate_every == 0 or step + 1 == args.steps:
            here = learner.theta()
            learner.load(here)
            found = learner.evaluate()
            curve.append([step + 1, found["reward"], found["accuracy"]])
    learner.close()
    return {
        "case": case, "mode": mode, "seed": seed, "steps": args.steps, "reward": curve[-1][1], "accuracy": curve[-1][2],
        "best_reward": max(point[1] for point in curve), "curve": curve, "sampler_weight": sum(weights) / len(weights),
        "cpu_seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def table(lines: list[dict[str, Any]]) -> str:
    """Mean and standard error of the held-out sampled reward, one row a case, one column a mode."""
    cases = list(dict.fromkeys(r["case"] for r in lines))

    def cell(case: str, mode: str) -> str:
        values = [r["reward"] for r in lines if r["case"] == case and r["mode"] == mode]
        if not values:
            return ""
        mean = math.fsum(values) / len(values)
        if len(values) == 1:
            return f"{mean:.3f}"
        spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
        return f"{mean:.3f} ± {spread:.3f}"

    rows = [["sampler", *MODES], ["---"] * (len(MODES) + 1)]
    for case in cases:
        if case in ("exact", "start"):
            rows.append([case, cell(case, case), "", "", "", ""])
        else:
            rows.append([case, *(cell(case, mode) for mode in MODES)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--table", action="store_true", help="print the table of what --out holds, run nothing")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--warmup", type=int, default=70, help="supervised steps before, the same for every run of a seed"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--cap", type=float, default=3.0, help="upper bound of the importance weight")
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--cases", nargs="*", default=list(DEFAULT_CASES))
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after this time")
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    if args.table:
        print(table(lines))
        return
    done = {(r["case"], r["mode"], r["seed"]) for r in lines}
    wanted = [("exact", "exact"), *((case, mode) for case in args.cases for mode in args.modes)]
    for seed in range(args.seeds):
        start = None
        for case, mode in wanted:
            if (case, mode, seed) in done:
                continue
            if time.process_time() > args.seconds:
                return
            if start is None:
                learner = build(args, "none", seed)
                learner.load(learner.initial())
                warm = learner.warmup()
                start = learner.theta()
                learner.close()
                if ("start", "start", seed) not in done:
                    record(args.out, {"case": "start", "mode": "start", "seed": seed, "reward": warm["reward_after"],
                                      "accuracy": warm["accuracy_after"]})  # fmt: skip
            record(args.out, run(args, case, mode, seed, start))


def record(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print({k: v for k, v in line.items() if k != "curve"}, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
