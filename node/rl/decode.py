"""Decodes one token for each row of a batch: transformers' way, and on the CPU a lean one for Llama-shaped models.

For few rows a step is bound by how the matrix products walk over the weights and by what surrounds them. The lean way
lays the weights out for oneDNN's small products while it samples (adapters merged into that copy, never into the model;
queries, keys and values in one product, gate and up in one), keeps keys and values in place, and leaves out the layers'
Python. The sums are the same, in another order. Prompts are prefilled by transformers (`start`), and models that the
lean way does not fit, which a probe finds out, decode there as well. Does not draw tokens (`draw.py`).
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.cache_utils import DynamicLayer

from .policy import PROBE_GAP_MAX, base_of, forward_logits, new_cache, positions, probed

COPY_FROM_TOKENS = 12  # a copy of the weights takes as long as a few decode steps, and saves half of each
GROWTH = 64  # columns that keys and values grow by
PACKED_ROWS = 8  # rows that copies are laid out for; oneDNN takes any other number as well, hardly slower
PROBE_COPY_BYTES = 1 << 26  # some layers of a probed model run from copies, the others as they are


class Decoder(Protocol):
    """The rows of a batch and what the model remembers of them."""

    def step(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Logits [rows, vocabulary] behind one more token of each row; both arguments int64 [rows]."""
        ...

    def select(self, kept: Tensor) -> None:
        """Only the rows at `kept`, int64 [kept rows], go on."""
        ...


def start(
    model: Any, prompt_ids: Tensor, mask: Tensor, *, num_generations: int, max_new_tokens: int, copy_bytes: int
) -> tuple[Tensor, Decoder]:
    """Reads each prompt once; logits [g x num_generations, vocabulary] behind the prompts, and a decoder of these rows.

    Args:
        model: a causal LM in eval mode.
        prompt_ids: int64 [g, P], left-padded.
        mask: bool [g, P], False at padding.
        max_new_tokens: steps to expect.
        copy_bytes: memory for copies of weights in a faster layout, until the decoder is dropped.
    """
    lean_bytes = (copy_bytes if max_new_tokens >= COPY_FROM_TOKENS else 0) if runs_lean(model) else None
    return _prefill(model, prompt_ids, mask, num_generations, lean_bytes)


def _prefill(
    model: Any, prompt_ids: Tensor, mask: Tensor, num_generations: int, lean_bytes: int | None
) -> tuple[Tensor, Decoder]:
    """As `start`; `lean_bytes` are those for copies, None for transformers' way."""
    cache = new_cache(model)
    logits = forward_logits(
        model, input_ids=prompt_ids, attention_mask=mask, position_ids=positions(mask), keep=1, cache=cache
    )[:, -1].repeat_interleave(num_generations, dim=0)
    mask = mask.repeat_interleave(num_generations, dim=0)
    # Other kinds of cache forget tokens, or hold something else than keys and values.
    if lean_bytes is not None and all(type(kept) is DynamicLayer for kept in cache.layers):
        return logits, LeanDecoder(model, cache, mask, copy_bytes=lean_bytes)
    cache.batch_repeat_interleave(num_generations)
    return logits, TransformersDecoder(model, cache, mask)


class TransformersDecoder:
    """Any model: its own forward pass and key-value cache."""

    def __init__(self, model: Any, cache: Any, mask: Tensor) -> None:
        """`mask`: bool [rows, P], False at the prompts' padding."""
        self._model, self._cache, self._mask = model, cache, mask

    def step(self, tokens: Tensor, position: Tensor) -> Tensor:
        """See `Decoder`."""
        self._mask = pad(self._mask, (0, 1), value=True)
        return forward_logits(
            self._model,
            input_ids=tokens.unsqueeze(1),
            attention_mask=self._mask,
            position_ids=position.unsqueeze(1),
            keep=1,
            cache=self._cache,
        )[:, -1]

    def select(self, kept: Tensor) -> None:
        """See `Decoder`."""
        self._cache.batch_select_indices(kept)
        self._mask = self._mask[kept]


