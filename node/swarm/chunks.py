"""The bookkeeping of one download: what was offered, which source fetches which chunk, and what is on disk already.

Covers `Offer`, `PartialFile` (resumable) and `ChunkList` (pure). Does not cover: talking to sources (state_sync.py).
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...protocol import limits
from ...protocol.version import sha256
from ...protocol.wire_pb2 import Commit as WireCommit
from ..store.disk import REAL_DISK, Disk, write_all

CHUNKS_PER_REQUEST = 8
# For STATE_CHUNK_BYTES from a source nothing is known of: 17 kB/s is the slowest link that still takes part.
CHUNK_SECONDS_MAX = 60.0
# From then on a chunk may take this multiple of the slower of (this source, the median source), and never less than the floor.
CHUNK_MULTIPLE_MAX = 8.0
CHUNK_SECONDS_FLOOR = 2.0
# A chunk that its source has had for so long may be fetched by a second, idle one.
STEAL_SECONDS = 1.0


@dataclass(frozen=True)
class Offer:
    """A checked offer.

    Attributes:
        key: hash over everything in which sources must agree.
        commit: the record that ends the lineage, its signatures checked; None at round 0 or where the source has none.
    """

    key: bytes
    round: int
    lineage: bytes
    state_hash: bytes
    size: int
    chunk_size: int
    chunk_hashes: tuple[bytes, ...]
    commit: WireCommit | None

    def length(self, index: int) -> int:
        """Bytes of chunk `index`."""
        return min(self.chunk_size, self.size - index * self.chunk_size)


class PartialFile:
    """The partial file of one offer and its bitmap. The bitmap is a hint: every chunk is hashed again when resuming."""

    def __init__(self, folder: Path, offer: Offer, disk: Disk = REAL_DISK) -> None:
        self.offer, self._disk = offer, disk
        self.path = folder / f"download-{offer.key.hex()[:16]}.partial"
        self._index = self.path.with_name(self.path.name + ".json")
        self.done: set[int] = set()
        self._descriptor = -1

    @staticmethod
    def interrupted(folder: Path, disk: Disk = REAL_DISK) -> tuple[bytes, bytes]:
        """(key, lineage) of a download that did not end; empty when there is none."""
        for name in disk.names(folder):
            if not (name.startswith("download-") and name.endswith(".partial.json")):
                continue
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                saved = json.loads(disk.read(folder / name))
                return bytes.fromhex(saved["key"]), bytes.fromhex(saved["lineage"])
        return b"", b""

    def open(self) -> None:
        """Find what is there, drop other downloads' leftovers. Blocks. Raises OSError."""
        for name in self._disk.names(self.path.parent):
            if name.startswith("download-") and ".partial" in name and not name.startswith(self.path.name):
                self._disk.unlink(self.path.with_name(name))
        self._descriptor = self._disk.open(self.path)
        self._disk.truncate(self._descriptor, self.offer.size)
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, IndexError):
            for index in json.loads(self._disk.read(self._index))["done"]:
                data = self._disk.pread(self._descriptor, self.offer.chunk_size, index * self.offer.chunk_size)
                if index >= 0 and sha256(data) == self.offer.chunk_hashes[index]:
                    self.done.add(index)
        self.remember()

    def write(self, index: int, data: bytes) -> None:
        """Raises OSError."""
        write_all(self._disk, self._descriptor, data, index * self.offer.chunk_size)
        self.done.add(index)

    def remember(self) -> None:
        """Write the bitmap. Raises OSError."""
        saved = {"key": self.offer.key.hex(), "lineage": self.offer.lineage.hex(), "done": sorted(self.done)}
        descriptor = self._disk.open(self._index, fresh=True)
        try:
            write_all(self._disk, descriptor, json.dumps(saved).encode(), 0)
        finally:
            self._disk.close(descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            self._disk.close(self._descriptor)
            self._descriptor = -1

    def forget(self) -> None:
        for name in (self.path, self._index):
            with contextlib.suppress(OSError):
                self._disk.unlink(name)


class ChunkList:
    """Which source fetches which chunk. Pure: times are passed in."""

    def __init__(self, missing: Sequence[int], sources: int) -> None:
        self._todo = deque(missing)
        self._claims: dict[int, dict[str, float]] = {}  # chunk → source → since when
        self._seconds_per_byte: dict[str, float] = {}
        self.sources = sources

    def take(self, peer: str, now: float) -> list[int]:
        """The next chunks for an idle source; when all are taken, one that another has had for long; or none yet."""
        count = max(1, min(CHUNKS_PER_REQUEST, len(self._todo) // (2 * max(1, self.sources))))
        taken = [self._todo.popleft() for _ in range(min(count, len(self._todo)))]
        if not taken:
            waiting = [
                (min(claims.values()), index)
                for index, claims in self._claims.items()
                if peer not in claims and len(claims) == 1 and now - min(claims.values()) >= STEAL_SECONDS
            ]
            taken = [min(waiting)[1]] if waiting else []
        for index in taken:
            self._claims.setdefault(index, {})[peer] = now
        return taken

    def finished(self, index: int) -> None:
        self._claims.pop(index, None)

    def give_back(self, peer: str) -> None:
        """What this source claimed and nobody else is fetching is free again."""
        for index, claims in list(self._claims.items()):
            if claims.pop(peer, None) is not None and not claims:
                del self._claims[index]
                self._todo.appendleft(index)

    def measured(self, peer: str, seconds: float, size: int) -> None:
        before = self._seconds_per_byte.get(peer, seconds / size)
        self._seconds_per_byte[peer] = (before + seconds / size) / 2

    def deadline_s(self, peer: str, size: int) -> float:
        """How long a chunk of `size` bytes may take (seconds)."""
        longest = CHUNK_SECONDS_MAX * max(1.0, size / limits.STATE_CHUNK_BYTES)
        if not self._seconds_per_byte:
            return longest
        typical = statistics.median(self._seconds_per_byte.values())
        slower = max(typical, self._seconds_per_byte.get(peer, 0.0))
        return min(longest, max(CHUNK_SECONDS_FLOOR, CHUNK_MULTIPLE_MAX * slower * size))
