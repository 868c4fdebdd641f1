"""The laws of the update log: whatever the order of what is learned, the same knowledge is the same bits."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from shoal.aggregation.forks import Fork
from shoal.aggregation.gossip import UpdateLog, Verdict
from shoal.aggregation.stability import Stability
from shoal.protocol.version import VersionVector

from .origins import RULES, THETA0, Update, chain, log_of, new_log, offer, pull, state, up_to

seeds = st.integers(0, 2**32 - 1)
lengths = st.lists(st.integers(0, 5), min_size=1, max_size=4)
ADA = ("ada", 0)


def chains_of(counts: list[int]) -> list[list[Update]]:
    return [chain(f"peer{i}", count) for i, count in enumerate(counts)]


@given(lengths, seeds)
def test_any_order_duplication_and_interleaving_gives_the_same_bits(counts: list[int], seed: int) -> None:
    chains = chains_of(counts)
    arrivals = [update for updates in chains for update in updates] * 3
    random.Random(seed).shuffle(arrivals)
    log = new_log()
    offer(log, arrivals)
    assert state(log) == state(log_of(*chains))
    assert all(log.judge(header)[0] is Verdict.DUPLICATE for header, _ in arrivals)
    assert log.total_weight == 3 * sum(counts)


@given(st.integers(1, 6), st.integers(1, 6), st.lists(st.integers(0, 3), max_size=3), seeds)
def test_added_and_retracted_is_never_added(length: int, disputed: int, others: list[int], seed: int) -> None:
    disputed = min(disputed, length)
    whole = chain("ada", length)
    other = chain("ada", 1, seed=1, after=whole[: disputed - 1])
    later = chain("ada", 2, incarnation=1)
    rest = chains_of(others)
    events = [*whole, *later, *(update for updates in rest for update in updates)]
    random.Random(seed).shuffle(events)
    log = new_log()
    offer(log, events)
    result = log.retract(Fork(whole[disputed - 1][0], other[-1][0]))
    never = log_of(whole[: disputed - 1], *rest)
    assert state(log) == state(never)
    assert len(result.dots) == length - disputed + 1 + 2
    assert list(result.dots) == sorted(result.dots)
    assert log.frozen == {ADA: disputed - 1, ("ada", 1): 0}
    offer(log, [*whole, *other, *later])
    assert state(log) == state(never)
    assert log.retract(Fork(other[-1][0], whole[disputed - 1][0])).dots == ()
    assert [log.payload(header.dot) for header, _ in whole[disputed - 1 :]] == [p for _, p in whole[disputed - 1 :]]


def _entries(log: UpdateLog, seqs: list[int]) -> VersionVector:
    keys = sorted(log.vector.entries)
    chosen = {key: min(seq, log.vector.seq(*key)) for key, seq in zip(keys, seqs, strict=False)}
    return VersionVector({key: (seq, log.head_at(key, seq) or b"") for key, seq in chosen.items() if seq})


@given(lengths, st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=4), seeds)
def test_the_frontier_is_monotone_and_joinable_and_compaction_changes_no_bits(
    counts: list[int], wanted: list[list[int]], seed: int
) -> None:
    chains = chains_of(counts)
    log, other = log_of(*chains), log_of(*chains)
    frontiers = [_entries(log, seqs) for seqs in wanted]
    before = state(log)
    gone = []
    for frontier in frontiers:
        earlier = log.frontier
        gone += log.advance(frontier)
        assert log.frontier == earlier.merge(frontier)
        assert state(log) == before
    random.Random(seed).shuffle(frontiers)
    also_gone = [dot for frontier in frontiers for dot in other.advance(frontier)]
    assert other.frontier == log.frontier and sorted(gone) == sorted(also_gone)
    assert len(gone) == len(set(gone)) == sum(seq for seq, _ in log.frontier.entries.values())
    assert log.snapshot().hash == other.snapshot().hash
    assert not log.behind
    for updates in chains:
        for header, _ in updates:
            below = log.frontier.includes(header.dot)
            assert log.judge(header)[0] is (Verdict.BELOW if below else Verdict.DUPLICATE)


@given(lengths, st.lists(st.integers(0, 5), max_size=4), st.integers(0, 4), st.booleans())
def test_a_snapshot_is_the_log(counts: list[int], seqs: list[int], forked: int, folded: bool) -> None:
    log = log_of(*chains_of(counts), chain("ada", 4))
    log.advance(_entries(log, [min(2, n) for n in seqs] if forked else seqs))
    if forked:
        first, second = chain("ada", 4)[forked - 1], chain("ada", 1, seed=1, after=chain("ada", forked - 1))[-1]
        log.retract(Fork(first[0], second[0]))
    snapshot = log.snapshot(folded=folded)
    again = UpdateLog.from_snapshot(THETA0, RULES, snapshot.to_parts())
    assert state(again) == state(log)
    assert (again.frontier, again.frozen, again.proofs) == (log.frontier, log.frozen, log.proofs)
    assert again.snapshot(folded=folded).hash == snapshot.hash
    if not folded:
        assert again.log_bytes == log.log_bytes
        assert again.lacks(VersionVector({}), 10**9) == log.lacks(VersionVector({}), 10**9)


@given(lengths, lengths, lengths, seeds)
def test_two_logs_that_exchange_what_they_lack_become_equal(
    counts: list[int], mine: list[int], theirs: list[int], seed: int
) -> None:
    chains = chains_of(counts)
    one = log_of(*(updates[:n] for updates, n in zip(chains, mine, strict=False)))
    two = log_of(*(updates[:n] for updates, n in zip(chains, theirs, strict=False)))
    apart = sum(abs(one.vector.seq(*key) - two.vector.seq(*key)) for key in one.vector.entries | two.vector.entries)
    bytes_max = random.Random(seed).choice([1, 300, 10**9])
    moved, last = 0, -1
    while moved != last:
        last = moved
        moved += pull(one, two, bytes_max) + pull(two, one, bytes_max)
    assert moved == apart  # only what was missing, each once
    assert state(one) == state(two)


@given(st.integers(1, 5), st.integers(0, 5), st.integers(1, 5), st.permutations(range(6)))
def test_order_of_proofs_frontiers_and_updates_does_not_matter(
    disputed: int, final: int, again: int, order: list[int]
) -> None:
    """Frontier first or proof first: what is final counts, what is disputed above it does not, to the bit."""
    whole, rest = chain("ada", 5), chain("bob", 3)
    forks = [Fork(whole[at - 1][0], chain("ada", 1, seed=1, after=whole[: at - 1])[-1][0]) for at in (disputed, again)]
    source = log_of(whole, rest)
    frontier = up_to(source, ADA, final) if final else VersionVector({})
    steps = [
        lambda log: offer(log, whole[:3]),
        lambda log: offer(log, whole),
        lambda log: offer(log, rest),
        lambda log: log.retract(forks[0]),
        lambda log: log.retract(forks[1]),
        lambda log: log.advance(frontier),
    ]
    log = log_of(whole[:final])
    for index in order:
        steps[index](log)
    for step in steps[1:3]:
        step(log)
    stays = max(final, min(disputed, again) - 1)
    assert state(log) == state(log_of(whole[:stays], rest))
    assert log.frozen == {ADA: stays}
    assert log.frontier == frontier
    assert not log.behind


class Peer:
    """A log, its part in stability, and as much of an exchange as the laws need: no wire, no time."""

    def __init__(self, name: str, members: frozenset[str]) -> None:
        self.name, self.members = name, members
        self.log = new_log()
        self.stability = Stability(name, lambda key, seq: self.log.head_at(key, seq))
        self.durable = self.log.vector
        self.snapshots = 0

    def save(self) -> None:
        self.durable = self.log.vector
        self.adopt(self.stability.mine(self.durable, self.log.frontier, self.members))

    def adopt(self, final: VersionVector | None) -> None:
        while final is not None:
            self.log.advance(final)
            final = self.stability.mine(self.durable, self.log.frontier, self.members)

    def learn(self, fork: Fork) -> None:
        if self.log.retract(fork).dots:
            self.adopt(self.stability.mine(self.durable, self.log.frontier, self.members))

    def take_snapshot(self, other: Peer) -> None:
        """The other's state, and ours on top as far as it goes."""
        old, self.log = self.log, UpdateLog.from_snapshot(THETA0, RULES, other.log.snapshot().to_parts())
        for fork in old.proofs.values():
            self.log.retract(fork)
        pull(self.log, old)
        self.snapshots += 1
        self.save()

    def hear(self, other: Peer) -> None:
        """Only what it says about stability, perhaps before it knew of a proof."""
        self.adopt(self.stability.merge(other.stability.view))

    def meet(self, other: Peer) -> None:
        for one, two in ((self, other), (other, self)):
            for fork in one.log.proofs.values():
                two.learn(fork)
        for one, two in ((self, other), (other, self)):
            for key, seq in one.log.disagreements(two.log.vector):
                heads = [(at, one.log.head_at(key, at), two.log.head_at(key, at)) for at in range(1, seq + 1)]
                first = next(at for at, a, b in heads if None not in (a, b) and a != b)
                headers = [peer.log.header_at(key, first) for peer in (one, two)]
                if headers[0] is not None and headers[1] is not None:
                    fork = Fork(headers[0], headers[1])
                    one.learn(fork)
                    two.learn(fork)
        for one, two in ((self, other), (other, self)):
            one.log.advance(two.log.frontier)
            if two.log.compacted_for(one.log.vector) or two.log.frontier.entries.items() & one.log.behind.items():
                one.take_snapshot(two)
            pull(one.log, two.log)
        for one, two in ((self, other), (other, self)):
            one.hear(two)


