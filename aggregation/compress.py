"""Top-k and quantization: what of a residual is sent, and the setting that says so.

Covers: `Compression` and its presets, the choice of coordinates (per chunk, so that one loud tensor does not silence the
others and memory stays linear), the quantizer. The bytes are codec.py's. Error feedback is not here: whatever `encode`
leaves out stays in the residual (book.py).

Quantizer: per chunk, magnitudes are `low + m * step` with fp16 `low` and `step` and an integer m, plus a sign bit. Kept
values start at the chunk's threshold, not at zero, so the offset buys back most of a bit. At 1 bit: the mean magnitude; at
2 bits: the means of the lower and upper half (one Lloyd step); above: evenly spaced from the smallest to the largest.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..protocol.errors import ExitCode, PeerFault, ShoalError
from . import codec

Bits = Literal[1, 2, 4, 8, 16, 32]
BITS: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
CHUNK_MAX = 2**20


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
        values=f"got {text!r}; {why}",
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
    with np.errstate(over="ignore"):
        values = vector.astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError("the vector has a NaN, an Inf or a value beyond fp32")
    form = compression.form(values.size)
    rows = form.full_chunks * form.chunk
    picked = [_pick(values[:rows].reshape(-1, form.chunk), form.kept)] if rows else []
    if form.kept_last:
        picked.append(_pick(values[rows:].reshape(1, -1), form.kept_last, offset=rows))
    scales, codes = zip(*(_quantize(v, form.bits) for _, v in picked), strict=True)
    indices = None if form.dense else np.concatenate([i.ravel() for i, _ in picked])
    return codec.write(form, np.concatenate(scales), np.concatenate([c.ravel() for c in codes]), indices)


def decode(payload: bytes, d: int, compression: Compression) -> Sparse:
    """A pure function of the bytes: integer operations and element-wise IEEE multiply and add alone.

    Raises:
        PeerFault("bad_payload"): not exactly what `encode` can write for this d and compression; checked before anything
            larger than the payload is allocated.
    """
    form = compression.form(d)
    scales, codes, indices = codec.read(form, payload)
    if indices is None:
        indices = np.arange(d, dtype=np.int64)
    if form.bits >= 16:
        values = codes.astype(np.float32)
        if not np.isfinite(values).all():
            raise PeerFault("bad_payload", "a value is not finite")
        return Sparse(indices, values)
    counts = np.full(len(scales), form.kept, np.int64)
    if form.kept_last:
        counts[-1] = form.kept_last
    wide = scales.astype(np.float32)
    low, step = np.repeat(wide[:, 0], counts), np.repeat(wide[:, 1], counts)
    magnitude = low + (codes >> 1).astype(np.float32) * step
    return Sparse(indices, np.where(codes & 1, -magnitude, magnitude))


def max_payload_bytes(d: int, compression: Compression) -> int:
    """No valid payload for d coordinates is longer (bytes)."""
    return codec.max_bytes(compression.form(d))


def _pick(rows: np.ndarray, kept: int, offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The `kept` largest magnitudes of every row [c, length]: flat indices int64 [c, kept] ascending, and values."""
    count, length = rows.shape
    if kept == length:
        columns = np.broadcast_to(np.arange(length, dtype=np.int64), rows.shape)
    else:
        columns = np.argpartition(np.abs(rows), length - kept, axis=1)[:, length - kept :]
        columns = np.sort(columns, axis=1).astype(np.int64)
    starts = offset + length * np.arange(count, dtype=np.int64)[:, None]
    return columns + starts, np.take_along_axis(rows, columns, axis=1)


def _quantize(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows [c, k] → (scales fp16 [c, 2], codes). A code is magnitude << 1 | sign; at 16 and 32 bits it is the value."""
    if bits >= 16:
        kind = np.float16 if bits == 16 else np.float32
        bound = np.float32(np.finfo(kind).max)
        return np.zeros((len(values), 0), np.float16), np.clip(values, -bound, bound).astype(kind)
    magnitudes = np.abs(values)
    levels = 2 ** (bits - 1)
    least, most = magnitudes.min(axis=1), magnitudes.max(axis=1)
    if levels == 1:
        low, step = magnitudes.mean(axis=1), np.zeros_like(least)
    elif levels == 2:
        upper = magnitudes > ((least + most) / 2)[:, None]
        count = upper.sum(axis=1)
        total, above = magnitudes.sum(axis=1), np.where(upper, magnitudes, 0).sum(axis=1)
        low = (total - above) / np.maximum(magnitudes.shape[1] - count, 1)
        step = np.where(count > 0, above / np.maximum(count, 1) - low, 0)
    else:
        low, step = least, (most - least) / (levels - 1)
    half = np.float32(np.finfo(np.float16).max)
    scales = np.stack([np.minimum(low, half), np.minimum(step, half)], axis=1).astype(np.float16)
    wide = scales.astype(np.float32)
    spread = np.where(wide[:, 1] > 0, wide[:, 1], 1)
    nearest = np.rint((magnitudes - wide[:, :1]) / spread[:, None])
    index = np.clip(nearest, 0, levels - 1) * (wide[:, 1:] > 0)
    return scales, (index.astype(np.uint8) << 1) | (values < 0)
