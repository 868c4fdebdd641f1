"""Connects the parts of ring mode to a node: membership, exchanges, local work, catching up, rounds. Nothing more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from ..aggregation.compress import max_payload_bytes
from ..aggregation.merge import OuterNesterov, OuterOptimizer, OuterSgd
from ..aggregation.ring import choose_exchange
from ..protocol.ballot_messages import Commit
from ..protocol.ballot_wire import decode_commit
from ..protocol.commit import CommitLog
from ..protocol.errors import PeerFault
from ..protocol.wire_pb2 import Commit as WireCommit
from .config import Config
from .swarm.catch_up import CatchUp
from .swarm.dense_exchange import DenseExchange
from .swarm.history import History, build_log
from .swarm.local_work import LocalWork
from .swarm.members import Members
from .swarm.records import serve_records
from .swarm.ring_exchange import RingExchange
from .swarm.rounds import Rounds, RoundSettings
from .swarm.state import MergeRules, SharedState

if TYPE_CHECKING:
    from .node import Node
    from .run import Run


def load_log(records: Sequence[bytes], state: SharedState, run: Run) -> CommitLog:
    """The log from serialized records (on disk, or a peer's) that end in `state`; what does not fit is left out."""
    rules = merge_rules(run.config)
    try:
        return build_log(decode_records(records, run.id), state, rules, run.origin())
    except PeerFault:
        return build_log([], state, rules, run.origin())


def has_record(records: Sequence[bytes], state: SharedState, run_id: bytes) -> bool:
    """Whether the record of a state's round is among the serialized ones; round 0 has none and lacks none."""
    return state.round == 0 or any(
        commit.value.lineage == state.lineage for raw in reversed(records) for commit in decode_records([raw], run_id)
    )


def decode_records(records: Sequence[bytes], run_id: bytes) -> list[Commit]:
    """Those that decode and are signed, in order."""
    commits = []
    for raw in records:
        try:
            commits.append(decode_commit(WireCommit.FromString(raw), run_id))
        except (PeerFault, DecodeError):
            continue
    return commits


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


def make_exchange(
    node: Node, on_arrival: Callable[[], None], before_payload: Callable[[], Awaitable[None]]
) -> RingExchange:
    """The sparse exchange of a ring; see `RingExchange` for the arguments."""
    members = node.members
    assert members is not None
    return RingExchange(
        me=node.identity.peer_id,
        clock=node.clock,
        open_stream=node.mesh.open,
        store=node.store,
        is_dead=lambda peer: peer in members.dead(),
        on_arrival=on_arrival,
        on_trouble=node.trouble,
        before_payload=before_payload,
    )


def make_rounds(node: Node, log: CommitLog) -> Rounds:
    """Ring mode from its parts; registers the streams that others open to us."""
    sync, rules, members, d = node.config.run.sync, merge_rules(node.config), node.members, node.learner.layout.size
    assert members is not None
    mesh, clock, me = node.mesh, node.clock, node.identity.peer_id

    async def exchanging() -> None:
        await node.hold("exchanging", rounds.state.round + 1)

    exchange = make_exchange(node, lambda: rounds.ballot.report_held(), exchanging)
    dense = DenseExchange(
        me=me,
        clock=clock,
        open_stream=mesh.open,
        d=d,
        bits=sync.dense_bits,
        rules=rules,
        on_complete=lambda hashes: rounds.ballot.dense_complete(hashes),
        on_failure=lambda attempt, why: rounds.ballot.dense_failed(attempt, why),
        on_trouble=node.trouble,
        before_chunk=exchanging,
        record=node.recording.chunk if node.recording is not None else None,
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
        history=History(me=me, log=log, book=node.book, rules=rules, genesis=node.run_.origin(), say=node.say),
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
            check_life=node.lives.check,
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
            records=node.records,
            keep_records=node.saving.keep_records,
            say=node.say,
            conflicts_seen=node.warn,
        ),
        post=mesh.post,
        alive=members.alive,
        dead=node.dead,
        expect=members.expect,
        summaries=members.summaries,
        save=node.saving.save,
        say=node.say,
        hold=node.hold,
        started=node.started,
        amnesiac=lambda: node.lives.amnesiac,
    )
    mesh.serve("Records", lambda peer, stream: serve_records(stream, rounds.log, rounds.state.lineage))
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
