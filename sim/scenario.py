"""Scenarios: a simulation written down as a table of values, and made into calls on a `Simulation`.

Covers: the tables of peers, links and what is expected, who is meant by "p0..p3", building, and judging the report.
The tables of faults are in `fault_tables.py`; reading the TOML file and the words for mistakes in it in `scenario_file.py`.
All of it can be done in Python, under the same names: a fault's kind is a method of `Simulation`, its keys are the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from ..node.config import NodeConfig, RunConfig
from ..node.rl.config import Table
from .fault_tables import AnyFault, LinkFault, Seconds, Who, wrong_who
from .link import Link
from .peer import Peer
from .report import Report
from .simulation import MakeLearner, Simulation

PEERS_MAX = 5000
PEER_RANGE = re.compile(r"p(\d+)\.\.p(\d+)")
Probability = Annotated[float, Field(ge=0, le=1)]
Mbps = Annotated[float, Field(gt=0)]


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
            raise wrong_who(repr(word), f"expected some of {there}", "Name peers, ranges such as p0..p3, or groups.")
        wanted.update(peer.name for peer in found)
    return [peer for peer in everybody if peer.name in wanted]
