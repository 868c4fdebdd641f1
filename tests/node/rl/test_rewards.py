"""Rewards: built-ins, a user's file in its own process, missing and failing values."""

import textwrap

import pytest

from shoal.node.rl.config import RewardsConfig, TaskConfig
from shoal.node.rl.rewards import Rewards
from shoal.node.rl.tasks import Example, load_task
from shoal.protocol.errors import ExitCode, ShoalError

FILE = """
    import time
    from json import dumps

    def length(prompts, completions, completion_ids, **kwargs):
        print("noise on stdout does not matter")
        return [float(len(ids)) for ids in completion_ids]

    async def level(prompts, completions, level, answer, **kwargs):
        return [l if a == "7" else None for l, a in zip(level, answer)]

    def conversational(prompts, completions, **kwargs):
        return [float(c[0]["role"] == "assistant" and p[-1]["role"] == "user") for p, c in zip(prompts, completions)]

    def broken(prompts, completions, **kwargs):
        raise KeyError("oops")

    def short(prompts, completions, **kwargs):
        return [1.0]

    def slow(prompts, completions, **kwargs):
        while True:
            time.sleep(60)

    def dies(prompts, completions, **kwargs):
        import os
        os._exit(3)
"""


@pytest.fixture(scope="module")
def task():
    return load_task(TaskConfig(eval_size=2), seed=0)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(textwrap.dedent(FILE))
    return path


def score(rewards, texts=("7", "8"), chat=False):
    examples = [
        Example(prompt="p", answer=a, columns={"level": i}, source={"answer": a}) for i, a in enumerate(["7", "9"])
    ]
    prompts = [[{"role": "user", "content": "p"}] if chat else "p"] * 2
    completions = [[{"role": "assistant", "content": t}] if chat else t for t in texts]
    return rewards.score(examples, prompts, completions, list(texts), [[5, 1], [6, 7, 1]])


def test_built_ins_and_weights(task):
    rewards = Rewards(RewardsConfig(functions=["task", "exact", "format"], weights=[1.0, 0.5, 0.25]), task)
    result = score(rewards, ("007", "<answer>9</answer>"))
    assert result.total == [1.0, 1.75]
    assert result.means == {"task": 1.0, "exact": 0.5, "format": 0.5}


def test_user_functions_get_columns_and_ids(task, file):
    rewards = Rewards(RewardsConfig(functions=["length", "level", "task"]), task, file)
    try:
        result = score(rewards)
        assert result.total == [2.0 + 0 + 1, 3.0 + 0]  # the second `level` does not apply
        assert result.means["level"] == 0.0
        assert not result.failures
    finally:
        rewards.close()


def test_conversational_completions(task, file):
    rewards = Rewards(RewardsConfig(functions=["conversational"]), task, file)
    try:
        assert score(rewards, chat=True).total == [1.0, 1.0]
    finally:
        rewards.close()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("broken", "oops"), ("short", "1 values for 2"), ("dies", "exit status"), ("slow", "no answer")],
)
def test_a_failing_function_is_counted_and_named(task, file, name, reason):
    limit = 0.3 if name == "slow" else 30.0
    rewards = Rewards(RewardsConfig(functions=["task", name], timeout_seconds=limit), task, file)
    try:
        for n in (1, 2):
            result = score(rewards)
            assert result.total == [1.0, 0.0]
            assert reason in result.failures[name]
            assert rewards.failures == {"task": 0, name: n}
    finally:
        rewards.close()


def test_when_nothing_applies_the_total_is_none(task, file):
    rewards = Rewards(RewardsConfig(functions=["broken"]), task, file)
    try:
        assert score(rewards).total == [None, None]
    finally:
        rewards.close()


def test_unknown_function_names(task, file):
    with pytest.raises(ShoalError) as caught:
        Rewards(RewardsConfig(functions=["lenght"]), task, file)
    assert "lenght" in str(caught.value) and "length" in str(caught.value)
    with pytest.raises(ShoalError, match="no reward file") as caught:
        Rewards(RewardsConfig(functions=["length"]), task)
    assert caught.value.code == ExitCode.CONFIG


def test_a_file_that_cannot_be_imported(task, tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import does_not_exist_anywhere")
    with pytest.raises(ShoalError, match="does_not_exist_anywhere"):
        Rewards(RewardsConfig(functions=["f"]), task, bad)
    with pytest.raises(ShoalError, match="cannot be loaded"):
        Rewards(RewardsConfig(functions=["f"]), task, tmp_path / "none.py")
