"""What discovery finds is bounded, and nothing that it brings can end the node."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.node.discovery import DHT_SECONDS, Nearby, dht_loop, found_nearby
from shoal.node.swarm import mesh as mesh_module
from shoal.node.swarm.mesh import Mesh
from shoal.protocol import limits
from shoal.protocol.errors import PeerFault

from .swarm.memory import InlineClock, run


class FullLinks:
    """The mesh's table of peers, without a place."""

    def __init__(self, **parts: Any) -> None:
        self.said: list[str] = []
        self.traffic, self.failed = None, None

    def news(self, peer: str, addresses: list[str]) -> None:
        raise PeerFault("too_many_peers", peer)

    def say(self, event: str, **values: Any) -> None:
        self.said.append(event)


def some_node(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(mesh_module, "Links", FullLinks)
    monkeypatch.setattr(mesh_module, "Dialing", lambda *parts: None)
    monkeypatch.setattr(mesh_module, "Accepting", lambda *parts: None)
    mesh = Mesh(transport=None, clock=None, me=None, random_bytes=None, rng=None)  # type: ignore[arg-type]
    return SimpleNamespace(nearby=Nearby(), mesh=mesh, members=None, addresses=["a:1"], clock=InlineClock())


def test_what_was_heard_of_longest_ago_makes_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "NEARBY_MAX", 3)
    nearby = Nearby()
    for name in ("a", "b", "c", "a", "d"):
        nearby.found(name, [f"{name}:{n}" for n in range(50)])
    assert list(nearby) == ["c", "a", "d"]
    assert all(len(addresses) == limits.ADDRESSES_MAX for addresses in nearby.values())


def test_a_full_table_of_peers_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch):
    node = some_node(monkeypatch)
    found_nearby(node, "x", ["h:1"])
    assert node.nearby == {"x": ["h:1"]}
    assert node.mesh._links.said == ["a peer is not remembered"]


def test_the_dht_is_asked_again_and_again_whatever_it_brings(monkeypatch: pytest.MonkeyPatch):
    node, asked = some_node(monkeypatch), []

    class Dht:
        async def announce(self, addresses: list[str]) -> bool:
            asked.append(addresses)
            return False

        async def find(self) -> dict[str, list[str]]:
            return {f"{len(asked)} {n}": ["h:1"] for n in range(limits.NEARBY_MAX)}

    async def main() -> None:
        loop = asyncio.ensure_future(dht_loop(node, Dht()))
        await asyncio.sleep(3.5 * DHT_SECONDS)
        assert not loop.done()
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)

    run(main())
    assert len(asked) == 4
    assert len(node.nearby) == limits.NEARBY_MAX
