"""Hosts, the paths between them, and what is cut. Decides when and whether bytes arrive; what they mean is stream.py's.

A path's latency is drawn per frame. Bandwidth is the sender's uplink and the receiver's downlink, each a queue served first
come first served, which streams share by frames: each has at most a window of them in the queue. What fits a packet does not
wait behind bulk, as on routers with fair queueing, but uses up its share.

*Messages* (frames of "Control" streams) may be lost, duplicated and reordered, as the protocol allows; whatever else is
sent arrives once, late where something of it was lost. What a cut path does to either is stream.py's, too: messages are
lost, streams wait, and a connection whose path stays cut breaks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .link import Link, Way
from .loop import SimLoop
from .process import PROCESS, Process

if TYPE_CHECKING:
    from .stream import End
    from .transport import SimTransport

HEADER_BYTES = 60  # IP, TCP, TLS and gRPC around a frame
PACKET_BYTES = 1500
# A frame lost so often in a row goes through: loss only delays streams.
RETRANSMITS_MAX = 8
# A process inside its own machine.
LOCAL = Link(latency_ms=0.02)
# How often, and how long apart, it is looked whether a killed process has unwound.
_UNWIND_LOOKS, _UNWIND_NS = 10, 1_000_000_000

OnEvent = Callable[[str, str, str, str, int], None]
"""kind ("send", "deliver", "drop", "dup", "open", "break"), from, to, method, bytes."""


@dataclass
class Count:
    """What one path carried of one method. `bytes` are of frames, without headers, lost and duplicated ones included."""

    frames: int = 0
    bytes: int = 0
    lost: int = 0
    duplicated: int = 0


class SimHost:
    """A machine: an address, a line, and at most one process at a time.

    Attributes:
        life: the process that runs; None when none was begun or it was killed.
        silent: the machine has no power: nobody is told of what it drops, nobody is answered.
    """

    def __init__(self, network: Network, name: str, address: str, link: Link, index: int) -> None:
        self._network = network
        self.name, self.address, self.link, self.index = name, address, link, index
        self.life: Process | None = None
        self.silent = False
        self.listeners: dict[int, SimTransport] = {}
        self.transports: list[SimTransport] = []
        self.ends: dict[End, None] = {}  # of live connections
        self.paths: dict[int, Path] = {}  # to others, by their index
        self.up_rate, self.down_rate = link.up_ns_per_byte(), link.down_ns_per_byte()
        self.up_free = self.down_free = 0.0  # ns from which the line is free
        self._port = 32_768

    # ------------------------------------------------------------------------------------------------ its process

    def begin_life(self, name: str) -> Process:
        """A new process. One that is there still ends."""
        if self.life is not None:
            self.kill()
        self.life = Process(name)
        self.silent = False
        self.review()
        return self.life

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What is scheduled in here belongs to this host's process."""
        token = PROCESS.set(self.life)
        try:
            yield
        finally:
            PROCESS.reset(token)

    def pause(self) -> None:
        """SIGSTOP: nothing of it runs; what is sent to it waits; others notice by keepalive."""
        if self.life is not None:
            self._network.loop.hold(self.life)
            self.review()

    def resume(self) -> None:
        """SIGCONT."""
        if self.life is not None and self.life.paused:
            self._network.loop.release(self.life)
            self.review()

    def kill(self, *, silent: bool = False) -> None:
        """SIGKILL: the process falls silent first, then its tasks are cancelled, so that no `finally` says goodbye.

        Args:
            silent: the machine loses power; otherwise it resets the connections of its dead process.
        """
        life, self.life = self.life, None
        self.silent = silent
        if life is not None:
            life.killed = True
        for transport in self.transports:
            transport.die()
        self.transports.clear()
        self.listeners.clear()
        if life is not None:
            self._network.loop.release(life)
            for task in life.tasks():
                task.cancel()
            self._unwind(life, _UNWIND_LOOKS)

    def _unwind(self, life: Process, looks: int) -> None:
        """Let the tasks of a killed process run to their ends, then let nothing of it run any more."""
        loop = self._network.loop
        tasks = life.tasks()
        if tasks and looks:
            if looks < _UNWIND_LOOKS:
                for task in tasks:
                    task.cancel()
            now = loop.now_ns if looks == _UNWIND_LOOKS else loop.now_ns + _UNWIND_NS
            loop.post(now, self._unwind, (life, looks - 1))
            return
        if tasks:
            loop.errors.append(f"{life.name} was killed, and {', '.join(t.get_name() for t in tasks)} do not end")
        loop.bury(life)

    # ------------------------------------------------------------------------------------------------ its network

    def path_to(self, target: SimHost) -> Path:
        path = self.paths.get(target.index)
        if path is None:
            path = self.paths[target.index] = Path(self._network, self, target)
        return path

    def review(self) -> None:
        """Something changed about who can reach whom: connections are watched, or go on."""
        for end in list(self.ends):
            end.review()

    def ephemeral_port(self) -> int:
        """Of a dialed connection."""
        self._port = self._port + 1 if self._port < 60_999 else 32_768
        return self._port


