"""Which data shards are this peer's: weighted rendezvous hashing over the live peers. Pure.

Every peer computes it from its own view of who is alive. The result is advice for drawing prompts, never an input of the
merge, so views may differ for a while and a logarithm may be used.

Score of (shard, peer) = -weight / ln(u), u in (0, 1) from their hash; the highest score has the shard (C. Schindelhauer
and G. Schomaker, "Weighted distributed hash tables", 2005). When a peer comes or goes only its own shards move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...protocol.version import sha256

SHARDS = 256  # fine enough that weights within a factor of ten are met to a few per cent


def owner(shard: int, weights: Mapping[str, float]) -> str:
    """The peer that has `shard`. Raises ValueError without peers."""

    def score(peer: str) -> tuple[float, str]:
        number = int.from_bytes(sha256(b"shoal/v1/shard\0", shard.to_bytes(4, "big"), peer.encode())[:8], "big")
        unit = (number + 0.5) / 2**64
        return -max(weights[peer], 1e-9) / math.log(unit), peer

    return max(weights, key=score)


def assign(me: str, weights: Mapping[str, float], count: int = SHARDS) -> tuple[int, ...]:
    """The shards of `count` that are `me`'s. `weights`: measured samples per second of every live peer, `me` among them.

    A peer whose speed is not known yet (0) counts as the mean of the others.
    """
    known = [w for w in weights.values() if w > 0]
    default = sum(known) / len(known) if known else 1.0
    filled = {peer: weight if weight > 0 else default for peer, weight in weights.items()}
    return tuple(shard for shard in range(count) if owner(shard, filled) == me)
