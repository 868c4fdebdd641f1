"""The decisions of a round as pure functions: who convenes, what is a majority, what binds, what may be proposed and
voted.

Each answer that a person may want explained comes with its reason. State and time live in ballot.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .ballot_messages import (
    Commit,
    CommittedUpdate,
    Encoding,
    Exchange,
    Header,
    Holding,
    Join,
    Roster,
    RosterEntry,
    Value,
    VotedFor,
)
from .errors import PeerFault
from .version import sha256

# From this attempt on, a round whose exchange never delivers is closed with an empty step: the work flows back into the
# residuals, and a swarm whose data path is broken says so every round in place of standing still.
EMPTY_STEP_FROM_ATTEMPT: Final = 4

ChooseExchange = Callable[[Sequence[Header], int], tuple[Exchange, str]]


def convener_order(electorate: Iterable[str], base_lineage: bytes, round_: int) -> tuple[str, ...]:
    """Who convenes attempts 0, 1, …, in turns: the electorate sorted by sha-256 of (lineage, round, peer)."""
    prefix = b"shoal/v1/convener\0" + base_lineage + round_.to_bytes(8, "big")
    return tuple(sorted(electorate, key=lambda peer: (sha256(prefix, peer.encode()), peer)))


def is_majority(count: int, electorate: int) -> bool:
    return 2 * count > electorate


def may_split(electorate: Collection[str], dead: Collection[str]) -> bool:
    """Half or more of the electorate is dead: a majority cannot come, so the rest may go on, marked."""
    gone = sum(peer in dead for peer in electorate)
    return gone > 0 and not is_majority(len(electorate) - gone, len(electorate))


def is_split_roster(roster: Roster, electorate: Collection[str]) -> bool:
    """The attempt rests on promises of half of the electorate or less."""
    return not is_majority(len(roster.entries), len(electorate))


def binding(votes: Iterable[VotedFor | None]) -> VotedFor | None:
    """The earlier vote that must be proposed again: of the highest attempt, majority attempts before split ones.

    Split votes rank below all others: otherwise the vote of a minority in a later attempt would overrule what a
    majority may have decided in an earlier one.
    """
    return max((v for v in votes if v is not None), key=lambda v: (v.rank, v.value.hash), default=None)


def choose_exchange(headers: Sequence[Header], peers: int) -> tuple[Exchange, str]:
    """The exchange that the updates' encoding calls for. Mixed encodings: the more common one, sparse on a tie."""
    if not headers:
        return Exchange.NOTHING, "nobody has an update"
    dense = sum(header.encoding is Encoding.DENSE for header in headers)
    kind = Exchange.RING_DENSE if 2 * dense > len(headers) else Exchange.RING_SPARSE
    size = sum(header.payload_size for header in headers)
    return kind, f"{dense} of {len(headers)} updates are dense, {size} bytes in all, {peers} peers"


def make_roster(
    *,
    convener: str,
    attempt: int,
    joins: Mapping[str, Join],
    order: Sequence[str],
    joiners: tuple[str, ...],
    choose: ChooseExchange,
    reason: str,
    preferred: Value | None = None,
) -> Roster:
    """The roster of an attempt from its joins (keyed by peer; the convener's own among them).

    `preferred`: what to propose when nothing binds: a value that a split is known to have committed.
    """
    join = joins[convener]
    members = [peer for peer in order if peer in joins]
    bound = binding(joins[peer].voted for peer in members)
    again = bound.value if bound is not None else preferred
    headers = [h for peer in members if (h := joins[peer].header) is not None]
    carried: set[bytes] = set()
    if again is not None:
        source = f"was voted for in attempt {bound.attempt}" if bound is not None else "was committed by a split"
        kind, why = Exchange.NOTHING, f"a value that {source} is proposed again"
    else:
        kind, why = choose(headers, len(members))
        wanted = Encoding.DENSE if kind is Exchange.RING_DENSE else Encoding.SPARSE
        carried = {h.update_hash for h in headers if h.encoding is wanted and kind is not Exchange.NOTHING}
    return Roster(
        convener=convener,
        round=join.round,
        base_lineage=join.base_lineage,
        attempt=attempt,
        entries=tuple(
            RosterEntry(peer, h if (h := joins[peer].header) is not None and h.update_hash in carried else None)
            for peer in members
        ),
        joiners=again.joiners if again is not None else joiners,
        exchange=kind,
        reason=f"{reason}; {why}",
        bound_value=again,
    )


