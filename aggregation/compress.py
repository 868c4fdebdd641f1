"""Top-k and quantization: what of a residual is sent, and the setting that says so.

Covers: `Compression` and its presets, the choice of coordinates (per chunk, so that one loud tensor does not silence the
others and memory stays linear), the way to symbols and back. The quantizer is quantize.py's, the bytes are codec.py's. Error
feedback is not here: whatever `encode` leaves out stays in the residual (book.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..protocol.errors import ExitCode, ShoalError
from . import codec
from .quantize import dequantize, fit, half_exponent, quantize, round_scales, scale_exponent

Bits = Literal[1, 2, 4, 8, 16, 32]
BITS: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
CHUNK_MAX = 2**20
BLOCK = 2**20  # coordinates worked on at a time, so that the temporaries stay in the cache


@dataclass(frozen=True)
class Compression:
    """What part of a residual travels and how finely.

    Attributes:
        density: share of coordinates kept per chunk, 0 < density <= 1; 1 keeps all and sends no indices.
        bits: per kept value; 16 is fp16, 32 is fp32.
        chunk: coordinates per chunk.
    """

    density: float
    bits: int
    chunk: int = 4096

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density = {self.density} must be above 0 and at most 1")
        if self.bits not in BITS:
            raise ValueError(f"bits = {self.bits} must be one of {', '.join(map(str, BITS))}")
        if not 1 <= self.chunk <= CHUNK_MAX:
            raise ValueError(f"chunk = {self.chunk} must be between 1 and {CHUNK_MAX}")

    @property
    def dense(self) -> bool:
        return self.density == 1

    def kept(self, length: int) -> int:
        """How many of a chunk's `length` coordinates are kept."""
        return min(length, max(1, round(self.density * length)))

    def form(self, d: int) -> codec.Form:
        """The shape of a payload for d coordinates."""
        full, rest = divmod(d, self.chunk)
        return codec.Form(
            d=d,
            chunk=self.chunk,
            kept=self.kept(self.chunk),
            kept_last=self.kept(rest) if rest else 0,
            full_chunks=full,
            bits=self.bits,
            dense=self.dense,
        )


PRESETS: dict[str, Compression] = {
    "short": Compression(0.10, 4),  # short runs: reward like dense exchange
    "demo": Compression(0.05, 4),
    "long": Compression(0.02, 4),  # long runs: lags while the residual fills, then like dense
    "sparseloco": Compression(64 / 4096, 2),
    "dense-8bit": Compression(1.0, 8),
    "dense-fp16": Compression(1.0, 16),
    "dense": Compression(1.0, 32),
}


def parse_compression(text: str) -> Compression:
    """A preset's name, or "density/bits" or "density/bits/chunk", for example "0.05/4".

    Raises:
        ShoalError: neither; names the nearest preset.
    """
    if text in PRESETS:
        return PRESETS[text]
    parts = text.split("/")
    if len(parts) in (2, 3):
        try:
            return Compression(float(parts[0]), int(parts[1]), *map(int, parts[2:]))
        except ValueError as error:
            why = str(error)
    else:
        near = difflib.get_close_matches(text, PRESETS, n=1, cutoff=0.0)
        why = f"the nearest preset is {near[0]!r}" if near else "no preset is near"
    raise ShoalError(
        "The compression is not known",
        values=f"found {text!r}; {why}",
        todo=f"Use one of {', '.join(PRESETS)}, or density/bits such as 0.05/4.",
        code=ExitCode.CONFIG,
    )


@dataclass(frozen=True)
class Sparse:
    """A decoded update: `indices` int64 [k], strictly ascending; `values` fp32 [k]."""

    indices: np.ndarray
    values: np.ndarray


