"""What a reward model of one policy's preferences is worth as a reward, and what helps against its being exploited.

The toy task of tests/node/rl/test_rlaif.py (say the first of two letters). A judge that knows the truth writes down
preferences while a first policy learns from it; a Bradley-Terry model is trained on them; other policies learn from that model
alone. Printed: ground truth before and after, and what the policy says in the end beside what the model gives for it.

    python -m benchmarks.reward_model --ways plain kl decay refresh --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from shoal.node.rl.build import build_learner
from shoal.node.rl.config import (
    GrpoConfig,
    JudgeBackend,
    JudgeConfig,
    ModelConfig,
    RewardsConfig,
    TaskConfig,
    TinyConfig,
    WarmupConfig,
)
from shoal.node.rl.preferences import Preference, read_preferences
from shoal.node.rl.reward_model import RewardModel, train_reward_model

ROWS = [{"prompt": f"{a}{b}=", "answer": a} for a in "abcdefghijkl" for b in "mnopqrst"]
STEPS = 150
SHORT = 60  # steps of an under-trained reward model
STAGES = 3  # the reward model is made anew so often where preferences are refreshed
FILE = """
import json
def mine(prompts, completions, **kwargs):
    return [float(c == p[0]) for p, c in zip(prompts, completions)]
def record(prompts, completions, **kwargs):
    with open({path!r}, "a") as file:
        file.writelines(json.dumps([p, c]) + "\\n" for p, c in zip(prompts, completions))
    return [0.0] * len(prompts)
"""


def make(folder: Path, seed: int, functions: list[str], beta: float = 0.0, **options: Any) -> Any:
    data, file = folder / "first.jsonl", folder / "rewards.py"
    data.write_text("\n".join(json.dumps(row) for row in ROWS))
    file.write_text(FILE.format(path=str(folder / "said.jsonl")))
    reward_model = str(options.pop("reward_model", ""))
    weights = [1.0] + [0.0] * (len(functions) - 1)
    return build_learner(
        model=ModelConfig(tiny=TinyConfig(hidden=32, layers=2, heads=2, mlp=64)),
        task=TaskConfig(name=str(data), eval_size=24, eval_generations=8, prompt_format="plain"),
        rewards=RewardsConfig(functions=functions, weights=weights, reward_model=reward_model),
        grpo=GrpoConfig(
            num_generations=8,
            prompts_per_step=8,
            max_completion_length=2,
            learning_rate=3e-3,
            gradient_checkpointing=False,
            scale_rewards="batch",
            beta=beta,
        ),
        warmup=WarmupConfig(steps=60, learning_rate=3e-3, batch_size=32),
        run_seed=seed,
        peer_seed=seed,
        device="cpu",
        rewards_file=file,
        **options,
    )


def steps(learner: Any, count: int, number: int = 1) -> None:
    learner.begin(number)
    for _ in range(count):
        learner.step()
    learner.load(learner.theta())


def told(folder: Path) -> list[Preference]:
    """Preferences of a judge that knows the truth, written while seed 0 learns from it."""
    backend, path = JudgeBackend(kind="function", function="mine"), folder / "preferences.jsonl"
    learner = make(folder, 0, ["judge"], judge=JudgeConfig(backend=backend), preferences_file=path)
    learner.load(learner.initial())
    learner.warmup()
    steps(learner, STEPS)
    learner.close()
    return read_preferences(path)


def fit(folder: Path, pairs: list[Preference], count: int, decay: float) -> tuple[Path, dict[str, float]]:
    """A reward model that grows from a warmed-up policy."""
    learner = make(folder, 1, ["task"])
    learner.load(learner.initial())
    learner.warmup()
    made = RewardModel.on(learner.loaded)
    found = train_reward_model(made, pairs, steps=count, learning_rate=3e-3, batch_size=64, weight_decay=decay)
    learner.close()
    out = Path(tempfile.mkdtemp(dir=folder))
    made.save(out)
    return out, found


def said(folder: Path, last: int) -> list[tuple[str, str]]:
    rows = [tuple(json.loads(line)) for line in (folder / "said.jsonl").read_text().splitlines()]
    return rows[-last:]


def judged(rows: list[tuple[str, str]], rng: random.Random) -> list[Preference]:
    """What a judge who knows the truth prefers among a policy's own completions of a prompt, each wrong one once."""
    wrong = sorted({row for row in rows if row[1] != row[0][0]})
    rng.shuffle(wrong)
    right = {p for p, c in rows if c == p[0]}
    return [Preference(prompt=p, chosen=p[0], rejected=c) for p, c in wrong if p in right]


def policy(folder: Path, way: str, seed: int, pairs: list[Preference]) -> dict[str, Any]:
    (folder / "said.jsonl").unlink(missing_ok=True)
    beta = {"kl": 0.1, "kl.3": 0.3}.get(way, 0.0)
    count, decay = SHORT if way == "short" else 400, 0.1 if way == "decay" else 0.0
    stages = STAGES if way == "refresh" else 1
    theta = before = None
    after = 0.0
    found: dict[str, float] = {}
    model = folder
    for stage in range(stages):
        model, found = fit(folder, pairs, count, decay)
        learner = make(folder, seed, ["reward_model", "record"], beta, reward_model=model)
        learner.load(learner.initial())
        learner.warmup()
        before = before or learner.evaluate()["pass_at_1"]
        if theta is not None:
            learner.load(theta)
        steps(learner, STEPS // stages, stage + 1)
        theta = learner.theta()
        after = learner.evaluate()["pass_at_1"]
        learner.close()
        pairs = pairs + judged(said(folder, 64 * STEPS // stages), random.Random(seed))
    rows = said(folder, 64 * 5)
    scores = RewardModel.load(model, device="cpu").score(rows)
    truths = RewardModel.load(model, device="cpu").score([(p, p[0]) for p, _ in rows])
    kinds = Counter(kind(p, c) for p, c in rows)
    return {
        "way": way,
        "seed": seed,
        "pairs": int(found["pairs"] + found["held_out"]),
        "accuracy": round(found["accuracy"], 3),
        "before": round(before or 0.0, 3),
        "after": round(after, 3),
        "score": round(sum(s or 0.0 for s in scores) / len(rows), 2),
        "score of the truth": round(sum(s or 0.0 for s in truths) / len(rows), 2),
        "says": dict(kinds.most_common(4)),
    }


def kind(prompt: str, completion: str) -> str:
    """A completion with the prompt's letters named 1 and 2, so that alike ones count together."""
    named = {prompt[0]: "1", prompt[1]: "2", "=": "="}
    return "".join(named.get(letter, "x" if letter.isalpha() else letter) for letter in completion)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=["plain", "kl", "kl.3", "decay", "short", "refresh"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        pairs = told(Path(name))
        print(len(pairs), "preferences", flush=True)
        for way in options.ways:
            for seed in options.seeds:
                print(json.dumps(policy(Path(name), way, seed, pairs)), flush=True)


if __name__ == "__main__":
    main()
