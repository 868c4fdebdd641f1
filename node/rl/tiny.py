"""The built-in model: a small random Llama and a character tokenizer, both built in code from the run seed.

Weights come from a counter-based generator by integer arithmetic alone, so that two machines with different CPUs or
torch versions build the same bits. Saves and loads as an ordinary Hugging Face folder. Does not train (`learner.py`).
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .config import TinyConfig

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ALPHABET = "\n" + "".join(chr(c) for c in range(32, 127))  # printable ASCII; anything else is <unk>
POSITIONS_MAX = 1024  # tokens of prompt and completion together
INIT_GAIN = 0.3  # of the usual 1 / sqrt(fan-in): from larger weights the model memorizes before it generalizes


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of printable ASCII, and pad, eos, unknown (ids 0, 1, 2)."""
    vocab = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=POSITIONS_MAX,
        clean_up_tokenization_spaces=False,
    )


def build_model(config: TinyConfig, *, seed: int, vocab_size: int) -> LlamaForCausalLM:
    """A random Llama in fp32 on the CPU; equal seeds and shapes give equal bits on every machine."""
    model_config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=config.hidden,
        intermediate_size=config.mlp,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=POSITIONS_MAX,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):  # the constructor draws weights that are replaced below
        model = LlamaForCausalLM(model_config)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() < 2:
                parameter.fill_(1.0)  # norm scales
            else:
                fan_in = parameter.shape[1] if "embed" not in name else config.hidden
                parameter.copy_(portable_uniform(tuple(parameter.shape), INIT_GAIN * math.sqrt(3 / fan_in), seed, name))
    return model


def portable_uniform(shape: tuple[int, ...], bound: float, seed: int, name: str) -> torch.Tensor:
    """fp32 values uniform in [-bound, bound), a function of (seed, name) alone: same bits on every machine."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    raw = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(math.prod(shape))
    unit = (raw >> np.uint64(40)).astype(np.float64) / 2**23 - 1.0  # 24 bits, exact
    return torch.from_numpy((unit * bound).astype(np.float32).reshape(shape))


def is_tiny_tokenizer(tokenizer: object) -> bool:
    """Whether this is the tokenizer of `build_tokenizer`, also after saving and loading."""
    size = len(ALPHABET) + 3
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and len(tokenizer) == size
        and tokenizer.convert_tokens_to_ids([PAD, EOS, UNKNOWN]) == [0, 1, 2]
    )
