"""A swarm in one process: real nodes on virtual hosts, faults on a schedule, checkers after every event, a report at the end.

    sim = Simulation(seed=7)
    peers = sim.add_peers(8, link=Link(latency_ms=(20, 80), bandwidth_mbps=100, loss=0.01))
    sim.partition(peers[:4], peers[4:], at_s=60, heal_s=180)
    sim.kill(peers[2], at_s=30, restart_s=90)
    report = sim.run(until_s=600)
    assert report.identical and not report.violations

One seed decides everything: keys, nonces, data, loss, latencies. The same seed gives the same trace, byte for byte, on one
machine type. Only transport, clock, disk and (if wanted) the learner are not the daemon's.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..aggregation.compress import Compression
from ..aggregation.contributions import Contributions, GossipRules
from ..node import learners
from ..node.config import Config, NodeConfig, RunConfig
from ..node.learners import NodeLearner
from ..node.node import Node
from ..node.swarm.gossip import Gossip
from ..node.swarm.rounds import Rounds
from ..node.swarm.state import SharedState
from . import faults as f
from .faults import Fault
from .invariants import Checkers
from .link import Link
from .loop import SimLoop
from .network import Network, SimHost
from .peer import Peer
from .process import Process
from .report import Report

MakeLearner = Callable[[Config, str, Path, Any], NodeLearner]
# The state of all peers is sampled this often for the report's curves.
SAMPLE_SECONDS = 1.0
SAMPLES_MAX = 2000
SPANS_MAX = 20_000
EPOCH = 1_800_000_000.0  # the wall clock at the start

_DEFAULT_RUN: dict[str, Any] = {
    "name": "simulated",
    "learner": "quadratic",
    "compression": "0.25/8",
    "quadratic": {"dimension": 32},
    "sync": {"target_samples": 256, "round_seconds_max": 30.0},
    "membership": {"preset": "lan"},
}


class Simulation:
    """Build it, `run` it once."""

    def __init__(
        self,
        seed: int = 0,
        *,
        run: dict[str, Any] | None = None,
        learner: MakeLearner | None = None,
        step_seconds: float = 0.5,
        link: Link | None = None,
    ) -> None:
        """
        Args:
            seed: of everything random.
            run: `[run]` tables over the simulator's defaults (a small quadratic, rounds of 256 samples).
            learner: makes a node's learner from (config, peer id, data directory, progress); default: the manifest's.
            step_seconds: virtual duration of one inner step on a peer of speed 1.
            link: between any two peers, unless `add_peers` says otherwise.
        """
        self.seed = seed
        self.rng = random.Random(f"shoal.sim {seed}")
        self.run_config = RunConfig.model_validate(_merged({**_DEFAULT_RUN, "seed": seed % 2**31}, run or {}))
        self.make_learner: MakeLearner = learner or learners.build
        self._step_seconds = step_seconds
        self.loop = SimLoop()
        self.network = Network(self.loop, random.Random(self.rng.getrandbits(64)), link=link or Link())
        self.network.on_event = self._network_event
        self.checkers = Checkers(self)
        self._contributions: dict[tuple[int, Compression, float], Contributions] = {}
        self.peers: list[Peer] = []
        self.faults: list[Fault] = []
        self.until_s = 0.0
        self.fault_end_s = 0.0
        self._trace = hashlib.sha256()
        self.by_process: dict[Process | None, Peer] = {}
        self._stride = 1
        self._series: dict[str, dict[str, list[list[float]]]] = {
            k: {} for k in ("loss", "reward", "lag", "bytes", "round")
        }
        self._membership: list[list[Any]] = []
        self._spans: list[list[Any]] = []
        self._open_spans: dict[str, tuple[str, float, int]] = {}
        self._errors: list[str] = []
        self._ran = False

    def contributions(self, d: int, rules: GossipRules) -> Contributions:
        """Decoded updates, shared by all peers: one that all receive is decoded and checked once."""
        key = (d, rules.compression, rules.step_max)
        return self._contributions.setdefault(key, Contributions(d, rules))

    # ------------------------------------------------------------------------------------------------ building

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self.loop.time()

    def add_peers(
        self,
        count: int,
        *,
        link: Link | None = None,
        speed: float | Sequence[float] = 1.0,
        at_s: float = 0.0,
        node: dict[str, Any] | None = None,
    ) -> list[Peer]:
        """More peers. The first of all founds the run; the others join with an invite as soon as there is one.

        Args:
            link: their uplink and downlink; default the simulation's.
            speed: of their inner steps, one figure or one for each; 2 is twice as fast.
            at_s: when they are started.
            node: `[node]` settings.
        """
        added = []
        for number in range(count):
            index = len(self.peers)
            settings = {
                "data_dir": f"/p{index}",
                "lan_discovery": False,
                "exit_when_finished": False,
                "log_level": "info",
            }
            config = Config(run=self.run_config, node=NodeConfig.model_validate({**settings, **(node or {})}))
            peer = Peer(
                self,
                index,
                config,
                link=link,
                speed=speed if isinstance(speed, int | float) else speed[number],
                seed=self.rng.getrandbits(64),
                step_seconds=self._step_seconds,
            )
            self.peers.append(peer)
            self.at(at_s, peer.start)
            added.append(peer)
        return added

    def at(self, at_s: float, call: Callable[[], None]) -> None:
        """Call something at a virtual time."""
        self.loop.call_at(at_s, call)

    def add(self, *faults: Fault) -> None:
        """Put faults on the schedule."""
        for fault in faults:
            self.faults.append(fault)
            self.at(fault.at_s, lambda fault=fault: self._begin(fault))
            if fault.until_s is not None:
                self.at(fault.until_s, lambda fault=fault: self._end(fault))

    def _begin(self, fault: Fault) -> None:
        self.note("fault", "", fault=fault.kind, who=fault.who())
        fault.begin(self)

    def _end(self, fault: Fault) -> None:
        self.note("fault over", "", fault=fault.kind, who=fault.who())
        fault.end(self)

    def partition(
        self, a: Sequence[Peer], b: Sequence[Peer], *, at_s: float, heal_s: float | None = None, one_way: bool = False
    ) -> None:
        """Nothing passes between `a` and `b` (or only from `b` to `a`)."""
        self.add(f.Partition(a=names(a), b=names(b), at_s=at_s, until_s=heal_s, one_way=one_way))

    def flap(self, a: Sequence[Peer], b: Sequence[Peer], *, period_s: float, at_s: float, until_s: float) -> None:
        """A partition that comes and goes."""
        self.add(f.Flap(a=names(a), b=names(b), period_s=period_s, at_s=at_s, until_s=until_s))

    def link(
        self, a: Sequence[Peer], b: Sequence[Peer], link: Link, *, at_s: float = 0.0, until_s: float | None = None
    ) -> None:
        """Another link between `a` and `b`."""
        self.add(f.LinkChange(a=names(a), b=names(b), link=link, at_s=at_s, until_s=until_s))

    def kill(self, peer: Peer, *, at_s: float, restart_s: float | None = None, disk: str = "kept") -> None:
        """SIGKILL; `disk`: "kept" or "lost"."""
        self.add(f.Kill(peer=peer.name, at_s=at_s, until_s=restart_s, disk_lost=disk == "lost"))

    def pause(self, peer: Peer, *, at_s: float, resume_s: float | None = None) -> None:
        """SIGSTOP and SIGCONT."""
        self.add(f.Pause(peer=peer.name, at_s=at_s, until_s=resume_s))

    def leave(self, peer: Peer, *, at_s: float, restart_s: float | None = None) -> None:
        """SIGTERM."""
        self.add(f.Leaving(peer=peer.name, at_s=at_s, until_s=restart_s))

    def fill_disk(self, peer: Peer, *, at_s: float, until_s: float | None = None) -> None:
        """No space left."""
        self.add(f.FullDisk(peer=peer.name, at_s=at_s, until_s=until_s))

    def slow_disk(self, peer: Peer, *, mb_per_s: float, at_s: float, until_s: float | None = None) -> None:
        """Writes take their time."""
        self.add(f.SlowDisk(peer=peer.name, mb_per_s=mb_per_s, at_s=at_s, until_s=until_s))

    def skew(self, peer: Peer, seconds: float, *, at_s: float = 0.0, until_s: float | None = None) -> None:
        """The wall clock is off."""
        self.add(f.Skew(peer=peer.name, seconds=seconds, at_s=at_s, until_s=until_s))

    def churn(
        self, peers: Sequence[Peer], *, mean_up_s: float, mean_down_s: float, at_s: float, until_s: float
    ) -> None:
        """Peers die and come back at random."""
        rng = random.Random(self.rng.getrandbits(64))
        self.add(
            *f.churn(names(peers), mean_up_s=mean_up_s, mean_down_s=mean_down_s, at_s=at_s, until_s=until_s, rng=rng)
        )

    def byzantine(self, peer: Peer, kind: str, *, at_s: float = 0.0, until_s: float | None = None) -> None:
        """The peer lies; byzantine.py has the kinds."""
        self.add(f.Lie(peer=peer.name, lie=kind, at_s=at_s, until_s=until_s))

    # ------------------------------------------------------------------------------------------------ running

    def run(
        self,
        until_s: float,
        *,
        stride: int = 1,
        until: Callable[[], bool] | None = None,
        settle_s: float = 60.0,
        must_settle: bool = False,
    ) -> Report:
        """Run the schedule to `until_s` virtual seconds, then on to a moment at which all peers have one state, and report.

        Args:
            stride: events between two looks of the invariant checkers; 1 looks after every one.
            until: ends the run early once true (looked at every virtual second).
            settle_s: how long that moment is waited for: at any one instant some peers are a commit ahead of others.
            must_settle: that it does not come, or that no round was made meanwhile, is a violation.
        """
        if self._ran:
            raise RuntimeError("a simulation runs once; build another for another run")
        self._ran = True
        self.until_s = until_s
        self._stride = max(1, stride)
        started = time.perf_counter()
        self.loop.after_step, self.loop.stride = self._after_step, self._stride
        self._sample_every(max(SAMPLE_SECONDS, until_s / SAMPLES_MAX))
        second = 0.0
        with _rare_collections():
            while self.now < until_s and not (until is not None and until()):
                second = min(until_s, second + 1.0)
                self.loop.run_until(second)
            self._settle(settle_s, must_settle)
            self.checkers.conclude()
        report = self._report(time.perf_counter() - started)
        self._close()
        return report

    def _settle(self, seconds: float, must: bool) -> None:
        before = max((s.round for s in self.running_states()), default=0)
        end, at = self.now + seconds, self.now
        self.until_s = end

        def settled() -> bool:
            states = self.running_states()
            further = not must or min((s.round for s in states), default=0) > before
            return further and len(states) == self._expected() and self.identical and self._all_take_part()

        while at < end and not settled():
            at = min(end, at + 0.05)
            self.loop.run_until(at)
            if at > end - 0.8 * seconds:
                self._quiet()
        if must and not settled():
            rounds = {p.name: p.node.rounds.state.round for p in self.peers if p.node and p.node.rounds}
            text = f"{seconds:.0f} s after the last fault: rounds {rounds} (from {before}), identical: {self.identical}"
            self.checkers.broken(4, "", f"{text}, all take part: {self._all_take_part()}")

    def _quiet(self) -> None:
        """Gossip never rests while everybody publishes: for the comparison nobody does."""
        for peer in self.peers:
            if peer.node is not None and isinstance(peer.node.rounds, Gossip):
                peer.node.rounds.quiet = True

    def _all_take_part(self) -> bool:
        """Ring mode: who only follows the others' commits is not a member."""
        return all(
            p.peer_id in p.node.rounds.state.electorate
            for p in self.peers
            if p.node is not None and isinstance(p.node.rounds, Rounds) and not p.byzantine
        )

    def _expected(self) -> int:
        """Honest peers that should be running by now."""
        return sum(p.wanted and not p.byzantine for p in self.peers)

    def _after_step(self) -> None:
        """What a callback changed, it changed in its own process."""
        if self._stride > 1:
            self.checkers.look()
        elif (peer := self.by_process.get(self.loop.ran)) is not None:
            self.checkers.look_at(peer)

    def _sample_every(self, seconds: float) -> None:
        self._sample()
        if self.now < self.until_s:
            self.loop.call_at(self.now + seconds, lambda: self._sample_every(seconds))

    def _close(self) -> None:
        for peer in self.peers:
            peer.kill()
        self.loop.finish()

    # ------------------------------------------------------------------------------------------------ what is seen

    def _network_event(self, kind: str, source: str, target: str, method: str, size: int) -> None:
        self._trace.update(f"{self.loop.now_ns} {kind} {source} {target} {method} {size}\n".encode())

    def note(self, what: str, peer: str, **values: Any) -> None:
        """An event of the simulation itself."""
        self._trace.update(f"{self.loop.now_ns} {what} {peer} {json.dumps(values, sort_keys=True)}\n".encode())

    def said(self, peer: Peer, event: str, level: str, values: dict[str, Any]) -> None:
        """A log line of a node."""
        self._trace.update(f"{self.loop.now_ns} {peer.name} {event} {sorted(map(str, values.items()))}\n".encode())
        if event == "update published":
            self.checkers.heard_of(peer)  # whatever the stride: its journal may not keep it until the next look
        if event == "member" and len(self._membership) < SPANS_MAX:
            self._membership.append([round(self.now, 3), peer.name, self._name_of(values["member"]), values["now"]])

    def _name_of(self, peer_end: str) -> str:
        return next((p.name for p in self.peers if p.peer_id.endswith(peer_end)), peer_end)

    def _sample(self) -> None:
        newest = max((_round(p.node) for p in self.peers if not p.byzantine), default=0)
        for peer in self.peers:
            node = peer.node
            if node is None or node.rounds is None:
                self._close_span(peer.name)
                continue
            at, progress, round_ = round(self.now, 3), node.rounds.progress, _round(node)
            self._point("lag", peer, at, newest - round_)
            self._point("round", peer, at, round_)
            self._point("bytes", peer, at, sum(node.mesh.traffic.sent.values()))
            for name in ("loss", "reward"):
                if name in progress.metrics:
                    self._point(name, peer, at, progress.metrics[name])
            self._span(peer.name, progress.phase, round_ + 1)

    def _point(self, series: str, peer: Peer, at: float, value: float) -> None:
        self._series[series].setdefault(peer.name, []).append([at, float(value)])

    def _span(self, name: str, phase: str, round_: int) -> None:
        before = self._open_spans.get(name)
        if before is None or (before[0], before[2]) != (phase, round_):
            self._close_span(name)
            self._open_spans[name] = (phase, self.now, round_)

    def _close_span(self, name: str) -> None:
        before = self._open_spans.pop(name, None)
        if before is not None and len(self._spans) < SPANS_MAX:
            self._spans.append([name, before[0], round(before[1], 3), round(self.now, 3), before[2]])

    # ------------------------------------------------------------------------------------------------ readers

    def peer(self, name: str) -> Peer:
        return next(p for p in self.peers if p.name == name)

    def hosts(self, wanted: Sequence[str]) -> list[SimHost]:
        return [self.peer(name).host for name in wanted]

    def running_states(self) -> list[SharedState]:
        """States of the honest peers that run."""
        return [
            p.node.rounds.state
            for p in self.peers
            if p.node is not None and p.node.rounds is not None and not p.byzantine
        ]

    @property
    def forgers(self) -> set[str]:
        """Who signs no roster."""
        return {p.peer_id for p in self.peers if p.byzantine == "forge"}

    def is_admitted(self, peer_id: str) -> bool:
        return any(p.peer_id == peer_id and p.byzantine != "stranger" for p in self.peers)

    def conflicts_logged(self) -> bool:
        """Whether any node ever said that two versions were concurrent."""
        return any("CONCURRENT" in text for p in self.peers for _, _, text in p.logged)

    @property
    def identical(self) -> bool:
        """All honest running peers have one and the same state."""
        states = self.running_states()
        return len({(s.hash, s.lineage, s.vector.hash()) for s in states}) == 1

    def _report(self, wall_seconds: float) -> Report:
        for name in list(self._open_spans):
            self._close_span(name)
        honest = [p for p in self.peers if not p.byzantine and p.node is not None and p.node.rounds is not None]
        losses = [[v for _, v in self._series["loss"].get(p.name, [])] for p in honest]
        losses = [values for values in losses if values]
        self._errors += [text for text in self.loop.errors]
        return Report(
            seed=self.seed,
            until_s=self.now,
            peers=[{"name": p.name, "peer_id": p.peer_id} for p in self.peers],
            identical=self.identical,
            violations=[v.to_dict() for v in self.checkers.violations],
            trace_hash=self._trace.hexdigest(),
            events=self.loop.events,
            wall_seconds=wall_seconds,
            loss_first=_mean([v[0] for v in losses]),
            loss_last=_mean([v[-1] for v in losses]),
            reward_last=_mean([s[-1][1] for p in honest if (s := self._series["reward"].get(p.name))]),
            bytes_sent={p.name: self.network.sent_by(p.host) for p in self.peers},
            bytes_by_link=self.network.bytes_by_link(),
            state_hashes={p.name: p.node.rounds.state.hash.hex() for p in honest if p.node and p.node.rounds},
            rounds={p.name: p.node.rounds.state.round for p in honest if p.node and p.node.rounds},
            faults=[fault.to_dict() for fault in self.faults],
            series=self._series,
            membership=self._membership,
            spans=self._spans,
            errors=self._errors,
            replay="",
        )


@contextmanager
def _rare_collections() -> Iterator[None]:
    """The garbage collector looks more rarely: a large swarm is millions of objects that stay."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _round(node: Node | None) -> int:
    """Of its shared state, without making one: in gossip mode that costs something."""
    if node is None or node.rounds is None:
        return 0
    return node.rounds.log.included if isinstance(node.rounds, Gossip) else node.rounds.state.round


def names(peers: Sequence[Peer]) -> tuple[str, ...]:
    return tuple(p.name for p in peers)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` wins, table by table."""
    merged = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both_tables else value
    return merged
