"""Combining judges: laws of the weighted median, and what liars can and cannot do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.node.swarm.judgement import WEIGHT_MIN, Trust, combine, concordance, weighted_median

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


def test_concordance_of_the_same_the_opposite_and_the_indifferent():
    truth = np.array([0.1, 0.5, 0.5, 0.9, 0.2, 0.3])
    assert concordance(truth, truth, [4, 2]) == 1.0
    assert concordance(1 - truth, truth, [4, 2]) == -1.0
    assert concordance(np.full(6, 0.7), truth, [4, 2]) == 0.0
    assert np.isnan(concordance(truth, np.full(6, 0.5), [4, 2]))
    assert concordance(np.array([0.9, 0.1]), np.array([0.1, 0.9]), [1, 1]) != 0.0  # two groups: nothing to compare


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
    assert concordance(together, truth, [8] * 8) > concordance(without, truth, [8] * 8) - 0.1


def test_weights_are_bounded_and_a_lone_pair_teaches_nothing():
    trust = Trust()
    for _ in range(100):
        trust.learn(["a", "b"], np.array([[0.1, 0.9], [0.9, 0.1]]), [2])
    assert trust.weights(["a", "b"]).tolist() == [0.5, 0.5]
    for _ in range(100):
        trust.learn(["a", "b", "c"], np.array([[0.1, 0.9], [0.9, 0.1], [0.2, 0.8]]), [2])
    weights = trust.weights(["a", "b", "c", "new"])
    assert weights.min() == WEIGHT_MIN == weights[1] and weights.max() <= 1.0 and weights[3] == 0.5
