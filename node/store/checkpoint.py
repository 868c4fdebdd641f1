"""Checkpoints: the shared state, the book and the learner's own state in one safetensors file each, atomically.

A checkpoint is a temporary file on the same filesystem, fsynced and renamed; the one before stays until it is there. A
damaged newest one is set aside, loudly, and the one before is used. A reader pins a file by holding it open: a pruned file
that is being read stays readable until closed. Metadata is JSON in the file's header; there is no pickle anywhere.

The same format serves state downloads (state_sync.py): `state_parts` is the shared state alone. Equal states give equal bytes
on every peer, which is what lets a newcomer compare offers and fetch from several peers; safetensors' own writer orders its
metadata at random, so the (simple) format is written here and read by safetensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load

from ...protocol import limits
from ...protocol.errors import ExitCode, ShoalError
from ...protocol.version import VersionVector
from ..swarm.state import SharedState
from .disk import REAL_DISK, Disk, write_atomic

FORMAT = "shoal-checkpoint-1"
SUFFIX = ".safetensors"
# Metadata of the largest vector (MEMBERS_MAX origins) stays well below.
METADATA_BYTES_MAX = 8 * 1024 * 1024
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
# What JSON from elsewhere can make `rebuild_state` raise, besides ValueError.
_NONSENSE = (KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Checkpoint:
    """Everything a node needs to go on at the same round.

    Attributes:
        state: the shared state.
        commit: bytes of the commit record that ends its lineage; empty at round 0.
        book: `Book.to_arrays()`.
        learner: `Learner.snapshot()`.
        extra: JSON-ready values of the node (deadlines, counters).
    """

    state: SharedState
    commit: bytes
    book: Mapping[str, np.ndarray | bytes]
    learner: Mapping[str, np.ndarray | bytes]
    extra: Mapping[str, Any]


def describe_state(state: SharedState) -> dict[str, Any]:
    """The JSON form of everything but the arrays."""
    return {
        "round": state.round,
        "lineage": state.lineage.hex(),
        "vector": [[p, i, s, h.hex()] for (p, i), (s, h) in sorted(state.vector.entries.items())],
        "electorate": list(state.electorate),
        "total_weight": state.total_weight,
        "hash": state.hash.hex(),
    }


def rebuild_state(described: Mapping[str, Any], theta: np.ndarray, outer: np.ndarray | None) -> SharedState:
    """Inverse of `describe_state`. Raises ValueError when the recomputed hash differs, KeyError or TypeError on nonsense."""
    entries = {(str(p), int(i)): (int(s), bytes.fromhex(h)) for p, i, s, h in described["vector"]}
    state = SharedState.make(
        theta=theta,
        outer=outer,
        round_=int(described["round"]),
        lineage=bytes.fromhex(described["lineage"]),
        vector=VersionVector(entries),
        electorate=[str(p) for p in described["electorate"]],
        total_weight=int(described["total_weight"]),
    )
    if state.hash.hex() != described["hash"]:
        raise ValueError(f"state hash {state.hash.hex()[:16]}, expected {str(described['hash'])[:16]}")
    return state


def serialize(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """A safetensors file in parts: its header, then the arrays' own memory. The same arguments give the same bytes.

    Raises ValueError for a dtype that is none of numpy's plain numbers.
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    parts: list[bytes | memoryview] = []
    end = 0
    # Wide types first: every array then starts at a multiple of its item size.
    for name, array in sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        if array.dtype.name not in _DTYPES:
            raise ValueError(f"{name} has dtype {array.dtype}, which a checkpoint cannot hold")
        flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
        start, end = end, end + flat.nbytes
        header[name] = {"dtype": _DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, end]}
        parts.append(flat.view(np.uint8).data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *parts]


def state_parts(state: SharedState) -> list[bytes | memoryview]:
    """The shared state alone, as a safetensors file in parts: what a newcomer downloads. Shares the state's memory."""
    arrays = {"theta": state.theta} if state.outer is None else {"theta": state.theta, "outer": state.outer}
    described = json.dumps(describe_state(state), sort_keys=True)
    return serialize(arrays, {"format": FORMAT, "state": described})


def state_file(state: SharedState) -> bytes:
    """`state_parts` in one piece."""
    return b"".join(state_parts(state))


def read_state_file(path: Path, d: int, disk: Disk = REAL_DISK) -> SharedState:
    """Inverse of `state_file`, from a file that a peer gave: hostile. Raises ValueError with what is wrong."""
    arrays, metadata = read_arrays(path, disk)
    if metadata.get("format") != FORMAT or not {"theta"} <= arrays.keys() <= {"theta", "outer"}:
        raise ValueError("not a shoal state file")
    for name, array in arrays.items():
        if array.shape != (d,) or array.dtype != np.float32 or not np.isfinite(array).all():
            raise ValueError(f"{name} has shape {array.shape} and dtype {array.dtype}, expected finite fp32 [{d}]")
    try:
        described = json.loads(metadata["state"])
        if len(described["vector"]) > limits.MEMBERS_MAX or len(described["electorate"]) > limits.ROSTER_MAX:
            raise ValueError("more peers than a run can have")
        return rebuild_state(described, arrays["theta"], arrays.get("outer"))
    except _NONSENSE as error:
        raise ValueError(f"damaged metadata: {error!r}") from None


