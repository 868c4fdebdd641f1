"""One peer, from its data directory to its last round: puts every part together, starts and ends them in order.

Order of a start: data directory, identity, listening, run, learner, state, membership, rounds; so that what is most often
wrong is said first, before anything slow. The node reaches the world through its `Host` alone, so that the simulator runs this
very code; signals, the control socket and discovery by LAN and DHT are the daemon's (daemon.py). How the parts of a mode
are connected is in ring_mode.py; how a node gets in, in entry.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

from ..aggregation.book import Book
from ..aggregation.gossip import UpdateLog
from ..aggregation.snapshots import Snapshot
from ..protocol import limits
from ..protocol.ballot_messages import Commit
from ..protocol.deadlines import Deadlines
from ..protocol.discovery import PeerCache, announceable
from ..protocol.errors import ExitCode, PeerFault, ShoalError
from ..protocol.handshake import Self
from ..protocol.invite import Invite
from ..protocol.membership import State
from ..protocol.transport import DialError, StreamClosed
from ..protocol.wire_pb2 import Envelope, Welcome
from . import judging, learners
from .ban_proofs import BanProofs
from .config import Config
from .discovery import Nearby, look_after_company
from .entry import SOURCES_MAX, Entry
from .gossip_mode import contributions_of, make_gossip, rules_of, served
from .host import Host, Show
from .hybrid_mode import make_hybrid
from .observe.recurring import Recurring
from .own_lives import OwnLives, first_life
from .ring_mode import decode_records, has_record, load_log, make_members, make_rounds
from .run import Run
from .saving import Saving
from .store.checkpoint import Checkpoint, Checkpoints
from .store.commits import CommitFile
from .store.datadir import DataDir, damaged, usable
from .store.journal import FILE as JOURNAL_FILE
from .store.journal import Journal, JournalFull
from .store.recording import Recording
from .swarm.gossip import Gossip
from .swarm.hybrid import Hybrid
from .swarm.manifest import make_genesis, serve_manifest
from .swarm.members import Members
from .swarm.mesh import Mesh
from .swarm.records import fetch_records
from .swarm.replica import shared_state
from .swarm.rounds import Rounds
from .swarm.shards import SHARDS, assign
from .swarm.state import SharedState, genesis_hash
from .swarm.state_server import Servable, StateServer, servable
from .swarm.updates import UpdateStore

# After the last round: how long to serve those who are still behind before leaving by itself.
LINGER_SECONDS = 10.0
# After a start, members that were not heard of yet are not counted as dead for this long: when everything was killed, the
# first one back must not go on alone while the others are still starting.
START_GRACE_SECONDS = 20.0
GOODBYE_SECONDS = 0.3

NO_CACHE = "peer cache not saved"
NO_JOURNAL = "publishing nothing and not voting: the journal cannot be written"


Hook = Callable[["Node"], Awaitable[None]]


async def _nothing(node: Node) -> None:
    """No machine around the node."""


class Node:
    """One peer. `run` once; `leave` asks it to end."""

    def __init__(
        self,
        config: Config,
        invite: Invite | None,
        host: Host,
        *,
        given_run: bool = False,
        on_open: Hook = _nothing,
        on_ready: Hook = _nothing,
    ) -> None:
        """
        Args:
            given_run: the configuration file has [run] tables, so they must agree with a run already on disk.
            on_open: called once the data directory is open: what talks to people can start.
            on_ready: called before the first round: what finds more peers can start.
        """
        self._first_config, self._invite_given, self._given_run = config, invite, given_run
        self.host, self.clock = host, host.clock
        self._on_open, self._on_ready = on_open, on_ready
        self.rng = random.Random(host.random_bytes(16))
        self.boot_id = host.random_bytes(16)
        self.phase = "starting"
        self.ready = self.listening = False
        self.addresses: list[str] = []
        self.nearby = Nearby()
        self.warnings: list[str] = []
        self.warmup: dict[str, float] = {}
        self.rounds: Rounds | Gossip | None = None
        self.theta0: np.ndarray | None = None  # gossip mode: what all sums start from, and the log until it runs
        self.first_log: UpdateLog | None = None
        self.members: Members | None = None
        self.closers: list[Callable[[], Any]] = []
        self._owned: list[asyncio.Task[Any]] = []
        self._leave = asyncio.Event()
        self.started = asyncio.Event()
        if not config.node.wait_for_start:
            self.started.set()
        self.proofs, self.saving = BanProofs(self), Saving(self)
        self._held = False
        self._heard_from: set[str] = set()
        self._started_at = self.clock.now()
        self.traffic_before: dict[str, int] = {}
        self._observed: dict[str, tuple[str, str]] = {}  # by peer: where we dialed it, and where it saw us

    @property
    def config(self) -> Config:
        return self.run_.config

    @property
    def uptime(self) -> float:
        """Seconds since the start."""
        return self.clock.now() - self._started_at

    # ------------------------------------------------------------------------------------------------ life

    async def run(self) -> int:
        """From nothing to the end; the exit code. Raises ShoalError for what a person must mend."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        work = asyncio.ensure_future(self._live())
        leave = asyncio.ensure_future(self._leave.wait())
        try:
            await asyncio.wait({work, leave, self.failed}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() or self.failed.done():
                (work if work.done() else self.failed).result()
            else:
                await self._goodbye(work)
            return ExitCode.OK
        finally:
            await self._close(work, leave)

    def leave(self) -> None:
        """Push what is learned, say goodbye, checkpoint, end."""
        self.phase = "leaving"
        self._leave.set()

    @property
    def leaving(self) -> bool:
        return self._leave.is_set()

    async def _goodbye(self, work: asyncio.Task[None]) -> None:
        """All within the grace time. Raises ShoalError(DISK) when the disk did not take the last state."""
        grace = self._first_config.node.leave_grace_seconds
        if self.rounds is not None and not work.done():
            started = self.clock.now()
            pushed = await self.rounds.leave(grace * 0.5)
            self.started.set()  # nobody waits for the start of what is over
            left = max(1.0, grace - (self.clock.now() - started))
            await asyncio.wait({work}, timeout=left)
            self.say("leaving", pushed=pushed, round=self.rounds.state.round)
            if self.members is not None:
                self.members.leave()
                await self.clock.sleep(min(GOODBYE_SECONDS, left))  # best effort; this lets it out
            await self.saving.last()

    async def _close(self, *tasks: asyncio.Task[Any]) -> None:
        self.failed.cancel()
        for task in [*tasks, *self._owned]:
            task.cancel()
        await asyncio.gather(*tasks, *self._owned, return_exceptions=True)
        for close in reversed(self.closers):
            result = close()
            if asyncio.iscoroutine(result):
                await result

    def own(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run it as long as the node lives; what it dies of ends the node."""
        task = asyncio.ensure_future(coroutine)
        self._owned.append(task)
        task.add_done_callback(lambda t: None if t.cancelled() else self.fail(t.exception()))
        return task

    def fail(self, error: BaseException | None) -> None:
        """End the node with this error."""
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)

    def warn(self, text: str) -> None:
        """Say it, and keep it for `shoal status`."""
        self.warnings.append(text)
        del self.warnings[:-100]
        self.say(text, level="warning")

    def _journal_trouble(self, why: str) -> None:
        if why:
            self.troubles.wrong(NO_JOURNAL, why)
        else:
            self.troubles.over(NO_JOURNAL)

    def _warn_of_cut(self, path: Path, cut_bytes: int) -> None:
        """A power cut tears the last record; more than that is damage, and what it held must be asked of the others."""
        if cut_bytes:
            self.warn(f"{path} ended in {cut_bytes} bytes that are no whole record; they were cut off")

    # ------------------------------------------------------------------------------------------------ start

    async def _live(self) -> None:
        node = self._first_config.node
        path = Path(node.data_dir).expanduser()
        self.data = DataDir(path, disk=self.host.disk)
        self.closers.append(self.data.close)
        self.identity = self.host.identity(self.data.identity)
        self.closers.append(self.identity.close)
        self.say = self.host.logs(path, node.log_level, self.identity.peer_id)
        self._loop = asyncio.get_running_loop()
        self.troubles = Recurring(self.say, self._loop.time)
        with usable(self.data.journal):
            self.journal = Journal(self.data.journal, disk=self.host.disk)
        self.closers.append(self.journal.close)
        self.journal.on_trouble = self._journal_trouble
        self._warn_of_cut(self.data.journal / JOURNAL_FILE, self.journal.cut_bytes)
        if not self.journal.incarnation:
            known = bool(Checkpoints(self.data.checkpoints, disk=self.host.disk).paths())
            first_life(self.journal, lost=known, now_wall=self.clock.wall(), warn=self.warn)
        self.lives = OwnLives(self.journal, self.clock, begun=self._new_life, say=self.say)
        self.run_ = Run(self._first_config, self._invite_given, self.data, self.host.random_bytes)
        await self._on_open(self)
        self.cache = PeerCache(self.data.peers, read=self.host.disk.read, replace=self.host.disk.replace)
        if self.cache.warning:
            self.warn(self.cache.warning)
        founding = self.run_.choose(given_run=self._given_run)
        await self._listen()
        if not self.run_.manifest:
            await self.entry.learn_run()
            self.save_secrets()
        checkpoint = await self._prepare(founding)
        await self._begin(checkpoint)

    async def _listen(self) -> None:
        node = self.config.node
        self.mesh = Mesh(
            transport=self.host.transport(self.identity),
            clock=self.clock,
            me=self._self,
            random_bytes=self.host.random_bytes,
            rng=self.rng,
            known=self._known,
            say=self.say,
        )
        self.closers.append(self.mesh.close)
        self.mesh.on_message(self._on_message)
        self.mesh.on_welcome(self._on_welcome)
        self.mesh.serve("Manifest", lambda peer, stream: serve_manifest(stream, self.run_.info))
        self.port = await self.mesh.listen(node.listen, node.port)
        self.listening = True
        self.addresses = self._announceable()
        self.own(_surface(self.mesh))
        self.entry = Entry(
            host=self.host,
            run=self.run_,
            data=self.data,
            me=self.identity.peer_id,
            mesh=self.mesh,
            cache=self.cache,
            nearby=self.nearby,
            rng=self.rng,
            phase=self._set_phase,
            say=self.say,
            warn=self.warn,
            trouble=self.trouble,
            hold=self.hold,
        )
        self.say("listening", port=self.port, addresses=self.addresses, peer_id=self.identity.peer_id)

    def _announceable(self) -> list[str]:
        node = self._first_config.node
        return announceable(
            node.listen, self.port, self.host.interfaces(), node.announce, observed=list(self._observed.values())
        )

    def _self(self) -> Self:
        return Self(
            self.identity,
            self.run_.id,
            self.boot_id,
            self.journal.incarnation,
            tuple(self.addresses),
            self.run_.admission,
            self.run_.bans,
        )

    def _set_phase(self, phase: str) -> None:
        self.phase = phase

    # ------------------------------------------------------------------------------------------------ learner and state

    async def _prepare(self, founding: bool) -> Checkpoint | None:
        """Load the learner; found, download or restore the first state. Returns the checkpoint to go on from."""
        self.phase = "loading the model"
        with self.host.progress("loading the model") as show:
            progress = self._stage(show)
            self.learner = await self.clock.run(
                lambda: self.host.learner(self.config, self.identity.peer_id, self.data.path, progress)
            )
        self.closers.append(self.learner.close)
        self.run_.base_hash = await self.clock.run(lambda: learners.base_hash_of(self.learner))
        self.run_.layout_hash = self.learner.layout.hash()
        self._make_parts()
        judging.connect(self)
        checkpoint = await self.clock.run(lambda: self.checkpoints.newest(self.warn))
        if checkpoint is not None:
            self._check_size(checkpoint)
            if self.run_.genesis is None:  # lost: whoever is in the run has it
                if self.run_.invite is None and not self.cache.peers:
                    raise damaged(self.data.genesis, "it is missing, and nobody is known who could give it")
                await self.entry.wait_genesis()
                self.run_.save()
            return checkpoint
        if founding or (self.run_.genesis is None and self.run_.invite is None and not self.cache.peers):
            await self._found()
            return None
        if self.run_.genesis is None:
            await self.entry.wait_genesis()
        await self._join()
        self.save_secrets()
        self.run_.save()
        return None

    async def _join(self) -> None:
        """A newcomer's first state."""
        if self.gossips:
            self.theta0, snapshot = await self.entry.first_snapshot(self.learner.layout.size)
            self.first_log = UpdateLog.from_snapshot(
                self.theta0, rules_of(self.config), snapshot, contributions=contributions_of(self)
            )
            self.state = shared_state(self.first_log)
            return
        self.state = await self.entry.first_state(self.learner.layout.size)
        if self.state.round > 0:
            await self.saving.keep_records(await self.records(self.mesh.connected(), self.state))

    def _check_size(self, checkpoint: Checkpoint) -> None:
        if checkpoint.state.theta.size != self.learner.layout.size:
            raise ShoalError(
                "The checkpoint does not fit the model",
                values=f"checkpoint has {checkpoint.state.theta.size} parameters, the model {self.learner.layout.size}",
                todo="Use the model that the run was started with, or another --data-dir.",
                code=ExitCode.MISMATCH,
            )

    def _stage(self, show: Show) -> Callable[[str, float], None]:
        def progress(stage: str, share: float) -> None:
            self.phase = stage
            show(share, 1.0, stage)

        return progress

    async def _found(self) -> None:
        """The first state of a new run: warm-up where the manifest asks for it, then the signed genesis."""
        self.phase = "warming up"
        with self.host.progress("warm-up") as show:
            elapsed = asyncio.get_running_loop().time  # `clock.now` asks for the running loop: a worker thread has none
            theta, self.warmup = await self.clock.run(
                lambda: learners.warm_up(self.learner, self._stage(show), elapsed)
            )
        if self.warmup:
            self.say("warm-up done", **{k: round(v, 4) for k, v in self.warmup.items()})
        self.run_.genesis = make_genesis(self.identity, self.run_.id, genesis_hash(theta))
        self.state = self.entry.genesis_state(theta, self.identity.peer_id)
        self.run_.save()

    def _make_parts(self) -> None:
        """Everything that lives as long as the run and needs the layout."""
        node, d = self.config.node, self.learner.layout.size
        self.compression = self.config.run.parsed_compression()
        self.checkpoints = Checkpoints(self.data.checkpoints, node.keep_checkpoints, disk=self.host.disk)
        with usable(self.data.commits):
            self.commit_file = CommitFile(self.data.commits, disk=self.host.disk)
        self._warn_of_cut(self.data.commits, self.commit_file.cut_bytes)
        self.closers.append(self.commit_file.close)
        self.book = Book(d)
        self.store = UpdateStore(
            run_id=self.run_.id,
            d=d,
            compression=self.compression,
            bytes_max=node.updates_bytes_max,
            equivocation=self.proofs.equivocation,
            folder=self.data.updates,
            disk=self.host.disk,
        )
        self.deadlines = Deadlines()
        self.recording: Recording | None = None
        if node.record_bytes_max:
            with usable(self.data.recording):
                self.recording = Recording(
                    self.data.recording, node.record_bytes_max, warn=self.warn, disk=self.host.disk
                )
            self.closers.append(self.recording.close)
            for update in self.journal.updates:  # what was said just before a death
                self.recording.update(update)
            self.journal.on_update = self.recording.update
        self.saving.make_keeper()

    # ------------------------------------------------------------------------------------------------ running

    async def _begin(self, checkpoint: Checkpoint | None) -> None:
        """Restore or store the first state, start membership, dial, run the rounds to their end."""
        if checkpoint is not None:
            await self.clock.run(lambda: self.saving.restore(checkpoint))
            if not (self.gossips or has_record(self.commit_file.records, self.state, self.run_.id)):
                self.warn(f"{self.data.commits} lacks round {self.state.round}: a fork there cannot be traced back")
        else:
            self.phase = "measuring the first state"
            await self.clock.run(self.saving.first)
        self._make_rounds()
        assert self.rounds is not None and self.members is not None
        self.own(self.members.run())
        self.own(look_after_company(self))
        for peer in self.mesh.connected():
            self.members.introduce(peer)
        if checkpoint is not None or self.cache.peers:
            self.phase = "dialling known peers"
            await self.entry.redial()
        await self._on_ready(self)
        self.ready = True
        self.say("ready", round=self.state.round, parameters=self.state.theta.size, invite=self.invite())
        grace = asyncio.get_running_loop().call_later(START_GRACE_SECONDS + 0.1, self.rounds.members_changed)
        self.closers.append(grace.cancel)
        rounds = self.own(self.rounds.run())
        if self.config.run.sync.rounds_max > 0 and self.config.node.exit_when_finished:
            await self._leave_when_finished(rounds)
        await rounds

    @property
    def gossips(self) -> bool:
        """Whether the run is in gossip mode, or in hybrid mode, whose state is gossiped too."""
        return self.config.run.sync.mode != "ring"

    def _make_rounds(self) -> None:
        self.members = make_members(self)
        if self.gossips:
            assert self.first_log is not None and self.theta0 is not None
            make = make_hybrid if self.config.run.sync.mode == "hybrid" else make_gossip
            self.rounds = make(self, self.first_log, self.theta0)
        else:
            self.rounds = make_rounds(self, load_log(self.commit_file.records, self.state, self.run_))
        self.mesh.serve("State", StateServer(self.clock, self._served_state).serve)

    async def _leave_when_finished(self, rounds: asyncio.Task[Any]) -> None:
        """The run has a last round: after it, serve those who are behind for a while, then leave."""
        assert self.rounds is not None and self.members is not None
        lingering = 0.0
        while not rounds.done():
            await asyncio.wait({rounds}, timeout=0.5)
            if not self.rounds.finished:
                continue
            behind = [s for s in self.members.summaries().values() if s.round < self.rounds.state.round]
            lingering += 0.5
            if not behind or lingering > LINGER_SECONDS:
                self.say("the run's last round is done", round=self.rounds.state.round)
                return self._leave.set()

    async def download(self, lineage: bytes | None, peers: list[str], reason: str) -> SharedState | None:
        """A state from the named peers, for a node that has fallen behind. None when nobody could give it."""
        found = await self.entry.download(self.learner.layout.size, peers, reason)
        if found is None:
            return None
        state, commit = found
        if commit:
            self.saving.keeper.last_commit = commit
        return state

    async def records(self, peers: list[str], state: SharedState) -> list[Commit]:
        """The commits behind a state, oldest first, from whoever of `peers` has them; those that decode and are signed."""
        for peer in peers:  # one on another branch gives the commits behind its own state
            raw = await fetch_records(self.mesh.open, [peer], state.lineage, self.trouble)
            commits = decode_records(raw, self.run_.id)
            if any(commit.value.lineage == state.lineage for commit in commits):
                return commits
        return []

    async def download_snapshot(self, peer: str, wanted: bytes) -> Snapshot | None:
        """Gossip mode: the state at a peer's floor, for a node that has fallen behind. None when nobody could give it."""
        peers = [peer, *(other for other in self.mesh.connected() if other != peer)][:SOURCES_MAX]
        found = await self.entry.download_snapshot(self.learner.layout.size, peers, wanted, "fallen behind")
        return found[1] if found is not None else None

    def _served_state(self) -> Servable:
        if isinstance(self.rounds, Gossip):
            return served(self.rounds.replica)
        assert isinstance(self.rounds, Rounds)
        record = self.rounds.log.get(self.rounds.state.lineage)
        return servable(self.rounds.state, record.checked if record else None)

    def shards(self) -> tuple[int, ...]:
        """Data shards that are this peer's now, by everybody's speed."""
        assert self.members is not None
        alive = self.members.alive()
        speeds = {p: r.samples_per_s for p, r in self.members.machine.members().items() if p in alive}
        mine = self.members.machine.me.samples_per_s
        return assign(self.identity.peer_id, {**speeds, self.identity.peer_id: mine}, SHARDS)

    # ------------------------------------------------------------------------------------------------ others

    def _new_life(self, incarnation: int) -> None:
        """Others are told by the event loop; a new life may begin in its worker, just before an update is signed."""
        if self.members is None:
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._loop.call_soon_threadsafe(self.members.new_life, incarnation)
        else:
            self.members.new_life(incarnation)

    def _on_welcome(self, peer: str, welcome: Welcome) -> None:
        self.cache.met(peer, self.mesh.addresses(peer))
        room = peer in self._observed or len(self._observed) < limits.OBSERVERS_MAX
        if (dialed := self.mesh.addresses(peer)) and welcome.observed and room:
            self._observed[peer] = (dialed[0], welcome.observed)
            self.addresses = self._announceable()
            if self.members is not None:
                self.members.set_addresses(tuple(self.addresses))
        try:
            self.lives.heard(welcome)
        except JournalFull as error:
            self.warn(f"publishing nothing until a new life can be written: {error}")
        if self.members is not None and not self.members.acquainted(peer):
            self.members.introduce(peer)

    def _known(self, peer: str) -> tuple[int, int]:
        """Highest (incarnation, seq) of a peer in our state or membership, told to it when it connects."""
        known = self.members.known_dot(peer) if self.members else (0, 0)
        if self.rounds is not None:
            if isinstance(self.rounds, Hybrid):
                return max(known, self.rounds.known(peer))
            vector = self.rounds.log.vector if isinstance(self.rounds, Gossip) else self.rounds.state.vector
            seqs = [(i, s) for (p, i), (s, _) in vector.entries.items() if p == peer]
            known = max([known, *seqs])
        return known

    def _on_message(self, peer: str, envelope: Envelope) -> None:
        if self.uptime <= START_GRACE_SECONDS:  # nobody asks later
            self._heard_from.add(peer)
        if self.rounds is None or self.members is None:
            return
        kind = envelope.WhichOneof("body")
        if kind == "swim":
            self.members.received(peer, envelope.swim)
        elif kind == "ban":
            self.proofs.received(envelope.ban)
        else:
            self.rounds.on_message(peer, envelope)

    def trouble(self, where: str, error: BaseException) -> None:
        """A transfer failed: the peer's fault is charged, the network's is noted, ours ends the node."""
        if isinstance(error, PeerFault):
            self.mesh.fault(where, error)
        elif isinstance(error, StreamClosed | DialError | asyncio.TimeoutError):
            self.say("transfer failed", level="debug", where=where, cause=str(error) or type(error).__name__)
        else:
            self.fail(error)

    def dead(self) -> frozenset[str]:
        """Members that are dead or have left; soon after a start only those of them that had been heard of."""
        assert self.members is not None
        dead = self.members.dead()
        return dead if self.uptime > START_GRACE_SECONDS else dead & self._heard_from

    def heard(self, peer: str, addresses: tuple[str, ...]) -> None:
        """Membership has new addresses of a peer, or it is back."""
        self.mesh.news(peer, addresses)
        self.cache.met(peer, addresses)

    def changed(self, peer: str, old: State | None, new: State, reason: str) -> None:
        """Membership's view of a peer changed."""
        self.say("member", member=peer[-6:], was=old.name.lower() if old else None, now=new.name.lower(), reason=reason)
        if self.rounds is not None:
            self.rounds.members_changed()

    def save_secrets(self) -> None:
        """Peer cache, keys, tokens and bans, now. What the disk does not take is said, and tried again."""
        try:
            self.data.write(self.data.peers, self.cache.encoded())
            self.run_.save_secrets()
            self.troubles.over(NO_CACHE)
        except ShoalError as error:
            self.troubles.wrong(NO_CACHE, error.values, level="warning")

    async def hold(self, phase: str, round_: int) -> None:
        """Test-only: wait in a phase while the file `holding` is there. Once per process."""
        wanted, _, at = self._first_config.node.test_hold.partition("@")
        if phase != wanted or self._held or (at and int(at) > round_):
            return
        marker = self.data.path / "holding"
        if not marker.exists():
            marker.write_text(phase)
        while marker.exists():
            await self.clock.sleep(0.05)
        self._held = True

    # ------------------------------------------------------------------------------------------------ readers

    def invite(self) -> str:
        """A new invite to the run. Raises ShoalError while there is nothing to invite to."""
        if not self.run_.id or not self.addresses:
            raise ShoalError(
                "There is nothing to invite to yet",
                values=f"the node is {self.phase}, expected it to be ready",
                todo="Wait until `shoal status` says ready.",
            )
        others = [(p, tuple(self.mesh.addresses(p)[:2])) for p in sorted(self.members.alive() if self.members else ())]
        peers = [(self.identity.peer_id, tuple(self.addresses)), *[(p, a) for p, a in others if a][:2]]
        return str(Invite(tuple(peers), self.run_.id, self.run_.admission.new_token(self.host.random_bytes)))

    def traffic(self) -> dict[str, int]:
        """Frame bytes sent, by purpose; goes on counting over restarts from the last checkpoint."""
        sent = self.mesh.traffic.sent
        now = {
            "round": sent["Push"] + sent["Pull"] + sent["Dense"] + sent["Chunks"] + sent["Gossip"] + sent["Fetch"],
            "control": sent["Control"],
            "state": sent["State"] + sent["Manifest"],
        }
        return {name: count + int(self.traffic_before.get(name, 0)) for name, count in now.items()}

    def book_law(self) -> dict[str, Any]:
        """Whether residual = learned - adopted - damped holds to the bit, and the residual's L1 norm."""
        parts, residual = self.book.parts(), self.book.residual()
        exact = bool(np.array_equal(residual, parts["learned"] - parts["adopted"] - parts["damped"]))
        return {"exact": exact, "residual_l1": float(np.abs(residual.astype(np.float64)).sum() / 2**40)}


async def _surface(mesh: Mesh) -> None:
    await mesh.failed
