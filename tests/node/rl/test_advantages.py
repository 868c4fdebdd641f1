"""Group advantages: scaling, groups without a signal, missing rewards."""

import numpy as np
import pytest

from shoal.node.rl.advantages import group_advantages


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
