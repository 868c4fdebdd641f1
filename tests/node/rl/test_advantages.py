"""Group advantages: scaling, baselines, several rewards, groups without a signal, missing rewards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.rl.advantages import combined_advantages, group_advantages


def test_group_scaling_centres_and_scales_each_group():
    result = group_advantages([0.0, 1.0, 2.0, 10.0, 30.0], [3, 2])
    assert result.values[:3] == pytest.approx([-1 / 1.0001, 0, 1 / 1.0001])
    assert result.values[3:] == pytest.approx(np.array([-10, 10]) / (200**0.5 + 1e-4))
    assert result.skipped_groups == 0


def test_equal_rewards_are_skipped_and_counted():
    result = group_advantages([0.1] * 7 + [0.0, 1.0], [7, 2])
    assert np.all(result.values[:7] == 0)
    assert result.has_signal.tolist() == [False] * 7 + [True] * 2
    assert result.skipped_groups == 0.5


def test_one_reward_that_differs_by_a_hair_is_a_signal():
    result = group_advantages([0.5, 0.5, 0.5, 0.5 + 1e-12], [4], scale="none")
    assert result.skipped_groups == 0
    assert result.values[3] > 0


def test_none_takes_no_part():
    result = group_advantages([1.0, None, 3.0, float("nan")], [4], scale="none")
    assert result.values.tolist() == [-1.0, 0.0, 1.0, 0.0]
    assert result.reward_mean == 2.0


def test_a_group_of_nones_is_skipped():
    result = group_advantages([None, None, None, 1.0], [2, 2])
    assert result.skipped_groups == 1
    assert np.all(result.values == 0)


def test_batch_scaling_uses_one_deviation():
    rewards = [0.0, 1.0, 0.0, 10.0]
    result = group_advantages(rewards, [2, 2], scale="batch")
    assert result.values == pytest.approx(np.array([-0.5, 0.5, -5, 5]) / (np.std(rewards, ddof=1) + 1e-4))


def test_sizes_must_add_up():
    with pytest.raises(ValueError, match="group sizes"):
        group_advantages([1.0], [2])


def test_leave_one_out_compares_with_the_others():
    rewards = [1.0, 4.0, None, 7.0]
    result = group_advantages(rewards, [4], scale="none", leave_one_out=True)
    assert result.values == pytest.approx([1 - 5.5, 4 - 4.0, 0.0, 7 - 2.5])


COLUMNS = [[0.0, 1.0, 1.0, 0.0, 1.0, 1.0], [5.0, 9.0, None, 2.0, 2.0, 2.0]]
SIZES = [3, 3]


def test_rewards_are_summed_and_then_normalized():
    result = combined_advantages(COLUMNS, [1.0, 0.5], SIZES)
    summed = group_advantages([2.5, 5.5, 1.0, 1.0, 2.0, 2.0], SIZES)
    assert result.values == pytest.approx(summed.values)


def test_each_reward_is_normalized_before_the_sum():
    """By hand: two groups, two functions, one of which does not apply once and is constant in the second group."""
    third, root2 = 1 / 3, 2**0.5
    std = third**0.5 + 1e-4  # of (0, 1, 1), one degree of freedom less
    first = [-2 * third / std, third / std, third / std]
    second = [-2 / (2 * root2 + 1e-4), 2 / (2 * root2 + 1e-4), 0.0]  # of (5, 9)
    summed = np.array([first[i] + 0.5 * second[i] for i in range(3)] + first)
    result = combined_advantages(COLUMNS, [1.0, 0.5], SIZES, aggregation="normalize_then_sum")
    assert result.values == pytest.approx((summed - summed.mean()) / (summed.std(ddof=1) + 1e-4))


def test_a_group_that_no_reward_tells_apart_is_skipped():
    for aggregation in ("sum_then_normalize", "normalize_then_sum"):
        result = combined_advantages([[0.1] * 3 + [0.0, 1.0]], [1.0], [3, 2], aggregation=aggregation)
        assert np.all(result.values[:3] == 0)
        assert result.has_signal.tolist() == [False] * 3 + [True] * 2
        assert result.skipped_groups == 0.5


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_a_completion_without_any_reward_takes_no_part(aggregation):
    columns = [[0.0, None, 1.0, 0.0, 1.0, 1.0], [5.0, None, 9.0, 2.0, 2.0, 3.0]]
    result = combined_advantages(columns, [1.0, 1.0], SIZES, aggregation=aggregation)
    without = combined_advantages([[c[i] for i in (0, 2, 3, 4, 5)] for c in columns], [1.0, 1.0], [2, 3],
                                  aggregation=aggregation)  # fmt: skip
    assert result.values[1] == 0
    assert np.delete(result.values, 1) == pytest.approx(without.values)
    assert result.reward_mean == pytest.approx(without.reward_mean)


@given(
    st.lists(st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)) | st.none(), min_size=2, max_size=6), min_size=1),
    st.sampled_from(["group", "batch", "none"]),
    st.booleans(),
)
def test_advantages_of_a_group_sum_to_nothing(groups, scale, leave_one_out):
    flat = [r for group in groups for r in group]
    result = group_advantages(flat, [len(g) for g in groups], scale=scale, leave_one_out=leave_one_out)
    start = 0
    for group in groups:
        assert abs(result.values[start : start + len(group)].sum()) < 1e-6
        start += len(group)
    assert all(result.values[i] == 0 for i, r in enumerate(flat) if r is None)


def test_options_that_exclude_each_other():
    with pytest.raises(ValueError, match="normalizes by itself"):
        combined_advantages(COLUMNS, [1.0, 1.0], SIZES, aggregation="normalize_then_sum", scale="none")
    with pytest.raises(ValueError, match="2 columns"):
        combined_advantages(COLUMNS, [1.0], SIZES)
