"""Rewards that are cheap and safe enough to run in the learner itself: exact, format, think_format, regex, overlong.

Pure functions of a completion. Answer checkers that are slow, use signals or run code are in `slow_rewards.py`, in a
process of their own.
"""

from __future__ import annotations

import re

_ONE_ANSWER = re.compile(r"\s*(?:<think>.*?</think>\s*)?<answer>(?:(?!</?answer>).)+</answer>\s*", re.DOTALL)
_THINK = re.compile(r"<think>(?:(?!</?think>).)*</think>(?!.*</?think>).*", re.DOTALL)


def answer_format(text: str) -> float:
    """1 if the completion is one <answer>...</answer>, at most with one <think>...</think> before it, else 0."""
    return float(_ONE_ANSWER.fullmatch(text) is not None)


def think_format(text: str) -> float:
    """1 if the completion begins with its only <think>...</think>, else 0."""
    return float(_THINK.fullmatch(text) is not None)


def soft_overlong(tokens: int, *, length_max: int, buffer: int) -> float:
    """Soft overlong punishment, equation 13 of DAPO (arXiv 2503.14476): 0, then a slope down to -1 over the last `buffer`.

    Args:
        tokens: length of the completion.
        length_max: where the slope ends, in tokens.
        buffer: tokens before that from which the slope begins; 0 leaves only the step beyond `length_max`.
    """
    if tokens > length_max:
        return -1.0
    start = length_max - buffer
    return 0.0 if tokens <= start else (start - tokens) / buffer
