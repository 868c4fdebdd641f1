"""The reward "judge": this node's own judge, or its peers' with its own as the fallback; and what they prefer, as data."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...judging import Group, Scores, Verdict
from ..config import JudgeBackend, JudgeConfig, ModelConfig
from ..models import Progress, load_model
from ..preferences import PreferenceLog, plain
from ..reward_process import RewardWorker
from ..rewards import Batch
from .asking import Comparing, Judge, Rating
from .local import LocalReader
from .server import ServerReader

AskPeers = Callable[[Sequence[Group]], Verdict | None]


class JudgeReward:
    """Scores a batch of completions by a judge. Also what a node answers its peers with (`node/judging.py`).

    Attributes:
        asks_peers: whether peers may see what is judged.
        metrics: of the last batch: judges that answered, whether the fallback was taken, mean weight of the judges.
    """

    def __init__(
        self,
        config: JudgeConfig,
        own: Judge,
        *,
        private: bool = False,
        preferences: PreferenceLog | None = None,
    ) -> None:
        """
        Args:
            private: the prompts are this node's private data, and are judged here alone.
        """
        self._config, self._own, self._preferences = config, own, preferences
        self.asks_peers = config.ask == "peers" and not private
        self.metrics: dict[str, float] = {}
        self._ask_peers: AskPeers | None = None
        self._lock = threading.Lock()  # the learner's thread and those that answer peers share one judge

    def use_peers(self, ask: AskPeers) -> None:
        """Ask peers through this from now on."""
        self._ask_peers = ask

    def judge(self, groups: Sequence[Group]) -> Scores:
        """What this node's own judge says."""
        with self._lock:
            return self._own.score(groups)

    def __call__(self, batch: Batch) -> list[float | None]:
        """One score per completion, 0 to 1 (peers' combined scores may lie a little outside)."""
        groups = groups_of(batch)
        scores = self._peers(groups) if self.asks_peers else self.judge(groups)
        if self._preferences is not None:
            self._preferences.add(prompts_of(batch), groups, scores)
        return [score for row in scores for score in row]

    def close(self) -> None:
        """Free the judge's process or threads."""
        self._own.close()

    def _peers(self, groups: list[Group]) -> Scores:
        verdict = self._ask_peers(groups) if self._ask_peers is not None else None
        self.metrics = {"judge_fallback": float(verdict is None)}
        if verdict is not None:
            self.metrics |= {"judges": float(verdict.answered), "judge_agreement": verdict.agreement}
            return verdict.scores
        if self._config.fallback == "own":
            return self.judge(groups)
        return [[None] * len(g.completions) for g in groups]


class FunctionJudge:
    """A function of the node's reward file, `f(prompts, completions, **kwargs)`, giving 0 to 1 or None."""

    def __init__(self, file: Path, name: str, *, timeout_seconds: float) -> None:
        """Raises ShoalError when the file cannot be loaded."""
        self._worker, self._name, self._timeout_seconds = RewardWorker(file), name, timeout_seconds
        known = self._worker.start()
        if name not in known:
            self._worker.close()
            raise missing_function(file, name, self._worker.own)

    def score(self, groups: Sequence[Group]) -> Scores:
        prompts = [g.prompt for g in groups for _ in g.completions]
        completions = [c for g in groups for c in g.completions]
        called = self._worker.call(
            [self._name],
            {"prompts": prompts, "completions": completions, "completion_ids": [[] for _ in completions]},
            timeout_seconds=self._timeout_seconds,
        )
        values = called.values[self._name]
        if isinstance(values, Exception):
            raise values
        if len(values) != len(completions):
            raise ValueError(f"{self._name} returned {len(values)} values for {len(completions)} completions")
        bounded = iter([None if v is None or math.isnan(v) else min(1.0, max(0.0, v)) for v in values])
        return [[next(bounded) for _ in g.completions] for g in groups]

    def close(self) -> None:
        self._worker.close()


def missing_function(file: Path, name: str, found: list[str]) -> Exception:
    """The error of a judge that names a function which is not there."""
    from ....protocol.errors import ExitCode, ShoalError

    return ShoalError(
        f"The reward file {file} lacks the function that this node judges with.",
        values=f"missing {name!r}, found {found}",
        todo="Define it there as f(prompts, completions, **kwargs), or correct judge.function.",
        code=ExitCode.CONFIG,
    )


def build_judge(
    backend: JudgeBackend,
    principles: str,
    *,
    seed: int,
    rewards_file: Path | None,
    cache_dir: Path | None,
    device: str,
    progress: Progress | None = None,
) -> Judge:
    """The judge that a node's tables ask for.

    Raises:
        ShoalError: its model, file or function is not there.
    """
    if backend.kind == "function":
        if rewards_file is None:
            raise missing_function(Path("(none)"), backend.function, [])
        return FunctionJudge(rewards_file, backend.function, timeout_seconds=backend.timeout_seconds)
    if backend.kind == "server":
        key = os.environ.get(backend.api_key_variable, "") if backend.api_key_variable else ""
        reader: Any = ServerReader(
            backend.url,
            backend.model,
            key=key,
            at_once=min(64, backend.batch_size),
            timeout_seconds=backend.timeout_seconds,
        )
    else:
        model = ModelConfig(name=backend.model, dtype=backend.dtype)
        loaded = load_model(model, seed=seed, cache_dir=cache_dir, device=device, progress=progress)
        loaded.model.requires_grad_(False)
        reader = LocalReader(loaded, batch_size=backend.batch_size)
    if backend.mode == "compare":
        return Comparing(reader, principles=principles, template=backend.template, opponents=backend.opponents)
    return Rating(reader, principles=principles, template=backend.template, rating_max=backend.rating_max)


def groups_of(batch: Batch) -> list[Group]:
    """The batch's completions by prompt, in order."""
    return [Group(plain(batch.prompts[rows[0]]), tuple(batch.texts[i] for i in rows)) for rows in _rows(batch)]


def prompts_of(batch: Batch) -> list[Any]:
    """The prompt of each group, as a reward sees it: text or messages."""
    return [batch.prompts[rows[0]] for rows in _rows(batch)]


def _rows(batch: Batch) -> list[list[int]]:
    """The rows of each group: neighbours that complete the same example."""
    groups: list[list[int]] = []
    for i, example in enumerate(batch.examples):
        if groups and example is batch.examples[groups[-1][-1]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
