"""[[faults]] of a scenario: one table for each method of `Simulation` that makes a fault, with the method's name and keys.

Does not know who is meant by "p0..p3" or a group: whoever applies a table passes `select`, which does (`scenario.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, field_validator

from ..node.rl.config import Table
from ..protocol.errors import ExitCode, ShoalError
from .byzantine import KINDS
from .link import Link
from .peer import Peer
from .simulation import Simulation

Seconds = Annotated[float, Field(ge=0, le=10_000_000, allow_inf_nan=False)]
Who = str | list[str]
Select = Callable[[Who], list[Peer]]


class Between(Table):
    """What two sides have in common."""

    a: Who
    """One side: peers, ranges, groups."""
    b: Who = "others"
    """The other side; "others" are all that `a` leaves."""

    def sides(self, select: Select) -> tuple[list[Peer], list[Peer]]:
        a = select(self.a)
        others = self.b == "others"
        b = [p for p in select("all") if p not in a] if others else select(self.b)
        both = sorted({p.name for p in a} & {p.name for p in b})
        if both or not b:
            raise wrong_who(
                f"a = {self.a}, b = {self.b}",
                f"{both[0]} on both sides" if both else "nobody on the side of b",
                "Give each side its own peers.",
            )
        return a, b


class Partition(Between):
    """Nothing passes between the two sides."""

    kind: Literal["partition"]
    """Both ways, or from a to b alone."""
    at_s: Seconds
    """From when."""
    heal_s: Seconds | None = None
    """Until when; absent: for good."""
    one_way: bool = False
    """Only what a sends to b is lost."""

    def apply(self, sim: Simulation, select: Select) -> None:
        a, b = self.sides(select)
        sim.partition(a, b, at_s=self.at_s, heal_s=self.heal_s, one_way=self.one_way)


class Flap(Between):
    """A partition that comes and goes."""

    kind: Literal["flap"]
    """Cut for a period, whole for a period, and so on."""
    period_s: float = Field(ge=0.1)
    """Length of either."""
    at_s: Seconds = 0.0
    """From when."""
    until_s: Seconds
    """Whole from then on."""

    def apply(self, sim: Simulation, select: Select) -> None:
        a, b = self.sides(select)
        sim.flap(a, b, period_s=self.period_s, at_s=self.at_s, until_s=self.until_s)


class LinkFault(Between):
    """Another link between the two sides."""

    kind: Literal["link"]
    """For a while, or for good."""
    link: str
    """Its name in [links]."""
    at_s: Seconds = 0.0
    """From when."""
    until_s: Seconds | None = None
    """Until when; absent: for good."""

    def apply(self, sim: Simulation, select: Select) -> None:
        raise AssertionError("links are known to the scenario alone: see Scenario.build")

    def apply_link(self, sim: Simulation, select: Select, link: Link) -> None:
        a, b = self.sides(select)
        sim.link(a, b, link, at_s=self.at_s, until_s=self.until_s)


class Each(Table):
    """What happens to each of some peers, to all at the same time."""

    who: Who
    """Peers, ranges, groups."""

    def apply(self, sim: Simulation, select: Select) -> None:
        for peer in select(self.who):
            self.apply_one(sim, peer)

    def apply_one(self, sim: Simulation, peer: Peer) -> None:
        raise AssertionError(f"{type(self).__name__} says nothing of one peer")


class Kill(Each):
    """SIGKILL."""

    kind: Literal["kill"]
    """What was not synced to disk is lost."""
    at_s: Seconds
    """When."""
    restart_s: Seconds | None = None
    """When it is started again; absent: never."""
    disk: Literal["kept", "lost"] = "kept"
    """A lost disk makes it a new incarnation."""

    def apply_one(self, sim: Simulation, peer: Peer) -> None:
        sim.kill(peer, at_s=self.at_s, restart_s=self.restart_s, disk=self.disk)


class Pause(Each):
    """SIGSTOP and SIGCONT."""

    kind: Literal["pause"]
    """The process does not run, and then goes on as if nothing had been."""
    at_s: Seconds
    """When it stops."""
    resume_s: Seconds | None = None
    """When it goes on; absent: never."""

    def apply_one(self, sim: Simulation, peer: Peer) -> None:
        sim.pause(peer, at_s=self.at_s, resume_s=self.resume_s)


class Leave(Each):
    """SIGTERM: a clean leave."""

    kind: Literal["leave"]
    """It pushes what it learned and says goodbye."""
    at_s: Seconds
    """When."""
    restart_s: Seconds | None = None
    """When it is started again; absent: never."""

    def apply_one(self, sim: Simulation, peer: Peer) -> None:
        sim.leave(peer, at_s=self.at_s, restart_s=self.restart_s)


class FillDisk(Each):
    """No space left on the disk."""

    kind: Literal["fill_disk"]
    """Writes that need more space fail."""
    at_s: Seconds = 0.0
    """From when."""
    until_s: Seconds | None = None
    """Until when; absent: for good."""

    def apply_one(self, sim: Simulation, peer: Peer) -> None:
        sim.fill_disk(peer, at_s=self.at_s, until_s=self.until_s)


class SlowDisk(Each):
    """A slow disk."""

    kind: Literal["slow_disk"]
    """Writes take their time."""
    mb_per_s: float = Field(gt=0)
    """Megabytes a second."""
    at_s: Seconds = 0.0
    """From when."""
    until_s: Seconds | None = None
    """Until when; absent: for good."""

    def apply_one(self, sim: Simulation, peer: Peer) -> None:
        sim.slow_disk(peer, mb_per_s=self.mb_per_s, at_s=self.at_s, until_s=self.until_s)


class Skew(Each):
    """A wall clock that is off."""

    kind: Literal["skew"]
    """Timers are right all the same, as with a wrong date."""
    seconds: float = Field(ge=-1e9, le=1e9)
    """Ahead; negative: behind."""
    at_s: Seconds = 0.0
    """From when."""
    until_s: Seconds | None = None
    """Until when; absent: for good."""

    def apply_one(self, sim: Simulation, peer: Peer) -> None:
        sim.skew(peer, self.seconds, at_s=self.at_s, until_s=self.until_s)


class Churn(Each):
    """Peers that die and come back at random, each on its own."""

    kind: Literal["churn"]
    """Kills; the disks are kept."""
    mean_up_s: float = Field(gt=0)
    """Mean of the exponential time between coming back and dying."""
    mean_down_s: float = Field(gt=0)
    """Mean of the exponential time between dying and coming back."""
    at_s: Seconds = 0.0
    """From when."""
    until_s: Seconds
    """All are up again from then on."""

    def apply(self, sim: Simulation, select: Select) -> None:
        times: dict[str, float] = self.model_dump(exclude={"who", "kind"})
        sim.churn(select(self.who), **times)


class Byzantine(Each):
    """A peer that lies."""

    kind: Literal["byzantine"]
    """With a valid identity, and signed."""
    lie: str
    """How."""
    at_s: Seconds = 0.0
    """From when."""
    until_s: Seconds | None = None
    """Until when; absent: for good."""

    @field_validator("lie")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in KINDS:
            raise ValueError(f"expected one of {', '.join(KINDS)}")
        return value

    def apply_one(self, sim: Simulation, peer: Peer) -> None:
        sim.byzantine(peer, self.lie, at_s=self.at_s, until_s=self.until_s)


AnyFault = Annotated[
    Partition | Flap | LinkFault | Kill | Pause | Leave | FillDisk | SlowDisk | Skew | Churn | Byzantine,
    Field(discriminator="kind"),
]


def wrong_who(found: str, values: str, todo: str) -> ShoalError:
    return ShoalError(
        "A fault of the scenario names the wrong peers",
        values=f"found {found}; {values}",
        todo=todo,
        code=ExitCode.CONFIG,
    )