def read_arrays(path: Path, disk: Disk) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays and metadata. Read by safetensors' own reader: by mapping the file where there is one."""
    try:
        if disk is not REAL_DISK:
            return _parse(path.name, disk.read(path))
        with open(path, "rb") as file:
            header = int.from_bytes(file.read(8), "little")
        _check_header(path.name, header)
        with safe_open(path, framework="numpy") as opened:
            metadata = opened.metadata() or {}
            return {name: opened.get_tensor(name) for name in opened.keys()}, metadata
    except (SafetensorError, OSError, *_NONSENSE) as error:  # nonsense: a type that numpy does not have, such as BF16
        raise ValueError(f"{path.name}: {error}") from None


def _parse(name: str, data: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    header = int.from_bytes(data[:8], "little")
    _check_header(name, header)
    arrays = load(data)
    metadata = json.loads(data[8 : 8 + header]).get("__metadata__") or {}
    return arrays, metadata


def _check_header(name: str, size: int) -> None:
    if size > METADATA_BYTES_MAX:
        raise ValueError(f"{name}: header of {size} bytes")


def _digest(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    """sha-256 over names, types and bytes, and all metadata but itself: the state hash covers the shared state alone."""
    digest = hashlib.sha256()
    for name, text in sorted(metadata.items()):
        if name != "digest":
            digest.update(f"{name} {len(text)} {text}\n".encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


class Checkpoints:
    """The checkpoints in one folder. `save` blocks; run it in a worker thread."""

    def __init__(self, folder: Path, keep: int = 2, disk: Disk = REAL_DISK) -> None:
        self._folder, self._disk = folder, disk
        self._keep = max(1, keep)

    def paths(self) -> list[Path]:
        """Newest first."""
        names = [n for n in self._disk.names(self._folder) if n.startswith("round-") and n.endswith(SUFFIX)]
        return [self._folder / name for name in reversed(names)]

    def oldest_round(self) -> int:
        """Of the checkpoints kept; 0 when there are none."""
        rounds = [path.name[len("round-") : -len(SUFFIX)] for path in self.paths()]
        return min((int(r) for r in rounds if r.isdigit()), default=0)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write one, then prune, durably. Raises OSError: every one that is left is still valid."""
        arrays = {"state/theta": checkpoint.state.theta}
        if checkpoint.state.outer is not None:
            arrays["state/outer"] = checkpoint.state.outer
        as_bytes: list[str] = []
        for prefix, group in (("book", checkpoint.book), ("learner", checkpoint.learner)):
            for name, value in group.items():
                if isinstance(value, np.ndarray):
                    arrays[f"{prefix}/{name}"] = value
                else:
                    as_bytes.append(f"{prefix}/{name}")
                    arrays[f"{prefix}/{name}"] = np.frombuffer(bytes(value), np.uint8)
        metadata = {
            "format": FORMAT,
            "state": json.dumps(describe_state(checkpoint.state)),
            "commit": checkpoint.commit.hex(),
            "bytes": json.dumps(sorted(as_bytes)),
            "extra": json.dumps(dict(checkpoint.extra)),
        }
        metadata["digest"] = _digest(arrays, metadata)
        path = self._folder / f"round-{checkpoint.state.round:010d}{SUFFIX}"
        write_atomic(self._disk, path, serialize(arrays, metadata))
        # Files of later rounds belong to a branch that was given up for this state: a restart must not prefer them.
        paths = self.paths()
        at = paths.index(path)
        dropped = (*paths[:at], *paths[at + self._keep :])
        for old in dropped:
            self._disk.unlink(old)
        if dropped:  # or a crash could bring back a branch given up, or one that the journal no longer reaches down to
            self._disk.sync_folder(self._folder)
        return path

    def load(self, path: Path) -> Checkpoint:
        """Read and verify one. Raises ValueError."""
        arrays, metadata = read_arrays(path, self._disk)
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path.name} has format {metadata.get('format')}, expected {FORMAT}")
        try:
            if metadata["digest"] != _digest(arrays, metadata):
                raise ValueError(f"{path.name}: its contents are not what was written")
            as_bytes = set(json.loads(metadata["bytes"]))
            groups: dict[str, dict[str, np.ndarray | bytes]] = {"state": {}, "book": {}, "learner": {}}
            for name, array in arrays.items():
                prefix, _, rest = name.partition("/")
                groups[prefix][rest] = array.tobytes() if name in as_bytes else array
            state = rebuild_state(json.loads(metadata["state"]), arrays["state/theta"], arrays.get("state/outer"))
            commit, extra = bytes.fromhex(metadata["commit"]), json.loads(metadata["extra"])
        except _NONSENSE as error:
            raise ValueError(f"{path.name}: damaged metadata: {error!r}") from None
        return Checkpoint(state, commit, groups["book"], groups["learner"], extra)

    def newest(self, warn: Any = None) -> Checkpoint | None:
        """The newest valid one, or None when there has never been one.

        Damaged ones are renamed to *.damaged with a warning through `warn(text)`.

        Raises:
            ShoalError: there are checkpoints and none is valid.
        """
        problems = []
        for path in self.paths():
            try:
                return self.load(path)
            except ValueError as error:
                if not self._disk.exists(path):
                    continue  # pruned meanwhile by the node that runs here; a newer one is on the list or about to be
                problems.append(str(error))
                if warn is not None:
                    warn(f"checkpoint set aside: {error}")
                with contextlib.suppress(OSError):  # read-only: it stays, and the one before is used all the same
                    self._disk.replace(path, path.with_name(path.name + ".damaged"))
        if problems:
            raise ShoalError(
                "No checkpoint can be read",
                values="; ".join(problems),
                todo="Restore the data directory from a backup, or join the run anew with another --data-dir.",
                code=ExitCode.DISK,
            )
        return None