def encode(vector: np.ndarray, compression: Compression) -> bytes:
    """Pick and quantize: fp32 or fp64 [d] → payload. Raises ValueError on NaN, Inf or an empty vector."""
    if vector.ndim != 1 or not vector.size:
        raise ValueError(f"cannot encode a vector of shape {vector.shape}")
    form = compression.form(vector.size)
    indices: list[np.ndarray] = []
    kept: list[np.ndarray] = []  # fp32 [chunks of a block, kept]
    for start, stop in _blocks(form):
        with np.errstate(over="ignore"):
            block = vector[start:stop].astype(np.float32, copy=False)
        rows = block.reshape(-1, min(form.chunk, block.size))
        if not np.isfinite(rows).all():
            raise ValueError("the vector has a NaN, an Inf or a value beyond fp32")
        if form.dense:
            kept.append(rows)
        else:
            places = _largest(rows, form.kept if rows.shape[1] == form.chunk else form.kept_last)
            indices.append(places + start)
            kept.append(block[places].reshape(len(rows), -1))
    return codec.write(form, _symbols(form, kept, np.concatenate(indices) if indices else None))


def decode(payload: bytes, d: int, compression: Compression) -> Sparse:
    """A pure function of the bytes: integer operations and element-wise IEEE multiply and add alone.

    Raises:
        PeerFault("bad_payload"): not exactly what `encode` can write for this d and compression; checked before anything
            much larger than the payload is allocated.
    """
    form = compression.form(d)
    symbols = codec.read(form, payload)
    indices = symbols.indices if symbols.indices is not None else np.arange(d, dtype=np.int64)
    return Sparse(indices, dequantize(form, symbols))


def max_payload_bytes(d: int, compression: Compression) -> int:
    """No valid payload for d coordinates is longer (bytes)."""
    return codec.max_bytes(compression.form(d))


def _blocks(form: codec.Form) -> Iterator[tuple[int, int]]:
    """Bounds of whole chunks, about BLOCK coordinates each, and of the shorter last chunk alone."""
    end = form.full_chunks * form.chunk
    step = max(1, BLOCK // form.chunk) * form.chunk
    yield from ((start, min(start + step, end)) for start in range(0, end, step))
    if form.kept_last:
        yield end, form.d


def _largest(rows: np.ndarray, kept: int) -> np.ndarray:
    """Flat places int64 [c * kept], ascending, of the `kept` largest magnitudes of every row of fp32 [c, length].

    Equal magnitudes: the first ones. Magnitudes are compared as integers, which order the same and partition faster.
    """
    length = rows.shape[1]
    magnitudes = np.abs(rows).view(np.int32)
    threshold = np.partition(magnitudes, length - kept, axis=1)[:, length - kept, None]
    chosen = magnitudes >= threshold
    places = np.flatnonzero(chosen)
    if places.size == len(rows) * kept:
        return places
    tied = np.flatnonzero(chosen.sum(axis=1) > kept)
    above = magnitudes[tied] > threshold[tied]
    equal = magnitudes[tied] == threshold[tied]
    room = kept - above.sum(axis=1, keepdims=True)
    chosen[tied] = above | (equal & (np.cumsum(equal, axis=1) <= room))
    return np.flatnonzero(chosen)


def _symbols(form: codec.Form, kept: list[np.ndarray], indices: np.ndarray | None) -> codec.Symbols:
    if form.bits == 32:
        return codec.Symbols(0, np.zeros((0, 2), np.uint16), np.concatenate([k.ravel() for k in kept]), indices)
    if form.bits == 16:
        exponent = half_exponent(max(float(np.abs(k).max()) for k in kept))
        # 2^-exponent is beyond fp32 only for the tiniest vectors.
        wide = np.float32 if abs(exponent) < 126 else np.float64
        halves = np.concatenate(
            [(k.ravel().astype(wide, copy=False) * 2.0**-exponent).astype(np.float16) for k in kept]
        )
        return codec.Symbols(exponent, np.zeros((0, 2), np.uint16), halves, indices)
    fitted = [fit(np.abs(k), form.bits) for k in kept]
    exponent = scale_exponent(max(float(f.max()) for f in fitted), form.scale_mantissa)
    scales = [round_scales(f, exponent, form.scale_mantissa) for f in fitted]
    codes = [quantize(k, s, exponent, form) for k, s in zip(kept, scales, strict=True)]
    return codec.Symbols(exponent, np.concatenate(scales), np.concatenate([c.ravel() for c in codes]), indices)
