"""Who else there is: peers that LAN and DHT have found, and everybody known, dialled again while nobody is here.

What is found is a hint: it is bounded, tried, and proves itself in the handshake. The loops here run as long as the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..protocol import limits
from ..protocol.errors import ExitCode, ShoalError
from ..protocol.membership import State

if TYPE_CHECKING:
    from .node import Node

# How often the node looks after its peer cache, its secrets and its being alone.
CARE_SECONDS = 2.0
# Alone: everybody known is dialled again after this pause, which doubles up to the maximum.
REDIAL_SECONDS = 5.0
REDIAL_SECONDS_MAX = 60.0
DHT_SECONDS = 60.0


class Nearby(dict[str, list[str]]):
    """Peers that discovery found, by peer id, with their addresses; the one heard of longest ago makes room."""

    def found(self, peer: str, addresses: Sequence[str]) -> None:
        """Remember a peer, its addresses newest first."""
        self.pop(peer, None)
        self[peer] = list(addresses[: limits.ADDRESSES_MAX])
        if len(self) > limits.NEARBY_MAX:
            del self[next(iter(self))]


def found_nearby(node: Node, peer: str, addresses: list[str]) -> None:
    """Discovery found a peer of this run."""
    node.nearby.found(peer, addresses)
    node.mesh.news(peer, addresses)
    if node.members is not None and node.members.machine.state(peer) is not State.ALIVE:
        node.members.introduce(peer)


# ---------------------------------------------------------------------------------------------------- everybody known


async def look_after_company(node: Node) -> None:
    """Keep peer cache and secrets on disk when they changed; dial everybody known while nobody is here."""
    written, dialled_at, pause = (b"", b""), node.clock.now(), REDIAL_SECONDS
    lonely = False
    while True:
        now = (node.cache.encoded(), node.run_.secrets())
        if now != written:
            written = now
            node.save_secrets()
        await node.clock.sleep(CARE_SECONDS)
        if node.members is None or node.members.alive():
            pause = REDIAL_SECONDS
        elif node.clock.now() - dialled_at > pause and (node.cache.peers or node.run_.invite):
            node.say("alone: training goes on; dialling everybody known", level="warning", known=len(node.cache.peers))
            await node.entry.redial()
            dialled_at, pause = node.clock.now(), min(2 * pause, REDIAL_SECONDS_MAX)
        elif not (lonely or node.cache.peers or node.run_.invite) and _had_company(node):
            lonely = True
            node.warn("alone, and where the others are is not known any more: stop, and start with `shoal join INVITE`")


def _had_company(node: Node) -> bool:
    """Whether the state holds anything of other peers."""
    assert node.rounds is not None
    state = node.rounds.state
    return {peer for peer, _ in state.vector.entries} | set(state.electorate) > {node.identity.peer_id}


# ---------------------------------------------------------------------------------------------------- LAN and DHT


async def join_lan(node: Node) -> None:
    """Announce on the local network and listen there. Where there is none, say so and go on."""
    from ..protocol.lan import Lan

    hosts = [a.rpartition(":")[0] for a in node.addresses]
    lan = Lan(node.identity.peer_id, node.run_.id, node.port, hosts)
    try:
        await lan.start(lambda peer, addresses: found_nearby(node, peer, addresses))
        node.closers.append(lan.close)
    except OSError as error:
        node.warn(f"no LAN discovery: {error}")


async def join_dht(node: Node) -> None:
    """Enter the DHT and keep looking there. Raises ShoalError without the package for it."""
    from ..protocol.dht import Dht

    table = node.config.node.dht
    dht = Dht(node.identity, node.data.identity, node.run_.id, node.rng)
    node.closers.append(dht.close)
    try:
        where = await dht.start(table.listen, table.bootstrap)
    except ShoalError as error:
        if error.code is ExitCode.DEPENDENCY:
            raise
        node.warn(f"not in the DHT: {error.values}")  # one way of finding peers among several
    else:
        node.say("in the DHT", addresses=where)
        node.own(dht_loop(node, dht))


async def dht_loop(node: Node, dht: Any) -> None:
    """Announce this peer and take in what others announced, until cancelled."""
    while True:
        await dht.announce(node.addresses)
        for peer, addresses in (await dht.find()).items():
            found_nearby(node, peer, addresses)
        await node.clock.sleep(DHT_SECONDS)
