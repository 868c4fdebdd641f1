"""Origins of gossiped updates for tests: chains of headers with real payloads, and forks of them. Nothing is signed."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from shoal.aggregation.compress import Compression, encode
from shoal.aggregation.contributions import Contributions, GossipRules
from shoal.aggregation.forks import head_of
from shoal.aggregation.gossip import UpdateLog, Verdict
from shoal.protocol.ballot_messages import Encoding, Header, parse_header
from shoal.protocol.version import NO_HEAD, VersionVector, sha256
from shoal.protocol.wire_pb2 import Signed, UpdateHeader

D = 24
RULES = GossipRules(Compression(0.25, 8, 8), step_max=0.0)
THETA0 = np.linspace(-1.0, 1.0, D, dtype=np.float32)
Update = tuple[Header, bytes]


@lru_cache(4096)
def update(
    peer: str = "ada",
    seq: int = 1,
    previous: bytes = NO_HEAD,
    *,
    incarnation: int = 0,
    seed: int = 0,
    scale: float = 0.25,
    weight: int = 3,
    size: float = 0.05,
    payload: bytes | None = None,
    rules: GossipRules = RULES,
    encoding: Encoding = Encoding.SPARSE,
    signature: bytes = b"s" * 64,
) -> Update:
    """One update. The same arguments give the same bytes."""
    if payload is None:
        rng = np.random.default_rng([seed, seq, incarnation, len(peer), *peer.encode()])
        payload = encode((size * rng.standard_normal(D)).astype(np.float32), rules.compression)
    wire = UpdateHeader(
        previous_head=previous,
        base_lineage=NO_HEAD,
        weight=weight,
        encoding=encoding.value,  # pyright: ignore[reportArgumentType]
        payload_hash=sha256(payload),
        payload_size=len(payload),
        scale=scale,
    )
    wire.dot.peer, wire.dot.incarnation, wire.dot.seq = peer, incarnation, seq
    return parse_header(Signed(body=wire.SerializeToString(), signature=signature)), payload


def chain(
    peer: str,
    length: int,
    *,
    incarnation: int = 0,
    seed: int = 0,
    after: list[Update] | None = None,
    scale: float = 0.25,
) -> list[Update]:
    """`after` and `length` more updates: another seed after the same beginning is a fork."""
    updates = list(after or [])
    for _ in range(length):
        previous = head_of(updates[-1][0]) if updates else NO_HEAD
        updates.append(update(peer, len(updates) + 1, previous, incarnation=incarnation, seed=seed, scale=scale))
    return updates


_SHARED = Contributions(D, RULES)


def new_log(rules: GossipRules = RULES) -> UpdateLog:
    shared = _SHARED.serve(D, rules)
    return UpdateLog(THETA0, rules, _SHARED if shared else None)


def log_of(*chains: list[Update], rules: GossipRules = RULES) -> UpdateLog:
    log = new_log(rules)
    for updates in chains:
        for header, payload in updates:
            log.add(header, payload)
    return log


def offer(log: UpdateLog, updates: list[Update]) -> None:
    """Hand over what arrives until nothing more is new, whatever its order."""
    progress = True
    while progress:
        progress = False
        for header, payload in updates:
            if log.judge(header)[0] is Verdict.NEW:
                log.add(header, payload)
                progress = True


def pull(log: UpdateLog, other: UpdateLog, bytes_max: int = 10**9) -> int:
    """Take what `other` says that `log` lacks; gives the number of updates taken."""
    taken = 0
    for header in other.lacks(log.vector, bytes_max):
        if log.judge(header)[0] is Verdict.NEW:
            log.add(header, other.payload(header.dot))
            taken += 1
    return taken


def state(log: UpdateLog) -> tuple[object, ...]:
    """Everything that two equal logs must share."""
    return (log.theta.tobytes(), log.state_hash, log.vector.hash(), log.digest, log.total_weight)


def up_to(log: UpdateLog, key: tuple[str, int], seq: int) -> VersionVector:
    """A frontier of one entry."""
    head = log.head_at(key, seq)
    assert head is not None
    return VersionVector({key: (seq, head)})
