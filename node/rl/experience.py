"""One batch of experience: examples -> prompts -> completions -> rewards -> advantages.

Does not touch parameters (`update.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .advantages import Advantages, combined_advantages, group_advantages
from .config import GrpoConfig
from .draw import Sampling
from .losses import BatchTotals
from .models import LoadedModel
from .policy import Batch
from .prompts import PromptFormat
from .rewards import Rewards, Scored
from .rollout import BuiltInSampler, Rollouts, Sampler
from .tasks import Example


@dataclass(frozen=True, kw_only=True)
class Experience:
    """Completions with their advantages, ready for the loss.

    Attributes:
        batch: tokens of n completions.
        mask: bool [n, C], tokens that count in the loss.
        sampler_logps: fp32 [n, C].
        from_trainer: whether they come from the trainer's own weights.
        advantages: fp32 [n].
        has_signal: bool [n], False in groups whose rewards are all equal.
        totals: normalizers of the whole batch.
        metrics: reward, reward_std, skipped_groups, truncated, completion_length and one reward per function.
    """

    batch: Batch
    mask: Tensor
    sampler_logps: Tensor
    from_trainer: bool
    advantages: Tensor
    has_signal: Tensor
    totals: BatchTotals
    metrics: dict[str, float]


def sampling_of(config: GrpoConfig) -> Sampling:
    """The sampling settings of a GRPO configuration."""
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop_strings=tuple(config.stop_strings),
    )


def collect(
    loaded: LoadedModel,
    examples: Sequence[Example],
    *,
    config: GrpoConfig,
    prompts: PromptFormat,
    rewards: Rewards,
    generator: torch.Generator,
    sampler: Sampler | None = None,
) -> Experience:
    """Sample a group for each example, from `sampler` or by default the trainer's own model, and score it."""
    sampler = sampler or BuiltInSampler(loaded, copy_bytes=config.activations_mib << 20)
    rollouts = sampler.sample(
        [prompts.encode(loaded.tokenizer, e) for e in examples],
        num_generations=config.num_generations,
        max_new_tokens=config.max_completion_length,
        sampling=sampling_of(config),
        generator=generator,
    )
    scored = score_rollouts(loaded, rollouts, examples, config.num_generations, prompts=prompts, rewards=rewards)
    advantages = _advantages(scored, [config.num_generations] * len(examples), config, rewards)
    mask = rollouts.batch.completion_mask()
    if config.mask_truncated_completions:
        mask = mask & ~rollouts.truncated.unsqueeze(1)
    device = mask.device
    metrics = {
        "reward": advantages.reward_mean,
        "reward_std": advantages.reward_std,
        "skipped_groups": advantages.skipped_groups,
        "truncated": float(rollouts.truncated.float().mean()),
        "completion_length": float(rollouts.batch.completion_lengths.float().mean()),
        "reward_failures": float(len(scored.failures)),
        **{f"reward/{name}": value for name, value in scored.means.items()},
        **{f"reward_failed/{name}": float(name in scored.failures) for name, n in rewards.failures.items() if n},
        **{f"reward_clipped/{name}": float(scored.clipped.get(name, 0)) for name in rewards.clipped},
        **{f"logged/{name}": value for name, value in scored.metrics.items()},
    }
    if not sampler.is_trainer:
        metrics["sampler_fallback"] = float(rollouts.from_trainer)
    return Experience(
        batch=rollouts.batch,
        mask=mask,
        sampler_logps=rollouts.sampler_logps,
        from_trainer=rollouts.from_trainer,
        advantages=torch.tensor(advantages.values, dtype=torch.float32, device=device),
        has_signal=torch.tensor(advantages.has_signal, device=device),
        totals=BatchTotals(rows=len(mask), tokens=float(mask.sum())),
        metrics={k: v for k, v in metrics.items() if math.isfinite(v)},
    )


def _advantages(scored: Scored, group_sizes: list[int], config: GrpoConfig, rewards: Rewards) -> Advantages:
    if config.multi_objective_aggregation == "normalize_then_sum":
        weights = [rewards.weights[name] for name in scored.values]
        return combined_advantages(list(scored.values.values()), weights, group_sizes, aggregation="normalize_then_sum")
    return group_advantages(scored.total, group_sizes, scale=config.scale_rewards, leave_one_out=config.leave_one_out)


def score_rollouts(
    loaded: LoadedModel,
    rollouts: Rollouts,
    examples: Sequence[Example],
    num_generations: int,
    *,
    prompts: PromptFormat,
    rewards: Rewards,
) -> Scored:
    """Decode completions and score them; `examples` has one entry per group."""
    completion_ids = rollouts.completions()
    texts = loaded.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    repeated = [e for e in examples for _ in range(num_generations)]
    return rewards.score(
        repeated,
        [prompts.message(e) for e in repeated],
        [prompts.completion(t) for t in texts],
        texts,
        completion_ids,
    )
