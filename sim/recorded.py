"""What the data folders of a recorded run say, for replay.py: updates, decisions, and where each real peer ended.

    run = load([Path(folder) for folder in ...])     # of all peers, recorded with node.record_bytes_max

Does not cover: playing it (replay.py), writing it (node/store/recording.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ..aggregation.forks import Key
from ..aggregation.gossip import NO_BASE, UpdateLog, Verdict
from ..aggregation.heal import merged
from ..aggregation.hybrid import combine, write_sum
from ..aggregation.snapshots import Snapshot
from ..node.config import Config, RunConfig, run_from_manifest, run_id_of
from ..node.gossip_mode import log_of, rules_of
from ..node.hybrid_mode import hybrid_rules
from ..node.store.checkpoint import Checkpoints
from ..node.store.metrics import read_metrics
from ..node.store.recording import read_recording
from ..node.swarm.manifest import open_genesis
from ..protocol.ballot_messages import Commit, Encoding, Header
from ..protocol.ballot_wire import decode_commit, decode_header
from ..protocol.errors import ExitCode, ShoalError
from ..protocol.identity import Identity
from ..protocol.rings import decode_combined
from ..protocol.version import VersionVector, sha256
from ..protocol.wire_pb2 import Commit as WireCommit
from ..protocol.wire_pb2 import Signed

Update = tuple[Header, bytes]


@dataclass(frozen=True)
class RealPeer:
    """What one data folder says.

    Attributes:
        seed: 32 bytes, of its key.
        history: round → first 16 hex digits of the state hash that it had then.
        round, state_hash: of its newest checkpoint.
        log: in that checkpoint; None in ring mode.
    """

    name: str
    peer_id: str
    seed: bytes
    history: dict[int, str]
    round: int
    state_hash: str
    log: UpdateLog | None


@dataclass(frozen=True)
class Average:
    """Two sides of a partition that were averaged (aggregation/heal.py): each without its sum, and its weight."""

    sides: tuple[tuple[Snapshot, int], tuple[Snapshot, int]]


@dataclass(frozen=True)
class Run:
    """A recorded run: founder first.

    Attributes:
        updates: what the log or the rounds are made of, in dot order: in hybrid mode the combined updates.
        inner: hybrid mode: the updates that rings combined, by their hash.
        commits: the chain, oldest first; none but in ring mode.
        chunks: of dense rounds, by hash.
        averages: of healed sides in gossip mode.
    """

    config: RunConfig
    id: bytes
    genesis_lineage: bytes
    peers: tuple[RealPeer, ...]
    updates: tuple[Update, ...]
    commits: tuple[Commit, ...]
    inner: dict[bytes, Update] = field(default_factory=dict)
    chunks: dict[bytes, bytes] = field(default_factory=dict)
    averages: tuple[Average, ...] = ()

    @property
    def end(self) -> UpdateLog:
        """The log with most in it that a real peer ended with. Raises ShoalError where none has one."""
        logs = [peer.log for peer in self.peers if peer.log is not None]
        if not logs:
            raise unfit("no checkpoint with a log", "Give the folders of peers that have saved one.")
        return max(logs, key=lambda log: (log.included, log.digest))


def load(folders: Sequence[Path]) -> Run:
    """Raises ShoalError: a folder without a recording, of another run, or a chain with a gap."""
    manifests = {(folder / "manifest.json").read_bytes() for folder in folders}
    if len(manifests) != 1:
        raise unfit(f"{len(manifests)} different manifests", "Give the folders of one run.")
    (manifest,) = manifests
    run_id, config = run_id_of(manifest), run_from_manifest(manifest)
    genesis = open_genesis(Signed.FromString((folders[0] / "genesis").read_bytes()), run_id)
    peers = [_real_peer(folder, config) for folder in folders]
    peers.sort(key=lambda peer: peer.peer_id != genesis.founder)
    if peers[0].peer_id != genesis.founder:
        raise unfit("the founder's folder is missing", "Give the folders of all peers.")
    updates: dict[bytes, Update] = {}
    commits: dict[bytes, Commit] = {}
    chunks: dict[bytes, bytes] = {}
    averages: dict[bytes, None] = {}
    for folder in folders:
        if not (folder / "recording").exists():
            raise unfit(f"{folder} has no recording", "Run every peer with node.record_bytes_max above 0.")
        recorded = read_recording((folder / "recording").read_bytes())
        for start in recorded.updates:
            header = decode_header(start.header, run_id)
            updates[header.update_hash] = header, start.payload
        for raw in recorded.commits:
            commit = decode_commit(WireCommit.FromString(raw), run_id)
            commits[commit.value.lineage] = commit
        chunks.update((sha256(chunk), chunk) for chunk in recorded.chunks)
        averages.update(dict.fromkeys(recorded.averages))
    inner = {}
    if config.sync.mode == "hybrid":
        inner = {hash_: u for hash_, u in updates.items() if u[0].encoding is not Encoding.COMBINED}
    return Run(
        config=config,
        id=run_id,
        genesis_lineage=genesis.lineage,
        peers=tuple(peers),
        updates=tuple(sorted((u for h, u in updates.items() if h not in inner), key=lambda u: u[0].dot)),
        commits=_chain(commits, genesis.lineage),
        inner=inner,
        chunks=chunks,
        averages=tuple(map(_average, averages)),
    )


def _real_peer(folder: Path, config: RunConfig) -> RealPeer:
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
        log=log_of(checkpoint.book, rules_of(Config(run=config)))[0]
        if checkpoint is not None and config.sync.mode != "ring"
        else None,
    )


def _average(raw: bytes) -> Average:
    one, two = ((_side(side["side"]), int(side["weight"])) for side in json.loads(raw))
    return Average((one, two))


def _side(index: dict[str, object]) -> Snapshot:
    """A side without its sum, its log and its proofs: those are in the updates."""
    text = json.dumps(index | dict.fromkeys(("kept", "retracted", "proofs"), 0)).encode()
    return Snapshot.from_parts({"acc": np.zeros(0, np.int64), "index": text}, 0)


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


def unfit(found: str, todo: str) -> ShoalError:
    return ShoalError(
        "These folders cannot be replayed",
        values=f"found {found}, expected whole recordings of one run",
        todo=todo,
        code=ExitCode.MISMATCH,
    )


# --- what follows from it ---------------------------------------------------------------------------------------------


def averaged(run: Run) -> dict[bytes, Snapshot]:
    """Every average that a peer took, by the base that it is named by, made anew from the updates of both sides.

    A base's name covers the sums that it was made of: where these come out otherwise, so does the name.

    Raises ShoalError: what a side was made of is in no recording.
    """
    d, rules = run.end.theta.size, rules_of(Config(run=run.config))
    nothing = UpdateLog(np.zeros(d, np.float32), rules).snapshot()
    made, waiting = {NO_BASE: nothing}, list(run.averages)

    def whole(side: Snapshot) -> Snapshot:
        log = UpdateLog.from_snapshot(np.zeros(d, np.float32), rules, made[side.base])
        for header, payload in run.updates:
            wanted = header.dot.seq <= side.floor.seq(header.dot.peer, header.dot.incarnation)
            if wanted and log.judge(header)[0] is Verdict.NEW:
                log.add(header, payload)
        if log.vector != side.floor:
            raise unfit(
                "a side that was averaged and whose updates are in no recording", "Give the folders of all peers."
            )
        return replace(side, acc=log.snapshot(folded=True).acc)

    while waiting:
        ready = [average for average in waiting if all(side.base in made for side, _ in average.sides)]
        if not ready:
            raise unfit("an average of an average that is in no recording", "Give the folders of all peers.")
        for average in ready:
            (one, one_weight), (two, two_weight) = average.sides
            snapshot = merged(whole(one), one_weight, whole(two), two_weight)
            made[snapshot.base] = snapshot
        waiting = [average for average in waiting if not any(average is other for other in ready)]
    return made


def check_sums(run: Run, same: Callable[[str, str, str], None]) -> None:
    """Hybrid mode: add up what each ring combined once more, from the members' own updates.

    Args:
        same: told what is compared, the hash that the ring sealed, and ours.

    Raises ShoalError: a member's update is in no recording.
    """
    config = Config(run=run.config)
    rules, d = hybrid_rules(config), run.end.theta.size
    for header, payload in run.updates:
        combined = decode_combined(payload)
        named = combined.value.updates
        if not all(update.update_hash in run.inner for update in named):
            raise unfit(f"a sum of round {header.round} with an update that is in no recording", "Give all folders.")
        found = combine([run.inner[update.update_hash] for update in named], combined.draw.peers, d, rules)
        ours = replace(
            combined,
            counted=tuple(update.dot in found.counted for update in named),
            sum=write_sum(found.indices, found.fixed, d),
        )
        same(f"the sum of a ring in round {header.round}", combined.sum_hash.hex(), ours.sum_hash.hex())


def keys_of(vector: VersionVector) -> dict[Key, int]:
    """Chain → seq."""
    return {key: seq for key, (seq, _) in vector.entries.items()}
