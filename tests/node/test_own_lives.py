"""A new life begins where the swarm knows more of a peer than its disk, before anything is said, and only then."""

from __future__ import annotations

import pytest

from shoal.node.own_lives import OwnLives
from shoal.node.store.journal import JournalFull
from shoal.protocol.wire_pb2 import Welcome

from .swarm.memory import InlineClock


class Journal:
    def __init__(self, incarnation: int, last_seq: int) -> None:
        self.incarnation, self.last_seq, self.full = incarnation, last_seq, False

    def start_incarnation(self, above: int = 0, *, now_wall: float) -> int:
        if self.full:
            raise JournalFull("no space")
        self.incarnation, self.last_seq = max(above, self.incarnation) + 1, 0
        return self.incarnation


def lives_of(journal: Journal) -> tuple[OwnLives, list[int]]:
    begun: list[int] = []
    return OwnLives(journal, InlineClock(), begun=begun.append, say=lambda *a, **k: None), begun  # type: ignore[arg-type]


def test_what_the_swarm_knows_less_or_as_much_of_changes_nothing():
    lives, begun = lives_of(Journal(3, 7))
    for incarnation, seq in ((0, 0), (3, 7), (3, 2)):
        lives.heard(Welcome(incarnation_known=incarnation, seq_known=seq))
    assert not begun
    assert not lives.amnesiac


@pytest.mark.parametrize("known", [(3, 8), (9, 1)])
def test_what_it_knows_more_of_begins_a_higher_life(known: tuple[int, int]):
    journal = Journal(3, 7)
    lives, begun = lives_of(journal)
    lives.heard(Welcome(incarnation_known=known[0], seq_known=known[1]))
    assert begun == [known[0] + 1] == [journal.incarnation]
    assert lives.amnesiac == (known[0] != 3)
    lives.check()
    assert len(begun) == 1


def test_a_life_that_could_not_be_written_is_begun_before_the_next_word():
    journal = Journal(1, 0)
    lives, begun = lives_of(journal)
    journal.full = True
    with pytest.raises(JournalFull):
        lives.heard(Welcome(incarnation_known=4, seq_known=0))
    assert not begun
    journal.full = False
    lives.check()
    assert begun == [5]


def test_updates_taken_back_for_good_end_a_life():
    lives, begun = lives_of(Journal(2, 5))
    lives.over()
    lives.check()
    assert begun == [3]
