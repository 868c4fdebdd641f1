"""The daemon: puts every part together, starts them in order, ends them in order. Nothing else knows every part.

Covers the three ways to begin (found a run, join one, go on from disk), signals, the control socket's methods. Does not
cover: what any part does. Order of a start: data directory, identity, listening, run, learner, state, membership, rounds;
so that what is most often wrong is said first, before anything slow.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..aggregation.book import Book
from ..aggregation.compress import decode as decode_update
from ..aggregation.compress import max_payload_bytes
from ..aggregation.merge import OuterNesterov, OuterOptimizer, OuterSgd
from ..aggregation.ring import choose_exchange
from ..protocol.admission import Admission, Bans
from ..protocol.ballot_messages import Encoding, Header, parse_header
from ..protocol.ballot_wire import decode_commit
from ..protocol.clock import RealClock
from ..protocol.commit import CommitLog, check_commit, electorate_after
from ..protocol.deadlines import Deadlines
from ..protocol.discovery import Attempts, PeerCache, announceable, candidates
from ..protocol.errors import ExitCode, PeerFault, ShoalError
from ..protocol.grpc_transport import GrpcTransport
from ..protocol.handshake import Refused, Self
from ..protocol.identity import Identity
from ..protocol.invite import Invite
from ..protocol.membership import State
from ..protocol.transport import DialError, StreamClosed
from ..protocol.version import VersionVector, genesis_lineage
from ..protocol.wire_pb2 import BanNotice, Envelope, Signed, Summary, Welcome
from ..protocol.wire_pb2 import Commit as WireCommit
from . import config as configuration
from . import learners
from .config import Config
from .interfaces import interface_addresses
from .keeper import Keeper
from .observe.control import ControlServer
from .observe.logs import set_up_logs
from .observe.progress import Bar, bar
from .store.checkpoint import Checkpoint, Checkpoints
from .store.commits import CommitFile
from .store.datadir import DataDir
from .store.journal import Journal
from .swarm.catch_up import CatchUp
from .swarm.dense_exchange import DenseExchange
from .swarm.local_work import LocalWork, Work
from .swarm.manifest import RunInfo, fetch_manifest, make_genesis, open_genesis, serve_manifest
from .swarm.members import Members
from .swarm.mesh import Mesh
from .swarm.ring_exchange import RingExchange
from .swarm.rounds import Rounds, RoundSettings
from .swarm.shards import SHARDS, assign
from .swarm.state import Applied, MergeRules, SharedState, genesis_hash
from .swarm.state_sync import StateClient, StateServer
from .swarm.updates import UpdateStore

POLL_SECONDS = 0.5
# After the last round: how long to serve those who are still behind before leaving by itself.
LINGER_SECONDS = 10.0
# Before a restarted peer votes it tries everybody it knew, so that it does not decide alone what others decided without it.
REDIAL_SECONDS = 5.0
REDIAL_SECONDS_MAX = 60.0
# After a start, members that were not heard of yet are not counted as dead for this long: when everything was killed, the
# first one back must not go on alone while the others are still starting.
START_GRACE_SECONDS = 20.0


class Daemon:
    """One node from start to end."""

    def __init__(self, config: Config, invite: Invite | None, *, given_run: bool) -> None:
        """`given_run`: the configuration file has [run] tables, so they must agree with a run already on disk."""
        self.config, self.invite, self._given_run = config, invite, given_run
        self.clock = RealClock()
        self.rng = random.Random(os.urandom(16))
        self.boot_id = os.urandom(16)
        self.phase = "starting"
        self.ready = False
        self.addresses: list[str] = []
        self.warnings: list[str] = []
        self.warmup: dict[str, float] = {}
        self.manifest = b""
        self.run_id = b""
        self.genesis: Signed | None = None
        self.base_hash = self.layout_hash = b""
        self.rounds: Rounds | None = None
        self.members: Members | None = None
        self._owned: list[asyncio.Task[Any]] = []
        self._leave = asyncio.Event()
        self._start = asyncio.Event()
        if not config.node.wait_for_start:
            self._start.set()
        self._held = False
        self._heard_from: set[str] = set()
        self._started_at = time.monotonic()
        self._closers: list[Callable[[], Any]] = []

    # ------------------------------------------------------------------------------------------------ life

    async def run(self) -> int:
        """From nothing to the end; the exit code. Raises ShoalError for what a person must mend."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        self.failed: asyncio.Future[None] = loop.create_future()
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

    def _on_signal(self) -> None:
        if self._leave.is_set():
            os._exit(130)  # a second one exits now; everything that must survive is on disk already
        self.phase = "leaving"
        self._leave.set()

    async def _goodbye(self, work: asyncio.Task[None]) -> None:
        """Push what is learned, checkpoint, tell the others; all within the grace time."""
        grace = self.config.node.leave_grace_seconds
        if self.rounds is not None and not work.done():
            started = self.clock.now()
            pushed = await self.rounds.leave(grace * 0.5)
            left = max(1.0, grace - (self.clock.now() - started))
            await asyncio.wait({work}, timeout=left)
            self.say("leaving", pushed=pushed, round=self.rounds.state.round)
            if self.members is not None:
                self.members.leave()
                await self.clock.sleep(min(0.3, left))  # the goodbye is best effort; this lets it out

    async def _close(self, *tasks: asyncio.Task[Any]) -> None:
        self.failed.cancel()
        for task in [*tasks, *self._owned]:
            task.cancel()
        await asyncio.gather(*tasks, *self._owned, return_exceptions=True)
        for close in reversed(self._closers):
            result = close()
            if asyncio.iscoroutine(result):
                await result

    def _own(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._owned.append(task)
        task.add_done_callback(lambda t: None if t.cancelled() else self._fail(t.exception()))

    def _fail(self, error: BaseException | None) -> None:
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)

    # ------------------------------------------------------------------------------------------------ start

    async def _live(self) -> None:
        node = self.config.node
        path = Path(node.data_dir).expanduser()
        self.data = DataDir(path)
        self._closers.append(self.data.close)
        self.identity = Identity.open(self.data.identity)
        self._closers.append(self.identity.close)
        self.say = set_up_logs(path, node.log_level, self.identity.peer_id)
        self.journal = Journal(self.data.journal)
        self._closers.append(self.journal.close)
        if not self.journal.incarnation:
            self.journal.start_incarnation()
        control = ControlServer(self.data.control, self._methods(), self._fail)
        await control.start()
        self._closers.append(control.close)
        self.cache = PeerCache(self.data.peers)
        if self.cache.warning:
            self._warn(self.cache.warning)
        fresh_founder = self._choose_run()
        await self._listen()
        if self.invite is not None and not self.data.manifest.exists():
            await self._learn_run()
        checkpoint = await self._prepare(fresh_founder)
        await self._begin(checkpoint)

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        self.say(text, level="warning")

    def _choose_run(self) -> bool:
        """Found a run, join the invite's, or go on with the one on disk. True when this peer founds it now."""
        on_disk = self.data.manifest.read_bytes() if self.data.manifest.exists() else b""
        if on_disk:
            self.run_id = configuration.run_id_of(on_disk)
            wanted = self.invite.run_id if self.invite else self.run_id
            if self._given_run and self.invite is None:
                wanted = configuration.run_id_of(configuration.manifest_bytes(self.config.run))
            if wanted != self.run_id:
                raise ShoalError(
                    "The data directory belongs to another run",
                    values=f"{self.data.path} has run {self.run_id.hex()[:16]}, asked for {wanted.hex()[:16]}",
                    todo="Use another --data-dir for the other run, or leave the [run] tables as they were.",
                    code=ExitCode.MISMATCH,
                )
            self._take_manifest(on_disk)
        elif self.invite is not None:
            self.run_id = self.invite.run_id
        else:
            self.run_id = configuration.run_id_of(configuration.manifest_bytes(self.config.run))
            self._take_manifest(configuration.manifest_bytes(self.config.run))
        mode = (
            self.config.run.admission.mode
            if self.manifest
            else ("token" if self.invite and self.invite.token else "open")
        )
        self.admission = Admission(mode, frozenset(self.config.run.admission.allow))
        self.bans = Bans()
        if self.data.secrets.exists():
            saved = json.loads(self.data.secrets.read_text())
            self.admission.load(saved["admission"])
            self.bans = Bans.from_dict(saved["bans"])
        founding = not on_disk and self.invite is None
        if founding and mode == "token":
            self.admission.key = os.urandom(32)
        if self.invite is not None and self.invite.token and not self.admission.key:
            self.admission.token = self.invite.token
        return founding

    def _take_manifest(self, manifest: bytes) -> None:
        self.manifest = manifest
        self.config = self.config.model_copy(update={"run": configuration.run_from_manifest(manifest)})

    def _save_secrets(self) -> None:
        saved = {"admission": self.admission.to_dict(), "bans": self.bans.to_dict()}
        self.data.write(self.data.secrets, json.dumps(saved).encode())

    def _self(self) -> Self:
        return Self(
            self.identity,
            self.run_id,
            self.boot_id,
            self.journal.incarnation,
            tuple(self.addresses),
            self.admission,
            self.bans,
        )

    async def _listen(self) -> None:
        node = self.config.node
        transport = GrpcTransport(self.identity)
        self.mesh = Mesh(
            transport=transport,
            clock=self.clock,
            me=self._self,
            random_bytes=os.urandom,
            rng=self.rng,
            known=self._known,
            say=self.say,
        )
        self._closers.append(self.mesh.close)
        self.mesh.on_message(self._on_message)
        self.mesh.on_welcome(self._on_welcome)
        self.mesh.serve("Manifest", lambda peer, stream: serve_manifest(stream, self._info))
        self.port = await self.mesh.listen(node.listen, node.port)
        self.addresses = announceable(node.listen, self.port, interface_addresses(), node.announce)
        self._own(self._surface(self.mesh))
        self.say("listening", port=self.port, addresses=self.addresses, peer_id=self.identity.peer_id)

    async def _surface(self, mesh: Mesh) -> None:
        await mesh.failed

    def _info(self) -> RunInfo:
        if not self.manifest:
            raise StreamClosed("this peer does not know the run yet")
        return RunInfo(self.manifest, self.base_hash, self.layout_hash, self.genesis)

    # ------------------------------------------------------------------------------------------------ joining

    async def _dial_somebody(self, seconds_max: float) -> list[str]:
        """Connect to whoever answers first of invite, cache, LAN and DHT; keeps trying with backoff. Returns who answered."""
        attempts = Attempts(self.clock.now(), seconds_max)
        while True:
            sources = [
                ("invite", self.invite.peers if self.invite else ()),
                ("cache", list(self.cache.peers.items())),
                ("lan", list(getattr(self, "lan_found", {}).items())),
            ]
            attempts.failures.clear()
            for candidate in candidates(sources, self.identity.peer_id):
                try:
                    await self.mesh.connect(candidate.address, candidate.peer)
                    return [candidate.peer]
                except Refused as error:
                    if len(candidates(sources, self.identity.peer_id)) == 1 and error.permanent:
                        raise
                    attempts.failed(candidate, f"{error.what}: {error.values}", error.permanent)
                except (DialError, PeerFault, StreamClosed, asyncio.TimeoutError) as error:
                    permanent = isinstance(error, DialError) and error.kind == "wrong_peer"
                    attempts.failed(candidate, str(error) or type(error).__name__, permanent)
            wait, reason = attempts.next_wait(self.clock.now(), self.rng)
            if wait is None:
                raise attempts.error(reason)
            self.phase = "searching for peers"
            self.say("no peer answered yet", level="warning", reason=reason)
            await self.clock.sleep(wait)

    async def _learn_run(self) -> None:
        """Connect with the invite and receive the manifest."""
        self.phase = "connecting"
        (peer,) = await self._dial_somebody(self.config.node.bootstrap_seconds_max)
        self.phase = "receiving the manifest"
        info = await self._ask_manifest(peer)
        self._take_manifest(info.manifest)
        self._save_cache()
        self.admission.mode = self.config.run.admission.mode
        self.admission.allowed = frozenset(self.config.run.admission.allow)
        self._save_secrets()

    async def _ask_manifest(self, peer: str) -> RunInfo:
        last: BaseException | None = None
        for _ in range(5):
            try:
                return await fetch_manifest(await self.mesh.open(peer, "Manifest"), self.run_id)
            except (StreamClosed, DialError, asyncio.TimeoutError) as error:
                last = error
                await self.clock.sleep(POLL_SECONDS)
            except PeerFault as fault:
                last = fault
                break
        raise ShoalError(
            "The run's manifest could not be had",
            values=f"{peer} gave: {last}; expected a manifest of run {self.run_id.hex()[:16]}",
            todo="Try again, or ask for an invite that names another peer.",
            code=ExitCode.UNREACHABLE,
        )

    async def _wait_genesis(self) -> None:
        """The founder may still be warming up: wait for its genesis, saying so."""
        with bar("waiting for the founder's warm-up") as show:
            waited = 0.0
            while self.genesis is None:
                peers = self.mesh.connected() or await self._dial_somebody(self.config.node.bootstrap_seconds_max)
                info = await self._ask_manifest(peers[0])
                self._compare(info, peers[0])
                self.genesis = info.genesis
                if self.genesis is None:
                    self.phase = "waiting for the founder's warm-up"
                    show(waited, 0)
                    waited += POLL_SECONDS
                    await self.clock.sleep(POLL_SECONDS)

    def _compare(self, info: RunInfo, peer: str) -> None:
        """Refuse to train on another base than the others."""
        for name, theirs, mine in (
            ("base model", info.base_hash, self.base_hash),
            ("trainable layout", info.layout_hash, self.layout_hash),
        ):
            if theirs and theirs != mine:
                raise ShoalError(
                    f"This node's {name} is not the run's",
                    values=f"mine {mine.hex()[:16]} ({self.config.node.model_path or self.config.run.model.name}), "
                    f"the run's {theirs.hex()[:16]} (as {peer} has it)",
                    todo="Point node.model_path at the same weights, the same file or revision that the founder uses.",
                    code=ExitCode.MISMATCH,
                )

    # ------------------------------------------------------------------------------------------------ learner and state

    async def _prepare(self, founding: bool) -> Checkpoint | None:
        """Load the learner; found, download or restore the first state. Returns the checkpoint to go on from."""
        self.phase = "loading the model"
        with bar("loading the model") as show:
            progress = self._stage(show)
            self.learner = await self.clock.run(
                lambda: learners.build(self.config, self.identity.peer_id, self.data.path, progress)
            )
        self._closers.append(self.learner.close)
        self.base_hash = await self.clock.run(lambda: learners.base_hash_of(self.learner))
        self.layout_hash = self.learner.layout.hash()
        self._make_parts()
        checkpoint = await self.clock.run(lambda: self.checkpoints.newest(self._warn))
        if self.data.genesis.exists():
            self.genesis = Signed.FromString(self.data.genesis.read_bytes())
        if checkpoint is not None:
            if checkpoint.state.theta.size != self.learner.layout.size:
                raise ShoalError(
                    "The checkpoint does not fit the model",
                    values=f"checkpoint has {checkpoint.state.theta.size} parameters, the model {self.learner.layout.size}",
                    todo="Use the model that the run was started with, or another --data-dir.",
                    code=ExitCode.MISMATCH,
                )
            return checkpoint
        if founding or (self.genesis is None and self.invite is None and not self.cache.peers):
            await self._found()
            return None
        if self.genesis is None:
            await self._wait_genesis()
        assert self.genesis is not None
        await self._first_download()
        self._save_cache()
        self.data.write(self.data.genesis, self.genesis.SerializeToString())
        self.data.write(self.data.manifest, self.manifest)
        return None

    def _stage(self, show: Bar) -> Callable[[str, float], None]:
        def progress(stage: str, share: float) -> None:
            self.phase = stage
            show(share, 1.0, stage)

        return progress

    async def _found(self) -> None:
        """The first state of a new run: warm-up where the manifest asks for it, then the signed genesis."""
        self.phase = "warming up"
        with bar("warm-up") as show:
            theta, self.warmup = await self.clock.run(lambda: learners.warm_up(self.learner, self._stage(show)))
        if self.warmup:
            self.say("warm-up done", **{k: round(v, 4) for k, v in self.warmup.items()})
        self.genesis = make_genesis(self.identity, self.run_id, genesis_hash(theta))
        self.state = self._genesis_state(theta, self.identity.peer_id)
        self._save_secrets()
        self.data.write(self.data.manifest, self.manifest)
        self.data.write(self.data.genesis, self.genesis.SerializeToString())

    def _genesis_state(self, theta: np.ndarray, founder: str) -> SharedState:
        lineage = genesis_lineage(self.run_id, founder, genesis_hash(theta))
        return SharedState.make(
            theta=theta,
            outer=None,
            round_=0,
            lineage=lineage,
            vector=VersionVector({}),
            electorate=[founder],
            total_weight=0,
        )

    async def _first_download(self) -> None:
        """A newcomer's state, from everybody that can be reached; tries until somebody gives it."""
        while True:
            self.phase = "downloading"
            peers = self.mesh.connected() or await self._dial_somebody(self.config.node.bootstrap_seconds_max)
            state = await self._download(None, peers, "joining")
            if state is not None:
                self.state = state
                return
            await self.clock.sleep(POLL_SECONDS)

    async def _download(self, lineage: bytes | None, peers: list[str], reason: str) -> SharedState | None:
        """Download and check a state. None when nobody could give it."""
        with bar("downloading the state") as show:
            client = StateClient(
                clock=self.clock,
                open_stream=self.mesh.open,
                folder=self.data.path,
                d=self.learner.layout.size,
                run_id=self.run_id,
                trouble=self._trouble,
                progress=lambda done, total: show(done, total),
                hold=self._hold,
            )
            try:
                found = await client.download(peers, lineage)
            except OSError as error:
                self._warn(f"the state cannot be downloaded: {error.strerror or error}")
                return None
        if found is None:
            return None
        state, wire, why = found
        self.say("state downloaded", round=state.round, believed=why, reason=reason)
        if state.round == 0:
            assert self.genesis is not None
            genesis = open_genesis(self.genesis, self.run_id)
            expected = self._genesis_state(state.theta, genesis.founder)
            return state if expected.hash == state.hash and expected.lineage == genesis.lineage else None
        if wire is None:
            return state
        try:
            commit = decode_commit(wire, self.run_id)
        except PeerFault as fault:
            self._trouble("state download", fault)
            return None
        after = electorate_after(commit.value)
        if commit.value.lineage != state.lineage or after != frozenset(state.electorate):
            return None
        self.keeper.last_commit = wire.SerializeToString()
        return state

    def _trouble(self, where: str, error: BaseException) -> None:
        if isinstance(error, PeerFault):
            self.mesh.fault(where, error)
        elif isinstance(error, StreamClosed | DialError | asyncio.TimeoutError):
            self.say("transfer failed", level="debug", where=where, cause=str(error) or type(error).__name__)
        else:
            self._fail(error)

    def _make_parts(self) -> None:
        """Everything that lives as long as the run and needs the layout."""
        run, node, d = self.config.run, self.config.node, self.learner.layout.size
        self.compression = run.parsed_compression()
        self.checkpoints = Checkpoints(self.data.checkpoints, node.keep_checkpoints)
        self.commit_file = CommitFile(self.data.commits)
        self._closers.append(self.commit_file.close)
        self.book = Book(d)
        self.store = UpdateStore(
            run_id=self.run_id,
            d=d,
            compression=self.compression,
            bytes_max=node.updates_bytes_max,
            equivocation=self._equivocation,
        )
        self.deadlines = Deadlines()
        self._make_keeper()

    def _make_keeper(self) -> None:
        self.keeper = Keeper(
            data=self.data,
            checkpoints=self.checkpoints,
            commits=self.commit_file,
            journal=self.journal,
            store=self.store,
            book=self.book,
            learner=self.learner,
            evaluate_every=self.config.node.eval_every_rounds,
            rounds_max=self.config.run.sync.rounds_max,
            extra=lambda: {"deadlines": self.deadlines.snapshot(), "traffic": self._traffic(), "warmup": self.warmup},
            say=self.say,
        )

    def _equivocation(self, first: Header, second: Header) -> None:
        """Two headers under one dot: proof of a faulty peer. Bans it here and spreads the proof."""
        notice = BanNotice(
            peer=first.dot.peer,
            reason=f"equivocation: two updates named {first.dot}",
            first=Signed.FromString(first.signed),
            second=Signed.FromString(second.signed),
        )
        self._ban(notice)

    def _ban(self, notice: BanNotice) -> None:
        if self.mesh.ban(notice.peer, notice.reason, notice.SerializeToString()):
            self._warn(f"banned {notice.peer}: {notice.reason}")
            self._save_secrets()
            for peer in self.members.alive() if self.members else ():
                self.mesh.post(peer, Envelope(ban=notice))

    # ------------------------------------------------------------------------------------------------ running

    async def _begin(self, checkpoint: Checkpoint | None) -> None:
        """Restore or store the first state, start membership, dial, run the rounds to their end."""
        if checkpoint is not None:
            await self.clock.run(lambda: self._restore(checkpoint))
        else:
            await self.clock.run(self._first_save)
        log = self._commit_log()
        self._make_rounds(log)
        assert self.rounds is not None and self.members is not None
        for method, handler in (
            ("Push", self.exchange.serve_push),
            ("Pull", self.exchange.serve_pull),
            ("Dense", self.dense.serve),
            ("Chunks", self.dense.serve_chunks),
            ("State", StateServer(self.clock, self._served_state).serve),
        ):
            self.mesh.serve(method, handler)
        self._own(self.members.run())
        self._own(self._save_peers())
        for peer in self.mesh.connected():
            self.members.introduce(peer)
        if checkpoint is not None or self.cache.peers:
            await self._redial()
        await self._start_discovery()
        self.ready = True
        self.say("ready", round=self.state.round, parameters=self.state.theta.size, invite=self._invite())
        asyncio.get_running_loop().call_later(START_GRACE_SECONDS + 0.1, self.rounds.members_changed)
        rounds = asyncio.ensure_future(self.rounds.run())
        self._owned.append(rounds)
        lingering = 0.0
        while not rounds.done():
            await asyncio.wait({rounds}, timeout=POLL_SECONDS)
            if self.rounds.finished and self.config.node.exit_when_finished and not rounds.done():
                behind = [s for s in self.members.summaries().values() if s.round < self.rounds.state.round]
                lingering += POLL_SECONDS
                if not behind or lingering > LINGER_SECONDS:
                    self.say("the run's last round is done", round=self.rounds.state.round)
                    self._leave.set()
                    await self.clock.sleep(self.config.node.leave_grace_seconds)
        rounds.result()

    def _first_save(self) -> None:
        self.learner.load(self.state.theta)
        self.keeper.checkpoint(self.state)
        if self.state.round == 0:
            self.keeper.record(self.state, None, None, None, self._traffic())

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Exact resume: state, book, learner; then what the journal has beyond the checkpoint is booked again."""
        self.state = checkpoint.state
        self.book = Book.from_arrays(checkpoint.book)
        self.deadlines.restore(checkpoint.extra.get("deadlines", {}))
        self.warmup = checkpoint.extra.get("warmup", {})
        self._traffic_before = checkpoint.extra.get("traffic", {})
        self.learner.load(self.state.theta)
        if checkpoint.learner:
            self.learner.restore(dict(checkpoint.learner))
        self._make_keeper()
        self.keeper.last_commit = checkpoint.commit
        for update in self.journal.updates:
            if self.book.knows(update.dot):
                continue
            header = parse_header(Signed.FromString(update.signed))
            self.book.learn(update.delta)
            if header.encoding is Encoding.DENSE:
                self.book.record(update.dot, np.frombuffer(update.payload, "<f4").astype(np.float32))
            else:
                self.book.record(update.dot, decode_update(update.payload, self.state.theta.size, self.compression))
                self.store.put(header, update.payload)
        self.say("restored", round=self.state.round, journaled=len(self.journal.updates))

    def _commit_log(self) -> CommitLog:
        """The log from the records on disk that end in our state; a record that does not fit is left out."""
        commits = []
        for raw in self.commit_file.records:
            try:
                commits.append(decode_commit(WireCommit.FromString(raw), self.run_id))
            except PeerFault:
                continue
        chain: list[Any] = []
        wanted = self.state.lineage
        for commit in reversed(commits):
            if commit.value.lineage == wanted:
                chain.append(commit)
                wanted = commit.base_lineage
        if not chain:
            return CommitLog(self.state.lineage, self.state.round, self.state.total_weight)
        chain.reverse()
        # The oldest record only says who could vote in the next one.
        root = chain[0]
        log = CommitLog(root.value.lineage, root.value.round)
        electorate = electorate_after(root.value)
        for commit in chain[1:]:
            checked = check_commit(commit, electorate, commit.value.round, commit.base_lineage)
            log.add(checked, sum(u.weight for u in commit.value.updates), tip=checked.lineage)
            electorate = electorate_after(commit.value)
        return log

    def _make_rounds(self, log: CommitLog) -> None:
        run = self.config.run
        outer: OuterOptimizer = (
            OuterSgd(run.sync.outer_lr)
            if run.sync.outer == "sgd"
            else OuterNesterov(run.sync.outer_lr, run.sync.outer_momentum)
        )
        rules = MergeRules(
            compression=self.compression,
            outer=outer,
            weight_max=run.sync.weight_max,
            weight_median_multiple_max=run.sync.weight_median_multiple_max,
            norm_max=run.sync.norm_max,
        )
        self.members = Members(
            identity=self.identity,
            run_id=self.run_id,
            config=run.membership.build(),
            rng=self.rng,
            clock=self.clock,
            incarnation=self.journal.incarnation,
            boot_id=self.boot_id,
            addresses=tuple(self.addresses),
            post=self.mesh.post,
            heard=self._heard,
            changed=self._changed,
            summary=lambda: self.rounds.summary() if self.rounds else None,
            admissible=self._admissible,
        )
        self.exchange = RingExchange(
            me=self.identity.peer_id,
            clock=self.clock,
            open_stream=self.mesh.open,
            store=self.store,
            is_dead=lambda peer: peer in self.members.dead() if self.members else False,
            on_arrival=lambda: self.rounds.report_held() if self.rounds else None,
            on_trouble=self._trouble,
            before_payload=lambda: self._hold("exchanging", self.rounds.state.round + 1 if self.rounds else 0),
        )
        self.dense = DenseExchange(
            me=self.identity.peer_id,
            clock=self.clock,
            open_stream=self.mesh.open,
            d=self.learner.layout.size,
            bits=run.sync.dense_bits,
            rules=rules,
            on_complete=lambda hashes: self.rounds.dense_complete(hashes) if self.rounds else None,
            on_failure=lambda attempt, why: self.rounds.dense_failed(attempt, why) if self.rounds else None,
            on_trouble=self._trouble,
            before_chunk=lambda: self._hold("exchanging", self.rounds.state.round + 1 if self.rounds else 0),
        )
        self.work = LocalWork(
            learner=self.learner,
            clock=self.clock,
            book=self.book,
            journal=self.journal,
            store=self.store,
            identity=self.identity,
            run_id=self.run_id,
            compression=self.compression,
            shards=self._shards,
            dense=self._dense,
        )
        self.catch_up = CatchUp(
            clock=self.clock,
            post=self.mesh.post,
            summaries=self.members.summaries,
            download=self._download,
            say=self.say,
            conflicts_seen=self._warn,
        )
        self.rounds = Rounds(
            identity=self.identity,
            run_id=self.run_id,
            clock=self.clock,
            settings=RoundSettings(
                target_samples=run.sync.target_samples,
                round_seconds_max=run.sync.round_seconds_max,
                rounds_max=run.sync.rounds_max,
                rules=rules,
            ),
            state=self.state,
            log=log,
            work=self.work,
            exchange=self.exchange,
            dense=self.dense,
            store=self.store,
            journal=self.journal,
            deadlines=self.deadlines,
            catch_up=self.catch_up,
            post=self.mesh.post,
            alive=self.members.alive,
            dead=self._dead,
            expect=self.members.expect,
            summaries=self.members.summaries,
            save=self._save,
            say=self.say,
            hold=self._hold,
            started=self._start,
        )

    def _dense(self, electorate: int) -> bool:
        """Whether this round's update is exchanged densely; equal on all peers, because nothing measured enters."""
        sync, d = self.config.run.sync, self.learner.layout.size
        if sync.exchange != "auto":
            return sync.exchange == "dense"
        kind, _ = choose_exchange(max(2, electorate), max_payload_bytes(d, self.compression), d, sync.dense_bits)
        return kind == "dense"

    async def _save(self, applied: Applied | None, checked: Any, work: Work | None) -> bool:
        assert self.rounds is not None
        state, traffic = self.rounds.state, self._traffic()
        await self.clock.run(lambda: self.keeper.save(state, applied, checked, work, traffic))
        if work is not None and work.seconds > 0 and self.members is not None:
            self.members.set_speed(work.result.weight / work.seconds)
        return not self.keeper.trouble

    def _served_state(self) -> tuple[SharedState, Any]:
        assert self.rounds is not None
        record = self.rounds.log.get(self.rounds.state.lineage)
        return self.rounds.state, record.checked if record else None

    def _shards(self) -> tuple[int, ...]:
        assert self.members is not None
        alive = self.members.alive()
        speeds = {p: r.samples_per_s for p, r in self.members.machine.members().items() if p in alive}
        return assign(
            self.identity.peer_id, {**speeds, self.identity.peer_id: self.members.machine.me.samples_per_s}, SHARDS
        )

    # ------------------------------------------------------------------------------------------------ others

    def _known(self, peer: str) -> tuple[int, int]:
        """Highest (incarnation, seq) of a peer in our state or membership, told to it when it connects."""
        known = self.members.known_dot(peer) if self.members else (0, 0)
        if self.rounds is not None:
            seqs = [(i, s) for (p, i), (s, _) in self.rounds.state.vector.entries.items() if p == peer]
            known = max([known, *seqs])
        return known

    def _on_welcome(self, peer: str, welcome: Welcome) -> None:
        self.cache.met(peer, self.mesh.addresses(peer))
        known = (welcome.incarnation_known, welcome.seq_known)
        if known > (self.journal.incarnation, self.journal.last_seq):
            before = self.journal.incarnation
            incarnation = self.journal.start_incarnation(welcome.incarnation_known)
            self.say("new incarnation: the swarm knows more of this peer than its disk", level="warning",
                     before=before, now=incarnation)  # fmt: skip
            if self.members is not None:
                self.members.new_life(incarnation)
        if self.members is not None:
            self.members.introduce(peer)

    def _on_message(self, peer: str, envelope: Envelope) -> None:
        self._heard_from.add(peer)
        if self.rounds is None or self.members is None:
            return
        kind = envelope.WhichOneof("body")
        if kind == "swim":
            self.members.received(peer, envelope.swim)
        elif kind == "commit_request":
            self.catch_up.answer(self.rounds, peer, envelope.commit_request)
        elif kind == "ban":
            self._on_ban(envelope.ban)
        else:
            self.rounds.on_message(peer, envelope)

    def _on_ban(self, notice: BanNotice) -> None:
        """A proof of equivocation convinces by itself; a ban without one is somebody's opinion and is not adopted."""
        from ..protocol.ballot_wire import decode_header

        first, second = (decode_header(s, self.run_id) for s in (notice.first, notice.second))
        if first.dot != second.dot or first.dot.peer != notice.peer or first.update_hash == second.update_hash:
            raise PeerFault("bad_ban", "the two headers prove nothing")
        self._ban(notice)

    def _admissible(self, peer: str) -> bool:
        """Whose signed words may enter the member table."""
        if self.bans.reason(peer) is not None:
            return False
        return self.admission.mode != "allowlist" or peer in self.admission.allowed

    def _dead(self) -> frozenset[str]:
        """Members that are dead or have left; soon after a start only those of them that had been heard of."""
        assert self.members is not None
        dead = self.members.dead()
        return dead if time.monotonic() - self._started_at > START_GRACE_SECONDS else dead & self._heard_from

    def _heard(self, peer: str, addresses: tuple[str, ...]) -> None:
        self.mesh.news(peer, addresses)
        self.cache.met(peer, addresses)

    def _changed(self, peer: str, old: State | None, new: State, reason: str) -> None:
        self.say("member", member=peer[-6:], was=old.name.lower() if old else None, now=new.name.lower(), reason=reason)
        if self.rounds is not None:
            self.rounds.members_changed()

    async def _redial(self) -> None:
        """Dial everybody known once, at the same time: before the first vote after a restart, and while alone."""
        self.phase = "dialling known peers"

        async def one(peer: str, address: str) -> None:
            try:
                await self.mesh.connect(address, peer)
            except Refused as error:
                if error.permanent and error.code is not ExitCode.MISMATCH:
                    raise
            except (DialError, StreamClosed, PeerFault, asyncio.TimeoutError):
                pass

        dials = [one(p, a[0]) for p, a in self.cache.peers.items() if a and p not in self.mesh.connected()]
        if dials:
            await asyncio.wait_for(asyncio.gather(*dials), REDIAL_SECONDS * 3)

    async def _start_discovery(self) -> None:
        node = self.config.node
        if node.lan_discovery:
            from ..protocol.lan import Lan

            hosts = [a.rpartition(":")[0] for a in self.addresses]
            lan = Lan(self.identity.peer_id, self.run_id, self.port, hosts)
            try:
                await lan.start(self._found_nearby)
                self._closers.append(lan.close)
            except OSError as error:
                self._warn(f"no LAN discovery: {error}")
        if node.dht.enabled:
            from ..protocol.dht import Dht

            dht = Dht(self.identity, self.data.identity, self.run_id)
            self._closers.append(dht.close)
            try:
                where = await dht.start(node.dht.listen, node.dht.bootstrap)
            except ShoalError as error:
                if error.code is ExitCode.DEPENDENCY:
                    raise
                self._warn(f"not in the DHT: {error.values}")  # one way of finding peers among several
            else:
                self.say("in the DHT", addresses=where)
                self._own(self._dht_loop(dht))

    def _found_nearby(self, peer: str, addresses: list[str]) -> None:
        self.mesh.news(peer, addresses)
        if self.members is not None and self.members.machine.state(peer) is not State.ALIVE:
            self.members.introduce(peer)

    async def _dht_loop(self, dht: Any) -> None:
        while True:
            await dht.announce(self.addresses)
            for peer, addresses in (await dht.find()).items():
                self._found_nearby(peer, addresses)
            await self.clock.sleep(60.0)

    async def _save_peers(self) -> None:
        """The peer cache and the secrets, when they changed; and a dial of everybody known while nobody is here."""
        written, dialled_at, pause = (b"", ""), self.clock.now(), REDIAL_SECONDS
        while True:
            now = (self.cache.encoded(), json.dumps(self.admission.to_dict()))
            if now != written:
                written = now
                self._save_cache()
            await self.clock.sleep(POLL_SECONDS)
            if self.members is None or self.members.alive():
                pause = REDIAL_SECONDS
            elif self.clock.now() - dialled_at > pause and self.cache.peers:
                self.say(
                    "alone: training goes on; dialling everybody known", level="warning", known=len(self.cache.peers)
                )
                await self._redial()
                dialled_at, pause = self.clock.now(), min(2 * pause, REDIAL_SECONDS_MAX)

    def _save_cache(self) -> None:
        try:
            self.data.write(self.data.peers, self.cache.encoded())
            self._save_secrets()
        except ShoalError as error:
            self.say("peer cache not saved", level="warning", cause=error.values)

    async def _hold(self, phase: str, round_: int) -> None:
        """Test-only: wait in a phase while the file `holding` is there. Once per process."""
        wanted, _, at = self.config.node.test_hold.partition("@")
        if phase != wanted or self._held or (at and int(at) != round_):
            return
        marker = self.data.path / "holding"
        if not marker.exists():
            marker.write_text(phase)
        while marker.exists():
            await asyncio.sleep(0.05)
        self._held = True

    # ------------------------------------------------------------------------------------------------ control

    def _methods(self) -> dict[str, Any]:
        async def status(params: dict[str, Any]) -> dict[str, Any]:
            return self.status()

        async def peers(params: dict[str, Any]) -> dict[str, Any]:
            return {"peers": self.peers()}

        async def invite(params: dict[str, Any]) -> dict[str, Any]:
            text = self._invite()
            self._save_secrets()
            return {"invite": text}

        async def leave(params: dict[str, Any]) -> dict[str, Any]:
            self.phase = "leaving"
            self._leave.set()
            return {"leaving": True, "grace_seconds": self.config.node.leave_grace_seconds}

        async def start(params: dict[str, Any]) -> dict[str, Any]:
            self._start.set()
            return {"started": True}

        async def book(params: dict[str, Any]) -> dict[str, Any]:
            return await self.clock.run(self._book_law)

        return {"status": status, "peers": peers, "invite": invite, "leave": leave, "start": start, "book": book}

    def _book_law(self) -> dict[str, Any]:
        parts, residual = self.book.parts(), self.book.residual()
        exact = bool(np.array_equal(residual, parts["learned"] - parts["adopted"] - parts["damped"]))
        return {"exact": exact, "residual_l1": float(np.abs(residual.astype(np.float64)).sum() / 2**40)}

    def _invite(self) -> str:
        if not self.run_id or not self.addresses:
            raise ShoalError(
                "There is nothing to invite to yet",
                values=f"the node is {self.phase}, expected it to be ready",
                todo="Wait until `shoal status` says ready.",
            )
        others = [(p, tuple(self.mesh.addresses(p)[:2])) for p in sorted(self.members.alive() if self.members else ())]
        peers = [(self.identity.peer_id, tuple(self.addresses)), *[(p, a) for p, a in others if a][:2]]
        return str(Invite(tuple(peers), self.run_id, self.admission.new_token(os.urandom)))

    def _traffic(self) -> dict[str, int]:
        """Frame bytes sent, by purpose; goes on counting over restarts from the last checkpoint."""
        sent = self.mesh.traffic.sent
        before = getattr(self, "_traffic_before", {})
        now = {
            "round": sent["Push"] + sent["Pull"] + sent["Dense"] + sent["Chunks"],
            "control": sent["Control"],
            "state": sent["State"] + sent["Manifest"],
        }
        return {name: count + int(before.get(name, 0)) for name, count in now.items()}

    def status(self) -> dict[str, Any]:
        """What `shoal status` shows."""
        rounds = self.rounds
        status: dict[str, Any] = {
            "peer_id": self.identity.peer_id,
            "pid": os.getpid(),
            "run_id": self.run_id.hex(),
            "name": self.config.run.name,
            "ready": self.ready,
            "phase": rounds.progress.phase if rounds and self.ready and not self._leave.is_set() else self.phase,
            "addresses": self.addresses,
            "uptime_seconds": round(time.monotonic() - self._started_at, 1),
            "warmup_seconds": round(self.warmup.get("seconds", 0.0), 1),
            "warnings": self.warnings[-20:],
        }
        if rounds is not None and self.members is not None:
            state = rounds.state
            others = self.members.summaries().values()
            total = rounds.progress.samples + sum(s.samples for s in others if s.open_round == state.round + 1)
            status |= {
                "round": state.round,
                "saved_round": rounds.durable_round,
                "rounds_max": rounds.settings.rounds_max,
                "finished": rounds.finished,
                "lineage": state.lineage.hex(),
                "state_hash": state.hash.hex(),
                "vector_hash": state.vector.hash().hex(),
                "parameters": int(state.theta.size),
                "incarnation": self.journal.incarnation,
                "seq": self.journal.last_seq,
                "samples": rounds.progress.samples,
                "swarm_samples": total,
                "target_samples": rounds.settings.target_samples,
                "metrics": {k: round(v, 5) for k, v in rounds.progress.metrics.items()},
                "evaluation": self.keeper.evaluation,
                "electorate": list(state.electorate),
                "member": self.identity.peer_id in state.electorate,
                "alive": 1 + len(self.members.alive()),
                "alone": not self.members.alive(),
                "bytes": self._traffic(),
                "faults": {k: n for k, n in self.mesh.traffic.faults.items() if not k.startswith("refused_")},
                "refused": {k: n for k, n in self.mesh.traffic.faults.items() if k.startswith("refused_")},
                "disk_trouble": self.keeper.trouble or rounds.journal_trouble,
            }
        return status

    def peers(self) -> list[dict[str, Any]]:
        """What `shoal peers` shows."""
        if self.members is None or self.rounds is None:
            return []
        listed = []
        connected = set(self.mesh.connected())
        for peer, record in self.members.machine.members().items():
            summary = self.members.last_summary(peer) or Summary()
            listed.append(
                {
                    "peer_id": peer,
                    "state": record.state.name.lower(),
                    "incarnation": record.incarnation,
                    "addresses": self.mesh.addresses(peer) or list(record.addresses),
                    "connected": peer in connected,
                    "round": summary.round,
                    "behind": max(0, self.rounds.state.round - summary.round),
                    "same_state": summary.state_hash == self.rounds.state.hash,
                    "samples_per_s": round(record.samples_per_s, 2),
                    "last_error": self.mesh.last_error(peer),
                }
            )
        return listed


def run_daemon(config: Config, invite: str | None, *, given_run: bool = False) -> int:
    """Run a node until it ends; the exit code. Raises ShoalError for what a person must mend."""
    parsed = Invite.parse(invite) if invite else None
    return int(asyncio.run(Daemon(config, parsed, given_run=given_run).run()))
