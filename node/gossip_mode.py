"""Connects the parts of gossip mode to a node: the update log, local work, exchange. No behaviour of its own but the scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..aggregation.contributions import Contributions, GossipRules
from ..aggregation.forks import Fork
from ..aggregation.gossip import UpdateLog
from ..protocol.ballot_messages import Header
from ..protocol.errors import ExitCode, ShoalError
from ..protocol.membership import State
from ..protocol.version import Dot
from ..protocol.wire_pb2 import BanNotice, Envelope, Signed
from .config import Config
from .learner import LocalResult
from .store.gossip_file import pack, snapshot_parts, unpack
from .store.journal import Journal
from .swarm.gossip import Gossip, GossipSettings
from .swarm.gossip_exchange import GossipExchange
from .swarm.local_work import LocalWork
from .swarm.replica import Replica, ReplicaSettings
from .swarm.state import SharedState
from .swarm.state_server import Servable

if TYPE_CHECKING:
    from .node import Node

# Where a checkpoint keeps the log, among the book's arrays.
PREFIX = "log/"
# An update counts at most this multiple of the usual one, however long its peer trained.
SHARE_MAX = 2.0
# Who knows nobody so soon after its start has not heard of the others yet, and calls nothing final.
KNOWN_SECONDS = 20.0


def rules_of(config: Config) -> GossipRules:
    """What the manifest says about gossiped updates. Raises ShoalError for what gossip mode cannot do."""
    sync = config.run.sync
    if sync.exchange == "dense":
        raise ShoalError(
            "Gossip mode cannot run with this exchange",
            values="run.sync.exchange = 'dense', expected 'auto' or 'sparse'",
            todo="Set run.sync.exchange = 'auto', or run.sync.mode = 'ring'.",
            code=ExitCode.CONFIG,
        )
    return GossipRules(
        compression=config.run.parsed_compression(),
        step_max=sync.step_max,
        log_bytes_max=config.node.updates_bytes_max,
        combined=sync.mode == "hybrid",
    )


def new_log(node: Node, theta0: np.ndarray) -> UpdateLog:
    """An empty one over the run's first parameters, fp32 [d]."""
    return UpdateLog(np.array(theta0, np.float32), rules_of(node.config), contributions_of(node))


def contributions_of(node: Node) -> Contributions | None:
    """What the logs of this process share, if they do."""
    make = node.host.contributions
    return make(node.learner.layout.size, rules_of(node.config)) if make is not None else None


def log_parts(log: UpdateLog, theta0: np.ndarray) -> dict[str, np.ndarray | bytes]:
    """For a checkpoint, beside the book's arrays."""
    return {"theta0": theta0, **{PREFIX + name: part for name, part in pack(log.snapshot().to_parts()).items()}}


def restored_log(node: Node, parts: Mapping[str, np.ndarray | bytes]) -> tuple[UpdateLog, np.ndarray]:
    """The log of a checkpoint, and theta0. Raises PeerFault when it is damaged."""
    return log_of(parts, rules_of(node.config), contributions_of(node))


def log_of(
    parts: Mapping[str, np.ndarray | bytes], rules: GossipRules, contributions: Contributions | None = None
) -> tuple[UpdateLog, np.ndarray]:
    """As `restored_log`, without a node."""
    theta0 = np.array(parts["theta0"], np.float32)
    own = unpack({name[len(PREFIX) :]: part for name, part in parts.items() if name.startswith(PREFIX)})
    return UpdateLog.from_snapshot(theta0, rules, own, contributions=contributions), theta0


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


