"""Optimizer steps on one batch of experience.

Gradients accumulate over micro-batches whose split changes neither loss nor gradient. A non-finite loss or gradient
skips the step and is counted; it never reaches a parameter. Does not sample (`experience.py`).
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .config import GrpoConfig
from .experience import Experience, sampling_of
from .losses import (
    BatchTotals,
    LossStats,
    batch_totals,
    group_log_expectation,
    importance_ratio,
    importance_weights,
    loss_options,
    policy_loss,
    ratio_distribution,
)
from .models import LoadedModel
from .policy import Batch, TokenScores, token_scores
from .trainables import Trainables


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """What `optimize` did.

    Attributes:
        stepped: whether any optimizer step was taken.
        metrics: loss, grad_norm, clip_fraction, kl, entropy; the distribution of trainer / sampler ratios before
            (`sampler_ratio/...`) and after truncation (`sampler_weight/...`), and the part of them that was truncated;
            nonfinite_steps counts the skipped ones.
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
    """`num_iterations` steps on the completions that carry a signal (where KL or entropy term act, on all).

    Args:
        reference: the frozen base model for the KL term; with LoRA it is not needed (adapters are switched off).
    """
    rows = (experience.has_signal | (config.beta > 0) | (config.entropy_coef != 0)).nonzero().squeeze(1)
    rows = rows[experience.mask[rows].any(-1)]
    if len(rows) == 0:
        return UpdateResult(stepped=False, metrics={"nonfinite_steps": 0.0})
    update = _Update(loaded, experience, config, reference, list(rows.split(config.micro_batch_size or len(rows))))
    stepped, nonfinite, sums = 0, 0, {"loss": 0.0, "grad_norm": 0.0}
    for _ in range(config.num_iterations):
        trainables.zero_grad()
        loss = update.accumulate()
        norm = float(trainables.collect_grads()) if math.isfinite(loss) else math.nan
        if not math.isfinite(norm):
            nonfinite += 1
            trainables.zero_grad()
            continue
        if norm > config.max_grad_norm:
            trainables.scale_grads(config.max_grad_norm / norm)
        optimizer.step()
        trainables.publish()
        trainables.zero_grad()
        stepped += 1
        sums["loss"] += loss
        sums["grad_norm"] += norm
    metrics = {name: value / max(1, stepped) for name, value in sums.items()}
    return UpdateResult(
        stepped=stepped > 0, metrics={**metrics, "nonfinite_steps": float(nonfinite), **update.metrics()}
    )


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """The rows of one micro-batch, and what stays the same over the iterations."""

    mask: Tensor
    advantages: Tensor
    sampler_logps: Tensor
    old_logps: Tensor
    ref_logps: Tensor | None
    ratio: Tensor | None  # trainer / sampler, before truncation
    weights: Tensor | None  # after it


