"""The codec beside SparseLoCo's format and the entropy bound: bits per parameter, encode and decode speed, in one run.

The reference is written here from its published description: top-64 of every 4096 by magnitude with torch.topk, 12-bit
indices, 2-bit values with one fp16 scale pair per chunk, packed with numpy in the same style as ours. Vectors are
heavy-tailed, as pseudo-gradients are: Student-t with 3 degrees of freedom, and Laplace. "/ entropy" is against log2 of the
number of index sets plus the setting's whole bits per value, without scales; ours can fall below 1, because levels are
entropy coded. The error is what is lost of the kept coordinates' energy (error feedback sends it later).

    python benchmarks/codec.py [--json] [--parameters 409600 4096000] [--repeat 5]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shoal.aggregation.compress import PRESETS, Compression, decode, encode

CHUNK, KEPT = 4096, 64


def reference_encode(vector: np.ndarray) -> bytes:
    """Top-64 of 4096, 12-bit indices, 2-bit values. The vector's length must be a multiple of 4096."""
    rows = vector.reshape(-1, CHUNK)
    columns = np.sort(torch.topk(torch.from_numpy(np.abs(rows)), KEPT, sorted=False).indices.numpy(), axis=1)
    values = np.take_along_axis(rows, columns, axis=1)
    size = np.abs(values)
    half = size > size.mean(axis=1, keepdims=True)
    codes = ((half.astype(np.uint8) << 1) | (values < 0)).reshape(-1, 4)
    packed = codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6
    pairs = columns.reshape(-1, 2).astype(np.uint32)
    joined = pairs[:, 0] | pairs[:, 1] << 12
    index_bytes = np.stack([joined & 255, joined >> 8 & 255, joined >> 16 & 255], axis=1).astype(np.uint8)
    scales = np.stack([size.min(axis=1), size.max(axis=1)], axis=1).astype("<f2")
    return scales.tobytes() + packed.tobytes() + index_bytes.tobytes()


def entropy_bits(setting: Compression) -> float:
    """log2 of the number of index sets, plus the value bits, per parameter. Scales are not counted."""
    n, k = setting.chunk, setting.kept(setting.chunk)
    indices = 0.0 if setting.dense else (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    return (indices + setting.bits * k) / n


def best_seconds(work: Callable[[], Any], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def sample(shape: str, d: int) -> np.ndarray:
    """fp32 [d] of the size that deltas have."""
    rng = np.random.default_rng(0)
    return (1e-3 * (rng.standard_t(3, d) if shape == "student-t" else rng.laplace(size=d))).astype(np.float32)


def measure(shape: str, d: int, repeat: int) -> list[dict[str, Any]]:
    vector = sample(shape, d)
    megabytes = 4 * d / 1e6
    aligned = vector[: d // CHUNK * CHUNK]
    reference_bits = 8 * len(reference_encode(aligned)) / aligned.size
    reference_s = best_seconds(lambda: reference_encode(aligned), repeat) * d / aligned.size
    rows = []
    for name, setting in PRESETS.items():
        payload = encode(vector, setting)
        encode_s = best_seconds(lambda s=setting: encode(vector, s), repeat)
        decode_s = best_seconds(lambda s=setting, p=payload: decode(p, d, s), repeat)
        bits = 8 * len(payload) / d
        sparse = decode(payload, d, setting)
        kept = vector[sparse.indices].astype(np.float64)
        error = float(np.sum((kept - sparse.values) ** 2) / np.sum(kept**2))
        rows.append(
            {
                "shape": shape,
                "parameters": d,
                "preset": name,
                "bits_per_parameter": round(bits, 4),
                "bytes_per_parameter": round(bits / 8, 5),
                "under_fp32": round(32 / bits, 1),
                "over_entropy_bound": round(bits / entropy_bits(setting), 3),
                "sparseloco_bits": 0.219,
                "sparseloco_format_here_bits": round(reference_bits, 4),
                "against_sparseloco": round(0.219 / bits, 3),
                "kept_energy_lost": round(error, 6),
                "encode_mb_s": round(megabytes / encode_s),
                "decode_mb_s": round(megabytes / decode_s),
                "encode_time_against_reference": round(encode_s / reference_s, 2),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--parameters", type=int, nargs="+", default=[409_600, 4_096_000], help="d, 4096 and more")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    if min(options.parameters) < CHUNK:
        parser.error(f"--parameters {min(options.parameters)} is less than one chunk of {CHUNK}: give more")
    torch.set_num_threads(1)  # numpy has one; speeds are per core
    rows = [
        row
        for shape in ("student-t", "laplace")
        for d in options.parameters
        for row in measure(shape, d, options.repeat)
    ]
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    print(
        "shape             d  preset       bits/param  under fp32  / entropy  error  enc MB/s  dec MB/s  enc time / ref"
    )
    for r in rows:
        print(
            f"{r['shape']:<9} {r['parameters']:>9}  {r['preset']:<11} {r['bits_per_parameter']:>11}"
            f" {r['under_fp32']:>10}x {r['over_entropy_bound']:>10} {r['kept_energy_lost']:>6.1%} {r['encode_mb_s']:>9}"
            f" {r['decode_mb_s']:>9} {r['encode_time_against_reference']:>15}"
        )
    print(
        "SparseLoCo as published: 0.219 bit/parameter (146x under fp32); its format rebuilt here: "
        f"{rows[0]['sparseloco_format_here_bits']} bit; entropy bound of 64 of 4096 with 2-bit values: "
        f"{entropy_bits(PRESETS['sparseloco']):.4f} bit"
    )


if __name__ == "__main__":
    main()
