"""Policy-gradient losses of the GRPO family as pure functions of log-probabilities, and the sampler correction.

Sources: GRPO (2402.03300), Dr. GRPO (2503.20783), DAPO (2503.14476), GSPO (2507.18071), CISPO (2506.13585), SAPO
(2511.20347), LUSPO (2602.05261), VESPO (2602.10693), two-sided clipping (`delta`, INTELLECT-2, 2505.07291), off-policy
sequence mask and bias-corrected KL (DeepSeek-V3.2, 2512.02556), high-entropy tokens (2506.01939), GEPO (2508.17850);
truncated and masked importance sampling between sampler and trainer. Values and gradients agree with TRL 1.16.
Does not run a model (`policy.py`). Padding is excluded by `where`, so a NaN or Inf under the mask never leaks.

Departure from TRL: every normalizer and the entropy quantile look at the whole optimizer step (`BatchTotals`), never at
one micro-batch, so that the loss does not depend on how a batch is split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import CorrectionMode, GrpoConfig, KlEstimator, LossType

LOG_RATIO_BOUND = 20.0  # bound of a log ratio where it is exponentiated unclipped: keeps exp() finite in fp32
LOG_WEIGHT_MIN = math.log(1e-8)  # VESPO: smallest log weight
DECAY_MIN = 1e-4  # VESPO: smallest decay
ENTROPY_SLACK = 1e-5  # nats below the quantile that still count: rounding must not decide about the token right at it
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # losses with PPO's clipped surrogate


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """What one optimizer step has over all its micro-batches; see `batch_totals`.

    Attributes:
        rows: sequences, those without a signal included.
        tokens: unmasked completion tokens of all of them.
        entropy_threshold: in nats; only tokens at or above it are in the policy term. None keeps all.
        entropy_tokens: tokens that the entropy bonus averages over; None means `tokens`.
    """

    rows: int
    tokens: float
    entropy_threshold: float | None = None
    entropy_tokens: float | None = None


@dataclass(frozen=True, kw_only=True)
class LossStats:
    """Sums over the tokens given, for means over micro-batches: divide by `tokens`.

    Attributes:
        tokens: unmasked tokens.
        clipped_low: tokens where the lower clip bound stopped the gradient.
        clipped_high: the same for the upper bound (for "cispo", its cap).
        kl: the KL estimate in nats, the bias correction not applied.
        entropy: in nats; 0 without `entropies`.
    """

    tokens: float
    clipped_low: float
    clipped_high: float
    kl: float
    entropy: float

    @property
    def clipped(self) -> float:
        """Tokens clipped on either side."""
        return self.clipped_low + self.clipped_high


def batch_totals(mask: Tensor, entropies: Tensor | None = None, *, top_entropy_quantile: float = 1.0) -> BatchTotals:
    """Totals of the rows given, which must be the whole optimizer step.

    Args:
        mask: bool or 0/1 [B, T].
        entropies: float [B, T], nats; needed when `top_entropy_quantile` < 1.
        top_entropy_quantile: the part of the tokens to keep, by entropy; 0 keeps the highest alone.

    Raises:
        ValueError: a quantile below 1 without entropies.
    """
    keep = mask.bool()
    tokens = float(keep.sum())
    if top_entropy_quantile >= 1.0:
        return BatchTotals(rows=len(mask), tokens=tokens)
    if entropies is None:
        raise ValueError(f"top_entropy_quantile = {top_entropy_quantile} needs entropies")
    known = entropies.detach()[keep]
    if len(known) == 0:
        return BatchTotals(rows=len(mask), tokens=0.0, entropy_threshold=math.inf, entropy_tokens=0.0)
    threshold = float(torch.quantile(known, 1.0 - top_entropy_quantile)) - ENTROPY_SLACK
    return BatchTotals(
        rows=len(mask), tokens=tokens, entropy_threshold=threshold, entropy_tokens=float((known >= threshold).sum())
    )


def policy_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ref_logps: Tensor | None = None,
    sampler_logps: Tensor | None = None,
    importance_weights: Tensor | None = None,
    entropies: Tensor | None = None,
    totals: BatchTotals | None = None,
    loss_type: LossType = "dapo",
    importance_sampling_level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    use_bias_correction_kl: bool = True,
    off_policy_mask_threshold: float | None = None,
    top_entropy_quantile: float = 1.0,
    entropy_coef: float = 0.0,
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
        advantages: float [B], or [B, T] for one per token.
        mask: bool or 0/1 [B, T], 1 at completion tokens that count.
        ref_logps: float [B, T], under the reference model; needed when beta > 0.
        sampler_logps: float [B, T], as reported by the sampler, for the off-policy mask; default `old_logps`.
        importance_weights: float [B, T] or [B, 1] from `importance_weights`; None means no correction.
        entropies: float [B, T], nats, of the distribution at each token; needed by the two entropy options. Carries a
            gradient where `entropy_coef` is to have an effect.
        totals: of the whole step; None means that these rows are the whole step.
        max_completion_length: the fixed divisor of "dr_grpo", in tokens; default T.

    Raises:
        ValueError: beta > 0 without ref_logps, an entropy option without entropies, or an unknown option value.
    """
    if beta and ref_logps is None:
        raise ValueError("beta > 0 needs ref_logps")
    if entropy_coef and entropies is None:
        raise ValueError(f"entropy_coef = {entropy_coef} needs entropies")
    totals = totals or batch_totals(mask, entropies, top_entropy_quantile=top_entropy_quantile)
    keep = mask.bool()
    zero = torch.zeros((), dtype=logps.dtype, device=logps.device)
    logps = torch.where(keep, logps, zero)
    old = torch.where(keep, old_logps, zero).detach()
    lengths = keep.sum(-1, keepdim=True).clamp(min=1).to(logps.dtype)  # [B, 1]
    adv = advantages.to(logps.dtype)
    adv = adv.unsqueeze(1) if adv.dim() == 1 else torch.where(keep, adv, zero)  # [B, 1] or [B, T]
    high = epsilon if epsilon_high is None else epsilon_high

    log_ratio = logps - old  # [B, T], 0 at padding
    if importance_sampling_level == "token":
        ratio = torch.exp(log_ratio)
    elif importance_sampling_level == "sequence":
        ratio = torch.exp(log_ratio.sum(-1, keepdim=True) / lengths)  # [B, 1]
    else:
        raise ValueError(f"importance_sampling_level {importance_sampling_level!r}: expected 'token' or 'sequence'")

    low_clip = high_clip = torch.zeros_like(keep)
    if loss_type in CLIPPED:
        bounded = ratio.clamp(1 - epsilon, 1 + high)
        free = ratio if delta is None else ratio.clamp(max=delta)
        loss = -torch.minimum(free * adv, bounded * adv)
        low_clip, high_clip = (ratio < 1 - epsilon) & (adv < 0), (ratio > 1 + high) & (adv > 0)
    elif loss_type == "cispo":
        loss = -ratio.clamp(max=high).detach() * adv * logps
        high_clip = (ratio > high) & (adv > 0)
    elif loss_type == "sapo":
        gate = torch.where(adv > 0, sapo_temperature_pos, sapo_temperature_neg).to(logps.dtype)
        loss = -torch.sigmoid(gate * (ratio - 1)) * (4 / gate) * adv
    elif loss_type == "vespo":
        power = torch.where(adv >= 0, vespo_k_pos, vespo_k_neg).to(logps.dtype)
        decay = torch.where(adv >= 0, vespo_lambda_pos, vespo_lambda_neg).to(logps.dtype).clamp(min=DECAY_MIN)
        loss = -_gamma_weight(log_ratio, importance_weights, power, decay) * adv * logps
    else:
        raise ValueError(f"unknown loss_type {loss_type!r}")

    if off_policy_mask_threshold is not None:
        behind = old if sampler_logps is None else sampler_logps
        drift = torch.where(keep, behind - logps.detach(), zero)
        drift = torch.nan_to_num(drift, nan=0.0)  # a token the sampler could not score is no evidence
        near = drift.sum(-1, keepdim=True) / lengths <= off_policy_mask_threshold
        loss = torch.where((adv >= 0) | near, loss, zero)
    acted_on = keep
    if totals.entropy_threshold is not None:
        if entropies is None:
            raise ValueError("an entropy threshold needs entropies")
        acted_on = keep & (entropies.detach() >= totals.entropy_threshold)
        loss = torch.where(acted_on, loss, zero)
    if importance_weights is not None and loss_type != "vespo":  # VESPO has it inside its weight
        loss = loss * importance_weights
    kl = zero
    if beta and ref_logps is not None:
        kl = _kl(torch.where(keep, logps - ref_logps, zero), kl_estimator)
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
    if entropy_coef and entropies is not None:
        count = totals.tokens if totals.entropy_tokens is None else totals.entropy_tokens
        total = total - entropy_coef * torch.where(acted_on, entropies, zero).sum() / max(count, 1.0)
    return total, LossStats(
        tokens=float(keep.sum()),
        clipped_low=float((low_clip & keep).sum()),
        clipped_high=float((high_clip & keep).sum()),
        kl=float(torch.where(keep, kl.detach(), zero).sum()),
        entropy=0.0 if entropies is None else float(torch.where(keep, entropies.detach(), zero).sum()),
    )