def served(replica: Replica) -> Servable:
    """The state at the floor, for newcomers and for those who have fallen behind."""
    snapshot, hash_ = replica.floor
    included = sum(seq for seq, _ in snapshot.floor.entries.values())
    return Servable(included, hash_, hash_, lambda: snapshot_parts(replica.theta0, snapshot))


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What hybrid mode has otherwise.

    Attributes:
        scale: signed by the origin with its update, from (base, result, state now).
        gain: what a ring may multiply an update with beside it.
        replica, build: make the replica and the whole from gossip mode's parts.
        journal: of what is gossiped.
        payload_bytes_max: largest payload that is gossiped.
        verify: checks what a header's signature does not cover; raises PeerFault.
    """

    scale: Callable[[SharedState, LocalResult, SharedState], float]
    gain: float
    replica: Callable[..., Replica]
    build: Callable[..., Gossip]
    journal: Journal
    payload_bytes_max: int
    verify: Callable[[Header, bytes], None]


def make_gossip(node: Node, log: UpdateLog, theta0: np.ndarray, variant: Variant | None = None) -> Gossip:
    """Gossip mode from its parts; registers the streams that others open to us."""
    sync, members, mesh, clock = node.config.run.sync, node.members, node.mesh, node.clock
    assert members is not None

    def scale(state: SharedState, result: LocalResult) -> float:
        if variant is not None:
            return variant.scale(state, result, gossip.state)
        return scale_of(
            weight=result.weight,
            usual=sync.target_samples,
            peers=1 + len(members.alive()),
            outer_lr=sync.outer_lr,
            stale=gossip.state.round - state.round,
        )

    def remembered() -> frozenset[str] | None:
        now = clock.now()
        if not members.members() and node.uptime < KNOWN_SECONDS:
            return None
        return frozenset(
            peer
            for peer, view in members.members().items()
            if view.state is not State.LEFT
            and not (view.state is State.DEAD and now - view.since > sync.forget_after_seconds)
        )

    def complete() -> bool:
        return all(view.state in (State.ALIVE, State.LEFT) for view in members.members().values())

    def send_proof(peer: str, fork: Fork) -> None:
        mesh.post(peer, Envelope(ban=proof_notice(fork.dot, fork.first.signed, fork.second.signed)))

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
        check_life=node.lives.check,
        scale=scale,
        momentum=sync.outer_momentum if sync.outer == "nesterov" else 0.0,
        gain=variant.gain if variant else 1.0,
        step_cost_s=node.host.step_cost_s,
    )
    replica = (variant.replica if variant else Replica)(
        me=node.identity.peer_id,
        theta0=theta0,
        log=log,
        book=node.book,
        settings=ReplicaSettings(
            heal_max=sync.heal_max,
            heal_rule=sync.heal,
            compact_updates=sync.compact_updates,
            usual=sync.target_samples,
        ),
        durable=log.vector,
        members=remembered,
        life_over=node.lives.over,
        say=node.say,
    )
    if node.recording is not None:
        replica.on_average = node.recording.average
    exchange = GossipExchange(
        run_id=node.run_.id,
        clock=clock,
        replica=replica,
        payload_bytes_max=variant.payload_bytes_max if variant else work.payload_bytes_max,
        **({"verify": variant.verify} if variant else {}),
        open_stream=mesh.open,
        equivocation=node.proofs.equivocation,
        send_proof=send_proof,
        download=node.download_snapshot,
        grew=lambda keys, peer: gossip.grew(keys, peer),
        again=lambda peer: gossip.due(peer),
        hold=lambda: node.hold("exchanging", gossip.published + 1),
        trouble=node.trouble,
        say=node.say,
    )
    gossip = (variant.build if variant else Gossip)(
        me=node.identity.peer_id,
        run_id=node.run_.id,
        clock=clock,
        rng=node.rng,
        settings=GossipSettings(
            target_samples=sync.target_samples,
            round_seconds_max=sync.round_seconds_max,
            rounds_max=sync.rounds_max,
            interval_s=sync.gossip_seconds,
            fanout=sync.gossip_fanout,
            save_seconds=node.config.node.log_save_seconds,
        ),
        replica=replica,
        exchange=exchange,
        work=work,
        journal=variant.journal if variant else node.journal,
        post=mesh.post,
        alive=members.alive,
        near=members.neighbours,
        complete=complete,
        banned=lambda peer: node.run_.bans.reason(peer) is not None,
        trouble=node.trouble,
        life_over=node.lives.over,
        save=node.saving.save_gossip,
        record=node.saving.record_gossip,
        say=node.say,
        hold=node.hold,
        started=node.started,
    )
    mesh.serve("Gossip", exchange.serve)
    mesh.serve("Fetch", exchange.serve_fetch)
    return gossip


def proof_notice(dot: Dot, first: bytes, second: bytes) -> BanNotice:
    """The ban of an equivocating peer, with its proof: two signed headers under one dot."""
    return BanNotice(
        peer=dot.peer,
        reason=f"equivocation: two updates named {dot}",
        first=Signed.FromString(first),
        second=Signed.FromString(second),
    )
