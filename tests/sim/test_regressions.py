"""Random schedules that once broke an invariant, kept. Those of ring mode that came first are in test_simulation.py."""

from __future__ import annotations

import pytest

from .hunt import broken

SLOW: set[tuple[int, str, str | None]] = {(100026, "gossip", None), (100079, "gossip", None)}
BROKE: dict[tuple[int, str, str | None], str] = {
    (100000, "ring", None): "a fork that died with its only holder's disk was to be reported by those who never saw it",
    (
        100007,
        "hybrid",
        None,
    ): "who had lost held the winner's floor alone for a while and was drawn back by other losers",
    (100026, "gossip", None): "a limit below what was final made every later healing find itself overtaken, for ever",
    (100037, "hybrid", None): "an own sum was settled that went with its side",
    (100079, "gossip", None): "an own update that was final on a side of one was settled, and went with that side",
    (100130, "gossip", None): "the same",
    (100177, "gossip", None): "the same limit below what was final, between two peers",
    (100177, "hybrid", None): "the same limit below what was final, between two peers",
    (100213, "gossip", None): "an own update that was final on a side of one was settled, and went with that side",
    (
        500272,
        "ring",
        None,
    ): "records of another branch than the downloaded state's began a log that knew nothing of the fork",
    (500368, "ring", None): "the same, and what a lost branch held of own updates still counted as adopted",
    (600020, "hybrid", "noise"): "what a healing had decided was acted on after its peer had moved to another side",
    (400083, "ring", "equivocate"): "which of a liar's two updates went into a dense sum was taken to be known",
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("seed", "mode", "byzantine"),
    [pytest.param(*one, marks=[pytest.mark.slow] if one in SLOW else []) for one in BROKE],
)
def test_what_once_broke(seed: int, mode: str, byzantine: str | None) -> None:
    assert not broken(seed, byzantine, mode), BROKE[seed, mode, byzantine]
