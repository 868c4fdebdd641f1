"""Log-probabilities of given completions under a causal LM.

Prompts lie at the right end of their columns (left padding), completions at the left of theirs; masks come from
lengths, never from token ids, and position ids are explicit, so padding shifts nothing. Logits are computed at
completion positions only. Does not sample (`rollout.py`) and does not compute a loss (`losses.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


@dataclass(frozen=True, kw_only=True)
class Batch:
    """n completions of g prompts.

    Attributes:
        prompt_ids: int64 [g, P], left-padded.
        prompt_lengths: int64 [g].
        prompt_of: int64 [n], the row of `prompt_ids` that each completion continues.
        completion_ids: int64 [n, C], right-padded.
        completion_lengths: int64 [n], the closing end-of-sequence token included.
    """

    prompt_ids: Tensor
    prompt_lengths: Tensor
    prompt_of: Tensor
    completion_ids: Tensor
    completion_lengths: Tensor

    def rows(self, index: Tensor) -> Batch:
        """The completions at `index` (int64 [m]) and their prompts, without columns that are padding in all of them."""
        used, prompt_of = self.prompt_of[index].unique(return_inverse=True)
        prompt_lengths, completion_lengths = self.prompt_lengths[used], self.completion_lengths[index]
        prompt_width = int(prompt_lengths.max())
        return Batch(
            prompt_ids=self.prompt_ids[used][:, self.prompt_ids.shape[1] - prompt_width :],
            prompt_lengths=prompt_lengths,
            prompt_of=prompt_of,
            completion_ids=self.completion_ids[index][:, : int(completion_lengths.max())],
            completion_lengths=completion_lengths,
        )

    def completion_mask(self) -> Tensor:
        """bool [n, C], True at tokens that were sampled."""
        columns = torch.arange(self.completion_ids.shape[1], device=self.completion_ids.device)
        return columns.unsqueeze(0) < self.completion_lengths.unsqueeze(1)

    def prompt_mask(self) -> Tensor:
        """bool [g, P], True at tokens of the prompt."""
        width = self.prompt_ids.shape[1]
        columns = torch.arange(width, device=self.prompt_ids.device)
        return columns.unsqueeze(0) >= width - self.prompt_lengths.unsqueeze(1)


def pad_left(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token id lists to int64 [n, width] with padding in front, and their lengths, int64 [n]."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows], dtype=torch.int64)
    return ids.to(device), torch.tensor([len(row) for row in rows], dtype=torch.int64).to(device)


def pad_right(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token id lists to int64 [n, width] with padding behind, and their lengths, int64 [n]."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([list(row) + [pad_id] * (width - len(row)) for row in rows], dtype=torch.int64)
    return ids.to(device), torch.tensor([len(row) for row in rows], dtype=torch.int64).to(device)


def completion_logps(model: Any, batch: Batch, *, temperature: float = 1.0) -> Tensor:
    """log p(completion token | everything before it), fp32 [n, C]; values at padding are meaningless.

    A prompt that several completions share is computed once, forward and backward.

    Args:
        model: a causal LM on the batch's device; gradients flow unless the caller disables them.
        temperature: divides the logits, as in sampling.
    """
    shared = len(batch.prompt_ids) < len(batch.completion_ids)
    logits = (_logits_from_shared_prompts if shared else _logits_in_one_pass)(model, batch).float()
    if temperature != 1.0:
        logits = logits / temperature
    chosen = logits.gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(logits, dim=-1)


def _logits_in_one_pass(model: Any, batch: Batch) -> Tensor:
    prompt_of = batch.prompt_of
    mask = torch.cat([batch.prompt_mask()[prompt_of], batch.completion_mask()], dim=1)
    return forward_logits(
        model,
        input_ids=torch.cat([batch.prompt_ids[prompt_of], batch.completion_ids], dim=1),
        attention_mask=mask,
        position_ids=positions(mask),
        keep=batch.completion_ids.shape[1] + 1,
    )[:, :-1]  # the last one predicts the token after the completion


def _logits_from_shared_prompts(model: Any, batch: Batch) -> Tensor:
    """Prompts first, into a cache that carries gradients; then every completion from its prompt's cache."""
    prompt_mask, prompt_of = batch.prompt_mask(), batch.prompt_of
    cache = new_cache(model)
    first = forward_logits(
        model,
        input_ids=batch.prompt_ids,
        attention_mask=prompt_mask,
        position_ids=positions(prompt_mask),
        keep=1,
        cache=cache,
    )[prompt_of]
    width = batch.completion_ids.shape[1]
    if width == 1:
        return first
    cache.batch_select_indices(prompt_of)
    mask = torch.cat([prompt_mask[prompt_of], batch.completion_mask()[:, :-1]], dim=1)
    rest = forward_logits(
        model,
        input_ids=batch.completion_ids[:, :-1],
        attention_mask=mask,
        position_ids=positions(mask)[:, -(width - 1) :],
        keep=width - 1,
        cache=cache,
    )
    return torch.cat([first, rest], dim=1)


def new_cache(model: Any) -> DynamicCache:
    """An empty key-value cache of the kind that the model's layers need."""
    return DynamicCache(config=_base(model).config)


def positions(mask: Tensor) -> Tensor:
    """Position of each token in its row when padding is not counted, int64 [n, width]; 0 at left padding."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def forward_logits(
    model: Any, *, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, keep: int, cache: Any = None
) -> Tensor:
    """Logits of the last `keep` positions, [n, keep, vocabulary]; a transformers `cache` is extended in place."""
    extra = {} if cache is None else {_cache_argument(model): cache}
    return model(
        input_ids=input_ids,
        attention_mask=attention_mask.long(),
        position_ids=position_ids,
        use_cache=cache is not None,
        logits_to_keep=keep,
        **extra,
    ).logits


def _cache_argument(model: Any) -> str:
    """Transformers renamed `past_key_values` to `cache`; ask the model which one it knows."""
    parameters = inspect.signature(type(_base(model)).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
