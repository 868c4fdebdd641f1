"""Held-out metrics of a model: greedy accuracy, mean sampled reward, pass@k.

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
from .rewards import Rewards, without_models
from .rollout import Rollouts, sample
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
        `task.config.eval_generations` sampled completions per prompt; "pass_at_k" for k = 1, 2, 4, ... up to that many:
        chance that one of k sampled completions has the full mark; "n": prompts; "truncated": of the greedy ones.
    """
    examples = task.held_out() if examples is None else examples
    generator = torch.Generator(device=loaded.device)
    generator.manual_seed(EVAL_SEED)
    generations = task.config.eval_generations
    correct, cut, sampled, solved = 0, 0, [], []
    per_batch = max(1, ROWS_MAX // generations)
    for start in range(0, len(examples), per_batch):
        part = examples[start : start + per_batch]
        ids = [prompts.encode(loaded.tokenizer, e) for e in part]
        shared: dict[str, Any] = {
            "max_new_tokens": config.max_completion_length,
            "eos_ids": loaded.eos_ids,
            "pad_id": loaded.pad_id,
            "generator": generator,
            "tokenizer": loaded.tokenizer,
            "copy_bytes": config.activations_mib << 20,
        }
        sampling = sampling_of(config)
        greedily = Sampling(greedy=True, stop_strings=sampling.stop_strings)
        greedy = sample(loaded.model, ids, num_generations=1, sampling=greedily, **shared)
        drawn = sample(loaded.model, ids, num_generations=generations, sampling=sampling, **shared)
        correct += sum(_correct(loaded, task, greedy, part))
        solved += _correct(loaded, task, drawn, part)
        cut += int(greedy.truncated.sum())
        scored = score_rollouts(loaded, drawn, part, generations, prompts=prompts, rewards=rewards)
        sampled += [r for r in scored.total if r is not None]
        if progress:
            progress("evaluating", min(1.0, (start + len(part)) / len(examples)))
    return {
        "accuracy": correct / len(examples),
        "reward": math.fsum(sampled) / len(sampled) if sampled else 0.0,
        **{
            f"pass_at_{k}": math.fsum(pass_at_k(generations, c, k) for c in solved) / len(solved)
            for k in pass_ks(generations)
        },
        "n": float(len(examples)),
        "truncated": cut / len(examples),
    }


def _correct(loaded: LoadedModel, task: Task, rollouts: Rollouts, examples: list[Example]) -> list[int]:
    """How many of each example's completions have the full mark."""
    texts = loaded.tokenizer.batch_decode(rollouts.completions(), skip_special_tokens=True)
    each = len(texts) // len(examples)
    return [
        sum(task.score(t, e) >= FULL_MARK for t in texts[i * each : (i + 1) * each]) for i, e in enumerate(examples)
    ]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n samples, drawn without putting back, hold one of the `correct` ones: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (2107.03374), equation 1, in integers.

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= correct <= n.
    """
    if not (1 <= k <= n and 0 <= correct <= n):
        raise ValueError(f"pass@{k} of {correct} correct among {n}: expected 1 <= k <= n and 0 <= correct <= n")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def pass_ks(generations: int) -> list[int]:
    """The k that are reported for so many samples a prompt: powers of two, and all of them."""
    return sorted({*(1 << i for i in range(generations.bit_length())), generations})


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
    scorer = Rewards(without_models(rewards), source, rewards_file, length_max=grpo.max_completion_length)
    try:
        prompts = prompt_format(task, loaded.tokenizer, is_tiny=is_tiny(loaded))
        return measure(loaded, source, config=grpo, prompts=prompts, rewards=scorer, progress=progress)
    finally:
        scorer.close()


def is_tiny(loaded: LoadedModel) -> bool:
    """Whether this is the built-in model, or a folder exported from it."""
    from .tiny import is_tiny_tokenizer

    return loaded.kind == "tiny" or is_tiny_tokenizer(loaded.tokenizer)
