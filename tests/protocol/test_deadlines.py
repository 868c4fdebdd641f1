"""Waits follow measured arrivals, stay within bounds, grow with attempts and nest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.deadlines import ARRIVALS_KEPT, DeadlinePolicy, Deadlines, Wait


def test_nothing_measured_yet_gives_the_first_guess():
    seconds, reason = Deadlines().seconds(Wait.EXCHANGE)
    assert seconds == DeadlinePolicy().first_s[Wait.EXCHANGE]
    assert "nothing measured" in reason


def test_median_and_deviation_decide():
    deadlines = Deadlines(DeadlinePolicy(k=3.0, spread_min=0.0))
    for seconds in (4.0, 5.0, 6.0, 7.0, 100.0):  # median 6, MAD 1: the absurd one changes nothing
        deadlines.observe(Wait.EXCHANGE, seconds)
    assert deadlines.seconds(Wait.EXCHANGE)[0] == 9.0


def test_even_arrivals_still_leave_room_above():
    deadlines = Deadlines()
    for _ in range(9):
        deadlines.observe(Wait.EXCHANGE, 50.0)
    assert deadlines.seconds(Wait.EXCHANGE)[0] > 1.5 * 50.0


def test_floor_and_ceiling_are_named_in_the_reason():
    deadlines = Deadlines()
    deadlines.observe(Wait.JOIN, -0.5)
    assert deadlines.seconds(Wait.JOIN) == (
        1.0,
        "join: median 0 s + 6 x 0 s, 1 arrivals, kept within 1 and 60 s",
    )
    deadlines.observe(Wait.VOTE, 1e6)
    assert deadlines.seconds(Wait.VOTE)[0] == 60.0


def test_waits_grow_with_attempts_up_to_a_limit():
    timing = Deadlines().timing()
    waits = [timing.after(Wait.VOTE, attempt) for attempt in (0, 1, 2, 50, 1_000_000)]
    assert waits == sorted(waits)
    assert waits[1] == timing.vote_s * timing.growth
    assert waits[-1] == timing.vote_s * timing.growth_max


def test_old_arrivals_are_forgotten_and_the_rest_survives_a_restart():
    deadlines = Deadlines()
    for i in range(3 * ARRIVALS_KEPT):
        deadlines.observe(Wait.JOIN, float(i))
    saved = deadlines.snapshot()
    assert len(saved["join"]) == ARRIVALS_KEPT
    again = Deadlines()
    again.restore(saved)
    assert again.timing() == deadlines.timing()


@given(st.lists(st.tuples(st.sampled_from(Wait), st.floats(0.0, 1e4)), max_size=40))
def test_a_member_always_waits_longer_than_the_convener(arrivals):
    deadlines = Deadlines()
    for wait, seconds in arrivals:
        deadlines.observe(wait, seconds)
    timing = deadlines.timing()
    assert timing.local_s < timing.join_s < timing.roster_s
    assert timing.exchange_s < timing.propose_s
    assert timing.vote_s < timing.commit_s
