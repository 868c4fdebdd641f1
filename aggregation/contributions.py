"""What one gossiped update contributes: decoded, filtered by the run's rules, in fixed point. Pure but for a cache.

Every filter is a function of the update and the manifest alone, so that all peers refuse the same ones. What is refused is
void: it counts in the vector and contributes zero. An update whose payload does not decode has no contribution at all and
ends its origin's chain, for everybody alike.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np

from ..protocol.ballot_messages import Encoding, Header
from ..protocol.errors import PeerFault
from ..protocol.rings import decode_combined
from ..protocol.version import Dot, sha256
from .compress import Compression, decode
from .forks import Key, head_of
from .hybrid import read_sum
from .merge import UNIT, contribution
from .robust import norm

CACHE_BYTES_MAX = 64 * 1024**2  # decoded updates kept; compaction and retraction decode again what fell out


@dataclass(frozen=True)
class GossipRules:
    """What the manifest says about gossiped updates.

    Attributes:
        compression: form of every payload; the header's own word does not choose it.
        step_max: an update with `scale * norm` above it is void; 0 means no limit.
        log_bytes_max: headers and payloads kept above the frontier (bytes); 0 means no limit. This one may differ
            between peers.
        combined: hybrid mode: every update is what a ring's round came to; `step_max` holds for each of its inner ones.
    """

    compression: Compression
    step_max: float = 0.0
    log_bytes_max: int = 0
    combined: bool = False


@dataclass(frozen=True, eq=False)
class Record:
    """One verified update as a log keeps it. Immutable; logs in one process share it."""

    header: Header
    payload: bytes
    key: Key
    top: tuple[int, bytes]  # (seq, head): the vector's entry once this is included
    void: bool
    reason: str
    step: float  # scale * norm; 0 when void
    inner: tuple[Dot, ...] = ()  # hybrid mode: dots in the sum; none when void

    @property
    def size(self) -> int:
        """Bytes that a log is charged for it."""
        return len(self.header.signed) + len(self.payload)


class Contributions:
    """Reads updates for one run: [d] coordinates under one `GossipRules`. Not thread-safe.

    Logs of the same run may share one (a simulator's peers do): the same signed bytes are decoded once.
    """

    def __init__(self, d: int, rules: GossipRules, cache_bytes_max: int = CACHE_BYTES_MAX) -> None:
        self.d = d
        self.rules = rules
        self._records: WeakValueDictionary[bytes, Record] = WeakValueDictionary()
        self._fixed: OrderedDict[bytes, tuple[np.ndarray, np.ndarray]] = OrderedDict()  # by update hash
        self._fixed_bytes = 0
        self._cache_bytes_max = cache_bytes_max

    def serve(self, d: int, rules: GossipRules) -> bool:
        """Whether they are right for a log of d coordinates under these rules."""
        ours = (self.d, self.rules.compression, self.rules.step_max, self.rules.combined)
        return ours == (d, rules.compression, rules.step_max, rules.combined)

    def read(self, header: Header, payload: bytes) -> Record:
        """Check and decode one update.

        Raises:
            PeerFault("bad_payload", "bad_ring"): other bytes than the header names, or not decodable under the rules.
            PeerFault("bad_encoding"): the header names an encoding that gossip does not use.
        """
        known = self._records.get(header.update_hash)
        if known is not None and (payload is known.payload or payload == known.payload):
            return known
        wanted = Encoding.COMBINED if self.rules.combined else Encoding.SPARSE
        if header.encoding is not wanted:
            raise PeerFault("bad_encoding", f"{header.dot} is {header.encoding.name}, this run gossips {wanted.name}")
        if len(payload) != header.payload_size or sha256(payload) != header.payload_hash:
            raise PeerFault("bad_payload", f"{len(payload)} bytes are not the payload that {header.dot} names")
        indices, fixed, reason, step = self._decode(header, payload)
        dot = header.dot
        inner = decode_combined(payload).dots if self.rules.combined and fixed is not None else ()
        record = Record(
            header=header,
            payload=payload,
            key=(dot.peer, dot.incarnation),
            top=(dot.seq, head_of(header)),
            void=fixed is None,
            reason=reason,
            step=step,
            inner=inner,
        )
        self._records[header.update_hash] = record
        if fixed is not None:
            self._keep(header.update_hash, (indices, fixed))
        return record

    def of(self, record: Record) -> tuple[np.ndarray, np.ndarray] | None:
        """Indices int64 [k] and contributions int64 [k] in units of 2^-40; None for a void update."""
        if record.void:
            return None
        name = record.header.update_hash
        held = self._fixed.get(name)
        if held is not None:
            self._fixed.move_to_end(name)
            return held
        indices, fixed, _, _ = self._decode(record.header, record.payload)
        assert fixed is not None  # the record says that it is not void, and decoding is a pure function
        self._keep(name, (indices, fixed))
        return indices, fixed

    def _decode(self, header: Header, payload: bytes) -> tuple[np.ndarray, np.ndarray | None, str, float]:
        if self.rules.combined:
            return self._decode_combined(payload)
        update = decode(payload, self.d, self.rules.compression)
        if not header.scale > 0:
            return update.indices, None, f"void: scale {header.scale} is not above zero", 0.0
        fixed = contribution(update.values, header.scale)
        if fixed is None:
            return update.indices, None, "void: a contribution is not finite or reaches 1", 0.0
        step = header.scale * norm(update.values)
        if 0 < self.rules.step_max < step:
            return update.indices, None, f"void: a step of {step:.6g}, the limit is {self.rules.step_max:.6g}", 0.0
        return update.indices, fixed, f"a step of {step:.6g}", step

    def _decode_combined(self, payload: bytes) -> tuple[np.ndarray, np.ndarray | None, str, float]:
        combined = decode_combined(payload)
        indices, fixed = read_sum(combined.sum, self.d)
        inner = len(combined.dots)
        if fixed.size and not inner:
            raise PeerFault("bad_payload", "a sum of no updates")
        limit = self.rules.step_max * inner
        step = norm((fixed / UNIT).astype(np.float32))
        if 0 < limit < step:
            return indices, None, f"void: a step of {step:.6g}, the limit for {inner} updates is {limit:.6g}", 0.0
        return indices, fixed, f"a step of {step:.6g} by {inner} updates", step

    def _keep(self, name: bytes, arrays: tuple[np.ndarray, np.ndarray]) -> None:
        self._fixed[name] = arrays
        self._fixed_bytes += sum(a.nbytes for a in arrays)
        while self._fixed_bytes > self._cache_bytes_max and len(self._fixed) > 1:
            _, old = self._fixed.popitem(last=False)
            self._fixed_bytes -= sum(a.nbytes for a in old)
