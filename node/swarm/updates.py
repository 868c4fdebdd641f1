"""Verified updates by hash: own ones, received ones, and those under way.

Nothing is taken before its header was checked: form, signature, and a payload size within what the manifest's compression
can produce for this layout. The payload is then counted and hashed as it comes, so a lie is caught at the first byte too
many. Held updates serve the ring and later repairs; beyond `memory_bytes_max` the oldest payloads move to files, beyond
`bytes_max` the oldest rounds go altogether.

Two different headers under one dot are the proof of a faulty origin; `equivocation` hands it over. Headers are remembered
longer than payloads, for this.

Does not cover: which updates are wanted (ring_exchange.py names them by hash before a byte is read), or the journal that
makes own updates durable: the files here are a cache, not fsynced, and emptied at the start.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...aggregation.compress import Compression, max_payload_bytes
from ...protocol import limits
from ...protocol.ballot_messages import Encoding, Header
from ...protocol.ballot_wire import decode_header
from ...protocol.errors import PeerFault
from ...protocol.version import Dot, sha256
from ...protocol.wire_pb2 import Signed
from ..store.disk import REAL_DISK, Disk, write_all

SUFFIX = ".update"


@dataclass
class Receiving:
    """One payload under way; `finish` puts it into the store."""

    header: Header
    store: UpdateStore

    def __post_init__(self) -> None:
        self._digest = hashlib.sha256()
        self._parts: list[bytes] = []
        self._got = 0

    @property
    def size(self) -> int:
        """Bytes that follow: what the header announces; none for a dense update, whose sum alone travels."""
        return 0 if self.header.encoding is Encoding.DENSE else self.header.payload_size

    def feed(self, piece: bytes) -> None:
        """Raises PeerFault("bad_payload") at the first byte beyond the announced size."""
        self._got += len(piece)
        if self._got > self.size or not piece:
            raise PeerFault("bad_payload", f"{self._got} bytes, announced {self.size}")
        self._digest.update(piece)
        self._parts.append(piece)

    def finish(self) -> Header:
        """Raises PeerFault("bad_payload") when size or hash differ from the header's."""
        dense = self.header.encoding is Encoding.DENSE
        if self._got != self.size or not (dense or self._digest.digest() == self.header.payload_hash):
            raise PeerFault("bad_payload", f"{self._got} of {self.size} bytes, or another hash than the header's")
        self.store.put(self.header, b"".join(self._parts))
        return self.header


