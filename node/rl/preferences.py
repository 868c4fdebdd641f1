"""Preferences as data: JSONL, one pair a line, with the names that TRL uses (`prompt`, `chosen`, `rejected`).

Judges' opinions are appended as training goes (`PreferenceLog`); a Bradley-Terry reward model (`reward_model.py`) and DPO
(`dpo.py`) are trained on such a file, whoever wrote it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...protocol.errors import ExitCode, ShoalError
from ..judging import Group, Scores

FILE_BYTES_MAX = 1 << 30  # the log stops there
LINES_MAX = 5_000_000
PAIRS_MAX = 8  # of one group

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Of two completions of a prompt, which one is better."""

    prompt: str
    chosen: str
    rejected: str


class PreferenceLog:
    """Appends, of every judged group, its best completion beside the others."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._full = False

    def add(self, groups: Sequence[Group], scores: Scores) -> None:
        """Groups in which all are judged alike say nothing. A file that cannot be written is said once, and left alone."""
        lines = [line for group, row in zip(groups, scores, strict=True) for line in _pairs(group, row)]
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


def _pairs(group: Group, row: list[float | None]) -> list[str]:
    """Lines: the best completion beside each different one that was judged worse, the worst first."""
    known = {text: score for text, score in zip(group.completions, row, strict=True) if score is not None}
    if len(known) < 2:
        return []
    chosen = max(known, key=known.__getitem__)
    worse = sorted((text for text in known if known[text] < known[chosen]), key=known.__getitem__)[:PAIRS_MAX]
    rows = [
        {"prompt": group.prompt, "chosen": chosen, "rejected": text, "margin": round(known[chosen] - known[text], 6)}
        for text in worse
    ]
    return [json.dumps(pair, ensure_ascii=False) + "\n" for pair in rows]


def read_preferences(path: Path) -> list[Preference]:
    """Every pair of a file; other keys are ignored. Conversations (lists of messages) are taken as their text.

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
        texts = [_text(row[key]) for key in ("prompt", "chosen", "rejected")]
    except (ValueError, LookupError, TypeError) as error:
        raise _broken(path, number, f"found {line.strip()[:60]!r}: {type(error).__name__} {error}") from None
    return Preference(prompt=texts[0], chosen=texts[1], rejected=texts[2])


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n\n".join(str(message["content"]) for message in value)
    raise TypeError(f"{type(value).__name__} where a text is expected")


def _broken(path: Path, line: int, values: str) -> ShoalError:
    return ShoalError(
        f"{path}, line {line}: not a usable preference.",
        values=values,
        todo='Each line must be one JSON object, for example {"prompt": "3 + 4 =", "chosen": "7", "rejected": "8"}.',
        code=ExitCode.CONFIG,
    )
