"""Log-probs and entropies of tokens from the hidden states in front of them, a chunk of logits at a time.

Logits of a whole batch never exist, forward or backward. Where the output layer is not trained (LoRA), the gradient is
made right beside the log-probs, while the chunk's logits are there (the idea of Liger's fused linear cross-entropy,
Hsu et al. 2024, arXiv:2410.10989, for a log-prob per token instead of a mean); elsewhere a chunk runs again in the
backward pass. Does not run the layers in front of the output layer (`policy.py`).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LOGITS_MAX = 1 << 23  # logits that exist at a time, 32 MiB in fp32: large enough for the matrix product to be efficient


def score_tokens(
    head: Any,
    hidden: Tensor,
    tokens: Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    entropy_grad: bool,
    with_log_sum_squares: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each of T tokens, fp32 [T] (fp64 where logits are), and what else is asked for, or None.

    Args:
        head: the output layer, or an identity where `hidden` are logits already.
        hidden: [T, hidden size], the states that predict the tokens.
        tokens: int64 [T].
        temperature: divides the logits.
        with_entropy: the second value are entropies.
        entropy_grad: whether entropies carry a gradient.
        with_log_sum_squares: the second value are logs of the sums of squared probabilities, without gradient.
    """
    weight = getattr(head, "weight", None)
    rows_max = max(1, LOGITS_MAX // (hidden.shape[-1] if weight is None else weight.shape[0]))
    rows = -(-len(tokens) // -(-len(tokens) // rows_max)) if len(tokens) else 1  # chunks of about equal size
    lean = not (entropy_grad or with_log_sum_squares)
    if torch.is_grad_enabled() and hidden.requires_grad and lean and _is_frozen(head, hidden):
        logps, entropies = _FrozenHead.apply(hidden, head.weight, tokens, temperature, with_entropy, rows)  # type: ignore[misc]
        return logps, entropies if with_entropy else None

    def chunk(states: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(states)
        if logits.dtype != torch.float64:
            logits = logits.float()
        if temperature != 1.0:
            logits = logits / temperature
        norm = torch.logsumexp(logits, dim=-1)
        logps = logits.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - norm
        if with_log_sum_squares:
            return logps, (torch.logsumexp(2 * logits, dim=-1) - 2 * norm).detach()
        if not with_entropy:
            return logps, logps.detach()
        with nullcontext() if entropy_grad else torch.no_grad():
            probs = torch.exp(logits - norm.unsqueeze(-1))
            return logps, norm - torch.where(probs > 0, probs * logits, torch.zeros_like(probs)).sum(-1)

    parts = []
    for states, chosen in zip(hidden.split(rows), tokens.split(rows), strict=True):
        if torch.is_grad_enabled() and len(tokens) > rows:
            parts.append(checkpoint(chunk, states, chosen, use_reentrant=False))
        else:  # a single chunk is within the bound anyway
            parts.append(chunk(states, chosen))
    logps = torch.cat([p[0] for p in parts])
    return logps, torch.cat([p[1] for p in parts]) if with_entropy or with_log_sum_squares else None


def _is_frozen(head: Any, hidden: Tensor) -> bool:
    """Whether the output layer is a plain matrix without gradient, in the states' own 32 or 64 bits."""
    return (
        type(head) is nn.Linear
        and head.bias is None
        and not head.weight.requires_grad
        and head.weight.dtype == hidden.dtype
        and hidden.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled(hidden.device.type)
    )


class _FrozenHead(torch.autograd.Function):
    """Log-probs under a matrix that is not trained; entropies without gradient.

    d logp / d state = (weight[token] - softmax(logits) @ weight) / temperature, a row for each token: all that is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, with_entropy: bool, rows: int
    ) -> tuple[Tensor, Tensor]:
        grads = torch.empty_like(hidden)
        logps, entropies = hidden.new_empty(len(hidden)), hidden.new_zeros(len(hidden))
        space = hidden.new_empty(2, min(rows, len(hidden)), weight.shape[0])  # of all chunks: fresh memory is slow
        for first in range(0, len(hidden), rows):
            part = slice(first, first + rows)
            states, chosen = hidden[part], tokens[part].unsqueeze(1)
            logits, exps = space[0, : len(states)], space[1, : len(states)]
            torch.mm(states, weight.t(), out=logits)
            if temperature != 1.0:
                logits.div_(temperature)
            logits.sub_(logits.amax(-1, keepdim=True))
            torch.exp(logits, out=exps)
            total = exps.sum(-1, keepdim=True)
            logps[part] = (logits.gather(1, chosen) - total.log()).squeeze(1)
            if with_entropy:
                mean = torch.bmm(exps.unsqueeze(1), logits.unsqueeze(2)).view(-1, 1) / total
                entropies[part] = (total.log() - mean).squeeze(1)
            torch.mm(exps, weight, out=grads[part])
            grads[part] = (weight.index_select(0, chosen.squeeze(1)) - grads[part] / total) / temperature
        ctx.save_for_backward(grads)
        ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        (grads,) = ctx.saved_tensors
        return grads * upstream[0].unsqueeze(1), None, None, None, None, None
