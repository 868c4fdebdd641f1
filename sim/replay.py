"""Plays a recorded run of real processes again in the simulator, and compares state hashes.

    python -m shoal.sim.replay DIR...      # the data folders of all peers, recorded with node.record_bytes_max

Simulated peers stand in for the real ones: same manifest, same identities, same node code, but virtual network, clock and disk,
and a learner that learns nothing. What the real peers published and decided is given to them, each update to its origin and
each commit to a peer drawn at random; everything else, who gets it from whom and what it makes of the state, is theirs.
Ring mode: every round's state hash is compared with what each real peer wrote into its history, and the last one with its
checkpoint. Gossip mode has no rounds: when all recorded updates are everywhere, the hash is compared with the checkpoints.

Does not cover: hybrid mode; dense exchanges, whose reduced chunks are not recorded; healed sides of a partition in gossip mode,
since what was taken back is not recorded either; the language model's warm-up.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..node import learners
from ..node.config import Config, RunConfig, run_from_manifest, run_id_of
from ..node.learner import LocalResult, StepStats
from ..node.learners import NodeLearner
from ..node.store.checkpoint import Checkpoints
from ..node.store.metrics import read_metrics
from ..node.store.recording import read_recording
from ..node.swarm.gossip import Gossip
from ..node.swarm.manifest import open_genesis
from ..node.swarm.rounds import Rounds
from ..protocol.ballot_messages import Commit, Exchange, Header
from ..protocol.ballot_wire import decode_commit, decode_header, encode_commit
from ..protocol.errors import ExitCode, ShoalError
from ..protocol.identity import Identity
from ..protocol.wire_pb2 import Commit as WireCommit
from ..protocol.wire_pb2 import Envelope, Signed
from .link import Link
from .peer import Peer
from .simulation import Simulation

# Virtual seconds after which everybody is up, and how long one recorded step may take to reach everybody.
START_SECONDS = 60.0
STEP_SECONDS_MAX = 120.0
POLL_SECONDS = 0.25
NEVER = 10**9
# Updates of gossip mode are given to their origins at random times within this.
SPREAD_SECONDS = 60.0


@dataclass(frozen=True)
class RealPeer:
    """What one data folder says.

    Attributes:
        seed: 32 bytes, of its key.
        history: round → first 16 hex digits of the state hash that it had then.
        round, state_hash: of its newest checkpoint.
    """

    name: str
    peer_id: str
    seed: bytes
    history: dict[int, str]
    round: int
    state_hash: str


@dataclass(frozen=True)
class Run:
    """A recorded run: founder first. `commits`: the chain, oldest first; none in gossip mode."""

    config: RunConfig
    id: bytes
    genesis_lineage: bytes
    peers: tuple[RealPeer, ...]
    updates: tuple[tuple[Header, bytes], ...]
    commits: tuple[Commit, ...]


@dataclass
class Comparison:
    """What came of it. `differences` has a sentence for each; equal runs have none."""

    mode: str
    peers: int
    updates: int
    commits: int
    compared: int = 0  # state hashes of real peers that the replay was held against
    state_hash: str = ""
    differences: list[str] = field(default_factory=list)

    def same(self, what: str, real: str, replayed: str) -> None:
        """Count one comparison. `real` may be the beginning of a hash."""
        self.compared += 1
        if not real or not replayed.startswith(real):
            self.differences.append(f"{what}: the real peer had {real[:16]}, the replay {replayed[:16]}")

    def summary(self) -> dict[str, Any]:
        return {"ok": not self.differences and self.compared > 0, **self.__dict__}


# --- what was recorded ------------------------------------------------------------------------------------------------


def load(folders: Sequence[Path]) -> Run:
    """Raises ShoalError: a folder without a recording, of another run, or a chain with a gap."""
    manifests = {(folder / "manifest.json").read_bytes() for folder in folders}
    if len(manifests) != 1:
        raise _unfit(f"{len(manifests)} different manifests", "Give the folders of one run.")
    (manifest,) = manifests
    run_id, config = run_id_of(manifest), run_from_manifest(manifest)
    if config.sync.mode == "hybrid":
        raise _unfit("a run in hybrid mode", "Record a run in ring or gossip mode.")
    genesis = open_genesis(Signed.FromString((folders[0] / "genesis").read_bytes()), run_id)
    peers, updates, commits = [], {}, {}
    for folder in folders:
        if not (folder / "recording").exists():
            raise _unfit(f"{folder} has no recording", "Run every peer with node.record_bytes_max above 0.")
        recorded = read_recording((folder / "recording").read_bytes())
        for start in recorded.updates:
            header = decode_header(start.header, run_id)
            updates[header.update_hash] = header, start.payload
        for raw in recorded.commits:
            commit = decode_commit(WireCommit.FromString(raw), run_id)
            commits[commit.value.lineage] = commit
        peers.append(_real_peer(folder))
    peers.sort(key=lambda peer: peer.peer_id != genesis.founder)
    if peers[0].peer_id != genesis.founder:
        raise _unfit("the founder's folder is missing", "Give the folders of all peers.")
    chain = _chain(commits, genesis.lineage)
    if any(commit.value.exchange is Exchange.RING_DENSE for commit in chain):
        raise _unfit("a dense round", 'Record a run with run.sync.exchange = "sparse".')
    order = sorted(updates.values(), key=lambda u: u[0].dot)
    return Run(config, run_id, genesis.lineage, tuple(peers), tuple(order), chain)


def _real_peer(folder: Path) -> RealPeer:
    encoded = (folder / "identity").read_bytes()
    checkpoint = Checkpoints(folder / "checkpoints").newest(lambda text: None)
    history = {int(r["round"]): str(r["state_hash"]) for r in read_metrics(folder)}
    state = checkpoint.state if checkpoint else None
    return RealPeer(
        name=folder.name,
        peer_id=Identity.decode(encoded).peer_id,
        seed=encoded[4:36],
        history=history,
        round=state.round if state else 0,
        state_hash=state.hash.hex() if state else "",
    )


def _chain(commits: dict[bytes, Commit], genesis: bytes) -> tuple[Commit, ...]:
    """The longest chain from the genesis on."""
    by_base: dict[bytes, list[Commit]] = {}
    for commit in commits.values():
        by_base.setdefault(commit.base_lineage, []).append(commit)
    best: list[Commit] = []
    paths: list[list[Commit]] = [[]]
    while paths:
        path = paths.pop()
        best = max(best, path, key=len)
        paths += [[*path, nxt] for nxt in by_base.get(path[-1].value.lineage if path else genesis, ())]
    return tuple(best)


def _unfit(found: str, todo: str) -> ShoalError:
    return ShoalError(
        "These folders cannot be replayed",
        values=f"found {found}, expected whole recordings of one run",
        todo=todo,
        code=ExitCode.MISMATCH,
    )


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
    peers = sim.add_peers(len(run.peers), node={"eval_every_rounds": -1})
    for peer, real in zip(peers, run.peers, strict=True):
        peer.identity_seed, peer.peer_id = real.seed, real.peer_id
    found = Comparison(run.config.sync.mode, len(peers), len(run.updates), len(run.commits))
    play = _gossip(sim, run, found, rng) if run.config.sync.mode == "gossip" else _ring(sim, run, found, rng)
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
    steps = max(1, len(run.commits))
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
            raise _unfit(f"not within {STEP_SECONDS_MAX:.0f} virtual seconds: {what}", "")
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
                raise _unfit(f"update {named.dot} of round {value.round} is in no recording", "")
            node = by_peer[named.dot.peer].node
            assert node is not None
            node.store.put(*updates[named.update_hash])
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


def _ready(peer: Peer) -> bool:
    return peer.node is not None and peer.node.ready


def _stop_own_rounds(peers: Sequence[Peer]) -> bool:
    """These peers close no round by themselves: what is decided is in the recording."""
    for peer in peers:
        if peer.node is not None and isinstance(peer.node.rounds, Rounds):
            peer.node.rounds._should_close = lambda now: None
    return True


def _gossip(sim: Simulation, run: Run, found: Comparison, rng: random.Random) -> Iterator[None]:
    """Every update to its origin, at a random time but in the order of its chain; the swarm spreads them."""
    yield from _wait(sim, lambda: _up(sim.peers), "all peers are up")
    by_peer = {peer.peer_id: peer for peer in sim.peers}
    times = sorted(sim.now + rng.uniform(0, SPREAD_SECONDS) for _ in run.updates)
    origins = [header.dot.peer for header, _ in run.updates]
    rng.shuffle(origins)
    queues = {peer: [u for u in run.updates if u[0].dot.peer == peer] for peer in sorted(set(origins))}
    for at, origin in zip(times, origins, strict=True):
        while sim.now < at:
            yield
        header, payload = queues[origin].pop(0)
        peer = by_peer[origin]
        assert peer.node is not None and isinstance(peer.node.rounds, Gossip)
        with peer.host.inside():
            peer.node.rounds.replica.add(header, payload)
            peer.node.rounds.grew({(header.dot.peer, header.dot.incarnation)})
    count = len(run.updates)
    yield from _wait(sim, lambda: {s.round for s in sim.running_states()} == {count}, "every peer has every update")
    hashes = {state.hash.hex() for state in sim.running_states()}
    if len(hashes) != 1:
        found.differences.append(f"{len(hashes)} hashes in the replay")
    found.state_hash = hashes.pop()
    for real in run.peers:
        if real.round != count:
            found.differences.append(f"{real.name} had {real.round} updates when it ended, {count} are recorded")
        found.same(f"{real.name}, its checkpoint", real.state_hash, found.state_hash)


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
