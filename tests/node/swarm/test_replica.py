"""A replica without any network: what stands on a snapshot, and what is final."""

from __future__ import annotations

from collections.abc import Callable

from shoal.aggregation.book import Book
from shoal.aggregation.compress import decode
from shoal.aggregation.gossip import UpdateLog
from shoal.node.store.gossip_file import floor_only
from shoal.node.swarm.replica import OWN_KEPT_MAX, Replica, ReplicaSettings
from shoal.protocol.version import VersionVector

from ...aggregation.origins import RULES, THETA0, D, Update, chain, log_of

ADA, BOB = ("ada", 0), ("bob", 0)


def replica_of(
    *chains: list[Update], me: str = "ada", members: Callable[[], frozenset[str] | None] = frozenset
) -> tuple[Replica, list[str]]:
    said: list[str] = []
    book = Book(D)
    for header, payload in chains[0]:
        book.record(header.dot, decode(payload, D, RULES.compression))
        book.adopt(header.dot)
    replica = Replica(
        me=me,
        theta0=THETA0,
        log=log_of(*chains),
        book=book,
        settings=ReplicaSettings(heal_max=0, heal_rule="heavier", compact_updates=1, usual=3),
        durable=VersionVector({}),
        members=members,
        life_over=lambda: said.append("life over"),
        say=lambda event, **values: said.append(event),
    )
    return replica, said


def final(log: UpdateLog, seq: int, key: tuple[str, int] = ADA) -> None:
    head = log.head_at(key, seq)
    assert head is not None
    log.advance(VersionVector({key: (seq, head)}))


def test_who_knows_nobody_yet_calls_nothing_final() -> None:
    known: list[frozenset[str] | None] = [None]
    replica, _ = replica_of(chain("ada", 3), members=lambda: known[0])
    replica.made_durable(replica.log.vector)
    assert not replica.log.frontier.entries
    known[0] = frozenset()
    replica.made_durable(replica.log.vector)
    assert replica.log.frontier.seq(*ADA) == 3


def test_what_stands_on_a_snapshot_is_complete_whatever_the_order_of_its_parts() -> None:
    ada, bob = chain("ada", 2), chain("bob", 6)
    winner = log_of(ada, bob)
    final(winner, 2, BOB)
    replica, _ = replica_of(ada, bob[:4])
    final(replica.log, 1, BOB)
    # What the winner has sent goes on from what is here, and what is here from the winner's floor.
    log = replica.standing_on(floor_only(winner.snapshot()), [bob[5], bob[4]], ours=False)
    assert (log.state_hash, log.vector) == (winner.state_hash, winner.vector)


def test_chains_stay_ended_on_a_snapshot_of_the_same_side_and_not_on_the_winners() -> None:
    ada, bob = chain("ada", 2), chain("bob", 4)
    replica, _ = replica_of(ada, bob)
    replica.join_limits({BOB: 2})
    other = floor_only(log_of(ada).snapshot())
    assert replica.standing_on(other, bob).vector.seq(*BOB) == 2
    assert replica.standing_on(other, bob, ours=False).vector.seq(*BOB) == 4


def test_who_takes_over_a_side_that_won_has_its_state_and_nothing_of_the_side_that_lost() -> None:
    ada, bob = chain("ada", 9), chain("bob", 9)
    winner, _ = replica_of(ada[:2], bob, me="bob")
    replica, _ = replica_of(ada, bob[:2])
    replica.join_limits({BOB: 2})  # an earlier healing, which the winner has never heard of
    mine, theirs = replica.hello(), winner.hello()
    assert replica.abandons(theirs, 1)
    winner.abandon(theirs.tops, mine.tops)
    log = replica.taking_over(theirs, winner.floor[0], bob)
    assert (log.state_hash, log.vector, log.limits) == (winner.log.state_hash, winner.log.vector, {ADA: 2})


def test_own_updates_that_go_with_their_side_flow_back_though_they_were_final() -> None:
    ada, bob = chain("ada", 3), chain("bob", 4)
    replica, said = replica_of(ada)
    final(replica.log, 3)
    assert {header.dot for header, _ in ada} <= set(replica.recent_own())
    adopted = replica._book.parts()["adopted"]
    assert adopted.any()
    replica.replace(replica.standing_on(log_of(bob).snapshot(), ours=False))
    assert not replica._book.parts()["adopted"].any() and "life over" in said
    assert replica._book.parts()["damped"].any()


def test_so_many_own_updates_stay_on_record() -> None:
    replica, _ = replica_of(chain("ada", OWN_KEPT_MAX + 2))
    assert [replica.recent_own()[0].seq, len(replica.recent_own())] == [3, OWN_KEPT_MAX]
