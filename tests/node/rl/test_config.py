"""The configuration tables: what they refuse, and that the demo's defaults are valid tables."""

import pytest
from pydantic import ValidationError

from shoal.node.rl import config
from shoal.node.rl.config import GrpoConfig, ModelConfig, RewardsConfig, TaskConfig, TinyConfig, WarmupConfig


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda: GrpoConfig(num_generation=4), "num_generation"),  # type: ignore[call-arg]
        (lambda: GrpoConfig(learning_rate="fast"), "learning_rate"),  # type: ignore[arg-type]
        (lambda: GrpoConfig(num_generations=1), "num_generations"),
        (lambda: GrpoConfig(delta=1.1), "must exceed"),
        (lambda: GrpoConfig(loss_type="luspo"), "importance_sampling_level"),
        (lambda: GrpoConfig(loss_type="vespo"), "vllm_importance_sampling_mode"),
        (lambda: GrpoConfig(loss_type="vespo", importance_sampling_level="sequence"), "token"),
        (lambda: GrpoConfig(loss_type="ppo"), "loss_type"),  # type: ignore[arg-type]
        (lambda: TinyConfig(hidden=30, heads=4), "multiple of"),
        (lambda: TaskConfig(prompt_template="solve it"), "{prompt}"),
        (lambda: RewardsConfig(functions=[]), "empty"),
        (lambda: RewardsConfig(functions=["task", "task"]), "twice"),
        (lambda: RewardsConfig(functions=["task"], weights=[1, 2]), "2 weights for 1"),
    ],
)
def test_impossible_values_are_refused(build, word):
    with pytest.raises(ValidationError, match=word):
        build()


def test_demo_defaults_are_valid_tables():
    tables = config.demo_defaults()
    ModelConfig(**tables["model"])
    TaskConfig(**tables["task"])
    RewardsConfig(**tables["rewards"])
    GrpoConfig(**tables["grpo"])
    WarmupConfig(**tables["warmup"])
    assert set(tables["rounds"]["target_samples"]) == {"3", "4"}


def test_every_field_says_what_it_trades():
    for table in (ModelConfig, TinyConfig, config.LoraConfig, TaskConfig, RewardsConfig, GrpoConfig, WarmupConfig):
        for name, field in table.model_fields.items():
            assert field.description, f"{table.__name__}.{name}"
