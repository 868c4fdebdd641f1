"""Tasks: an endless stream of training examples cut into shards, and held-out examples never trained on.

`reasoning_gym:<task>` (procedural, with its own scorer) or a JSONL file with `prompt` and `answer`. Does not run a
model and does not combine rewards (`rewards.py`); the scorer here is the task's own.

Streams are functions of (seed, index) and nothing else: a shard s of S holds the indices i with i mod S = s, and a
peer's place in them is one integer, the cursor.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...protocol.errors import ExitCode, ShoalError
from .config import TaskConfig

PREFIX = "reasoning_gym:"
CHUNK = 1024  # examples of one reasoning_gym dataset object; the next chunk has another seed
REDRAWS_MAX = 64  # tries to find a training question that is not held out
LINES_MAX = 5_000_000  # JSONL lines read
HELD_OUT_FRACTION_MAX = 0.5  # of a JSONL file

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt and what is known about it.

    Attributes:
        prompt: the task's text, before any template.
        answer: the reference answer.
        columns: every other column of the data set, passed to reward functions by name.
        source: what the task's scorer needs; opaque.
    """

    prompt: str
    answer: str
    columns: dict[str, Any] = field(default_factory=dict)
    source: Any = None


class Task(ABC):
    """A stream of examples, its held-out part and its scorer."""

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self.config = config
        self.seed = seed

    @abstractmethod
    def train(self, index: int) -> Example:
        """The training example at `index` >= 0; never a held-out one."""

    @abstractmethod
    def held_out(self) -> list[Example]:
        """At most `config.eval_size` examples, the same on every peer of the run."""

    @abstractmethod
    def score_answer(self, answer: str, example: Example) -> float:
        """The task's own score of an extracted answer, 0 to 1."""

    def score(self, completion: str, example: Example) -> float:
        """Extract the answer as configured and score it."""
        return self.score_answer(extract_answer(completion, self.config.extract), example)


class Cursor:
    """A peer's place in the training stream: which shards it draws from, and how many draws it has made.

    Attributes:
        drawn: examples drawn so far, over all shard assignments; all that a checkpoint needs beside the assignment.
    """

    def __init__(self) -> None:
        self.drawn = 0
        self.shards: tuple[int, ...] = (0,)
        self.count = 1

    def assign(self, shards: tuple[int, ...] | None, count: int) -> None:
        """Draw from these shards of `count`; None means all of them.

        Raises:
            ValueError: a shard outside 0..count-1, or an empty tuple.
        """
        if shards is None:
            self.shards, self.count = (0,), 1
            return
        if count < 1 or not shards or not all(0 <= s < count for s in shards):
            raise ValueError(f"shards {shards} of {count}")
        self.shards, self.count = tuple(shards), count

    def next(self) -> int:
        """The index of the next example: shards in turn, each from its start."""
        turn, which = divmod(self.drawn, len(self.shards))
        self.drawn += 1
        return turn * self.count + self.shards[which]


def load_task(config: TaskConfig, *, seed: int) -> Task:
    """The task that a configuration names; `seed` is the run seed.

    Raises:
        ShoalError: unknown task or options, or an unusable file (exit code CONFIG or DEPENDENCY).
    """
    if config.name.startswith(PREFIX):
        return GymTask(config, seed)
    if ":" in config.name and not Path(config.name).exists():
        raise ShoalError(
            f"The task {config.name!r} is unknown.",
            values=f'found {config.name!r}, expected "reasoning_gym:<task>" or the path of a JSONL file',
            todo="Correct task.name.",
            code=ExitCode.CONFIG,
        )
    return JsonlTask(config, seed)


def extract_answer(completion: str, how: str) -> str:
    """The answer inside a completion; see `TaskConfig.extract`. Empty when "tag" or "number" finds none."""
    if how in ("auto", "tag"):
        tags = _TAG.findall(completion)
        if tags:
            return tags[-1].strip()
        if how == "tag":
            return ""
    if how == "number":
        numbers = _NUMBER.findall(completion)
        return numbers[-1].replace(",", "") if numbers else ""
    return completion.strip()


