"""Samples from an inference server, pushes to it what the trainer learned, and goes on without it when it fails.

A failed request or push is retried with backoff within `timeout_seconds`; then the trainer samples itself, and the
server is left alone for a while before it is tried again. Samples of a server are never the trainer's own: its kernels,
its number format and the age of its weights differ, so they are marked for importance correction (`losses.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from ...protocol.errors import ExitCode, ShoalError
from .config import SamplerConfig
from .draw import Sampling
from .export import export_adapter, export_merged
from .models import LoadedModel
from .policy import Batch, pad_left, pad_right
from .rollout import BuiltInSampler, Rollouts, length_limits
from .servers import Ask, Completion, Server, ServerError, checked, server_of

BACKOFF_SECONDS, BACKOFF_SECONDS_MAX = 0.2, 5.0
LEAVE_ALONE_SECONDS = 30.0  # after a failure
KEPT_PUSHES = 2  # folders of pushed adapters: the one in use, and the one before for requests still under way

T = TypeVar("T")
log = logging.getLogger(__name__)


class ServerSampler:
    """A `Sampler` over HTTP."""

    is_trainer = False

    def __init__(
        self,
        loaded: LoadedModel,
        config: SamplerConfig,
        push_dir: Path,
        *,
        server: Server | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            loaded: the trainer's model; exported at each push.
            push_dir: folder for what is pushed; the server must see it under the same path.
            server: default the one that `config` names.

        Raises:
            ShoalError: llama.cpp without LoRA.
        """
        if config.kind == "llama.cpp" and not loaded.is_lora:
            raise ShoalError(
                "llama.cpp cannot take over what this run trains",
                values="sampler.kind = 'llama.cpp' takes LoRA adapters; the run trains every parameter",
                todo="Train with LoRA ([run.model.lora]), or use another sampler.",
                code=ExitCode.CONFIG,
            )
        self._loaded, self._config, self._push_dir = loaded, config, push_dir
        self._server = server or server_of(config)
        self._clock, self._sleep = clock, sleep
        self._own = BuiltInSampler(loaded)
        self._steps = 0  # since the last push
        self._version = 0
        self._wants_push = True
        self._shut_until = -1.0  # the server is not asked before
        self._probed: set[Sampling] = set()
        self._mark = os.urandom(4).hex()  # two peers, or two lives of one, may share a server

    def push(self, *, new_round: bool) -> None:
        """Push at the start of a round and every `push_every_steps` steps; a push that failed is made up for."""
        due = new_round or 0 < self._config.push_every_steps <= self._steps
        self._steps = 1 if due else self._steps + 1
        self._wants_push |= due
        if self._wants_push and self._open():
            try:
                self._retried(self._push)
                self._wants_push = False
            except (ServerError, ShoalError, OSError) as error:
                self._shut(f"the trained weights could not be pushed: {error}")

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_generations: int,
        max_new_tokens: int,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Rollouts:
        """From the server, one request a prompt; from the trainer where the server fails or weights wait to be pushed."""
        seeds = torch.randint(2**31 - 1, (len(prompts),), generator=generator, device=generator.device).tolist()
        if not sampling.greedy and not self._wants_push and self._open():
            limits = length_limits(self._loaded.model, prompts, max_new_tokens).tolist()
            asks = [
                Ask(
                    prompt=prompt, n=num_generations, max_new_tokens=limit, sampling=sampling,
                    eos_ids=self._loaded.eos_ids, seed=seed,
                )
                for prompt, limit, seed in zip(prompts, limits, seeds, strict=True)
            ]  # fmt: skip
            try:
                self._probe(asks[0])
                with ThreadPoolExecutor(self._config.concurrency, thread_name_prefix="sampler") as pool:
                    found = list(pool.map(lambda ask: self._retried(lambda: self._complete(ask)), asks))
                return self._rollouts(prompts, [c for group in found for c in group], num_generations)
            except ServerError as error:
                self._shut(str(error))
        return self._own.sample(
            prompts,
            num_generations=num_generations,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            generator=generator,
        )

    def _complete(self, ask: Ask) -> list[Completion]:
        vocabulary = self._loaded.model.get_input_embeddings().weight.shape[0]
        found = [checked(c, ask, vocabulary) for c in self._server.complete(ask)]
        if len(found) != ask.n:
            raise ServerError(f"{len(found)} completions, expected {ask.n}")
        return found

    def _probe(self, ask: Ask) -> None:
        """Whether the log-probs are those after the cuts: of top-k 1 they must be 0, whatever the model.

        Servers differ, and a wrong answer here would only show as a bias in what is learned.
        """
        sampling = ask.sampling
        if sampling in self._probed or (
            sampling.is_exact and (sampling.temperature == 1.0 or not self._server.probe_temperature)
        ):
            return
        only = dataclasses.replace(ask, n=1, max_new_tokens=1, sampling=Sampling(top_k=1))
        logp = self._retried(lambda: self._complete(only))[0].logps[0]
        if logp < -1e-3:
            raise ServerError(
                f"this server reports log-probs before temperature and cuts (top_k = 1 gave {logp:.3f}, expected 0): start "
                "vLLM with --logprobs-mode processed_logprobs, or train with temperature 1 and without top_p, top_k, min_p"
            )
        self._probed.add(sampling)

    def _rollouts(
        self, prompts: Sequence[Sequence[int]], completions: list[Completion], num_generations: int
    ) -> Rollouts:
        device, pad = self._loaded.device, self._loaded.pad_id
        prompt_ids, prompt_lengths = pad_left(prompts, pad, device)
        completion_ids, lengths = pad_right([c.ids for c in completions], pad, device)
        width = completion_ids.shape[1]
        batch = Batch(
            prompt_ids=prompt_ids,
            prompt_lengths=prompt_lengths,
            prompt_of=torch.arange(len(prompts), device=device).repeat_interleave(num_generations),
            completion_ids=completion_ids,
            completion_lengths=lengths,
        )
        return Rollouts(
            batch=batch,
            sampler_logps=torch.tensor([c.logps + [0.0] * (width - len(c.logps)) for c in completions], device=device),
            truncated=torch.tensor([not c.ended for c in completions], device=device),
            from_trainer=False,
        )

    def _push(self) -> None:
        version = self._version + 1
        if not self._loaded.is_lora:
            if self._server.weights_folder is None:
                self._server.load_weights(self._push_dir)  # says why not
                return
            folder = self._push_dir / self._server.weights_folder
            shutil.rmtree(folder, ignore_errors=True)
            export_merged(self._loaded, folder)
            self._server.load_weights(folder)
        elif self._server.adapter_is_gguf:
            from .adapter_gguf import write_adapter_gguf

            path = self._push_dir / "adapter.gguf"
            write_adapter_gguf(self._loaded, path)
            self._server.load_adapter(path, version)
        else:
            folder = self._push_dir / f"shoal-{self._mark}-{version}"
            shutil.rmtree(folder, ignore_errors=True)
            export_adapter(self._loaded, folder)
            self._server.load_adapter(folder, version)
            shutil.rmtree(self._push_dir / f"shoal-{self._mark}-{version - KEPT_PUSHES}", ignore_errors=True)
        self._version = version

    def _retried(self, call: Callable[[], T]) -> T:
        end, pause = self._clock() + self._config.timeout_seconds, BACKOFF_SECONDS
        while True:
            try:
                return call()
            except ServerError:
                if self._clock() + pause > end:
                    raise
            self._sleep(pause)
            pause = min(2 * pause, BACKOFF_SECONDS_MAX)

    def _open(self) -> bool:
        return self._clock() >= self._shut_until

    def _shut(self, why: str) -> None:
        self._shut_until = self._clock() + LEAVE_ALONE_SECONDS
        log.warning(
            "sampling on the trainer instead of %s for %g s: %s",
            self._config.url or self._config.kind,
            LEAVE_ALONE_SECONDS,
            why,
        )
