"""Numbers and sets of positions as bits: the two building blocks of codec.py, without a loop over coordinates.

Numbers travel bit-sliced: all lowest bits, then all second ones, each slice padded with zeros to a byte. A set of positions
travels as Golomb-Rice coded gaps (S. W. Golomb, "Run-length encodings", 1966; R. F. Rice, 1979), close to the entropy for the
near-geometric gaps of a top-k choice: r low bits of every gap bit-sliced, then the quotients in unary. With r = 0 that
is the plain bitmap up to the last position. r is the smallest that costs least, so a set has one encoding.

Does not know what the numbers mean. Readers check every size before they allocate and raise PeerFault("bad_payload"); they
do not look at padding or at whether r is the best one: codec.py compares with what it would have written itself.
"""

from __future__ import annotations

import numpy as np

from ..protocol.errors import PeerFault


class Reader:
    """A cursor over a payload that refuses to run past its end."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return len(self._data) - self._at

    def peek(self, size: int) -> np.ndarray:
        """uint8, the next `size` bytes or what is left of them, without moving."""
        return np.frombuffer(self._data[self._at : self._at + size], np.uint8)

    def take(self, size: int) -> np.ndarray:
        """uint8 [size], a view."""
        if size > self.left:
            raise PeerFault("bad_payload", f"{self.left} bytes left, {size} needed")
        taken = self.peek(size)
        self._at += size
        return taken

    def number(self, size: int) -> int:
        """An unsigned little-endian number of `size` bytes."""
        return int.from_bytes(self.take(size).tobytes(), "little")


def write_numbers(numbers: np.ndarray, width: int) -> bytes:
    """The `width` low bits of unsigned integers [n]: width * ceil(n / 8) bytes."""
    one = numbers.dtype.type(1)
    return b"".join(np.packbits((numbers >> numbers.dtype.type(bit)) & one != 0).tobytes() for bit in range(width))


def read_numbers(
    source: Reader, count: int, width: int, dtype: type[np.unsignedinteger] | type[np.int64]
) -> np.ndarray:
    """`dtype` [count], inverse of `write_numbers`."""
    if width * -(-count // 8) > source.left:
        raise PeerFault("bad_payload", f"{source.left} bytes left for {count} numbers of {width} bits")
    numbers = np.zeros(count, dtype)
    for bit in range(width):
        slice_ = np.unpackbits(source.take(-(-count // 8)), count=count)
        numbers |= slice_.astype(dtype, copy=False) << dtype(bit)
    return numbers


def write_positions(positions: np.ndarray, universe: int) -> bytes:
    """int64 [k] strictly ascending in [0, universe). k is not written; nothing is written for k = 0."""
    count = positions.size
    if not count:
        return b""
    if 2 * count >= universe:  # r = 0 costs at most `universe` bits, any other at least 2 per position
        return b"\0" + _bitmap(positions)
    gaps = np.diff(positions, prepend=-1) - 1
    r = _best_rice(gaps, universe)
    if r == 0:
        return b"\0" + _bitmap(positions)
    ends = np.cumsum((gaps >> r) + 1) - 1
    return bytes([r]) + write_numbers(gaps & ((1 << r) - 1), r) + _bitmap(ends)


def read_positions(source: Reader, count: int, universe: int) -> np.ndarray:
    """int64 [count], inverse of `write_positions`."""
    if not count:
        return np.zeros(0, np.int64)
    r = source.number(1)
    if r > universe.bit_length():
        raise PeerFault("bad_payload", f"Rice parameter {r} for {universe} positions")
    low = read_numbers(source, count, r, np.int64)
    if count > 8 * source.left:
        raise PeerFault("bad_payload", f"{source.left} bytes left for {count} positions")
    window = np.unpackbits(source.peek(-(-(count + (universe >> r)) // 8)))
    ends = np.flatnonzero(window.view(np.bool_))[:count]  # several times faster on booleans
    if ends.size < count:
        raise PeerFault("bad_payload", f"{ends.size} positions, expected {count}")
    source.take(int(ends[-1]) // 8 + 1)
    # The sum of the gaps, in Python's integers: hostile gaps must not wrap around int64 below the limit.
    last = ((int(ends[-1]) - (count - 1)) << r) + int(low.sum()) + count - 1
    if last >= universe:
        raise PeerFault("bad_payload", f"index {last} of {universe}")
    if r == 0:
        return ends
    quotients = np.diff(ends, prepend=-1) - 1
    return np.cumsum(((quotients << r) | low) + 1) - 1


def positions_bytes_max(count: int, universe: int) -> int:
    """No set of `count` positions in [0, universe) takes more: the best r costs at most what any other does."""
    if not count:
        return 0
    r = _rice_guess(count, universe)
    return 1 + r * -(-count // 8) + -(-(count + (universe >> r)) // 8)


def positions_bytes_min(count: int) -> int:
    """No set of `count` positions takes less."""
    return 1 + -(-count // 8) if count else 0


def _bitmap(positions: np.ndarray) -> bytes:
    flags = np.zeros(int(positions[-1]) + 1, np.bool_)
    flags[positions] = True
    return np.packbits(flags).tobytes()


def _rice_guess(count: int, universe: int) -> int:
    """Best for geometric gaps: the largest 2^r up to 0.98 of the mean gap; in integers, as all peers must agree."""
    return max(1, 98 * universe // (100 * count)).bit_length() - 1


def _best_rice(gaps: np.ndarray, universe: int) -> int:
    """The smallest r of least cost in bits. That cost is convex in r, so a walk from the guess finds it.

    Going from r to r + 1 costs a bit for each gap and saves the sum of ceil((gap >> r) / 2), which falls with r.
    """

    def bits(r: int) -> int:
        return (r + 1) * gaps.size + int((gaps >> r).sum())

    r = _rice_guess(gaps.size, universe)
    cost = bits(r)
    while r > 0 and (lower := bits(r - 1)) <= cost:
        r, cost = r - 1, lower
    while (higher := bits(r + 1)) < cost:
        r, cost = r + 1, higher
    return r
