"""What a convener does with joins, holdings and votes: roster, proposal, commit. See ballot.py.

`Convening` acts whenever something has become possible or overdue; it keeps no state of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from . import limits
from .ballot_attempt import Attempts
from .ballot_events import Phase
from .ballot_messages import Commit, Exchange, Propose
from .ballot_rules import is_majority, is_split_roster, make_roster, make_value, may_split, still_missing
from .deadlines import Wait


class Convening(Attempts):
    """A convener's moves."""

    def _settle(self) -> None:
        """Whatever has become possible: follow, issue the roster, propose, commit."""
        if self.phase is Phase.DECIDED:
            return
        self._judge_splits()
        if self.convener in self._left() and self.phase is not Phase.DECIDED:
            self._next_attempt("its convener has taken a split's commit")
        while self.attempt >= 0 and self.phase is not Phase.DECIDED:
            before = (self.phase, self.attempt)
            self._follow()
            if self.convener == self.me:
                match self.phase:
                    case Phase.CONVENING:
                        self._issue_roster()
                    case Phase.EXCHANGING:
                        self._propose()
                    case _:
                        self._count_votes()
            if (self.phase, self.attempt) == before:
                return

    def _issue_roster(self) -> None:
        if not self._ready() or self._now < self._pause_until:
            return
        joins = {p: j for p, j in self._joins.items() if j.attempt == self.attempt and p not in self._dead}
        joins[self.me] = self._my_join()
        waiting = self._live() - joins.keys() - self._silent - self._left() - self._ahead().keys()
        # The wait grows with the attempt for a quorum to come together; beyond one, nobody is waited for longer than at first.
        if waiting and self._now < self._since + self.timing.join_s:
            return
        size, live = len(joins), self._live()
        if is_majority(size, len(self.electorate)):
            reason = f"{size} of {len(self.electorate)} joined"
        elif may_split(self.electorate, self._dead) and is_majority(size, len(live)):
            reason = f"split: {size} of {len(live)} live ones joined, {len(self.electorate) - len(live)} are dead"
        else:
            return
        # A deviating state is this peer's own trouble or the sender's; its promise counts, its update does not.
        joins = {p: j if j.state_hash == self.base_state_hash else replace(j, header=None) for p, j in joins.items()}
        splits = sorted(self._splits.values(), key=lambda s: (-len(s[0].signers), s[0].value.hash))
        self._take(
            make_roster(
                convener=self.me,
                attempt=self.attempt,
                joins=joins,
                order=self.order,
                joiners=self._joiners(size),
                choose=self._choose,
                reason=reason + (f", {len(waiting)} were not waited for longer" if waiting else ""),
                preferred=splits[0][0].value if splits else None,
            )
        )
        self._silent |= waiting
        self._hold()
        assert self.roster is not None
        self._send(tuple(p for p in self.roster.peers if p != self.me), self.roster)

    def _joiners(self, size: int) -> tuple[str, ...]:
        """Observers heard of lately that stand on the same state; and of those a moment behind as many as leave a roster of
        `size` peers a majority of the next electorate, or one."""
        fresh = self._now - 8 * self.timing.retry_s
        asking = {p: hash_ for p, (hash_, at) in self._observers.items() if at >= fresh and p not in self._unready}
        here = sorted(p for p, hash_ in asking.items() if hash_ == self.base_state_hash)
        near = sorted(p for p, hash_ in asking.items() if hash_ is None)
        named = here + near[: max(0 if here else 1, size - 1 - len(here))]
        return tuple(sorted(named[: limits.ROSTER_MAX - size]))

    def _propose(self) -> None:
        roster = self.roster
        assert roster is not None
        if self._lost(self._live() - self._ahead().keys()):
            return
        awaited = set(roster.peers) & self._live() - self._silent - self._ahead().keys()
        missing = still_missing(roster, self._holdings, awaited, self._dead)
        if roster.exchange is Exchange.NOTHING:
            missing = {}
        value, why = make_value(
            roster,
            self._holdings,
            previous_state_hash=self.base_state_hash,
            electorate=self.electorate,
            dead=self._dead,
        )
        broken = roster.exchange is Exchange.RING_DENSE and any(
            p in self._dead and p not in self._holdings_complete() for p in roster.peers
        )
        if missing and not self._overdue() and not (broken and value is None):
            return
        if value is not None and (refused := self._refuse(value)) is not None:
            value, why = None, refused
        if self._overdue():
            self._silent |= {p for p in missing if p not in self._holdings} - {self.me}
        if value is None:
            self._pause_until = self._now + self.timing.retry_s
            return self._next_attempt(f"nothing to propose: {why}")
        self._note(f"proposal of attempt {self.attempt}: {why}")
        self._proposal = value
        self._votes = {self.me: self._vote(value)}
        self._begin(Phase.VOTING, Wait.VOTE)
        self._send(tuple(p for p in roster.peers if p != self.me), self._proposing())

    def _holdings_complete(self) -> set[str]:
        return {p for p, holding in self._holdings.items() if holding.chunk_hashes}

    def _proposing(self) -> Propose:
        assert self._proposal is not None
        return Propose(self.me, self.round, self.base_lineage, self.attempt, self._proposal)

    def _count_votes(self) -> None:
        assert self.roster is not None and self._proposal is not None
        split = is_split_roster(self.roster, self.electorate)
        live = self._live()
        if split:
            enough = may_split(self.electorate, self._dead) and is_majority(len(self._votes.keys() & live), len(live))
        else:
            enough = is_majority(len(self._votes), len(self.electorate))
        if enough:
            votes = tuple(self._votes[p] for p in sorted(self._votes))
            self._decide(Commit(self.attempt, self._proposal, votes), f"{len(votes)} of {len(self.electorate)} voted")
        else:
            self._lost((live - self._ahead().keys()) | self._votes.keys())

    def _lost(self, able: Collection[str]) -> bool:
        """Go on when those `able` to vote cannot make the attempt's quorum any more."""
        assert self.roster is not None
        if is_split_roster(self.roster, self.electorate):
            lost, why = not may_split(self.electorate, self._dead), "a majority is alive after all"
        else:
            lost, why = not is_majority(len(able), len(self.electorate)), "a majority can no longer vote"
        if lost:
            self._next_attempt(why)
        return lost
