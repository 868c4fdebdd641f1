"""Writes a LoRA adapter as GGUF, the form that llama.cpp loads, for the architectures whose tensors map one to one.

llama.cpp keeps the query and key rows of Llama models in another order (pairs of rotary coordinates side by side), so
the rows of B are permuted as its own converter permutes the weights. Needs the `gguf` extra.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...protocol.errors import ExitCode, ShoalError
from .models import ADAPTER, LoadedModel

# model_type of transformers -> architecture name of GGUF, and whether query and key rows are permuted there.
ARCHITECTURES = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}


def write_adapter_gguf(loaded: LoadedModel, path: Path) -> None:
    """Write the adapter being trained to `path`, whole or not at all.

    Raises:
        ShoalError: no LoRA, an architecture or a layer that has no counterpart, or `gguf` is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise _refusal(f"{error}", "pip install 'shoal[gguf]'.", ExitCode.DEPENDENCY) from None
    model = loaded.model.get_base_model() if loaded.is_lora else loaded.model
    kind = model.config.model_type
    if not loaded.is_lora or kind not in ARCHITECTURES:
        raise _refusal(
            f"{'LoRA' if loaded.is_lora else 'no LoRA'} on a {kind} model, expected LoRA on one of {sorted(ARCHITECTURES)}",
            "Use another sampler.",
            ExitCode.CONFIG,
        )
    name, permuted = ARCHITECTURES[kind]
    architecture = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == name)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    peft = loaded.model.peft_config[ADAPTER]
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.partial")
    writer = gguf.GGUFWriter(scratch, name)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(peft.lora_alpha))
    for module_name, module in loaded.model.named_modules():
        if ADAPTER not in getattr(module, "lora_A", {}):
            continue
        source = module_name.removeprefix("base_model.model.")
        target = names.get_name(f"{source}.weight", try_suffixes=(".weight",))
        if target is None:
            raise _refusal(f"layer {source} has no name in GGUF", "Leave it out of target_modules.", ExitCode.CONFIG)
        a, b = _array(module.lora_A[ADAPTER].weight), _array(module.lora_B[ADAPTER].weight)
        if permuted and source.endswith(("q_proj", "k_proj")):
            heads = model.config.num_attention_heads if source.endswith("q_proj") else model.config.num_key_value_heads
            b = permute_rows(b, heads)
        writer.add_tensor(f"{target}.lora_a", a)
        writer.add_tensor(f"{target}.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    scratch.replace(path)


def permute_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix, fp32 [heads x d, r], from halves (transformers) to interleaved pairs (GGUF)."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def _array(parameter: Any) -> np.ndarray:
    return parameter.detach().float().cpu().numpy()


def _refusal(values: str, todo: str, code: ExitCode) -> ShoalError:
    return ShoalError("The adapter cannot be written for llama.cpp", values=values, todo=todo, code=code)
