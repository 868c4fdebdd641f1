"""Log-probabilities of given completions under a causal LM.

Prompts lie at the right end of their columns (left padding), completions at the left of theirs; masks come from
lengths, never from token ids, and position ids are explicit, so padding shifts nothing. Logits are computed at
completion positions only, in chunks (`scoring.py`); shared prompts run once (`packed.py`). Does not sample (`rollout.py`)
and does not compute a loss (`losses.py`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from .packed import checkpointed, hidden_states, pack
from .scoring import score_tokens

PROBE_GAP_MAX = 1e-2  # nats between two ways to compute the same log-prob: rounding stays far below, mistakes above
PROBE_GAP_MAX_16_BIT = 0.1  # the same for 16-bit weights

log = logging.getLogger(__name__)


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


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """What a model says about the tokens of n completions.

    Attributes:
        logps: fp32 [n, C], 0 at padding.
        entropies: fp32 [n, C], nats, of the distribution at each token (after temperature); None unless asked for.
        log_sum_squares: fp32 [n, C], log of the sum of squared probabilities there; None unless asked for.
    """

    logps: Tensor
    entropies: Tensor | None
    log_sum_squares: Tensor | None = None


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


def completion_logps(model: Any, batch: Batch, *, temperature: float = 1.0, recompute: bool = False) -> Tensor:
    """log p(completion token | everything before it), fp32 [n, C], 0 at padding; see `token_scores`."""
    return token_scores(model, batch, temperature=temperature, recompute=recompute).logps


def token_scores(
    model: Any,
    batch: Batch,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    with_log_sum_squares: bool = False,
    recompute: bool = False,
    keep_bytes: int = 0,
    shared_prefix: bool | None = None,
) -> TokenScores:
    """Log-probs and entropies of the completions' tokens; gradients flow unless the caller disables them.

    A prompt that several completions share is computed once, forward and backward, and padding not at all, where the
    model allows it (`runs_packed`). Logits exist for a chunk of tokens at a time, in the backward pass too. Under
    autocast the model runs in its data type, and from the logits on everything is fp32.

    Args:
        model: a causal LM on the batch's device, with or without PEFT around it.
        temperature: divides the logits, as in sampling.
        with_entropy: whether to compute entropies.
        entropy_grad: whether entropies carry a gradient.
        with_log_sum_squares: whether to compute `log_sum_squares`, without gradient, in place of entropies.
        recompute: run the layers again in the backward pass instead of keeping their activations (gradient
            checkpointing): about half more time, and memory for one layer's activations instead of all.
        keep_bytes: with `recompute`, activations of so many bytes are kept all the same; only layers beyond run again.
        shared_prefix: whether to run the prompts once; None asks `runs_packed`. False is the plain way.
    """
    base, mask = base_of(model), batch.completion_mask()
    if shared_prefix is None:
        shared_prefix = runs_packed(model) and _in_window(base, batch)
    if shared_prefix:
        packing = pack(
            batch.prompt_ids, batch.prompt_lengths, batch.prompt_of, batch.completion_ids, batch.completion_lengths
        )
        hidden = hidden_states(base, packing, recompute=recompute, keep_bytes=keep_bytes)
        hidden = hidden.index_select(0, packing.predicts[mask])
        head = base.get_output_embeddings()
    else:
        with checkpointed(base, keep_bytes=keep_bytes) if recompute else nullcontext():
            hidden = _logits_in_one_pass(model, batch)[mask]
        head = nn.Identity()
    logps, more = score_tokens(
        head,
        hidden,
        batch.completion_ids[mask],
        temperature=temperature,
        with_entropy=with_entropy,
        entropy_grad=entropy_grad,
        with_log_sum_squares=with_log_sum_squares,
    )

    def spread(values: Tensor) -> Tensor:  # [T] -> [n, C]
        return values.new_zeros(mask.shape).masked_scatter(mask, values)

    more = None if more is None else spread(more)
    if with_log_sum_squares:
        return TokenScores(logps=spread(logps), entropies=None, log_sum_squares=more)
    return TokenScores(logps=spread(logps), entropies=more)


def runs_packed(model: Any) -> bool:
    """Whether prompts can be run once for all their completions; measured once for each model and remembered.

    Models differ in ways that no flag tells (scaled or capped logits, sinks, recurrent layers, routing that looks at
    other tokens): a few tokens are run both ways, and where they disagree the plain way is taken from then on.
    """
    return probed(model, _RUNS_PACKED, _why_not_packed, "the prompt of a group is computed once for each completion")


def probed(model: Any, known: WeakKeyDictionary[Any, bool], why_not: Callable[[Any], str], otherwise: str) -> bool:
    """Whether `why_not(model)` is empty; asked once for each model. A reason is logged, with what is done `otherwise`."""
    base = base_of(model)
    if base not in known:
        reason = why_not(model)
        if reason:
            log.info("%s: %s: %s", type(base).__name__, otherwise, reason)
        known[base] = not reason
    return known[base]


def _in_window(base: Any, batch: Batch) -> bool:
    """Whether layers that attend to a window of tokens see all of the batch."""
    window = getattr(base.config.get_text_config(), "sliding_window", None)
    return window is None or int((batch.prompt_lengths[batch.prompt_of] + batch.completion_lengths).max()) <= window


_RUNS_PACKED: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


@torch.no_grad()
def _why_not_packed(model: Any) -> str:
    """Empty where a model runs packed, else the reason."""
    base = base_of(model)
    config = base.config.get_text_config()
    device = next(base.parameters()).device
    # Spread over the vocabulary: the first ids are often special tokens, on which models are numerically touchy.
    ids = (torch.arange(1, 13, device=device) * (config.vocab_size // 13)).view(2, 6)
    lengths = torch.tensor([2, 6, 1, 4], device=device)
    batch = Batch(
        prompt_ids=ids[:, :5],
        prompt_lengths=torch.tensor([5, 3], device=device),
        prompt_of=torch.tensor([0, 0, 1, 1], device=device),
        completion_ids=ids.flip(1).repeat_interleave(2, dim=0),
        completion_lengths=lengths,
    )
    training = base.training
    base.eval()
    try:
        plain = token_scores(model, batch, shared_prefix=False).logps
        packed = token_scores(model, batch, shared_prefix=True).logps
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        base.train(training)
    gap = float((packed - plain).abs().max())
    bound = PROBE_GAP_MAX if next(base.parameters()).dtype == torch.float32 else PROBE_GAP_MAX_16_BIT
    return "" if gap <= bound else f"log-probs differ by {gap:.2g}"


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


def new_cache(model: Any) -> DynamicCache:
    """An empty key-value cache of the kind that the model's layers need."""
    return DynamicCache(config=base_of(model).config)


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
    parameters = inspect.signature(type(base_of(model)).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def base_of(model: Any) -> Any:
    """The transformers model, without PEFT around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
