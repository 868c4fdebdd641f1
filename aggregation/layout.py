"""The flat layout: named trainable tensors as one fp32 vector, and the hashes of layout and state.

Every peer of a run has the same layout; its hash is compared when a peer joins. Does not know where the tensors live.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

DIMENSIONS_MAX = 2**40  # a layout above this is a mistake, not a model


@dataclass(frozen=True)
class TensorSpec:
    """One trainable tensor: its name in the model and its shape. A scalar has shape ()."""

    name: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name or "\n" in self.name:
            raise ValueError(f"tensor name {self.name!r} is empty or has a line break")
        if any(not isinstance(n, int) or n < 1 for n in self.shape):
            raise ValueError(f"tensor {self.name} has shape {self.shape}; every dimension must be a positive integer")

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The order of the tensors given is the order in the vector.

    Raises:
        ValueError: no tensors, a name twice, or more than DIMENSIONS_MAX coordinates.
    """

    tensors: tuple[TensorSpec, ...]

    def __init__(self, tensors: Iterable[TensorSpec]) -> None:
        object.__setattr__(self, "tensors", tuple(tensors))
        names = [t.name for t in self.tensors]
        if not names:
            raise ValueError("a layout needs at least one tensor")
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise ValueError(f"tensor names given twice: {', '.join(twice[:5])}")
        if self.size > DIMENSIONS_MAX:
            raise ValueError(f"{self.size} coordinates, at most {DIMENSIONS_MAX} are allowed")

    @cached_property
    def size(self) -> int:
        """d, the number of coordinates."""
        return sum(t.size for t in self.tensors)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Tensor name → its place in the vector."""
        places, start = {}, 0
        for tensor in self.tensors:
            places[tensor.name] = slice(start, start + tensor.size)
            start += tensor.size
        return places

    def hash(self) -> bytes:
        """sha-256 (32 bytes) over names, shapes and order."""
        lines = [f"{t.name}\t{','.join(map(str, t.shape))}\n" for t in self.tensors]
        return hashlib.sha256(b"shoal/v1/layout\0" + "".join(lines).encode()).digest()

    def flatten(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """fp32 [d] from one array per tensor. Raises ValueError on a missing, additional or misshapen array."""
        if arrays.keys() != self.slices.keys():
            odd = sorted(arrays.keys() ^ self.slices.keys())
            raise ValueError(f"arrays and layout differ in: {', '.join(odd[:5])}")
        vector = np.empty(self.size, np.float32)
        for tensor in self.tensors:
            array = arrays[tensor.name]
            if tuple(array.shape) != tensor.shape:
                raise ValueError(f"{tensor.name} has shape {tuple(array.shape)}, the layout says {tensor.shape}")
            vector[self.slices[tensor.name]] = np.ravel(array)
        return vector

    def unflatten(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Views into `vector` ([d], any dtype) by tensor name. Raises ValueError on another size."""
        if vector.shape != (self.size,):
            raise ValueError(f"vector of shape {vector.shape}, the layout says ({self.size},)")
        return {t.name: vector[self.slices[t.name]].reshape(t.shape) for t in self.tensors}


def state_hash(theta: np.ndarray, outer: np.ndarray | None, version: bytes) -> bytes:
    """sha-256 (32 bytes) of a shared state.

    Args:
        theta: fp32 [d].
        outer: fp32 [d], the outer optimizer's buffer, or None.
        version: what the state is the result of (lineage, or the hash of a version vector).
    """
    digest = hashlib.sha256(b"shoal/v1/state\0")
    digest.update(len(version).to_bytes(8, "little") + version)
    for part in (theta, outer):
        if part is None:
            digest.update((0).to_bytes(8, "little"))
            continue
        if part.dtype != np.float32 or part.ndim != 1:
            raise ValueError(f"state of dtype {part.dtype} and shape {part.shape}, expected fp32 [d]")
        digest.update(part.size.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(part, dtype="<f4").data)
    return digest.digest()
