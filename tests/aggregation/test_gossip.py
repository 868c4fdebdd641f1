"""The update log, case by case: verdicts, void updates, faults, proofs, the frontier, and its limits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from shoal.aggregation.compress import Compression, decode, encode
from shoal.aggregation.contributions import Contributions, GossipRules
from shoal.aggregation.forks import Fork, head_of
from shoal.aggregation.gossip import UpdateLog, Verdict
from shoal.aggregation.merge import apply_fixed, contribution
from shoal.protocol.ballot_messages import Encoding
from shoal.protocol.errors import PeerFault
from shoal.protocol.version import NO_HEAD, Dot, Order, VersionVector

from .origins import RULES, THETA0, D, Update, chain, log_of, new_log, offer, pull, state, up_to, update

ADA, BOB = ("ada", 0), ("bob", 0)


def fork_at(seq: int, peer: str = "ada") -> Fork:
    whole = chain(peer, seq)
    return Fork(whole[-1][0], chain(peer, 1, seed=1, after=whole[:-1])[-1][0])


# --- the state ---------------------------------------------------------------------------------------------------------


def test_the_state_is_theta0_less_the_scaled_updates() -> None:
    header, payload = update(scale=0.5)
    log = new_log()
    assert np.array_equal(log.theta, THETA0)
    added = log.add(header, payload)
    decoded = decode(payload, D, RULES.compression)
    fixed = contribution(decoded.values, 0.5)
    total = np.zeros(D, np.int64)
    total[decoded.indices] = fixed
    assert np.array_equal(log.theta, apply_fixed(THETA0, -total))
    assert log.theta is log.theta and not log.theta.flags.writeable
    assert not added.void and added.step == pytest.approx(0.5 * float(np.linalg.norm(decoded.values)))
    assert log.vector.entries == {ADA: (1, head_of(header))}
    assert log.total_weight == 3 and log.log_bytes == len(header.signed) + len(payload)


def test_logs_of_other_bits_have_other_hashes() -> None:
    one, two = log_of(chain("ada", 1)), log_of(chain("ada", 1, seed=1))
    assert one.vector.compare(two.vector) is Order.CONCURRENT
    assert one.state_hash != two.state_hash and one.digest != two.digest
    assert new_log().digest == bytes(32)


def test_the_digest_follows_the_vector_back_and_forth() -> None:
    log = log_of(chain("ada", 2))
    digests = [log.digest]
    log.retract(fork_at(2))
    digests.append(log.digest)
    assert digests[1] == log_of(chain("ada", 1)).digest != digests[0] == log_of(chain("ada", 2)).digest


def test_theta0_must_be_finite_fp32() -> None:
    for bad in (THETA0.astype(np.float64), THETA0.reshape(2, -1), np.full(D, np.nan, np.float32)):
        with pytest.raises(ValueError, match="theta0"):
            UpdateLog(bad, RULES)
    with pytest.raises(ValueError, match="contributions"):
        UpdateLog(THETA0, RULES, Contributions(D, dataclasses.replace(RULES, step_max=1.0)))


# --- verdicts ----------------------------------------------------------------------------------------------------------


def test_what_a_header_is() -> None:
    ada = chain("ada", 4)
    other = chain("ada", 2, seed=1, after=ada[:1])
    log = log_of(ada[:2])
    assert log.judge(ada[0][0]) == (Verdict.DUPLICATE, None)
    assert log.judge(ada[2][0]) == (Verdict.NEW, None)
    assert log.judge(ada[3][0]) == (Verdict.GAP, None)
    assert log.judge(other[1][0]) == (Verdict.FORK, ada[1][0])
    assert log.judge(other[2][0]) == (Verdict.FORK, None)  # the chains part below it
    log.advance(up_to(log, ADA, 1))
    assert log.judge(ada[0][0]) == (Verdict.BELOW, None)
    log.retract(Fork(ada[1][0], other[1][0]))
    assert log.judge(ada[1][0]) == log.judge(other[1][0]) == (Verdict.FROZEN, None)


def test_another_signature_under_the_same_body_is_no_fork() -> None:
    one, _ = update()
    two, _ = update(signature=b"t" * 64)
    log = log_of([update()])
    assert one.update_hash != two.update_hash
    assert log.judge(two) == (Verdict.DUPLICATE, None)
    with pytest.raises(PeerFault, match="bad_proof"):
        Fork(one, two)


def test_headers_under_two_dots_prove_nothing() -> None:
    ada = chain("ada", 2)
    with pytest.raises(PeerFault, match="bad_proof"):
        Fork(ada[0][0], ada[1][0])


def test_only_what_is_new_can_be_added() -> None:
    header, payload = update()
    log = log_of([(header, payload)])
    with pytest.raises(ValueError, match="duplicate"):
        log.add(header, payload)


# --- void updates and faults -------------------------------------------------------------------------------------------

FP32 = GossipRules(Compression(1.0, 32), step_max=1.0)


def dense(values: float, scale: float = 1.0) -> Update:
    vector = np.zeros(D, np.float32)
    vector[3] = values
    return update(payload=encode(vector, FP32.compression), scale=scale)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (dense(2.0, 0.5), "reaches 1"),
        (dense(0.5, 1e300), "reaches 1"),
        (dense(0.5, -1.0), "not above zero"),
        (dense(0.5, 0.0), "not above zero"),
    ],
)
def test_a_void_update_counts_and_contributes_zero(made: Update, why: str) -> None:
    log = new_log(FP32)
    added = log.add(*made)
    assert added.void and why in added.reason and added.step == 0
    assert np.array_equal(log.theta, THETA0)
    assert log.vector.seq(*ADA) == 1 and log.total_weight == 3
    snapshot = log.snapshot()
    assert state(UpdateLog.from_snapshot(THETA0, FP32, snapshot)) == state(log)
    log.retract(Fork(made[0], update(seed=1)[0]))
    assert state(log) == state(new_log(FP32))


def test_the_step_limit_is_on_scale_times_norm() -> None:
    vector = np.full(D, 0.9, np.float32)
    payload = encode(vector, FP32.compression)
    length = float(np.sqrt(np.square(vector.astype(np.float64)).sum()))
    for scale, void in ((0.99 / length, False), (1.01 / length, True)):
        assert new_log(FP32).add(*update(payload=payload, scale=scale)).void is void
    no_limit = dataclasses.replace(FP32, step_max=0.0)
    assert not new_log(no_limit).add(*update(payload=payload, scale=1.0)).void


def test_a_payload_that_is_not_the_headers_is_a_fault_and_changes_nothing() -> None:
    log = new_log()
    header, payload = update()
    for wrong in (payload[:-1], payload[:-1] + bytes([payload[-1] ^ 1]), b""):
        with pytest.raises(PeerFault, match="bad_payload"):
            log.add(header, wrong)
    garbage = update(payload=b"\xff" * 40)
    with pytest.raises(PeerFault, match="bad_payload"):
        log.add(*garbage)
    with pytest.raises(PeerFault, match="bad_encoding"):
        log.add(*update(encoding=Encoding.DENSE))
    assert state(log) == state(new_log())
    assert not log.add(header, payload).void


def test_shared_contributions_still_check_the_payload() -> None:
    shared = Contributions(D, RULES)
    header, payload = update()
    one, two = (UpdateLog(THETA0, RULES, shared) for _ in range(2))
    one.add(header, payload)
    with pytest.raises(PeerFault, match="bad_payload"):
        two.add(header, b"\0" * len(payload))
    two.add(header, bytes(bytearray(payload)))
    assert state(one) == state(two)


def test_what_fell_out_of_the_cache_is_decoded_again() -> None:
    ada = chain("ada", 4)
    small = UpdateLog(THETA0, RULES, Contributions(D, RULES, cache_bytes_max=1))
    offer(small, ada)
    small.retract(fork_at(2))
    assert state(small) == state(log_of(ada[:1]))


# --- exchange ----------------------------------------------------------------------------------------------------------


def test_what_a_peer_lacks_is_bounded_in_order_and_at_least_one() -> None:
    ada, bob = chain("ada", 3), chain("bob", 2)
    log = log_of(bob[:1], ada, bob[1:])
    assert log.lacks(VersionVector({}), 0) == [bob[0][0]]
    assert log.lacks(VersionVector({}), 10**9) == [h for h, _ in bob + ada]
    room = sum(len(h.signed) + len(p) for h, p in bob)
    assert log.lacks(VersionVector({}), room) == [h for h, _ in bob]
    assert log.lacks(log_of(bob, ada[:2]).vector, 10**9) == [ada[2][0]]
    assert log.lacks(log.vector, 10**9) == []
    assert log.weight_beyond(log_of(ada[:2]).vector) == 9
    assert log.weight_beyond(log.vector) == 0


def test_compacted_updates_cannot_be_given_and_are_named() -> None:
    log = log_of(chain("ada", 3), chain("bob", 1))
    log.advance(up_to(log, ADA, 2))
    behind = log_of(chain("ada", 1)).vector
    assert log.lacks(behind, 10**9) == [chain("bob", 1)[0][0]]
    assert log.compacted_for(behind) == [ADA]
    assert log.compacted_for(log_of(chain("ada", 2)).vector) == []
    assert log.weight_beyond(behind) == 6  # what is kept


def test_two_sides_of_a_fork_take_back_what_it_disputes() -> None:
    common = chain("ada", 4)
    one, two = log_of(chain("ada", 5, after=common)), log_of(chain("ada", 3, seed=1, after=common))
    assert one.disagreements(two.vector) == [(ADA, 7)]
    assert two.disagreements(one.vector) == []  # ours is shorter: they see it
    assert one.lacks(two.vector, 10**9) == []  # of no use to them
    assert [one.head_at(ADA, seq) == two.head_at(ADA, seq) for seq in (4, 5, 7)] == [True, False, False]
    headers = [log.header_at(ADA, 5) for log in (one, two)]
    assert headers[0] is not None and headers[1] is not None
    for log in (one, two):
        result = log.retract(Fork(headers[0], headers[1]))
        assert not result.conflict and not result.below_frontier and "taken back" in result.reason
    assert state(one) == state(two) == state(log_of(common))
    assert list(one.proofs) == ["ada"]


def test_heads_headers_and_payloads_are_there_while_they_are_kept() -> None:
    ada = chain("ada", 3)
    log = log_of(ada)
    log.advance(up_to(log, ADA, 1))
    assert log.head_at(ADA, 0) == NO_HEAD
    assert log.head_at(ADA, 1) == head_of(ada[0][0]) and log.header_at(ADA, 1) is None
    assert log.head_at(ADA, 3) == head_of(ada[2][0]) and log.header_at(ADA, 3) == ada[2][0]
    assert log.head_at(ADA, 4) is None and log.head_at(BOB, 1) is None and log.header_at(BOB, 1) is None
    assert log.payload(Dot("ada", 0, 2)) == ada[1][1]
    for gone in (Dot("ada", 0, 1), Dot("ada", 0, 4), Dot("bob", 0, 1)):
        with pytest.raises(KeyError):
            log.payload(gone)


# --- proofs and the frontier -------------------------------------------------------------------------------------------


def test_a_proof_reaches_later_incarnations_and_leaves_earlier_ones() -> None:
    early, later = chain("ada", 2), chain("ada", 2, incarnation=2)
    disputed = chain("ada", 2, incarnation=1)
    other = chain("ada", 1, incarnation=1, seed=1, after=disputed[:1])
    log = log_of(early[:1], disputed, later, chain("bob", 1))
    log.retract(Fork(disputed[1][0], other[1][0]))
    assert state(log) == state(log_of(early[:1], disputed[:1], chain("bob", 1)))
    assert log.judge(early[1][0])[0] is Verdict.NEW
    assert log.judge(chain("ada", 1, incarnation=7)[0][0])[0] is Verdict.FROZEN


def test_a_proof_known_before_the_updates_keeps_them_out() -> None:
    log = new_log()
    result = log.retract(fork_at(3))
    offer(log, chain("ada", 5))
    assert result.dots == () and log.vector.seq(*ADA) == 2 and log.frozen == {ADA: 2}


def test_a_proof_at_or_below_the_frontier_takes_nothing_final_back() -> None:
    log = log_of(chain("ada", 3))
    log.advance(up_to(log, ADA, 3))
    before = state(log)
    for seq in (3, 2):
        result = log.retract(fork_at(seq))
        assert result.below_frontier and result.dots == () and "final" in result.reason
    assert state(log) == before and log.frozen == {ADA: 3}
    assert log.judge(chain("ada", 4)[-1][0])[0] is Verdict.FROZEN


def test_retracted_payloads_are_kept_until_the_frontier_passes_them() -> None:
    ada = chain("ada", 4)
    log, other = log_of(ada), log_of(ada)
    late = up_to(other, ADA, 3)  # called by a peer that did not know the proof
    other.advance(late)
    for one in (log, other):
        one.retract(fork_at(2))
    assert log.vector.seq(*ADA) == 1 and other.vector.seq(*ADA) == 3
    assert [log.payload(header.dot) for header, _ in ada[1:]] == [payload for _, payload in ada[1:]]
    assert log.advance(late) == [header.dot for header, _ in ada[:3]]
    assert state(log) == state(other) == state(log_of(ada[:3]))
    assert log.payload(ada[3][0].dot) == ada[3][1]
    with pytest.raises(KeyError):
        log.payload(ada[2][0].dot)
    assert log.log_bytes == len(ada[3][0].signed) + len(ada[3][1])


def test_a_frontier_that_names_what_is_not_here_leaves_us_behind_until_it_is() -> None:
    ada = chain("ada", 3)
    ahead, log = log_of(ada), log_of(ada[:1])
    far, near = up_to(ahead, ADA, 3), up_to(ahead, ADA, 2)
    assert log.advance(far) == [] and log.advance(near) == []
    assert log.behind == dict(far.entries) and log.frontier.entries == {}
    log.add(*ada[1])
    assert log.behind and log.judge(ada[2][0])[0] is Verdict.NEW
    log.add(*ada[2])
    assert not log.behind and log.frontier == far and log.log_bytes == 0
    log.advance(near)  # an old one changes nothing
    assert log.frontier == far


def test_a_frontier_on_the_other_side_of_a_fork_needs_a_snapshot() -> None:
    whole = chain("ada", 3)
    theirs = log_of(chain("ada", 2, seed=1, after=whole[:1]), chain("bob", 1))
    theirs.advance(theirs.vector)
    log = log_of(whole, chain("eve", 1))
    log.advance(theirs.frontier)
    assert set(log.behind) == {ADA, BOB}
    log.retract(Fork(whole[1][0], chain("ada", 1, seed=1, after=whole[:1])[-1][0]))
    assert set(log.behind) == {ADA, BOB}
    again = UpdateLog.from_snapshot(THETA0, RULES, theirs.snapshot())
    assert pull(again, log) == 1 and again.vector.seq("eve", 0) == 1
    assert not again.behind and again.vector.seq(*ADA) == 3


def test_chains_can_be_frozen_without_a_proof_and_only_lower() -> None:
    log = log_of(chain("ada", 3), chain("bob", 3))
    result = log.freeze({ADA: 1, BOB: 5, ("eve", 0): 0})
    assert result.dots == (Dot("ada", 0, 2), Dot("ada", 0, 3)) and "frozen" in result.reason
    log.freeze({ADA: 2})
    assert log.frozen == {ADA: 1, BOB: 5, ("eve", 0): 0}
    assert state(log) == state(log_of(chain("ada", 1), chain("bob", 3)))


def test_no_limit_is_below_what_is_final_whichever_came_first() -> None:
    ada = chain("ada", 3)
    frozen_first, final_first = log_of(ada), log_of(ada)
    final = up_to(final_first, ADA, 2)
    frozen_first.freeze({ADA: 1})
    frozen_first.advance(final)
    final_first.advance(final)
    final_first.freeze({ADA: 1})
    for log in (frozen_first, final_first):
        assert log.limits == log.frozen == {ADA: 2} and log.vector.seq(*ADA) == 2
    assert frozen_first.snapshot().hash == final_first.snapshot().hash


def test_two_proofs_of_one_peer_leave_what_is_below_the_lower() -> None:
    ada = chain("ada", 4)
    for order in ((2, 4), (4, 2)):
        log = log_of(ada)
        for seq in order:
            log.retract(fork_at(seq))
        assert state(log) == state(log_of(ada[:1])) and log.proofs["ada"].dot.seq == 2
        assert [log.payload(header.dot) for header, _ in ada[1:]] == [payload for _, payload in ada[1:]]


# --- the limit of the log ----------------------------------------------------------------------------------------------


def limited(*chains: list[Update], keep: int) -> UpdateLog:
    """A log that may keep about `keep` updates."""
    size = max(len(h.signed) + len(p) for updates in chains for h, p in updates)
    return log_of(*chains, rules=dataclasses.replace(RULES, log_bytes_max=keep * size))


def test_a_log_over_its_limit_drops_the_longest_chains_oldest_updates() -> None:
    ada, bob = chain("ada", 5), chain("bob", 1)
    log = limited(ada, bob, keep=3)
    before = state(log)
    dropped = log.drop_over_limit()
    assert dropped == [header.dot for header, _ in ada[:3]]
    assert log.log_bytes <= log.rules.log_bytes_max and log.drop_over_limit() == []
    assert state(log) == before and log.frontier.entries == {}
    assert log.compacted_for(VersionVector({})) == [ADA]
    assert state(UpdateLog.from_snapshot(THETA0, log.rules, log.snapshot())) == before


def test_a_log_may_drop_all_of_it() -> None:
    log = log_of(chain("ada", 2), rules=dataclasses.replace(RULES, log_bytes_max=1))
    assert len(log.drop_over_limit()) == 2 and log.log_bytes == 0


def test_without_a_limit_nothing_is_dropped() -> None:
    assert log_of(chain("ada", 5)).drop_over_limit() == []


def test_retracted_payloads_go_first() -> None:
    ada = chain("ada", 3)
    log = limited(ada, chain("bob", 2), keep=2)
    log.retract(fork_at(1))
    assert log.drop_over_limit() == [header.dot for header, _ in ada]
    assert log.header_at(BOB, 1) is not None
    log.advance(up_to(log_of(ada), ADA, 2))
    assert set(log.behind) == {ADA}  # what the frontier puts back is not here any more


def test_a_proof_about_dropped_updates_is_a_conflict() -> None:
    log = limited(chain("ada", 5), keep=2)
    log.drop_over_limit()
    result = log.retract(fork_at(2))
    assert result.conflict and "snapshot" in result.reason
    assert [dot.seq for dot in result.dots] == [4, 5]
    assert log.vector.seq(*ADA) == 3


def test_a_frontier_below_dropped_updates_is_taken_at_its_word() -> None:
    whole = log_of(chain("ada", 5))
    log = limited(chain("ada", 5), keep=2)
    log.drop_over_limit()
    assert log.advance(up_to(whole, ADA, 2)) == []
    assert log.frontier == up_to(whole, ADA, 2) and not log.behind
    assert log.advance(up_to(whole, ADA, 4)) == [Dot("ada", 0, 4)]
