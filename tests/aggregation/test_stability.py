"""What is stable: the gossiped minimum under equal heads, its epochs, and what it never claims."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from shoal.aggregation.forks import Fork
from shoal.aggregation.gossip import UpdateLog
from shoal.aggregation.stability import Stability, StabilityView
from shoal.protocol.version import NO_HEAD, VersionVector

from .origins import chain, log_of, offer, state

seeds = st.integers(0, 2**32 - 1)


class Peer:
    """A log that is durable at once, and its part in stability."""

    def __init__(self, name: str, log: UpdateLog, members: frozenset[str]) -> None:
        self.name, self.log, self.members = name, log, members
        self.stability = Stability(name, log.head_at)
        self.durable = log.vector
        self.save()

    def save(self) -> None:
        self.durable = self.log.vector
        self.adopt(self.stability.mine(self.durable, self.log.frontier, self.members))

    def adopt(self, final: VersionVector | None) -> None:
        while final is not None:
            self.log.advance(final)
            final = self.stability.mine(self.durable, self.log.frontier, self.members)

    def hear(self, other: Peer) -> None:
        self.adopt(self.stability.merge(other.stability.view))


def swarm(*logs: UpdateLog) -> list[Peer]:
    names = [f"member{i}" for i in range(len(logs))]
    return [Peer(name, log, frozenset(names)) for name, log in zip(names, logs)]


def gossip(peers: list[Peer], rng: random.Random, contacts: int) -> None:
    for _ in range(contacts):
        one, two = rng.sample(peers, 2)
        two.hear(one)
        one.hear(two)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=6), seeds)
def test_every_peer_comes_to_the_minimum_of_all(held: list[tuple[int, int]], seed: int) -> None:
    ada, bob = chain("ada", 4), chain("bob", 4)
    peers = swarm(*(log_of(ada[:a], bob[:b]) for a, b in held))
    gossip(peers, random.Random(seed), 30 * len(peers))
    expected = {("ada", 0): min(a for a, _ in held), ("bob", 0): min(b for _, b in held)}
    for peer in peers:
        found = {key: seq for key, (seq, _) in peer.log.frontier.entries.items()}
        assert found == {key: seq for key, seq in expected.items() if seq}


@given(st.integers(2, 5), seeds)
def test_nothing_final_is_missing_anywhere(size: int, seed: int) -> None:
    """While updates spread and disks lag: at every moment a frontier is below every member's durable vector."""
    rng = random.Random(seed)
    chains = [chain(f"origin{i}", 4) for i in range(3)]
    peers = swarm(*(log_of() for _ in range(size)))
    everything = [update for updates in chains for update in updates]
    for _ in range(60):
        peer = rng.choice(peers)
        offer(peer.log, rng.sample(everything, 3))
        if rng.random() < 0.5:
            peer.save()
        gossip(peers, rng, 1)
        for one in peers:
            for two in peers:
                assert one.log.frontier.merge(two.durable) == two.durable
    for peer in peers:
        offer(peer.log, everything)
        peer.save()
    gossip(peers, rng, 40 * size)
    assert all(peer.log.frontier == peer.log.vector for peer in peers)
    assert len({state(peer.log) for peer in peers}) == 1


def test_a_member_that_has_nothing_holds_back_the_frontier_until_it_is_forgotten() -> None:
    ada = chain("ada", 2)
    one, two, away = swarm(log_of(ada), log_of(ada), log_of())
    gossip([one, two], random.Random(1), 5)
    assert not one.log.frontier.entries and one.stability.view.holders == {one.name, two.name}
    for peer in (one, two):
        peer.members = frozenset({one.name, two.name})
        peer.save()
    gossip([one, two], random.Random(1), 5)
    assert one.log.frontier.entries == two.log.frontier.entries == one.log.vector.entries
    assert away.log.frontier.entries == {}


