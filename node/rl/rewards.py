"""Scores completions: the task's own score, built-in checks, judges, and functions of the user's reward file.

A reward file has TRL-style functions, `def f(prompts, completions, **kwargs) -> list[float | None]`, sync or async;
data set columns, `completion_ids`, `trainer_state`, `log_metric` and `log_extra` arrive as keyword arguments, and a
conversational prompt makes conversational completions. The file, and whatever built-in reward is slow or unsafe, runs
in a worker process of its own (`reward_worker.py`), with a time limit that really ends it. A function that raises,
overruns or returns nonsense is counted by name and taken as "does not apply"; it never stops training. `None` means
"does not apply". Rewards beyond +-REWARD_MAX are cut to it, and counted by name.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...protocol.errors import ExitCode, ShoalError
from .builtin_rewards import answer_format, soft_overlong, think_format
from .config import RewardsConfig
from .reward_process import RewardWorker
from .tasks import Example, Task, extract_answer

CHEAP = ("task", "exact", "format", "think_format", "regex", "overlong")
SLOW = {"math": "math_verify", "code": ""}  # in a worker process; the package that each needs
MODELS = ("judge", "reward_model")  # given to `Rewards` by whoever builds it
BUILT_IN = (*CHEAP, *SLOW, *MODELS)

# Rewards beyond this are cut to it and counted: of larger ones the squares and sums that advantages are made of overflow.
REWARD_MAX = 1e15

# What reward functions find in `trainer_state` beside `global_step`; a run has no epochs and no known last step.
TRAINER_STATE = {"epoch": 0.0, "max_steps": 0, "log_history": [], "is_world_process_zero": True}

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch to score; all have one entry per completion, and completions of one prompt lie together.

    Attributes:
        examples: where the prompt came from.
        prompts: texts or conversations, as the reward functions see them.
        completions: the same for completions.
        texts: completions as plain text.
        completion_ids: their token ids.
    """

    examples: Sequence[Example]
    prompts: Sequence[Any]
    completions: Sequence[Any]
    texts: Sequence[str]
    completion_ids: Sequence[Sequence[int]]


