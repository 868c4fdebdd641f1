"""Connects the parts of hybrid mode to a node: gossip's log and exchanges, ring mode's ballot and ring. Nothing more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..aggregation.gossip import UpdateLog
from ..aggregation.hybrid import HybridRules, combined_bytes_max
from ..protocol.ballot_messages import Header
from ..protocol.errors import PeerFault
from ..protocol.rings import verify_combined
from .config import Config
from .gossip_mode import Variant, make_gossip
from .learner import LocalResult
from .ring_mode import make_exchange, merge_rules
from .store.journal import Journal
from .swarm.ballot_driver import BallotDriver
from .swarm.dense_exchange import DenseExchange
from .swarm.hybrid import Hybrid
from .swarm.hybrid_replica import HybridReplica
from .swarm.hybrid_seal import Sealing
from .swarm.state import SharedState

if TYPE_CHECKING:
    from .node import Node

FOLDER = "combined"


def hybrid_rules(config: Config) -> HybridRules:
    """What the manifest says about combining a ring's updates."""
    sync = config.run.sync
    return HybridRules(
        compression=config.run.parsed_compression(),
        weight_max=sync.weight_max,
        weight_median_multiple_max=sync.weight_median_multiple_max,
        norm_max=sync.norm_max,
        outer_lr=sync.outer_lr,
        keep=sync.sum_keep,
        bits=sync.sum_bits,
    )


def damping_of(*, stale: int, drawn: int, peers: int, ring_size_max: int) -> float:
    """What an update counts for, above 0 and at most 1.

    Args:
        stale: sums that came in between its base and its publication. Those of the round before and of faster rings of this one
            are the normal course of things; beyond them the damping is 1 / (1 + (stale - usual) / usual).
        drawn, peers: in the swarm, as the ring's drawer knew it and as the origin knows it when it publishes. A ring drawn by
            a newcomer that knows nobody yet would count for the whole swarm.
    """
    usual = 2 * max(1, -(-peers // ring_size_max))
    return min(1.0, drawn / peers) / (1.0 + max(0, stale - usual) / usual)


def make_hybrid(node: Node, log: UpdateLog, theta0: np.ndarray) -> Hybrid:
    """Hybrid mode from its parts; registers the streams that others open to us."""
    sync, members, mesh, clock = node.config.run.sync, node.members, node.mesh, node.clock
    rules, me, d = hybrid_rules(node.config), node.identity.peer_id, node.learner.layout.size
    run_id, folder = node.run_.id, node.data.path / FOLDER
    assert members is not None
    node.host.disk.make_folder(folder)
    combined = Journal(folder, disk=node.host.disk)
    node.closers.append(combined.close)
    if node.recording is not None:
        for update in combined.updates:  # what was said just before a death
            node.recording.update(update)
        combined.on_update = node.recording.update

    def scale(base: SharedState, result: LocalResult, now: SharedState) -> float:
        return damping_of(
            stale=now.round - base.round,
            drawn=hybrid.swarm_drawn,
            peers=1 + len(members.alive()),
            ring_size_max=sync.ring_size_max,
        )

    async def exchanging() -> None:
        await node.hold("exchanging", hybrid.published + 1)

    async def committing() -> None:
        await node.hold("committing", hybrid.published)

    async def saved() -> bool:
        return True  # a ring's round stands on its draw alone

    exchange = make_exchange(node, lambda: hybrid.ballot.report_held(), exchanging)
    dense = DenseExchange(
        me=me,
        clock=clock,
        open_stream=mesh.open,
        d=d,
        bits=sync.dense_bits,
        rules=merge_rules(node.config),
        on_complete=lambda hashes: None,
        on_failure=lambda attempt, why: hybrid.ballot.dense_failed(attempt, why),
        on_trouble=node.trouble,
    )

    def sealing(whole: Hybrid) -> Sealing:
        return Sealing(
            identity=node.identity,
            run_id=run_id,
            clock=clock,
            rules=rules,
            d=d,
            exchange=exchange,
            store=node.store,
            journal=combined,
            next_dot=whole.next_dot,
            include=whole.include_sum,
            included=whole.replica.carries,
            count=lambda: whole.state.round,
            gone=lambda peer: peer in members.dead(),
            post=mesh.post,
            say=node.say,
            hold=committing,
        )

    def build(**parts: Any) -> Hybrid:
        ballot = BallotDriver(
            identity=node.identity,
            run_id=run_id,
            clock=clock,
            work=parts["work"],
            exchange=exchange,
            dense=dense,
            store=node.store,
            journal=node.journal,
            deadlines=node.deadlines,
            post=mesh.post,
            say=node.say,
            state_saved=saved,
            entered=lambda phase: hybrid.entered(phase),
        )
        return Hybrid(
            own=node.journal,
            ballot=ballot,
            sealing=sealing,
            ring_size_max=sync.ring_size_max,
            random_bytes=node.host.random_bytes,
            dead=members.dead,
            check_life=node.lives.check,
            covered=node.checkpoints.oldest_round,
            **parts,
        )

    variant = Variant(
        scale=scale,
        gain=rules.outer_lr,
        replica=HybridReplica,
        build=build,
        journal=combined,
        payload_bytes_max=combined_bytes_max(d, rules.compression, sync.ring_size_max),
        verify=lambda header, payload: _verify(header, payload, run_id),
    )
    hybrid = cast(Hybrid, make_gossip(node, log, theta0, variant))
    mesh.serve("Push", exchange.serve_push)
    mesh.serve("Pull", exchange.serve_pull)
    return hybrid


def _verify(header: Header, payload: bytes, run_id: bytes) -> None:
    combined = verify_combined(payload, header.dot, run_id)
    if (header.round, header.base_lineage) != (combined.draw.round, combined.value.base_lineage):
        raise PeerFault("bad_ring", f"{header.dot} names another ring than its payload")