class UpdateStore:
    """Updates in memory, then in files, bounded in bytes. Called from the event loop and from the worker thread."""

    def __init__(
        self,
        *,
        run_id: bytes,
        d: int,
        compression: Compression,
        bytes_max: int,
        equivocation: Callable[[Header, Header], None] = lambda first, second: None,
        folder: Path | None = None,
        memory_bytes_max: int = limits.UPDATES_MEMORY_BYTES_MAX,
        disk: Disk = REAL_DISK,
    ) -> None:
        """
        Args:
            bytes_max: payload bytes kept; at least one round's worth is kept whatever this says.
            equivocation: called with the two headers under one dot, once for each second header.
            folder: where payloads beyond `memory_bytes_max` go; its leftovers are removed. None: everything stays in memory.
        """
        self._run_id, self._d, self._compression = run_id, d, compression
        self._bytes_max = min(bytes_max, limits.UPDATES_HELD_BYTES_MAX)
        self._memory_bytes_max = memory_bytes_max
        self._equivocation = equivocation
        self._folder, self._disk = folder, disk
        self._lock = threading.RLock()
        self._held: dict[bytes, tuple[Header, bytes | Path]] = {}
        self._headers: dict[Dot, Header] = {}  # the first header seen under each dot, oldest first
        self._proved: dict[bytes, None] = {}  # second headers already handed over, oldest first
        self._bytes = self._memory_bytes = 0
        if folder is not None:
            for name in disk.names(folder):
                if name.endswith(SUFFIX):
                    disk.unlink(folder / name)

    # ------------------------------------------------------------------------------------------------ reading

    def has(self, update_hash: bytes) -> bool:
        return update_hash in self._held

    def load(self, update_hash: bytes) -> tuple[Header, bytes]:
        """Header and payload. Raises KeyError; also for one whose file is gone or damaged, which is then not held."""
        with self._lock:
            header, kept = self._held[update_hash]
            if isinstance(kept, bytes):
                return header, kept
            try:
                payload = self._disk.read(kept)
            except OSError:
                payload = b""
            if sha256(payload) != header.payload_hash:
                self._drop(update_hash)
                raise KeyError(update_hash)
            return header, payload

    def payload_bytes_max(self, encoding: Encoding) -> int:
        """The largest payload that an honest peer of this run can have."""
        return 4 * self._d if encoding is Encoding.DENSE else max_payload_bytes(self._d, self._compression)

    # ------------------------------------------------------------------------------------------------ receiving

    def begin(self, signed: Signed) -> Receiving:
        """Start to receive the update of `signed`. Raises PeerFault: bad form, signature or size."""
        header = decode_header(signed, self._run_id)
        limit = self.payload_bytes_max(header.encoding)
        if header.payload_size > limit:
            raise PeerFault("bad_payload", f"announces {header.payload_size} bytes, at most {limit} are possible")
        self.witness(header)
        return Receiving(header, self)

    def suspect(self, signed: Signed) -> None:
        """An update that nobody asked for: where its dot is known by another header, the two are a proof. Keeps nothing else.

        Raises PeerFault: bad form or signature.
        """
        header = decode_header(signed, self._run_id)
        if header.dot in self._headers:
            self.witness(header)

    def witness(self, header: Header) -> None:
        """Remember a header whose signature was checked. A second one under its dot is a proof, whatever its payload."""
        with self._lock:
            first = self._headers.setdefault(header.dot, header)
            if len(self._headers) > limits.HEADERS_KEPT_MAX:
                del self._headers[next(iter(self._headers))]
            proof = first.update_hash != header.update_hash and header.update_hash not in self._proved
            if proof:
                self._proved[header.update_hash] = None
                if len(self._proved) > limits.HEADERS_KEPT_MAX:
                    del self._proved[next(iter(self._proved))]
        if proof:
            self._equivocation(first, header)

    def put(self, header: Header, payload: bytes) -> None:
        """Keep an update whose signature was checked and whose payload is the header's (empty for a dense one)."""
        self.witness(header)
        with self._lock:
            if header.update_hash in self._held:
                return
            self._held[header.update_hash] = (header, payload)
            self._bytes += len(payload)
            self._memory_bytes += len(payload)
            self._evict(header.round)
            if self._memory_bytes > self._memory_bytes_max and self._folder is not None:
                self._spill(self._folder)

    # ------------------------------------------------------------------------------------------------ bounds

    def drop_before(self, round_: int) -> None:
        """Forget updates of rounds before `round_`."""
        with self._lock:
            for update_hash, (header, _) in list(self._held.items()):
                if header.round < round_:
                    self._drop(update_hash)

    def _evict(self, newest: int) -> None:
        while self._bytes > self._bytes_max:
            update_hash, (header, _) = min(self._held.items(), key=lambda item: item[1][0].round)
            if header.round >= newest:
                return
            self._drop(update_hash)

    def _spill(self, folder: Path) -> None:
        """Move payloads to files, oldest round first, until memory is within its bound. A full disk leaves them there."""
        in_memory = [(h.round, key, h, p) for key, (h, p) in self._held.items() if isinstance(p, bytes) and p]
        for _, update_hash, header, payload in sorted(in_memory, key=lambda item: item[:2]):
            if self._memory_bytes <= self._memory_bytes_max:
                return
            path = folder / f"{update_hash.hex()}{SUFFIX}"
            try:
                descriptor = self._disk.open(path, fresh=True)
                try:
                    write_all(self._disk, descriptor, payload, 0)
                finally:
                    self._disk.close(descriptor)
            except OSError:
                with contextlib.suppress(OSError):
                    self._disk.unlink(path)
                return
            self._held[update_hash] = (header, path)
            self._memory_bytes -= len(payload)

    def _drop(self, update_hash: bytes) -> None:
        header, kept = self._held.pop(update_hash)
        if isinstance(kept, bytes):
            self._bytes -= len(kept)
            self._memory_bytes -= len(kept)
        else:
            self._bytes -= header.payload_size
            with contextlib.suppress(OSError):
                self._disk.unlink(kept)
