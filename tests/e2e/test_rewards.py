"""A TRL user's reward file in a swarm of two processes: sync, async, columns, None, metrics, both kinds of prompt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shoal.node.store.metrics import read_metrics

from .harness import swarm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

REWARDS_FILE = Path(__file__).parents[2] / "examples" / "rewards.py"
FUNCTIONS = ["digits_only", "near", "hard_ones_count_twice"]

RUN = """
[run]
name = "rewards"
seed = 3
compression = "short"
[run.model]
name = "{{model}}"
tiny = {{{{ hidden = 32, layers = 2, heads = 2, mlp = 64 }}}}
[run.task]
name = "{task}"
prompt_format = "{format}"
system_prompt = "{system}"
eval_size = 4
[run.rewards]
functions = {functions}
[run.grpo]
num_generations = 4
prompts_per_step = 4
max_completion_length = 3
learning_rate = 1e-3
[run.sync]
target_samples = 32
rounds_max = 3
[run.admission]
mode = "open"
[run.membership]
preset = "local"
"""


def questions(path: Path) -> Path:
    rows = [
        {"prompt": f"{a}+{b}=", "answer": str(a + b), "level": "hard" if a + b > 5 else "easy"}
        for a in range(1, 9)
        for b in range(1, 9)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def model_with_a_chat_template(folder: Path) -> Path:
    from shoal.node.rl.config import ModelConfig, TinyConfig
    from shoal.node.rl.export import export_merged
    from shoal.node.rl.models import load_model

    loaded = load_model(ModelConfig(tiny=TinyConfig(hidden=32, layers=2, heads=2, mlp=64)), seed=3, device="cpu")
    messages = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    loaded.tokenizer.chat_template = messages + "{% if add_generation_prompt %}a:{% endif %}"
    export_merged(loaded, folder)
    return folder


@pytest.mark.parametrize("form", ["plain", "chat"])
def test_a_trl_reward_file_works_unchanged_in_a_swarm_of_two(tmp_path: Path, form: str) -> None:
    model = "tiny" if form == "plain" else str(model_with_a_chat_template(tmp_path / "model"))
    template = RUN.format(
        task=questions(tmp_path / "sums.jsonl"),
        format=form,
        system="" if form == "plain" else "Add up.",
        functions=json.dumps(["task", *FUNCTIONS]),
    )
    files = []
    for which in range(2):  # each peer has its own copy: reward files never travel
        folder = tmp_path / f"user{which}"
        folder.mkdir()
        files.append(shutil.copy(REWARDS_FILE, folder / "rewards.py"))
    with swarm(tmp_path, template, model=model) as one:
        one.found(SHOAL_NODE__REWARDS_FILE=str(files[0]), SHOAL_NODE__WAIT_FOR_START="true")
        one.join(SHOAL_NODE__REWARDS_FILE=str(files[1]), SHOAL_NODE__WAIT_FOR_START="true")
        one.begin()
        one.wait(lambda: all((n.status() or {}).get("finished") for n in one.nodes), "all finished", 120)
        one.wait_equal()
        for node in one.nodes:
            records = [r for r in read_metrics(node.data_dir) if r.get("samples")]
            assert records, node.tail()
            for record in records:
                check(record, form)
            steps = [record["logged/global_step"] for record in records]
            assert steps == sorted(steps) and (len(steps) == 1 or steps[-1] > steps[0])


def check(record: dict[str, Any], form: str) -> None:
    """What one peer measured in a round fits what the file computes."""
    assert record["reward_failures"] == 0.0
    assert not [name for name in record if name.startswith(("reward_failed/", "reward_clipped/"))]
    assert {f"reward/{name}" for name in ("task", "digits_only")} <= record.keys()
    assert 0.0 <= record["reward/digits_only"] <= 1.0
    assert record["logged/conversational"] == float(form == "chat")
    assert 0.0 <= record["logged/has_number"] <= 1.0
    if record["logged/has_number"] > 0:
        assert 0.0 < record["reward/near"] <= 1.0
    # Hard questions are right as often as all are, or not at all: never more often than every one.
    assert 0.0 <= record.get("reward/hard_ones_count_twice", 0.0) <= 1.0


def test_a_node_without_the_file_is_told_which_functions_are_missing(tmp_path: Path) -> None:
    template = RUN.format(task=questions(tmp_path / "sums.jsonl"), format="plain", system="", functions=FUNCTIONS)
    with swarm(tmp_path, template, model="tiny") as one:
        one.found(SHOAL_NODE__REWARDS_FILE=str(REWARDS_FILE), SHOAL_NODE__WAIT_FOR_START="true")
        second = one.join(wait=False)
        assert second.wait_exit() != 0
        assert "near" in second.tail() and "node.rewards_file" in second.tail()
        assert one.nodes[0].alive
