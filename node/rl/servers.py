"""Inference servers that give token ids and log-probs: what each kind is asked, and how it answers.

* vLLM: `/v1/completions` with `return_token_ids`; `/v1/load_lora_adapter` (start it with `--enable-lora`,
  VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and `--logprobs-mode processed_logprobs`); for full weights `/collective_rpc`
  `reload_weights` (VLLM_SERVER_DEV_MODE=1, started on the folder `weights` of `push_dir`).
* SGLang: `/generate` with `return_logprob`; `/load_lora_adapter`; for full weights `/update_weights_from_disk`.
* llama.cpp: `/completion` with `post_sampling_probs`; its server reads adapters only when it loads a model, so it runs as a
  router (`--models-preset`) and the model is unloaded and loaded again after the adapter's file was replaced.

One request carries the whole group of a prompt, so that the server reads the prompt once. What a server says is checked
before it is used. Does not retry, push in time or fall back: `server_sampler.py` does.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .config import SamplerConfig
from .draw import Sampling

ANSWER_BYTES_MAX = (
    256 * 1024 * 1024
)  # of one answer: 1,024 completions of 65,536 tokens are cut off, nothing that is usual
POLL_SECONDS = 0.1  # between looks at a model that llama.cpp loads
LOGP_SLACK = 1e-3  # a log-prob may exceed 0 by rounding


class ServerError(Exception):
    """The server cannot be reached, refuses, or says something that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled completion.

    Attributes:
        ids: token ids, the one that ended it included where the server names it.
        logps: log-prob of each under the distribution it was drawn from; NaN where the server cannot tell.
        ended: whether it ended by itself (False: at the length limit).
    """

    ids: list[int]
    logps: list[float]
    ended: bool


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What to sample: `n` completions of one prompt, at most `max_new_tokens` long."""

    prompt: Sequence[int]
    n: int
    max_new_tokens: int
    sampling: Sampling
    eos_ids: Sequence[int]
    seed: int


class Server(Protocol):
    """One kind of server."""

    weights_folder: str | None  # name of the folder for full weights, None where the kind takes adapters only
    probe_temperature: bool  # whether temperature may be missing from its log-probs
    adapter_is_gguf: bool

    def complete(self, ask: Ask) -> list[Completion]:
        """Raises ServerError."""
        ...

    def load_adapter(self, path: Path, version: int) -> None:
        """Sample from the base model with this adapter from now on. Raises ServerError."""
        ...

    def load_weights(self, folder: Path) -> None:
        """Sample from these weights from now on. Raises ServerError."""
        ...


