"""Losses of preference pairs: TRL 1.16's fifteen, mixed by weights, under its f-divergences and WPO weighting.

Pure functions of log-probs: no model, no configuration file. Names are TRL's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

DpoLoss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
]
Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]

# With another divergence than reverse KL a prompt's normalization only cancels in the difference of the two rewards.
ANY_DIVERGENCE = frozenset({"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"})
# They sort each side by itself: a pair's weight would go to another pair.
SORTED = frozenset({"aot", "aot_unpaired"})
EXPONENT_MAX = 80.0  # keeps exp() inside fp32, as in TRL


@dataclass(frozen=True, kw_only=True)
class PairLogps:
    """Log-probs of n pairs, summed over each completion's tokens; fp32 or fp64 [n].

    Attributes:
        chosen_lengths, rejected_lengths: tokens of the completions, [n].
        chosen_whole: `chosen` before `discount_tail`, where that was applied; "sft" looks at it. None: the same.
        weights: what each pair's loss is multiplied with, without gradient (`pair_weights`); None: 1.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    chosen_whole: Tensor | None = None
    weights: Tensor | None = None


def dpo_loss(
    logps: PairLogps,
    *,
    beta: float = 0.1,
    loss_type: DpoLoss | Sequence[DpoLoss] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    f_divergence_type: Divergence = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> Tensor:
    """Loss of each pair, [n]; what is minimized is its mean. Several losses are added up, each times its weight (1).

    "aot", "aot_unpaired" and "sft" look at all pairs together: their single values mean nothing, their mean does.

    Raises:
        ValueError: "exo_pair" without label_smoothing.
    """
    types: Sequence[DpoLoss] = (loss_type,) if isinstance(loss_type, str) else loss_type
    total = torch.zeros_like(logps.chosen)
    for name, weight in zip(types, loss_weights or [1.0] * len(types), strict=True):
        loss = (
            _ratio_loss(logps, name, beta, label_smoothing)
            if name not in ANY_DIVERGENCE
            else _margin_loss(
                logps,
                name,
                divergence_score(logps.chosen - logps.ref_chosen, f_divergence_type, f_alpha_divergence_coef),
                divergence_score(logps.rejected - logps.ref_rejected, f_divergence_type, f_alpha_divergence_coef),
                beta,
                label_smoothing,
                discopop_tau,
            )
        )
        total = total + weight * (loss if logps.weights is None else loss * logps.weights)
    return total


def divergence_score(log_ratio: Tensor, kind: Divergence, alpha: float) -> Tensor:
    """f'(policy / reference) of f-DPO (arXiv 2309.16240), which is a completion's reward up to beta; elementwise."""
    match kind:
        case "reverse_kl":
            return log_ratio
        case "forward_kl":
            return 1 - torch.exp(-log_ratio)
        case "js_divergence":
            return math.log(2) + functional.logsigmoid(log_ratio)
        case "alpha_divergence":
            if abs(alpha - 1) < 1e-6:  # its limit
                return log_ratio
            return torch.expm1(((alpha - 1) * log_ratio).clamp(max=EXPONENT_MAX)) / (alpha - 1)


def _margin_loss(
    logps: PairLogps,
    loss_type: DpoLoss,
    chosen: Tensor,
    rejected: Tensor,
    beta: float,
    label_smoothing: float,
    discopop_tau: float,
) -> Tensor:
    """Losses of the difference between the scores of the two completions."""
    margin = beta * (chosen - rejected)
    log_sigmoid = functional.logsigmoid
    match loss_type:
        case "hinge":
            return torch.relu(1 - margin)
        case "ipo":  # arXiv 2310.12036, equation 17, per token
            return (chosen / logps.chosen_lengths - rejected / logps.rejected_lengths - 1 / (2 * beta)) ** 2
        case "sigmoid_norm":
            return -log_sigmoid(beta * (chosen / logps.chosen_lengths - rejected / logps.rejected_lengths))
        case "exo_pair":  # arXiv 2402.00856, equation 16
            right, wrong = torch.sigmoid(margin), torch.sigmoid(-margin)
            return right * (log_sigmoid(margin) - math.log1p(-label_smoothing)) + wrong * (
                log_sigmoid(-margin) - math.log(label_smoothing)
            )
        case "robust":  # arXiv 2403.00409
            kept, flipped = (1 - label_smoothing) * log_sigmoid(margin), label_smoothing * log_sigmoid(-margin)
            return (flipped - kept) / (1 - 2 * label_smoothing)
        case "discopop":  # arXiv 2406.08414, equation 5
            blend = torch.sigmoid(margin / discopop_tau)
            return -log_sigmoid(margin) * (1 - blend) + torch.exp(-margin) * blend
        case "sft":
            whole = logps.chosen if logps.chosen_whole is None else logps.chosen_whole
            return (-whole.sum() / logps.chosen_lengths.sum()).expand(len(whole))
        case _:
            return -log_sigmoid(margin)


def _ratio_loss(logps: PairLogps, loss_type: DpoLoss, beta: float, label_smoothing: float) -> Tensor:
    """Losses of each completion's own ratio to the reference."""
    chosen, rejected = logps.chosen - logps.ref_chosen, logps.rejected - logps.ref_rejected
    log_sigmoid = functional.logsigmoid
    match loss_type:
        case "nca_pair":  # arXiv 2402.05369
            return -log_sigmoid(beta * chosen) - 0.5 * (log_sigmoid(-beta * chosen) + log_sigmoid(-beta * rejected))
        case "bco_pair":  # arXiv 2404.04656, without its running shift
            return -log_sigmoid(beta * chosen) - log_sigmoid(-beta * rejected)
        case "sppo_hard":  # arXiv 2405.00675, equation 4.7 with certain preferences
            return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
        case "aot":  # arXiv 2406.05882
            policy = (logps.chosen - logps.rejected).sort().values
            return _smoothed(beta * (policy - (logps.ref_chosen - logps.ref_rejected).sort().values), label_smoothing)
        case "aot_unpaired":
            return _smoothed(beta * (chosen.sort().values - rejected.sort().values), label_smoothing)
        case "apo_zero":  # arXiv 2408.06266, equation 7
            return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
        case "apo_down":  # the same, equation 8
            return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(beta * (chosen - rejected))
        case _:
            raise ValueError(f"loss_type = {loss_type!r}; expected one of {sorted(DpoLoss.__args__)}")


def _smoothed(margin: Tensor, smoothing: float) -> Tensor:
    return -functional.logsigmoid(margin) * (1 - smoothing) - functional.logsigmoid(-margin) * smoothing


def discount_tail(chosen: Tensor, rejected: Tensor, lengths: tuple[Tensor, Tensor], alpha: float) -> Tensor:
    """1 for tokens up to the shorter completion's length and alpha behind it, for LD-DPO (arXiv 2409.06411).

    Args:
        chosen, rejected: log-probs of tokens, [n, C].
        lengths: of the two, int64 [n].

    Returns:
        [2, n]: the sums over tokens, so weighted.
    """
    shared = torch.minimum(*lengths).unsqueeze(1)
    columns = torch.arange(chosen.shape[1], device=chosen.device).unsqueeze(0)
    weights = torch.where(columns < shared, 1.0, alpha).to(chosen.dtype)
    return torch.stack([(chosen * weights).sum(-1), (rejected * weights).sum(-1)])


def pair_weights(
    logps: tuple[Tensor, Tensor], log_sum_squares: tuple[Tensor, Tensor], lengths: tuple[Tensor, Tensor]
) -> Tensor:
    """How likely the policy is to write a pair itself, [n], without gradient: WPO's weights (arXiv 2406.11827, equation 2).

    Args:
        logps: of chosen and rejected tokens, [n, C], 0 at padding.
        log_sum_squares: log of the sum of squared probabilities at these tokens, [n, C], 0 at padding.
    """
    means = [
        (ours - square).detach().sum(-1) / count.clamp(min=1)
        for ours, square, count in zip(logps, log_sum_squares, lengths, strict=True)
    ]
    return torch.exp(means[0] + means[1])
