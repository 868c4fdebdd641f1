"""Samples groups of completions with a key-value cache and reports the log-probs of what was sampled from.

Each prompt is prefilled once for its group; finished rows leave the batch (`decode.py` runs the model). Log-probs are those of
the distribution that was drawn from (`draw.py`). Randomness comes from the caller's generator alone. `Sampler` is what
the learner asks for completions: here the trainer's own model, in `server_sampler.py` an inference server. Does not
score completions (`rewards.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .decode import start
from .draw import Sampling, draw
from .models import LoadedModel
from .policy import Batch, pad_left, pad_right

COMPACT_FRACTION = 0.25  # rows leave the cache when this part of it is finished: copying costs about one small step
# Tokens decoded in front of those that a stop string can span: some decoders drop a blank at the start of a text.
STOP_CONTEXT_TOKENS = 2


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Completions of `groups` prompts, `num_generations` rows each, group after group.

    Attributes:
        batch: tokens and lengths, n = groups x num_generations completions.
        sampler_logps: fp32 [n, C], 0 at padding; NaN where a sampler could not tell.
        truncated: bool [n], True where the length limit came before an end-of-sequence token or a stop string.
        from_trainer: whether the trainer's own weights were sampled from. False asks for importance correction.
    """

    batch: Batch
    sampler_logps: Tensor
    truncated: Tensor
    from_trainer: bool = True

    def completions(self) -> list[list[int]]:
        """Token ids of each completion, its end-of-sequence token included, padding excluded."""
        lengths = self.batch.completion_lengths.tolist()
        return [row[:n] for row, n in zip(self.batch.completion_ids.tolist(), lengths, strict=True)]


class Sampler(Protocol):
    """Where completions come from."""

    is_trainer: bool  # whether the trainer's own weights are sampled from

    def push(self, *, new_round: bool) -> None:
        """Called before every step, so that the sampler can take over what the trainer has learned. Blocking."""
        ...

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_generations: int,
        max_new_tokens: int,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Rollouts:
        """`num_generations` completions of each prompt (token ids). Blocking; see `sample` below."""
        ...


