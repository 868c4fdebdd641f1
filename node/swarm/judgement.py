"""Combining the scores of several judges, some of whom may be noisy, biased or lying. Pure numpy.

Judges differ in where their scale begins, so each one's group median is taken off first: a completion's score is the
weighted median of what the judges think of it relative to its group, plus the weighted median of those group medians. A
weighted median cannot be moved beyond what honest judges said by any minority of the weight.

A judge's weight follows how it agreed in the past with the others' median on which completions of a group are better. It never
leaves [WEIGHT_MIN, 1]: so nobody's past makes them more than a fixed multiple of a newcomer, and nobody is without a way back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from ...protocol import limits

WEIGHT_MIN = 0.05
# What a judge that was never heard is taken to agree: below one with a good past, above one with a bad one.
PRIOR = 0.5
# Of the old agreement that is kept per batch whose answers are told apart without doubt; a judge that turns is noticed within
# ten such. Of others more is kept (`information`).
MEMORY = 0.8
# Squared correlations up to this many times what chance makes of them teach nothing.
CHANCE = 2.0
FLAT = 1e-12  # variance of scores that are all equal but for rounding


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


def correlation(scores: np.ndarray, reference: np.ndarray, sizes: Sequence[int]) -> float:
    """Pearson's correlation of what both say of the completions relative to their group, pooled over the groups, -1 to 1.

    Of answers that differ clearly it counts more whether they are told apart than of answers that are about alike: when a
    policy gives almost always the right one, most pairs are alike, and their order is noise.

    Args:
        scores: fp64 [n], NaN is absent and counts nowhere.
        reference: fp64 [n].

    Returns:
        0 where `scores` tell nothing apart; NaN where `reference` does not.
    """
    one, other = [], []
    for part in _slices(sizes):
        both = ~np.isnan(scores[part]) & ~np.isnan(reference[part])
        if both.any():
            one.append(scores[part][both] - scores[part][both].mean())
            other.append(reference[part][both] - reference[part][both].mean())
    if not one:
        return float("nan")
    x, y = np.concatenate(one), np.concatenate(other)
    power = float((x * x).sum()), float((y * y).sum())
    if power[1] <= FLAT * len(y):
        return float("nan")
    if power[0] <= FLAT * len(x):
        return 0.0
    return float(np.clip((x * y).sum() / np.sqrt(power[0] * power[1]), -1.0, 1.0))


def information(scores: np.ndarray, sizes: Sequence[int]) -> float:
    """How much the judges' words have to do with each other, 0 to 1: the middle pair's squared correlation, beyond chance.

    Opposite words count like equal ones, since a liar knows what it lies about. 0 when the answers are alike and judges only
    differ by their noise: then agreement is chance and says nothing of a judge. The middle of all pairs, so that a minority
    that speaks in unison cannot make a batch of alike answers count.

    Args:
        scores: fp64 [judges, n], NaN is absent.
    """
    found = [correlation(scores[i], scores[j], sizes) ** 2 for i, j in combinations(range(len(scores)), 2)]
    freedom = sum(sizes) - len(sizes)  # of unrelated scores the squared correlation is 1 / freedom, on average
    if not found or freedom < 1:
        return 0.0
    return max(0.0, float(np.median(np.nan_to_num(found))) - CHANCE / freedom)


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

        Nothing is learned of a judge that stands against a single other (which of the two is wrong?), and nothing
        from a batch of answers that are alike.

        Args:
            scores: fp64 [judges, n].
        """
        if len(judges) < 3:
            return
        weights = self.weights(judges)
        rate = (1 - MEMORY) * information(scores, sizes)
        for i, judge in enumerate(judges):
            others = np.arange(len(judges)) != i
            agreed = correlation(scores[i], combine(scores[others], weights[others], sizes), sizes)
            if not np.isnan(agreed):
                before = self._agreement.get(judge, PRIOR)
                self._agreement[judge] = (1 - rate) * before + rate * agreed
                self._agreement.move_to_end(judge)
        while len(self._agreement) > limits.JUDGES_MAX:
            self._agreement.popitem(last=False)


def _slices(sizes: Sequence[int]) -> list[slice]:
    ends = np.cumsum(sizes).tolist()
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
