"""The language-model `Learner`: GRPO on local prompts, AdamW inside, a delta out.

Covers the round's bookkeeping, the supervised warm-up, evaluation and exact resume. Does not know the network, and does
not build itself from a configuration (`build.py`). The order of calls is load, begin, step..., finish, load, ...
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..learner import LocalResult, StepStats
from .config import GrpoConfig, WarmupConfig
from .evaluate import measure
from .experience import collect
from .models import LoadedModel, Progress
from .prompts import PromptFormat
from .rewards import Rewards
from .rollout import BuiltInSampler, Sampler
from .tasks import Cursor, Task
from .trainables import Trainables
from .update import optimize
from .warmup import run_warmup

SNAPSHOT_FORMAT = 1
TRUNCATED_WARN = 0.5  # fraction of completions cut off by the length limit from which it is said

log = logging.getLogger(__name__)


class GrpoLearner:
    """Implements `shoal.node.learner.Learner` for a causal LM.

    Attributes:
        layout: names and shapes of the trained parameters.
        base_hash: sha256 of the base weights, for comparing peers.
        loaded: model and tokenizer, for export.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        task: Task,
        *,
        grpo: GrpoConfig,
        warmup: WarmupConfig,
        prompts: PromptFormat,
        rewards: Rewards,
        peer_seed: int,
        sampler: Sampler | None = None,
    ) -> None:
        """
        Args:
            peer_seed: seeds this peer's sampling; must differ between peers, or they explore the same completions.
            sampler: where completions come from; default this model itself.
        """
        self.loaded = loaded
        self.base_hash = loaded.base_hash
        self._task, self._grpo, self._warmup = task, grpo, warmup
        self._prompts, self._rewards = prompts, rewards
        self._sampler = sampler or BuiltInSampler(loaded, copy_bytes=grpo.activations_mib << 20)
        self._new_round = True  # no step since parameters were loaded or a round began
        self._reference = None
        if grpo.beta and not loaded.is_lora:
            self._reference = copy.deepcopy(loaded.model).requires_grad_(False)
        self._trainables = Trainables(loaded.model)
        self.layout = self._trainables.layout
        self._optimizer = torch.optim.AdamW(
            self._trainables.masters,
            lr=grpo.learning_rate,
            betas=(grpo.adam_beta1, grpo.adam_beta2),
            eps=grpo.adam_epsilon,
            weight_decay=grpo.weight_decay,
        )
        self._generator = torch.Generator(device=loaded.device)
        self._generator.manual_seed(_seed63(f"sampling/{peer_seed}"))
        self._cursor = Cursor()
        self._initial = self._trainables.read()
        self._theta = self._initial  # as last loaded
        self._moved = False  # whether the model's parameters differ from _theta
        self._round = 0
        self._samples = 0  # behind the delta
        self._sums: dict[str, list[float]] = {}  # metric -> [sum, steps]
        self._said_truncated = False

    def initial(self) -> np.ndarray:
        """theta before any training, fp32 [d]."""
        return self._initial.copy()

    def theta(self) -> np.ndarray:
        """theta as it is now, inner steps and warm-up included, fp32 [d]."""
        return self._trainables.read()

    def load(self, theta: np.ndarray) -> None:
        """Take the shared parameters, fp32 [d]; optimizer moments, randomness and cursor stay."""
        self._trainables.write(theta)
        self._theta = np.array(theta, dtype=np.float32, copy=True)
        self._moved = False
        self._reset_round()

    def begin(self, round_: int) -> None:
        """Start a round at the parameters last loaded; inner steps that were not finished are dropped."""
        if self._moved:
            self._trainables.write(self._theta)
            self._moved = False
        self._round = round_
        self._reset_round()

    def step(self) -> StepStats:
        """Sample `prompts_per_step` groups, score them, step the optimizer."""
        examples = [self._task.train(self._cursor.next()) for _ in range(self._grpo.prompts_per_step)]
        self._sampler.push(new_round=self._new_round)
        self._new_round = False
        self._rewards.global_step = self._optimizer_steps()
        experience = collect(
            self.loaded,
            examples,
            config=self._grpo,
            prompts=self._prompts,
            rewards=self._rewards,
            generator=self._generator,
            sampler=self._sampler,
        )
        rise = min(1.0, (self._optimizer_steps() + 1) / (self._grpo.warmup_steps + 1))
        for group in self._optimizer.param_groups:
            group["lr"] = self._grpo.learning_rate * rise
        if self._needs_train_mode:
            self.loaded.model.train()
        try:
            result = optimize(
                self.loaded,
                experience,
                trainables=self._trainables,
                optimizer=self._optimizer,
                config=self._grpo,
                reference=self._reference,
            )
        finally:
            self.loaded.model.eval()
        if experience.metrics["truncated"] > TRUNCATED_WARN and not self._said_truncated:
            self._said_truncated = True
            log.warning(
                "%d %% of the completions were cut off at max_completion_length = %d tokens; raise grpo."
                "max_completion_length if answers need more",
                round(100 * experience.metrics["truncated"]),
                self._grpo.max_completion_length,
            )
        samples = len(experience.advantages)
        metrics = {**experience.metrics, **result.metrics, "skipped_steps": float(not result.stepped)}
        for name, value in metrics.items():
            entry = self._sums.setdefault(name, [0.0, 0.0])
            entry[0] += value
            entry[1] += 1
        if result.stepped:
            self._moved = True
            self._samples += samples
        return StepStats(samples=samples, metrics=metrics, skipped=not result.stepped)

    def finish(self) -> LocalResult:
        """theta as loaded minus theta now; weight counts the samples of steps that moved it."""
        metrics = {name: total / steps for name, (total, steps) in self._sums.items()}
        if not self._moved or not self._samples:
            return LocalResult(delta=np.zeros(self.layout.size, dtype=np.float32), weight=0, metrics=metrics)
        delta = self._theta - self._trainables.read()
        if not np.isfinite(delta).all():  # overflow of the parameters themselves; start again from what was loaded
            self._trainables.write(self._theta)
            self._moved = False
            metrics["nonfinite_delta"] = 1.0
            return LocalResult(delta=np.zeros_like(delta), weight=0, metrics=metrics)
        return LocalResult(delta=delta, weight=self._samples, metrics=metrics)

    def set_shard(self, index_of: tuple[int, ...] | None, count: int) -> None:
        """Draw prompts from these shards of `count` from now on; None means all."""
        self._cursor.assign(index_of, count)

    def evaluate(self, progress: Progress | None = None) -> dict[str, float]:
        """Held-out greedy accuracy and mean sampled reward of the parameters last loaded; see `measure`."""
        local = self._trainables.read() if self._moved else None
        if local is not None:
            self._trainables.write(self._theta)
        try:
            return measure(
                self.loaded,
                self._task,
                config=self._grpo,
                prompts=self._prompts,
                rewards=self._rewards,
                progress=progress,
            )
        finally:
            if local is not None:
                self._trainables.write(local)

    def warmup(
        self, progress: Progress | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> dict[str, float]:
        """The supervised stage, from the parameters last loaded; leaves the result in `theta()` and loads it.

        Returns:
            steps, seconds, loss, and accuracy and reward "_before" and "_after".
        """
        before = self.evaluate()
        result = run_warmup(
            self.loaded,
            self._task,
            config=self._warmup,
            grpo=self._grpo,
            prompts=self._prompts,
            rewards=self._rewards,
            trainables=self._trainables,
            progress=progress,
            clock=clock,
        )
        self.load(self._trainables.read())
        after = self.evaluate()
        for name in ("accuracy", "reward"):
            result[f"{name}_before"], result[f"{name}_after"] = before[name], after[name]
        return result

    def snapshot(self) -> dict[str, np.ndarray | bytes]:
        """Optimizer moments (fp32 [d]), sampling RNG, data cursor, and inside a round the local parameters."""
        meta = {
            "format": SNAPSHOT_FORMAT,
            "layout": self.layout.hash().hex(),
            "device": self.loaded.device.type,
            "optimizer_steps": self._optimizer_steps(),
            "drawn": self._cursor.drawn,
            "shards": list(self._cursor.shards),
            "shard_count": self._cursor.count,
            "round": self._round,
            "samples": self._samples,
            "sums": self._sums,
        }
        saved: dict[str, np.ndarray | bytes] = {
            "meta": json.dumps(meta).encode(),
            "rng": self._generator.get_state().numpy().tobytes(),
        }
        if meta["optimizer_steps"]:
            saved["adam_m"] = self._moment("exp_avg")
            saved["adam_v"] = self._moment("exp_avg_sq")
        if self._moved:
            saved["local_theta"] = self._trainables.read()
        return saved

    def restore(self, saved: dict[str, np.ndarray | bytes]) -> None:
        """Continue from `snapshot`; call `load` with the shared parameters first.

        Raises:
            ValueError: the snapshot is of another format or layout.
        """
        meta = json.loads(bytes(saved["meta"]))
        if meta["format"] != SNAPSHOT_FORMAT or meta["layout"] != self.layout.hash().hex():
            raise ValueError(
                f"snapshot of format {meta['format']}, layout {meta['layout'][:12]}; "
                f"expected {SNAPSHOT_FORMAT}, {self.layout.hash().hex()[:12]}"
            )
        if meta["device"] == self.loaded.device.type:
            self._generator.set_state(torch.frombuffer(bytearray(saved["rng"]), dtype=torch.uint8))
        else:  # generators of other devices are incompatible: go on from a seed that depends on where it was
            self._generator.manual_seed(_seed63(hashlib.sha256(bytes(saved["rng"])).hexdigest()))
        self._cursor.assign(tuple(meta["shards"]), meta["shard_count"])
        self._cursor.drawn = meta["drawn"]
        self._restore_moments(meta["optimizer_steps"], saved)
        self._round, self._samples = meta["round"], meta["samples"]
        self._sums = {name: list(entry) for name, entry in meta["sums"].items()}
        if "local_theta" in saved:
            self._trainables.write(np.asarray(saved["local_theta"]))
            self._moved = True

    @property
    def judging(self) -> Any:
        """The judge among the rewards, for peers that ask (`node/judging.py`); None where the run has none."""
        return self._rewards.judging

    def close(self) -> None:
        """End the reward file's process, if there is one."""
        self._rewards.close()

    @property
    def _needs_train_mode(self) -> bool:
        return self.loaded.is_lora and any(c.lora_dropout > 0 for c in self.loaded.model.peft_config.values())

    def _reset_round(self) -> None:
        self._samples, self._sums, self._new_round = 0, {}, True

    def _optimizer_steps(self) -> int:
        state = self._optimizer.state.get(self._trainables.masters[0])
        return int(state["step"]) if state else 0

    def _moment(self, name: str) -> np.ndarray:
        parts = [self._optimizer.state[m][name].reshape(-1) for m in self._trainables.masters]
        return torch.cat(parts).float().cpu().numpy()

    def _restore_moments(self, steps: int, saved: dict[str, Any]) -> None:
        self._optimizer.state.clear()
        if not steps:
            return
        masters = self._trainables.masters
        sizes = [m.numel() for m in masters]
        moments = {
            name: torch.from_numpy(np.array(saved[key], dtype=np.float32)).split(sizes)
            for name, key in (("exp_avg", "adam_m"), ("exp_avg_sq", "adam_v"))
        }
        for i, master in enumerate(masters):
            self._optimizer.state[master] = {
                "step": torch.tensor(float(steps)),
                **{name: parts[i].view_as(master).to(master.device).clone() for name, parts in moments.items()},
            }


def _seed63(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") & (2**63 - 1)
