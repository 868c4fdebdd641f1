"""Membership in large swarms: how soon a death is noticed, and how often the living are buried, by loss and slowness.

The real state machine of every peer over the simulated network, without connections, signatures or learners: a message is a
datagram. Settings are the "lan" preset's: a probe a second, 0.5 s for a direct ack, 3 helpers, suspicion 4 · max(1, log10 n)
intervals at least and four times that at most. Peers begin with everybody's word and nothing left to tell.

* *Detection*: peers are killed one after another; the time until the first member suspects one, until the first calls it
  dead, and until all do. SWIM (Das et al. 2002) expects the first suspicion e/(e-1) = 1.58 periods after the failure, when
  everybody probes one of all others at random; here neighbours take turns.
* *False positives*: verdicts "dead" about peers that live, each observer's counted, per peer-hour of all observers; and
  accusations, in which a verdict is not hearsay but came from the observer's own timeout.
* *Slow*: 5 % of the peers stop for SLOW_SECONDS (exponential) and run as long in between; what arrives waits. Verdicts about
  slow peers and about others are told apart (Lifeguard's FP and FP-). With `--blocked` only their messages stop, both ways, and
  their timers go on, as in Lifeguard's experiments: then they accuse others of what is their own silence.
* *Healing*: a mass restart (all but one get a new process within five seconds, with nobody's word but that one's), and a
  partition into halves; the time until everybody sees everybody alive.

* *Plain SWIM*: `--variant` runs any of these with Lifeguard's parts switched off ("swim": no local health, a fixed suspicion
  timeout, no word to the suspect that it is one), or without what this repository adds either ("bare": others' verdicts are
  believed at once, and a process takes no account of having stood still).

    python benchmarks/membership.py detection false slow restart partition --peers 100 [--figures docs/scale/membership.json]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.protocol import limits
from shoal.protocol.membership import (
    PRESETS,
    Changed,
    Event,
    Introduced,
    Kind,
    Membership,
    Message,
    Received,
    Record,
    Send,
    State,
    Tick,
)
from shoal.protocol.membership_table import Member
from shoal.protocol.rumours import retransmits
from shoal.protocol.suspicion import Suspicion
from shoal.sim.link import Link
from shoal.sim.loop import SimLoop
from shoal.sim.network import Network, SimHost
from shoal.sim.process import SimHandle

LAN = PRESETS["lan"]
LATENCY_MS = (5.0, 50.0)
MESSAGE_BYTES, RECORD_BYTES = 60, 250  # about what they take on the wire
SLOW_SHARE, SLOW_SECONDS = 0.05, 4.0
ROUNDING_SECONDS = 1e-6


def sign(record: Record) -> Record:
    """Signed by its own text: nobody lies here."""
    return replace(record, signed=f"{record.peer}|{record.state}|{record.life}|{record.reporter}".encode())


class Swim(Membership):
    """The same state machine without Lifeguard. Together with FIXED, which switches off the parts that are settings."""

    FIXED = replace(LAN, awareness_max=0, suspicion_max_mult=1.0)

    def _suspect(self, now: float, member: Member, report: Record, reason: str) -> None:
        super()._suspect(now, member, report, reason)
        if member.suspicion is not None:
            member.suspicion.asked = True  # nobody asks

    def _ask(self, peer: str, suspicion: Suspicion) -> None:
        """No buddy: a suspect hears of it as everybody does."""

    def _send(self, to: str, message: Message, reason: str, first: Iterable[Record] = ()) -> None:
        """With `first` and the least told, whoever it is about."""
        chosen = dict.fromkeys(first)
        room = limits.RUMOURS_PER_MESSAGE_MAX - len(chosen)
        for peer, report in self._rumours.pick(room, retransmits(self.config.retransmit_mult, self.size)):
            record = self._lookup(peer, report)
            if record is not None and record.signed:
                chosen[record] = None
        self._out.append(Send(to, replace(message, rumours=tuple(chosen)), reason))


class BareSwim(Swim):
    """Das et al. 2002 as it stands: others' verdicts are believed, and no process knows that it stood still."""

    def _suspect(self, now: float, member: Member, report: Record, reason: str) -> None:
        if report.state is State.DEAD and member.state in (State.ALIVE, State.SUSPECT):
            return self._bury(now, member, report, reason)
        super()._suspect(now, member, report, reason)

    def _account_for_a_stop(self, now: float) -> None:
        self._last_tick, self._promised = now, float("inf")


