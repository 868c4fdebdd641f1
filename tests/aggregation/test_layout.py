"""The flat layout: order, round trip, refusals, and golden hashes that must never change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.aggregation import layout as module
from shoal.aggregation.layout import Layout, TensorSpec, state_hash

shapes = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes, st.integers(0, 2**32 - 1))
def test_flatten_and_unflatten_are_inverse(shapes: list[tuple[int, ...]], seed: int) -> None:
    layout = Layout([TensorSpec(f"t{i}", s) for i, s in enumerate(shapes)])
    rng = np.random.default_rng(seed)
    arrays = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in layout.tensors}
    vector = layout.flatten(arrays)
    assert vector.shape == (layout.size,) and vector.dtype == np.float32
    for name, view in layout.unflatten(vector).items():
        assert np.array_equal(view, arrays[name]) and view.base is not None


def test_the_order_given_is_the_order_in_the_vector() -> None:
    layout = Layout([TensorSpec("b", (2,)), TensorSpec("a", ())])
    assert layout.flatten({"a": np.float32(3), "b": np.array([1, 2], np.float32)}).tolist() == [1, 2, 3]
    assert layout.slices == {"b": slice(0, 2), "a": slice(2, 3)}


@pytest.mark.parametrize(
    "tensors",
    [[], [("a", (1,)), ("a", (2,))], [("", (1,))], [("a\nb", (1,))], [("a", (0,))], [("a", (-1,))], [("a", (1.5,))]],
)
def test_a_bad_layout_is_refused(tensors: list[tuple[str, tuple[int, ...]]]) -> None:
    with pytest.raises(ValueError):
        Layout([TensorSpec(*t) for t in tensors])


def test_too_many_coordinates_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DIMENSIONS_MAX", 10)
    with pytest.raises(ValueError, match="11 coordinates"):
        Layout([TensorSpec("a", (11,))])


def test_arrays_that_do_not_fit_are_refused() -> None:
    layout = Layout([TensorSpec("a", (2,))])
    with pytest.raises(ValueError, match="differ in: b"):
        layout.flatten({"a": np.zeros(2), "b": np.zeros(1)})
    with pytest.raises(ValueError, match="shape"):
        layout.flatten({"a": np.zeros(3)})
    with pytest.raises(ValueError, match="shape"):
        layout.unflatten(np.zeros(3))


def test_golden_hashes() -> None:
    layout = Layout([TensorSpec("weight", (2, 3)), TensorSpec("bias", (3,))])
    assert layout.hash().hex() == "7bdd568f60a2d9cd8357349cf0e73df112ea7d5cd1fbb966cbc441fb81193f59"
    theta = np.arange(9, dtype=np.float32)
    assert state_hash(theta, None, b"v").hex() == "6c37f65eb66a1f233b66f248a6c7844f97377d6829ec59a29a40dada1d25221c"
    assert state_hash(theta, theta, b"v") != state_hash(theta, None, b"v") != state_hash(theta, None, b"w")


def test_only_fp32_vectors_have_a_state_hash() -> None:
    with pytest.raises(ValueError, match="fp32"):
        state_hash(np.zeros(3), None, b"")