class LeanDecoder:
    """Models of Llama's shape: norm, attention with rotary positions, norm, a gated MLP or any other."""

    def __init__(self, model: Any, cache: Any, mask: Tensor, *, copy_bytes: int) -> None:
        """`cache`: of the g prompts, emptied here; `mask`: bool [rows, P], False at the prompts' padding."""
        base = base_of(model)
        body = base.base_model
        self._embed, self._rotary, self._norm = body.embed_tokens, body.rotary_emb, body.norm
        self._width = mask.shape[1]  # columns in use
        self._bias = None
        if not mask.all():
            self._bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)[:, None, None]  # [rows, 1, 1, P]
        budget = _Budget(copy_bytes)
        self._layers = []
        for layer, remembered in zip(body.layers, cache.layers, strict=True):
            self._layers.append(_Layer(layer, remembered.keys, remembered.values, len(mask), budget))
            remembered.keys = remembered.values = None
        self._head = _Projection(budget, base.get_output_embeddings())

    def step(self, tokens: Tensor, position: Tensor) -> Tensor:
        """See `Decoder`."""
        hidden = self._embed(tokens)
        cos, sin = self._rotary(hidden.unsqueeze(1), position.unsqueeze(1))
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)  # the sign of transformers' `rotate_half`
        if self._bias is not None:
            self._bias = pad(self._bias, (0, 1))
        for layer in self._layers:
            hidden = layer.step(hidden, cos, sin, self._bias, self._width)
        self._width += 1
        return self._head(self._norm(hidden))

    def select(self, kept: Tensor) -> None:
        """See `Decoder`."""
        if self._bias is not None:
            self._bias = self._bias[kept]
        for layer in self._layers:
            layer.select(kept)


