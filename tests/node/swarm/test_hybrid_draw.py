"""Asking for a ring and drawing one, without a network: the times and the live peers are given."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.node.swarm.hybrid_draw import REPEAT_SECONDS, STALE_SECONDS, Drawer, Seeker, place_of
from shoal.protocol.rings import Draw, rings_of

PEERS = [f"peer{n}" for n in range(12)]
ROUND = 5


def nonce(peer: str, number: int = 0) -> bytes:
    return f"{peer}/{number}".encode().ljust(32, b".")


def drawer_and_ring(at: int = 0) -> tuple[Drawer, list[str]]:
    ring = rings_of(PEERS, ROUND, 4)[1]
    return Drawer(ring[at], 4), ring


def ask(drawer: Drawer, peer: str, now: float, round_: int = ROUND, number: int = 0) -> Draw | None:
    return drawer.requested(now, peer, round_, nonce(peer, number), [p for p in PEERS if p != drawer.me])


def test_a_ring_is_drawn_as_soon_as_all_that_belong_to_it_have_asked() -> None:
    drawer, ring = drawer_and_ring()
    draws = [ask(drawer, peer, 1.0 + at / 10) for at, peer in enumerate(ring)]
    assert draws[:-1] == [None] * 3
    draw = draws[-1]
    assert draw is not None and draw.members == {peer: nonce(peer) for peer in sorted(ring)}
    assert (draw.round, draw.peers, draw.drawer) == (ROUND, 12, ring[0])


def test_whoever_missed_the_draw_is_told_again_and_a_new_search_is_drawn_anew() -> None:
    drawer, ring = drawer_and_ring()
    (draw,) = {d.encoded: d for at, peer in enumerate(ring) if (d := ask(drawer, peer, at / 10))}.values()
    assert ask(drawer, ring[2], 9.0) == draw
    assert ask(drawer, ring[2], 9.0, ROUND + 1, number=1) is None


def test_it_is_not_waited_longer_than_others_have_taken() -> None:
    drawer, ring = drawer_and_ring()
    first = drawer.patience
    now = 0.0
    assert ask(drawer, ring[1], now) is None
    ask(drawer, ring[2], 0.2)
    while now < drawer.patience - REPEAT_SECONDS:
        now += REPEAT_SECONDS
        assert ask(drawer, ring[1], now) is None
        assert ask(drawer, ring[2], now) is None
    draw = ask(drawer, ring[1], now + REPEAT_SECONDS)
    assert draw is not None and set(draw.members) == {ring[1], ring[2]}
    assert drawer.patience < first


def test_who_has_given_up_is_not_drawn() -> None:
    drawer, ring = drawer_and_ring()
    ask(drawer, ring[1], 0.0)
    late = STALE_SECONDS + 0.1
    assert ask(drawer, ring[0], late) is None and ask(drawer, ring[2], late) is None
    draw = ask(drawer, ring[3], late + drawer.patience / 2) or ask(drawer, ring[3], late + 60)
    assert draw is not None and ring[1] not in draw.members


def test_more_than_a_ring_are_not_drawn_together_and_those_that_belong_go_first() -> None:
    drawer, ring = drawer_and_ring()
    strangers = [p for p in PEERS if p not in ring][:2]
    for peer in [*strangers, *ring[:2]]:
        draw = ask(drawer, peer, 1.0)
    assert draw is not None and set(draw.members) == {*strangers, *ring[:2]}
    again, ring = drawer_and_ring()
    for peer in [strangers[0], *ring[:3]]:
        draw = ask(again, peer, 1.0, ROUND)
    assert draw is not None and len(draw.members) == 4


def test_the_highest_round_of_all_is_the_rings() -> None:
    drawer, ring = drawer_and_ring()
    ask(drawer, ring[1], 0.0, ROUND + 3)
    draw = None
    now = 0.0
    while draw is None:
        now += REPEAT_SECONDS
        ask(drawer, ring[1], now, ROUND + 3)
        draw = ask(drawer, ring[2], now, ROUND)
    assert draw.round == ROUND + 3


def test_a_silent_drawer_is_passed_over_and_at_last_we_draw_ourselves() -> None:
    ring = rings_of(PEERS, ROUND, 4)[1]
    me = ring[2]
    others = [p for p in PEERS if p != me]
    seeker = Seeker(me, ROUND, nonce(me), 2.0, 0.0)
    asked = [seeker.ask(now, others, 4) for now in (0.0, 1.0, 2.1, 3.0, 4.2, 50.0)]
    assert asked == [ring[0], ring[0], ring[1], ring[1], me, me]


def test_a_dead_drawer_is_passed_over_at_once() -> None:
    ring = rings_of(PEERS, ROUND, 4)[1]
    me = ring[2]
    seeker = Seeker(me, ROUND, nonce(me), 60.0, 0.0)
    assert seeker.ask(0.0, [p for p in PEERS if p != me], 4) == ring[0]
    left = [p for p in PEERS if p not in (me, ring[0])]
    asked = seeker.ask(0.1, left, 4)
    assert asked == place_of(me, [*left, me], ROUND, 4)[0] != ring[0]


def test_the_last_of_a_ring_draws_alone_at_once() -> None:
    drawer, ring = drawer_and_ring(-1)
    draw = ask(drawer, ring[-1], 0.0)
    assert draw is not None and set(draw.members) == {ring[-1]}


@given(st.sets(st.sampled_from(PEERS), min_size=1), st.randoms(), st.integers(1, 5))
def test_all_that_seek_are_drawn_within_the_patience_of_a_few(seeking: set[str], rng, size_max: int) -> None:
    """Whatever the order, and though the others never ask: nobody waits for ever, no ring is too large."""
    drawers = {peer: Drawer(peer, size_max) for peer in PEERS}
    seekers = {peer: Seeker(peer, ROUND, nonce(peer), 8.0, 0.0) for peer in sorted(seeking)}
    drawn: dict[str, Draw] = {}
    now = 0.0
    while len(drawn) < len(seekers) and now < 8.0 * (size_max + 2):
        now += REPEAT_SECONDS
        order = sorted(seekers.keys() - drawn.keys())
        rng.shuffle(order)
        for peer in order:
            others = [p for p in PEERS if p != peer]
            asked = seekers[peer].ask(now, others, size_max)
            draw = drawers[asked].requested(now, peer, ROUND, seekers[peer].nonce, [p for p in PEERS if p != asked])
            for member in draw.members if draw else ():
                drawn.setdefault(member, draw)  # type: ignore[arg-type]
    assert drawn.keys() == seekers.keys()
    assert all(len(draw.members) <= size_max for draw in drawn.values())
