"""The bytes of a compressed update: Golomb-Rice coded gaps, packed codes, fp16 scales. Sizes follow from the setting.

    version (1) | scales fp16 [chunks, 2] | codes, `bits` each | gap remainders, r bits each | gap quotients, unary

How many coordinates are kept is a function of d and the setting, and so is the Rice parameter r, so the payload carries
neither: there is exactly one encoding of given scales, codes and indices. Gaps between kept indices are close to
geometric, for which Golomb coding is within a few per cent of the entropy (S. W. Golomb, "Run-length encodings", 1966);
keeping remainders and unary quotients in separate streams lets numpy do both without a loop over coordinates.

Hostile input: every size is checked against `Form` before anything is unpacked. Raises PeerFault("bad_payload").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..protocol.errors import PeerFault

VERSION = 1


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
    def scale_bytes(self) -> int:
        return 4 * self.chunks if self.bits < 16 else 0

    @property
    def code_bytes(self) -> int:
        return -(-self.total * self.bits // 8)

    @property
    def rice(self) -> int:
        """Remainder bits r: the largest 2^r up to 0.98 of the mean gap, which costs least for geometric gaps.

        In integers, because every peer must find the same r.
        """
        return max(1, 98 * self.d // (100 * self.total)).bit_length() - 1

    @property
    def remainder_bytes(self) -> int:
        return 0 if self.dense else -(-self.total * self.rice // 8)

    @property
    def unary_bits_max(self) -> int:
        return 0 if self.dense else self.total + (self.d >> self.rice)

    @property
    def fixed_bytes(self) -> int:
        return 1 + self.scale_bytes + self.code_bytes + self.remainder_bytes


def max_bytes(form: Form) -> int:
    """No valid payload of this form is longer."""
    return form.fixed_bytes + -(-form.unary_bits_max // 8)


def write(form: Form, scales: np.ndarray, codes: np.ndarray, indices: np.ndarray | None) -> bytes:
    """Args: scales fp16 [chunks, 2 or 0]; codes [total] (uint8, fp16 or fp32); indices int64 [total] ascending, or None."""
    parts = [bytes([VERSION]), scales.astype("<f2").tobytes()]
    parts.append(_pack(codes, form.bits) if form.bits < 16 else codes.astype(f"<f{form.bits // 8}").tobytes())
    if indices is not None:
        gaps = np.diff(indices, prepend=-1) - 1
        r = form.rice
        parts.append(_pack_wide(gaps & ((1 << r) - 1), r))
        ends = np.cumsum((gaps >> r) + 1) - 1
        unary = np.zeros(int(ends[-1]) + 1, np.uint8)
        unary[ends] = 1
        parts.append(np.packbits(unary).tobytes())
    return b"".join(parts)


def read(form: Form, payload: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Scales fp16 [chunks, 2], codes [total], indices int64 [total] or None. Raises PeerFault("bad_payload")."""
    if not form.fixed_bytes <= len(payload) <= max_bytes(form):
        raise PeerFault("bad_payload", f"{len(payload)} bytes, expected {form.fixed_bytes} to {max_bytes(form)}")
    if payload[0] != VERSION:
        raise PeerFault("bad_payload", f"version {payload[0]}, expected {VERSION}")
    at = 1
    scales = np.zeros((0, 2), np.float16)
    if form.bits < 16:
        scales = np.frombuffer(payload, "<f2", 2 * form.chunks, at).reshape(-1, 2)
        if not np.isfinite(scales).all() or (np.signbit(scales)).any():
            raise PeerFault("bad_payload", "a scale is negative or not finite")
    at += form.scale_bytes
    raw = payload[at : at + form.code_bytes]
    codes = _unpack(raw, form.bits, form.total)
    at += form.code_bytes
    if form.dense:
        return scales, codes, None
    low = _unpack_wide(payload[at : at + form.remainder_bytes], form.rice, form.total)
    at += form.remainder_bytes
    return scales, codes, _read_indices(form, low, payload[at:])


def _read_indices(form: Form, low: np.ndarray, stream: bytes) -> np.ndarray:
    unary = np.unpackbits(np.frombuffer(stream, np.uint8))
    ends = np.flatnonzero(unary)
    if ends.size != form.total:
        raise PeerFault("bad_payload", f"{ends.size} indices, expected {form.total}")
    if unary.size - int(ends[-1]) > 8:
        raise PeerFault("bad_payload", "trailing bytes after the last index")
    gaps = ((np.diff(ends, prepend=-1) - 1) << form.rice) | low
    indices = np.cumsum(gaps + 1) - 1
    if int(indices[-1]) >= form.d:
        raise PeerFault("bad_payload", f"index {int(indices[-1])} of {form.d} coordinates")
    per_chunk = np.bincount(indices // form.chunk, minlength=form.chunks)
    expected = np.full(form.chunks, form.kept)
    if form.kept_last:
        expected[-1] = form.kept_last
    if not np.array_equal(per_chunk, expected):
        raise PeerFault("bad_payload", "a chunk has another number of indices than the setting keeps")
    return indices


def _pack(codes: np.ndarray, bits: int) -> bytes:
    """uint8 codes below 2^bits, `bits` in 1, 2, 4, 8, first code in the low bits."""
    if bits == 8:
        return codes.astype(np.uint8).tobytes()
    per = 8 // bits
    padded = np.zeros(-(-codes.size // per) * per, np.uint8)
    padded[: codes.size] = codes
    lanes = padded.reshape(-1, per)
    packed = lanes[:, 0].copy()
    for lane in range(1, per):
        packed |= lanes[:, lane] << (bits * lane)
    return packed.tobytes()


def _unpack(raw: bytes, bits: int, count: int) -> np.ndarray:
    if bits >= 16:
        return np.frombuffer(raw, f"<f{bits // 8}", count)
    packed = np.frombuffer(raw, np.uint8)
    if bits == 8:
        return packed
    per = 8 // bits
    lanes = np.stack([(packed >> (bits * lane)) & (2**bits - 1) for lane in range(per)], axis=1).ravel()
    if lanes[count:].any():
        raise PeerFault("bad_payload", "padding after the last code is not zero")
    return lanes[:count]


def _pack_wide(numbers: np.ndarray, width: int) -> bytes:
    """Non-negative integers below 2^width, most significant bit first."""
    if width == 0:
        return b""
    shifts = np.arange(width - 1, -1, -1)
    return np.packbits(((numbers[:, None] >> shifts) & 1).astype(np.uint8)).tobytes()


def _unpack_wide(raw: bytes, width: int, count: int) -> np.ndarray:
    if width == 0:
        return np.zeros(count, np.int64)
    bits = np.unpackbits(np.frombuffer(raw, np.uint8))
    if bits[count * width :].any():
        raise PeerFault("bad_payload", "padding after the last remainder is not zero")
    rows = bits[: count * width].reshape(count, width)
    numbers = np.zeros(count, np.int64)
    for column in range(width):
        numbers = (numbers << 1) | rows[:, column]
    return numbers