class _Layer:
    """One layer and the keys and values of its rows."""

    def __init__(self, layer: Any, keys: Tensor, values: Tensor, rows: int, budget: _Budget) -> None:
        """`keys` and `values`: fp32 [g, key heads, P, d], after rotation."""
        attention, self._mlp = layer.self_attn, layer.mlp
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._head_norms = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        self._scaling = attention.scaling
        self._qkv = _Projection(budget, attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = _Projection(budget, attention.o_proj)
        self._gate_up = None
        if all(hasattr(self._mlp, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            self._gate_up = _Projection(budget, self._mlp.gate_proj, self._mlp.up_proj)
            self._down = _Projection(budget, self._mlp.down_proj)
        groups, self._key_heads, width, self._size = keys.shape
        self._cache = torch.empty(2, rows, self._key_heads, width + GROWTH, self._size)
        for own, prompts in zip(self._cache, (keys, values), strict=True):
            own.unflatten(0, (groups, -1))[..., :width, :] = prompts.unsqueeze(1)

    def step(self, hidden: Tensor, cos: Tensor, sin: Tensor, bias: Tensor | None, width: int) -> Tensor:
        """hidden [rows, hidden size]; cos, sin [rows, 1, d]; bias [rows, 1, 1, width + 1]; `width` columns are used."""
        rows = len(hidden)
        heads = self._qkv(self._norms[0](hidden)).view(rows, -1, self._size)
        turned, values = heads[:, : -self._key_heads], heads[:, -self._key_heads :]
        if self._head_norms:
            parts = turned[:, : -self._key_heads], turned[:, -self._key_heads :]
            turned = torch.cat([norm(part) for norm, part in zip(self._head_norms, parts, strict=True)], dim=1)
        turned = torch.addcmul(turned * cos, turned.roll(self._size // 2, -1), sin)
        if width == self._cache.shape[3]:
            self._cache = pad(self._cache, (0, 0, 0, GROWTH))
        self._cache[0, :, :, width] = turned[:, -self._key_heads :]
        self._cache[1, :, :, width] = values
        keys, values = self._cache[..., : width + 1, :]
        # The heads of a row that share keys are put where queries of a sequence would be.
        queries = turned[:, : -self._key_heads].unflatten(1, (self._key_heads, -1))
        if bias is not None:
            bias = bias.expand(-1, self._key_heads, queries.shape[2], -1)
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=self._scaling)
        hidden = hidden + self._out(attended.reshape(rows, -1))
        return hidden + self._feed_forward(self._norms[1](hidden))

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        if self._gate_up is None:
            return self._mlp(hidden.unsqueeze(1)).squeeze(1)
        gate, up = self._gate_up(hidden).chunk(2, dim=-1)
        return self._down(self._mlp.act_fn(gate) * up)

    def select(self, kept: Tensor) -> None:
        """See `Decoder`."""
        self._cache = self._cache[:, kept]


class _Budget:
    """Bytes left for copies of weights."""

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self, size: int) -> bool:
        """Whether `size` bytes are left; they are taken then."""
        taken = size <= self._left
        self._left -= size if taken else 0
        return taken


class _Projection:
    """Linear maps of the same input, side by side: from one copy of their weights, or by the modules themselves."""

    def __init__(self, budget: _Budget, *modules: nn.Module) -> None:
        self._modules, self._weight, self._bias = modules, None, None
        if not all(_is_linear(m) for m in modules) or not _HAS_PACKED_PRODUCT:
            return
        linears: list[Any] = [getattr(m, "base_layer", m) for m in modules]
        if len({m.bias is None for m in linears}) > 1 or any(m.weight.dtype != torch.float32 for m in linears):
            return
        sizes = [m.weight.shape[0] for m in linears]
        if not budget.take(sum(m.weight.nbytes for m in linears)):
            return
        whole = torch.empty(sum(sizes), linears[0].weight.shape[1])
        for module, linear, part in zip(modules, linears, whole.split(sizes), strict=True):
            part.copy_(linear.weight)
            for a, b, scaling in _adapters(module):
                part.addmm_(b, a, alpha=scaling)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(whole, PACKED_ROWS)
        if linears[0].bias is not None:
            self._bias = torch.cat([m.bias for m in linears])

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, the maps' outputs in a row]."""
        if self._weight is None:
            outputs = [module(x) for module in self._modules]
            return torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


def _is_linear(module: Any) -> bool:
    """Whether a module is a weight matrix, a bias or none, and adapters of the plain kind; others run as they are."""
    if type(module) is nn.Linear:
        return True
    return (
        type(module) is LoraLinear
        and type(module.base_layer) is nn.Linear
        and not getattr(module, "lora_variant", None)
        and not any(getattr(module, "use_dora", {}).values())
        and not any(getattr(module, "lora_bias", {}).values())
    )


def _adapters(module: Any) -> list[tuple[Tensor, Tensor, float]]:
    """A, B and scaling of each adapter that acts on top of a module's own weight."""
    if not isinstance(module, LoraLinear) or module.disable_adapters or module.merged:
        return []
    a: Any = module.lora_A
    b: Any = module.lora_B
    return [(a[name].weight, b[name].weight, module.scaling[name]) for name in module.active_adapters if name in a]


_HAS_PACKED_PRODUCT = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
)


def runs_lean(model: Any) -> bool:
    """Whether the lean way gives what the model itself gives; measured once for each model and remembered."""
    return probed(model, _RUNS_LEAN, _why_not_lean, "it decodes by its own forward pass")


_RUNS_LEAN: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


@torch.no_grad()
def _why_not_lean(model: Any) -> str:
    """Empty where a model decodes the lean way, else the reason."""
    base = base_of(model)
    weight = base.get_input_embeddings().weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return f"{weight.dtype} on {weight.device.type}, not 32 bits on the CPU"
    reason = _other_parts(base)
    if reason:
        return reason
    ids = (torch.arange(1, 13) * (base.config.get_text_config().vocab_size // 13)).view(2, 6)
    mask = torch.tensor([[True] * 5, [False] * 2 + [True] * 3])
    position = mask.sum(1).repeat_interleave(2)
    try:
        ways = [_prefill(model, ids[:, :5], mask, 2, lean_bytes) for lean_bytes in (None, PROBE_COPY_BYTES)]
        for i, tokens in enumerate(ids.flip(1)[:, :3].t().repeat_interleave(2, dim=1)):
            if i == 2:
                for _, decoder in ways:
                    decoder.select(torch.tensor([0, 2, 3]))
                tokens, position = tokens[1:], position[[0, 2, 3]]
            plain, lean = (decoder.step(tokens, position + i).log_softmax(-1) for _, decoder in ways)
            if not torch.allclose(plain, lean, rtol=0, atol=PROBE_GAP_MAX):
                return f"log-probs differ by {float((plain - lean).abs().max()):.2g}"
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _other_parts(base: Any) -> str:
    """What a model has that the lean way would leave out; empty if nothing."""
    body = base.base_model
    known = [(body, {"embed_tokens", "layers", "norm", "rotary_emb"})]
    for layer in getattr(body, "layers", ()):
        known.append((layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}))
        projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
        known.append((getattr(layer, "self_attn", nn.Module()), projections | {"q_norm", "k_norm"}))
    for module, names in known:
        found = {name for name, _ in module.named_children()} | {n for n, _ in module.named_parameters(recurse=False)}
        if found - names or (names - {"q_norm", "k_norm"}) - found:
            return f"its {type(module).__name__} consists of {', '.join(sorted(found))}"
    return ""