Scorer = Callable[[Batch], list[float | None]]
"""Scores a batch in the learner's own process; what it raises is counted like any other reward's failure."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Rewards of one batch.

    Attributes:
        total: weighted sum per completion; None where no function applies.
        means: mean per function over the completions it applies to.
        failures: why a function gave nothing for this batch, by name.
        values: each function's rewards, one per completion, unweighted.
        clipped: how many of them were cut to +-REWARD_MAX, by name.
        metrics: what functions gave to `log_metric`, averaged by name; and what the models measure of themselves.
    """

    total: list[float | None]
    means: dict[str, float]
    failures: dict[str, str] = field(default_factory=dict)
    values: dict[str, list[float | None]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    clipped: dict[str, int] = field(default_factory=dict)


class Rewards:
    """The run's reward functions with their weights. Close it to end the worker processes.

    Attributes:
        failures: batches for which a function failed since the start, by name.
        last_failure: the latest reason, by name.
        clipped: rewards cut to +-REWARD_MAX since the start, by name; only those that ever were.
        global_step: what reward functions see as `trainer_state.global_step`; the learner's to set.
    """

    def __init__(
        self,
        config: RewardsConfig,
        task: Task,
        file: Path | None = None,
        *,
        length_max: int = 0,
        models: dict[str, Scorer] | None = None,
    ) -> None:
        """
        Args:
            config: names and weights (the same on all peers).
            task: gives "task" its score.
            file: this node's reward file; needed for names that are not built in.
            length_max: completion limit in tokens, where "overlong" ends.
            models: "judge" and "reward_model", where the run uses them.

        Raises:
            ShoalError: a function is in neither place, a package is missing, or the file cannot be loaded.
        """
        self._config = config
        self._task = task
        self._weights = config.weights or [1.0] * len(config.functions)
        self._length_max = length_max
        self._pattern = re.compile(config.pattern, re.DOTALL)
        self._models = models or {}
        self.failures = dict.fromkeys(config.functions, 0)
        self.last_failure: dict[str, str] = {}
        self.clipped: dict[str, int] = {}
        self.global_step = 0
        self._workers: dict[tuple[str, ...], RewardWorker] = {}  # by the names that each runs
        try:
            self._start(config.functions, file)
        except BaseException:
            self.close()
            raise

    def _start(self, functions: list[str], file: Path | None) -> None:
        """Start the worker processes that these need."""
        for name in functions:
            if name in MODELS and name not in self._models:
                raise ShoalError(
                    f"The reward {name!r} has no model here.",
                    values=f"found no {name} among what this command sets up, expected one",
                    todo=f"Use other functions here, without {name!r}.",
                    code=ExitCode.CONFIG,
                )
        slow = tuple(name for name in functions if name in SLOW)
        if slow:
            _check_packages(slow)
            self._workers[slow] = RewardWorker(Path(__file__).with_name("slow_rewards.py"))
            self._workers[slow].start()
        own = tuple(name for name in functions if name not in BUILT_IN)
        if own and file is None:
            raise ShoalError(
                "The run uses reward functions that are not built in.",
                values=f"found {list(own)}, built in are {list(BUILT_IN)}, and this node has no reward file",
                todo="Give the file that defines them (node.rewards_file), or use built-in names.",
                code=ExitCode.CONFIG,
            )
        if own and file is not None:
            worker = self._workers[own] = RewardWorker(file)
            known = worker.start()
            missing = [name for name in own if name not in known]
            if missing:
                raise ShoalError(
                    f"The reward file {file} lacks functions that the run uses.",
                    values=f"missing {missing}, found {worker.own}",
                    todo="Define them there, each as f(prompts, completions, **kwargs) -> list of numbers or None.",
                    code=ExitCode.CONFIG,
                )

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each function, by name."""
        return dict(zip(self._config.functions, self._weights, strict=True))

    def score(
        self,
        examples: Sequence[Example],
        prompts: Sequence[Any],
        completions: Sequence[Any],
        texts: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
    ) -> Scored:
        """Score one batch; the arguments are those of `Batch`."""
        batch = Batch(
            examples=examples, prompts=prompts, completions=completions, texts=texts, completion_ids=completion_ids
        )
        raw, metrics = self._called(batch)
        values: dict[str, list[float | None]] = {}
        failed: dict[str, str] = {}
        clipped: dict[str, int] = {}
        for name in self._config.functions:
            try:
                found = raw[name] if name in raw else self._inside(name, batch)
                if isinstance(found, Exception):
                    raise found
                values[name], cut = _checked(found, len(texts))
                if cut:
                    clipped[name] = cut
                    self._count_clipped(name, cut)
            except Exception as error:  # a reward is the user's code or a task's parser: anything may come out of it
                failed[name] = f"{type(error).__name__}: {error}"
                values[name] = [None] * len(texts)
                self._count(name, failed[name])
        for name in values.keys() & self._models.keys():
            metrics |= getattr(self._models[name], "metrics", {})
        return Scored(
            total=[self._combine([values[f][i] for f in self._config.functions]) for i in range(len(texts))],
            means={name: _mean(column) for name, column in values.items()},
            failures=failed,
            values=values,
            metrics=metrics,
            clipped=clipped,
        )

    @property
    def judging(self) -> Scorer | None:
        """The reward "judge", where the run has it."""
        return self._models.get("judge")

    def close(self) -> None:
        """End the worker processes, and what the models hold."""
        for worker in self._workers.values():
            worker.close()
        for model in self._models.values():
            if (close := getattr(model, "close", None)) is not None:
                close()

    def _called(self, batch: Batch) -> tuple[dict[str, Any], dict[str, float]]:
        """What the functions in worker processes give, or how they fail, by name; and the metrics they log."""
        values: dict[str, Any] = {}
        metrics: dict[str, float] = {}
        arguments = {
            "prompts": list(batch.prompts),
            "completions": list(batch.completions),
            "completion_ids": [list(ids) for ids in batch.completion_ids],
            **_columns(batch.examples),
        }
        for names, worker in self._workers.items():
            called = worker.call(
                names,
                arguments,
                timeout_seconds=self._config.timeout_seconds,
                state={**TRAINER_STATE, "global_step": self.global_step},
            )
            values |= called.values
            metrics |= called.metrics
        return values, metrics

    def _inside(self, name: str, batch: Batch) -> list[float | None]:
        if name in MODELS:
            return self._models[name](batch)
        rows = zip(batch.texts, batch.examples, batch.completion_ids, strict=True)
        return [self._cheap(name, text, example, len(ids)) for text, example, ids in rows]

    def _cheap(self, name: str, text: str, example: Example, tokens: int) -> float:
        match name:
            case "task":
                return self._task.score(text, example)
            case "exact":
                return float(extract_answer(text, self._task.config.extract) == example.answer.strip())
            case "format":
                return answer_format(text)
            case "think_format":
                return think_format(text)
            case "regex":
                return float(self._pattern.fullmatch(text) is not None)
        length_max = self._config.overlong_length or self._length_max
        return soft_overlong(tokens, length_max=length_max, buffer=min(self._config.overlong_buffer, length_max))

    def _count(self, name: str, reason: str) -> None:
        self.failures[name] += 1
        self.last_failure[name] = reason
        if self.failures[name].bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... time
            log.warning("reward %r failed (%d times so far): %s", name, self.failures[name], reason)

    def _count_clipped(self, name: str, cut: int) -> None:
        if name not in self.clipped:
            log.warning("reward %r gave %d values beyond +-%g; they count as that much", name, cut, REWARD_MAX)
        self.clipped[name] = self.clipped.get(name, 0) + cut

    def _combine(self, row: list[float | None]) -> float | None:
        known = [w * v for w, v in zip(self._weights, row, strict=True) if v is not None]
        return math.fsum(known) if known else None


def without_models(config: RewardsConfig | None) -> RewardsConfig:
    """The same rewards without those that are models, for where there are none; the task's score if nothing is left."""
    if config is None:
        return RewardsConfig()
    weights = config.weights or [1.0] * len(config.functions)
    kept = [(name, weight) for name, weight in zip(config.functions, weights, strict=True) if name not in MODELS]
    if not kept:
        return RewardsConfig()
    names, left = zip(*kept, strict=True)
    return config.model_copy(update={"functions": list(names), "weights": list(left)})


def _check_packages(names: Sequence[str]) -> None:
    from importlib.util import find_spec

    for name in names:
        if SLOW[name] and find_spec(SLOW[name]) is None:
            raise ShoalError(
                f"The reward {name!r} needs a package that is not installed.",
                values=f"expected {SLOW[name]}, found none",
                todo="Install it with: pip install 'shoal[math]'.",
                code=ExitCode.DEPENDENCY,
            )


def _columns(examples: Sequence[Example]) -> dict[str, list[Any]]:
    names = {"answer": None} | {k: None for e in examples for k in e.columns}
    reserved = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
    return {k: [e.answer if k == "answer" else e.columns.get(k) for e in examples] for k in names if k not in reserved}


def _checked(raw: Any, n: int) -> tuple[list[float | None], int]:
    """The values as floats, and how many of them were cut to +-REWARD_MAX."""
    if not isinstance(raw, list) or len(raw) != n:
        found = f"{len(raw)} values" if isinstance(raw, list) else f"a {type(raw).__name__}"
        raise ValueError(f"returned {found} for {n} completions")
    for value in raw:
        if value is not None and (isinstance(value, str) or not math.isfinite(float(value))):
            raise ValueError(f"returned {value!r} where a finite number or None is expected")
    values = [None if value is None else float(value) for value in raw]
    cut = sum(value is not None and abs(value) > REWARD_MAX for value in values)
    return [None if value is None else max(-REWARD_MAX, min(REWARD_MAX, value)) for value in values], cut


def _mean(column: list[float | None]) -> float:
    known = [v for v in column if v is not None]
    return math.fsum(known) / len(known) if known else math.nan
