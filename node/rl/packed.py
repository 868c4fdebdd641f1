"""Runs a transformer over completions that share prompts: each prompt once, forward and backward, and no padding.

All tokens of a batch lie in one row: the prompts, then the completions. Everything but attention works on single tokens
and does not notice. Attention is replaced while the model runs: prompts attend to themselves, completions to their
prompt's keys and values and to themselves. Gradients of a shared prompt add up by autograd, so they are those of the
plain way. No key-value cache is involved, so layers can be recomputed in the backward pass (`checkpointed`).

Needs a model whose attention goes through transformers' `AttentionInterface` without extras (soft caps, sinks, biases)
and that keeps no other state between tokens; `policy.py` measures whether a model is one, and else does not come here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

ATTENTION = "shoal_packed"  # name in transformers' registry of attention functions
FOREIGN = ("softcap", "s_aux", "position_bias")  # attention arguments that change the result and are not done here


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where the tokens of g prompts and n completions lie in a row of N; the index of padding is 0.

    The last token of a completion predicts nothing and is not among the inputs: completions are one shorter here.

    Attributes:
        input_ids, position_ids: int64 [1, N].
        prompt_index: int64 [g, P], padding behind.
        completion_index: int64 [n, C - 1], padding behind.
        prompt_of: int64 [n], the row of `prompt_index` that each completion continues.
        is_prompt: bool [g, P], is_completion: bool [n, C - 1]; False at padding.
        visible: bool [n, 1, C - 1, P + C - 1], what each completion token attends to.
        predicts: int64 [n, C], index of the token that predicts each completion token; 0 at padding.
        longest: tokens of the longest prompt with its completion.
    """

    input_ids: Tensor
    position_ids: Tensor
    prompt_index: Tensor
    completion_index: Tensor
    prompt_of: Tensor
    is_prompt: Tensor
    is_completion: Tensor
    visible: Tensor
    predicts: Tensor
    longest: int


def pack(
    prompt_ids: Tensor, prompt_lengths: Tensor, prompt_of: Tensor, completion_ids: Tensor, completion_lengths: Tensor
) -> Packing:
    """The packing of a `policy.Batch`, whose fields these are."""
    device, width = prompt_ids.device, prompt_ids.shape[1]
    columns = torch.arange(width, device=device)
    is_prompt = columns < prompt_lengths.unsqueeze(1)
    prompt_tokens = prompt_ids[columns >= width - prompt_lengths.unsqueeze(1)]  # row after row
    steps = torch.arange(completion_ids.shape[1] - 1, device=device)
    is_completion = steps < completion_lengths.unsqueeze(1) - 1
    starts = prompt_lengths[prompt_of]  # position of each completion's first token
    prompt_index = _number(is_prompt, 0)
    completion_index = _number(is_completion, len(prompt_tokens))
    last = prompt_index.gather(1, prompt_lengths.unsqueeze(1) - 1).squeeze(1)
    causal = (steps.unsqueeze(1) >= steps).expand(len(prompt_of), -1, -1)
    own_prompt = is_prompt[prompt_of].unsqueeze(1).expand(-1, len(steps), -1)
    return Packing(
        input_ids=torch.cat([prompt_tokens, completion_ids[:, :-1][is_completion]]).unsqueeze(0),
        position_ids=torch.cat(
            [columns.expand_as(is_prompt)[is_prompt], (starts.unsqueeze(1) + steps)[is_completion]]
        ).unsqueeze(0),
        prompt_index=prompt_index,
        completion_index=completion_index,
        prompt_of=prompt_of,
        is_prompt=is_prompt,
        is_completion=is_completion,
        visible=torch.cat([own_prompt, causal], dim=2).unsqueeze(1),
        predicts=torch.cat([last[prompt_of].unsqueeze(1), completion_index], dim=1),
        longest=int((starts + completion_lengths).max()),
    )


def hidden_states(model: Any, packing: Packing, *, recompute: bool = False, keep_bytes: int = 0) -> Tensor:
    """Last hidden states of the packed tokens, [N, hidden].

    Args:
        model: a transformers causal LM, without any wrapper.
        recompute: keep only the layers' inputs for the backward pass and run them again there.
        keep_bytes: as in `checkpointed`.
    """
    again = functools.partial(_attention, model)
    with _attention(model), checkpointed(model, again, keep_bytes=keep_bytes) if recompute else nullcontext():
        return model.base_model(
            input_ids=packing.input_ids, position_ids=packing.position_ids, use_cache=False, packing=packing
        ).last_hidden_state.squeeze(0)