class _Update:
    """The gradient of one batch of experience, micro-batch by micro-batch, and the statistics on the way."""

    def __init__(
        self, loaded: LoadedModel, experience: Experience, config: GrpoConfig, reference: Any, split: list[Tensor]
    ) -> None:
        self._loaded, self._experience, self._config, self._reference = loaded, experience, config, reference
        self._split = split
        self._chunks: list[_Chunk] = []  # filled by the first iteration, whose policy is the one that sampled
        self._stats: list[LossStats] = []
        self._expectation: Tensor | None = None
        if self._corrects and config.vllm_importance_sampling_mode == "group_expectation":
            self._expectation = group_log_expectation(
                experience.sampler_logps, experience.batch.completion_mask(), experience.batch.prompt_of
            )

    def accumulate(self) -> float:
        """Add one iteration's gradient to the model's parameters; returns the loss, not finite if it stopped there."""
        options = loss_options(self._config)
        totals, loss_sum = self._totals(), 0.0
        for i, rows in enumerate(self._split):
            batch = self._experience.batch.rows(rows)
            scores = self._scores(self._loaded.model, batch)
            if i == len(self._chunks):
                self._chunks.append(self._fix(rows, batch, scores.logps.detach()))
            chunk = self._chunks[i]
            if totals is None:  # a single micro-batch knows the entropies of the whole step
                totals = self._with_entropy(chunk.mask, scores.entropies)
            loss, stats = policy_loss(
                scores.logps,
                chunk.old_logps,
                chunk.advantages,
                chunk.mask,
                ref_logps=chunk.ref_logps,
                sampler_logps=chunk.sampler_logps,
                importance_weights=chunk.weights,
                entropies=scores.entropies,
                totals=totals,
                **options,  # type: ignore[arg-type]
            )
            loss_sum += float(loss.detach())
            if not math.isfinite(loss_sum):
                break
            loss.backward()
            self._stats.append(stats)
        return loss_sum

    def metrics(self) -> dict[str, float]:
        """Means over the tokens of all iterations; ratios are those of the first."""
        tokens = max(1.0, sum(s.tokens for s in self._stats))
        low, high = sum(s.clipped_low for s in self._stats), sum(s.clipped_high for s in self._stats)
        found = {
            "clip_fraction": (low + high) / tokens,
            "clip_fraction_low": low / tokens,
            "clip_fraction_high": high / tokens,
            "entropy": sum(s.entropy for s in self._stats) / tokens,
        }
        if self._config.beta:
            found["kl"] = sum(s.kl for s in self._stats) / tokens
        if self._corrects:
            found |= _weight_metrics(self._chunks)
        return found

    @property
    def _corrects(self) -> bool:
        return corrects_sampler(self._config, self._loaded, self._experience.from_trainer)

    def _totals(self) -> BatchTotals | None:
        """Of the whole step; None where a single micro-batch is to tell which tokens have the highest entropy."""
        if self._config.top_entropy_quantile >= 1.0:
            return self._experience.totals
        if len(self._split) == 1:
            return None
        masks, entropies = [], []
        with torch.no_grad():
            for rows in self._split:
                batch = self._experience.batch.rows(rows)
                mask = self._experience.mask[rows][:, : batch.completion_ids.shape[1]]
                scores = self._scores(self._loaded.model, batch)
                assert scores.entropies is not None
                masks.append(mask.reshape(1, -1))
                entropies.append(scores.entropies.reshape(1, -1))
        return self._with_entropy(torch.cat(masks, dim=1), torch.cat(entropies, dim=1))

    def _with_entropy(self, mask: Tensor, entropies: Tensor | None) -> BatchTotals:
        found = batch_totals(mask, entropies, top_entropy_quantile=self._config.top_entropy_quantile)
        whole = self._experience.totals
        return replace(found, rows=whole.rows, tokens=whole.tokens)

    def _scores(self, model: Any, batch: Batch) -> TokenScores:
        config = self._config
        with torch.autocast(self._loaded.device.type, dtype=torch.bfloat16) if config.bf16 else nullcontext():
            return token_scores(
                model,
                batch,
                temperature=config.temperature,
                with_entropy=True,
                entropy_grad=config.entropy_coef != 0,
                recompute=config.gradient_checkpointing,
                keep_bytes=config.activations_mib << 20,
            )

    def _fix(self, rows: Tensor, batch: Batch, old_logps: Tensor) -> _Chunk:
        """What stays the same; parameters have not moved yet, so these log-probs are the old ones."""
        config, experience = self._config, self._experience
        mask = experience.mask[rows][:, : batch.completion_ids.shape[1]]
        sampler = experience.sampler_logps[rows][:, : mask.shape[1]]
        ratio = weights = ref = None
        if self._corrects:
            options: dict[str, Any] = {
                "mode": config.vllm_importance_sampling_mode,
                "group_log_expectation": None if self._expectation is None else self._expectation[rows],
            }
            ratio = importance_ratio(old_logps, sampler, mask, **options)
            weights = importance_weights(
                old_logps,
                sampler,
                mask,
                cap=config.vllm_importance_sampling_clip_max,
                floor=config.vllm_importance_sampling_clip_min,
                **options,
            )
        if config.beta:
            model = self._loaded.model if self._reference is None else self._reference
            adapters_off = self._loaded.model.disable_adapter() if self._reference is None else nullcontext()
            with torch.no_grad(), adapters_off:
                ref = self._scores(model, batch).logps
        return _Chunk(
            mask=mask,
            advantages=experience.advantages[rows],
            sampler_logps=sampler,
            old_logps=old_logps,
            ref_logps=ref,
            ratio=ratio,
            weights=weights,
        )


def _weight_metrics(chunks: list[_Chunk]) -> dict[str, float]:
    """How trainer and sampler differ, before and after truncation."""

    def counted(values: Tensor | None, mask: Tensor) -> Tensor:
        assert values is not None
        return values[mask if values.shape[1] == mask.shape[1] else mask.any(-1)].reshape(-1, 1)

    ratio = torch.cat([counted(c.ratio, c.mask) for c in chunks])
    weights = torch.cat([counted(c.weights, c.mask) for c in chunks])
    every = torch.ones_like(ratio)
    return {
        "sampler_weight": float(weights.mean()),
        "sampler_truncated": float((ratio != weights).float().mean()),
        **{f"sampler_ratio/{name}": value for name, value in ratio_distribution(ratio, every).items()},
        **{f"sampler_weight/{name}": value for name, value in ratio_distribution(weights, every).items()},
    }


def corrects_sampler(config: GrpoConfig, loaded: LoadedModel, from_trainer: bool = True) -> bool:
    """Whether the sampler is not the trainer, or the configuration says to act as if."""
    if config.vllm_importance_sampling_correction != "auto":
        return bool(config.vllm_importance_sampling_correction)
    exact = sampling_of(config).is_exact and next(loaded.model.parameters()).dtype == torch.float32 and not config.bf16
    return not (exact and from_trainer)
