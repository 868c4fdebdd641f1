"""Preferences as data: JSONL, one pair a line, in TRL's two forms, with its names (`prompt`, `chosen`, `rejected`).

Plain text ("prompt": "3 + 4 =", "chosen": "7", "rejected": "8"), or conversations (lists of messages), which a model's chat
template writes. Judges' opinions are appended as training goes (`PreferenceLog`); a Bradley-Terry reward model
(`reward_model.py`) and DPO (`dpo.py`) are trained on such a file, whoever wrote it.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from ...protocol.errors import ExitCode, ShoalError
from ..judging import Group, Scores

FILE_BYTES_MAX = 1 << 30  # the log stops there
LINES_MAX = 5_000_000
PAIRS_MAX = 8  # of one group

log = logging.getLogger(__name__)
T = TypeVar("T")


Prompt = str | tuple[tuple[str, str], ...]
"""Text, or a conversation: (role, content) of each message."""


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Of two completions of a prompt, which one is better."""

    prompt: Prompt
    chosen: str
    rejected: str


class PreferenceLog:
    """Appends, of every judged group, its best completion beside the others."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._full = False

    def add(self, prompts: Sequence[Any], groups: Sequence[Group], scores: Scores) -> None:
        """Groups in which all are judged alike say nothing. A file that cannot be written is said once, and left alone.

        Args:
            prompts: of each group what its policy was asked: a text or a list of messages.
        """
        judged = zip(prompts, groups, scores, strict=True)
        lines = [line for prompt, group, row in judged for line in _pairs(prompt, group, row)]
        if self._full or not lines:
            return
        try:
            with self._path.open("a", encoding="utf-8", errors="replace") as file:
                if file.tell() < FILE_BYTES_MAX:
                    file.write("".join(lines))
                    return
            cause = f"it has reached {FILE_BYTES_MAX >> 20} MiB"
        except OSError as error:
            cause = str(error)
        self._full = True
        log.warning("no more preferences are kept in %s: %s", self._path, cause)


def _pairs(prompt: Any, group: Group, row: list[float | None]) -> list[str]:
    """Lines: the best completion beside each different one that was judged worse, the worst first."""
    known = {text: score for text, score in zip(group.completions, row, strict=True) if score is not None}
    if len(known) < 2:
        return []
    best = max(known, key=known.__getitem__)
    worse = sorted((text for text in known if known[text] < known[best]), key=known.__getitem__)[:PAIRS_MAX]

    def completion(text: str) -> Any:
        return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]

    rows = [
        {
            "prompt": prompt,
            "chosen": completion(best),
            "rejected": completion(text),
            "margin": round(known[best] - known[text], 6),
        }
        for text in worse
    ]
    return [json.dumps(pair, ensure_ascii=False) + "\n" for pair in rows]


def read_preferences(path: Path) -> list[Preference]:
    """Every pair of a file; other keys are ignored.

    Two conversations without a prompt ("chosen" and "rejected" alone) have what they begin with in common as their prompt.

    Raises:
        ShoalError: the file is missing, empty, or has a line that is no pair.
    """
    pairs: list[Preference] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    pairs.append(_pair(path, number, line))
                if number >= LINES_MAX:
                    break
    except (OSError, UnicodeDecodeError) as error:
        raise ShoalError(
            f"The preferences {path} cannot be read.",
            values=f"{error}",
            todo="Correct the path; node.preferences_file writes such a file.",
            code=ExitCode.CONFIG,
        ) from error
    if not pairs:
        raise _broken(path, 1, "found no line, expected at least one")
    return pairs


def _pair(path: Path, number: int, line: str) -> Preference:
    try:
        row = json.loads(line)
        chosen, rejected = row["chosen"], row["rejected"]
        if "prompt" in row or isinstance(chosen, str):
            prompt = row["prompt"]
        else:
            shared = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        return Preference(prompt=as_prompt(prompt), chosen=_reply(chosen), rejected=_reply(rejected))
    except (ValueError, LookupError, TypeError) as error:
        raise _broken(path, number, f"found {line.strip()[:60]!r}: {type(error).__name__} {error}") from None


def split(preferences: Sequence[Preference], held_out: float, seed: int) -> tuple[list[Preference], list[Preference]]:
    """Pairs to train on and pairs kept aside, by prompt; all are trained on where there is but one prompt."""
    prompts = sorted({p.prompt for p in preferences}, key=repr)
    random.Random(f"{seed}/preferences").shuffle(prompts)
    aside = set(prompts[: min(round(len(prompts) * held_out), len(prompts) - 1)])
    return [p for p in preferences if p.prompt not in aside], [p for p in preferences if p.prompt in aside]


def epochs(preferences: Sequence[T], batch_size: int, seed: int) -> Iterator[list[T]]:
    """Endless batches, every epoch in another seeded order; the last of an epoch may be smaller."""
    epoch = 0
    while preferences:
        order = list(preferences)
        random.Random(f"{seed}/epoch/{epoch}").shuffle(order)
        for start in range(0, len(order), batch_size):
            yield order[start : start + batch_size]
        epoch += 1


def as_prompt(value: Any) -> Prompt:
    """A text, or a list of messages, as it is kept here. Raises TypeError or LookupError for anything else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise TypeError(f"{type(value).__name__} where a text or a list of messages is expected")
    return tuple((str(message["role"]), str(message["content"])) for message in value)


def _reply(value: Any) -> str:
    """A completion's text; of a conversation its only message."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or len(value) != 1:
        raise TypeError("a completion must be a text or a list of one message")
    return str(value[0]["content"])


def messages(prompt: Prompt) -> list[dict[str, str]]:
    """A conversation as chat templates want it; of a text one message of the user."""
    pairs = (("user", prompt),) if isinstance(prompt, str) else prompt
    return [{"role": role, "content": content} for role, content in pairs]


def is_chat(prompt: Prompt, tokenizer: Any) -> bool:
    """Whether a prompt is written by the tokenizer's chat template: a conversation, where there is such a template."""
    return not isinstance(prompt, str) and bool(getattr(tokenizer, "chat_template", None))


def plain(prompt: Any) -> str:
    """A prompt (text, messages or `Prompt`) as text: of a conversation its contents, with roles where there are several."""
    if isinstance(prompt, str):
        return prompt
    pairs = [message if isinstance(message, tuple) else (message["role"], message["content"]) for message in prompt]
    return str(pairs[0][1]) if len(pairs) == 1 else "\n\n".join(f"{role}: {content}" for role, content in pairs)


def _broken(path: Path, line: int, values: str) -> ShoalError:
    return ShoalError(
        f"{path}, line {line}: not a usable preference.",
        values=values,
        todo='Each line must be one JSON object, for example {"prompt": "3 + 4 =", "chosen": "7", "rejected": "8"}.',
        code=ExitCode.CONFIG,
    )
