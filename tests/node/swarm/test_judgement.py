"""Combining judges: laws of the weighted median, and what liars can and cannot do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.node.swarm.judgement import WEIGHT_MIN, Trust, combine, correlation, information, weighted_median

unit = st.floats(0, 1, width=32)


one_to_seven, one_to_eight = st.integers(1, 7), st.integers(1, 8)


def matrices(judges=one_to_seven, n=one_to_eight):
    return st.tuples(judges, n).flatmap(
        lambda shape: st.lists(
            st.lists(unit, min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
        ).map(lambda rows: np.array(rows, dtype=np.float64))
    )


weights_of = st.lists(st.floats(0.05, 1.0), min_size=7, max_size=7)


@given(matrices())
def test_equal_weights_give_the_median(scores):
    assert weighted_median(scores, np.ones(len(scores))) == pytest.approx(np.median(scores, axis=0))


@given(matrices(), weights_of, st.randoms(use_true_random=False), st.floats(0.01, 100))
def test_the_order_of_judges_and_the_scale_of_weights_do_not_matter(scores, weights, random, factor):
    weights = np.array(weights[: len(scores)])
    order = list(range(len(scores)))
    random.shuffle(order)
    expected = weighted_median(scores, weights)
    assert weighted_median(scores[order], factor * weights[order]) == pytest.approx(expected)


@given(matrices(), weights_of)
def test_half_of_the_weight_is_on_either_side(scores, weights):
    weights = np.array(weights[: len(scores)])
    for column, middle in zip(scores.T, weighted_median(scores, weights), strict=True):
        half = weights.sum() / 2 + 1e-6
        assert weights[column < middle - 1e-9].sum() <= half and weights[column > middle + 1e-9].sum() <= half


@given(matrices(judges=st.integers(3, 7)), st.data())
def test_no_minority_of_the_weight_moves_it_beyond_what_honest_judges_said(scores, data):
    liars = data.draw(st.integers(1, (len(scores) - 1) // 2))
    honest = scores[liars:]
    lies = np.array(data.draw(st.lists(unit, min_size=liars * scores.shape[1], max_size=liars * scores.shape[1])))
    mixed = np.concatenate([lies.reshape(liars, -1), honest])
    result = weighted_median(mixed, np.ones(len(mixed)))
    assert (result >= honest.min(axis=0) - 1e-9).all() and (result <= honest.max(axis=0) + 1e-9).all()


@given(matrices(), weights_of, st.data())
def test_raising_a_score_never_lowers_the_result(scores, weights, data):
    weights = np.array(weights[: len(scores)])
    judge = data.draw(st.integers(0, len(scores) - 1))
    raised = scores.copy()
    raised[judge] = np.minimum(1.0, raised[judge] + data.draw(unit))
    assert (weighted_median(raised, weights) >= weighted_median(scores, weights) - 1e-12).all()


@given(matrices(judges=st.integers(2, 7)), weights_of)
def test_who_is_absent_counts_as_not_there(scores, weights):
    weights = np.array(weights[: len(scores)])
    scores[0] = np.nan
    assert weighted_median(scores, weights) == pytest.approx(weighted_median(scores[1:], weights[1:]))


def test_without_any_score_there_is_none():
    scores = np.array([[np.nan, 0.25], [np.nan, np.nan]])
    assert np.isnan(weighted_median(scores, np.ones(2))[0])
    assert combine(scores, np.ones(2), [2])[1] == 0.25
    assert np.isnan(combine(np.full((2, 3), np.nan), np.ones(2), [2, 1])).all()


@given(matrices(judges=st.just(1)), st.lists(st.floats(-0.5, 0.5), min_size=5, max_size=5), weights_of)
def test_judges_whose_scales_begin_elsewhere_agree_on_the_differences(scores, offsets, weights):
    judges = np.concatenate([scores + offset for offset in offsets])
    result = combine(judges, np.array(weights[:5]), [scores.shape[1]])
    assert np.diff(result) == pytest.approx(np.diff(scores[0]), abs=1e-9)


@given(matrices(n=st.just(6)), weights_of)
def test_groups_are_combined_apart(scores, weights):
    weights = np.array(weights[: len(scores)])
    whole = combine(scores, weights, [4, 2])
    assert whole[:4] == pytest.approx(combine(scores[:, :4], weights, [4]))
    assert whole[4:] == pytest.approx(combine(scores[:, 4:], weights, [2]))


def test_correlation_of_the_same_the_opposite_and_the_indifferent():
    truth = np.array([0.1, 0.5, 0.5, 0.9, 0.2, 0.3])
    assert correlation(truth, truth, [4, 2]) == pytest.approx(1.0)
    assert correlation(0.3 + truth / 7, truth, [4, 2]) == pytest.approx(1.0)  # a judge's scale is its own
    assert correlation(1 - truth, truth, [4, 2]) == pytest.approx(-1.0)
    assert correlation(np.full(6, 0.7), truth, [4, 2]) == 0.0
    assert np.isnan(correlation(truth, np.full(6, 0.5), [4, 2]))
    assert np.isnan(correlation(np.array([0.9, 0.1]), np.array([0.1, 0.9]), [1, 1]))  # two groups: nothing to compare
    absent = np.where(truth == 0.9, np.nan, 1 - truth)
    assert correlation(absent, truth, [4, 2]) == pytest.approx(-1.0)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(1, 2))
def test_liars_in_the_minority_lose_their_weight(seed, liars):
    """Noisy honest judges and liars that all say the opposite of the truth, in unison: five judges, forty batches."""
    rng = np.random.default_rng(seed)
    trust, judges = Trust(), ["a", "b", "c", "d", "e"]
    for _ in range(40):
        truth = rng.random(32)
        scores = np.array([truth + 0.2 * rng.standard_normal(32) for _ in judges])
        scores[:liars] = 1 - truth
        trust.learn(judges, scores, [8] * 4)
    weights = trust.weights(judges)
    assert (weights[:liars] <= 0.1).all() and (weights[liars:] > 0.25).all()
    truth = rng.random(64)
    scores = np.array([truth + 0.2 * rng.standard_normal(64) for _ in judges])
    scores[:liars] = 1 - truth
    without = combine(scores[liars:], weights[liars:], [8] * 8)
    together = combine(scores, weights, [8] * 8)
    assert correlation(together, truth, [8] * 8) > correlation(without, truth, [8] * 8) - 0.1


def test_weights_are_bounded_and_a_lone_pair_teaches_nothing():
    trust = Trust()
    for _ in range(100):
        trust.learn(["a", "b"], np.array([[0.1, 0.9], [0.9, 0.1]]), [2])
    assert trust.weights(["a", "b"]).tolist() == [0.5, 0.5]
    row = np.array([0.1, 0.9, 0.4, 0.2])
    for _ in range(100):
        trust.learn(["a", "b", "c"], np.array([row, 1 - row, row + 0.1]), [4])
    weights = trust.weights(["a", "b", "c", "new"])
    assert weights.min() == WEIGHT_MIN == weights[1] and weights.max() <= 1.0 and weights[3] == 0.5


def test_answers_that_are_alike_teach_nothing_of_the_judges():
    rng = np.random.default_rng(1)
    truth = np.tile([0.2, 0.8], 32)
    told = np.array([truth + 0.1 * rng.standard_normal(64) for _ in range(4)])
    flat = np.array([0.5 + 0.1 * rng.standard_normal(64) for _ in range(4)])
    assert information(told, [8] * 8) > 0.8
    assert information(flat, [8] * 8) < 0.02
    assert information(np.full((3, 4), 0.5), [4]) == 0.0
    unison = np.concatenate([flat[:1], flat])  # two that say the same of alike answers, among five
    assert information(unison, [8] * 8) < 0.02
    told[0] = 1 - truth
    assert information(told, [8] * 8) > 0.8
    trust, judges = Trust(), ["liar", "b", "c", "d"]
    for _ in range(30):
        scores = np.array([truth + 0.1 * rng.standard_normal(64) for _ in judges])
        scores[0] = 1 - truth
        trust.learn(judges, scores, [8] * 8)
    before = trust.weights(judges)
    for _ in range(200):
        trust.learn(judges, np.array([0.5 + 0.1 * rng.standard_normal(64) for _ in judges]), [8] * 8)
    assert before[0] == WEIGHT_MIN and trust.weights(judges) == pytest.approx(before, abs=0.1)


@pytest.mark.parametrize("right", [0.05, 0.5, 0.98])
def test_honest_judges_keep_their_weight_however_rare_wrong_or_right_answers_are(right):
    rng = np.random.default_rng(2)
    trust, judges = Trust(), ["liar", "b", "c", "d"]
    for _ in range(300):
        truth = (rng.random(64) < right).astype(float)
        scores = np.array([0.2 + 0.6 * truth + 0.1 * rng.standard_normal(64) for _ in judges])
        scores[0] = 1 - truth
        trust.learn(judges, scores, [8] * 8)
    weights = trust.weights(judges)
    assert weights[0] == WEIGHT_MIN and (weights[1:] > 0.4).all()


def test_a_judge_that_turns_is_noticed_within_ten_batches():
    rng = np.random.default_rng(3)
    trust, judges = Trust(), ["turns", "b", "c", "d"]
    for batch in range(60):
        truth = (rng.random(64) < 0.4).astype(float)
        scores = np.array([0.2 + 0.6 * truth + 0.1 * rng.standard_normal(64) for _ in judges])
        if batch < 50:
            trusted = trust.weights(judges)[0]
        else:
            scores[0] = 1 - scores[0]
        trust.learn(judges, scores, [8] * 8)
    assert trusted > 0.8 and trust.weights(judges)[0] == WEIGHT_MIN
