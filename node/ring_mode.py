"""Connects the parts of ring mode to a node: membership, exchanges, local work, catching up, rounds. Nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..aggregation.compress import max_payload_bytes
from ..aggregation.merge import OuterNesterov, OuterOptimizer, OuterSgd
from ..aggregation.ring import choose_exchange
from ..protocol.ballot_wire import decode_commit
from ..protocol.commit import CommitLog, check_commit, electorate_after
from ..protocol.errors import PeerFault
from ..protocol.wire_pb2 import Commit as WireCommit
from .config import Config
from .swarm.catch_up import CatchUp
from .swarm.dense_exchange import DenseExchange
from .swarm.local_work import LocalWork
from .swarm.members import Members
from .swarm.ring_exchange import RingExchange
from .swarm.rounds import Rounds, RoundSettings
from .swarm.state import MergeRules, SharedState

if TYPE_CHECKING:
    from .node import Node


def load_log(records: Sequence[bytes], state: SharedState, run_id: bytes) -> CommitLog:
    """The log from the records on disk that end in `state`; a record that does not fit is left out."""
    commits = []
    for raw in records:
        try:
            commits.append(decode_commit(WireCommit.FromString(raw), run_id))
        except PeerFault:
            continue
    chain: list[Any] = []
    wanted = state.lineage
    for commit in reversed(commits):
        if commit.value.lineage == wanted:
            chain.append(commit)
            wanted = commit.base_lineage
    if not chain:
        return CommitLog(state.lineage, state.round, state.total_weight, electorate=state.electorate)
    chain.reverse()
    # The oldest record only says who could vote in the next one.
    root = chain[0]
    electorate = electorate_after(root.value)
    log = CommitLog(root.value.lineage, root.value.round, electorate=electorate)
    for commit in chain[1:]:
        checked = check_commit(commit, electorate, commit.value.round, commit.base_lineage)
        log.add(checked, sum(u.weight for u in commit.value.updates), tip=checked.lineage)
        electorate = electorate_after(commit.value)
    return log


def merge_rules(config: Config) -> MergeRules:
    """What the manifest says about merging."""
    sync = config.run.sync
    outer: OuterOptimizer = OuterSgd(sync.outer_lr)
    if sync.outer == "nesterov":
        outer = OuterNesterov(sync.outer_lr, sync.outer_momentum)
    return MergeRules(
        compression=config.run.parsed_compression(),
        outer=outer,
        weight_max=sync.weight_max,
        weight_median_multiple_max=sync.weight_median_multiple_max,
        norm_max=sync.norm_max,
    )


def make_members(node: Node) -> Members:
    """Membership, told what the node's rounds have."""
    return Members(
        identity=node.identity,
        run_id=node.run_.id,
        config=node.config.run.membership.build(),
        rng=node.rng,
        clock=node.clock,
        incarnation=node.journal.incarnation,
        boot_id=node.boot_id,
        addresses=tuple(node.addresses),
        post=node.mesh.post,
        heard=node.heard,
        changed=node.changed,
        summary=lambda: node.rounds.summary() if node.rounds else None,
        admissible=node.run_.admissible,
    )


def make_rounds(node: Node, log: CommitLog) -> Rounds:
    """Ring mode from its parts; registers the streams that others open to us."""
    sync, rules, members, d = node.config.run.sync, merge_rules(node.config), node.members, node.learner.layout.size
    assert members is not None
    mesh, clock, me = node.mesh, node.clock, node.identity.peer_id

    async def exchanging() -> None:
        await node.hold("exchanging", rounds.state.round + 1)

    exchange = RingExchange(
        me=me,
        clock=clock,
        open_stream=mesh.open,
        store=node.store,
        is_dead=lambda peer: peer in members.dead(),
        on_arrival=lambda: rounds.report_held(),
        on_trouble=node.trouble,
        before_payload=exchanging,
    )
    dense = DenseExchange(
        me=me,
        clock=clock,
        open_stream=mesh.open,
        d=d,
        bits=sync.dense_bits,
        rules=rules,
        on_complete=lambda hashes: rounds.dense_complete(hashes),
        on_failure=lambda attempt, why: rounds.dense_failed(attempt, why),
        on_trouble=node.trouble,
        before_chunk=exchanging,
    )
    rounds = Rounds(
        identity=node.identity,
        run_id=node.run_.id,
        clock=clock,
        settings=RoundSettings(
            target_samples=sync.target_samples,
            round_seconds_max=sync.round_seconds_max,
            rounds_max=sync.rounds_max,
            rules=rules,
        ),
        state=node.state,
        log=log,
        work=LocalWork(
            learner=node.learner,
            clock=clock,
            book=node.book,
            journal=node.journal,
            store=node.store,
            identity=node.identity,
            run_id=node.run_.id,
            compression=node.compression,
            shards=node.shards,
            dense=lambda electorate: is_dense(node.config, electorate, d),
            check_life=node.check_life,
            step_cost_s=node.host.step_cost_s,
        ),
        exchange=exchange,
        dense=dense,
        store=node.store,
        journal=node.journal,
        deadlines=node.deadlines,
        catch_up=CatchUp(
            clock=clock,
            post=mesh.post,
            summaries=members.summaries,
            download=node.download,
            say=node.say,
            conflicts_seen=node.warn,
        ),
        post=mesh.post,
        alive=members.alive,
        dead=node.dead,
        expect=members.expect,
        summaries=members.summaries,
        save=node.save,
        say=node.say,
        hold=node.hold,
        started=node.started,
    )
    mesh.serve("Push", exchange.serve_push)
    mesh.serve("Pull", exchange.serve_pull)
    mesh.serve("Dense", dense.serve)
    mesh.serve("Chunks", dense.serve_chunks)
    return rounds


def is_dense(config: Config, electorate: int, d: int) -> bool:
    """Whether a round's update is exchanged densely; equal on all peers, because nothing measured enters."""
    sync = config.run.sync
    if sync.exchange != "auto":
        return sync.exchange == "dense"
    payload = max_payload_bytes(d, config.run.parsed_compression())
    kind, _ = choose_exchange(max(2, electorate), payload, d, sync.dense_bits)
    return kind == "dense"
