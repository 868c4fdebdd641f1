"""Gossip mode: nothing is final before everybody has it.

A log that is compacted too early is mended by a snapshot, so no state shows it; what it costs is that a proof of equivocation
can no longer be applied everywhere. Looked at is the simplest case alone: peers that were up, and known to all, without a
break since before the update was published.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..node.swarm.gossip import Gossip
from ..protocol.version import Dot

if TYPE_CHECKING:
    from .peer import Peer
    from .simulation import Simulation

# A newcomer is known to all after so long. Not in runs that forget members, or in which one side's log replaces another's.
KNOWN_AFTER_SECONDS = 20.0
FORGET_AFTER_SECONDS_MIN = 600.0


class Finality:
    """Looks at each log whose frontier moved."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        sync = sim.run_config.sync
        self._applies = (
            sync.mode == "gossip" and sync.forget_after_seconds >= FORGET_AFTER_SECONDS_MIN and sync.heal_max == 0
        )
        self._published: dict[Dot, float] = {}  # when the ledger heard of an update
        self._ready: dict[str, tuple[int, float]] = {}  # by peer: which life, and since when
        self._changes: dict[str, tuple[int, int]] = {}
        self._final: dict[tuple[str, int], int] = {}  # highest seq looked at, by chain

    def published(self, dot: Dot) -> None:
        self._published.setdefault(dot, self._sim.now)

    def ready(self, peer: Peer) -> None:
        self._ready[peer.name] = peer.lives, self._sim.now

    def look(self, peer: Peer) -> str:
        """What is final in this peer's log and missing in another's, or ""."""
        if not self._applies or peer.node is None or not isinstance(peer.node.rounds, Gossip):
            return ""
        log = peer.node.rounds.log
        changes = (id(log), log.floor_changes)
        if self._changes.get(peer.name) == changes:
            return ""
        self._changes[peer.name] = changes
        for key, (seq, _) in log.frontier.entries.items():
            if seq <= self._final.get(key, 0):
                continue
            self._final[key] = seq
            for other in self._holders(Dot(*key, seq)):
                assert other.node is not None and isinstance(other.node.rounds, Gossip)
                if other.node.rounds.log.base != log.base:
                    continue  # an average is final on its own side alone; who has not made it yet takes it whole
                have = other.node.rounds.log.vector.seq(*key)
                if have < seq:
                    return f"update {seq} of {key[0][-6:]} is final, and {other.name} has no more than {have}"
        return ""

    def _holders(self, dot: Dot) -> list[Peer]:
        """Who must have an update before it can be final."""
        at = self._published.get(dot, 0.0)
        running = [p for p in self._sim.peers if p.byzantine is None and p.node is not None and p.node.ready]
        found = []
        for peer in running:
            life, since = self._ready.get(peer.name, (-1, 0.0))
            unbroken = life == peer.lives and since + KNOWN_AFTER_SECONDS < at
            known = all(peer.peer_id in self._members(other) for other in running if other is not peer)
            if unbroken and known and peer.peer_id not in self._sim.checkers.ledger.lost:
                found.append(peer)
        return found

    @staticmethod
    def _members(peer: Peer) -> frozenset[str]:
        assert peer.node is not None and isinstance(peer.node.rounds, Gossip)
        return peer.node.rounds.replica._members() or frozenset()