def loss_options(config: GrpoConfig) -> dict[str, object]:
    """The keyword options of `policy_loss` that a configuration sets."""
    names = (
        "loss_type importance_sampling_level epsilon epsilon_high delta beta kl_estimator use_bias_correction_kl "
        "off_policy_mask_threshold top_entropy_quantile entropy_coef max_completion_length sapo_temperature_pos "
        "sapo_temperature_neg vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg"
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
    group_log_expectation: Tensor | None = None,
) -> Tensor:
    """`importance_ratio` within bounds, float [B, T] for token modes, else [B, 1].

    `truncate` cuts weights to [floor, cap]; `mask` sets those outside to 0, which drops the token or sequence;
    `group_expectation` is cut like `truncate`.

    Raises:
        ValueError: unknown mode, or "group_expectation" without `group_log_expectation`.
    """
    ratio = importance_ratio(trainer_logps, sampler_logps, mask, mode=mode, group_log_expectation=group_log_expectation)
    if not mode.endswith("mask"):
        return ratio if cap is None and floor is None else ratio.clamp(min=floor, max=cap)
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if cap is not None:
        outside |= ratio > cap
    if floor is not None:
        outside |= ratio < floor
    return ratio.masked_fill(outside, 0.0)


@torch.no_grad()
def importance_ratio(
    trainer_logps: Tensor,
    sampler_logps: Tensor,
    mask: Tensor,
    *,
    mode: CorrectionMode,
    group_log_expectation: Tensor | None = None,
) -> Tensor:
    """Trainer / sampler probability before any bound, float [B, T] for token modes, else [B, 1].

    A token whose sampler log-prob is NaN (unknown) counts as ratio 1, and so does padding. "group_expectation" divides
    the trainer's length-normalized sequence probability by the expectation of the sampler's over the whole group
    (GEPO): one improbable completion then cannot blow up its own weight. With importance_sampling_level "sequence" the
    product with the ratio in `policy_loss` is GEPO's coefficient exactly.

    Args:
        trainer_logps: float [B, T], under the policy before this step.
        sampler_logps: float [B, T], as reported by the sampler.
        mask: bool or 0/1 [B, T].
        group_log_expectation: float [B, 1], these rows of `group_log_expectation`.

    Raises:
        ValueError: as `importance_weights`.
    """
    zero = torch.zeros((), dtype=trainer_logps.dtype, device=trainer_logps.device)
    keep = mask.bool()
    if mode == "group_expectation":
        if group_log_expectation is None:
            raise ValueError("mode 'group_expectation' needs group_log_expectation")
        own = torch.where(keep, trainer_logps, zero).sum(-1, keepdim=True) / keep.sum(-1, keepdim=True).clamp(min=1)
        return torch.where(keep.any(-1, keepdim=True), torch.exp(own - group_log_expectation), zero + 1)
    level, _, bound = mode.partition("_")
    if level not in ("token", "sequence") or bound not in ("truncate", "mask"):
        raise ValueError(f"unknown importance-sampling mode {mode!r}")
    gap = torch.nan_to_num(torch.where(keep, trainer_logps - sampler_logps, zero), nan=0.0)
    return torch.exp(gap.sum(-1, keepdim=True) if level == "sequence" else gap)


