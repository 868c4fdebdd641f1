"""One simulated peer: a real node on a virtual host, over all its lives. Starts, kills, pauses and bends it.

Everything that survives a death is here (disk, identity, address, invite); everything that does not is the node's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric import ed25519

from ..node.config import Config
from ..node.host import Host, Show
from ..node.learners import NodeLearner
from ..node.node import Node
from ..node.store.journal import OwnUpdate
from ..node.swarm.hybrid import Hybrid
from ..protocol.ballot_messages import Header, parse_header
from ..protocol.errors import ShoalError
from ..protocol.identity import Identity
from ..protocol.invite import Invite
from ..protocol.wire_pb2 import Signed
from .byzantine import KINDS, Liar, bend
from .clock import SimClock
from .disk import MemoryDisk
from .transport import SimTransport

if TYPE_CHECKING:
    from .network import SimHost
    from .simulation import Simulation

PORT = 7447
# A peer that cannot get in tries again after this long, as a supervisor (systemd, a person) would.
RESTART_SECONDS = 5.0


class Peer:
    """`name` is the simulation's, `peer_id` the network's."""

    def __init__(
        self, sim: Simulation, index: int, config: Config, *, link: Any, speed: float, seed: int, step_seconds: float
    ) -> None:
        self._sim, self.index, self.config = sim, index, config
        self.name = f"p{index}"
        self.rng = random.Random(seed)
        self.identity_seed = self.rng.randbytes(32)
        self.peer_id = self._identity(Path()).peer_id
        self.speed = speed
        self._step_seconds = step_seconds
        self.disk = MemoryDisk()
        self.host: SimHost = sim.network.add_host(self.name, link=link)
        self.clock = SimClock(sim.loop, self.disk.take_delay)
        self.node: Node | None = None
        self.lives = 0
        self.byzantine: str | None = None
        self.invite: str | None = None
        self.learner: Liar | None = None
        self.logged: list[tuple[float, str, str]] = []  # warnings and errors: (at, level, text)
        self.exit: int | None = None
        self._founds = index == 0  # until its disk is lost
        self.first_incarnation = 0  # of the book that it has now
        self.disk_was_lost = False
        self.wanted = False

    @property
    def address(self) -> str:
        return f"{self.host.address}:{PORT}"

    @property
    def running(self) -> bool:
        return self.node is not None

    # ------------------------------------------------------------------------------------------------ lives

    def start(self) -> None:
        """A new process on whatever the disk holds. Nothing when it runs already."""
        if self.host.life is not None and self.wanted:
            return
        self.wanted = True
        self.lives += 1
        self.clock.reset()
        self._sim.by_process[self.host.begin_life(f"{self.name} life {self.lives}")] = self
        with self.host.inside():
            self._sim.loop.create_task(self._live(self.lives), name=f"{self.name} life {self.lives}")

    async def _live(self, life: int) -> None:
        """One process. Ends with a clean leave, or with an error that a person would see; then it is started again."""
        while self.wanted:
            invite = None if self._founds else await self._find_invite()
            node = Node(self._config(), invite, self._host(), on_ready=self._on_ready)
            self.node = node
            try:
                self.exit = await node.run()
                self._sim.note("exit", self.name, code=self.exit)
                self.wanted = False
            except ShoalError as error:
                self._sim.note("exit", self.name, code=int(error.code), error=f"{error.what}: {error.values}")
                self.logged.append((self._sim.now, "error", f"{error.what}: {error.values}"))
            finally:
                if self.node is node:
                    self.node = None
            if self.wanted:
                await self.clock.sleep(RESTART_SECONDS)

    def kill(self, *, disk_lost: bool = False) -> None:
        """SIGKILL: the network falls silent and the disk keeps what was synced, before a single task is told."""
        self.wanted = False
        if self.host.life is None:
            return
        self.disk.crash(self.rng)
        self.host.kill()
        self.node = None
        # A run whose only disk is lost is gone, and nothing can be said about it.
        others = [p for p in self._sim.peers if p is not self and p.node is not None and p.node.ready]
        if disk_lost and others:
            self.disk.lose()
            self._founds, self.disk_was_lost = False, True
            self._sim.checkers.ledger.lost.add(self.peer_id)
        self._sim.note("killed", self.name, disk_lost=disk_lost)

    def leave(self) -> None:
        """SIGTERM."""
        self.wanted = False
        if self.node is not None:
            with self.host.inside():
                self.node.leave()

    def pause(self) -> None:
        """SIGSTOP."""
        self.host.pause()

    def resume(self) -> None:
        """SIGCONT."""
        self.host.resume()

    def skew(self, seconds: float) -> None:
        """The wall clock is off."""
        self.clock.skew_s = seconds

    def turn(self, lie: str | None) -> None:
        """From now on this peer lies, or is honest again (as far as its process can be)."""
        assert lie is None or lie in KINDS, lie
        self.byzantine = lie or self.byzantine  # once a liar, never trusted by the checkers again
        if self.learner is not None:
            self.learner.kind = lie
        if lie is not None and self.node is not None and self.node.rounds is not None:
            node, ledger = self.node, self._sim.checkers.ledger
            bend(node, lie, self.rng, lambda h, p: ledger.heard(h, p, node.learner.layout.size, node.compression))

    async def _on_ready(self, node: Node) -> None:
        if self.byzantine is not None:
            self.turn(self.byzantine)
        self._sim.checkers.look_at_restart(self)
        self._sim.note("ready", self.name)

    # ------------------------------------------------------------------------------------------------ the host

    def _config(self) -> Config:
        return self.config

    async def _find_invite(self) -> Invite | None:
        """What a user would paste: an invite from anybody who is up. The one already used is used again."""
        while self.invite is None:
            for other in self._sim.peers:
                if other is not self and other.node is not None and other.node.ready and not other.byzantine:
                    self.invite = other.node.invite()
                    break
            else:
                await self.clock.sleep(0.5)
        invite = Invite.parse(self.invite)
        if self.byzantine == "stranger":
            invite = replace(invite, token=self.rng.randbytes(len(invite.token)))
        return invite

    def _host(self) -> Host:
        return Host(
            clock=self.clock,
            disk=self.disk.mount(),
            random_bytes=self.rng.randbytes,
            transport=lambda identity: SimTransport(self._sim.network, self.host, identity),
            identity=self._identity,
            logs=self._logs,
            interfaces=lambda: [self.host.address],
            progress=_quiet,
            learner=self._learner,
            step_cost_s=self._step_seconds / self.speed,
            contributions=self._sim.contributions,
        )

    def _identity(self, path: Path) -> Identity:
        return Identity(ed25519.Ed25519PrivateKey.from_private_bytes(self.identity_seed))

    def _learner(self, config: Config, peer_id: str, path: Path, progress: Any) -> NodeLearner:
        inner = self._sim.make_learner(config, peer_id, path, progress)
        self.learner = Liar(inner, self._sim.checkers.ledger.of(peer_id), random.Random(self.rng.getrandbits(64)))
        self.learner.kind = self.byzantine
        return self.learner

    def _logs(self, path: Path, level: str, peer_id: str) -> Any:
        def say(event: str, *, level: str = "info", **values: Any) -> None:
            if level in ("warning", "error"):
                self.logged.append((self._sim.now, level, f"{event} {values}"))
            if level != "debug":
                self._sim.said(self, event, level, values)

        return say

    # ------------------------------------------------------------------------------------------------ readers

    def own_updates(self) -> Iterator[tuple[OwnUpdate, Header]]:
        """What the journal holds of this peer's updates."""
        if self.node is not None:
            combined = self.node.rounds.sums.updates if isinstance(self.node.rounds, Hybrid) else ()
            for update in (*self.node.journal.updates, *combined):
                yield update, parse_header(Signed.FromString(update.signed))


@contextmanager
def _quiet(title: str) -> Iterator[Show]:
    yield lambda done, total, text="": None
