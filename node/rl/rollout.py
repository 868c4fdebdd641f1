"""Samples groups of completions with a key-value cache and reports the log-probs of what was sampled from.

Each prompt is prefilled once and its cache shared by the group; finished rows leave the batch. Log-probs are those of
the distribution that was drawn from, after temperature, top-k and top-p. Randomness comes from the caller's generator
alone. Does not score completions (`rewards.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .policy import Batch, forward_logits, new_cache, pad_left, pad_right, positions

COMPACT_FRACTION = 0.25  # rows leave the cache when this part of it is finished: copying costs about one small step


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw a token. `greedy` takes the most likely one (its log-prob is then 0: it was certain)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether log-probs equal the model's own at this temperature (nothing is cut off)."""
        return not self.greedy and self.top_p >= 1.0 and self.top_k == 0


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Completions of `groups` prompts, `num_generations` rows each, group after group.

    Attributes:
        batch: tokens and lengths, n = groups x num_generations completions.
        sampler_logps: fp32 [n, C], 0 at padding.
        truncated: bool [n], True where the length limit came before an end-of-sequence token.
    """

    batch: Batch
    sampler_logps: Tensor
    truncated: Tensor

    def completions(self) -> list[list[int]]:
        """Token ids of each completion, its end-of-sequence token included, padding excluded."""
        lengths = self.batch.completion_lengths.tolist()
        return [row[:n] for row, n in zip(self.batch.completion_ids.tolist(), lengths, strict=True)]


@torch.no_grad()
def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    num_generations: int,
    max_new_tokens: int,
    sampling: Sampling,
    eos_ids: Sequence[int],
    pad_id: int,
    generator: torch.Generator,
) -> Rollouts:
    """Draw `num_generations` completions for each prompt.

    Args:
        model: a causal LM in eval mode.
        prompts: token ids, at least one each.
        max_new_tokens: completion limit in tokens, the end-of-sequence token included.
        generator: on the model's device.

    Raises:
        ValueError: no prompt, or an empty one.
    """
    if not prompts or not all(prompts):
        raise ValueError("every prompt needs at least one token")
    device = generator.device
    prompt_ids, prompt_lengths = pad_left(prompts, pad_id, device)
    n, width = len(prompts) * num_generations, prompt_ids.shape[1]
    stops = torch.tensor(sorted(set(eos_ids)), device=device)

    mask = torch.arange(width, device=device).unsqueeze(0) >= width - prompt_lengths.unsqueeze(1)
    cache = new_cache(model)
    logits = forward_logits(
        model, input_ids=prompt_ids, attention_mask=mask, position_ids=positions(mask), keep=1, cache=cache
    )[:, -1]
    cache.batch_repeat_interleave(num_generations)
    logits = logits.repeat_interleave(num_generations, dim=0)
    mask = mask.repeat_interleave(num_generations, dim=0)
    position = prompt_lengths.repeat_interleave(num_generations)  # of the next token, [rows]

    tokens = torch.full((n, max_new_tokens), pad_id, dtype=torch.int64, device=device)
    logps = torch.zeros((n, max_new_tokens), device=device)
    lengths = torch.zeros(n, dtype=torch.int64, device=device)
    rows = torch.arange(n, device=device)  # original row of each row still in the cache
    alive = torch.ones(n, dtype=torch.bool, device=device)  # rows in the cache that are not finished
    for step in range(max_new_tokens):
        drawn, drawn_logps = _draw(logits.float(), sampling, generator)
        live_rows = rows[alive]
        tokens[live_rows, step] = drawn[alive]
        logps[live_rows, step] = drawn_logps[alive]
        lengths[live_rows] = step + 1
        alive &= ~torch.isin(drawn, stops)
        live = int(alive.sum())
        if live == 0 or step == max_new_tokens - 1:
            break
        if live <= (1 - COMPACT_FRACTION) * len(rows):
            kept = alive.nonzero().squeeze(1)
            cache.batch_select_indices(kept)
            rows, mask, position, drawn = rows[kept], mask[kept], position[kept], drawn[kept]
            alive = torch.ones(live, dtype=torch.bool, device=device)
        mask = torch.cat([mask, torch.ones((len(rows), 1), dtype=torch.bool, device=device)], dim=1)
        logits = forward_logits(
            model,
            input_ids=drawn.unsqueeze(1),
            attention_mask=mask,
            position_ids=position.unsqueeze(1),
            keep=1,
            cache=cache,
        )[:, -1]
        position = position + 1
    truncated = torch.zeros(n, dtype=torch.bool, device=device)
    truncated[rows[alive]] = True
    used = int(lengths.max())
    batch = Batch(
        prompt_ids=prompt_ids,
        prompt_lengths=prompt_lengths,
        prompt_of=torch.arange(len(prompts), device=device).repeat_interleave(num_generations),
        completion_ids=tokens[:, :used],
        completion_lengths=lengths,
    )
    return Rollouts(batch=batch, sampler_logps=logps[:, :used], truncated=truncated)


def pairs(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], *, pad_id: int, device: torch.device
) -> Batch:
    """A batch of given prompts and completions, for supervised training and for tests."""
    prompt_ids, prompt_lengths = pad_left(prompts, pad_id, device)
    completion_ids, completion_lengths = pad_right(completions, pad_id, device)
    return Batch(
        prompt_ids=prompt_ids,
        prompt_lengths=prompt_lengths,
        prompt_of=torch.arange(len(prompts), device=device),
        completion_ids=completion_ids,
        completion_lengths=completion_lengths,
    )


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One token per row of logits [rows, vocabulary], and its log-prob under the truncated distribution."""
    if sampling.greedy:
        chosen = logits.argmax(-1)
        return chosen, torch.zeros(len(chosen), device=logits.device)
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
    logp = logits.log_softmax(-1)
    chosen = torch.multinomial(logp.exp(), 1, generator=generator)
    return chosen.squeeze(1), logp.gather(-1, chosen).squeeze(1)