@torch.no_grad()
def group_log_expectation(sampler_logps: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """log of GEPO's denominator for each row: sum q_i^2 / sum q_i over the completions of its group.

    q_i is the geometric mean of the sampler's token probabilities, as in GSPO: products over whole sequences would
    underflow. Unknown (NaN) log-probs are left out of the mean, completions without a token out of the group.

    Args:
        sampler_logps: float [B, T], of whole groups.
        mask: bool or 0/1 [B, T].
        group: int64 [B], the group of each row, any labels.

    Returns:
        float [B, 1].
    """
    known = mask.bool() & ~sampler_logps.isnan()
    sums = torch.where(known, sampler_logps, torch.zeros_like(sampler_logps)).sum(-1)
    log_q = sums / known.sum(-1).clamp(min=1)
    out = torch.zeros_like(log_q)
    for label in group.unique():
        rows = (group == label) & known.any(-1)
        if rows.any():
            out[group == label] = torch.logsumexp(2 * log_q[rows], 0) - torch.logsumexp(log_q[rows], 0)
    return out.unsqueeze(1)


def ratio_distribution(ratio: Tensor, mask: Tensor) -> dict[str, float]:
    """Mean, extremes and quantiles of importance ratios or weights, for the logs; empty without a token.

    Args:
        ratio: float [B, T] or [B, 1]; log values beyond 20 are shown as 20.
        mask: bool or 0/1 [B, T].
    """
    keep = mask.bool()
    values = ratio[keep if ratio.shape[1] == keep.shape[1] else keep.any(-1)].reshape(-1)
    if len(values) == 0:
        return {}
    values = values.detach().double().clamp(max=math.exp(LOG_RATIO_BOUND)).sort().values
    at = {"min": 0.0, "p05": 0.05, "median": 0.5, "p95": 0.95, "max": 1.0}
    return {
        "mean": float(values.mean()),
        **{name: float(values[round(q * (len(values) - 1))]) for name, q in at.items()},
    }


def _kl(log_ratio: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimates of KL(policy || reference) from log(policy / reference) (Schulman, "Approximating KL")."""
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        return torch.exp(-log_ratio) + log_ratio - 1
    raise ValueError(f"unknown kl_estimator {estimator!r}: expected 'k1', 'k2' or 'k3'")


@torch.no_grad()
def _gamma_weight(log_ratio: Tensor, weights: Tensor | None, power: Tensor, decay: Tensor) -> Tensor:
    """VESPO's weight w^k exp(decay (1 - w)) of the sequence ratio w, [B, 1], in log space; 1 at w = 1."""
    log_w = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).sum(-1, keepdim=True)
    if weights is not None:
        # A weight of 0 (masked) becomes the smallest log weight, which drives the result to 0.
        log_w = log_w + torch.log(weights).clamp(LOG_WEIGHT_MIN, LOG_RATIO_BOUND).sum(-1, keepdim=True)
    log_w = log_w.clamp(LOG_WEIGHT_MIN, LOG_RATIO_BOUND)
    phi = torch.exp(decay + power * log_w - decay * torch.exp(log_w))
    return torch.nan_to_num(phi, nan=0.0, posinf=0.0, neginf=0.0)
