"""What a node tells about itself: the answers of `shoal status` and `shoal peers`. Reads, changes nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..protocol.wire_pb2 import Summary
from .swarm.gossip import Gossip

if TYPE_CHECKING:
    from .node import Node

WARNINGS_SHOWN = 20


def describe(node: Node) -> dict[str, Any]:
    """JSON-ready, for `shoal status`."""
    faults = node.mesh.traffic.faults if node.listening else {}
    status: dict[str, Any] = {
        "peer_id": node.identity.peer_id,
        "pid": os.getpid(),
        "run_id": node.run_.id.hex(),
        "name": node.config.run.name,
        "ready": node.ready,
        "phase": node.phase,
        "addresses": node.addresses,
        "uptime_seconds": round(node.uptime, 1),
        "warmup_seconds": round(node.warmup.get("seconds", 0.0), 1),
        "warnings": node.warnings[-WARNINGS_SHOWN:],
        "faults": {k: n for k, n in faults.items() if not k.startswith("refused_")},
        "refused": {k: n for k, n in faults.items() if k.startswith("refused_")},
    }
    rounds, members = node.rounds, node.members
    if rounds is None or members is None:
        return status
    if node.ready and not node.leaving:
        status["phase"] = rounds.progress.phase
    state = rounds.state
    others = members.summaries().values()
    return status | {
        "round": state.round,
        "saved_round": rounds.durable_round,
        "published": rounds.published if isinstance(rounds, Gossip) else None,
        "rounds_max": rounds.settings.rounds_max,
        "finished": rounds.finished,
        "lineage": state.lineage.hex(),
        "state_hash": state.hash.hex(),
        "vector_hash": state.vector.hash().hex(),
        "parameters": int(state.theta.size),
        "incarnation": node.journal.incarnation,
        "seq": node.journal.last_seq,
        "samples": rounds.progress.samples,
        "swarm_samples": rounds.progress.samples + sum(s.samples for s in others if s.open_round == state.round + 1),
        "target_samples": rounds.settings.target_samples,
        "metrics": {k: round(v, 5) for k, v in rounds.progress.metrics.items()},
        "evaluation": node.saving.keeper.evaluation,
        "electorate": list(state.electorate),
        "member": node.identity.peer_id in state.electorate,
        "alive": 1 + len(members.alive()),
        "alone": not members.alive(),
        "bytes": node.traffic(),
        "disk_trouble": node.saving.keeper.trouble or node.journal.trouble,
    }


def describe_peers(node: Node) -> list[dict[str, Any]]:
    """JSON-ready, for `shoal peers`."""
    if node.members is None or node.rounds is None:
        return []
    listed = []
    state, connected = node.rounds.state, set(node.mesh.connected())
    for peer, record in node.members.machine.members().items():
        summary = node.members.last_summary(peer) or Summary()
        listed.append(
            {
                "peer_id": peer,
                "state": record.state.name.lower(),
                "incarnation": record.incarnation,
                "addresses": node.mesh.addresses(peer) or list(record.addresses),
                "connected": peer in connected,
                "round": summary.round,
                "behind": max(0, state.round - summary.round),
                "same_state": summary.state_hash == state.hash,
                "samples_per_s": round(record.samples_per_s, 2),
                "last_error": node.mesh.last_error(peer),
            }
        )
    return listed