class Http:
    """JSON over HTTP to one server."""

    def __init__(self, url: str, api_key: str, timeout_seconds: float) -> None:
        self._url, self.timeout_seconds = url.rstrip("/"), timeout_seconds
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )

    def __call__(self, path: str, body: Any = None) -> Any:
        """POST `body`, or GET without one; the answer's JSON, or its text where it is none. Raises ServerError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_seconds) as answer:
                raw = answer.read(ANSWER_BYTES_MAX + 1)
        except urllib.error.HTTPError as error:
            said = error.read(500).decode("utf-8", "replace")
            raise ServerError(f"{path} answered {error.code}: {said}") from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self._url}{path}: {error or type(error).__name__}") from None
        if len(raw) > ANSWER_BYTES_MAX:
            raise ServerError(f"{path} answered more than {ANSWER_BYTES_MAX} bytes")
        try:
            return json.loads(raw)
        except ValueError:
            return raw.decode("utf-8", "replace")


class VllmServer:
    """vLLM, and others that speak its completions API with token ids."""

    weights_folder = "weights"
    probe_temperature = True
    adapter_is_gguf = False

    def __init__(self, http: Http, model: str) -> None:
        self._http = http
        self._base = self._model = model

    def complete(self, ask: Ask) -> list[Completion]:
        body = {
            "model": self._model or self._first_model(),
            "prompt": list(ask.prompt),
            "n": ask.n,
            "max_tokens": ask.max_new_tokens,
            "temperature": ask.sampling.temperature,
            "top_p": ask.sampling.top_p,
            "top_k": ask.sampling.top_k or -1,
            "min_p": ask.sampling.min_p,
            "stop": list(ask.sampling.stop_strings),
            "stop_token_ids": list(ask.eos_ids),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "seed": ask.seed,
            "logprobs": 1,
            "return_token_ids": True,
        }
        choices = _field(self._http("/v1/completions", body), "choices", list)
        return [
            Completion(
                ids=_field(choice, "token_ids", list),
                logps=_field(_field(choice, "logprobs", dict), "token_logprobs", list),
                ended=choice.get("finish_reason") == "stop",
            )
            for choice in sorted(choices, key=lambda c: c.get("index", 0))
        ]

    def load_adapter(self, path: Path, version: int) -> None:
        # A name of its own for each version: every vLLM knows it, and no cache mistakes one version for another.
        name, before = path.name, self._model
        self._http("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        self._model = name
        if version > 1:
            self._http("/v1/unload_lora_adapter", {"lora_name": before})

    def load_weights(self, folder: Path) -> None:
        self._http("/collective_rpc", {"method": "reload_weights"})
        self._http("/reset_prefix_cache", {})

    def _first_model(self) -> str:
        models = _field(self._http("/v1/models"), "data", list)
        if not models:
            raise ServerError("/v1/models names no model")
        self._base = self._model = str(_field(models[0], "id", str))
        return self._model


class SglangServer:
    """SGLang, by its own `/generate`, which gives ids and log-probs as pairs."""

    weights_folder = "weights"
    probe_temperature = False
    adapter_is_gguf = False

    def __init__(self, http: Http, model: str) -> None:
        self._http = http
        self._adapter: str | None = None

    def complete(self, ask: Ask) -> list[Completion]:
        body: dict[str, Any] = {
            "input_ids": list(ask.prompt),
            "sampling_params": {
                "n": ask.n,
                "max_new_tokens": ask.max_new_tokens,
                "temperature": ask.sampling.temperature,
                "top_p": ask.sampling.top_p,
                "top_k": ask.sampling.top_k or -1,
                "min_p": ask.sampling.min_p,
                "stop": list(ask.sampling.stop_strings),
                "stop_token_ids": list(ask.eos_ids),
                "no_stop_trim": True,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
        }
        if self._adapter:
            body["lora_path"] = self._adapter
        answer = self._http("/generate", body)
        found = []
        for one in answer if isinstance(answer, list) else [answer]:
            meta = _field(one, "meta_info", dict)
            tokens = _field(meta, "output_token_logprobs", list)
            try:
                ids, logps = [t[1] for t in tokens], [t[0] for t in tokens]
            except (TypeError, IndexError, KeyError):
                raise ServerError("output_token_logprobs does not hold (log-prob, id) pairs") from None
            ended = _field(meta, "finish_reason", dict).get("type") == "stop"
            found.append(Completion(ids=ids, logps=logps, ended=ended))
        return found

    def load_adapter(self, path: Path, version: int) -> None:
        before, name = self._adapter, path.name
        self._succeed("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        self._adapter = name
        if before is not None:
            self._succeed("/unload_lora_adapter", {"lora_name": before})

    def load_weights(self, folder: Path) -> None:
        self._succeed("/update_weights_from_disk", {"model_path": str(folder), "flush_cache": True})

    def _succeed(self, path: str, body: dict[str, Any]) -> None:
        answer = self._http(path, body)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ServerError(f"{path} failed: {answer.get('message') or answer.get('error_message') or answer}")


class LlamaCppServer:
    """llama.cpp's own `llama-server`; with adapters as a router whose preset has `lora = <push_dir>/adapter.gguf`."""

    weights_folder = None
    probe_temperature = False
    adapter_is_gguf = True

    def __init__(self, http: Http, model: str) -> None:
        self._http, self._model = http, model

    def complete(self, ask: Ask) -> list[Completion]:
        body = {
            "model": self._model,
            "prompt": list(ask.prompt),
            "n_cmpl": ask.n,
            "n_predict": ask.max_new_tokens,
            "temperature": ask.sampling.temperature,
            "top_p": ask.sampling.top_p,
            "top_k": ask.sampling.top_k,
            "min_p": ask.sampling.min_p,
            "samplers": ["temperature", "top_k", "top_p", "min_p"],  # as everywhere else; its own order cuts first
            "repeat_penalty": 1.0,
            "stop": list(ask.sampling.stop_strings),
            "seed": ask.seed,
            "n_probs": 1,
            "post_sampling_probs": True,
            "return_tokens": True,
        }
        answer = self._http("/completion", body)
        found = []
        for one in answer if isinstance(answer, list) else [answer]:
            probs = _field(one, "completion_probabilities", list)
            found.append(
                Completion(
                    ids=[_field(p, "id", int) for p in probs],
                    logps=[_log(_field(p, "prob", int | float)) for p in probs],
                    ended=one.get("stop_type") in ("eos", "word"),
                )
            )
        return found

    def load_adapter(self, path: Path, version: int) -> None:
        if not self._model:
            raise ServerError("llama.cpp needs the model's name in the router's presets: set sampler.model")
        if self._status() != "unloaded":
            self._http("/models/unload", {"model": self._model})
            self._wait_for("unloaded")
        self._http("/models/load", {"model": self._model})
        self._wait_for("loaded")

    def load_weights(self, folder: Path) -> None:
        raise ServerError("llama.cpp takes adapters only: train with LoRA (run.model.lora)")

    def _status(self) -> str:
        for model in _field(self._http("/models"), "data", list):
            if isinstance(model, dict) and model.get("id") == self._model:
                status = model.get("status")
                if not isinstance(status, dict):
                    raise ServerError("this llama-server is no router: start it with --models-preset, without a model")
                if status.get("failed"):
                    raise ServerError(f"llama-server could not load {self._model}: exit code {status.get('exit_code')}")
                return str(status.get("value"))
        raise ServerError(f"llama-server knows no model {self._model!r}")

    def _wait_for(self, value: str) -> None:
        end = time.monotonic() + self._http.timeout_seconds
        while (now := self._status()) != value:
            if time.monotonic() > end:
                raise ServerError(
                    f"{self._model} is still {now} after {self._http.timeout_seconds:g} s, expected {value}"
                )
            time.sleep(POLL_SECONDS)


