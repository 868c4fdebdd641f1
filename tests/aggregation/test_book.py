"""The book's exact damping and what it refuses from a checkpoint; norms of updates of any length. See also test_merge.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.aggregation.book import Book, to_fixed
from shoal.aggregation.compress import Sparse
from shoal.aggregation.robust import norm
from shoal.protocol.version import Dot

DOT = Dot("me", 1, 1)


@given(
    st.lists(st.floats(-(2.0**21), 2.0**21, width=32), min_size=1, max_size=20),
    st.integers(1, 2**31 - 1),
    st.floats(0, 1),
)
def test_damping_is_the_exact_floor(values: list[float], whole: int, share: float) -> None:
    """In whole numbers, for the largest masses and the oddest fractions: int64 must not overflow on the way."""
    part = min(whole, int(share * whole))
    dense = np.array(values, np.float32)
    book = Book(dense.size)
    book.record(DOT, dense)
    book.damp(DOT, part, whole)
    assert book.parts()["damped"].tolist() == [int(f) * part // whole for f in to_fixed(dense)]


def test_a_lost_update_that_counts_after_all_is_damped_no_more() -> None:
    """Else it would count, and most of it would be taken back again by what is sent next."""
    book = Book(3)
    values = np.array([0.5, -0.25, 0.125], np.float32)
    book.learn(values)
    book.record(DOT, values)
    book.adopt(DOT)
    book.unadopt(DOT)
    book.damp(DOT, 2, 3)
    book.damp(DOT, 1, 2)  # in place of the two thirds
    assert book.residual_f64().tolist() == (values / 2).tolist()
    book = Book.from_arrays(book.to_arrays())
    book.adopt(DOT)
    assert not book.residual().any() and not book.parts()["damped"].any()


def test_a_fraction_that_is_none_is_refused() -> None:
    book = Book(1)
    book.record(DOT, np.ones(1, np.float32))
    for part, whole in ((-1, 2), (3, 2), (0, 0), (1, 2**31)):
        with pytest.raises(ValueError, match="cannot damp"):
            book.damp(DOT, part, whole)


@pytest.mark.parametrize(
    ("name", "array", "detail"),
    [
        ("adopted", np.zeros(1, np.int64), "adopted of shape"),
        ("damped", np.zeros((4, 1), np.int64), "damped of shape"),
        ("own/0/indices", np.array([0, 4]), "outside 4 coordinates"),
        ("own/0/indices", np.array([-1, 0]), "outside 4 coordinates"),
    ],
)
def test_a_damaged_checkpoint_is_refused(name: str, array: np.ndarray, detail: str) -> None:
    book = Book(4)
    book.record(DOT, Sparse(np.array([0, 3]), np.array([0.5, 0.25], np.float32)))
    arrays = book.to_arrays()
    assert Book.from_arrays(arrays).knows(DOT)
    with pytest.raises(ValueError, match=detail):
        Book.from_arrays({**arrays, name: array})


def test_the_norm_of_a_long_update_is_exactly_rounded_too() -> None:
    values = np.random.default_rng(2).standard_normal(2**16 * 2 + 7).astype(np.float32)
    assert norm(values) == math.sqrt(math.fsum(float(v) * float(v) for v in values))
    assert norm(values) == norm(values[::-1])
    assert norm(np.zeros(0, np.float32)) == 0