class GymTask(Task):
    """A procedural reasoning_gym task."""

    def __init__(self, config: TaskConfig, seed: int) -> None:
        super().__init__(config, seed)
        self._name = config.name.removeprefix(PREFIX)
        self._chunks: dict[int, Any] = {}
        self._first = self._dataset("train/0", CHUNK)
        self._held_out = self._draw_held_out()
        self._held_out_questions = frozenset(e.prompt for e in self._held_out)

    def train(self, index: int) -> Example:
        chunk, place = divmod(index, CHUNK)
        if chunk not in self._chunks:
            self._chunks = {chunk: self._dataset(f"train/{chunk}", CHUNK)}  # one chunk in memory: draws move forward
        example = self._example(self._chunks[chunk][place])
        redraws = 0
        while example.prompt in self._held_out_questions:
            if redraws == REDRAWS_MAX:
                raise ShoalError(
                    f"The task {self.config.name!r} has too few different questions to hold some out.",
                    values=f"{REDRAWS_MAX} draws in a row were held out; eval_size is {self.config.eval_size}",
                    todo="Lower task.eval_size, or widen task.options.",
                    code=ExitCode.CONFIG,
                )
            example = self._example(self._dataset(f"redraw/{index}/{redraws}", 1)[0])
            redraws += 1
        return example

    def held_out(self) -> list[Example]:
        return self._held_out

    def score_answer(self, answer: str, example: Example) -> float:
        score = self._first.score_answer(answer, example.source)
        return float(score) if math.isfinite(score) else 0.0

    def _draw_held_out(self) -> list[Example]:
        found: dict[str, Example] = {}
        source = self._dataset("held-out", 2 * self.config.eval_size)
        for i in range(len(source)):
            example = self._example(source[i])
            found.setdefault(example.prompt, example)
            if len(found) == self.config.eval_size:
                break
        return list(found.values())

    def _dataset(self, stream: str, size: int) -> Any:
        import reasoning_gym  # a second of import time, only for those who use it

        digest = hashlib.sha256(f"{self.seed}/{stream}".encode()).digest()
        # Below 2**32 even when a task adds the index to it: some seed numpy, which takes no more.
        options = {**self.config.options, "seed": int.from_bytes(digest[:8], "little") % (2**32 - 2**16), "size": size}
        try:
            return reasoning_gym.create_dataset(self._name, **options)
        except (ValueError, TypeError, AssertionError, KeyError) as error:
            from reasoning_gym.factory import DATASETS

            known = self._name in DATASETS
            raise ShoalError(
                f"The reasoning_gym task {self._name!r} cannot be set up.",
                values=f"options {self.config.options}: {error}"
                if known
                else f"found {self._name!r}; {_near(self._name, DATASETS)}",
                todo="Correct task.options." if known else "Correct task.name.",
                code=ExitCode.CONFIG,
            ) from error

    @staticmethod
    def _example(entry: dict[str, Any]) -> Example:
        return Example(
            prompt=entry["question"],
            answer="" if entry["answer"] is None else str(entry["answer"]),
            columns={"metadata": entry.get("metadata", {})},
            source=entry,
        )


class JsonlTask(Task):
    """A JSONL file: one object a line with `prompt` and `answer`, further keys are columns for reward functions.

    The split is by the prompt's text and the seed, so equal prompts fall on one side. The order of each epoch is a
    seeded shuffle.
    """

    def __init__(self, config: TaskConfig, seed: int) -> None:
        super().__init__(config, seed)
        path = Path(config.name).expanduser()
        if config.options:
            raise ShoalError(
                "A JSONL task has no options.",
                values=f"task.options = {config.options}, expected none for {path.name}",
                todo="Remove task.options.",
                code=ExitCode.CONFIG,
            )
        examples = list(_read_jsonl(path))
        groups: dict[str, list[Example]] = {}
        for example in examples:
            groups.setdefault(example.prompt, []).append(example)
        keys = sorted(groups)
        if len(keys) < 2:
            raise ShoalError(
                f"{path} has too few prompts to train on some and test on others.",
                values=f"found {len(keys)} different prompts, expected at least 2",
                todo="Add examples.",
                code=ExitCode.CONFIG,
            )
        random.Random(f"{seed}/split").shuffle(keys)
        held = min(config.eval_size, max(1, int(len(keys) * HELD_OUT_FRACTION_MAX)))
        self._held_out = [groups[k][0] for k in keys[:held]]
        self._train = [e for k in keys[held:] for e in groups[k]]
        self._order: tuple[int, list[int]] = (-1, [])

    def train(self, index: int) -> Example:
        epoch, place = divmod(index, len(self._train))
        if self._order[0] != epoch:
            order = list(range(len(self._train)))
            random.Random(f"{self.seed}/epoch/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._train[self._order[1][place]]

    def held_out(self) -> list[Example]:
        return self._held_out

    def score_answer(self, answer: str, example: Example) -> float:
        return 1.0 if _same(answer, example.answer) else 0.0


def _read_jsonl(path: Path) -> Iterator[Example]:
    def broken(line: int, values: str) -> ShoalError:
        return ShoalError(
            f"{path}, line {line}: not a usable example.",
            values=values,
            todo='Each line must be one JSON object, for example {"prompt": "3 + 4 =", "answer": "7"}.',
            code=ExitCode.CONFIG,
        )

    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if number > LINES_MAX:
                    raise broken(number, f"more than {LINES_MAX} lines")
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise broken(number, f"found {line.strip()[:60]!r}: {error}") from error
                if not isinstance(row, dict):
                    raise broken(number, f"found a {type(row).__name__}, expected an object")
                missing = [k for k in ("prompt", "answer") if k not in row]
                if missing:
                    raise broken(number, f"found the columns {sorted(row)}, missing {missing}")
                prompt, answer = row.pop("prompt"), row.pop("answer")
                if not isinstance(prompt, str) or not prompt.strip():
                    raise broken(number, f"prompt is {prompt!r}, expected a text that is not empty")
                if not isinstance(answer, (str, int, float)) or isinstance(answer, bool):
                    raise broken(number, f"answer is {answer!r}, expected a text or a number")
                yield Example(prompt=prompt, answer=str(answer), columns=row)
    except (OSError, UnicodeDecodeError) as error:
        raise ShoalError(
            f"The data file {path} cannot be read.",
            values=f"task.name = {str(path)!r}: {error}",
            todo='Correct the path, or use "reasoning_gym:<task>".',
            code=ExitCode.CONFIG,
        ) from error


def _same(answer: str, reference: str) -> bool:
    """Equal as text, or as numbers where both are numbers."""
    if answer.strip() == reference.strip():
        return True
    try:
        return float(answer.replace(",", "")) == float(reference.replace(",", ""))
    except ValueError:
        return False


def _near(name: str, known: dict[str, Any]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=3)
    return f"nearest known: {', '.join(near)}" if near else f"{len(known)} tasks are known"