class BuiltInSampler:
    """Samples from the trainer's own model: nothing to push, no correction needed."""

    def __init__(self, loaded: LoadedModel, *, copy_bytes: int = 0) -> None:
        """`copy_bytes`: see `sample`."""
        self._loaded, self._copy_bytes = loaded, copy_bytes

    is_trainer = True

    def push(self, *, new_round: bool) -> None:
        """Nothing: trainer and sampler share their weights."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_generations: int,
        max_new_tokens: int,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Rollouts:
        """See `sample`, the function."""
        return sample(
            self._loaded.model,
            prompts,
            num_generations=num_generations,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            eos_ids=self._loaded.eos_ids,
            pad_id=self._loaded.pad_id,
            generator=generator,
            tokenizer=self._loaded.tokenizer,
            copy_bytes=self._copy_bytes,
        )


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
    tokenizer: Any = None,
    copy_bytes: int = 0,
) -> Rollouts:
    """Draw `num_generations` completions for each prompt.

    Args:
        model: a causal LM in eval mode.
        prompts: token ids, at least one each.
        max_new_tokens: completion limit in tokens, the end-of-sequence token included. A prompt near the end of the
            model's context gets fewer.
        generator: on the model's device.
        tokenizer: decodes completions to look for stop strings; needed where `sampling` has some.
        copy_bytes: memory for copies of weights that sampling on the CPU is faster with; released at the end.

    Raises:
        ValueError: no prompt, an empty one, one that fills the model's whole context, or stop strings without tokenizer.
    """
    if not prompts or not all(prompts):
        raise ValueError("every prompt needs at least one token")
    if sampling.stop_strings and tokenizer is None:
        raise ValueError("stop strings need a tokenizer")
    device = generator.device
    prompt_ids, prompt_lengths = pad_left(prompts, pad_id, device)
    limits = length_limits(model, prompts, max_new_tokens).to(device).repeat_interleave(num_generations)
    # Rows that are finished but still in the cache stay inside the context: learned positions end there.
    last_position = prompt_lengths.repeat_interleave(num_generations) + limits - 1
    n, width, longest = len(prompts) * num_generations, prompt_ids.shape[1], int(limits.max())
    stops = torch.tensor(sorted(set(eos_ids)), device=device)
    tail = _stop_tail(sampling.stop_strings)

    mask = torch.arange(width, device=device).unsqueeze(0) >= width - prompt_lengths.unsqueeze(1)
    logits, decoder = start(
        model, prompt_ids, mask, num_generations=num_generations, max_new_tokens=longest, copy_bytes=copy_bytes
    )
    position = prompt_lengths.repeat_interleave(num_generations)  # of the next token, [rows]

    tokens = torch.full((n, longest), pad_id, dtype=torch.int64, device=device)
    logps = torch.zeros((n, longest), device=device)
    lengths = torch.zeros(n, dtype=torch.int64, device=device)
    ended = torch.zeros(n, dtype=torch.bool, device=device)  # by the model's own will
    rows = torch.arange(n, device=device)  # original row of each row still in the cache
    alive = torch.ones(n, dtype=torch.bool, device=device)  # rows in the cache that are not finished
    for step in range(longest):
        drawn, drawn_logps = draw(logits.float(), sampling, generator)
        live_rows = rows[alive]
        tokens[live_rows, step] = drawn[alive]
        logps[live_rows, step] = drawn_logps[alive]
        lengths[live_rows] = step + 1
        ended[live_rows] = torch.isin(drawn[alive], stops)
        if tail:
            ended[live_rows] |= _contains_stop(
                tokens[live_rows, max(0, step + 1 - tail) : step + 1], sampling, tokenizer
            )
        alive &= ~ended[rows] & (limits[rows] > step + 1)
        live = int(alive.sum())
        if live == 0:
            break
        if live <= (1 - COMPACT_FRACTION) * len(rows):
            kept = alive.nonzero().squeeze(1)
            decoder.select(kept)
            rows, position, drawn = rows[kept], position[kept], drawn[kept]
            alive = torch.ones(live, dtype=torch.bool, device=device)
        logits = decoder.step(drawn, position)
        position = torch.minimum(position + 1, last_position[rows])
    used = int(lengths.max())
    batch = Batch(
        prompt_ids=prompt_ids,
        prompt_lengths=prompt_lengths,
        prompt_of=torch.arange(len(prompts), device=device).repeat_interleave(num_generations),
        completion_ids=tokens[:, :used],
        completion_lengths=lengths,
    )
    return Rollouts(batch=batch, sampler_logps=logps[:, :used], truncated=~ended)


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


def length_limits(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Tensor:
    """Tokens that each prompt's completions may have, int64 [prompts]: the limit, or what the context leaves."""
    context = getattr(model.config, "max_position_embeddings", None)
    if context is None:
        return torch.full((len(prompts),), max_new_tokens, dtype=torch.int64)
    longest = max(len(p) for p in prompts)
    if longest >= context:
        raise ValueError(f"a prompt of {longest} tokens leaves no room in the model's context of {context}")
    return torch.tensor([min(max_new_tokens, context - len(p)) for p in prompts], dtype=torch.int64)


def _stop_tail(stop_strings: Sequence[str]) -> int:
    """How many last tokens to decode to see every stop string whole: a token has at least one byte of text."""
    return max((len(s.encode()) for s in stop_strings), default=-STOP_CONTEXT_TOKENS) + STOP_CONTEXT_TOKENS


def _contains_stop(last: Tensor, sampling: Sampling, tokenizer: Any) -> Tensor:
    """Whether the text of each row of `last`, int64 [rows, tail], contains a stop string, bool [rows]."""
    texts = tokenizer.batch_decode(last.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    found = [any(stop in text for stop in sampling.stop_strings) for text in texts]
    return torch.tensor(found, dtype=torch.bool, device=last.device)
