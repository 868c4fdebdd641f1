"""One token per row: temperature, top-k, top-p, min-p, and the log-prob of the distribution that was drawn from.

The order is that of transformers' `generate`: temperature, then top-k, then top-p on what top-k left, then min-p. Does
not run a model (`rollout.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw a token, and what ends a completion beside an end-of-sequence token.

    Attributes:
        temperature: divides the logits.
        top_p: nucleus sampling, keep the most likely tokens up to this mass; 1 keeps all.
        top_k: keep this many most likely tokens; 0 keeps all.
        min_p: drop tokens less likely than this times the most likely one; 0 keeps all.
        greedy: take the most likely token (its log-prob is then 0: it was certain).
        stop_strings: a completion ends as soon as its text contains one of them; the text stays in it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    greedy: bool = False
    stop_strings: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether log-probs equal the model's own at this temperature (nothing is cut off)."""
        return not self.greedy and self.top_p >= 1.0 and self.top_k == 0 and self.min_p == 0.0


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw from fp32 logits [rows, vocabulary]; returns token ids int64 [rows] and their log-probs fp32 [rows]."""
    if sampling.greedy:
        chosen = logits.argmax(-1)
        return chosen, torch.zeros(len(chosen), device=logits.device)
    logps = log_distribution(logits, sampling)
    chosen = _choose(logps.exp(), generator)
    return chosen.squeeze(1), logps.gather(-1, chosen).squeeze(1)


def _choose(probs: Tensor, generator: torch.Generator) -> Tensor:
    """One index per row, int64 [rows, 1], with probabilities fp32 [rows, vocabulary] that are 0 or more.

    On the CPU by inverting the cumulative distribution: `multinomial` draws a random number per token of the vocabulary
    there, which takes ten times as long.
    """
    if probs.device.type != "cpu":
        return torch.multinomial(probs, 1, generator=generator)
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    if not torch.isfinite(cumulative[:, -1]).all():
        raise RuntimeError("probabilities are not finite: the model's logits contain NaN or infinities")
    # In (0, total]: the first index that reaches it has a probability above 0.
    reached = (1 - torch.rand((len(probs), 1), dtype=torch.float64, generator=generator)) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, reached)


def log_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probs of what `draw` draws from, fp32 [rows, vocabulary]; -inf at tokens that are cut off."""
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        floor = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= sampling.top_p  # the most likely token always stays
        ordered = ordered.masked_fill(beyond, -torch.inf)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, order, ordered)
    if sampling.min_p > 0.0:
        floor = logits.amax(-1, keepdim=True) + torch.tensor(sampling.min_p, device=logits.device).log()
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits.log_softmax(-1)
