"""Scenarios: a simulation written down as a table of values, and made into calls on a `Simulation`.

Covers: the tables (peers, links, faults, what is expected), who is meant by "p0..p3", building, and judging the report. Reading
the TOML file and the words for mistakes in it are in `scenario_file.py`. Everything here can be done in Python with the same
names: a fault's kind is a method of `Simulation`, its keys are the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ..node.config import NodeConfig, RunConfig
from ..node.rl.config import Table
from ..protocol.errors import ExitCode, ShoalError
from .byzantine import KINDS
from .link import Link
from .peer import Peer
from .report import Report
from .simulation import MakeLearner, Simulation

PEERS_MAX = 5000
PEER_RANGE = re.compile(r"p(\d+)\.\.p(\d+)")
Seconds = Annotated[float, Field(ge=0, le=10_000_000, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1)]
Mbps = Annotated[float, Field(gt=0)]
Who = str | list[str]
Select = Callable[[Who], list[Peer]]


class LinkTable(Table):
    """[links.NAME]: what a host's line is like. A path between two hosts takes half of each end's latency."""

    latency_ms: float | list[float] = [1.0, 3.0]
    """One way; a figure, or [low, high] for a uniform range."""
    bandwidth_mbps: Mbps | None = None
    """Megabits per second, shared among all flows of the line; absent: no limit."""
    up_mbps: Mbps | None = None
    """Where the two directions differ: home lines send slower than they receive."""
    down_mbps: Mbps | None = None
    """Where the two directions differ."""
    loss: Probability = 0.0
    """Share of messages lost. Streams retransmit: for them a loss is a delay."""
    duplicate: Probability = 0.0
    """Share of messages that arrive twice."""
    reorder: Probability = 0.0
    """Share of messages that later ones overtake."""

    @model_validator(mode="after")
    def _makes_a_link(self) -> LinkTable:
        self.build()
        return self

    def build(self) -> Link:
        latency = self.latency_ms
        if isinstance(latency, list):
            if len(latency) != 2:
                raise ValueError(f"latency_ms has {len(latency)} figures, expected one, or two: [low, high]")
            latency = (latency[0], latency[1])
        return Link(**{**self.model_dump(), "latency_ms": latency})


class PeersTable(Table):
    """[[peers]]: a group of peers that are alike. They are named p0, p1, … over all groups; p0 founds the run."""

    group: str = Field(default="", pattern=r"^([A-Za-z][A-Za-z_-]*)?$")
    """A name by which faults can mean all of them: letters, - and _."""
    count: int = Field(default=1, ge=1, le=PEERS_MAX)
    """How many."""
    link: str = ""
    """Name of their line in [links]; empty: a local network."""
    speed: float | list[float] = 1.0
    """Of their inner steps; 2 is twice as fast. A list has one figure for each peer."""
    at_s: Seconds = 0.0
    """When they are started."""
    node: NodeConfig = NodeConfig()
    """[peers.node]: settings of their nodes, as in [node] of a configuration file."""

    @model_validator(mode="after")
    def _speeds(self) -> PeersTable:
        speeds = self.speed if isinstance(self.speed, list) else [self.speed] * self.count
        if len(speeds) != self.count:
            raise ValueError(f"speed has {len(speeds)} figures for count = {self.count}; expected one, or one for each")
        if not all(0.001 <= s <= 1000 for s in speeds):
            raise ValueError(f"speed = {self.speed}, expected between 0.001 and 1000")
        return self


# --- faults -----------------------------------------------------------------------------------------------------------


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
            raise _wrong_who(
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


# --- the whole --------------------------------------------------------------------------------------------------------


class Expect(Table):
    """[expect]: what must be true at the end. That no invariant was broken is expected in any case."""

    identical: bool = True
    """All honest running peers end with one and the same state."""
    rounds_min: int = Field(default=0, ge=0)
    """Every honest running peer has come to this round."""
    running_min: int = Field(default=0, ge=0)
    """So many honest peers run at the end."""
    loss_ratio_max: float | None = Field(default=None, gt=0)
    """Last loss over first, mean over peers."""

    def unmet(self, report: Report) -> list[str]:
        """A sentence for everything that is not so."""
        said = []
        if self.identical and not report.identical:
            said.append(f"{len(set(report.state_hashes.values()))} different states or versions, expected one")
        behind = {n: r for n, r in report.rounds.items() if r < self.rounds_min}
        if behind:
            name = min(behind, key=lambda n: behind[n])
            said.append(f"{len(behind)} peers behind ({name} at round {behind[name]}), expected {self.rounds_min}")
        if self.rounds_min and not report.rounds:
            said.append(f"nobody honest runs, expected round {self.rounds_min}")
        if len(report.rounds) < self.running_min:
            said.append(f"{len(report.rounds)} honest peers run, expected at least {self.running_min}")
        if self.loss_ratio_max is not None:
            first, last = report.loss_first, report.loss_last
            # `not <=`: a loss that is no number is no success.
            if first is None or last is None or not last <= self.loss_ratio_max * first:
                said.append(f"loss went from {first} to {last}, expected at most {self.loss_ratio_max:g} of the first")
        return said


class Scenario(Table):
    """A whole file."""

    title: str = Field(min_length=1, max_length=80)
    """For people."""
    about: str = ""
    """What it shows, in a few sentences."""
    until_s: float = Field(gt=0, le=10_000_000)
    """Virtual seconds to run."""
    stride: int = Field(default=1, ge=1)
    """Events between two looks of the invariant checkers: 1 misses nothing, large swarms want more."""
    step_seconds: float = Field(default=0.5, gt=0)
    """Virtual duration of one inner step on a peer of speed 1."""
    run: RunConfig = RunConfig()
    """[run] tables, as in a configuration file; what is absent has the simulator's default, not the node's."""
    links: dict[str, LinkTable] = {}
    """[links.NAME] tables."""
    peers: list[PeersTable] = Field(min_length=1, max_length=100)
    """[[peers]] tables."""
    faults: list[AnyFault] = []
    """[[faults]] tables."""
    expect: Expect = Expect()
    """[expect]"""

    @model_validator(mode="after")
    def _links_are_known(self) -> Scenario:
        used = [g.link for g in self.peers if g.link] + [f.link for f in self.faults if isinstance(f, LinkFault)]
        for name in used:
            if name not in self.links:
                known = ", ".join(self.links) or "none"
                raise ValueError(f"link = {name!r} is not in [links]; expected one of: {known}")
        if sum(group.count for group in self.peers) > PEERS_MAX:
            raise ValueError(f"{sum(g.count for g in self.peers)} peers, expected at most {PEERS_MAX}")
        return self

    def build(self, seed: int, *, learner: MakeLearner | None = None) -> Simulation:
        """The simulation, with all peers and faults on its schedule.

        Raises ShoalError when a fault names somebody who is not there.
        """
        run = self.run.model_dump(exclude_unset=True)
        sim = Simulation(seed=seed, run=run, learner=learner, step_seconds=self.step_seconds)
        groups: dict[str, list[Peer]] = {"all": []}
        for table in self.peers:
            link = self.links[table.link].build() if table.link else None
            node = table.node.model_dump(exclude_unset=True)
            added = sim.add_peers(table.count, link=link, speed=table.speed, at_s=table.at_s, node=node)
            groups["all"] += added
            if table.group:
                groups.setdefault(table.group, []).extend(added)

        def select(who: Who) -> list[Peer]:
            return selected(who, groups)

        for fault in self.faults:
            if isinstance(fault, LinkFault):
                fault.apply_link(sim, select, self.links[fault.link].build())
            else:
                fault.apply(sim, select)
        return sim

    def play(
        self, seed: int, *, until_s: float | None = None, replay: str = "", learner: MakeLearner | None = None
    ) -> Report:
        """Build, run, judge.

        Args:
            until_s: in place of the scenario's. When it is shorter, what is expected at the end is not asked.
            replay: the command that does the same again, for the report.
            learner: makes every node's learner; default: what the run tables name.
        """
        report = self.build(seed, learner=learner).run(until_s or self.until_s, stride=self.stride)
        report.scenario, report.replay = self.title, replay or report.replay
        whole = until_s is None or until_s >= self.until_s
        report.unmet = self.expect.unmet(report) if whole else []
        return report


def selected(who: Who, groups: dict[str, list[Peer]]) -> list[Peer]:
    """Peers by name ("p3"), range ("p0..p3", both ends), group, or "all"; each once, in their order.

    Raises ShoalError for a name that nobody has.
    """
    everybody = groups["all"]
    names = {peer.name: peer for peer in everybody}
    wanted: set[str] = set()
    for word in [who] if isinstance(who, str) else who:
        range_ = PEER_RANGE.fullmatch(word)
        if range_:
            low, high = int(range_[1]), int(range_[2])
            found: Sequence[Any] = everybody[low : high + 1] if low <= high < len(everybody) else ()
        else:
            found = groups.get(word) or ([names[word]] if word in names else ())
        if not found:
            there = f"p0..p{len(everybody) - 1}" + "".join(f", {name}" for name in groups)
            raise _wrong_who(repr(word), f"expected some of {there}", "Name peers, ranges such as p0..p3, or groups.")
        wanted.update(peer.name for peer in found)
    return [peer for peer in everybody if peer.name in wanted]


def _wrong_who(found: str, values: str, todo: str) -> ShoalError:
    return ShoalError(
        "A fault of the scenario names the wrong peers",
        values=f"found {found}; {values}",
        todo=todo,
        code=ExitCode.CONFIG,
    )
