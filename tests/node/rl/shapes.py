"""Small random models of the architectures that runs use, for tests: built in milliseconds, no download."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY = 101
CONTEXT = 64
_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_SHARED),
    "qwen3": Qwen3Config(**_SHARED, head_dim=8),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=CONTEXT,
        bos_token_id=None,
        eos_token_id=1,
        tie_word_embeddings=False,
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **_SHARED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    ),
}


def build(shape: str, *, seed: int = 0, gain: float = 4.0) -> Any:
    """A model in eval mode; `gain` scales its output layer, so that some tokens are much likelier than others."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[shape])
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:  # transformers starts at 0.02, from which every distribution is flat
                    parameter.mul_(3.0)
            model.get_output_embeddings().weight.mul_(gain)
    return model.eval()
