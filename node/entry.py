"""How a node gets in: somebody to talk to, the manifest, the genesis, the first state. Every failure says what to do.

Covers dialing by invite, cache and discovery with backoff, comparing bases, and downloading states, now and later. Does
not cover: what a run is (run.py), how a state travels and why it is believed (swarm/state_sync.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import numpy as np

from ..aggregation.snapshots import Snapshot
from ..protocol.ballot_wire import decode_commit
from ..protocol.commit import electorate_after
from ..protocol.discovery import Attempts, PeerCache, candidates
from ..protocol.errors import ExitCode, PeerFault, ShoalError
from ..protocol.handshake import Refused
from ..protocol.transport import DialError, StreamClosed
from ..protocol.version import VersionVector, genesis_lineage
from ..protocol.wire_pb2 import Commit, Refusal
from .host import Host
from .run import Run
from .store.datadir import DataDir
from .store.disk import Disk
from .store.gossip_file import BYTES_EACH, file_hash, read_snapshot_file
from .swarm.manifest import RunInfo, fetch_manifest, open_genesis
from .swarm.mesh import Mesh
from .swarm.state import SharedState, genesis_hash
from .swarm.state_sync import RING_BYTES, Offer, State, StateClient, read_ring_state

RETRY_SECONDS = 0.5
MANIFEST_TRIES = 5
# Sources of a first state besides the one that answered first, and how long each may take to answer.
SOURCES_MAX = 8
SOURCE_SECONDS = 3.0
# A peer that the invite names has refused us so often, for a reason that waiting does not mend: no other will let us in.
REFUSALS_MAX = 3
# A dial of everybody known waits this long for the slowest.
REDIAL_SECONDS = 15.0

Phase = Callable[[str], None]


def read_snapshot(path: Path, offer: Offer, d: int, disk: Disk) -> tuple[np.ndarray, Snapshot]:
    """A downloaded state of gossip mode. Raises ValueError when it is not what was offered."""
    theta0, snapshot = read_snapshot_file(path, d, disk)
    if file_hash(theta0, snapshot) != offer.state_hash:
        raise ValueError("the file holds another state than was offered")
    return theta0, snapshot


class Entry:
    """One node's way into its run. The same object fetches states later, when the node has fallen behind."""

    def __init__(
        self,
        *,
        host: Host,
        run: Run,
        data: DataDir,
        me: str,
        mesh: Mesh,
        cache: PeerCache,
        nearby: Mapping[str, list[str]],
        rng: random.Random,
        phase: Phase,
        say: Callable[..., None],
        warn: Callable[[str], None],
        trouble: Callable[[str, BaseException], None],
        hold: Callable[[str, int], Awaitable[None]],
    ) -> None:
        """
        Args:
            nearby: peers that discovery found, with their addresses; grows by itself.
            phase: told what is awaited, for `shoal status`.
            trouble: told of every failed transfer, and whose fault it was.
        """
        self._host, self._run, self._data, self._me = host, run, data, me
        self._mesh, self._cache, self._nearby, self._rng = mesh, cache, nearby, rng
        self._phase, self._say, self._warn, self._trouble, self._hold = phase, say, warn, trouble, hold

    @property
    def _seconds_max(self) -> float:
        return self._run.config.node.bootstrap_seconds_max

    # ------------------------------------------------------------------------------------------------ somebody

    async def somebody(self) -> list[str]:
        """Who is connected, or whoever answers first; keeps trying with backoff. Raises ShoalError at the end of trying."""
        if connected := self._mesh.connected():
            return connected
        attempts, refused = Attempts(self._host.clock.now(), self._seconds_max), 0
        while True:
            invite = self._run.invite
            sources = [
                ("invite", invite.peers if invite else ()),
                ("cache", list(self._cache.peers.items())),
                ("nearby", list(self._nearby.items())),
            ]
            listed = candidates(sources, self._me)
            attempts.failures.clear()
            refusal = final = None
            for candidate in listed:
                try:
                    await self._mesh.connect(candidate.address, candidate.peer)
                    return [candidate.peer]
                except Refused as error:
                    refusal = error
                    final = error if error.permanent and candidate.source == "invite" else final
                    attempts.failed(candidate, f"{error.what}: {error.values}", error.permanent)
                except (DialError, PeerFault, StreamClosed, asyncio.TimeoutError) as error:
                    permanent = isinstance(error, DialError) and error.kind == "wrong_peer"
                    attempts.failed(candidate, str(error) or type(error).__name__, permanent)
            wait, reason = attempts.next_wait(self._host.clock.now(), self._rng)
            if wait is None:
                # Where no address is merely unreachable, what the swarm said is what there is to mend.
                raise refusal if refusal is not None and attempts.hopeless else attempts.error(reason)
            if final is not None and (refused := refused + 1) >= REFUSALS_MAX:
                raise final
            self._phase("searching for peers")
            self._say("no peer answered yet", level="warning", reason=reason)
            await self._host.clock.sleep(wait)

    async def _more(self) -> None:
        """Besides whoever answered first, everybody else that the invite and the cache name: a state is better had from
        several, who confirm each other, than from one that may be slow, frozen or a liar."""
        invite = self._run.invite
        sources = [("invite", invite.peers if invite else ()), ("cache", list(self._cache.peers.items()))]
        connected = self._mesh.connected()
        rest = [c for c in candidates(sources, self._me) if c.peer not in connected][:SOURCES_MAX]

        async def one(peer: str, address: str) -> None:
            with contextlib.suppress(Refused, DialError, StreamClosed, PeerFault, asyncio.TimeoutError):
                await asyncio.wait_for(self._mesh.connect(address, peer), SOURCE_SECONDS)

        await asyncio.gather(*(one(c.peer, c.address) for c in rest))

    async def redial(self) -> None:
        """Dial everybody known once, at the same time: before the first vote after a restart, and while alone. An invite
        given to a restart counts, too: it may say where a member of old has moved to.

        Raises Refused when another process has our identity. Any other refusal is one peer's word: it may itself be
        a newcomer that cannot tell yet who is a member.
        """

        async def one(peer: str, addresses: list[str]) -> None:
            for address in addresses:
                try:
                    await self._mesh.connect(address, peer)
                    return
                except Refused as error:
                    if error.reason == Refusal.IDENTITY_IN_USE:
                        raise
                    return self._say("not let in", level="warning", peer=peer, cause=f"{error.what}: {error.values}")
                except (DialError, StreamClosed, PeerFault, asyncio.TimeoutError):
                    continue

        invite, connected = self._run.invite, self._mesh.connected()
        sources = [("invite", invite.peers if invite else ()), ("cache", list(self._cache.peers.items()))]
        known: dict[str, list[str]] = {}
        for candidate in candidates(sources, self._me):
            if candidate.peer not in connected:
                known.setdefault(candidate.peer, []).append(candidate.address)
        dials = [one(peer, addresses) for peer, addresses in known.items()]
        with contextlib.suppress(asyncio.TimeoutError):  # whoever answered by then is connected
            await asyncio.wait_for(asyncio.gather(*dials), REDIAL_SECONDS)

    # ------------------------------------------------------------------------------------------------ the run

    async def learn_run(self) -> None:
        """Connect with the invite and receive the manifest."""
        self._phase("connecting")
        peer, *_ = await self.somebody()
        self._phase("receiving the manifest")
        self._run.learned(await self._manifest(peer))

    async def _manifest(self, peer: str) -> RunInfo:
        last: BaseException | None = None
        for _ in range(MANIFEST_TRIES):
            try:
                return await fetch_manifest(await self._mesh.open(peer, "Manifest"), self._run.id)
            except (StreamClosed, DialError, asyncio.TimeoutError) as error:
                last = error
                await self._host.clock.sleep(RETRY_SECONDS)
            except PeerFault as fault:
                last = fault
                break
        raise ShoalError(
            "The run's manifest could not be had",
            values=f"{peer} gave: {last}; expected a manifest of run {self._run.id.hex()[:16]}",
            todo="Try again, or ask for an invite that names another peer.",
            code=ExitCode.UNREACHABLE,
        )

    async def wait_genesis(self) -> None:
        """The founder may still be warming up: wait for its genesis, saying so."""
        with self._host.progress("waiting for the founder's warm-up") as show:
            waited = 0.0
            while self._run.genesis is None:
                peer, *_ = await self.somebody()
                info = await self._manifest(peer)
                self._run.compare(info, peer)
                self._run.genesis = info.genesis
                if self._run.genesis is None:
                    self._phase("waiting for the founder's warm-up")
                    show(waited, 0)
                    waited += RETRY_SECONDS
                    await self._host.clock.sleep(RETRY_SECONDS)

    # ------------------------------------------------------------------------------------------------ states

    async def first_state(self, d: int) -> SharedState:
        """A newcomer's state, from everybody that can be reached; tries until somebody gives it."""
        while True:
            self._phase("downloading")
            await self.somebody()
            await self._more()
            found = await self.download(d, self._mesh.connected(), "joining")
            if found is not None:
                return found[0]
            await self._host.clock.sleep(RETRY_SECONDS)

    async def first_snapshot(self, d: int) -> tuple[np.ndarray, Snapshot]:
        """Gossip mode: what a newcomer begins with, theta0 (fp32 [d]) and the state at the frontier."""
        while True:
            self._phase("downloading")
            await self.somebody()
            await self._more()
            found = await self.download_snapshot(d, self._mesh.connected(), None, "joining")
            if found is not None:
                return found
            await self._host.clock.sleep(RETRY_SECONDS)

    async def download_snapshot(
        self, d: int, peers: list[str], wanted: bytes | None, reason: str
    ) -> tuple[np.ndarray, Snapshot] | None:
        """Download and check theta0 and a state at the floor, the named one if a hash is given. None: nobody could give it."""
        found = await self._transfer(d, peers, wanted, read_snapshot, BYTES_EACH)
        if found is None:
            return None
        (theta0, snapshot), _, why = found
        assert self._run.genesis is not None
        genesis = open_genesis(self._run.genesis, self._run.id)
        if self.genesis_state(theta0, genesis.founder).lineage != genesis.lineage:
            self._say("a state over other first parameters than the genesis names", level="warning", believed=why)
            return None
        self._say("state downloaded", included=len(snapshot.floor.entries), believed=why, reason=reason)
        return theta0, snapshot

    async def _transfer(
        self,
        d: int,
        peers: list[str],
        lineage: bytes | None,
        read: Callable[[Path, Offer, int, Disk], State],
        bytes_each: int,
    ) -> tuple[State, Commit | None, str] | None:
        with self._host.progress("downloading the state") as show:
            client = StateClient(
                clock=self._host.clock,
                open_stream=self._mesh.open,
                folder=self._data.path,
                disk=self._host.disk,
                d=d,
                run_id=self._run.id,
                trouble=self._trouble,
                read=read,
                bytes_each=bytes_each,
                progress=lambda done, total: show(done, total),
                hold=self._hold,
            )
            try:
                return await client.download(peers, lineage)
            except OSError as error:
                self._warn(f"the state cannot be downloaded: {error.strerror or error}")
                return None

    async def download(self, d: int, peers: list[str], reason: str) -> tuple[SharedState, bytes] | None:
        """Download and check a state of d parameters. The state and its commit record, or None: nobody could give it."""
        found = await self._transfer(d, peers, None, read_ring_state, RING_BYTES)
        if found is None:
            return None
        state, wire, why = found
        self._say("state downloaded", round=state.round, believed=why, reason=reason)
        if state.round == 0:
            return (state, b"") if self._is_genesis(state) else None
        if wire is None:
            return state, b""
        try:
            commit = decode_commit(wire, self._run.id)
        except PeerFault as fault:
            self._trouble("state download", fault)
            return None
        after = electorate_after(commit.value)
        if commit.value.lineage != state.lineage or after != frozenset(state.electorate):
            return None
        return state, wire.SerializeToString()

    def genesis_state(self, theta: np.ndarray, founder: str) -> SharedState:
        """Round 0 with parameters theta, fp32 [d]."""
        lineage = genesis_lineage(self._run.id, founder, genesis_hash(theta))
        return SharedState.make(
            theta=theta,
            outer=None,
            round_=0,
            lineage=lineage,
            vector=VersionVector({}),
            electorate=[founder],
            total_weight=0,
        )

    def _is_genesis(self, state: SharedState) -> bool:
        assert self._run.genesis is not None
        genesis = open_genesis(self._run.genesis, self._run.id)
        expected = self.genesis_state(state.theta, genesis.founder)
        return expected.hash == state.hash and expected.lineage == genesis.lineage
