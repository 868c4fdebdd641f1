"""What the learner and the network say to each other about judging: groups of completions in, scores out.

The learner knows judges (rl/judges/), the network knows peers (swarm/peer_judges.py); neither knows the other, and here is
the one place where a node connects them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Scores = list[list[float | None]]
"""Per group and completion: 0 (worst) to 1 (best); None where it could not be judged."""

# How much longer than the budget the learner's thread waits for the event loop to come back with an answer.
SLACK_SECONDS = 10.0


@dataclass(frozen=True)
class Group:
    """Completions of one prompt, as plain text."""

    prompt: str
    completions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the peers said of a batch.

    Attributes:
        scores: combined; None where too few of the judges judged.
        answered: peers whose scores are in it.
        asked: peers that were asked.
        agreement: mean weight of the judges in it, 0 to 1; low when they contradict each other.
    """

    scores: Scores
    answered: int
    asked: int
    agreement: float


class Judging(Protocol):
    """The judging part of a learner: what `connect` looks for."""

    asks_peers: bool

    def judge(self, groups: Sequence[Group]) -> Scores:
        """This node's own judge; blocking, from any thread. Raises whatever its model or server raises."""
        ...

    def use_peers(self, ask: Callable[[Sequence[Group]], Verdict | None]) -> None:
        """Ask peers through this from now on; blocking, called in the learner's thread."""
        ...


def connect(node: Any) -> None:
    """Let others ask this node's judge, and its learner ask theirs, where the run has a judge. Call it in the loop."""
    judging: Judging | None = getattr(node.learner, "judging", None)
    if judging is None or node.config.run.judge.ask != "peers":
        return
    from .swarm.peer_judges import JUDGE, PeerJudges

    table = node.config.run.judge
    peers = PeerJudges(
        open_stream=node.mesh.open,
        alive=lambda: node.members.alive() if node.members is not None else set(),
        clock=node.clock,
        rng=node.rng,
        judge=judging.judge,
        count=table.peers,
        quorum=table.quorum,
        budget_seconds=table.budget_seconds,
        run=asyncio.to_thread,  # the clock has one worker, and the learner waits in it for the peers' answers
        trouble=node.trouble,
        say=node.say,
    )
    node.mesh.serve(JUDGE, peers.serve)
    loop = asyncio.get_running_loop()

    def ask(groups: Sequence[Group]) -> Verdict | None:
        future = asyncio.run_coroutine_threadsafe(peers.ask(groups), loop)
        try:
            return future.result(table.budget_seconds + SLACK_SECONDS)
        finally:
            future.cancel()

    if judging.asks_peers:
        judging.use_peers(ask)