def still_missing(
    roster: Roster, holdings: Mapping[str, Holding], awaited: Collection[str], dead: Collection[str]
) -> dict[str, int]:
    """Of the awaited members, those that do not hold all they can still get, with how much each lacks.

    An update can still be got while its origin or any holder is alive. Dense: complete means all chunk hashes.
    """
    if roster.exchange is Exchange.RING_DENSE:
        return {p: 1 for p in awaited if p not in holdings or not holdings[p].chunk_hashes}
    held_alive = {h for p, holding in holdings.items() if p not in dead for h in holding.update_hashes}
    reachable = {h for h, header in roster.headers.items() if header.dot.peer not in dead or h in held_alive}
    lacking = {
        p: len(reachable - set(holdings[p].update_hashes)) if p in holdings else len(reachable) + 1 for p in awaited
    }
    return {p: count for p, count in lacking.items() if count}


def make_value(
    roster: Roster,
    holdings: Mapping[str, Holding],
    *,
    previous_state_hash: bytes,
    electorate: Collection[str],
    dead: Collection[str],
) -> tuple[Value | None, str]:
    """What to propose, or None when the exchange did not deliver, with the reason.

    Only holders that are alive count towards "more than half of the roster".
    """
    if roster.bound_value is not None:
        return roster.bound_value, "bound by an earlier vote"
    size = len(roster.entries)
    alive = {p: holding for p, holding in holdings.items() if p not in dead and p in roster.peers}
    headers, chunks, kind, ring = roster.headers, (), roster.exchange, ()
    if kind is Exchange.RING_DENSE:
        variants = sorted({h.chunk_hashes for h in alive.values() if h.chunk_hashes})
        agreed = [v for v in variants if is_majority(sum(h.chunk_hashes == v for h in alive.values()), size)]
        kept = set(headers) if agreed else set()
        if agreed:
            chunks, ring = agreed[0], roster.peers
        why = f"chunks in {len(variants)} variants, {'one' if agreed else 'none'} held by more than half of {size}"
    else:
        kept = {h for h in headers if is_majority(sum(h in held.update_hashes for held in alive.values()), size)}
        why = f"{len(kept)} of {len(headers)} updates held by more than half of {size}"
    if headers and not kept:
        if roster.attempt < EMPTY_STEP_FROM_ATTEMPT:
            return None, why
        kind, why = Exchange.NOTHING, f"{why}; an empty step after {roster.attempt} attempts"
    value = Value(
        round=roster.round,
        base_lineage=roster.base_lineage,
        previous_state_hash=previous_state_hash,
        updates=tuple(sorted(CommittedUpdate(h.dot, k, h.weight) for k, h in headers.items() if k in kept)),
        roster=tuple(sorted(roster.peers)),
        joiners=tuple(sorted(roster.joiners)),
        exchange=kind,
        chunk_hashes=chunks,
        split=is_split_roster(roster, electorate),
        ring=ring,
    )
    return value, why


