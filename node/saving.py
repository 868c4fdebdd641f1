"""Making a node durable, and making it again from what is durable: first save, save after every round, exact resume.

What is written when, and what may follow, is keeper.py's; here is what of the node goes in, in each mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..aggregation.book import Book
from ..aggregation.compress import Sparse
from ..aggregation.compress import decode as decode_update
from ..protocol.ballot_messages import Commit, Encoding, parse_header
from ..protocol.ballot_wire import encode_commit
from ..protocol.errors import ExitCode, ShoalError
from ..protocol.version import Dot
from ..protocol.wire_pb2 import Signed
from .gossip_mode import log_parts, new_log, restored_log
from .keeper import Keeper, rebook
from .store.checkpoint import Checkpoint
from .store.datadir import usable
from .store.journal import OwnUpdate
from .swarm.gossip import Gossip
from .swarm.hybrid import Hybrid
from .swarm.local_work import Work
from .swarm.state import Applied

if TYPE_CHECKING:
    from .node import Node

NO_RECORDS = "commit records not saved"


class Saving:
    """Of one node. `make_keeper` once its parts are there, then `first` or `restore`, then one of the others each round."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._log_parts: dict[str, np.ndarray | bytes] = {}

    def make_keeper(self) -> None:
        """For the node's present book."""
        node = self._node
        self.keeper = Keeper(
            data=node.data,
            checkpoints=node.checkpoints,
            commits=node.commit_file,
            journal=node.journal,
            store=node.store,
            book=node.book,
            learner=node.learner,
            evaluate_every=node.config.node.eval_every_rounds,
            rounds_max=node.config.run.sync.rounds_max,
            extra=lambda: {"deadlines": node.deadlines.snapshot(), "traffic": node.traffic(), "warmup": node.warmup},
            troubles=node.troubles,
            more=lambda: self._log_parts,
            final=self._is_final if node.gossips else None,
            **({"updates_round": lambda state: self._ring_round()} if node.config.run.sync.mode == "hybrid" else {}),
        )

    def first(self) -> None:
        """The first checkpoint, and the first line of history. Raises ShoalError(DISK)."""
        node = self._node
        node.learner.load(node.state.theta)
        if node.gossips:
            if node.first_log is None or node.theta0 is None:
                node.theta0 = node.state.theta
                node.first_log = new_log(node, node.theta0)
            self._log_parts = log_parts(node.first_log, node.theta0)
        with usable(node.data.path):
            self.keeper.checkpoint(node.state)
        if node.state.round == 0:
            self.keeper.record(node.state, None, None, None, node.traffic())

    def restore(self, checkpoint: Checkpoint) -> None:
        """Exact resume: state, book, learner; then what the journal has beyond the checkpoint is booked again."""
        node = self._node
        node.state = checkpoint.state
        node.book = Book.from_arrays(checkpoint.book)
        node.deadlines.restore(checkpoint.extra.get("deadlines", {}))
        node.warmup = checkpoint.extra.get("warmup", {})
        node.traffic_before = checkpoint.extra.get("traffic", {})
        node.learner.load(node.state.theta)
        if checkpoint.learner:
            node.learner.restore(dict(checkpoint.learner))
        if node.gossips:
            node.first_log, node.theta0 = restored_log(node, checkpoint.book)
        self.make_keeper()
        self.keeper.last_commit = checkpoint.commit
        for update in rebook(node.book, node.journal.updates, self._decoded):
            header = parse_header(Signed.FromString(update.signed))
            if header.encoding is Encoding.SPARSE:
                node.store.put(header, update.payload)
        node.say("restored", round=node.state.round, journaled=len(node.journal.updates))

    def _decoded(self, update: OwnUpdate) -> Sparse | np.ndarray:
        """What an own update's payload stands for."""
        node = self._node
        if parse_header(Signed.FromString(update.signed)).encoding is Encoding.DENSE:
            return np.frombuffer(update.payload, "<f4").astype(np.float32)
        return decode_update(update.payload, node.state.theta.size, node.compression)

    async def keep_records(self, commits: list[Commit]) -> None:
        """Make these the records on disk, oldest first."""
        node = self._node
        try:
            raw = [encode_commit(commit).SerializeToString() for commit in commits]
            await node.clock.run(lambda: node.commit_file.replace(raw))
            node.troubles.over(NO_RECORDS)
        except OSError as error:
            node.troubles.wrong(NO_RECORDS, error.strerror or str(error), level="warning")

    async def save(self, applied: Applied | None, checked: Any, work: Work | None) -> bool:
        """Make the rounds' state durable. Whether it succeeded."""
        node = self._node
        assert node.rounds is not None
        state, traffic = node.rounds.state, node.traffic()
        if node.recording is not None and checked is not None:
            record, commit = node.recording.commit, encode_commit(checked.commit).SerializeToString()
            await node.clock.run(lambda: record(commit))
        await node.clock.run(lambda: self.keeper.save(state, applied, checked, work, traffic))
        if work is not None and work.seconds > 0 and node.members is not None:
            node.members.set_speed(work.result.weight / work.seconds)
        return not self.keeper.trouble

    async def save_gossip(self, work: Work | None) -> bool:
        """Make gossip mode's log, book and learner durable as they are now. Whether it succeeded."""
        node = self._node
        assert isinstance(node.rounds, Gossip) and node.theta0 is not None
        state, traffic = node.rounds.state, node.traffic()
        self._log_parts = log_parts(
            node.rounds.log, node.theta0
        )  # here, because the worker runs beside what adds to the log
        await node.clock.run(lambda: self.keeper.save(state, None, None, work, traffic))
        return not self.keeper.trouble

    async def last(self) -> None:
        """Before the node ends: what could not be saved is tried once more. Raises ShoalError(DISK)."""
        node, trouble = self._node, self.keeper.trouble
        if not trouble or await (self.save_gossip(None) if node.gossips else self.save(None, None, None)):
            return
        assert node.rounds is not None
        newest = next((path.name for path in node.checkpoints.paths()), "none")
        raise ShoalError(
            "Left without saving the last state",
            values=f"{node.data.path}: {self.keeper.trouble}; state of round {node.rounds.state.round}, newest file {newest}",
            todo="Mend that and start again: the node goes on from that file and asks the others for what came after it.",
            code=ExitCode.DISK,
        )

    async def record_gossip(self, work: Work | None) -> None:
        """One line of history: what was trained, and the state after it."""
        node = self._node
        assert isinstance(node.rounds, Gossip)
        state, traffic, published = node.rounds.state, node.traffic(), node.rounds.published
        await node.clock.run(lambda: self.keeper.record(state, None, None, work, traffic, published))
        if work is not None and work.seconds > 0 and node.members is not None:
            node.members.set_speed(work.result.weight / work.seconds)

    def _ring_round(self) -> int:
        node = self._node
        return node.rounds.round if isinstance(node.rounds, Hybrid) else 0

    def _is_final(self, dot: Dot) -> bool:
        """Gossip mode: whether this update counts, or does not, for good."""
        node = self._node
        return isinstance(node.rounds, Gossip) and node.rounds.is_final(dot)
