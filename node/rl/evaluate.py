"""Held-out metrics of a model: greedy accuracy and mean sampled reward.

Draws from a generator of its own with a fixed seed, so that two evaluations of the same weights agree and training
randomness is untouched.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from .config import GrpoConfig, ModelConfig, RewardsConfig, TaskConfig
from .draw import Sampling
from .experience import sampling_of, score_rollouts
from .models import LoadedModel, Progress, load_model
from .prompts import PromptFormat, prompt_format
from .rewards import Rewards
from .rollout import sample
from .tasks import Example, Task, load_task

EVAL_SEED = 20_240_229  # any constant: evaluations must be comparable
FULL_MARK = 0.99  # a task score from here on counts as correct (scorers may stay a rounding error below 1)
ROWS_MAX = 128  # completions sampled at once; bounds memory


def measure(
    loaded: LoadedModel,
    task: Task,
    *,
    config: GrpoConfig,
    prompts: PromptFormat,
    rewards: Rewards,
    examples: list[Example] | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Metrics over `examples` (default: the held-out ones).

    Returns:
        "accuracy": fraction of greedy completions with the task's full mark; "reward": mean total reward of
        `task.config.eval_generations` sampled completions per prompt; "n": prompts; "truncated": of the greedy ones.
    """
    examples = task.held_out() if examples is None else examples
    generator = torch.Generator(device=loaded.device)
    generator.manual_seed(EVAL_SEED)
    generations = task.config.eval_generations
    correct, cut, sampled = 0, 0, []
    per_batch = max(1, ROWS_MAX // generations)
    for start in range(0, len(examples), per_batch):
        part = examples[start : start + per_batch]
        ids = [prompts.encode(loaded.tokenizer, e) for e in part]
        shared: dict[str, Any] = {
            "max_new_tokens": config.max_completion_length,
            "eos_ids": loaded.eos_ids,
            "pad_id": loaded.pad_id,
            "generator": generator,
        }
        greedy = sample(loaded.model, ids, num_generations=1, sampling=Sampling(greedy=True), **shared)
        texts = loaded.tokenizer.batch_decode(greedy.completions(), skip_special_tokens=True)
        correct += sum(task.score(t, e) >= FULL_MARK for t, e in zip(texts, part, strict=True))
        cut += int(greedy.truncated.sum())
        drawn = sample(loaded.model, ids, num_generations=generations, sampling=sampling_of(config), **shared)
        scored = score_rollouts(loaded, drawn, part, generations, prompts=prompts, rewards=rewards)
        sampled += [r for r in scored.total if r is not None]
        if progress:
            progress("evaluating", min(1.0, (start + len(part)) / len(examples)))
    return {
        "accuracy": correct / len(examples),
        "reward": math.fsum(sampled) / len(sampled) if sampled else 0.0,
        "n": float(len(examples)),
        "truncated": cut / len(examples),
    }


def evaluate_model(
    model: ModelConfig,
    task: TaskConfig,
    *,
    grpo: GrpoConfig,
    rewards: RewardsConfig | None = None,
    run_seed: int,
    adapter: Path | None = None,
    rewards_file: Path | None = None,
    cache_dir: Path | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> dict[str, float]:
    """Load a model (and, where given, a PEFT adapter folder on top of it) and measure it on a task's held-out part.

    Args:
        model: any `ModelConfig`; its `lora` table is ignored here.
        adapter: a folder written by `export_adapter` or by PEFT.

    Raises:
        ShoalError: the model, adapter or task cannot be loaded.
    """
    from .export import load_adapter

    plain = model.model_copy(update={"lora": None})
    loaded = load_model(plain, seed=run_seed, cache_dir=cache_dir, device=device, progress=progress)
    if adapter is not None:
        loaded = load_adapter(loaded, adapter)
    source = load_task(task, seed=run_seed)
    scorer = Rewards(rewards or RewardsConfig(), source, rewards_file)
    try:
        prompts = prompt_format(task, loaded.tokenizer, is_tiny=is_tiny(loaded))
        return measure(loaded, source, config=grpo, prompts=prompts, rewards=scorer, progress=progress)
    finally:
        scorer.close()


def is_tiny(loaded: LoadedModel) -> bool:
    """Whether this is the built-in model, or a folder exported from it."""
    from .tiny import is_tiny_tokenizer

    return loaded.kind == "tiny" or is_tiny_tokenizer(loaded.tokenizer)
