"""Policy-gradient losses of the GRPO family as pure functions of log-probabilities, and the sampler correction.

Sources: GRPO (2402.03300), Dr. GRPO (2503.20783), DAPO (2503.14476), GSPO (2507.18071), CISPO (2506.13585),
SAPO, VESPO, LUSPO, two-sided clipping (`delta`, INTELLECT-2), off-policy sequence mask (DeepSeek-V3.2); truncated and
masked importance sampling between sampler and trainer. Values and gradients agree with TRL 1.16 (tests/data).
Does not run a model (`policy.py`). Padding is excluded by `where`, so a NaN or Inf under the mask never leaks.

Departure from TRL: every normalizer counts the whole optimizer step (`BatchTotals`), never one micro-batch, so that
the loss does not depend on how a batch is split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import CorrectionMode, GrpoConfig, LossType

LOG_RATIO_BOUND = 20.0  # VESPO: bound of a summed log ratio, keeps exp() finite in fp32
LOG_WEIGHT_MIN = math.log(1e-8)  # VESPO: smallest log weight


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """Normalizers of one optimizer step over all its micro-batches.

    Attributes:
        rows: sequences, those without a signal included.
        tokens: unmasked completion tokens of all of them.
    """

    rows: int
    tokens: float


@dataclass(frozen=True, kw_only=True)
class LossStats:
    """Sums over the tokens given, for means over micro-batches: divide by `tokens`."""

    tokens: float
    clipped: float
    kl: float


def policy_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ref_logps: Tensor | None = None,
    sampler_logps: Tensor | None = None,
    importance_weights: Tensor | None = None,
    totals: BatchTotals | None = None,
    loss_type: LossType = "dapo",
    importance_sampling_level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    off_policy_mask_threshold: float | None = None,
    max_completion_length: int | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> tuple[Tensor, LossStats]:
    """The scalar to minimize and its statistics; option names are TRL's.

    Args:
        logps: float [B, T], log-probs under the policy being trained; carries the gradient.
        old_logps: float [B, T], under the policy at the time of sampling; no gradient.
        advantages: float [B].
        mask: bool or 0/1 [B, T], 1 at completion tokens that count.
        ref_logps: float [B, T], under the reference model; needed when beta > 0.
        sampler_logps: float [B, T], as reported by the sampler, for the off-policy mask; default `old_logps`.
        importance_weights: float [B, T] or [B, 1] from `importance_weights`; None means no correction.
        totals: normalizers of the whole step; None means that these rows are the whole step.
        max_completion_length: the fixed divisor of "dr_grpo", in tokens; default T.

    Raises:
        ValueError: beta > 0 without ref_logps, or an unknown option value.
    """
    if beta and ref_logps is None:
        raise ValueError("beta > 0 needs ref_logps")
    keep = mask.bool()
    zero = torch.zeros((), dtype=logps.dtype, device=logps.device)
    logps = torch.where(keep, logps, zero)
    old = torch.where(keep, old_logps, zero).detach()
    lengths = keep.sum(-1, keepdim=True).clamp(min=1).to(logps.dtype)  # [B, 1]
    totals = totals or BatchTotals(rows=logps.shape[0], tokens=float(keep.sum()))
    adv = advantages.to(logps.dtype).unsqueeze(1)  # [B, 1]
    high = epsilon if epsilon_high is None else epsilon_high

    log_ratio = logps - old  # [B, T], 0 at padding
    if importance_sampling_level == "token":
        ratio = torch.exp(log_ratio)
    elif importance_sampling_level == "sequence":
        ratio = torch.exp(log_ratio.sum(-1, keepdim=True) / lengths)  # [B, 1]
    else:
        raise ValueError(f"importance_sampling_level {importance_sampling_level!r}: expected 'token' or 'sequence'")

    if loss_type == "cispo":
        loss = -ratio.clamp(max=high).detach() * adv * logps
        clipped = (ratio > high) & (adv > 0)
    elif loss_type == "sapo":
        gate = torch.where(adv > 0, sapo_temperature_pos, sapo_temperature_neg).to(logps.dtype)
        loss = -torch.sigmoid(gate * (ratio - 1)) * (4 / gate) * adv
        clipped = torch.zeros_like(ratio, dtype=torch.bool)
    elif loss_type == "vespo":
        power = torch.where(adv >= 0, vespo_k_pos, vespo_k_neg).to(logps.dtype)
        decay = torch.where(adv >= 0, vespo_lambda_pos, vespo_lambda_neg).to(logps.dtype)
        loss = -_gamma_weight(log_ratio, importance_weights, keep, power, decay) * adv * logps
        clipped = torch.zeros_like(ratio, dtype=torch.bool)
    elif loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        bounded = ratio.clamp(1 - epsilon, 1 + high)
        free = ratio if delta is None else ratio.clamp(max=delta)
        loss = -torch.minimum(free * adv, bounded * adv)
        clipped = ((ratio > 1 + high) & (adv > 0)) | ((ratio < 1 - epsilon) & (adv < 0))
    else:
        raise ValueError(f"unknown loss_type {loss_type!r}")

    if off_policy_mask_threshold is not None:
        drift = torch.where(
            keep,
            (old if sampler_logps is None else sampler_logps) - logps.detach(),
            zero,
        )
        drift = torch.nan_to_num(drift, nan=0.0)  # a token the sampler could not score is no evidence
        near = drift.sum(-1, keepdim=True) / lengths <= off_policy_mask_threshold
        loss = torch.where((adv >= 0) | near, loss, zero)
    if importance_weights is not None and loss_type != "vespo":  # VESPO has it inside its weight
        loss = loss * importance_weights
    kl = zero
    if beta and ref_logps is not None:
        gap = torch.where(keep, ref_logps - logps, zero)
        kl = torch.exp(gap) - gap - 1  # the low-variance estimator (k3)
        loss = loss + beta * (kl * ratio if use_bias_correction_kl else kl)

    loss = torch.where(keep, loss, zero)  # broadcasts [B, 1] losses over their tokens
    if loss_type in ("grpo", "sapo"):
        total = (loss.sum(-1, keepdim=True) / lengths).sum() / totals.rows
    elif loss_type == "luspo":
        total = loss.sum() / totals.rows
    elif loss_type == "dr_grpo":
        total = loss.sum() / (totals.rows * (max_completion_length or logps.shape[1]))
    else:
        total = loss.sum() / max(totals.tokens, 1.0)
    stats = LossStats(
        tokens=float(keep.sum()),
        clipped=float((clipped & keep).sum()),
        kl=float(torch.where(keep, kl.detach(), zero).sum()),
    )
    return total, stats


def loss_options(config: GrpoConfig) -> dict[str, object]:
    """The keyword options of `policy_loss` that a configuration sets."""
    names = (
        "loss_type importance_sampling_level epsilon epsilon_high delta beta use_bias_correction_kl "
        "off_policy_mask_threshold max_completion_length sapo_temperature_pos sapo_temperature_neg vespo_k_pos "
        "vespo_lambda_pos vespo_k_neg vespo_lambda_neg"
    )
    return {name: getattr(config, name) for name in names.split()}


@torch.no_grad()
def importance_weights(
    trainer_logps: Tensor,
    sampler_logps: Tensor,
    mask: Tensor,
    *,
    mode: CorrectionMode,
    cap: float | None,
    floor: float | None = None,
) -> Tensor:
    """Trainer / sampler probability, float [B, T] for token modes, [B, 1] for sequence modes.

    `truncate` cuts weights to [floor, cap]; `mask` sets those outside to 0, which drops the token or sequence. A token
    whose sampler log-prob is NaN (unknown) counts as ratio 1, and so does padding.

    Raises:
        ValueError: unknown mode.
    """
    zero = torch.zeros((), dtype=trainer_logps.dtype, device=trainer_logps.device)
    gap = torch.nan_to_num(torch.where(mask.bool(), trainer_logps - sampler_logps, zero), nan=0.0)
    level, _, bound = mode.partition("_")
    if level not in ("token", "sequence") or bound not in ("truncate", "mask"):
        raise ValueError(f"unknown importance-sampling mode {mode!r}")
    ratio = torch.exp(gap.sum(-1, keepdim=True) if level == "sequence" else gap)
    if bound == "truncate":
        return ratio if cap is None and floor is None else ratio.clamp(min=floor, max=cap)
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if cap is not None:
        outside |= ratio > cap
    if floor is not None:
        outside |= ratio < floor
    return torch.where(outside, zero, ratio)


@torch.no_grad()
def _gamma_weight(
    log_ratio: Tensor,
    weights: Tensor | None,
    keep: Tensor,
    power: Tensor,
    decay: Tensor,
) -> Tensor:
    """VESPO's weight w^k exp(decay (1 - w)) of the sequence ratio w, [B, 1], in log space; 1 at w = 1."""
    log_w = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).sum(-1, keepdim=True)
    if weights is not None:
        # A weight of 0 (masked) becomes the smallest log weight, which drives the result to 0.
        log_w = log_w + torch.log(weights).clamp(LOG_WEIGHT_MIN, LOG_RATIO_BOUND).sum(-1, keepdim=True)
    log_w = log_w.clamp(LOG_WEIGHT_MIN, LOG_RATIO_BOUND)
    phi = torch.exp(decay + power * log_w - decay * torch.exp(log_w))
    return torch.nan_to_num(phi, nan=0.0, posinf=0.0, neginf=0.0)
