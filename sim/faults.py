"""Faults as values: what happens to whom, from when until when. Each can be applied to a simulation, printed and replayed.

Faults of links (loss, latency, partitions) are link.py's and network.py's; here is their schedule, beside that of processes,
disks and clocks. A fault that ends does so by itself: `until_s` None means for good.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .link import Link

if TYPE_CHECKING:
    from .simulation import Simulation


@dataclass(frozen=True, kw_only=True)
class Fault:
    """From `at_s` until `until_s` (virtual seconds). Subclasses say what begins and what ends."""

    at_s: float
    until_s: float | None = None

    kind = "fault"

    def who(self) -> list[str]:
        """Names of the peers that it touches, for the report."""
        return []

    def begin(self, sim: Simulation) -> None: ...

    def end(self, sim: Simulation) -> None: ...

    def to_dict(self) -> dict[str, object]:
        return {"kind": self.kind, "who": self.who(), "at_s": self.at_s, "until_s": self.until_s}


@dataclass(frozen=True, kw_only=True)
class Partition(Fault):
    """Nothing passes from `a` to `b`, nor back unless `one_way`."""

    a: tuple[str, ...]
    b: tuple[str, ...]
    one_way: bool = False
    kind = "partition"

    def who(self) -> list[str]:
        return [*self.a, *self.b]

    def begin(self, sim: Simulation) -> None:
        sim.network.cut(self, sim.hosts(self.a), sim.hosts(self.b), one_way=self.one_way)

    def end(self, sim: Simulation) -> None:
        sim.network.mend(self)


@dataclass(frozen=True, kw_only=True)
class Flap(Fault):
    """A partition that comes and goes: cut for `period_s`, whole for `period_s`, and so on."""

    a: tuple[str, ...]
    b: tuple[str, ...]
    period_s: float
    kind = "flap"

    def who(self) -> list[str]:
        return [*self.a, *self.b]

    def begin(self, sim: Simulation) -> None:
        until = self.until_s if self.until_s is not None else sim.until_s
        at, cut = self.at_s, True
        while at < until:
            if cut:
                sim.at(at, lambda: sim.network.cut(self, sim.hosts(self.a), sim.hosts(self.b)))
            else:
                sim.at(at, lambda: sim.network.mend(self))
            at, cut = at + self.period_s, not cut

    def end(self, sim: Simulation) -> None:
        sim.network.mend(self)


@dataclass(frozen=True, kw_only=True)
class LinkChange(Fault):
    """Another link between `a` and `b`, both ways, for a while."""

    a: tuple[str, ...]
    b: tuple[str, ...]
    link: Link
    kind = "link"

    def who(self) -> list[str]:
        return [*self.a, *self.b]

    def begin(self, sim: Simulation) -> None:
        sim.network.override(self, sim.hosts(self.a), sim.hosts(self.b), self.link)

    def end(self, sim: Simulation) -> None:
        sim.network.restore(self)


@dataclass(frozen=True, kw_only=True)
class Kill(Fault):
    """SIGKILL at `at_s`; started again at `until_s`, with the disk it had or with none."""

    peer: str
    disk_lost: bool = False
    kind = "kill"

    def who(self) -> list[str]:
        return [self.peer]

    def begin(self, sim: Simulation) -> None:
        sim.peer(self.peer).kill(disk_lost=self.disk_lost)

    def end(self, sim: Simulation) -> None:
        sim.peer(self.peer).start()


@dataclass(frozen=True, kw_only=True)
class Pause(Fault):
    """SIGSTOP, then SIGCONT: the process does not run, and then it does as if nothing had been."""

    peer: str
    kind = "pause"

    def who(self) -> list[str]:
        return [self.peer]

    def begin(self, sim: Simulation) -> None:
        sim.peer(self.peer).pause()

    def end(self, sim: Simulation) -> None:
        sim.peer(self.peer).resume()


@dataclass(frozen=True, kw_only=True)
class Leaving(Fault):
    """SIGTERM: a clean leave; started again at `until_s`."""

    peer: str
    kind = "leave"

    def who(self) -> list[str]:
        return [self.peer]

    def begin(self, sim: Simulation) -> None:
        sim.peer(self.peer).leave()

    def end(self, sim: Simulation) -> None:
        sim.peer(self.peer).start()


@dataclass(frozen=True, kw_only=True)
class FullDisk(Fault):
    """Every write that needs more space fails with "no space left"."""

    peer: str
    kind = "full_disk"

    def who(self) -> list[str]:
        return [self.peer]

    def begin(self, sim: Simulation) -> None:
        sim.peer(self.peer).disk.fill()

    def end(self, sim: Simulation) -> None:
        sim.peer(self.peer).disk.free()


@dataclass(frozen=True, kw_only=True)
class SlowDisk(Fault):
    """Writes take so long as `mb_per_s` says."""

    peer: str
    mb_per_s: float
    kind = "slow_disk"

    def who(self) -> list[str]:
        return [self.peer]

    def begin(self, sim: Simulation) -> None:
        sim.peer(self.peer).disk.slow(self.mb_per_s)

    def end(self, sim: Simulation) -> None:
        sim.peer(self.peer).disk.slow(None)


@dataclass(frozen=True, kw_only=True)
class Skew(Fault):
    """The wall clock is off by `seconds`."""

    peer: str
    seconds: float
    kind = "skew"

    def who(self) -> list[str]:
        return [self.peer]

    def begin(self, sim: Simulation) -> None:
        sim.peer(self.peer).skew(self.seconds)

    def end(self, sim: Simulation) -> None:
        sim.peer(self.peer).skew(0.0)


@dataclass(frozen=True, kw_only=True)
class Lie(Fault):
    """The peer turns Byzantine (byzantine.py has the kinds)."""

    peer: str
    lie: str
    kind = "byzantine"

    def who(self) -> list[str]:
        return [self.peer]

    def begin(self, sim: Simulation) -> None:
        sim.peer(self.peer).turn(self.lie)

    def end(self, sim: Simulation) -> None:
        sim.peer(self.peer).turn(None)

    def to_dict(self) -> dict[str, object]:
        return {**super().to_dict(), "kind": f"byzantine: {self.lie}"}


def churn(
    peers: Sequence[str], *, mean_up_s: float, mean_down_s: float, at_s: float, until_s: float, rng: random.Random
) -> list[Fault]:
    """Kills with restarts, each peer on its own: up and down times are exponential. All are up again at `until_s`."""
    faults: list[Fault] = []
    for peer in peers:
        at = at_s + rng.expovariate(1 / mean_up_s)
        while at < until_s:
            back = min(until_s, at + rng.expovariate(1 / mean_down_s))
            faults.append(Kill(peer=peer, at_s=at, until_s=back))
            at = back + rng.expovariate(1 / mean_up_s)
    return faults
