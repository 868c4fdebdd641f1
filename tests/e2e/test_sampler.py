"""[node.sampler] of a real node: its completions come from the server it names, and without the server it trains on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from shoal.node.store.metrics import read_metrics

from .harness import swarm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

KEY = "only-this-node-knows"
FIRST_DIGIT = 20  # token id of some digit in the built-in tokenizer; which one does not matter

RUN = """
[run]
name = "sampler"
seed = 3
[run.model.tiny]
hidden = 32
layers = 2
heads = 2
mlp = 64
[run.task]
options = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
eval_size = 4
[run.rewards]
functions = ["overlong"]
overlong_length = 4
overlong_buffer = 4
[run.grpo]
num_generations = 4
prompts_per_step = 2
max_completion_length = 6
temperature = 0.75
[run.sync]
target_samples = 16
rounds_max = 2
[run.admission]
mode = "open"
[run.membership]
preset = "local"
"""


class Stand:
    """Answers as SGLang does, with completions of three and of four tokens in turn, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], str]] = []
        stand = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stand.asked.append((self.path, body, self.headers.get("Authorization", "")))
                raw = json.dumps(answer(body) if self.path == "/generate" else {"success": True}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


def answer(body: dict[str, Any]) -> list[dict[str, Any]]:
    settings = body["sampling_params"]
    lengths = [min(3 + i % 2, settings["max_new_tokens"]) for i in range(settings["n"])]
    return [
        {
            "meta_info": {
                "output_token_logprobs": [[-2.0, FIRST_DIGIT + place, None] for place in range(length)],
                "finish_reason": {"type": "stop"},
            }
        }
        for length in lengths
    ]


@pytest.fixture
def stand() -> Iterator[Stand]:
    one = Stand()
    try:
        yield one
    finally:
        one.close()


def test_completions_of_a_node_come_from_the_server_that_it_names(tmp_path: Path, stand: Stand) -> None:
    with swarm(tmp_path, RUN) as one:
        first = one.found(
            SHOAL_NODE__WAIT_FOR_START="true",
            SHOAL_NODE__SAMPLER__KIND="sglang",
            SHOAL_NODE__SAMPLER__URL=stand.url,
            SHOAL_NODE__SAMPLER__API_KEY=KEY,
            SHOAL_NODE__SAMPLER__PUSH_EVERY_STEPS="0",
        )
        second = one.join(SHOAL_NODE__WAIT_FOR_START="true")  # the sampler is a node's own: this one has none
        one.begin()
        one.wait(lambda: all((n.status() or {}).get("finished") for n in one.nodes), "all finished")
        one.wait_equal()
        served = [r for r in read_metrics(first.data_dir) if r.get("steps")]
        assert served, first.tail()
        for record in served:
            assert record["sampler_fallback"] == 0.0
            assert record["completion_length"] == 3.5  # as the stand answers
            assert record["sampler_ratio/mean"] > 0  # the correction is on
        assert not any("sampler_fallback" in record for record in read_metrics(second.data_dir))
        asked = [(body, key) for path, body, key in stand.asked if path == "/generate"]
        assert all(key == f"Bearer {KEY}" for _, key in asked)
        settings = [body["sampling_params"] for body, _ in asked]
        whole = [s for s in settings if s["n"] == 4]
        assert whole and all(s["max_new_tokens"] == 6 and s["temperature"] == 0.75 for s in whole)
        pushes = [body for path, body, _ in stand.asked if path == "/update_weights_from_disk"]
        assert pushes and Path(pushes[0]["model_path"]).is_relative_to(first.data_dir.absolute())
        assert KEY not in json.dumps(first.log())


def test_a_node_whose_server_is_away_samples_itself_and_says_so(tmp_path: Path) -> None:
    with swarm(tmp_path, RUN) as one:
        node = one.found(
            SHOAL_NODE__SAMPLER__KIND="vllm",
            SHOAL_NODE__SAMPLER__URL="http://127.0.0.1:9",
            SHOAL_NODE__SAMPLER__TIMEOUT_SECONDS="0.5",
        )
        one.wait(lambda: bool((node.status() or {}).get("finished")), "finished")
        records = [r for r in read_metrics(node.data_dir) if r.get("steps")]
        assert records and all(record["sampler_fallback"] == 1.0 for record in records)
        assert "sampling on the trainer" in node.tail() + json.dumps(node.log())