VARIANTS: dict[str, type[Membership]] = {"ours": Membership, "swim": Swim, "bare": BareSwim}


class Peer:
    """One process: a state machine that ticks when it is due."""

    def __init__(self, swarm: Swarm, name: str, host: SimHost, boot: int) -> None:
        self.swarm, self.name, self.host = swarm, name, host
        me = Record(name, State.ALIVE, 1, 1, b"%016d" % boot, (f"{host.address}:{boot}",))
        config = LAN if swarm.machine is Membership else Swim.FIXED
        self.machine = swarm.machine(me, config, random.Random(swarm.rng.getrandbits(64)), sign)
        self.running, self.stopped = True, False
        self.backlog: list[Event] = []
        self.unsent: list[Send] = []
        self._timer: SimHandle | None = None

    def handle(self, event: Event) -> None:
        if not self.running:
            return
        swarm = self.swarm
        if self.stopped and not (swarm.blocked and isinstance(event, Tick)):
            self.backlog.append(event)
            return
        for action in self.machine.handle(swarm.now, event):
            if isinstance(action, Send) and self.stopped:
                self.unsent.append(action)
            elif isinstance(action, Send):
                swarm.send(self, action.to, action.message)
            elif isinstance(action, Changed):
                swarm.changed(self.name, action)
        due_ns = int((self.machine.due() + ROUNDING_SECONDS) * 1e9)
        if self._timer is None or due_ns < self._timer.at_ns:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = swarm.loop.post(max(due_ns, swarm.loop.now_ns), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.handle(Tick())

    def resume(self) -> None:
        self.stopped = False
        backlog, self.backlog = self.backlog, []
        unsent, self.unsent = self.unsent, []
        for action in unsent:
            self.swarm.send(self, action.to, action.message)
        self.handle(Tick())
        for event in backlog:
            if not isinstance(event, Tick):
                self.handle(event)


class Swarm:
    """`changes`: (at, observer, change) of everybody."""

    def __init__(
        self,
        n: int,
        seed: int,
        *,
        loss: float = 0.0,
        acquainted: bool = True,
        machine: type[Membership] = Membership,
        blocked: bool = False,
    ) -> None:
        """`blocked`: peers that stop only send and receive nothing; their timers go on."""
        self.machine, self.blocked = machine, blocked
        self.rng = random.Random(f"membership {seed}")
        self.loop = SimLoop()
        link = Link(latency_ms=LATENCY_MS, loss=loss)
        self.network = Network(self.loop, random.Random(self.rng.getrandbits(64)), link)
        self.changes: list[tuple[float, str, Changed]] = []
        self.sent = 0
        self.peers: dict[str, Peer] = {}
        self._boots = 0
        for index in range(n):
            self.start(f"p{index:04d}")
        if acquainted:
            self._acquaint()

    @property
    def now(self) -> float:
        return self.loop.time()

    def start(self, name: str) -> Peer:
        """A new process, in place of an older one."""
        self._boots += 1
        host = self.network.hosts.get(name) or self.network.add_host(name)
        peer = self.peers[name] = Peer(self, name, host, self._boots)
        self.loop.post(self.loop.now_ns + int(self.rng.random() * 1e9), peer.handle, (Tick(),))
        return peer

    def _acquaint(self) -> None:
        """Everybody has everybody's word, and all of it was told long ago."""
        words, page = [p.machine.me for p in self.peers.values()], limits.RUMOURS_PER_MESSAGE_MAX
        first = next(iter(self.peers))
        for peer in self.peers.values():
            for at in range(0, len(words), page):
                peer.machine.handle(
                    0.0, Received(first, Message(Kind.SYNC_REPLY, rumours=tuple(words[at : at + page])))
                )
            for key in list(peer.machine._rumours._told):
                peer.machine._rumours.drop(key)

    def send(self, sender: Peer, to: str, message: Message) -> None:
        target = self.peers[to]
        size = MESSAGE_BYTES + RECORD_BYTES * len(message.rumours)
        self.sent += 1
        sender.host.path_to(target.host).cast(size, 0, self._arrive, (target, sender.name, message))

    def _arrive(self, target: Peer, sender: str, message: Message) -> None:
        if self.peers[target.name] is target and not self.peers[sender].host.path_to(target.host).cut:
            target.handle(Received(sender, message))

    def changed(self, observer: str, change: Changed) -> None:
        self.changes.append((self.now, observer, change))

    def run(self, seconds: float) -> None:
        self.loop.run_until(self.now + seconds)

    def until(self, condition: Callable[[], bool], seconds_max: float) -> float | None:
        """Seconds until it holds, to a tenth; None when it does not in time."""
        started = self.now
        while not condition():
            if self.now - started >= seconds_max:
                return None
            self.run(0.1)
        return self.now - started

    def whole(self) -> bool:
        """Everybody sees everybody alive and nobody suspect."""
        everybody = len(self.peers) - 1
        tables = (p.machine._table for p in self.peers.values())
        return all(len(t.alive) == everybody and not t.suspects for t in tables)

    def slow_down(self, names: list[str]) -> None:
        """They stop and go on for ever, each in its own time."""
        for name in names:
            self._go_on(self.peers[name])

    def _go_on(self, peer: Peer) -> None:
        peer.resume()
        after = self.rng.expovariate(1 / SLOW_SECONDS)
        self.loop.post(self.loop.now_ns + int(after * 1e9), self._stop, (peer,))

    def _stop(self, peer: Peer) -> None:
        peer.stopped = True
        after = self.rng.expovariate(1 / SLOW_SECONDS)
        self.loop.post(self.loop.now_ns + int(after * 1e9), self._go_on, (peer,))


# --- what is measured -------------------------------------------------------------------------------------------------


def detection(n: int, seed: int, machine: type[Membership], kills: int = 20) -> dict[str, Any]:
    swarm = Swarm(n, seed, machine=machine)
    swarm.run(10.0)
    suspected, dead, by_all = [], [], []
    for _ in range(kills):
        victim = swarm.rng.choice(sorted(p.name for p in swarm.peers.values() if p.running))
        swarm.run(swarm.rng.random())
        swarm.peers[victim].running = False
        swarm.changes.clear()
        at, others = swarm.now, sum(p.running for p in swarm.peers.values())

        def buried(victim: str = victim, others: int = others) -> bool:
            return sum(c.peer == victim and c.new is State.DEAD for _, _, c in swarm.changes) >= others

        if swarm.until(buried, 120.0) is None:
            raise RuntimeError(f"{victim} is not dead for all after 120 s")
        times = {s: [t - at for t, _, c in swarm.changes if c.peer == victim and c.new is s] for s in State}
        suspected.append(min(times[State.SUSPECT]))
        dead.append(min(times[State.DEAD]))
        by_all.append(max(times[State.DEAD]))
    return {
        "kills": kills,
        "first_suspicion_s": summary(suspected),
        "first_death_s": summary(dead),
        "dead_for_all_s": summary(by_all),
        "swim_expected_first_suspicion_periods": 1.58,
    }


def summary(values: list[float]) -> dict[str, float]:
    found = {"median": statistics.median(values), "mean": statistics.mean(values), "max": max(values)}
    return {name: round(value, 2) for name, value in found.items()}


def false_positives(
    n: int, seed: int, machine: type[Membership], loss: float, slow: bool, minutes: float, blocked: bool = False
) -> dict[str, Any]:
    swarm = Swarm(n, seed, loss=loss, machine=machine, blocked=blocked)
    slow_ones = swarm.rng.sample(sorted(swarm.peers), round(SLOW_SHARE * n)) if slow else []
    swarm.run(10.0)
    swarm.slow_down(slow_ones)
    swarm.run(30.0)
    swarm.changes.clear()
    sent = swarm.sent
    swarm.run(60.0 * minutes)
    hours = n * minutes / 60.0
    counts: Counter[str] = Counter()
    for _, observer, change in swarm.changes:
        if change.new is State.SUSPECT:
            counts["suspicions"] += 1
        if change.new is State.DEAD:
            whom = "slow" if change.peer in slow_ones else "healthy"
            by = "slow" if observer in slow_ones else "healthy"
            counts[f"dead: {whom} for {by}"] += 1
            counts["accusations"] += "without refutation" in change.reason
    false_deaths = sum(count for name, count in counts.items() if name.startswith("dead: healthy"))
    return {
        "loss": loss,
        "slow_peers": len(slow_ones),
        "peer_hours": round(hours, 1),
        "messages_per_peer_second": round((swarm.sent - sent) / (n * minutes * 60), 2),
        "suspicions_per_peer_hour": round(counts["suspicions"] / hours, 3),
        "false_deaths_of_healthy_peers": false_deaths,
        "false_deaths_per_peer_hour": round(false_deaths / hours, 4),
        "counts": dict(sorted(counts.items())),
    }


def restart(n: int, seed: int, machine: type[Membership]) -> dict[str, Any]:
    swarm = Swarm(n, seed, machine=machine)
    swarm.run(30.0)
    names = sorted(swarm.peers)
    for name in names[1:]:
        swarm.peers[name].running = False
        at = swarm.loop.now_ns + int(swarm.rng.uniform(1.0, 5.0) * 1e9)
        swarm.loop.post(at, lambda name=name: swarm.start(name).handle(Introduced(names[0])))
    swarm.run(5.0)
    healed = swarm.until(swarm.whole, 600.0)
    return {"restarted": n - 1, "whole_after_s": None if healed is None else round(healed, 1)}


def partition(n: int, seed: int, machine: type[Membership], minutes: float) -> dict[str, Any]:
    swarm = Swarm(n, seed, machine=machine)
    swarm.run(10.0)
    hosts = [swarm.peers[name].host for name in sorted(swarm.peers)]
    swarm.network.cut("halves", hosts[: n // 2], hosts[n // 2 :])
    swarm.run(60.0 * minutes)
    dead = [len(p.machine.dead()) for p in swarm.peers.values()]
    swarm.network.mend("halves")
    healed = swarm.until(swarm.whole, 900.0)
    return {
        "minutes": minutes,
        "dead_seen_before": [min(dead), max(dead)],
        "whole_after_s": None if healed is None else round(healed, 1),
    }


def measures(what: str, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    swarm = options.peers, options.seed, VARIANTS[options.variant]
    match what:
        case "detection":
            yield "detection", detection(*swarm)
        case "false":
            for loss in options.loss or (0.0, 0.05, 0.2):
                yield f"loss {loss:g}", false_positives(*swarm, loss, False, options.minutes)
        case "slow":
            for loss in options.loss or (0.0, 0.05):
                kind = "blocked" if options.blocked else "slow"
                yield f"{kind}, loss {loss:g}", false_positives(*swarm, loss, True, options.minutes, options.blocked)
        case "restart":
            yield "mass restart", restart(*swarm)
        case _:
            minutes = options.partition_minutes
            yield f"partition of {minutes:g} min", partition(*swarm, minutes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ["detection", "false", "slow", "restart", "partition"]
    parser.add_argument("what", nargs="*", default=every, metavar="WHAT", help=", ".join(every))
    parser.add_argument("--peers", type=int, default=100)
    parser.add_argument("--variant", choices=list(VARIANTS), default="ours")
    parser.add_argument("--blocked", action="store_true", help="of slow peers only messages stop, not their timers")
    parser.add_argument("--loss", type=float, action="append", help="only this one, of false and slow; may be repeated")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each measurement of false positives, virtual")
    parser.add_argument("--partition-minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--figures", type=Path)
    options = parser.parse_args()
    for what in options.what:
        started = time.process_time()
        for name, found in measures(what, options):
            if options.variant != "ours":
                name = f"{options.variant}: {name}"
            print(f"{options.peers} peers, {name}: {json.dumps(found)}", flush=True)
            if options.figures:
                known = json.loads(options.figures.read_text()) if options.figures.exists() else {}
                known.setdefault(str(options.peers), {})[name] = found
                options.figures.parent.mkdir(parents=True, exist_ok=True)
                options.figures.write_text(json.dumps(known, indent=1) + "\n")
        print(f"  ({time.process_time() - started:.0f} s CPU)", flush=True)


if __name__ == "__main__":
    main()