def server_of(config: SamplerConfig) -> Server:
    """The client for a configuration whose kind is not "builtin"."""
    http_ = Http(config.url, config.api_key, config.timeout_seconds)
    kinds = {"vllm": VllmServer, "sglang": SglangServer, "llama.cpp": LlamaCppServer}
    return kinds[config.kind](http_, config.model)


def checked(completion: Completion, ask: Ask, vocabulary: int) -> Completion:
    """The completion, cut behind its first end-of-sequence token.

    Raises:
        ServerError: no token, too many, ids outside of the vocabulary, or log-probs that are none.
    """
    ids, logps = completion.ids, completion.logps
    if not 1 <= len(ids) <= ask.max_new_tokens or len(ids) != len(logps):
        raise ServerError(f"{len(ids)} tokens with {len(logps)} log-probs, expected 1 to {ask.max_new_tokens} of each")
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocabulary for i in ids):
        raise ServerError(f"token ids outside of 0 to {vocabulary - 1}: does it serve another model?")
    values = [math.nan if p is None else p for p in logps]
    if not all(isinstance(p, int | float) and not p > LOGP_SLACK for p in values):
        raise ServerError("log-probs that are not numbers up to 0")
    first_end = next((i for i, token in enumerate(ids) if token in ask.eos_ids), None)
    length = len(ids) if first_end is None else first_end + 1
    return Completion(
        ids=ids[:length],
        logps=[min(float(p), 0.0) if math.isfinite(p) else math.nan for p in values[:length]],
        ended=completion.ended or first_end is not None,
    )


def _field(tree: Any, name: str, kind: Any) -> Any:
    value = tree.get(name) if isinstance(tree, dict) else None
    if not isinstance(value, kind):
        raise ServerError(f"the answer has no usable {name!r}: {str(tree)[:200]}")
    return value


def _log(p: float) -> float:
    return math.log(p) if p > 0 else math.nan