def test_a_chain_with_two_heads_is_not_stable_at_any_seq_above_the_fork() -> None:
    whole = chain("ada", 3)
    other = chain("ada", 1, seed=1, after=whole[:1])
    peers = swarm(log_of(whole, chain("bob", 1)), log_of(other, chain("bob", 1)))
    gossip(peers, random.Random(2), 10)
    assert all(set(peer.log.frontier.entries) == {("bob", 0)} for peer in peers)
    for peer in peers:
        peer.log.retract(Fork(whole[1][0], other[1][0]))
        peer.save()
    gossip(peers, random.Random(3), 10)
    assert all(peer.log.frontier.seq("ada", 0) == 1 for peer in peers)
    assert len({state(peer.log) for peer in peers}) == 1


def test_what_was_retracted_since_it_was_saved_is_not_vouched_for() -> None:
    whole = chain("ada", 3)
    fork = Fork(whole[1][0], chain("ada", 1, seed=1, after=whole[:1])[-1][0])
    one, two = swarm(log_of(whole), log_of(whole))
    one.log.retract(fork)
    two.hear(one)  # said before the proof was known
    assert two.log.frontier.seq("ada", 0) == 3
    one.hear(two)  # a frontier is final: what it names counts again
    assert state(one.log) == state(two.log)
    assert one.log.frozen == {("ada", 0): 3}
    later, early = swarm(log_of(whole), log_of(whole))
    later.log.retract(fork)
    later.adopt(later.stability.mine(later.durable, later.log.frontier, later.members))
    early.hear(later)
    later.hear(early)
    assert not early.log.frontier.entries


def test_a_retracted_top_is_not_offered_to_the_next_epoch() -> None:
    whole, bob = chain("ada", 2), chain("bob", 1)
    one, two = swarm(log_of(whole, bob), log_of(whole, bob))
    one.log.retract(Fork(whole[1][0], chain("ada", 1, seed=1, after=whole[:1])[-1][0]))
    final = one.stability.merge(two.stability.view)
    assert final is not None and set(final.entries) == {("bob", 0)}
    assert one.stability.view.epoch == 1 and ("ada", 0) not in one.stability.view.entries


def test_who_missed_the_end_of_an_epoch_learns_it_from_the_next() -> None:
    ada = chain("ada", 3)
    one, two, three = swarm(*(log_of(ada[:1]) for _ in range(3)))
    gossip([one, two, three], random.Random(4), 20)
    assert three.log.frontier.seq("ada", 0) == 1
    for peer in (one, two, three):
        offer(peer.log, ada)
        peer.save()
    two.hear(three)
    two.hear(one)
    assert two.log.frontier.seq("ada", 0) == 3
    assert one.log.frontier.seq("ada", 0) == 1
    one.hear(two)
    assert one.log.frontier.seq("ada", 0) == 3


def test_who_slept_through_many_epochs_is_told_what_is_final() -> None:
    ada, bob = chain("ada", 1), chain("bob", 4)
    sleeper = Peer("member2", log_of(ada), frozenset({"member0", "member1", "member2"}))
    awake = swarm(log_of(ada), log_of(ada))
    for count in range(1, 5):
        for peer in awake:
            offer(peer.log, bob[:count])
            peer.save()
        gossip(awake, random.Random(count), 10)
    assert sleeper.log.frontier.entries == {}
    for peer in awake:
        peer.hear(sleeper)
        sleeper.hear(peer)
    for peer in awake:
        peer.hear(sleeper)
        sleeper.hear(peer)
    assert sleeper.log.frontier.seq("ada", 0) == 1
    assert awake[0].log.compacted_for(sleeper.log.vector) == [("bob", 0)]  # it was forgotten: it needs a snapshot


def test_an_old_view_and_one_that_settles_nothing_are_no_news() -> None:
    stability = Stability("me", lambda key, seq: None)
    assert stability.mine(VersionVector({}), VersionVector({}), frozenset({"me", "you"})) is None
    assert stability.merge(StabilityView(3, {}, frozenset({"you"}))) is None
    assert stability.view.epoch == 3  # nothing to settle: no epoch passes
    assert stability.merge(StabilityView(2, {}, frozenset({"you"}), {("ada", 0): (9, NO_HEAD)})) is None


def test_a_lone_peer_settles_what_it_saves() -> None:
    log = log_of(chain("ada", 2))
    Peer("me", log, frozenset())
    assert log.frontier.entries == log.vector.entries