class Path:
    """The way from one host to another, with what it carried. Refreshed when links or cuts change."""

    __slots__ = ("network", "source", "target", "way", "counts", "distance", "_version", "_cut", "_latency",
        "_rate", "_free")  # fmt: skip

    def __init__(self, network: Network, source: SimHost, target: SimHost) -> None:
        self.network, self.source, self.target = network, source, target
        back = target.paths.get(source.index)
        self.distance: float = back.distance if back is not None else network.rng.random()
        self.counts: dict[str, Count] = {}
        self._version = -1
        self._cut = False
        self._rate = self._free = 0.0  # of an override, in ns per byte and ns
        self._refresh()

    def _refresh(self) -> None:
        network, source, target = self.network, self.source, self.target
        self._version = network.version
        self._cut = network.is_cut(source, target)
        link = network.override_of(source, target)
        ends = (
            (link, link) if link is not None else (source.link, target.link) if source is not target else (LOCAL, LOCAL)
        )
        self.way, self._latency = network.way_of(ends, self.distance)
        self._rate = link.up_ns_per_byte() if link is not None else 0.0

    @property
    def cut(self) -> bool:
        if self._version != self.network.version:
            self._refresh()
        return self._cut

    def count(self, method: str) -> Count:
        count = self.counts.get(method)
        if count is None:
            count = self.counts[method] = Count()
        return count

    def latency_ns(self) -> float:
        """One draw, retransmissions included."""
        if self._version != self.network.version:
            self._refresh()
        latency, loss = self._latency(), self.way.loss
        if loss and self.source is not self.target:
            draw = self.network.rng.random
            for _ in range(RETRANSMITS_MAX):
                if draw() >= loss:
                    break
                latency += 2 * self._latency()
        return latency

    # ------------------------------------------------------------------------------------------------ carrying

    def carry(self, size: int, after_ns: int, arrive: Callable[..., None], args: tuple[Any, ...]) -> int:
        """Call `arrive` when a frame of a stream is there, not before `after_ns`. Never lost; order is the stream's business.

        Returns when that is, as far as it is known: bulk may have to wait for the downlink then.
        """
        return self._travel(size + HEADER_BYTES, self.latency_ns(), arrive, args, after_ns)

    def cast(self, size: int, after_ns: int, arrive: Callable[..., None], args: tuple[Any, ...]) -> tuple[int, int]:
        """Call `arrive` when a message is there: once, never, or twice.

        Args:
            after_ns: not before then, unless reordered: the arrival of the message before.

        Returns:
            How many copies arrive, and when the last one in order does.
        """
        if self.cut:
            return 0, after_ns
        way, draw = self.way, self.network.rng.random
        if way.loss and draw() < way.loss:
            return 0, after_ns
        size += HEADER_BYTES
        latency = self._latency()
        copies = 1
        if way.duplicate and draw() < way.duplicate:
            copies = 2
            self._travel(size, latency + self._latency(), arrive, args)
        if way.reorder and draw() < way.reorder:
            self._travel(size, latency + 2 * self._latency(), arrive, args)  # what follows overtakes it
            return copies, after_ns
        return copies, self._travel(size, latency, arrive, args, after_ns)

    def _travel(
        self, size: int, latency: float, arrive: Callable[..., None], args: tuple[Any, ...], after_ns: int = 0
    ) -> int:
        """Through the uplink, the distance and the downlink. Returns when a packet arrives (bulk: at the downlink)."""
        loop, source, target = self.network.loop, self.source, self.target
        if source is target:
            at_ns = max(after_ns, loop.now_ns + int(latency))
            loop.post(at_ns, arrive, args)
            return at_ns
        bulk = size > PACKET_BYTES
        at = float(loop.now_ns)
        if source.up_rate:
            cost = size * source.up_rate
            source.up_free = max(at, source.up_free) + cost
            at = source.up_free if bulk else at + cost
        if self._rate:
            cost = size * self._rate
            self._free = max(at, self._free) + cost
            at = self._free if bulk else at + cost
        at += latency
        if target.down_rate:
            if bulk:
                at_ns = max(after_ns, int(at))
                loop.post(at_ns, self._downlink, (size, arrive, args))
                return at_ns
            cost = size * target.down_rate
            target.down_free = max(float(loop.now_ns), target.down_free) + cost
            at += cost
        at_ns = max(after_ns, int(at))
        loop.post(at_ns, arrive, args)
        return at_ns

    def _downlink(self, size: int, arrive: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Bulk queues here in the order in which it arrives."""
        loop, target = self.network.loop, self.target
        target.down_free = max(float(loop.now_ns), target.down_free) + size * target.down_rate
        loop.post(int(target.down_free), arrive, args)


class Network:
    """All hosts and what lies between them.

    Attributes:
        on_event: called for everything that is sent, arrives, is lost; for traces.
        version: counts changes of links and cuts.
    """

    def __init__(self, loop: SimLoop, rng: random.Random, link: Link | None = None) -> None:
        """
        Args:
            link: of hosts that are added without one.
        """
        self.loop, self.rng = loop, rng
        self.link = link or Link()
        self.on_event: OnEvent | None = None
        self.hosts: dict[str, SimHost] = {}
        self.version = 0
        self._by_address: dict[str, SimHost] = {}
        self._cuts: dict[Hashable, tuple[frozenset[int], frozenset[int], bool]] = {}
        self._overrides: dict[Hashable, tuple[frozenset[int], frozenset[int], bool, Link]] = {}
        self._ways: dict[tuple[Link, Link], tuple[Way, Callable[[], float]]] = {}

    def add_host(self, name: str, link: Link | None = None) -> SimHost:
        """Addresses count up from 10.0.0.1. Raises ValueError for a name that is taken."""
        if name in self.hosts:
            raise ValueError(f"there is a host {name!r} already")
        number = len(self.hosts) + 1
        address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        host = SimHost(self, name, address, link or self.link, number)
        self.hosts[name] = self._by_address[address] = host
        return host

    def at_address(self, address: str) -> tuple[SimHost | None, int]:
        """Host (None: nobody has it) and port of "10.0.0.7:7447"."""
        host, _, port = address.rpartition(":")
        return self._by_address.get(host), int(port) if port.isdecimal() else 0

    # ------------------------------------------------------------------------------------------------ what is cut

    def cut(self, key: Hashable, a: Sequence[SimHost], b: Sequence[SimHost], *, one_way: bool = False) -> None:
        """Nothing passes from `a` to `b`, nor back unless `one_way`, until `mend(key)`. Cuts add up."""
        self._cuts[key] = (_indices(a), _indices(b), one_way)
        self._changed([*a, *b])

    def mend(self, key: Hashable) -> None:
        """Undo one cut; what streams held back is sent again. Nothing when there is none."""
        cut = self._cuts.pop(key, None)
        if cut is not None:
            self._changed([host for host in self.hosts.values() if host.index in cut[0] or host.index in cut[1]])

    def is_cut(self, source: SimHost, target: SimHost) -> bool:
        """Whether what `source` sends cannot reach `target`."""
        a, b = source.index, target.index
        return source is not target and any(
            (a in left and b in right) or (not one_way and a in right and b in left)
            for left, right, one_way in self._cuts.values()
        )

    def _changed(self, hosts: Sequence[SimHost]) -> None:
        self.version += 1
        for host in dict.fromkeys(hosts):
            host.review()

    # ------------------------------------------------------------------------------------------------ links

    def override(
        self, key: Hashable, a: Sequence[SimHost], b: Sequence[SimHost], link: Link, *, one_way: bool = False
    ) -> None:
        """Another link between `a` and `b`, or only from `a` to `b`, until `restore(key)`; the newest wins.

        Its bandwidth is of each path alone, and comes on top of what the hosts' own lines allow.
        """
        self._overrides.pop(key, None)
        self._overrides[key] = (_indices(a), _indices(b), one_way, link)
        self.version += 1

    def restore(self, key: Hashable) -> None:
        if self._overrides.pop(key, None) is not None:
            self.version += 1

    def override_of(self, source: SimHost, target: SimHost) -> Link | None:
        a, b = source.index, target.index
        for left, right, one_way, link in reversed(self._overrides.values()):
            if (a in left and b in right) or (not one_way and a in right and b in left):
                return link
        return None

    def way_of(self, ends: tuple[Link, Link], distance: float) -> tuple[Way, Callable[[], float]]:
        """What a path between two such ends is like, and its latency. Shared among all that are alike."""
        known = self._ways.get(ends)
        if known is None:
            way = Way.between(*ends)
            known = self._ways[ends] = (way, way.latency(self.rng, distance))
        way, latency = known
        return way, latency if way.jitter is None else way.latency(self.rng, distance)

    # ------------------------------------------------------------------------------------------------ readers

    def sent_by(self, host: SimHost) -> int:
        """Bytes of frames that this host sent."""
        return sum(count.bytes for path in host.paths.values() for count in path.counts.values())

    def bytes_by_link(self) -> list[list[object]]:
        """[from, to, bytes], largest first."""
        rows = [
            (path.source.name, path.target.name, sum(count.bytes for count in path.counts.values()))
            for host in self.hosts.values()
            for path in host.paths.values()
        ]
        return [list(row) for row in sorted((r for r in rows if r[2]), key=lambda row: (-row[2], row[0], row[1]))]

    def by_method(self) -> dict[str, Count]:
        """What all paths carried, by method."""
        total: dict[str, Count] = {}
        for host in self.hosts.values():
            for path in host.paths.values():
                for method, count in path.counts.items():
                    sum_ = total.setdefault(method, Count())
                    sum_.frames += count.frames
                    sum_.bytes += count.bytes
                    sum_.lost += count.lost
                    sum_.duplicated += count.duplicated
        return total


def _indices(hosts: Sequence[SimHost]) -> frozenset[int]:
    return frozenset(host.index for host in hosts)
