"""Combining the scores of several judges, some of whom may be noisy, biased or lying. Pure numpy.

Judges differ in where their scale begins, so each one's group median is taken off first: a completion's score is the
weighted median of what the judges think of it relative to its group, plus the weighted median of those group medians. A
weighted median cannot be moved beyond what honest judges said by any minority of the weight.

A judge's weight follows how it agreed in the past with the others' median on which of two completions is better. It never
leaves [WEIGHT_MIN, 1]: so nobody's past makes them more than a fixed multiple of a newcomer, and nobody is without a way back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

WEIGHT_MIN = 0.05
# What a judge that was never heard is taken to agree: below one with a good past, above one with a bad one.
PRIOR = 0.5
# Of the old agreement that is kept per batch: a judge that turns is noticed within ten.
MEMORY = 0.8
JUDGES_MAX = 4096


def weighted_median(scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Per column, the value with half of the weight on either side; the mean of two where the weight splits exactly.

    Args:
        scores: fp64 [judges, n]; NaN counts as absent, with its weight.
        weights: fp64 [judges], positive.

    Returns:
        fp64 [n]; NaN where all are absent.
    """
    order = np.argsort(scores, axis=0, kind="stable")  # NaN last
    ranked = np.take_along_axis(scores, order, axis=0)
    mass = np.where(np.isnan(ranked), 0.0, np.asarray(weights, dtype=np.float64)[order])
    total = mass.sum(axis=0)
    reached, slack = mass.cumsum(axis=0), 1e-9 * total
    lower = (reached >= total / 2 - slack).argmax(axis=0)
    upper = (reached > total / 2 + slack).argmax(axis=0)
    columns = np.arange(scores.shape[1])
    return np.where(total > 0, (ranked[lower, columns] + ranked[upper, columns]) / 2, np.nan)


def combine(scores: np.ndarray, weights: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """One score per completion; see the head of this file.

    Args:
        scores: fp64 [judges, n], completions group after group; NaN is absent.
        weights: fp64 [judges], positive.
        sizes: completions per group, summing to n.

    Returns:
        fp64 [n], NaN where no judge has a score. Within [0, 1] give or take a judge's spread.
    """
    result = np.full(scores.shape[1], np.nan)
    for part in _slices(sizes):
        group = scores[:, part]
        known = ~np.isnan(group).all(axis=1)
        if known.any():
            middles = np.array([[np.median(row[~np.isnan(row)])] for row in group[known]])
            relative = weighted_median(group[known] - middles, weights[known])
            result[part] = relative + weighted_median(middles, weights[known])
    return result


def concordance(scores: np.ndarray, reference: np.ndarray, sizes: Sequence[int]) -> float:
    """Agreement with a reference on which of two completions of a group is better, -1 to 1 (Kendall's tau-a over the pairs
    that the reference tells apart); NaN when there is none.

    Args:
        scores: fp64 [n]; a tie or an absent value agrees with nothing and contradicts nothing.
        reference: fp64 [n].
    """
    total, pairs = 0.0, 0
    for part in _slices(sizes):
        wanted = np.nan_to_num(np.sign(reference[part][:, None] - reference[part][None, :]))
        found = np.nan_to_num(np.sign(scores[part][:, None] - scores[part][None, :]))
        total += float((wanted * found).sum())
        pairs += int(np.count_nonzero(wanted))
    return total / pairs if pairs else float("nan")


class Trust:
    """How far each judge agreed with the others so far."""

    def __init__(self) -> None:
        self._agreement: OrderedDict[str, float] = OrderedDict()

    def weights(self, judges: Sequence[str]) -> np.ndarray:
        """fp64 [judges], WEIGHT_MIN to 1."""
        known = np.array([self._agreement.get(judge, PRIOR) for judge in judges], dtype=np.float64)
        return np.clip(known, WEIGHT_MIN, 1.0)

    def learn(self, judges: Sequence[str], scores: np.ndarray, sizes: Sequence[int]) -> None:
        """Compare each judge with the combined word of the others, weighted as before this batch.

        Nothing is learned of a judge that stands against a single other: which of the two is wrong?

        Args:
            scores: fp64 [judges, n].
        """
        if len(judges) < 3:
            return
        weights = self.weights(judges)
        for i, judge in enumerate(judges):
            others = np.arange(len(judges)) != i
            agreed = concordance(scores[i], combine(scores[others], weights[others], sizes), sizes)
            if not np.isnan(agreed):
                before = self._agreement.get(judge, PRIOR)
                self._agreement[judge] = MEMORY * before + (1 - MEMORY) * agreed
                self._agreement.move_to_end(judge)
        while len(self._agreement) > JUDGES_MAX:
            self._agreement.popitem(last=False)


def _slices(sizes: Sequence[int]) -> list[slice]:
    ends = np.cumsum(sizes).tolist()
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