def refuse_value(
    value: Value,
    roster: Roster,
    *,
    me: str,
    previous_state_hash: bytes,
    electorate: Collection[str],
    binds_me: VotedFor | None,
) -> str | None:
    """Why a member may not vote for `value` in the attempt of `roster`, or None when it may.

    `binds_me`: what this member voted for in an earlier attempt and told the convener in its join.
    """
    if value.previous_state_hash != previous_state_hash:
        return (
            f"proposal stands on state {value.previous_state_hash.hex()[:16]}, mine is {previous_state_hash.hex()[:16]}"
        )
    if roster.bound_value is not None:
        return None if value == roster.bound_value else "proposal differs from the roster's bound value"
    if binds_me is not None and me in roster.peers:
        return f"roster ignores my vote of attempt {binds_me.attempt}"
    headers = roster.headers
    for update in value.updates:
        header = headers.get(update.update_hash)
        if header is None or (header.dot, header.weight) != (update.dot, update.weight):
            return f"proposal names update {update.dot}, the roster does not"
    if value.roster != tuple(sorted(roster.peers)) or value.joiners != tuple(sorted(roster.joiners)):
        return "proposal names other members than its roster"
    if value.exchange is not roster.exchange and (value.exchange is not Exchange.NOTHING or value.updates):
        return f"proposal says {value.exchange.name}, its roster {roster.exchange.name}"
    if value.exchange is Exchange.RING_DENSE and (len(value.updates) != len(headers) or value.ring != roster.peers):
        return "a dense proposal must name every update of its roster, in its ring order"
    if value.split != is_split_roster(roster, electorate):
        return f"proposal says split={value.split}, its roster has {len(roster.entries)} of {len(electorate)}"
    return None


def may_accept_split(
    commit: Commit,
    *,
    me: str,
    electorate: Collection[str],
    gone: Collection[str],
    decided: Collection[str],
    votes: Iterable[Value],
) -> bool:
    """Whether a split commit can be taken as the round's decision although this member's view was not asked.

    It can when those that might still decide otherwise are no majority: who neither signed it, nor is known to have
    taken it (`decided`), nor is dead or silent (`gone`), and this member itself when it voted (`votes`) for another
    value.
    """
    open_ = {p for p in electorate if p not in commit.signers and p not in gone and p not in decided and p != me}
    if any(value != commit.value for value in votes):
        open_.add(me)
    return not is_majority(len(open_), len(electorate))


@dataclass(frozen=True)
class CheckedCommit:
    """A commit whose votes were counted against the electorate of its round.

    `split`: decided by half of the electorate or less. Only such commits can be one of two for the same round.
    """

    commit: Commit
    value: Value
    value_hash: bytes
    lineage: bytes
    electorate: frozenset[str]
    signers: frozenset[str]
    split: bool


def check_commit(commit: Commit, electorate: Collection[str], round_: int, base_lineage: bytes) -> CheckedCommit:
    """Count the votes of a commit whose signatures were checked. Raises PeerFault("bad_commit")."""
    value = commit.value
    if (value.round, value.base_lineage) != (round_, base_lineage):
        raise PeerFault("bad_commit", f"for round {value.round}, expected round {round_}, or of another lineage")
    if len(commit.signers) != len(commit.votes):
        raise PeerFault("bad_commit", "somebody voted twice")
    if strangers := commit.signers - set(electorate):
        raise PeerFault("bad_commit", f"{len(strangers)} voters are not in the electorate of {len(electorate)}")
    for vote in commit.votes:
        about = (vote.round, vote.base_lineage, vote.attempt, vote.value_hash)
        if about != (round_, base_lineage, commit.attempt, value.hash):
            raise PeerFault("bad_commit", f"the vote of {vote.peer} is for something else")
    if not set(value.roster) <= set(electorate):
        raise PeerFault("bad_commit", "its roster names peers outside the electorate")
    splits = sum(vote.split for vote in commit.votes)
    if splits not in (0, len(commit.votes)):
        raise PeerFault("bad_commit", f"{splits} of {len(commit.votes)} votes are of a split, expected all or none")
    if not splits and not is_majority(len(commit.votes), len(electorate)):
        raise PeerFault(
            "bad_commit", f"{len(commit.votes)} votes of an electorate of {len(electorate)} are no majority"
        )
    return CheckedCommit(commit, value, value.hash, value.lineage, frozenset(electorate), commit.signers, splits > 0)


def electorate_after(value: Value) -> frozenset[str]:
    """Who may vote in the round after `value`: its roster and the joiners that it names."""
    return frozenset(value.roster) | frozenset(value.joiners)
