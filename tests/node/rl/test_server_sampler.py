"""Server samplers over real sockets: each kind's requests and answers, checks, probe, pushes, and life without a server.

The server here answers in the documented shapes of vLLM and SGLang from a model of its own; `test_llama_server.py` asks a
real llama.cpp server.
"""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from shoal.node.rl.config import GrpoConfig, ModelConfig, SamplerConfig
from shoal.node.rl.draw import Sampling
from shoal.node.rl.export import load_adapter
from shoal.node.rl.models import load_model
from shoal.node.rl.policy import completion_logps
from shoal.node.rl.rollout import BuiltInSampler, sample
from shoal.node.rl.server_sampler import LEAVE_ALONE_SECONDS, ServerSampler
from shoal.node.rl.servers import Ask, Completion, Http, ServerError, SglangServer, checked
from shoal.node.rl.update import corrects_sampler
from shoal.protocol.errors import ShoalError

from .conftest import SMALL

PROMPTS = [[20, 21, 22], [30, 31]]


class Stand:
    """An HTTP server that samples from `loaded` and notes what it was asked."""

    def __init__(self, kind, loaded):
        self.kind, self.loaded, self.raw = kind, loaded, False
        self.asked, self.adapters, self.failures = [], {}, 0
        self.lock = threading.Lock()
        stand = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer({"data": [{"id": "base"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with stand.lock:
                    stand.asked.append((self.path, body))
                    if stand.failures:
                        stand.failures -= 1
                        self.send_error(503)
                        return
                    self.answer(stand.reply(self.path, body))

            def answer(self, tree):
                raw = json.dumps(tree).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def reply(self, path, body):
        if "load_lora" in path:
            if "unload" in path:
                del self.adapters[body["lora_name"]]
            else:
                self.adapters[body["lora_name"]] = body["lora_path"]
            return {"success": True}
        if "weights" in path or "rpc" in path or "reset" in path:
            return {"success": True}
        vllm = self.kind == "vllm"
        settings = body if vllm else body["sampling_params"]
        name = body["model"] if vllm else body.get("lora_path")
        model = self.loaded
        if name in self.adapters:
            fresh = load_model(ModelConfig(tiny=SMALL), seed=3, device="cpu")
            model = load_adapter(fresh, Path(self.adapters[name]))
        sampling = Sampling(
            temperature=settings["temperature"], top_p=settings["top_p"], top_k=max(0, settings["top_k"]),
            min_p=settings["min_p"],
        )  # fmt: skip
        found = sample(
            model.model, [body["prompt" if vllm else "input_ids"]], num_generations=settings["n"],
            max_new_tokens=settings["max_tokens" if vllm else "max_new_tokens"], sampling=sampling,
            eos_ids=settings["stop_token_ids"], pad_id=0, generator=torch.Generator().manual_seed(body.get("seed", 3)),
        )  # fmt: skip
        logps = completion_logps(model.model, found.batch) if self.raw else found.sampler_logps
        rows = [
            (ids, logps[i, : len(ids)].tolist(), "length" if found.truncated[i] else "stop")
            for i, ids in enumerate(found.completions())
        ]
        if vllm:
            return {
                "choices": [
                    {"index": i, "token_ids": ids, "logprobs": {"token_logprobs": p}, "finish_reason": why}
                    for i, (ids, p, why) in enumerate(rows)
                ]
            }
        return [
            {
                "output_ids": ids,
                "meta_info": {
                    "finish_reason": {"type": why},
                    "output_token_logprobs": [[x, t, None] for x, t in zip(p, ids, strict=True)],
                },
            }
            for ids, p, why in rows
        ]


@pytest.fixture
def stand(tiny):
    made = []

    def make(kind, loaded=tiny):
        made.append(Stand(kind, loaded))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Time:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now, self.slept = 100.0, 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept += seconds


def sampler_of(loaded, stand, tmp_path, **changes):
    time = Time()
    config = SamplerConfig(**({"kind": stand.kind, "url": stand.url, "timeout_seconds": 10} | changes))
    return ServerSampler(loaded, config, tmp_path / "push", clock=time, sleep=time.sleep), time


def draw(sampler, sampling=None, seed=0, n=3):
    return sampler.sample(
        PROMPTS, num_generations=n, max_new_tokens=5, sampling=sampling or Sampling(),
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip


def paths(stand):
    return [path for path, _ in stand.asked]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_ids_and_logps_arrive_in_order(kind, stand, tiny, tmp_path):
    server = stand(kind)
    sampler, _ = sampler_of(tiny, server, tmp_path)
    sampler.push(new_round=True)
    found = draw(sampler)
    assert not found.from_trainer and not sampler.is_trainer
    mask = found.batch.completion_mask()
    again = completion_logps(tiny.model, found.batch)
    assert torch.allclose(again[mask], found.sampler_logps[mask], atol=1e-4)
    assert found.batch.prompt_of.tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.all(found.sampler_logps[~mask] == 0)
    for ids, cut in zip(found.completions(), found.truncated.tolist(), strict=True):
        assert (ids[-1] in tiny.eos_ids) != cut
    asked = [body for path, body in server.asked if path in ("/v1/completions", "/generate")]
    assert sorted(len(b.get("prompt") or b["input_ids"]) for b in asked) == [2, 3]  # one request a prompt


def test_samples_of_a_server_are_corrected_and_own_ones_are_not(tiny):
    assert corrects_sampler(GrpoConfig(), tiny, from_trainer=False)
    assert not corrects_sampler(GrpoConfig(), tiny, from_trainer=True)
    assert not corrects_sampler(GrpoConfig(vllm_importance_sampling_correction=False), tiny, from_trainer=False)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_pushed_adapter_is_what_is_sampled_from(kind, stand, tiny_lora, tmp_path):
    """The server puts the adapter's folder on its own copy of the base: its log-probs are then the trainer's."""
    server = stand(kind)
    sampler, _ = sampler_of(tiny_lora, server, tmp_path)
    for turn in range(3):
        with torch.no_grad():
            for name, parameter in tiny_lora.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(turn))
        sampler.push(new_round=False)
        found = draw(sampler, n=4)
        assert not found.from_trainer
        mask = found.batch.completion_mask()
        again = completion_logps(tiny_lora.model, found.batch)
        assert torch.allclose(again[mask], found.sampler_logps[mask], atol=1e-4)
    assert len(server.adapters) == 1  # older ones are unloaded, and their folders go
    assert len(list((tmp_path / "push").iterdir())) == 2


def test_full_weights_are_pushed_to_a_folder(stand, tiny, tmp_path):
    for kind, path in (("vllm", "/collective_rpc"), ("sglang", "/update_weights_from_disk")):
        server = stand(kind)
        sampler, _ = sampler_of(tiny, server, tmp_path / kind)
        sampler.push(new_round=True)
        assert path in paths(server)
        assert (tmp_path / kind / "push" / "weights" / "model.safetensors").is_file()


@pytest.mark.parametrize(("every", "expected"), [(0, [0, 5]), (1, [0, 1, 2, 3, 4, 5, 6]), (2, [0, 2, 4, 5])])
def test_pushes_come_at_round_starts_and_every_so_many_steps(stand, tiny, tmp_path, every, expected):
    server = stand("sglang")
    sampler, _ = sampler_of(tiny, server, tmp_path, push_every_steps=every)
    pushed = []
    for step in range(7):
        before = len(server.asked)
        sampler.push(new_round=step in (0, 5))
        if len(server.asked) > before:
            pushed.append(step)
    assert pushed == expected


def test_vllm_that_reports_raw_logps_is_found_out(stand, tiny, tmp_path, caplog):
    server = stand("vllm")
    server.raw = True
    sampler, _ = sampler_of(tiny, server, tmp_path)
    sampler.push(new_round=True)
    assert not draw(sampler).from_trainer  # plain sampling: raw log-probs are the right ones
    assert draw(sampler, Sampling(temperature=0.7)).from_trainer
    assert "processed_logprobs" in caplog.text


def test_the_probe_is_asked_once_for_each_setting(stand, tiny, tmp_path):
    server = stand("vllm")
    sampler, _ = sampler_of(tiny, server, tmp_path)
    sampler.push(new_round=True)
    for _ in range(3):
        assert not draw(sampler, Sampling(temperature=0.7, top_p=0.9)).from_trainer
    assert sum(body.get("max_tokens") == 1 for _, body in server.asked) == 1


def test_a_short_failure_is_waited_out(stand, tiny, tmp_path):
    server = stand("sglang")
    sampler, time = sampler_of(tiny, server, tmp_path)
    server.failures = 2
    sampler.push(new_round=True)
    assert not draw(sampler).from_trainer
    assert time.slept == pytest.approx(0.2 + 0.4)


def test_without_the_server_the_trainer_samples_until_it_is_back(stand, tiny, tmp_path, caplog):
    server = stand("sglang")
    sampler, time = sampler_of(tiny, server, tmp_path, timeout_seconds=3)
    server.failures = 10**6
    sampler.push(new_round=True)
    found = draw(sampler, seed=4)
    assert found.from_trainer and time.slept <= 3
    assert "sampling on the trainer" in caplog.text
    asked = len(server.asked)
    sampler.push(new_round=False)
    draw(sampler)
    assert len(server.asked) == asked  # left alone for a while
    time.now += LEAVE_ALONE_SECONDS
    server.failures = 0
    sampler.push(new_round=False)  # makes up for the one that failed
    assert not draw(sampler).from_trainer
    mask = found.batch.completion_mask()
    assert torch.allclose(completion_logps(tiny.model, found.batch)[mask], found.sampler_logps[mask], atol=1e-4)


def test_nothing_listens(tiny, tmp_path):
    time = Time()
    config = SamplerConfig(kind="vllm", url="http://127.0.0.1:9", timeout_seconds=1)
    sampler = ServerSampler(tiny, config, tmp_path, clock=time, sleep=time.sleep)
    sampler.push(new_round=True)
    assert draw(sampler).from_trainer


def test_a_learner_trains_on_a_server(stand, make_learner, tmp_path):
    questions = tmp_path / "parity.jsonl"
    questions.write_text("".join(f'{{"prompt": "{i}>", "answer": "{i % 2}"}}\n' for i in range(100)))
    learner = make_learner(
        task={"name": str(questions), "options": {}, "prompt_format": "plain"},
        warmup={"steps": 30, "learning_rate": 1e-2},  # sometimes right, so that rewards differ within a group
    )
    server = stand("sglang", learner.loaded)
    learner._sampler, _ = sampler_of(learner.loaded, server, tmp_path)
    learner.load(learner.initial())
    learner.warmup()
    learner.begin(0)
    metrics = learner.step().metrics
    assert metrics["sampler_fallback"] == 0
    assert metrics["sampler_weight"] == pytest.approx(
        1, abs=1e-3
    )  # the same weights: a correction that corrects nothing


ASK = Ask(prompt=[5], n=1, max_new_tokens=4, sampling=Sampling(), eos_ids=[1], seed=0)


@pytest.mark.parametrize(
    ("ids", "logps"),
    [
        ([], []), ([2, 3], [-1.0]), ([2] * 5, [-1.0] * 5), ([10], [-1.0]), ([-1], [-1.0]), (["2"], [-1.0]), ([True], [-1.0]),
        ([2], [0.5]), ([2], ["x"]), ([2.0], [-1.0]),
    ],
)  # fmt: skip
def test_answers_that_cannot_be_used(ids, logps):
    with pytest.raises(ServerError):
        checked(Completion(ids=ids, logps=logps, ended=True), ASK, vocabulary=10)


def test_a_completion_is_cut_behind_its_first_end_token():
    found = checked(Completion(ids=[2, 1, 3], logps=[-1.0, None, -2.0], ended=False), ASK, vocabulary=10)
    assert found.ids == [2, 1] and found.ended
    assert found.logps[0] == -1.0 and math.isnan(found.logps[1])


def test_answers_of_another_shape(stand, tiny):
    server = stand("sglang")
    for answer in (
        {},
        [],
        {"meta_info": {}},
        {"meta_info": {"output_token_logprobs": [3], "finish_reason": {}}},
        "text",
    ):
        server.reply = lambda path, body, answer=answer: answer
        try:
            found = SglangServer(Http(server.url, "", 5), "").complete(ASK)
        except ServerError:
            continue
        assert found == []


def test_llama_cpp_needs_lora(tiny, tiny_lora, tmp_path):
    config = SamplerConfig(kind="llama.cpp", url="http://127.0.0.1:9", model="m")
    with pytest.raises(ShoalError, match="llama.cpp cannot take over"):
        ServerSampler(tiny, config, tmp_path)
    assert ServerSampler(tiny_lora, config, tmp_path)


def test_greedy_and_evaluation_stay_with_the_trainer(stand, tiny, tmp_path):
    server = stand("sglang")
    sampler, _ = sampler_of(tiny, server, tmp_path)
    sampler.push(new_round=True)
    found = draw(sampler, Sampling(greedy=True))
    own = draw(BuiltInSampler(tiny), Sampling(greedy=True))
    assert found.from_trainer and found.completions() == own.completions()


def test_a_server_needs_its_address():
    with pytest.raises(ValueError, match="needs url"):
        SamplerConfig(kind="vllm")
