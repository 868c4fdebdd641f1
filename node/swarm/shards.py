"""Which data shards are this peer's: weighted rendezvous hashing over the live peers. Pure.

Every peer computes it from its own view of who is alive. The result is advice for drawing prompts, never an input of the
merge, so views may differ for a while (two peers then draw from one shard) and a logarithm may be used.

Score of (shard, peer) = -weight / ln(u), u in (0, 1) from their hash; the highest score has the shard (C. Schindelhauer
and G. Schomaker, "Weighted distributed hash tables", 2005). When a peer comes or goes only its own shards move.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from ...protocol.version import sha256

SHARDS = 256  # fine enough that weights within a factor of ten are met to a few per cent

# A speed is a claim: one above this multiple of the median would leave the others without data.
WEIGHT_MEDIAN_MULTIPLE_MAX = 16.0


@lru_cache(maxsize=1 << 16)
def _distance(shard: int, peer: str) -> float:
    """-ln(u): the part of the score that is the same whatever the weights."""
    number = int.from_bytes(sha256(b"shoal/v1/shard\0", shard.to_bytes(4, "big"), peer.encode())[:8], "big")
    # 52 bits and a half: never 0, and never rounded to 1, whose logarithm is 0.
    return -math.log(((number >> 12) + 0.5) / 2**52)


def score(shard: int, peer: str, weight: float) -> float:
    """Positive and finite for a positive, finite weight."""
    return max(weight, 1e-9) / _distance(shard, peer)


def owner(shard: int, weights: Mapping[str, float]) -> str:
    """The peer that has `shard`. Raises ValueError without peers."""
    return max(weights, key=lambda peer: (score(shard, peer, weights[peer]), peer))


@lru_cache(maxsize=256)
def _owners(weights: tuple[tuple[str, float], ...], count: int) -> tuple[str, ...]:
    """`owner` of every shard. Views of the swarm change rarely, rounds begin often."""
    best_first = sorted(weights, reverse=True)  # by peer: of equal scores argmax takes the first
    distances = np.stack([_distances(peer, count) for peer, _ in best_first])
    scores = np.array([[max(weight, 1e-9)] for _, weight in best_first]) / distances
    return tuple(best_first[row][0] for row in scores.argmax(axis=0).tolist())


@lru_cache(maxsize=2048)
def _distances(peer: str, count: int) -> np.ndarray:
    """float64 [count], by shard."""
    return np.array([_distance(shard, peer) for shard in range(count)])


def assign(me: str, weights: Mapping[str, float], count: int = SHARDS) -> tuple[int, ...]:
    """The shards of `count` that are `me`'s. `weights`: measured samples per second of every live peer, `me` among them.

    A peer whose speed is not known yet (0, or no number) counts as the mean of the others. A peer that is so slow that it
    wins none has the one it is best at, beside its owner: nobody is left without data.
    """
    known = [w for w in weights.values() if 0 < w < math.inf]
    cap = WEIGHT_MEDIAN_MULTIPLE_MAX * statistics.median(known) if known else 1.0
    default = sum(min(w, cap) for w in known) / len(known) if known else 1.0
    filled = {peer: min(weight, cap) if 0 < weight < math.inf else default for peer, weight in weights.items()}
    owners = _owners(tuple(sorted(filled.items())), count)
    mine = tuple(shard for shard in range(count) if owners[shard] == me)
    return mine or (max(range(count), key=lambda shard: score(shard, me, filled[me])),)
