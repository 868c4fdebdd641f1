"""The quantizer: magnitudes of a chunk as `low + level * step`, and the small floats that carry `low` and `step`.

Kept values start at the chunk's threshold, not at zero, so the offset buys back most of a bit. At 1 bit (sign alone): the mean
magnitude. At 2 bits: two means, found by a few Lloyd steps (S. P. Lloyd, "Least squares quantization in PCM", 1982). Above:
even cells from the smallest to the largest kept magnitude, then the line through them that leaves the least squared error.
For the tails that top-k leaves, narrower cells that cut off the largest would gain little, and these cost the fewest bits once
coded (codec.py).

`fit` and `quantize` run on the origin only. `dequantize` runs on every peer and must give the same bits on all: integer
operations and element-wise IEEE multiply and add.
"""

from __future__ import annotations

import math

import numpy as np

from ..protocol.errors import PeerFault
from .codec import EXPONENT_BITS, Form, Symbols

LLOYD_STEPS = 3
FP32_MAX = np.float32(np.finfo(np.float32).max)


def fit(magnitudes: np.ndarray, bits: int) -> np.ndarray:
    """fp32 [c, k] → low and step, fp32 [c, 2]. An exact zero among the kept stays zero (but for 1 bit)."""
    levels = 2 ** (bits - 1)
    least, most = magnitudes.min(axis=1), magnitudes.max(axis=1)
    if levels == 1:
        low, step = magnitudes.mean(axis=1, dtype=np.float64), np.zeros_like(least)
    elif levels == 2:
        low, high = _two_means(magnitudes, least, most)
        low = np.where(least > 0, low, 0)
        step = high - low
    else:
        low, step = _line(magnitudes, least, most, levels)
    return np.stack([low, step], axis=1).astype(np.float32)


