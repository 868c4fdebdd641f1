"""The commits behind this peer's state, and what they say of its own updates (invariant 3). Pure: memory alone.

A state moves in three ways, and each has its word in the book: a commit is followed, a downloaded state replaces ours, or it
replaces a branch of ours that lost. Which of them it is, and what is on disk of it, is decided elsewhere (rounds.py,
catch_up.py, keeper.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from ...aggregation.book import Book
from ...protocol.ballot_messages import Commit, Value
from ...protocol.commit import CheckedCommit, CommitLog, check_commit, electorate_after
from .state import Applied, MergeRules, SharedState, weights_of


class History:
    """The commit log of one peer and its book, kept in step."""

    def __init__(
        self,
        *,
        me: str,
        log: CommitLog,
        book: Book,
        rules: MergeRules,
        genesis: tuple[bytes, str],
        say: Callable[..., None],
    ) -> None:
        """`genesis`: lineage of round 0, and the founder."""
        self.log = log
        self._me, self._book, self._rules, self._genesis, self._say = me, book, rules, genesis, say

    def remember(self, checked: CheckedCommit) -> None:
        """Keep the record of a commit that follows ours."""
        self.log.add(checked, sum(weights_of(checked.value, self._rules).values()), tip=checked.lineage)

    def follow(self, applied: Applied, checked: CheckedCommit) -> None:
        """Our state becomes the commit's: own updates in it count as adopted."""
        if checked.split:
            self._book.split(checked.value.base_lineage)
        for dot in applied.adopted:
            if dot.peer == self._me and self._book.knows(dot):  # not one of a life before the disk was lost
                self._book.adopt(dot)
        self.remember(checked)

    def start(self, chain: Sequence[Commit], state: SharedState) -> None:
        """A log of its own for a state whose chain does not reach ours; what it says of own updates counts at once."""
        for commit in chain:
            self._adopt(commit.value)
        self.log = build_log(chain, state, self._rules, self._genesis)

    def replace(self, old: SharedState, new: SharedState, fork: bytes | None) -> None:
        """A downloaded state takes the place of ours; `fork`: the last common lineage, when our branch after it lost.

        Own updates that the new state holds count as adopted, those of a lost branch no longer do: their mass comes back,
        damped by 1/(1 + rounds stale) because the others have moved on without it.
        """
        if fork is not None:
            self._give_back(old, fork)
        for record in takewhile(lambda r: r.lineage not in (old.lineage, fork), self.log.chain(new.lineage)):
            self._adopt(record.checked.value)
        if not self.log.knows(new.lineage):
            if fork is None:
                self._take_for_adopted(new)
            self.log = build_log([], new, self._rules, self._genesis)

    def _give_back(self, old: SharedState, fork: bytes) -> None:
        """What was adopted on our branch after `fork` is owed again, but for what is damped."""
        book = self._book
        lost = list(takewhile(lambda r: r.lineage != fork, self.log.chain(old.lineage)))
        stale = len(lost)
        for record in lost:
            book.lose(record.base_lineage, stale, 1 + stale)
            for update in record.checked.value.updates:
                if update.dot.peer == self._me and book.adopted(update.dot):
                    book.unadopt(update.dot)
                    book.damp(update.dot, stale, 1 + stale)

    def _adopt(self, value: Value) -> None:
        for update in value.updates:
            if update.dot.peer == self._me and self._book.knows(update.dot):
                self._book.adopt(update.dot)

    def _take_for_adopted(self, state: SharedState) -> None:
        """The commits behind a downloaded state are not to be had: which own updates it holds is known only up to their
        order. Those up to the last one it holds are taken for adopted: mass may be lost so, but none can count twice."""
        book = self._book
        held = [dot for dot in book.dots() if not book.adopted(dot) and state.vector.includes(dot)]
        for dot in held:
            book.adopt(dot)
        if held:
            self._say("own updates taken for adopted: no commit record says so", level="warning", updates=len(held))


def build_log(
    commits: Sequence[Commit], state: SharedState, rules: MergeRules, genesis: tuple[bytes, str]
) -> CommitLog:
    """The log of the commits, oldest first, that form the chain which ends in `state`; others are left out.

    Args:
        genesis: lineage of round 0, and the founder, who alone could vote after it.

    Raises PeerFault for a chain whose votes are wrong.
    """
    chain: list[Commit] = []
    wanted = state.lineage
    for commit in reversed(commits):
        if commit.value.lineage == wanted:
            chain.append(commit)
            wanted = commit.base_lineage
    if not chain:
        return CommitLog(state.lineage, state.round, state.total_weight, electorate=state.electorate)
    chain.reverse()
    lineage, founder = genesis
    if chain[0].base_lineage == lineage:
        electorate, rest = frozenset({founder}), chain
        log = CommitLog(lineage, 0, electorate=electorate)
    else:  # of a log that was cut: its oldest record only says who could vote in the next one
        root, *rest = chain
        electorate = electorate_after(root.value)
        log = CommitLog(root.value.lineage, root.value.round, electorate=electorate)
    for commit in rest:
        checked = check_commit(commit, electorate, commit.value.round, commit.base_lineage)
        log.add(checked, sum(weights_of(commit.value, rules).values()), tip=checked.lineage)
        electorate = electorate_after(commit.value)
    return log
