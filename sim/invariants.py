"""The invariant checkers: after every event (or every so many) they look at all nodes and compare them with the ledger.

One checker per invariant of the design: same version, same bits; exactly once; nothing learned is lost; no coordinator;
nobody uninvited; no silent conflict. They read and never write. Looking costs one identity comparison per node when nothing
changed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..node.swarm.gossip import Gossip
from ..node.swarm.hybrid import Hybrid
from ..node.swarm.rounds import Rounds
from ..protocol import limits
from .choices import Choices
from .finality import Finality
from .ledger import SUMMED_EVERY, Ledger

if TYPE_CHECKING:
    from .peer import Peer
    from .simulation import Simulation

VIOLATIONS_KEPT = 100
# Hybrid mode: own updates in sums that a peer has never seen, and among how many they are looked for.
UNKNOWN_MAX = 3
UNKNOWN_TRIED = 12


@dataclass(frozen=True)
class Violation:
    """One broken promise. `invariant`: its number in the design."""

    invariant: int
    at_s: float
    peer: str
    text: str

    def to_dict(self) -> dict[str, object]:
        return {"invariant": self.invariant, "at_s": self.at_s, "peer": self.peer, "text": self.text}


class Checkers:
    """All of them, over one simulation."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.ledger = Ledger(sim.run_config.sync.step_max)
        self.violations: list[Violation] = []
        self._seen: set[tuple[int, str, str]] = set()
        self._states: dict[str, object] = {}  # by peer: the state object last looked at
        self._said: dict[str, tuple[int, int]] = {}  # by peer: newest own dot looked at
        self._sums: dict[str, tuple[int, int]] = {}  # hybrid mode: by peer, its newest combined update looked at
        self._lives: dict[str, int] = {}
        self._branches: dict[str, tuple[int, bytes]] = {}  # ring mode: by peer, its life and the lineage last looked at
        self.healed = False  # a peer has left its branch for another: one that died with its disk is seen by nobody
        self._choices, self._finality = Choices(), Finality(sim)
        self._records: dict[str, object] = {}  # by peer: the ballot record last looked at

    def broken(self, invariant: int, peer: str, text: str) -> None:
        """Note a violation once."""
        key = (invariant, peer, text)
        if key not in self._seen and len(self.violations) < VIOLATIONS_KEPT:
            self._seen.add(key)
            self.violations.append(Violation(invariant, self._sim.now, peer, text))
            self._sim.note("violation", peer, invariant=invariant, text=text)

    # ------------------------------------------------------------------------------------------------ after an event

    def look(self) -> None:
        """At every node that runs."""
        for peer in self._sim.peers:  # of all before the first state: between two looks it may have got others' updates
            self.heard_of(peer)
        for peer in self._sim.peers:
            self.look_at(peer)

    def look_at(self, peer: Peer) -> None:
        """At one of them."""
        node = peer.node
        if node is None or node.rounds is None:
            return
        self._look_at_updates(peer)
        if isinstance(node.rounds, Rounds):
            self._look_at_ballot(peer, node.rounds)
        elif text := self._finality.look(peer):
            self.broken(2, peer.name, text)
        state = node.rounds.state
        if self._states.get(peer.name) is not state:
            self._states[peer.name] = state
            self._look_at_state(peer)
            self._look_at_book(peer)

    def heard_of(self, peer: Peer) -> None:
        """A peer has published."""
        if peer.node is not None and peer.node.rounds is not None:
            self._look_at_updates(peer)

    def _look_at_updates(self, peer: Peer) -> None:
        """Own updates enter the ledger when they are in the journal, before their first byte leaves."""
        node = peer.node
        assert node is not None
        newest, sums = (node.journal.incarnation, node.journal.last_seq), (0, 0)
        if isinstance(node.rounds, Hybrid):
            sums = (node.rounds.sums.incarnation, node.rounds.sums.last_seq)
        same_life = self._lives.get(peer.name) == peer.lives
        if same_life and (self._said.get(peer.name), self._sums.get(peer.name)) == (newest, sums):
            return
        spoke = same_life and self._said.get(peer.name) != newest
        self._sums[peer.name] = sums
        self._said[peer.name], self._lives[peer.name] = newest, peer.lives
        self.ledger.set_dimension(node.learner.layout.size)
        for update, header in peer.own_updates():
            known = self.ledger.said.get(header.dot, {})
            if peer.byzantine is None and known and header.update_hash not in known:
                self.broken(2, peer.name, f"{header.dot} names two different updates")
            self._finality.published(header.dot)
            self.ledger.heard(header, update.payload, node.learner.layout.size, node.compression)
        if spoke:
            record = self.ledger.of(peer.peer_id)
            record.published = len(record.sums) - 1

    def _look_at_ballot(self, peer: Peer, rounds: Rounds) -> None:
        """The vote that the journal holds, and who convened the roster that was taken."""
        assert peer.node is not None
        ballot, record = rounds.ballot._ballot, peer.node.journal._ballot
        if ballot is None or peer.byzantine is not None:
            return
        if ballot.roster is not None and ballot.roster.convener in self._sim.forgers:
            self.broken(5, peer.name, f"round {ballot.round}: took a roster that its convener has not signed")
        if record is not None and record is not self._records.get(peer.name):
            self._records[peer.name] = record
            electorate = ballot.electorate if record.concerns(ballot.round, ballot.base_lineage) else ()
            if electorate and (text := self._choices.cast(peer.peer_id, record, electorate, self.ledger.lost)):
                self.broken(6, peer.name, text)

    def _look_at_state(self, peer: Peer) -> None:
        node = peer.node
        assert node is not None and node.rounds is not None
        if isinstance(node.rounds, Gossip):
            for text in self.ledger.gossip(node.rounds.state, node.rounds.log, node.theta0, node.config.run.sync):
                self.broken(1, peer.name, text)
            return
        state, log = node.rounds.state, node.rounds.log
        if state.round == 0:
            self.ledger.root(state)
            return
        record = log.get(state.lineage)
        if record is not None:
            value = record.checked.value
            adopted = tuple(u.dot for u in value.updates if self._counts(u.dot, u.update_hash))
            # A node that skipped rounds by a download knows the last commit only; the others' were seen where they were made.
            for text in self.ledger.decide(
                value,
                state,
                split=record.checked.split,
                signers=record.checked.signers,
                adopted=adopted,
                sync=node.config.run.sync,
            ):
                self.broken(2 if "included" in text else 1, peer.name, text)
        elif (known := self.ledger.versions.get(state.lineage)) is None:
            self.broken(1, peer.name, f"round {state.round} {state.lineage.hex()[:12]} is a state that nobody decided")
        elif known.state.hash != state.hash:
            self.broken(
                1, peer.name, f"round {state.round}: hashes {known.state.hash.hex()[:12]} and {state.hash.hex()[:12]}"
            )
        for text in self.ledger.forks():
            self.broken(6, peer.name, text)
        life, before = self._branches.get(peer.name, (0, b""))
        self._branches[peer.name] = peer.lives, state.lineage
        if life == peer.lives and not self.ledger.continues(state.lineage, before):
            self.healed = True

    def _counts(self, dot: object, update_hash: bytes) -> bool:
        said = self.ledger.said.get(dot, {}).get(update_hash)  # type: ignore[arg-type]
        if said is None or said.fixed is None:
            return False
        indices, fixed = said.fixed
        return indices is None or self._not_void(fixed)  # void is what a sparse merge refuses; a dense mean takes all

    @staticmethod
    def _not_void(fixed: np.ndarray) -> bool:
        return bool((np.abs(fixed) < 2**40).all())

    # ------------------------------------------------------------------------------------------------ books

    def look_at_books(self) -> None:
        """Invariant 3, between two events of a node: learned, adopted and residual against the ledger's own sums."""
        for peer in self._sim.peers:
            self._look_at_book(peer)

    def _look_at_book(self, peer: Peer) -> None:
        node = peer.node
        if node is None or node.rounds is None or not node.ready or peer.byzantine is not None:
            return
        parts, residual = node.book.parts(), node.book.residual()
        if not np.array_equal(residual, parts["learned"] - parts["adopted"] - parts["damped"]):
            self.broken(3, peer.name, "residual is not learned - adopted - damped")
        record = self.ledger.of(node.identity.peer_id)
        if record.sums and not np.array_equal(record.sums[-1], parts["learned"]):
            self.broken(3, peer.name, "the book does not hold all that the learner learned")
        if isinstance(node.rounds, Gossip):
            self._look_at_gossip_book(peer, parts["adopted"])
            return
        version = self.ledger.versions.get(node.rounds.state.lineage)
        if version is not None:
            held = version.adopted_of(peer.peer_id, peer.first_incarnation, node.learner.layout.size)
            if not np.array_equal(parts["adopted"], held):
                self.broken(
                    3, peer.name, f"round {node.rounds.state.round}: own adopted mass is not what the state holds"
                )

    def _look_at_gossip_book(self, peer: Peer, adopted: np.ndarray) -> None:
        """What counts as adopted is what the log holds of own updates."""
        node = peer.node
        assert node is not None and node.rounds is not None
        if node.rounds.state.lineage[0] % SUMMED_EVERY and not isinstance(node.rounds, Hybrid):
            return  # in hybrid mode a version is a whole ring's round, so that there are few
        held = np.zeros(node.learner.layout.size, np.int64)
        if isinstance(node.rounds, Hybrid):
            return self._look_at_hybrid_book(peer, node.rounds, adopted)
        for dot, by_hash in self.ledger.said.items():
            if dot.peer == peer.peer_id and dot.incarnation >= peer.first_incarnation:
                (said,) = by_hash.values()
                if node.rounds.state.vector.includes(dot) and said.fixed is not None:
                    held[said.fixed[0]] += said.fixed[1]
        if not np.array_equal(adopted, held):
            self.broken(3, peer.name, "own adopted mass is not what the log holds")

    def _look_at_hybrid_book(self, peer: Peer, rounds: Hybrid, adopted: np.ndarray) -> None:
        """What counts as adopted is what own updates hold at the coordinates of the sums that they are in.

        Where a sum is known no more, because its log was compacted while this peer was away, they are taken for adopted whole.
        """
        held, unknown = np.zeros(adopted.size, np.int64), list[np.ndarray]()
        for dot, where in self.ledger.summed(rounds.state.vector, peer.peer_id).items():
            said = next(iter(self.ledger.said.get(dot, {}).values()), None)
            if dot.incarnation < peer.first_incarnation or said is None or said.fixed is None:
                continue
            rest = np.zeros(adopted.size, np.int64)
            rest[said.fixed[0]] = said.fixed[1]
            held[where] += rest[where]
            rest[where] = 0
            if rounds.log.counted_at(dot) is None and rest.any():
                unknown.append(rest)
        off = adopted - held
        if off.any() and not any(
            np.array_equal(off, sum(some, np.zeros_like(off)))
            for count in range(1, UNKNOWN_MAX + 1)
            for some in itertools.combinations(unknown[-UNKNOWN_TRIED:], count)
        ):
            self.broken(3, peer.name, "own adopted mass is not what the log holds")

    def look_at_restart(self, peer: Peer) -> None:
        """A new process: its books go on from a sum that the learner once came to, at or above what was published."""
        node = peer.node
        assert node is not None
        record = self.ledger.of(peer.peer_id)
        self._finality.ready(peer)
        if peer.disk_was_lost:
            peer.first_incarnation, peer.disk_was_lost = node.journal.incarnation, False
            record.sums.clear()
            record.published = 0
        learned, published = node.book.parts()["learned"], record.published
        if not record.sums:
            if learned.any():
                self.broken(3, peer.name, "a new book is not empty")
            return
        at = record.restart_from(learned)
        if at is None:
            self.broken(3, peer.name, "after a restart the book's learned mass is none that the learner ever came to")
        elif at < published and peer.byzantine is None:
            self.broken(3, peer.name, f"after a restart the book lacks {published - at} published results")

    def look_at_limits(self) -> None:
        """Invariant 5: tables and queues within their limits, nothing from strangers."""
        for peer in self._sim.peers:
            node = peer.node
            if node is None or not node.listening:
                continue
            if len(node.mesh.traffic.charged) > 2 * limits.MEMBERS_MAX:
                self.broken(5, peer.name, f"{len(node.mesh.traffic.charged)} peers charged")
            for other in node.mesh.connected():
                if not self._sim.is_admitted(other):
                    self.broken(5, peer.name, f"{other} is connected and was never admitted")

    # ------------------------------------------------------------------------------------------------ at the end

    def conclude(self) -> None:
        """What can only be said when all faults are over."""
        self.look()
        for peer in self._sim.peers:
            node = peer.node
            if node is not None and isinstance(node.rounds, Gossip) and not peer.byzantine:
                for text in self.ledger.gossip(
                    node.rounds.state, node.rounds.log, node.theta0, node.config.run.sync, always=True
                ):
                    self.broken(1, peer.name, text)
        self.look_at_books()
        self.look_at_limits()
        if self.healed and not self._sim.conflicts_logged():
            states = {s.lineage for s in self._sim.running_states()}
            if len(states) == 1:
                self.broken(6, "", "a fork was healed and no node said so")