@given(st.integers(2, 6), st.booleans(), st.booleans(), seeds)
def test_a_swarm_with_an_equivocator_ends_with_the_same_bits(
    size: int, forgetting: bool, two_forks: bool, seed: int
) -> None:
    """Updates, forks, saves and contacts in any order, and perhaps a peer that the others forget for a while."""
    rng = random.Random(seed)
    names = [f"member{i}" for i in range(size)]
    peers = [Peer(name, frozenset(names[:-1] if forgetting else names)) for name in names]
    honest = {name: chain(name, 4) for name in names}
    whole = chain("ada", 5)
    variants = [whole, chain("ada", 3, seed=1, after=whole[: rng.randint(0, 4)])]
    if two_forks:
        variants.append(chain("ada", 3, seed=2, after=whole[: rng.randint(0, 4)]))
    given_out = dict.fromkeys(names, 0)
    for _ in range(40):
        peer = rng.choice(peers)
        if rng.random() < 0.3:
            offer(peer.log, rng.choice(variants)[: rng.randint(1, 8)])
        elif given_out[peer.name] < 4:
            made = honest[peer.name][given_out[peer.name]]
            given_out[peer.name] += 1
            peer.log.add(*made)
        if rng.random() < 0.5:
            peer.save()
        awake = peers[:-1] if forgetting and size > 2 and rng.random() < 0.9 else peers
        one, two = rng.sample(awake, 2)
        one.hear(two) if rng.random() < 0.5 else one.meet(two)
    for _ in range(6):
        for peer in rng.sample(peers, size):
            peer.meet(rng.choice([other for other in peers if other is not peer]))
            peer.save()
    for _ in range(3):
        for one in peers:
            for two in peers:
                if one is not two:
                    one.meet(two)
    assert len({state(peer.log) for peer in peers}) == 1
    for name in names:
        assert peers[0].log.vector.seq(name, 0) == given_out[name]
    kept = peers[0].log.vector.seq(*ADA)
    candidates = [variant[:kept] for variant in variants if len(variant) >= kept]
    expected = [state(log_of(*(honest[name][: given_out[name]] for name in names), part)) for part in candidates]
    assert state(peers[0].log) in expected
