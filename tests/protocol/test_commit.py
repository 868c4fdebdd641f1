"""What a commit proves, and which side of a fork wins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.protocol import limits
from shoal.protocol.ballot_messages import Commit, Exchange, Value, Vote
from shoal.protocol.ballot_wire import decode_commit, encode_commit, vote_signer
from shoal.protocol.commit import CommitLog, Winner, check_commit, electorate_after
from shoal.protocol.errors import PeerFault
from shoal.protocol.identity import Identity
from shoal.protocol.version import sha256

ROOT = sha256(b"root")
E = ("a", "b", "c", "d", "e")
RUN = sha256(b"run")


def value_of(base=ROOT, round_=1, roster=E, joiners=(), tag=b"", split=False):
    return Value(
        round_, base, sha256(b"state", tag), (), tuple(sorted(roster)), tuple(joiners), Exchange.NOTHING, (), split
    )


def commit_of(value, voters, split=False, attempt=0):
    votes = [Vote(v, value.round, value.base_lineage, attempt, value.hash, split, b"signed") for v in voters]
    return Commit(attempt, value, tuple(votes))


def refused(commit, electorate=E, round_=1, base=ROOT):
    with pytest.raises(PeerFault) as caught:
        check_commit(commit, electorate, round_, base)
    assert caught.value.kind == "bad_commit"
    return caught.value.detail


def test_a_majority_makes_a_commit():
    value = value_of(joiners=("f",))
    checked = check_commit(commit_of(value, "abc"), E, 1, ROOT)
    assert (checked.value, checked.signers, checked.split) == (value, frozenset("abc"), False)
    assert checked.lineage == value.lineage
    assert electorate_after(value) == frozenset("abcdef")


def test_too_few_foreign_double_and_mixed_votes_are_refused():
    value = value_of()
    assert "no majority" in refused(commit_of(value, "ab"))
    assert "no majority" in refused(commit_of(value, ""))
    assert "not in the electorate" in refused(commit_of(value, "abx"))
    assert "twice" in refused(commit_of(value, "abb"))
    assert "another lineage" in refused(commit_of(value, "abc"), base=sha256(b"other"))
    assert "expected round 2" in refused(commit_of(value, "abc"), round_=2)
    assert "outside" in refused(commit_of(value_of(roster=(*E, "z")), "abc"))
    other = commit_of(value_of(tag=b"other"), "c").votes
    assert "something else" in refused(replace(commit_of(value, "ab"), votes=(*commit_of(value, "ab").votes, *other)))
    marked = commit_of(value, "c", split=True).votes
    assert "all or none" in refused(replace(commit_of(value, "ab"), votes=(*commit_of(value, "ab").votes, *marked)))


def test_a_split_commit_needs_no_majority_and_is_marked():
    assert check_commit(commit_of(value_of(roster="ab", split=True), "a", split=True), E, 1, ROOT).split


def test_a_commit_from_the_wire_has_its_signatures_checked():
    members = [Identity.generate(bytes([i]) * 32) for i in range(3)]
    names = [m.peer_id for m in members]
    value = value_of(roster=names)
    votes = []
    for member in members[:2]:
        vote = Vote(member.peer_id, 1, ROOT, 0, value.hash)
        votes.append(replace(vote, signed=vote_signer(member, RUN)(vote)))
    wire = encode_commit(Commit(0, value, tuple(votes)))
    assert check_commit(decode_commit(wire, RUN), names, 1, ROOT).signers == frozenset(names[:2])
    with pytest.raises(PeerFault):
        decode_commit(wire, sha256(b"another run"))


# --- the log ----------------------------------------------------------------------------------------------------------


def grow(log, base, rounds, *, voters="abc", weight=1, tag=b"", first_round=1, tip=None, electorate=E):
    """Append commits; returns the new tip."""
    for i in range(rounds):
        value = value_of(base, first_round + i, tag=tag + bytes([i % 251]), roster=electorate)
        checked = check_commit(commit_of(value, voters), electorate, first_round + i, base)
        log.add(checked, weight, tip=tip or checked.lineage)
        base = checked.lineage
    return base


def test_chain_ancestry_and_what_a_straggler_lacks():
    log = CommitLog(ROOT, 0)
    third = grow(log, ROOT, 3)
    fifth = grow(log, third, 2, first_round=4)
    assert log.is_ancestor(ROOT, fifth) and log.is_ancestor(third, fifth) and log.is_ancestor(fifth, fifth)
    assert not log.is_ancestor(fifth, third)
    assert [r.round for r in log.after(third, fifth)] == [4, 5]
    assert [r.round for r in log.after(ROOT, fifth, limit=2)] == [1, 2]
    assert log.after(sha256(b"unknown"), fifth) == [] and log.after(fifth, fifth) == []
    record = log.get(fifth)
    assert record is not None and record.total_weight == 5 and len(log) == 5
    assert log.add(record.checked, 1, tip=fifth) is record  # again
    assert log.fork_point(third, fifth) == log.fork_point(fifth, third) == third
    assert log.resolve_conflict(third, fifth).winner is Winner.SAME


def test_a_commit_on_an_unknown_base_is_our_mistake():
    log = CommitLog(ROOT, 0)
    value = value_of(sha256(b"elsewhere"))
    with pytest.raises(ValueError, match="unknown lineage"):
        log.add(check_commit(commit_of(value, "abc"), E, 1, value.base_lineage), 1, tip=ROOT)


def fork(mine, theirs):
    """Two branches after a common round; each a dict of `grow` arguments. Resolutions seen from both sides."""
    log = CommitLog(ROOT, 0)
    base = grow(log, ROOT, 1)
    a = grow(log, base, tag=b"mine", first_round=2, **mine)
    b = grow(log, base, tag=b"theirs", first_round=2, tip=a, **theirs)
    assert log.fork_point(a, b) == base
    one, other = log.resolve_conflict(a, b), log.resolve_conflict(b, a)
    assert {one.winner, other.winner} == {Winner.MINE, Winner.THEIRS}
    assert one.fork == other.fork == base
    return one


def test_more_signers_win_over_more_weight():
    resolution = fork({"rounds": 2, "voters": "abcd"}, {"rounds": 3, "voters": "cde", "weight": 100})
    assert resolution.winner is Winner.MINE and "4 signers" in resolution.reason
    assert resolution.rounds_stale == 3


def test_then_more_weight_wins_then_the_smaller_hash():
    assert fork({"rounds": 1, "weight": 2}, {"rounds": 1, "weight": 3}).winner is Winner.THEIRS
    resolution = fork({"rounds": 1}, {"rounds": 1})
    assert "smaller" in resolution.reason


def test_a_fork_older_than_the_records_is_undecidable():
    log = CommitLog(ROOT, 0, kept=5)
    base = grow(log, ROOT, 1)
    theirs = grow(log, base, 1, tag=b"theirs", first_round=2, tip=base)
    mine = grow(log, base, 20, tag=b"mine", first_round=2)
    assert len(log) == 5 and not log.knows(theirs)
    assert log.resolve_conflict(mine, theirs).winner is Winner.UNDECIDABLE
    record = log.get(mine)
    assert record is not None and record.total_weight == 21  # the forgotten ones still count


def test_large_records_are_kept_as_far_as_they_fit():
    """The own branch within `bytes_max`, and with the others within twice that; the newest own one always."""
    one = CommitLog(ROOT, 0)
    size = one.get(grow(one, ROOT, 1)).size
    log = CommitLog(ROOT, 0, kept=100, bytes_max=5 * size - 1)
    mine = grow(log, ROOT, 3)
    for i in range(20):
        grow(log, ROOT, 1, tag=b"junk" + bytes([i]), tip=mine)
    assert [r.round for r in log.chain(mine)] == [3, 2, 1] and len(log) == 9
    mine = grow(log, mine, 20, first_round=4)
    assert [r.round for r in log.chain(mine)] == [23, 22, 21, 20] and len(log) == 4
    assert log.get(mine).total_weight == 23 and log.root_electorate == frozenset(E)
    tight = CommitLog(ROOT, 0, kept=100, bytes_max=1)
    assert [r.round for r in tight.chain(grow(tight, ROOT, 5))] == [5]


def test_foreign_branches_never_push_out_the_own_one():
    log = CommitLog(ROOT, 0, kept=4)
    mine = grow(log, ROOT, 4)
    for i in range(20):
        grow(log, ROOT, 1, tag=b"junk" + bytes([i]), tip=mine)
    assert len(log) == 8 and [r.round for r in log.chain(mine)] == [4, 3, 2, 1]
    assert CommitLog(ROOT, 0).kept == limits.COMMIT_RECORDS_KEPT