@contextmanager
def checkpointed(model: Any, around: Any = nullcontext, *, keep_bytes: int = 0) -> Iterator[None]:
    """Within it, layers of `model` keep only their inputs, and run again when the backward pass needs more.

    Unlike transformers' own switch it needs no training mode, which would turn on dropout.

    Args:
        around: makes the context in which a layer runs again.
        keep_bytes: memory for activations: layers keep them as long as they fit, the first ones first. What a layer
            needs is measured on the one before it; the first layer keeps its own whenever this is above 0.
    """
    budget = _Budget(model, keep_bytes)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), around()

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    shadowed = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        again = functools.partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
        layer.forward = functools.partial(budget.run, layer.forward, again)
    try:
        yield
    finally:
        for layer, own in zip(layers, shadowed, strict=True):
            if own is None:
                del layer.forward
            else:
                layer.forward = own


class _Budget:
    """Decides for each layer whether its activations are kept, and measures them."""

    def __init__(self, model: Any, keep_bytes: int) -> None:
        self._left = keep_bytes
        self._needed = 1  # bytes, by the layer before
        self._weights = {p.untyped_storage().data_ptr() for p in model.parameters()} if keep_bytes else set()

    def run(self, keep: Any, again: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `keep` where there is room, else `again`."""
        if self._needed > self._left:
            return again(*args, **kwargs)
        sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._weights:  # these are there anyway
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # the tensor itself could hold the graph that holds it

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            result = keep(*args, **kwargs)
        self._needed = max(1, sum(sizes.values()))
        self._left -= self._needed
        return result


@contextmanager
def _attention(model: Any) -> Iterator[None]:
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


def _packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, heads, N, d], key and value [1, key heads, N, d] -> [1, N, heads, d].

    Raises:
        NotImplementedError: the layer asks for something that is not done here.
    """
    asked = [name for name in FOREIGN if kwargs.get(name) is not None]
    if asked or (sliding_window is not None and sliding_window < packing.longest):
        raise NotImplementedError(f"attention with {asked or f'a window of {sliding_window} tokens'}")
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [N, heads, d]

    def take(tokens: Tensor, index: Tensor) -> Tensor:  # [rows, heads, width, d]
        return tokens.index_select(0, index.reshape(-1)).unflatten(0, index.shape).transpose(1, 2)

    prompt_keys, prompt_values = take(key, packing.prompt_index), take(value, packing.prompt_index)
    # Padding is behind: no token before it sees it, and what it computes is dropped.
    prompts = scaled_dot_product_attention(
        take(query, packing.prompt_index),
        *_repeat(query, prompt_keys, prompt_values),
        is_causal=True,
        scale=scaling,
        dropout_p=dropout,
    )
    out = [prompts.transpose(1, 2)[packing.is_prompt]]
    if packing.completion_index.shape[1]:
        own_keys, own_values = take(key, packing.completion_index), take(value, packing.completion_index)
        completions = scaled_dot_product_attention(
            take(query, packing.completion_index),
            *_repeat(
                query,
                torch.cat([prompt_keys.index_select(0, packing.prompt_of), own_keys], dim=2),
                torch.cat([prompt_values.index_select(0, packing.prompt_of), own_values], dim=2),
            ),
            attn_mask=packing.visible,
            scale=scaling,
            dropout_p=dropout,
        )
        out.append(completions.transpose(1, 2)[packing.is_completion])
    return torch.cat(out).unsqueeze(0), None


def _repeat(query: Tensor, *shared: Tensor) -> list[Tensor]:
    """Keys or values [rows, key heads, width, d] once for each head of query, [N, heads, d]."""
    return [x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in shared]


def _number(is_token: Tensor, first: int) -> Tensor:
    """Running numbers from `first` on, row after row, at the True places; 0 elsewhere."""
    numbers = is_token.reshape(-1).cumsum(0).view_as(is_token) - 1 + first
    return torch.where(is_token, numbers, torch.zeros_like(numbers))


AttentionInterface.register(ATTENTION, _packed_attention)
