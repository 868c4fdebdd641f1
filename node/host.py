"""What a node stands on: time, network, randomness, identity, logs, progress, learner. Real here, virtual in the simulator.

The node's own code (node.py and everything below it) reaches the world only through a `Host`, so that the simulator can run
exactly that code. Signals, the control socket and the discovery of peers by LAN and DHT belong to a machine, not to a node:
they are the daemon's (daemon.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..aggregation.contributions import Contributions, GossipRules
from ..protocol.clock import RealClock
from ..protocol.grpc_transport import GrpcTransport
from ..protocol.identity import Identity
from ..protocol.transport import Clock, Transport
from . import learners
from .config import Config
from .interfaces import interface_addresses
from .learners import NodeLearner
from .observe.logs import Say, set_up_logs
from .observe.progress import bar
from .store.disk import REAL_DISK, Disk


class Show(Protocol):
    """Shows progress: `show(done, total, text)`; total 0 means that the end is not known."""

    def __call__(self, done: float, total: float, text: str = "") -> None: ...


@dataclass(frozen=True, kw_only=True)
class Host:
    """The world of one node.

    Attributes:
        clock: time and blocking work.
        disk: where everything is kept.
        random_bytes: keys, nonces, seeds.
        transport: the network, for an identity.
        identity: opens (or makes) the identity kept at a path.
        logs: `logs(data_dir, level, peer_id)` gives `say`.
        interfaces: this machine's own addresses.
        progress: `with progress(title) as show`.
        learner: builds the learner that the manifest asks for.
        step_cost_s: virtual seconds of one inner step; 0 where time is real.
        contributions: decoded gossiped updates, shared by the nodes of one process, for (d, rules); None: each has its own.
    """

    clock: Clock
    disk: Disk
    random_bytes: Callable[[int], bytes]
    transport: Callable[[Identity], Transport]
    identity: Callable[[Path], Identity]
    logs: Callable[[Path, str, str], Say]
    interfaces: Callable[[], list[str]]
    progress: Callable[[str], AbstractContextManager[Show]]
    learner: Callable[[Config, str, Path, learners.Progress], NodeLearner]
    step_cost_s: float = 0.0
    contributions: Callable[[int, GossipRules], Contributions] | None = None


def real_host() -> Host:
    """This machine. Call it inside the running loop."""
    return Host(
        clock=RealClock(),
        disk=REAL_DISK,
        random_bytes=os.urandom,
        transport=GrpcTransport,
        identity=Identity.open,
        logs=set_up_logs,
        interfaces=interface_addresses,
        progress=bar,
        learner=learners.build,
    )