def _two_means(magnitudes: np.ndarray, least: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """fp64 [c] each, low <= high; equal where all magnitudes are."""
    total, size = magnitudes.sum(axis=1, dtype=np.float64), magnitudes.shape[1]
    low, high = least.astype(np.float64), most.astype(np.float64)
    for _ in range(LLOYD_STEPS):
        upper = magnitudes > ((low + high) / 2).astype(np.float32)[:, None]
        count = upper.sum(axis=1)
        above = np.where(upper, magnitudes, 0).sum(axis=1, dtype=np.float64)
        low = (total - above) / np.maximum(size - count, 1)
        high = np.where(count > 0, above / np.maximum(count, 1), low)
    return low, high


def _line(magnitudes: np.ndarray, least: np.ndarray, most: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """fp64 [c] each: intercept and slope of the least-squares line from cell number to magnitude.

    Through zero where a zero was kept, with cells around the multiples of the step.
    """
    zero = least == 0
    cell = (most - least) / np.where(zero, np.float32(levels - 1), np.float32(levels))
    half = np.where(zero, np.float32(0.5), np.float32(0))  # keep fp32: these are the only arrays of full size
    scaled = (magnitudes - least[:, None]) / np.where(cell > 0, cell, np.float32(1))[:, None] + half[:, None]
    number = np.minimum(np.floor(scaled), np.float32(levels - 1))
    size = magnitudes.shape[1]
    mean_n = number.mean(axis=1, dtype=np.float64)
    mean_m = magnitudes.mean(axis=1, dtype=np.float64)
    square = np.einsum("ck,ck->c", number, number, dtype=np.float64) / size
    product = np.einsum("ck,ck->c", number, magnitudes, dtype=np.float64) / size
    mean_line = np.where(zero, 0, mean_n)
    spread = square - mean_line * mean_n
    step = np.where(spread > 0, (product - mean_line * mean_m) / np.where(spread > 0, spread, 1), 0)
    low = np.where(zero, 0, mean_m - step * mean_n)
    return np.maximum(low, 0), np.maximum(step, 0)


def quantize(values: np.ndarray, scales: np.ndarray, exponent: int, form: Form) -> np.ndarray:
    """fp32 [c, k] and their rounded scales [c, 2] → codes uint8 [c, k], `level << 1 | negative`."""
    wide = _scale_values(scales, exponent, form.scale_mantissa)
    low, step = wide[:, :1], wide[:, 1:]
    inverse = np.divide(1, step, out=np.zeros_like(step, dtype=np.float64), where=step > 0)
    inverse = np.minimum(inverse, FP32_MAX).astype(np.float32)
    with np.errstate(over="ignore"):
        level = (np.abs(values) - low) * inverse
    np.clip(np.rint(level, out=level), 0, 2 ** (form.bits - 1) - 1, out=level)
    return (level.astype(np.uint8) << 1) | (values < 0)


def dequantize(form: Form, symbols: Symbols) -> np.ndarray:
    """fp32 [total], finite. Raises PeerFault("bad_payload") on values or scales that `encode` never writes."""
    codes = symbols.codes
    if form.bits >= 16:
        if not np.isfinite(codes).all():
            raise PeerFault("bad_payload", "a value is not finite")
        if form.bits == 32:
            return codes.astype(np.float32)
        largest = float(np.abs(codes).max())
        _check_exponent(symbols.exponent, 2.0**14 <= largest < 2.0**15, zero=largest == 0)
        return (codes.astype(np.float64) * math.ldexp(1.0, symbols.exponent)).astype(np.float32)
    top = int(symbols.scales.max())
    _check_exponent(symbols.exponent, top >> form.scale_mantissa == 2**EXPONENT_BITS - 1, zero=top == 0)
    wide = _scale_values(symbols.scales, symbols.exponent, form.scale_mantissa)
    low, step = (np.repeat(wide[:, column], form.counts) for column in (0, 1))
    with np.errstate(over="ignore"):
        magnitude = np.minimum(low + (codes >> 1).astype(np.float32) * step, FP32_MAX)
    return np.where(codes & 1, -magnitude, magnitude)


def _check_exponent(exponent: int, top_used: bool, *, zero: bool) -> None:
    if not top_used and not (zero and exponent == 0):
        raise PeerFault("bad_payload", f"exponent {exponent} is not the one that fits the largest value")


def half_exponent(largest: float) -> int:
    """Such that `largest * 2^-exponent` rounds to fp16 within [2^14, 2^15); 0 for 0."""
    return _exponent(largest, mantissa=10) - 15 if largest else 0


def scale_exponent(largest: float, mantissa: int) -> int:
    """Such that `largest` gets the highest exponent field of a scale; 0 for 0."""
    return _exponent(largest, mantissa) - (2**EXPONENT_BITS - 1) - mantissa if largest else 0


def _exponent(value: float, mantissa: int) -> int:
    """e of `value` = m * 2^e with 0.5 <= m < 1, once rounded to `mantissa` bits after the leading one."""
    fraction, exponent = math.frexp(value)
    return exponent + (round(fraction * 2 ** (mantissa + 1)) == 2 ** (mantissa + 1))


def round_scales(scales: np.ndarray, exponent: int, mantissa: int) -> np.ndarray:
    """fp32 [c, 2] → their codes, uint16 [c, 2]: exponent field above `mantissa` bits, gradual underflow to 0."""
    units = np.ldexp(scales.astype(np.float64), -exponent)
    fraction, power = np.frexp(units)
    one = 2**mantissa
    normal = ((power - mantissa) << mantissa) + (np.rint(fraction * 2 * one).astype(np.int64) - one)
    return np.where(units >= one, normal, np.rint(units).astype(np.int64)).astype(np.uint16)


def _scale_values(codes: np.ndarray, exponent: int, mantissa: int) -> np.ndarray:
    """Codes [c, 2] → fp32 [c, 2]; exact but for underflow and for what lies beyond fp32, which becomes the largest."""
    wide = codes.astype(np.int64)
    field, one = wide >> mantissa, 2**mantissa
    units = np.where(field > 0, ((wide & (one - 1)) + one) << np.maximum(field - 1, 0), wide)
    return np.minimum(units.astype(np.float64) * math.ldexp(1.0, exponent), float(FP32_MAX)).astype(np.float32)
