"""What must be on disk before a round counts, and what may follow: commit record, checkpoint, journal, metrics.

One object between the rounds and the store, so that neither knows the other's files. All of it blocks and runs in the
worker thread. A full disk never loses the last good checkpoint and never stops training: it is said loudly, and the
journal, which cannot be written either, keeps this peer from publishing or voting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..aggregation.book import UNIT, Book
from ..aggregation.compress import Sparse
from ..protocol.ballot_wire import encode_commit
from ..protocol.commit import CheckedCommit
from ..protocol.version import Dot
from .learner import Learner
from .observe.recurring import Recurring
from .store.checkpoint import Checkpoint, Checkpoints
from .store.commits import CommitFile
from .store.datadir import DataDir
from .store.journal import Journal, OwnUpdate
from .store.metrics import METRICS_FILE, append_metrics
from .swarm.local_work import Work
from .swarm.state import Applied, SharedState
from .swarm.updates import UpdateStore

# Own updates stay on record, and everybody's are served, for this many rounds: a peer that was away for less catches up
# from them alone, and a short branch can be undone exactly.
ROUNDS_KEPT = 16
NOT_SAVED = "not saved: the last checkpoint stays valid, training goes on and nothing is published until this is mended"
NO_METRICS = "metrics not written"


def rebook(
    book: Book, updates: Sequence[OwnUpdate], decoded: Callable[[OwnUpdate], Sparse | np.ndarray]
) -> list[OwnUpdate]:
    """Bring a checkpoint's book up to the journal: own updates that it does not know, and all that was learned with them.

    Args:
        updates: the journal's, oldest first.
        decoded: the value that an update's payload stands for: sparse, or dense fp32 [d].

    Returns the updates that were new to the book. Whether the state holds them is not decided here: they come back as owed.
    """
    fresh = [update for update in updates if not book.knows(update.dot)]
    for update in fresh:
        book.record(update.dot, decoded(update))
    if fresh:
        # Sums of 2^-40 units below 2^53 are exact in fp64, so this books the difference to the bit.
        book.learn((fresh[-1].learned - book.parts()["learned"]) / UNIT)
    return fresh


class Keeper:
    """Saves after every round."""

    def __init__(
        self,
        *,
        data: DataDir,
        checkpoints: Checkpoints,
        commits: CommitFile,
        journal: Journal,
        store: UpdateStore,
        book: Book,
        learner: Learner,
        evaluate_every: int,
        rounds_max: int,
        extra: Callable[[], dict[str, Any]],
        troubles: Recurring,
        more: Callable[[], dict[str, np.ndarray | bytes]] = lambda: {},
        final: Callable[[Dot], bool] | None = None,
        updates_round: Callable[[SharedState], int] = lambda state: state.round,
    ) -> None:
        """
        Args:
            updates_round: the round that updates are numbered by, where it is not the state's.
            more: arrays that a checkpoint holds beside the book's.
            final: whether an own update counts, or does not, for good; None: after ROUNDS_KEPT more.
        """
        self._data, self._checkpoints, self._commits = data, checkpoints, commits
        self._journal, self._store, self._book, self._learner = journal, store, book, learner
        self._updates_round = updates_round
        self._evaluate_every, self._rounds_max = evaluate_every, rounds_max
        self._extra, self._troubles, self._more, self._final = extra, troubles, more, final
        self.evaluation: dict[str, float] = {}
        self.last_commit = b""
        self.trouble = ""
        self.recent: deque[dict[str, Any]] = deque(maxlen=64)

    def save(
        self,
        state: SharedState,
        applied: Applied | None,
        checked: CheckedCommit | None,
        work: Work | None,
        traffic: dict[str, int],
    ) -> None:
        """Make `state` durable, drop what it covers, record the round."""
        try:
            if checked is not None:
                self.last_commit = encode_commit(checked.commit).SerializeToString()
                self._commits.append(self.last_commit)
            self._settle(state)
            self.checkpoint(state)
            # Down to the oldest checkpoint kept: if the newer ones are damaged, what they held is booked from here again.
            covered = min(state.round, self._checkpoints.oldest_round())
            self._journal.compact({u.dot for u in self._journal.updates if u.round > covered})
            self.trouble = ""
            self._troubles.over(NOT_SAVED)
        except OSError as error:
            self.trouble = f"{error.strerror or error}"
            self._troubles.wrong(NOT_SAVED, self.trouble, folder=str(self._data.path))
        self._store.drop_before(self._updates_round(state) - ROUNDS_KEPT)
        if applied is not None:
            self.record(state, applied, checked, work, traffic)

    def checkpoint(self, state: SharedState) -> None:
        """Write one now. Raises OSError."""
        self._checkpoints.save(
            Checkpoint(
                state,
                self.last_commit,
                {**self._book.to_arrays(), **self._more()},
                self._learner.snapshot(),
                self._extra(),
            )
        )

    def _settle(self, state: SharedState) -> None:
        """Own updates older than anybody can still take back are folded into the book's baseline.

        Not those that the journal still holds: a restart would take them for unknown and book them twice.
        """
        dots, journaled = self._book.dots(), {u.dot for u in self._journal.updates}
        final = self._final or set(dots[: max(0, len(dots) - ROUNDS_KEPT)]).__contains__
        self._book.settle(dot for dot in dots if final(dot) and dot not in journaled)

    def evaluate(self, state: SharedState) -> None:
        """Held-out metrics of the shared state."""
        self._learner.load(state.theta)
        self.evaluation = dict(self._learner.evaluate())

    def record(
        self,
        state: SharedState,
        applied: Applied | None,
        checked: CheckedCommit | None,
        work: Work | None,
        traffic: dict[str, int],
        published: int | None = None,
    ) -> None:
        """One line of history. `published`, in gossip mode: this peer's updates so far."""
        record: dict[str, Any] = {"round": state.round, "state_hash": state.hash.hex()[:16], "bytes": traffic}
        if checked is not None and applied is not None:
            record |= {
                "roster": len(checked.value.roster),
                "updates": len(applied.adopted),
                "void": len(applied.void),
                "split": checked.split,
                "exchange": checked.value.exchange.name.lower(),
            }
        if published is not None:
            record["published"] = published
        if work is not None:
            record |= {"samples": work.result.weight, "steps": work.steps, "seconds": round(work.seconds, 3)}
            record |= {k: round(v, 6) for k, v in work.result.metrics.items()}
        every = self._evaluate_every
        last = 0 < self._rounds_max == state.round
        if every >= 0 and (state.round == 0 or last or (every > 0 and state.round % every == 0)):
            self.evaluate(state)
            record |= {f"eval_{k}": v for k, v in self.evaluation.items()}
        self.recent.append(record)
        try:
            append_metrics(self._data.path, record, self._data.disk)
            self._troubles.over(NO_METRICS)
        except OSError as error:
            self._troubles.wrong(NO_METRICS, error.strerror or str(error), level="warning", file=METRICS_FILE)
