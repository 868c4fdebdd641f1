"""Verified updates by hash: own ones, received ones, and those under way.

Nothing is taken before its header was checked: form, signature, and a payload size within what the manifest's compression
can produce for this layout. The payload is then counted and hashed as it comes, so a lie is caught at the first byte too
many. Held updates serve the ring and later repairs; the oldest rounds go first when the store is full.

Two different headers under one dot are the proof of a faulty origin; `equivocation` hands it over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from ...aggregation.compress import Compression, max_payload_bytes
from ...protocol import limits
from ...protocol.ballot_messages import Encoding, Header
from ...protocol.ballot_wire import decode_header
from ...protocol.errors import PeerFault
from ...protocol.version import Dot
from ...protocol.wire_pb2 import Signed


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
    """Updates in memory, bounded in bytes."""

    def __init__(
        self,
        *,
        run_id: bytes,
        d: int,
        compression: Compression,
        bytes_max: int,
        equivocation: Callable[[Header, Header], None] = lambda first, second: None,
    ) -> None:
        """
        Args:
            bytes_max: payload bytes kept; at least one round's worth is kept whatever this says.
            equivocation: called with the two headers under one dot.
        """
        self._run_id, self._d, self._compression = run_id, d, compression
        self._bytes_max = min(bytes_max, limits.UPDATES_HELD_BYTES_MAX)
        self._equivocation = equivocation
        self._held: dict[bytes, tuple[Header, bytes]] = {}
        self._by_dot: dict[Dot, Header] = {}
        self._bytes = 0

    def has(self, update_hash: bytes) -> bool:
        return update_hash in self._held

    def load(self, update_hash: bytes) -> tuple[Header, bytes]:
        """Header and payload. Raises KeyError."""
        return self._held[update_hash]

    def payload_bytes_max(self, encoding: Encoding) -> int:
        """The largest payload that an honest peer of this run can have."""
        return 4 * self._d if encoding is Encoding.DENSE else max_payload_bytes(self._d, self._compression)

    def begin(self, signed: Signed) -> Receiving:
        """Start to receive the update of `signed`. Raises PeerFault: bad form, signature or size."""
        header = decode_header(signed, self._run_id)
        limit = self.payload_bytes_max(header.encoding)
        if header.payload_size > limit:
            raise PeerFault("bad_payload", f"announces {header.payload_size} bytes, at most {limit} are possible")
        return Receiving(header, self)

    def put(self, header: Header, payload: bytes) -> None:
        """Keep an update whose payload is known to be the header's (empty for a dense one)."""
        if header.update_hash in self._held:
            return
        other = self._by_dot.setdefault(header.dot, header)
        if other.update_hash != header.update_hash:
            self._equivocation(other, header)
        self._held[header.update_hash] = (header, payload)
        self._bytes += len(payload)
        self._evict(header.round)

    def drop_before(self, round_: int) -> None:
        """Forget updates of rounds before `round_`."""
        for update_hash, (header, _) in list(self._held.items()):
            if header.round < round_:
                self._drop(update_hash)

    def _evict(self, newest: int) -> None:
        while self._bytes > self._bytes_max:
            update_hash, (header, _) = min(self._held.items(), key=lambda item: item[1][0].round)
            if header.round >= newest:
                return
            self._drop(update_hash)

    def _drop(self, update_hash: bytes) -> None:
        header, payload = self._held.pop(update_hash)
        self._bytes -= len(payload)
        if self._by_dot.get(header.dot) is header:
            del self._by_dot[header.dot]
