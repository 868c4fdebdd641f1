"""Who may be named a joiner though it is a moment behind, and who is not named again for a while."""

from __future__ import annotations

from shoal.node.swarm.newcomers import NEAR_SECONDS, PAUSE_SECONDS, PAUSE_SECONDS_MAX, Newcomers
from shoal.protocol.ballot_messages import Exchange, Value
from shoal.protocol.version import sha256


def value(round_: int, roster: str, joiners: str = "") -> Value:
    return Value(round_, sha256(bytes([round_])), sha256(b"s"), (), tuple(roster), tuple(joiners), Exchange.NOTHING)


def test_a_lineage_is_near_for_a_moment_after_it_was_left():
    one = Newcomers()
    first, second = value(1, "abc"), value(2, "abc")
    assert not one.near(10.0, first.base_lineage)
    one.committed(10.0, first)
    one.committed(10.1, second)
    assert one.near(10.2, first.base_lineage)
    assert one.near(10.0 + NEAR_SECONDS, first.base_lineage)
    assert not one.near(10.05 + NEAR_SECONDS, first.base_lineage)
    assert one.near(10.05 + NEAR_SECONDS, second.base_lineage)


def test_who_was_named_in_vain_is_left_out_for_longer_and_longer():
    one, now, pauses = Newcomers(), 0.0, []
    for round_ in range(1, 30, 2):
        one.committed(now, value(round_, "abc", "d"))
        one.committed(now, value(round_ + 1, "abc"))
        begun = now
        while "d" in one.unready(now):
            now += 0.5
        pauses.append(now - begun)
    assert pauses[:3] == [PAUSE_SECONDS, 2 * PAUSE_SECONDS, 4 * PAUSE_SECONDS]
    assert pauses[-1] == PAUSE_SECONDS_MAX


def test_who_came_is_forgiven():
    one = Newcomers()
    for round_ in (1, 3):
        one.committed(0.0, value(round_, "abc", "d"))
        one.committed(0.0, value(round_ + 1, "abc"))
    one.committed(9.0, value(5, "abc", "d"))
    one.committed(9.0, value(6, "abcd"))
    assert not one.unready(9.0)
    one.committed(9.0, value(7, "abcd", "e"))
    one.committed(9.0, value(8, "abcde"))
    assert not one.unready(9.0)
