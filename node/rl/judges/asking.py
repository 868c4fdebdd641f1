"""From groups of completions to questions and back to scores; whoever answers the questions is a `Reader`.

Two ways of asking. *Rating*: one question per completion, the score is the expected value over the rating tokens, which is
finer than the most likely rating and has no ties (as in G-Eval, arXiv 2303.16634). *Comparing*: pairs of a group, each asked
in both orders and averaged, so that a liking for the first place cancels (arXiv 2305.17926); the score is the mean share of
wins. Equal questions are asked once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from ...judging import Group, Scores

RATE = """{principles}

Question:
<<<
{prompt}
>>>

Answer:
<<<
{completion}
>>>

How good is this answer, from 0 (worst) to {max} (best)? Reply with the number alone.
Rating: """
COMPARE = """{principles}

Question:
<<<
{prompt}
>>>

Answer A:
<<<
{first}
>>>

Answer B:
<<<
{second}
>>>

Which answer is better, A or B? Reply with the letter alone.
Better: """
SIDES = ("A", "B")
_SLOT = re.compile(r"\{(principles|prompt|completion|first|second|max)\}")


class Reader(Protocol):
    """Reads questions: a model, near or far."""

    def probabilities(self, questions: Sequence[str], options: Sequence[str]) -> list[list[float] | None]:
        """For each question the probability of each option as the next word, summing to 1; None where it has no answer."""
        ...

    def close(self) -> None: ...


class Judge(Protocol):
    """Scores groups of completions."""

    def score(self, groups: Sequence[Group]) -> Scores:
        """0 to 1 for every completion, None where there is no answer. Raises what its reader raises."""
        ...

    def close(self) -> None: ...


def fill(template: str, **texts: str) -> str:
    """Put texts into their slots, in one pass: what a completion says is never taken for a slot."""
    return _SLOT.sub(lambda slot: texts.get(slot[1], slot[0]), template).lstrip()


class Rating:
    """Every completion by itself."""

    def __init__(self, reader: Reader, *, principles: str, template: str = "", rating_max: int = 9) -> None:
        self._reader, self._principles = reader, principles
        self._template, self._max = template or RATE, rating_max

    def score(self, groups: Sequence[Group]) -> Scores:
        questions = [[self._question(g.prompt, c) for c in g.completions] for g in groups]
        distinct = list(dict.fromkeys(q for row in questions for q in row))
        answers = self._reader.probabilities(distinct, [str(n) for n in range(self._max + 1)])
        known = dict(zip(distinct, map(self._expected, answers), strict=True))
        return [[known[q] for q in row] for row in questions]

    def close(self) -> None:
        self._reader.close()

    def _question(self, prompt: str, completion: str) -> str:
        return fill(
            self._template, principles=self._principles, prompt=prompt, completion=completion, max=str(self._max)
        )

    def _expected(self, probabilities: list[float] | None) -> float | None:
        if probabilities is None:
            return None
        return min(1.0, max(0.0, math.fsum(n * p for n, p in enumerate(probabilities)) / self._max))


class Comparing:
    """Completions of a group against each other."""

    def __init__(self, reader: Reader, *, principles: str, template: str = "", opponents: int = 3) -> None:
        self._reader, self._principles = reader, principles
        self._template, self._opponents = template or COMPARE, opponents

    def score(self, groups: Sequence[Group]) -> Scores:
        pairs = [(g.prompt, *pair) for g in groups for pair in matches(g.completions, self._opponents)]
        both = [pair for p, a, b in pairs for pair in ((p, a, b), (p, b, a))]
        distinct = list(dict.fromkeys(both))
        answers = self._reader.probabilities([self._question(*pair) for pair in distinct], SIDES)
        known = dict(zip(distinct, answers, strict=True))

        def wins(prompt: str, one: str, other: str) -> float | None:
            if one == other:
                return 0.5
            first, second = known.get((prompt, one, other)), known.get((prompt, other, one))
            return None if first is None or second is None else (first[0] + second[1]) / 2

        return [self._shares(g, wins) for g in groups]

    def close(self) -> None:
        self._reader.close()

    def _shares(self, group: Group, wins: Callable[[str, str, str], float | None]) -> list[float | None]:
        shares: list[float | None] = []
        for i, one in enumerate(group.completions):
            others = meets(i, len(group.completions), self._opponents)
            met = [wins(group.prompt, one, group.completions[j]) for j in others]
            known = [share for share in met if share is not None]
            shares.append(math.fsum(known) / len(known) if known else None)
        return shares

    def _question(self, prompt: str, first: str, second: str) -> str:
        return fill(self._template, principles=self._principles, prompt=prompt, first=first, second=second)


def meets(i: int, size: int, opponents: int) -> list[int]:
    """Whom place i of a group of `size` meets: the places around it, as a circle, so that meeting is mutual.

    At least `opponents` of them (an odd number is rounded up, except where all others are met).
    """
    reach = min(size - 1, opponents)
    ahead = [(i + step) % size for step in range(1, (reach + 1) // 2 + 1)]
    behind = [(i - step) % size for step in range(1, (reach + 1) // 2 + 1)]
    return list(dict.fromkeys(j for j in [*ahead, *behind] if j != i))


def matches(completions: Sequence[str], opponents: int) -> list[tuple[str, str]]:
    """The pairs of different texts that meet in a group."""
    size = len(completions)
    found = {tuple(sorted((i, j))) for i in range(size) for j in meets(i, size, opponents)}
    return [(completions[i], completions[j]) for i, j in sorted(found) if completions[i] != completions[j]]
