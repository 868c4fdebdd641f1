"""Optimizer steps on one batch of experience.

Gradients accumulate over micro-batches whose split changes neither loss nor gradient. A non-finite loss or gradient
skips the step and is counted; it never reaches a parameter. Does not sample (`experience.py`).
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .config import GrpoConfig
from .experience import Experience, sampling_of
from .losses import importance_weights, loss_options, policy_loss
from .models import LoadedModel
from .policy import completion_logps
from .trainables import Trainables


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """What `optimize` did.

    Attributes:
        stepped: whether any optimizer step was taken.
        metrics: loss, grad_norm, clip_fraction, kl, sampler_weight; nonfinite_steps counts the skipped ones.
    """

    stepped: bool
    metrics: dict[str, float]


def optimize(
    loaded: LoadedModel,
    experience: Experience,
    *,
    trainables: Trainables,
    optimizer: torch.optim.Optimizer,
    config: GrpoConfig,
    reference: Any = None,
) -> UpdateResult:
    """`num_iterations` steps on the completions that carry a signal (with beta > 0, on all: the KL term is one).

    Args:
        reference: the frozen base model for the KL term; with LoRA it is not needed (adapters are switched off).
    """
    rows = (experience.has_signal | (config.beta > 0)).nonzero().squeeze(1)
    rows = rows[experience.mask[rows].any(-1)]
    if len(rows) == 0:
        return UpdateResult(stepped=False, metrics={"nonfinite_steps": 0.0})
    chunks = list(rows.split(config.micro_batch_size or len(rows)))
    fixed: list[_Fixed] = []  # per chunk, from the first iteration: the policy that sampled
    stepped, nonfinite, totals = False, 0, {"loss": 0.0, "grad_norm": 0.0}
    tokens = clipped = kl = 0.0
    for iteration in range(config.num_iterations):
        trainables.zero_grad()
        loss_sum, finite = 0.0, True
        for i, chunk in enumerate(chunks):
            batch = experience.batch.rows(chunk)
            width = batch.completion_ids.shape[1]
            mask = experience.mask[chunk][:, :width]
            logps = completion_logps(loaded.model, batch, temperature=config.temperature)
            if iteration == 0:
                fixed.append(_fix(loaded, experience, chunk, batch, logps, mask, config, reference))
            loss, stats = policy_loss(
                logps,
                fixed[i].old_logps,
                experience.advantages[chunk],
                mask,
                ref_logps=fixed[i].ref_logps,
                sampler_logps=fixed[i].sampler_logps,
                importance_weights=fixed[i].weights,
                totals=experience.totals,
                **loss_options(config),  # type: ignore[arg-type]
            )
            loss_sum += float(loss.detach())
            finite = math.isfinite(loss_sum)
            if not finite:
                break
            loss.backward()
            tokens, clipped, kl = tokens + stats.tokens, clipped + stats.clipped, kl + stats.kl
        norm = float(trainables.collect_grads()) if finite else math.nan
        if not math.isfinite(norm):
            nonfinite += 1
            trainables.zero_grad()
            continue
        if norm > config.max_grad_norm:
            trainables.scale_grads(config.max_grad_norm / norm)
        optimizer.step()
        trainables.publish()
        trainables.zero_grad()
        stepped = True
        totals["loss"] += loss_sum
        totals["grad_norm"] += norm
    taken = max(1, config.num_iterations - nonfinite)
    metrics = {name: value / taken for name, value in totals.items()}
    metrics |= {"nonfinite_steps": float(nonfinite), "clip_fraction": clipped / max(1.0, tokens)}
    if config.beta:
        metrics["kl"] = kl / max(1.0, tokens)
    used = [f.weights for f in fixed if f.weights is not None]
    if used:
        metrics["sampler_weight"] = float(torch.cat([w.reshape(-1) for w in used]).mean())
    return UpdateResult(stepped=stepped, metrics=metrics)


@dataclass(frozen=True)
class _Fixed:
    old_logps: Tensor
    ref_logps: Tensor | None
    sampler_logps: Tensor
    weights: Tensor | None


def _fix(
    loaded: LoadedModel,
    experience: Experience,
    chunk: Tensor,
    batch: Any,
    logps: Tensor,
    mask: Tensor,
    config: GrpoConfig,
    reference: Any,
) -> _Fixed:
    """What stays the same over the iterations; parameters have not moved, so these log-probs are the old ones."""
    sampler = experience.sampler_logps[chunk][:, : mask.shape[1]]
    old = logps.detach()
    weights = None
    if corrects_sampler(config, loaded, experience.from_trainer):
        weights = importance_weights(
            old,
            sampler,
            mask,
            mode=config.vllm_importance_sampling_mode,
            cap=config.vllm_importance_sampling_clip_max,
            floor=config.vllm_importance_sampling_clip_min,
        )
    ref = None
    if config.beta:
        model = loaded.model if reference is None else reference
        with torch.no_grad(), loaded.model.disable_adapter() if reference is None else nullcontext():
            ref = completion_logps(model, batch, temperature=config.temperature)
    return _Fixed(old, ref, sampler, weights)


def corrects_sampler(config: GrpoConfig, loaded: LoadedModel, from_trainer: bool = True) -> bool:
    """Whether the sampler is not the trainer, or the configuration says to act as if."""
    if config.vllm_importance_sampling_correction != "auto":
        return bool(config.vllm_importance_sampling_correction)
    exact = sampling_of(config).is_exact and next(loaded.model.parameters()).dtype == torch.float32
    return not (exact and from_trainer)
