"""Peers that lie. Each kind bends one thing of a real node and leaves the rest as it is.

scale, sign_flip, noise: what the learner learned, a hundred times too large, reversed, or random. free_ride: nothing
learned, the weight claimed all the same. lie_weight: a thousand times the samples. nan: payloads of random bytes, in ring
mode signed as if they were updates. replay: every message again, later. equivocate: two updates under one dot, each shown
to half of the others; in ring mode alone. stranger: an invite whose token is made up. The node's own guards stay on; what
they would stop is put in behind them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..aggregation.compress import Sparse
from ..node.learner import LocalResult
from ..node.swarm.gossip import Gossip
from ..node.swarm.rounds import Rounds
from ..protocol.ballot_messages import Header, parse_header
from ..protocol.signing import sign_body
from ..protocol.wire_pb2 import Envelope, Join, UpdateHeader
from .ledger import Learned, Witness

if TYPE_CHECKING:
    from ..node.node import Node

KINDS = ("scale", "sign_flip", "nan", "noise", "replay", "equivocate", "free_ride", "lie_weight", "stranger")
REPLAYED_MAX = 256


class Liar(Witness):
    """A witnessed learner whose results are bent as `kind` says; None: honest."""

    kind: str | None = None

    def __init__(self, learner, record: Learned, rng: random.Random) -> None:
        super().__init__(learner, record)
        self._rng = np.random.Generator(np.random.PCG64(rng.getrandbits(64)))

    def finish(self) -> LocalResult:
        result = self._learner.finish()
        delta, weight = result.delta, result.weight
        if self.kind == "scale":
            delta = np.clip(delta * 100, -0.9, 0.9).astype(np.float32)
        elif self.kind == "sign_flip":
            delta = -delta
        elif self.kind == "noise":
            delta = (0.3 * self._rng.standard_normal(delta.size)).astype(np.float32)
        elif self.kind == "free_ride":
            delta = np.zeros_like(delta)
        elif self.kind == "lie_weight":
            weight *= 1000
        result = LocalResult(delta=delta, weight=weight, metrics=result.metrics)
        self._record.add(result.delta)
        return result


def bend(node: Node, kind: str, rng: random.Random, heard: Callable[[Header, bytes], None]) -> None:
    """Make a running node lie on the wire: replay, equivocate, nan. `heard`: told of updates that it signs beside its own."""
    if kind == "replay":
        _replay(node, rng)
    elif kind == "equivocate":
        _equivocate(node, heard)
    elif kind == "nan":
        _garbage(node, rng)


def _garbage(node: Node, rng: random.Random) -> None:
    """Payloads of random bytes, which decode to nothing, to the largest numbers, or not at all."""
    assert node.rounds is not None
    if isinstance(node.rounds, Gossip):  # its own log would refuse such an update, so what is passed on is garbled
        log = node.rounds.log
        payload = log.payload
        log.payload = lambda dot: rng.randbytes(len(payload(dot)))  # type: ignore[method-assign]
        return
    work = node.rounds._work
    honest = work.encode
    nothing = Sparse(np.zeros(0, np.int64), np.zeros(0, np.float32))
    work.encode = lambda vector, compression: rng.randbytes(len(honest(vector, compression)))
    work.decode = lambda payload, d, compression: nothing


def _replay(node: Node, rng: random.Random) -> None:
    post = node.mesh.post
    old: deque[tuple[str, Envelope]] = deque(maxlen=REPLAYED_MAX)

    def posting(peer: str, envelope: Envelope) -> None:
        post(peer, envelope)
        old.append((peer, envelope))
        peer, again = old[rng.randrange(len(old))]
        post(peer, again)

    _rewire(node, posting)


def _equivocate(node: Node, heard: Callable[[Header, bytes], None]) -> None:
    post = node.mesh.post
    run_id, identity = node.run_.id, node.identity

    def posting(peer: str, envelope: Envelope) -> None:
        if envelope.WhichOneof("body") == "join" and sum(peer.encode()) % 2:
            join = Join.FromString(envelope.join.body)
            if join.HasField("header"):
                header = UpdateHeader.FromString(join.header.body)
                header.weight += 1
                other = sign_body(identity, "update", "origin", run_id, header.SerializeToString())
                second = parse_header(other)
                payload = next((u.payload for u in node.journal.updates if u.dot == second.dot), None)
                if payload is None:
                    return post(peer, envelope)
                heard(second, payload)
                join.header.CopyFrom(other)
                envelope = Envelope(join=sign_body(identity, "join", "member", run_id, join.SerializeToString()))
        post(peer, envelope)

    _rewire(node, posting)


def _rewire(node: Node, post) -> None:
    """The rounds were handed the honest `post` when they were built."""
    if isinstance(node.rounds, Rounds):
        node.rounds.ballot._post = post
    elif node.rounds is not None:
        node.rounds._post = post
