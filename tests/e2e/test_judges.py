"""A swarm whose peers judge each other's answers: real processes, no other reward than the judges', and one that lies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.node.store.metrics import read_metrics

from .harness import swarm

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(480)]

FIRST_LETTER = """
[run]
name = "judges"
learner = "grpo"
seed = 3
compression = "{compression}"
[run.model.tiny]
hidden = 32
layers = 2
heads = 2
mlp = 64
[run.task]
name = "{task}"
eval_size = 24
eval_generations = 8
prompt_format = "plain"
[run.rewards]
functions = ["judge"]
[run.judge]
ask = "peers"
peers = 3
quorum = 2
fallback = "none"
[run.grpo]
num_generations = 8
prompts_per_step = 8
max_completion_length = 2
learning_rate = 3e-3
scale_rewards = "batch"
gradient_checkpointing = false
[run.warmup]
steps = 60
batch_size = 32
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
JUDGES = """
import random

def honest(prompts, completions, **kwargs):
    return [0.2 + 0.6 * (c == p[0]) + random.gauss(0, 0.1) for p, c in zip(prompts, completions)]

def liar(prompts, completions, **kwargs):
    return [0.2 + 0.6 * (c != p[0]) for p, c in zip(prompts, completions)]
"""
ROUNDS = 20


def test_peers_judge_each_other_and_one_that_lies_is_not_believed(tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}{b}=", "answer": a} for a in "abcdefghijkl" for b in "mnopqrst"]
    task, judges = tmp_path / "first.jsonl", tmp_path / "judges.py"
    task.write_text("\n".join(json.dumps(row) for row in rows))
    judges.write_text(JUDGES)

    def judge(function: str) -> dict[str, str]:
        return {
            "SHOAL_NODE__REWARDS_FILE": str(judges),
            "SHOAL_NODE__JUDGE__KIND": "function",
            "SHOAL_NODE__JUDGE__FUNCTION": function,
            "SHOAL_NODE__WAIT_FOR_START": "true",
        }

    with swarm(
        tmp_path, FIRST_LETTER, task=task, target_samples=512, round_seconds=30, rounds=ROUNDS, compression="dense"
    ) as one:
        one.found(**judge("honest"))
        for function in ("honest", "honest", "liar"):
            one.join(**judge(function))
        one.begin()
        one.wait(lambda: all((n.status() or {}).get("finished") for n in one.nodes), "all finished", timeout_s=300)
        one.wait_equal()
        records = read_metrics(one.nodes[0].data_dir)
        measured = [r["eval_pass_at_1"] for r in records if "eval_pass_at_1" in r]
        print("judges", [(r["round"], r.get("logged/judges"), r.get("logged/judge_fallback")) for r in records])
        print("ground truth", measured)
        asked = [r for r in records if "logged/judges" in r]
        assert asked and max(r["logged/judges"] for r in asked) > 2
        assert measured[0] < 0.4 and measured[-1] > measured[0] + 0.25
