"""Random schedules that once broke an invariant, kept. Those of ring mode that came first are in test_simulation.py."""

from __future__ import annotations

import pytest

from .hunt import broken

SLOW = {(100026, "gossip"), (100079, "gossip")}
BROKE = {
    (100000, "ring"): "a fork that died with its only holder's disk was to be reported by those who never saw it",
    (100007, "hybrid"): "who had lost held the winner's floor alone for a while and was drawn back by other losers",
    (100026, "gossip"): "a limit below what was final made every later healing find itself overtaken, for ever",
    (100037, "hybrid"): "an own sum was settled that went with its side",
    (100079, "gossip"): "an own update that was final on a side of one was settled, and went with that side",
    (100130, "gossip"): "the same",
    (100177, "gossip"): "the same limit below what was final, between two peers",
    (100177, "hybrid"): "the same limit below what was final, between two peers",
    (100213, "gossip"): "an own update that was final on a side of one was settled, and went with that side",
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("seed", "mode"),
    [pytest.param(*one, marks=[pytest.mark.slow] if one in SLOW else []) for one in sorted(BROKE)],
)
def test_what_once_broke(seed: int, mode: str) -> None:
    assert not broken(seed, None, mode), BROKE[seed, mode]
