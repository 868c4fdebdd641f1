"""Connects the parts of gossip mode to a node: the update log, local work, exchange. No behaviour of its own but the scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ..aggregation.contributions import GossipRules
from ..aggregation.gossip import UpdateLog
from ..protocol.errors import ExitCode, ShoalError
from .config import Config
from .learner import LocalResult
from .swarm.gossip import Gossip, GossipSettings
from .swarm.local_work import LocalWork
from .swarm.state import SharedState

if TYPE_CHECKING:
    from .node import Node

# Where a checkpoint keeps the log, among the book's arrays.
PREFIX = "log/"
# An update counts at most this multiple of the usual one, however long its peer trained.
SHARE_MAX = 2.0


def rules_of(config: Config) -> GossipRules:
    """What the manifest says about gossiped updates. Raises ShoalError for what gossip mode cannot do."""
    sync = config.run.sync
    for name, value, needed in (("outer", sync.outer, "sgd"), ("exchange", sync.exchange, "auto")):
        if value not in (needed, "sparse"):
            raise ShoalError(
                f"Gossip mode cannot run with this {name}",
                values=f"run.sync.{name} = {value!r}, expected {needed!r}",
                todo=f"Set run.sync.{name} = {needed!r}, or run.sync.mode = 'ring'.",
                code=ExitCode.CONFIG,
            )
    return GossipRules(compression=config.run.parsed_compression(), step_max=sync.step_max)


def new_log(node: Node, theta0: np.ndarray) -> UpdateLog:
    """An empty one over the run's first parameters, fp32 [d]."""
    return UpdateLog(np.array(theta0, np.float32), rules_of(node.config))


def log_parts(log: UpdateLog, theta0: np.ndarray) -> dict[str, np.ndarray | bytes]:
    """For a checkpoint, beside the book's arrays."""
    return {"theta0": theta0, **{PREFIX + name: part for name, part in log.snapshot().to_parts().items()}}


def restored_log(node: Node, parts: Mapping[str, np.ndarray | bytes]) -> tuple[UpdateLog, np.ndarray]:
    """The log of a checkpoint, and theta0. Raises PeerFault when it is damaged."""
    theta0 = np.array(parts["theta0"], np.float32)
    own = {name[len(PREFIX) :]: part for name, part in parts.items() if name.startswith(PREFIX)}
    return UpdateLog.from_snapshot(theta0, rules_of(node.config), own), theta0


def scale_of(*, weight: int, usual: int, peers: int, outer_lr: float, stale: int) -> float:
    """What an update is multiplied with, signed by its origin: `outer_lr * share / peers * damping`.

    So that `peers` peers that each publish the usual number of samples make one outer step of averaging together.

    Args:
        weight: samples behind the update; its share is weight / usual, at most SHARE_MAX.
        usual: samples after which a peer publishes.
        peers: alive, this one included.
        stale: updates merged between its base and its publication; up to `peers` are the normal course of things, beyond
            that the damping is 1 / (1 + (stale - peers) / peers).
    """
    share = min(SHARE_MAX, weight / max(1, usual))
    damping = 1.0 / (1.0 + max(0, stale - peers) / peers)
    return outer_lr * share / peers * damping


def make_gossip(node: Node, log: UpdateLog) -> Gossip:
    """Gossip mode from its parts; registers the stream that others open to us."""
    sync, members, mesh, clock = node.config.run.sync, node.members, node.mesh, node.clock
    assert members is not None

    def scale(state: SharedState, result: LocalResult) -> float:
        return scale_of(
            weight=result.weight,
            usual=sync.target_samples,
            peers=1 + len(members.alive()),
            outer_lr=sync.outer_lr,
            stale=gossip.state.round - state.round,
        )

    work = LocalWork(
        learner=node.learner,
        clock=clock,
        book=node.book,
        journal=node.journal,
        store=node.store,
        identity=node.identity,
        run_id=node.run_.id,
        compression=node.compression,
        shards=node.shards,
        check_life=node.check_life,
        scale=scale,
        step_cost_s=node.host.step_cost_s,
    )
    gossip = Gossip(
        identity=node.identity,
        run_id=node.run_.id,
        clock=clock,
        rng=node.rng,
        settings=GossipSettings(
            target_samples=sync.target_samples,
            round_seconds_max=sync.round_seconds_max,
            rounds_max=sync.rounds_max,
            interval_s=sync.gossip_seconds,
            fanout=sync.gossip_fanout,
            outer_lr=sync.outer_lr,
        ),
        log=log,
        work=work,
        journal=node.journal,
        open_stream=mesh.open,
        post=mesh.post,
        alive=members.alive,
        equivocation=node.equivocation,
        banned=lambda peer: node.run_.bans.reason(peer) is not None,
        trouble=node.trouble,
        save=node.save_gossip,
        say=node.say,
        hold=node.hold,
        started=node.started,
    )
    mesh.serve("Gossip", gossip.serve)
    return gossip
