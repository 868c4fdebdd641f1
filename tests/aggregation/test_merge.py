"""Exact merging: any order the same bits, void updates, caps, outer steps, and the residual law."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.aggregation.book import Book, to_fixed
from shoal.aggregation.compress import PRESETS, Sparse, decode, encode
from shoal.aggregation.merge import (
    FRACTION_BITS,
    Accumulator,
    OuterNesterov,
    OuterSgd,
    apply_fixed,
    capped_weights,
    contribution,
    merge_round,
)
from shoal.aggregation.robust import clip_scale, norm
from shoal.protocol.version import Dot

seeds = st.integers(0, 2**32 - 1)


def sparse(d: int, k: int, seed: int, size: float = 1e-2) -> Sparse:
    rng = np.random.default_rng(seed)
    indices = np.sort(rng.choice(d, k, replace=False)).astype(np.int64)
    return Sparse(indices, (size * rng.standard_normal(k)).astype(np.float32))


def test_contribution_is_rint_in_units_of_2_to_the_minus_40() -> None:
    fixed = contribution(np.array([0.5, -0.25, 2.0**-41, 3 * 2.0**-41], np.float32), 1.0)
    assert fixed is not None
    assert fixed.tolist() == [2**39, -(2**38), 0, 2]  # halves go to even


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1.0, -1.0, 5.0])
def test_a_non_finite_or_large_contribution_is_void(value: float) -> None:
    assert contribution(np.array([0.1, value], np.float32), 1.0) is None


def test_the_scale_counts_before_the_bound() -> None:
    assert contribution(np.array([1.5], np.float32), 0.5) is not None
    assert contribution(np.array([0.5], np.float32), 2.0) is None


@given(seeds, st.permutations(range(6)))
def test_any_order_of_accumulation_gives_the_same_bits(seed: int, order: list[int]) -> None:
    updates = [sparse(50, 20, seed + i) for i in range(6)]
    plain, shuffled = Accumulator(50), Accumulator(50)
    for i in range(6):
        for acc, which in ((plain, updates[i]), (shuffled, updates[order[i]])):
            fixed = contribution(which.values, 0.3)
            assert fixed is not None
            acc.add(which.indices, fixed)
    assert np.array_equal(plain.total, shuffled.total)
    fixed = contribution(updates[0].values, 0.3)
    assert fixed is not None
    shuffled.subtract(updates[0].indices, fixed)
    shuffled.add(updates[0].indices, fixed)
    assert np.array_equal(plain.total, shuffled.total)


def test_the_accumulator_wraps() -> None:
    acc = Accumulator(1)
    for _ in range(4):
        acc.add(np.array([0]), np.array([2**62], np.int64))
    assert acc.total[0] == 0


def test_apply_fixed_is_exact_in_fp64() -> None:
    theta = np.array([1.0, -3.5], np.float32)
    assert apply_fixed(theta, np.array([2**FRACTION_BITS, -(2**39)], np.int64)).tolist() == [2.0, -4.0]


def test_weights_are_capped_twice() -> None:
    assert capped_weights({"a": 10, "b": 12, "c": 1000}, 500, 4.0) == {"a": 10, "b": 12, "c": 48}
    assert capped_weights({"a": 10**9}, 100, 4.0) == {"a": 100}
    assert capped_weights({"a": 0, "b": -5}, 100, 4.0) == {"a": 0, "b": 0}
    assert capped_weights({"a": 1, "b": 0, "c": 3}, 100, 1.0) == {"a": 1, "b": 0, "c": 1}


@given(seeds)
def test_merge_with_sgd_one_is_the_weighted_mean(seed: int) -> None:
    d = 40
    theta = np.random.default_rng(seed).standard_normal(d).astype(np.float32)
    items = [(i, sparse(d, 10, seed + i), w) for i, w in enumerate((1, 2, 5))]
    result = merge_round(theta, None, items, OuterSgd(1.0))
    mean = np.zeros(d)
    for _, update, weight in items:
        mean[update.indices] += weight / 8 * update.values.astype(np.float64)
    assert np.allclose(result.theta, theta - mean, atol=1e-6) and result.buffer is None and not result.voids


def test_a_void_update_counts_in_the_normalizer_and_contributes_nothing() -> None:
    theta = np.zeros(4, np.float32)
    good = Sparse(np.array([0]), np.array([0.5], np.float32))
    bad = Sparse(np.array([1]), np.array([7.0], np.float32))
    for void in (bad, None):  # None: its bytes did not decode
        result = merge_round(theta, None, [("a", good, 1), ("b", void, 1)], OuterSgd(1.0))
        assert result.voids == ("b",) and result.theta.tolist() == [-0.25, 0, 0, 0]


def test_voidness_does_not_depend_on_who_else_took_part() -> None:
    bad = Sparse(np.array([0]), np.array([1.5], np.float32))
    alone = merge_round(np.zeros(1, np.float32), None, [("b", bad, 1)], OuterSgd(1.0))
    crowd = merge_round(np.zeros(1, np.float32), None, [("b", bad, 1), ("c", bad, 99)], OuterSgd(1.0))
    assert alone.voids == ("b",) and crowd.voids == ("b", "c")


def test_no_weight_means_no_step() -> None:
    theta = np.ones(3, np.float32)
    result = merge_round(theta, None, [("a", sparse(3, 2, 1), 0)], OuterSgd(1.0))
    assert np.array_equal(result.theta, theta) and "no step" in result.reason


def test_a_step_out_of_fp32_is_not_taken() -> None:
    theta = np.full(1, np.finfo(np.float32).max, np.float32)
    update = Sparse(np.array([0]), np.array([-0.9], np.float32))
    result = merge_round(theta, None, [("a", update, 1)], OuterSgd(1e38))
    assert np.array_equal(result.theta, theta) and result.voids == ("a",)


def test_large_updates_are_scaled_down_to_the_norm() -> None:
    update = Sparse(np.array([0, 1]), np.array([0.3, 0.4], np.float32))
    result = merge_round(np.zeros(2, np.float32), None, [("a", update, 1)], OuterSgd(1.0), norm_max=0.25)
    assert np.allclose(result.theta, [-0.15, -0.2], atol=1e-7) and "1 clipped" in result.reason
    bad = Sparse(np.array([0]), np.array([np.nan], np.float32))
    assert merge_round(np.zeros(2, np.float32), None, [("a", bad, 1)], OuterSgd(1.0), norm_max=1.0).voids == ("a",)


def test_nesterov_follows_torch() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    theta = rng.standard_normal(20).astype(np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    reference = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    ours, buffer, outer = theta, None, OuterNesterov(0.7, 0.9)
    for _ in range(5):
        gradient = (0.1 * rng.standard_normal(20)).astype(np.float32)
        fixed = contribution(gradient, 1.0)
        assert fixed is not None
        ours, buffer = outer.step(ours, buffer, fixed)
        parameter.grad = torch.from_numpy(gradient)
        reference.step()
    assert np.allclose(ours, parameter.detach().numpy(), atol=1e-5)


def test_norm_is_exactly_rounded_and_refuses_nonsense() -> None:
    assert norm(np.array([3, 4], np.float32)) == 5.0
    assert clip_scale(5.0, 0) == 1.0 == clip_scale(1.0, 2.0)
    assert clip_scale(4.0, 2.0) == 0.5
    with pytest.raises(ValueError):
        norm(np.array([np.inf], np.float32))


# --- the residual law -------------------------------------------------------------------------------------------------


@given(seeds, st.lists(st.sampled_from(["adopt", "drop", "later", "damp"]), min_size=1, max_size=12))
def test_the_residual_law_holds_to_the_bit(seed: int, fates: list[str]) -> None:
    d, preset = 300, PRESETS["short"]
    rng = np.random.default_rng(seed)
    book = Book(d)
    learned = np.zeros(d, np.int64)
    expected_adopted, damped = np.zeros(d, np.int64), np.zeros(d, np.int64)
    for seq, fate in enumerate(fates, 1):
        delta = (1e-2 * rng.standard_normal(d)).astype(np.float32)
        book.learn(delta)
        learned += to_fixed(delta)
        update = decode(encode(book.residual_f64(), preset), d, preset)
        dot = Dot("me", 1, seq)
        book.record(dot, update)
        book.record(dot, update)  # again changes nothing
        mass = np.zeros(d, np.int64)
        mass[update.indices] = to_fixed(update.values)
        if fate in ("adopt", "later"):
            book.adopt(dot)
            book.adopt(dot)
            expected_adopted += mass
        if fate == "later":
            book.unadopt(dot)
            expected_adopted -= mass
        if fate == "damp":
            book.damp(dot, 1, 3)
            damped += (mass.astype(object) // 3).astype(np.int64)
        assert book.knows(dot) and book.adopted(dot) == (fate == "adopt")
    assert np.array_equal(book.residual(), learned - expected_adopted - damped)
    before = book.residual()
    book.settle(book.dots()[: len(fates) // 2])
    assert np.array_equal(book.residual(), before)
    copy = Book.from_arrays(book.to_arrays())
    assert np.array_equal(copy.residual(), before) and copy.dots() == book.dots()
    parts = copy.parts()
    assert np.array_equal(before, parts["learned"] - parts["adopted"] - parts["damped"])


def test_error_feedback_loses_nothing_over_many_rounds() -> None:
    """What was adopted plus what is still owed is what was learned, exactly; and the residual stays bounded."""
    d, preset, book = 2000, PRESETS["long"], Book(2000)
    rng = np.random.default_rng(9)
    direction = rng.standard_normal(d) * 1e-3
    for seq in range(1, 101):
        book.learn((direction + 1e-4 * rng.standard_normal(d)).astype(np.float32))
        update = decode(encode(book.residual_f64(), preset), d, preset)
        book.record(Dot("me", 1, seq), update)
        book.adopt(Dot("me", 1, seq))
    parts = book.parts()
    assert np.array_equal(parts["learned"], parts["adopted"] + book.residual())
    assert np.linalg.norm(book.residual_f64()) < 40 * np.linalg.norm(direction)


def test_a_dense_own_update_is_booked_whole() -> None:
    book = Book(3)
    book.learn(np.array([0.1, 0.2, 0.3], np.float32))
    dot = Dot("me", 1, 1)
    book.record(dot, book.residual_f64().astype(np.float32))
    book.adopt(dot)
    assert np.abs(book.residual()).max() <= 2**14  # fp32 rounding of 0.3 in units of 2^-40
    restored = Book.from_arrays(book.to_arrays())
    restored.damp(dot, 0, 1)
    restored.settle([dot, Dot("me", 1, 9)])
    assert np.array_equal(restored.residual(), book.residual())


def test_the_book_refuses_nonsense() -> None:
    book = Book(2)
    with pytest.raises(ValueError):
        book.learn(np.zeros(3, np.float32))
    with pytest.raises(ValueError):
        book.learn(np.array([np.nan, 0], np.float32))
    assert not book.residual().any()
    with pytest.raises(KeyError):
        book.adopt(Dot("me", 1, 1))
    book.record(Dot("me", 1, 1), np.zeros(2, np.float32))
    with pytest.raises(ValueError):
        book.damp(Dot("me", 1, 1), 2, 1)
    arrays = book.to_arrays()
    arrays["own/0/fixed"] = np.zeros(1, np.int64)
    with pytest.raises(ValueError):
        Book.from_arrays(arrays)
