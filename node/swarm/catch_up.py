"""Noticing that others are ahead or on another branch, and getting there.

Theory of operation. Membership carries everybody's (round, lineage). Whoever shows a lineage that is not ours nor an
ancestor of ours is asked for its commit records after a lineage of our own chain: first our tip, then further and further
back, until the two chains meet. Every record is checked against the electorate of its base before it is kept. Then

  * theirs continues ours: the rounds are applied one by one from the committed updates (`next_commit`), or the state is
    downloaded when the gap is large or the updates are gone;
  * theirs forks from ours: the rule of `CommitLog.resolve_conflict` decides, the same on both sides; the losers download
    the winner's state, and their own lost work flows back damped;
  * the fork is older than all records: nothing is adopted. Whoever shows such a lineage, or one that nobody has records of,
    is reported once and not waited for; one peer can show anything. When it is more than half of our electorate, the node
    stops and says what a person has to decide;
  * we were away for more rounds than records are kept: no record can tell then whether theirs continues ours. Their version
    vector can: a branch that we have and they have not left dots in ours. When it has all that ours has, their state is
    taken as a newcomer takes it; when not, the node stops as above. Half as many as our electorate must show it: members of
    it, or whoever is here when hardly any of them is left.

Does not cover: the download itself (state_sync.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from ...protocol import limits
from ...protocol.ballot_messages import Commit, Message
from ...protocol.ballot_wire import encode_commit
from ...protocol.commit import CheckedCommit, CommitRecord, Winner, check_commit, electorate_after
from ...protocol.errors import ExitCode, PeerFault, ShoalError
from ...protocol.transport import Clock
from ...protocol.version import Order
from ...protocol.wire_pb2 import CommitRequest, Envelope, Summary
from .state import SharedState, weights_of

if TYPE_CHECKING:
    from .rounds import Rounds

WATCH_SECONDS = 0.25
# One request to one peer, and the time its answer may take before the next is asked.
ASK_SECONDS = 1.0
# Pause between two searches for records older than our own.
DEEPEN_SECONDS = 10.0
# A newcomer to a round that others have decided does not train on an old state; but nor does it wait for ever for news.
SETTLE_SECONDS = 5.0
# Who returns after all of its electorate has been replaced first finds out that no record leads there, then downloads.
RETURN_SECONDS = 120.0
# More rounds behind than this: downloading the state is cheaper than fetching every round's updates.
REPLAY_ROUNDS_MAX = 16
# Steps back along our own chain in search of the common record.
BACKWARD = (0, 1, 2, 4, 8, 16, 31, 62, 124, 248, 496, 992)
# So many questions in a row without one new record, and a peer counts as having no commit in common with us. Twice the way
# back: a request or an answer may be lost.
VAIN_MAX = 2 * len(BACKWARD)

Download = Callable[[bytes | None, list[str], str], Awaitable[SharedState | None]]


class CatchUp:
    """Keeps one peer on the swarm's chain."""

    def __init__(
        self,
        *,
        clock: Clock,
        post: Callable[[str, Envelope], None],
        summaries: Callable[[], dict[str, Summary]],
        download: Download,
        records: Callable[[list[str], SharedState], Awaitable[list[Commit]]],
        keep_records: Callable[[list[Commit]], Awaitable[None]],
        say: Callable[..., None],
        conflicts_seen: Callable[[str], None],
    ) -> None:
        """
        Args:
            summaries: latest summary of every live peer, itself not among them.
            download: gets a state, of a named lineage or the newest, from the named peers.
            records: gets the commits behind a state from one of the named peers, decoded and in order, oldest first.
            keep_records: makes the commits behind our state durable, in place of those on disk.
            conflicts_seen: counts and logs a conflict that a rule resolved.
        """
        self._clock = clock
        self._post = post
        self._summaries = summaries
        self._download, self._records, self._keep_records = download, records, keep_records
        self._deepen_at = self._afar_at = 0.0
        self._say = say
        self._conflict = conflicts_seen
        self._rounds: Rounds | None = None
        self._asked: dict[str, tuple[float, int]] = {}  # peer → (when, which step back)
        self._heard: dict[str, bytes] = {}  # peer → newest record on its chain that it gave us
        self._vain: dict[str, int] = {}  # peer → questions since it last gave us a record that we lacked
        self._apart: set[str] = set()  # peers whose lineage has no commit in common with ours on record
        self._lost: set[bytes] = set()  # lineages that lost against ours

    # ------------------------------------------------------------------------------------------------ readers

    def behind(self) -> dict[str, Summary]:
        """Peers whose state is not an ancestor of ours: ahead of us, or on another branch that has not lost. A branch may
        win though it has fewer rounds."""
        rounds = self._rounds
        if rounds is None:
            return {}
        state = rounds.state
        return {
            peer: s
            for peer, s in self._summaries().items()
            if s.lineage not in self._lost
            and len(s.lineage) == 32
            and s.lineage != state.lineage
            and (s.round >= state.round or not rounds.log.is_ancestor(s.lineage, state.lineage))
        }

    async def settled(self) -> None:
        """Wait until nobody is ahead, at most SETTLE_SECONDS. Who shows what leads nowhere is not waited for; only a swarm
        that has gone on without our electorate is, for RETURN_SECONDS."""
        started = self._clock.now()
        while self.behind().keys() - self._apart and self._clock.now() < started + SETTLE_SECONDS:
            await self._clock.sleep(WATCH_SECONDS)
        while self._swarm_has_gone_on() and self._clock.now() < started + RETURN_SECONDS:
            await self._clock.sleep(WATCH_SECONDS)

    def next_commit(self, lineage: bytes) -> CheckedCommit | None:
        """The checked commit that follows `lineage` on a chain that somebody alive has, or None."""
        return next(iter(self.later(lineage, 1)), None)

    def later(self, lineage: bytes, limit: int = limits.COMMITS_PER_REPLY_MAX) -> list[CheckedCommit]:
        """The first commits known that follow `lineage` on a chain that somebody alive has, oldest first."""
        rounds = self._rounds
        if rounds is None:
            return []
        tips = sorted({s.lineage for s in self.behind().values()})
        chains = (rounds.log.after(lineage, tip, limit) for tip in tips)
        return [record.checked for record in next((chain for chain in chains if chain), [])]

    # ------------------------------------------------------------------------------------------------ messages

    def hint(self, peer: str, message: Message) -> None:
        """A message of a round that is not open here: a commit record is kept, anything else means news of its sender."""
        if isinstance(message, Commit):
            self._offer(peer, message)
        elif peer in self._asked:
            when, step = self._asked[peer]
            self._asked[peer] = (min(when, self._clock.now() - ASK_SECONDS), step)

    def answer(self, rounds: Rounds, peer: str, request: CommitRequest) -> None:
        """Serve "send me the records after this lineage"."""
        if len(request.lineage) != 32:
            raise PeerFault("bad_message", f"lineage of {len(request.lineage)} bytes")
        for record in rounds.log.after(request.lineage, rounds.state.lineage, limits.COMMITS_PER_REPLY_MAX):
            self._post(peer, Envelope(commit=encode_commit(record.checked.commit)))

    def _offer(self, peer: str, commit: Commit) -> None:
        rounds = self._rounds
        if rounds is None:
            return
        if (known := rounds.log.get(commit.value.lineage)) is not None:
            self._note_heard(rounds, peer, known.lineage)
            return
        if not rounds.log.knows(commit.base_lineage):
            return  # we ask further back
        self._keep(rounds, commit)
        self._note_heard(rounds, peer, commit.value.lineage)

    @staticmethod
    def _keep(rounds: Rounds, commit: Commit) -> None:
        """Check a commit that stands on a known one, and keep it. Raises PeerFault."""
        base = commit.base_lineage
        record = rounds.log.get(base)
        electorate = electorate_after(record.checked.value) if record else rounds.log.root_electorate
        checked = check_commit(commit, electorate, commit.round, base)
        weight = sum(weights_of(checked.value, rounds.settings.rules).values())
        rounds.log.add(checked, weight, tip=rounds.state.lineage)

    def _note_heard(self, rounds: Rounds, peer: str, lineage: bytes) -> None:
        """The next question to this peer starts where its last answer ended."""
        before = rounds.log.get(self._heard.get(peer, b""))
        now = rounds.log.get(lineage)
        if now is not None and (before is None or now.round > before.round):
            self._heard[peer] = lineage
            self._asked.pop(peer, None)
            self._vain.pop(peer, None)

    # ------------------------------------------------------------------------------------------------ the watch

    async def watch(self, rounds: Rounds) -> None:
        """Runs beside the rounds. Raises ShoalError(DIVERGED) for a fork that no rule decides."""
        self.attach(rounds)
        while True:
            await self._clock.sleep(WATCH_SECONDS)
            self._lost &= {s.lineage for s in self._summaries().values()}  # what nobody shows any more is forgotten
            behind = self.behind()
            self._apart &= behind.keys()
            for known in (self._vain, self._asked, self._heard):
                for gone in known.keys() - behind.keys():
                    del known[gone]
            for peer, summary in sorted(behind.items()):
                if rounds.log.knows(summary.lineage):
                    await self._compare(rounds, peer, summary)
                else:
                    self._ask(rounds, peer, summary)
            if any(count > VAIN_MAX for count in self._vain.values()):
                await self._deepen(rounds, sorted(behind))
                await self._return_from_afar(rounds)

    async def _deepen(self, rounds: Rounds, peers: list[str]) -> None:
        """No common commit with somebody: our own log may begin later than the fork. Whoever was on our branch knows more."""
        if self._clock.now() < self._deepen_at:
            return
        self._deepen_at = self._clock.now() + DEEPEN_SECONDS
        state = rounds.state
        known = {record.lineage for record in rounds.log.chain(state.lineage)}
        chain = await self._records(peers, state)
        ours = [commit for commit in chain if commit.value.lineage == state.lineage]
        if rounds.state is state and ours and len(chain) > len(known):
            try:
                rounds.start_log(chain, state)
            except PeerFault as fault:
                return self._say("older records refused", level="warning", cause=str(fault))
            await self._keep_records(chain)

    def attach(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def _ask(self, rounds: Rounds, peer: str, summary: Summary) -> None:
        now = self._clock.now()
        when, step = self._asked.get(peer, (-ASK_SECONDS, 0))
        if now - when < ASK_SECONDS:
            return
        vain = self._vain[peer] = self._vain.get(peer, 0) + 1
        if vain > VAIN_MAX:
            self._no_common_commit(rounds, peer, summary)
        heard = self._heard.get(peer)
        if heard is not None and step == 0 and rounds.log.knows(heard):
            self._post(peer, Envelope(commit_request=CommitRequest(lineage=heard)))
            self._asked[peer] = (now, 1)
            return
        chain: list[CommitRecord] = list(rounds.log.chain(rounds.state.lineage))
        back = BACKWARD[step % len(BACKWARD)]
        if back > len(chain) and step > 0 and BACKWARD[(step - 1) % len(BACKWARD)] < len(chain):
            back = len(chain)  # the root itself, before beginning anew
        elif back > len(chain):
            step, back = 0, 0
        lineage = rounds.state.lineage if back == 0 else chain[back - 1].base_lineage
        request = CommitRequest(after_round=max(0, rounds.state.round - back), lineage=lineage)
        self._post(peer, Envelope(commit_request=request))
        self._asked[peer] = (now, step + 1)

    def _no_common_commit(self, rounds: Rounds, peer: str, summary: Summary) -> None:
        """Note who shows a lineage that cannot be compared. Raises ShoalError(DIVERGED) when most of us do."""
        mine = f"mine round {rounds.state.round} {rounds.state.lineage.hex()[:16]}"
        theirs = f"{peer[-6:]} round {summary.round} {summary.lineage.hex()[:16]}"
        if peer not in self._apart:
            self._apart.add(peer)
            self._conflict(f"CONCURRENT versions: {mine}, {theirs}: no common commit is on record, nothing is adopted")
        members = set(rounds.state.electorate)
        apart = members & self._apart
        # A log that still reaches back to where it began says only that they have not answered (yet).
        full = sum(1 for _ in rounds.log.chain(rounds.state.lineage)) >= rounds.log.kept - 1
        if full and 2 * len(apart) > len(members) and not self._afar(rounds):
            raise _diverged(rounds, f"{mine}, {theirs}; so do {len(apart)} of {len(members)} members")

    def _afar(self, rounds: Rounds) -> list[str]:
        """Peers without a common commit that are further ahead than records are kept, when they are as many as half of the
        electorate: with ourselves in it, most of the others. Else nobody."""
        ahead = self._far_ahead(rounds)
        return sorted(ahead & self._apart) if 2 * len(ahead & self._apart) >= len(rounds.state.electorate) else []

    def _far_ahead(self, rounds: Rounds) -> set[str]:
        """Who of those that count is further ahead than records are kept. Members of our electorate count; after so long few of
        them may be left, and when no majority of them is here, everybody does who is here, if most of them agree."""
        members, seen = set(rounds.state.electorate), self._summaries()
        ahead = {p for p, s in seen.items() if s.round - rounds.state.round > rounds.log.kept}
        here = len(members & seen.keys()) + 1
        return ahead if 2 * here <= len(members) and 2 * len(ahead) > len(seen) else ahead & members

    def _swarm_has_gone_on(self) -> bool:
        """Our electorate is gone and its successors are far ahead: what is learned now would only be in the way of return."""
        rounds = self._rounds
        if rounds is None:
            return False
        ahead, members = self._far_ahead(rounds), set(rounds.state.electorate)
        return not ahead <= members and 2 * len(ahead) >= len(members)

    async def _return_from_afar(self, rounds: Rounds) -> None:
        """Take the swarm's state if it has all that ours has. Raises ShoalError(DIVERGED) if it has not."""
        holders, before = self._afar(rounds), rounds.state
        if not holders or self._clock.now() < self._afar_at:
            return
        self._afar_at = self._clock.now() + DEEPEN_SECONDS
        reason = f"away for more than the {rounds.log.kept} rounds that records are kept"
        state = await self._download(None, holders, reason)
        if state is None or state.round <= before.round:
            return
        chain = await self._records(holders, state)
        if rounds.state is not before:
            return
        if before.vector.compare(state.vector) not in (Order.BEFORE, Order.EQUAL):
            raise _diverged(
                rounds, f"mine round {before.round} holds updates that theirs of round {state.round} does not"
            )
        await self._take(rounds, state, chain, None, reason)

    async def _compare(self, rounds: Rounds, peer: str, summary: Summary) -> None:
        """Their tip is on record: go there, or resolve the fork."""
        mine, theirs = rounds.state.lineage, summary.lineage
        if rounds.log.is_ancestor(mine, theirs):
            if summary.round - rounds.state.round > REPLAY_ROUNDS_MAX:
                await self.download(rounds, f"{summary.round - rounds.state.round} rounds behind {peer[-6:]}", theirs)
            else:
                rounds.poke(peer, theirs)
            return
        if rounds.log.is_ancestor(theirs, mine):
            return
        resolution = rounds.log.resolve_conflict(mine, theirs)
        if resolution.winner is Winner.UNDECIDABLE:
            return self._no_common_commit(rounds, peer, summary)
        self._conflict(
            f"CONCURRENT versions: mine round {rounds.state.round} {mine.hex()[:16]}, "
            f"{peer[-6:]} round {summary.round} {theirs.hex()[:16]}: {resolution.winner.value} stands, {resolution.reason}"
        )
        if resolution.winner is Winner.MINE:
            self._lost.add(theirs)
        elif resolution.winner is Winner.THEIRS and resolution.fork is not None:
            await self.download(rounds, resolution.reason, theirs, fork=resolution.fork)

    # ------------------------------------------------------------------------------------------------ download

    def _learn(self, rounds: Rounds, state: SharedState, chain: list[Commit]) -> None:
        """The commits behind a downloaded state: they say which of our own updates it holds."""
        self._connect(rounds, chain)
        if not rounds.log.knows(state.lineage) and chain:
            rounds.start_log(chain, state)

    def _connect(self, rounds: Rounds, chain: list[Commit]) -> None:
        """Keep what of a chain stands on known commits."""
        for commit in chain:
            if rounds.log.knows(commit.base_lineage) and not rounds.log.knows(commit.value.lineage):
                self._keep(rounds, commit)

    async def download(
        self, rounds: Rounds, reason: str, lineage: bytes | None = None, *, fork: bytes | None = None
    ) -> None:
        """Replace the state by a downloaded one; what that state holds of our own updates is given its due."""
        # The holders' rounds go on meanwhile, so what they give may already lie beyond `lineage`; that is as good.
        holders = sorted(p for p, s in self.behind().items() if lineage is None or s.lineage == lineage)
        if not holders:
            return
        state = await self._download(None, holders, reason)
        if state is None:
            return
        chain = [] if rounds.log.knows(state.lineage) else await self._records(holders, state)
        # From here on nothing is awaited: the state that this one is compared with must still be ours when it is replaced.
        self._connect(rounds, chain)
        mine = rounds.state.lineage
        if rounds.log.knows(state.lineage) and not rounds.log.is_ancestor(mine, state.lineage):
            # Where nothing but being behind was the reason, or the holders have changed sides, this may be another branch.
            resolution = rounds.log.resolve_conflict(mine, state.lineage)
            if resolution.winner in (Winner.MINE, Winner.UNDECIDABLE):
                return
            if resolution.winner is Winner.THEIRS and fork is None:
                self._conflict(
                    f"CONCURRENT versions: a downloaded state of round {state.round} stands, {resolution.reason}"
                )
            fork = resolution.fork if resolution.winner is Winner.THEIRS else None
        if state.round < rounds.state.round and fork is None:
            self._say("a downloaded state was older than ours and is not used", level="warning", round=state.round)
            return
        await self._take(rounds, state, chain, fork, reason)

    async def _take(
        self, rounds: Rounds, state: SharedState, chain: list[Commit], fork: bytes | None, reason: str
    ) -> None:
        self._learn(rounds, state, chain)
        rounds.replace(state, fork, reason)
        # On disk the records must end in the state, or a restart would know only those after the next one.
        behind = [record.checked.commit for record in rounds.log.chain(state.lineage)][::-1]
        await self._keep_records(behind)


def _diverged(rounds: Rounds, sides: str) -> ShoalError:
    return ShoalError(
        "This peer and the swarm are on different branches and no common commit is on record",
        values=f"{sides}; records are kept for {rounds.log.kept} rounds",
        todo="Decide which branch stands: keep this one with `shoal up` away from the others, or join theirs "
        "with a new data directory.",
        code=ExitCode.DIVERGED,
    )
