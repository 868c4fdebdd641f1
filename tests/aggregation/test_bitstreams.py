"""Numbers and positions as bits: inverse of each other, no longer than promised, close to the entropy, safe to read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.aggregation.bitstreams import (
    Reader,
    positions_bytes_max,
    positions_bytes_min,
    read_numbers,
    read_positions,
    write_numbers,
    write_positions,
)
from shoal.protocol.errors import PeerFault


@given(st.lists(st.integers(0, 2**20 - 1), max_size=40), st.integers(20, 40))
def test_numbers_come_back(numbers: list[int], width: int) -> None:
    array = np.array(numbers, np.int64)
    data = write_numbers(array, width)
    assert len(data) == width * -(-len(numbers) // 8)
    assert np.array_equal(read_numbers(Reader(data), len(numbers), width, np.int64), array)


@given(st.sets(st.integers(0, 3000), max_size=200), st.integers(0, 2**33))
def test_positions_come_back(chosen: set[int], more: int) -> None:
    """Clustered at the start of a huge universe as well as spread over a small one."""
    positions = np.array(sorted(chosen), np.int64)
    universe = int(positions.max(initial=0)) + 1 + more
    data = write_positions(positions, universe)
    assert positions_bytes_min(positions.size) <= len(data) <= positions_bytes_max(positions.size, universe)
    source = Reader(data)
    assert np.array_equal(read_positions(source, positions.size, universe), positions)
    assert source.left == 0


@given(st.sets(st.integers(0, 2000), min_size=1, max_size=60))
def test_no_other_parameter_is_cheaper(chosen: set[int]) -> None:
    positions = np.array(sorted(chosen), np.int64)
    gaps = np.diff(positions, prepend=-1) - 1
    costs = [(r + 1) * gaps.size + int((gaps >> r).sum()) for r in range(20)]
    assert write_positions(positions, 2001)[0] == costs.index(min(costs))


@pytest.mark.parametrize("density", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_positions_cost_about_their_entropy(density: float) -> None:
    universe = 200_000
    positions = np.flatnonzero(np.random.default_rng(1).random(universe) < density)
    p = positions.size / universe
    entropy = -universe * (p * np.log2(p) + (1 - p) * np.log2(1 - p))
    # A bitmap costs a bit each: at 90 % that is more than twice the entropy, elsewhere within 14 %.
    assert 8 * len(write_positions(positions, universe)) <= min(1.14 * entropy, 1.14 * universe) or density == 0.9


@given(st.binary(max_size=60), st.integers(0, 40), st.integers(1, 2**40))
def test_fuzz_any_bytes_are_positions_or_a_fault(data: bytes, count: int, universe: int) -> None:
    try:
        positions = read_positions(Reader(data), count, universe)
    except PeerFault as fault:
        assert fault.kind == "bad_payload"
    else:
        assert positions.size == count and (np.diff(positions, prepend=-1) > 0).all()
        assert not count or positions[-1] < universe


@pytest.mark.parametrize(
    ("data", "count", "universe", "detail"),
    [
        (b"", 1, 10, "0 bytes left"),
        (b"\x09\0\0", 1, 10, "Rice parameter 9"),
        (b"\x03\0\0", 1, 10, "numbers of 3 bits"),
        (b"\0\1", 9, 100, "for 9 positions"),
        (b"\0\1", 2, 100, "1 positions, expected 2"),
        (b"\0\1", 1, 7, "1 positions, expected|0 positions, expected|index 7"),
    ],
)
def test_each_kind_of_damage_is_named(data: bytes, count: int, universe: int, detail: str) -> None:
    with pytest.raises(PeerFault, match=detail):
        read_positions(Reader(data), count, universe)


def test_gaps_cannot_wrap_around() -> None:
    """Sixty gaps of almost 2^40 sum to more than the universe, whatever int64 makes of it."""
    low = b"\xff" * (40 * 8)
    with pytest.raises(PeerFault, match="index"):
        read_positions(Reader(bytes([40]) + low + b"\xff" * 8), 60, 2**40)
