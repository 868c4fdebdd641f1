"""Room for others' messages: nobody can fill it alone, and all of them together cannot overfill it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.node.swarm.waiting import SHARE, Room


def test_one_sender_gets_its_share_and_others_still_find_room():
    room = Room(messages_max=80, bytes_max=8000)
    taken = [room.take("a", 10) for _ in range(80)]
    assert sum(taken) == 80 // SHARE
    assert room.take("b", 10)
    room.give_back("a", 10)
    assert room.take("a", 10)
    assert not room.take("a", 10)


def test_bytes_of_one_sender_are_bounded_but_one_large_message_passes():
    room = Room(messages_max=80, bytes_max=8000)
    assert room.take("a", 4000)
    assert not room.take("a", 1)
    assert room.take("b", 1000)
    assert not room.take("b", 1)
    assert not room.take("c", 3001)
    room.clear()
    assert room.take("c", 8000)
    assert not room.take("d", 1)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 400), st.booleans()), max_size=200))
def test_what_is_inside_is_bounded_and_counted_exactly(steps: list[tuple[str, int, bool]]):
    room, inside = Room(messages_max=16, bytes_max=1000), []
    for sender, size, leaves in steps:
        if leaves and inside:
            room.give_back(*inside.pop(0))
        elif room.take(sender, size):
            inside.append((sender, size))
        assert room.messages.total() == len(inside) <= 16
        assert room.bytes.total() == sum(s for _, s in inside) <= 1000
        assert set(room.messages) == set(room.bytes) == {s for s, _ in inside}
