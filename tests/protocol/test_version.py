"""Laws of the order of versions: what compare, merge and the chained hashes promise to everybody who relies on them."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.version import (
    NO_HEAD,
    Dot,
    Order,
    VersionVector,
    genesis_lineage,
    next_head,
    next_lineage,
    sha256,
)

KEYS = [("ann", 1), ("ann", 2), ("bob", 1)]
FLIPPED = {
    Order.EQUAL: Order.EQUAL,
    Order.BEFORE: Order.AFTER,
    Order.AFTER: Order.BEFORE,
    Order.CONCURRENT: Order.CONCURRENT,
}


def head(key: tuple[str, int], seq: int, fork: int = 0) -> bytes:
    return sha256(f"{key} {seq} {fork}".encode())


def vectors(forks: int = 0) -> st.SearchStrategy[VersionVector]:
    """Vectors over three chains; with `forks` > 0 some chains have several heads at one seq."""
    entry = st.tuples(st.integers(1, 4), st.integers(0, forks))
    return st.dictionaries(st.sampled_from(KEYS), entry).map(
        lambda d: VersionVector.of((k, (seq, head(k, seq, fork))) for k, (seq, fork) in d.items())
    )


@given(vectors(forks=1), vectors(forks=1))
def test_compare_seen_from_the_other_side_is_the_flipped_order(a: VersionVector, b: VersionVector) -> None:
    assert b.compare(a) is FLIPPED[a.compare(b)]
    assert a.compare(a) is Order.EQUAL


@given(vectors(), vectors(), vectors())
def test_before_is_transitive_where_no_chain_forks(a: VersionVector, b: VersionVector, c: VersionVector) -> None:
    at_most = (Order.BEFORE, Order.EQUAL)
    if a.compare(b) in at_most and b.compare(c) in at_most:
        assert a.compare(c) in at_most


@given(vectors(), vectors(), vectors())
def test_merge_is_the_least_upper_bound(a: VersionVector, b: VersionVector, c: VersionVector) -> None:
    merged = a.merge(b)
    assert a.compare(merged) in (Order.BEFORE, Order.EQUAL)
    assert b.compare(merged) in (Order.BEFORE, Order.EQUAL)
    if a.compare(c) in (Order.BEFORE, Order.EQUAL) and b.compare(c) in (Order.BEFORE, Order.EQUAL):
        assert merged.compare(c) in (Order.BEFORE, Order.EQUAL)


@given(vectors(), vectors(), vectors())
def test_merge_commutes_associates_and_repeats(a: VersionVector, b: VersionVector, c: VersionVector) -> None:
    assert a.merge(b) == b.merge(a)
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(a) == a


@given(vectors(forks=1), vectors(forks=1))
def test_two_heads_at_one_seq_are_concurrent_and_never_merged(a: VersionVector, b: VersionVector) -> None:
    shared = a.entries.keys() & b.entries.keys()
    forked = any(a.entries[k][0] == b.entries[k][0] and a.entries[k] != b.entries[k] for k in shared)
    if forked:
        assert a.compare(b) is Order.CONCURRENT
        with pytest.raises(ValueError, match="two heads at seq"):
            a.merge(b)
    else:
        a.merge(b)


@given(vectors(forks=1), vectors(forks=1))
def test_hashes_are_equal_exactly_for_equal_vectors(a: VersionVector, b: VersionVector) -> None:
    assert (a.hash() == b.hash()) == (a.compare(b) is Order.EQUAL)


@given(vectors(), st.sampled_from(KEYS), st.integers(1, 6))
def test_advance_includes_exactly_what_is_above(vector: VersionVector, key: tuple[str, int], seq: int) -> None:
    dot = Dot(*key, seq)
    if vector.includes(dot):
        with pytest.raises(ValueError, match="already included"):
            vector.advance(dot, head(key, seq))
    else:
        further = vector.advance(dot, head(key, seq))
        assert further.includes(dot) and further.seq(*key) == seq
        assert vector.compare(further) is Order.BEFORE
        assert not further.includes(Dot(*key, seq + 1))


def test_a_chain_that_was_never_heard_of_is_at_zero() -> None:
    empty = VersionVector.of()
    assert empty.seq("ann", 1) == 0
    assert not empty.includes(Dot("ann", 1, 1))
    assert empty.compare(VersionVector.of([(("ann", 1), (1, NO_HEAD))])) is Order.BEFORE


def test_dots_sort_by_peer_then_life_then_seq() -> None:
    dots = [Dot("bob", 1, 1), Dot("ann", 2, 1), Dot("ann", 1, 9), Dot("ann", 1, 10)]
    assert sorted(dots) == [Dot("ann", 1, 9), Dot("ann", 1, 10), Dot("ann", 2, 1), Dot("bob", 1, 1)]
    assert str(Dot("12D3KooWabcdefgh", 2, 7)) == "cdefgh/2/7"


def test_hashes_of_chains_depend_on_every_part_and_on_their_purpose() -> None:
    assert sha256(b"a", b"b") == hashlib.sha256(b"ab").digest()
    chained = {
        next_head(NO_HEAD, b"h"),
        next_head(NO_HEAD, b"i"),
        next_head(sha256(b"x"), b"h"),
        next_lineage(NO_HEAD, b"h"),
        genesis_lineage(NO_HEAD, "", b"h"),
        genesis_lineage(NO_HEAD, "h", b""),
    }
    assert len(chained) == 6
