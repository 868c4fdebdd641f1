"""How long to wait in each phase of a round: learned from past arrivals, never a fixed guess. Pure.

`Deadlines` keeps the last arrivals of each phase and answers `timing()`, one frozen `Timing` for the next round:
median + k * MAD, between a floor and a ceiling. MAD is the median absolute deviation; it and the median shrug off the
few arrivals that a death or a pause made absurd. Within a round every further attempt multiplies the waits by `growth`
(up to `growth_max`), so that peers whose timers disagree end up overlapping long enough.

The waits nest: a member waits for the roster longer than the convener waits for joins, and so on, or members would
leave an attempt that its convener still holds open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from types import MappingProxyType
from typing import Final

ARRIVALS_KEPT: Final = 64  # per phase; old networks are forgotten within a few rounds


class Wait(Enum):
    """What is waited for, by whom, from when."""

    LOCAL = "local"  # own update, from the close of the round
    JOIN = "join"  # convener: each join, from its Convene
    ROSTER = "roster"  # member: the roster, from its join
    EXCHANGE = "exchange"  # convener: each member's complete Holding, from its roster
    PROPOSE = "propose"  # member: the proposal, from the roster
    VOTE = "vote"  # convener: each vote, from its proposal
    COMMIT = "commit"  # member: the commit, from its vote


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The waits of one round, in seconds; `after` adds the growth per attempt."""

    local_s: float
    """A member joins without its update rather than wait longer for its own inner step."""
    join_s: float
    roster_s: float
    exchange_s: float
    propose_s: float
    vote_s: float
    commit_s: float
    retry_s: float = 0.5
    """Repeat what is unanswered this often. Lower mends loss sooner and sends more."""
    growth: float = 1.5
    growth_max: float = 16.0

    def after(self, wait: Wait, attempt: int) -> float:
        """Seconds to wait in `attempt` (0, 1, …)."""
        # The exponent is bounded first: attempts may run into the thousands while a peer is alone.
        return getattr(self, f"{wait.value}_s") * min(self.growth ** min(attempt, 64), self.growth_max)


@dataclass(frozen=True, kw_only=True)
class DeadlinePolicy:
    """How arrivals become waits."""

    k: float = 6.0
    """Deviations above the median. Lower passes over the silent sooner and the slow too often."""
    spread_min: float = 0.1
    """Deviation is taken as at least this share of the median: with even arrivals the MAD alone would cut off the
    half above."""
    floor_s: Mapping[Wait, float] = field(
        default_factory=lambda: MappingProxyType({Wait.LOCAL: 2.0, Wait.EXCHANGE: 4.0} | dict.fromkeys(_QUICK, 1.0))
    )
    ceiling_s: Mapping[Wait, float] = field(
        default_factory=lambda: MappingProxyType(
            {Wait.LOCAL: 120.0, Wait.EXCHANGE: 600.0} | dict.fromkeys(_QUICK, 60.0)
        )
    )
    first_s: Mapping[Wait, float] = field(
        default_factory=lambda: MappingProxyType({Wait.LOCAL: 30.0, Wait.EXCHANGE: 60.0} | dict.fromkeys(_QUICK, 5.0))
    )
    """Before anything has been measured."""
    retry_s: float = 0.5
    growth: float = 1.5
    growth_max: float = 16.0


_QUICK: Final = (Wait.JOIN, Wait.ROSTER, Wait.PROPOSE, Wait.VOTE, Wait.COMMIT)


class Deadlines:
    """Arrivals seen by this peer, and the waits that follow from them."""

    def __init__(self, policy: DeadlinePolicy | None = None) -> None:
        self.policy = policy or DeadlinePolicy()
        self._arrivals: dict[Wait, deque[float]] = {wait: deque(maxlen=ARRIVALS_KEPT) for wait in Wait}

    def observe(self, wait: Wait, seconds: float) -> None:
        """One arrival, `seconds` after the wait began. Negative ones (a clock that went back) count as 0."""
        self._arrivals[wait].append(max(0.0, seconds))

    def seconds(self, wait: Wait) -> tuple[float, str]:
        """The wait before nesting, and how it came about."""
        policy, seen = self.policy, self._arrivals[wait]
        low, high = policy.floor_s[wait], policy.ceiling_s[wait]
        if not seen:
            return policy.first_s[wait], f"{wait.value}: nothing measured yet"
        middle = median(seen)
        deviation = median(abs(s - middle) for s in seen)
        deviation = max(deviation, policy.spread_min * middle)
        wanted = middle + policy.k * deviation
        chosen = min(max(wanted, low), high)
        bound = "" if chosen == wanted else f", kept within {low:g} and {high:g} s"
        return chosen, (
            f"{wait.value}: median {middle:.3g} s + {policy.k:g} x {deviation:.3g} s, {len(seen)} arrivals{bound}"
        )

    def timing(self) -> Timing:
        """The waits of the next round, nested."""
        wait = {w: self.seconds(w)[0] for w in Wait}
        policy, slack = self.policy, 2 * self.policy.retry_s  # one repeat may be lost on either side
        local = wait[Wait.LOCAL]
        join = max(wait[Wait.JOIN], local + slack)
        exchange = wait[Wait.EXCHANGE]
        vote = max(wait[Wait.VOTE], slack)
        return Timing(
            local_s=local,
            join_s=join,
            roster_s=max(wait[Wait.ROSTER], join + slack),
            exchange_s=exchange,
            propose_s=max(wait[Wait.PROPOSE], exchange + slack),
            vote_s=vote,
            commit_s=max(wait[Wait.COMMIT], vote + slack),
            retry_s=policy.retry_s,
            growth=policy.growth,
            growth_max=policy.growth_max,
        )

    def snapshot(self) -> dict[str, list[float]]:
        """Arrivals by phase, oldest first: JSON-ready, for `restore` after a restart."""
        return {wait.value: list(seen) for wait, seen in self._arrivals.items()}

    def restore(self, saved: Mapping[str, list[float]]) -> None:
        for wait, seen in self._arrivals.items():
            seen.clear()
            seen.extend(float(s) for s in saved.get(wait.value, []))
