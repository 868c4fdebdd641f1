"""Proofs that a peer is faulty: two different signed updates under one name. They ban it here, and are passed on.

A proof convinces by itself, whoever brings it; a ban without one is somebody's opinion and is not adopted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..protocol.ballot_messages import Header
from ..protocol.ballot_wire import decode_header
from ..protocol.errors import PeerFault
from ..protocol.wire_pb2 import BanNotice, Envelope
from .gossip_mode import proof_notice
from .swarm.gossip import Gossip

if TYPE_CHECKING:
    from .node import Node


class BanProofs:
    """One node's."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def equivocation(self, first: Header, second: Header) -> None:
        """Two headers under one dot, their signatures checked."""
        self._ban(proof_notice(first.dot, first.signed, second.signed), first, second)

    def received(self, notice: BanNotice) -> None:
        """From a peer. Raises PeerFault for one that proves nothing."""
        first, second = (decode_header(s, self._node.run_.id) for s in (notice.first, notice.second))
        if first.dot != second.dot or first.dot.peer != notice.peer or first.update_hash == second.update_hash:
            raise PeerFault("bad_ban", "the two headers prove nothing")
        self._ban(notice, first, second)

    def _ban(self, notice: BanNotice, first: Header, second: Header) -> None:
        node = self._node
        if isinstance(node.rounds, Gossip):
            node.rounds.on_proof(first, second)
        try:
            news = node.mesh.ban(notice.peer, notice.reason, notice.SerializeToString())
        except PeerFault as full:  # no room for another ban, which is not the fault of whoever brings the proof
            return node.say("not banned", level="warning", peer=notice.peer, cause=str(full))
        if news:
            node.warn(f"banned {notice.peer}: {notice.reason}")
            node.save_secrets()
            for peer in sorted(node.members.alive()) if node.members else ():
                node.mesh.post(peer, Envelope(ban=notice))
