"""The bytes of a compressed update. Sizes follow from the setting, so that nothing in a payload announces a size.

    version (1) | below fp32: exponent int16 | below fp16: scales [chunks, 2], codes
                | fp16, fp32: values         | unless all are kept: indices as a set of positions in [0, d)

* *exponent*: scales and fp16 values count in units of 2^exponent, chosen so that the largest uses the top of its range: updates
  of 1e-9 travel as well as those of 1.
* *scales*: `low` and `step` as small unsigned floats of 5 exponent bits and 3 mantissa bits up to 2-bit codes, 7 at 4 bits, 11
  at 8 bits: 2, 3 or 4 bytes a chunk.
* *codes*: `level << 1 | sign`. `fine` (1 byte) low bits of every code are stored as they are. The rest, `coarse`, in planes: of
  those that reach t - 1, the set that reaches t, for t = 1, 2, … until one is empty (5 bytes of count each). Levels are
  skewed, small ones are common, and a set of positions costs about its entropy. `fine = bits` means no planes.

One encoding of given scales, codes and indices: `read` writes again what it read and refuses anything else, which covers
padding, trailing bytes and every choice a writer has. Raises PeerFault("bad_payload"). It allocates in proportion to the
payload alone, because each kept coordinate takes at least a bit of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..protocol.errors import PeerFault
from .bitstreams import (
    Reader,
    positions_bytes_max,
    positions_bytes_min,
    read_numbers,
    read_positions,
    write_numbers,
    write_positions,
)

VERSION = 2
COUNT_BYTES = 5  # a plane's count; layouts have at most 2^40 coordinates
EXPONENT_BITS = 5  # of a scale
EXPONENTS = range(-200, 121)  # of a payload; what fp32 can need


@dataclass(frozen=True)
class Form:
    """What a payload must look like. `kept` per full chunk, `kept_last` in the shorter last one (0: there is none)."""

    d: int
    chunk: int
    kept: int
    kept_last: int
    full_chunks: int
    bits: int
    dense: bool

    @property
    def chunks(self) -> int:
        return self.full_chunks + (self.kept_last > 0)

    @property
    def total(self) -> int:
        """Coordinates kept in all."""
        return self.full_chunks * self.kept + self.kept_last

    @property
    def counts(self) -> np.ndarray:
        """int64 [chunks], coordinates kept in each."""
        counts = np.full(self.chunks, self.kept, np.int64)
        if self.kept_last:
            counts[-1] = self.kept_last
        return counts

    @property
    def scale_mantissa(self) -> int:
        """Mantissa bits of a scale: the more levels, the finer. Below 8 bits each is a noticeable part of the payload."""
        return {1: 3, 2: 3, 4: 7, 8: 11}.get(self.bits, 0)

    @property
    def scale_bytes(self) -> int:
        """Of both scales of a chunk."""
        return 2 * (EXPONENT_BITS + self.scale_mantissa) // 8

    @property
    def head_bytes(self) -> int:
        """Version, exponent and scales."""
        if self.bits >= 16:
            return 1 if self.bits == 32 else 3
        return 3 + self.chunks * self.scale_bytes


@dataclass(frozen=True)
class Symbols:
    """What a payload says, before it is numbers.

    Attributes:
        exponent: of the unit; 0 at fp32.
        scales: uint16 [chunks, 2], low and step; [0, 2] from fp16 on.
        codes: [total] uint8, or the values as fp16 or fp32.
        indices: int64 [total] strictly ascending; None when all coordinates are kept.
    """

    exponent: int
    scales: np.ndarray
    codes: np.ndarray
    indices: np.ndarray | None


def max_bytes(form: Form) -> int:
    """No valid payload of this form is longer."""
    codes = form.total * form.bits // 8 if form.bits >= 16 else 1 + form.bits * -(-form.total // 8)
    return form.head_bytes + codes + (0 if form.dense else positions_bytes_max(form.total, form.d))


def min_bytes(form: Form) -> int:
    """No valid payload of this form is shorter: signs at least, and a bit for each index."""
    codes = form.total * form.bits // 8 if form.bits >= 16 else 1 + -(-form.total // 8)
    return form.head_bytes + codes + (0 if form.dense else positions_bytes_min(form.total))


def write(form: Form, symbols: Symbols) -> bytes:
    """The payload."""
    parts = [bytes([VERSION])]
    if form.bits < 32:
        parts.append(symbols.exponent.to_bytes(2, "little", signed=True))
    if form.bits < 16:
        parts += [_write_scales(symbols.scales, form), _write_codes(symbols.codes, form.bits)]
    else:
        parts.append(symbols.codes.astype(f"<f{form.bits // 8}").tobytes())
    if symbols.indices is not None:
        parts.append(write_positions(symbols.indices, form.d))
    return b"".join(parts)


def read(form: Form, payload: bytes) -> Symbols:
    """Inverse of `write`. Raises PeerFault("bad_payload") on anything that `write` cannot give for this form."""
    if not min_bytes(form) <= len(payload) <= max_bytes(form):
        raise PeerFault("bad_payload", f"{len(payload)} bytes, expected {min_bytes(form)} to {max_bytes(form)}")
    if payload[0] != VERSION:
        raise PeerFault("bad_payload", f"version {payload[0]}, expected {VERSION}")
    source = Reader(payload)
    source.take(1)
    exponent = 0
    if form.bits < 32:
        exponent = int.from_bytes(source.take(2).tobytes(), "little", signed=True)
        if exponent not in EXPONENTS:
            raise PeerFault("bad_payload", f"exponent {exponent}")
    if form.bits < 16:
        scales = _read_scales(source, form)
        codes = _read_codes(source, form.total, form.bits)
    else:
        scales = np.zeros((0, 2), np.uint16)
        codes = source.take(form.total * form.bits // 8).view(f"<f{form.bits // 8}")
    indices = None
    if not form.dense:
        indices = read_positions(source, form.total, form.d)
        if not np.array_equal(np.bincount(indices // form.chunk, minlength=form.chunks), form.counts):
            raise PeerFault("bad_payload", "a chunk has another number of indices than the setting keeps")
    symbols = Symbols(exponent, scales, codes, indices)
    if write(form, symbols) != payload:
        raise PeerFault(
            "bad_payload", "not the one encoding of what it says (padding, trailing bytes or a costlier form)"
        )
    return symbols


def _write_scales(scales: np.ndarray, form: Form) -> bytes:
    width = EXPONENT_BITS + form.scale_mantissa
    both = scales[:, 0].astype("<u4") | scales[:, 1].astype("<u4") << np.uint32(width)
    return both.astype("<u4", copy=False).view(np.uint8).reshape(-1, 4)[:, : form.scale_bytes].tobytes()


def _read_scales(source: Reader, form: Form) -> np.ndarray:
    width = EXPONENT_BITS + form.scale_mantissa
    raw = np.zeros((form.chunks, 4), np.uint8)
    raw[:, : form.scale_bytes] = source.take(form.chunks * form.scale_bytes).reshape(-1, form.scale_bytes)
    both = raw.view("<u4")[:, 0]
    return np.stack([both & np.uint32((1 << width) - 1), both >> np.uint32(width)], axis=1).astype(np.uint16)


def _write_codes(codes: np.ndarray, bits: int) -> bytes:
    fine = 1
    if bits == 8:  # leave coarse numbers of about 1, whose planes are few: 127 would be slow
        fine = max(1, (int((codes >> 1).sum(dtype=np.int64)) // codes.size).bit_length())
    parts = [bytes([fine]), write_numbers(codes, fine)]
    alive = codes >> fine
    for level in range(1, 1 << (bits - fine)):
        reached = np.flatnonzero(alive >= level)
        parts += [reached.size.to_bytes(COUNT_BYTES, "little"), write_positions(reached, alive.size)]
        if not reached.size:
            break
        alive = alive[reached]
    if sum(map(len, parts)) < 1 + bits * -(-codes.size // 8):
        return b"".join(parts)
    return bytes([bits]) + write_numbers(codes, bits)


def _read_codes(source: Reader, total: int, bits: int) -> np.ndarray:
    fine = source.number(1)
    if not 1 <= fine <= bits:
        raise PeerFault("bad_payload", f"{fine} fine bits of {bits}")
    codes = read_numbers(source, total, fine, np.uint8)
    alive: np.ndarray | None = None
    for _ in range(1, 1 << (bits - fine)):
        size = total if alive is None else alive.size
        count = source.number(COUNT_BYTES)
        if count > size:
            raise PeerFault("bad_payload", f"{count} of {size} codes in a plane")
        if not count:
            break
        reached = read_positions(source, count, size)
        alive = reached if alive is None else alive[reached]
        codes[alive] += np.uint8(1 << fine)
    return codes
