"""Plays a recorded run of real processes again in the simulator, and compares state hashes.

    python -m shoal.sim.replay DIR...      # the data folders of all peers, recorded with node.record_bytes_max

Simulated peers stand in for the real ones: same manifest, same identities, same node code, but virtual network, clock and disk,
and a learner that learns nothing. What the real peers published and decided is given to them: each update to its origin, each
commit to a peer drawn at random, the reduced chunks of a dense round to one of its ring, an average of healed sides to two.
Everything else, who gets it from whom and what it makes of the state, is theirs.
Ring mode: every round's state hash is compared with what each real peer wrote into its history, and the last one with its
checkpoint. Gossip and hybrid mode have no rounds of all: when all recorded updates are everywhere, the hash is compared with
the checkpoints. In hybrid mode each ring's sum is also added up again from its members' updates and compared with what they
sealed.

Does not cover: how it was decided which side of a partition wins, and with which weights; updates of a chain that a healing
with an average has left behind; the language model's warm-up.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..aggregation.forks import Key
from ..aggregation.gossip import NO_BASE, UpdateLog
from ..aggregation.snapshots import Snapshot
from ..node import learners
from ..node.config import Config
from ..node.learner import LocalResult, StepStats
from ..node.learners import NodeLearner
from ..node.swarm.gossip import Gossip
from ..node.swarm.rounds import Rounds
from ..protocol.ballot_messages import Encoding, Exchange, Header, Value
from ..protocol.ballot_wire import encode_commit
from ..protocol.errors import ExitCode, ShoalError
from ..protocol.limits import INT64_MAX
from ..protocol.version import VersionVector
from ..protocol.wire_pb2 import Envelope
from .link import Link
from .peer import Peer
from .recorded import Run, Update, averaged, check_sums, keys_of, load, unfit
from .simulation import Simulation

# Virtual seconds after which everybody is up, and how long one recorded step may take to reach everybody.
START_SECONDS = 60.0
STEP_SECONDS_MAX = 120.0
# Waits of gossip mode, beside that for the updates.
GOSSIP_STEPS = 4
POLL_SECONDS = 0.25
NEVER = 10**9
# Updates of gossip mode are given to their origins at random times within this.
SPREAD_SECONDS = 60.0


@dataclass
class Comparison:
    """What came of it. `differences` has a sentence for each; equal runs have none."""

    mode: str
    peers: int
    updates: int
    commits: int
    averages: int = 0  # of sides of a partition
    taken_back: int = 0  # updates of a side that lost
    compared: int = 0  # hashes of real peers that the replay was held against
    state_hash: str = ""
    differences: list[str] = field(default_factory=list)

    def same(self, what: str, real: str, replayed: str) -> None:
        """Count one comparison. `real` may be the beginning of a hash."""
        self.compared += 1
        if not real or not replayed.startswith(real):
            self.differences.append(f"{what}: the real peer had {real[:16]}, the replay {replayed[:16]}")

    def summary(self) -> dict[str, Any]:
        return {"ok": not self.differences and self.compared > 0, **self.__dict__}


# --- playing ----------------------------------------------------------------------------------------------------------


class _Idle:
    """The manifest's learner, which never learns: no sample, so no update of its own."""

    def __init__(self, inner: NodeLearner) -> None:
        self._inner = inner

    def step(self) -> StepStats:
        return StepStats(samples=0)

    def finish(self) -> LocalResult:
        return LocalResult(delta=np.zeros(self._inner.layout.size, np.float32), weight=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def replay(run: Run, seed: int = 0) -> Comparison:
    """Play it. `seed`: of the simulated network, and of who gets what when; the result must not depend on it."""
    rng = random.Random(f"shoal.sim replay {seed}")

    def idle(config: Config, peer_id: str, path: Path, progress: Any) -> Any:
        return _Idle(learners.build(config, peer_id, path, progress))

    lossy = Link(latency_ms=(5, 80), loss=0.05, duplicate=0.02, reorder=0.05)
    sim = Simulation(seed, learner=idle, link=lossy, step_seconds=5.0)
    sim.run_config = run.config
    in_rounds = run.config.sync.mode == "ring"
    peers = sim.add_peers(len(run.peers), node={"eval_every_rounds": -1, "wait_for_start": not in_rounds})
    for peer, real in zip(peers, run.peers, strict=True):
        peer.identity_seed, peer.peer_id = real.seed, real.peer_id
    found = Comparison(run.config.sync.mode, len(peers), len(run.updates), len(run.commits), len(run.averages))
    if run.config.sync.mode == "hybrid":
        check_sums(run, found.same)
    play = _ring(sim, run, found, rng) if in_rounds else _gossip(sim, run, found, rng)
    ended: list[bool] = []

    def go_on() -> None:
        try:
            next(play)
            sim.at(sim.now + POLL_SECONDS, go_on)
        except StopIteration:
            ended.append(True)
        except ShoalError as error:
            found.differences.append(error.values)
            ended.append(True)

    sim.at(0.0, go_on)
    # The checkers compare with what the simulated journals say, and these peers never said what they are given.
    steps = len(run.commits) if in_rounds else GOSSIP_STEPS
    until = START_SECONDS + SPREAD_SECONDS + STEP_SECONDS_MAX * (steps + 1)
    report = sim.run(until, stride=NEVER, until=lambda: bool(ended), settle_s=0.0)
    found.differences += [f"the simulation itself failed: {text[:300]}" for text in report.errors]
    if not ended:
        found.differences.append(f"not over after {until:.0f} virtual seconds")
    return found


def _wait(sim: Simulation, condition: Any, what: str) -> Iterator[None]:
    deadline = sim.now + STEP_SECONDS_MAX
    while not condition():
        if sim.now > deadline:
            raise unfit(f"not within {STEP_SECONDS_MAX:.0f} virtual seconds: {what}", "")
        yield


def _up(peers: Sequence[Peer]) -> bool:
    return all(peer.node is not None and peer.node.ready and peer.node.rounds is not None for peer in peers)


def _ring(sim: Simulation, run: Run, found: Comparison, rng: random.Random) -> Iterator[None]:
    """Commit by commit: one peer hears of it, the others from each other."""
    yield from _wait(sim, lambda: sim.peers[0].node is not None and _ready(sim.peers[0]), "the founder is up")
    _stop_own_rounds(sim.peers[:1])
    yield from _wait(sim, lambda: _stop_own_rounds(sim.peers) and _up(sim.peers), "all peers are up")
    by_peer = {peer.peer_id: peer for peer in sim.peers}
    updates = {header.update_hash: (header, payload) for header, payload in run.updates}
    for commit in run.commits:
        value = commit.value
        for named in value.updates:
            if named.update_hash not in updates:
                raise unfit(f"update {named.dot} of round {value.round} is in no recording", "")
            node = by_peer[named.dot.peer].node
            assert node is not None
            header, payload = updates[named.update_hash]
            node.store.put(header, b"" if header.encoding is Encoding.DENSE else payload)
        if value.exchange is Exchange.RING_DENSE:
            _give_chunks(by_peer[rng.choice(value.ring)], run, value)
        teller, hearer = rng.sample(sim.peers, 2) if len(sim.peers) > 1 else (sim.peers[0],) * 2
        with hearer.host.inside():
            assert hearer.node is not None and hearer.node.rounds is not None
            hearer.node.rounds.on_message(teller.peer_id, Envelope(commit=encode_commit(commit)))
        yield from _wait(
            sim, lambda r=value.round: all(s.round >= r for s in sim.running_states()), f"round {value.round}"
        )
        hashes = {state.hash.hex() for state in sim.running_states()}
        if len(hashes) != 1:
            found.differences.append(f"round {value.round}: {len(hashes)} hashes in the replay")
        found.state_hash = hashes.pop()
        for real in run.peers:
            if value.round in real.history:
                found.same(f"{real.name}, round {value.round}", real.history[value.round], found.state_hash)
            if value.round == real.round:
                found.same(f"{real.name}, its checkpoint", real.state_hash, found.state_hash)


def _give_chunks(holder: Peer, run: Run, value: Value) -> None:
    """What a dense round's ring has reduced, to one of it; the others fetch it from there."""
    if not set(value.chunk_hashes) <= run.chunks.keys():
        raise unfit(f"no chunks of round {value.round}", "Record with this version of shoal.")
    assert holder.node is not None and isinstance(holder.node.rounds, Rounds)
    holder.node.rounds._dense._chunks = {hash_: run.chunks[hash_] for hash_ in value.chunk_hashes}


def _ready(peer: Peer) -> bool:
    return peer.node is not None and peer.node.ready


def _stop_own_rounds(peers: Sequence[Peer]) -> bool:
    """These peers close no round by themselves: what is decided is in the recording."""
    for peer in peers:
        if peer.node is not None and isinstance(peer.node.rounds, Rounds):
            peer.node.rounds._should_close = lambda now: None
    return True


def _gossip(sim: Simulation, run: Run, found: Comparison, rng: random.Random) -> Iterator[None]:
    """Every update to its origin, at a random time but in the order of its chain; the swarm spreads them.

    Where the sides of a partition were healed, the simulated peers are given what was decided: an average to two of them, from
    which the others have it; the limits of abandoned chains to the origins of these, after what they take back.
    """
    yield from _wait(sim, lambda: _up(sim.peers), "all peers are up")
    for peer in sim.peers:
        # Which sides had to be healed is in the recording: here none of what is given is to start another healing.
        assert peer.node is not None and isinstance(peer.node.rounds, Gossip)
        replica = peer.node.rounds.replica
        replica.settings = replace(replica.settings, heal_max=INT64_MAX)
    end = run.end
    start = VersionVector({})
    if end.base != NO_BASE:
        average = averaged(run).get(end.base)
        if average is None:
            raise unfit("sums that no recorded average comes to", "Give the folders of all peers.")
        start = average.floor
        yield from _take_average(sim, run, average, rng)
    first, last = keys_of(start), keys_of(end.vector)
    new = [u for u in run.updates if u[0].dot.seq > first.get(_key(u[0]), 0)]
    counted = [u for u in new if u[0].dot.seq <= last.get(_key(u[0]), 0)]
    over = [u for u in new if u[0].dot.seq > last.get(_key(u[0]), 0)]
    taken_back = [u for u in over if _key(u[0]) in end.limits]
    # Signed while a healing ended its chain: its origin went on in another life and told nobody of it, and a later healing may
    # have brought the chain back to where it was.
    lives = _lives(end.vector)
    untold = [u for u in over if _key(u[0]) not in end.limits and u[0].dot.incarnation < lives.get(u[0].dot.peer, 0)]
    found.taken_back = len(taken_back) + len(untold)
    if found.taken_back < len(over) and end.base == NO_BASE:
        found.differences.append(f"{len(over) - found.taken_back} updates are recorded, and in no log at the end")
    times = sorted(sim.now + rng.uniform(0, SPREAD_SECONDS) for _ in counted)
    origins = [header.dot.peer for header, _ in counted]
    rng.shuffle(origins)
    queues = {peer: [u for u in counted if u[0].dot.peer == peer] for peer in sorted(set(origins))}
    for at, origin in zip(times, origins, strict=True):
        while sim.now < at:
            yield
        _give(sim, origin, [queues[origin].pop(0)], {})
    everything = end.vector.hash()
    yield from _wait(sim, lambda: _all(sim, lambda log: log.vector.hash() == everything), "every peer has every update")
    for origin in sorted({key[0] for key in end.limits}):
        limits = {key: seq for key, seq in end.limits.items() if key[0] == origin}
        _give(sim, origin, [u for u in taken_back if u[0].dot.peer == origin], limits)
    yield from _wait(
        sim,
        lambda: _all(sim, lambda log: log.vector.hash() == everything and log.limits.items() >= end.limits.items()),
        "every peer knows which chains have ended",
    )
    hashes = {state.hash.hex() for state in sim.running_states()}
    if len(hashes) != 1:
        found.differences.append(f"{len(hashes)} hashes in the replay")
    found.state_hash = hashes.pop()
    for real in run.peers:
        if real.log is None or real.log.version != end.version:
            found.differences.append(f"{real.name} had {real.round} updates when it ended, others {end.included}")
        found.same(f"{real.name}, its checkpoint", real.state_hash, found.state_hash)


def _key(header: Header) -> Key:
    return header.dot.peer, header.dot.incarnation


def _lives(vector: VersionVector) -> dict[str, int]:
    """The latest incarnation of each peer."""
    lives: dict[str, int] = {}
    for peer, incarnation in vector.entries:
        lives[peer] = max(incarnation, lives.get(peer, 0))
    return lives


def _all(sim: Simulation, condition: Callable[[UpdateLog], bool]) -> bool:
    logs = [peer.node.rounds.log for peer in sim.peers if peer.node and isinstance(peer.node.rounds, Gossip)]
    return len(logs) == len(sim.peers) and all(map(condition, logs))


def _give(sim: Simulation, origin: str, updates: Sequence[Update], limits: Mapping[Key, int]) -> None:
    """Put its own updates into a peer's log and tell others; then, before anybody can ask, end chains of it."""
    (peer,) = (peer for peer in sim.peers if peer.peer_id == origin)
    assert peer.node is not None and isinstance(peer.node.rounds, Gossip)
    gossip = peer.node.rounds
    with peer.host.inside():
        for header, payload in updates:
            gossip.replica.add(header, payload)
        gossip.replica.join_limits(limits)
        gossip.grew({_key(header) for header, _ in updates})


def _take_average(sim: Simulation, run: Run, average: Snapshot, rng: random.Random) -> Iterator[None]:
    """Two peers take an average in place of the beginnings of what it is made of, which all have; the others download it."""
    floor = keys_of(average.floor)
    begun = {key: rng.randrange(seq) for key, seq in sorted(floor.items())}
    for origin in sorted({peer for peer, _ in floor}):
        own = [u for u in run.updates if u[0].dot.peer == origin]
        _give(sim, origin, [u for u in own if u[0].dot.seq <= begun.get(_key(u[0]), 0)], {})
    wanted = {key: seq for key, seq in begun.items() if seq}
    yield from _wait(
        sim, lambda: _all(sim, lambda log: keys_of(log.vector) == wanted), "every peer has the first updates"
    )
    for peer in rng.sample(sim.peers, min(2, len(sim.peers))):
        assert peer.node is not None and isinstance(peer.node.rounds, Gossip)
        with peer.host.inside():
            replica = peer.node.rounds.replica
            replica.replace(replica.standing_on(average))
    yield from _wait(sim, lambda: _all(sim, lambda log: log.base == average.base), "every peer has taken the average")


def main() -> int:
    """One JSON object; exit code 0 when every hash is equal."""
    folders = [Path(argument) for argument in sys.argv[1:]]
    if not folders:
        print("usage: python -m shoal.sim.replay DIR...", file=sys.stderr)
        return int(ExitCode.USAGE)
    try:
        found = replay(load(folders))
    except ShoalError as error:
        print(error, file=sys.stderr)
        return int(error.code)
    print(json.dumps(found.summary()))
    return int(ExitCode.OK if found.summary()["ok"] else ExitCode.FAILED)


if __name__ == "__main__":
    sys.exit(main())
