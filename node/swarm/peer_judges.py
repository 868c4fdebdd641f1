"""Peers judge each other's answers: asks some of them for scores of a batch, and answers when others ask.

Asked are `count` live peers drawn at random, each with the judge that it has; who fails is replaced while there is time,
and who failed often is left out for a while. What comes back within the budget is combined (judgement.py); without a
quorum there is no verdict and the asker falls back. One request is judged at a time, few wait, and of each peer one: a
peer cannot take more of another's time than that. What peers send is bounded before it is kept and checked before it is used.

Covers streams "Judge". Does not cover: judging (node/rl/judges/).
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from ...protocol import limits
from ...protocol.errors import PeerFault
from ...protocol.transport import Clock, DialError, Stream, StreamClosed
from ...protocol.wire_pb2 import JudgeGroup, JudgeGroups, JudgeReply, JudgeRequest
from ..judging import Group, Scores, Verdict
from .frames import parse, receive_payload, send_payload
from .judgement import Trust, combine

JUDGE = "Judge"
OPEN_SECONDS = 5.0
FRAME_SECONDS = 10.0
# After the n-th failure in a row a peer is not asked for 2^n batches, up to this many.
LEFT_OUT_BATCHES_MAX = 64


class PeerJudges:
    """One node's part in it, asking and answering.

    Attributes:
        trust: past agreement of the judges asked.
    """

    def __init__(
        self,
        *,
        open_stream: Callable[[str, str, float], Awaitable[Stream]],
        alive: Callable[[], set[str]],
        clock: Clock,
        rng: random.Random,
        judge: Callable[[Sequence[Group]], Scores],
        count: int,
        quorum: int,
        budget_seconds: float,
        run: Callable[[Callable[[], Scores]], Awaitable[Scores]] | None = None,
        trouble: Callable[[str, BaseException], None] = lambda where, error: None,
        say: Callable[..., None] = lambda *a, **k: None,
    ) -> None:
        """
        Args:
            judge: this node's own judge; blocking.
            count, quorum: peers asked, and answers needed for a verdict.
            run: runs `judge` for others, not in the thread that asks: peers that wait for each other there would wait out
                the budget. Default `clock.run`.
            trouble: told of every transfer that failed.
        """
        self._open, self._alive, self._clock, self._rng = open_stream, alive, clock, rng
        self._judge, self._count, self._quorum, self._budget_s = judge, count, quorum, budget_seconds
        self._run = run or clock.run
        self._trouble, self._say = trouble, say
        self.trust = Trust()
        self._failures: dict[str, int] = {}  # in a row, by peer
        self._left_out: dict[str, int] = {}  # batches still to go, by peer
        self._waiting: set[str] = set()  # peers whose request is here
        self._busy = asyncio.Lock()

    # ------------------------------------------------------------------------------------------------ asking

    async def ask(self, groups: Sequence[Group]) -> Verdict | None:
        """What the peers say of these; None without a quorum, or when the batch is too large to be sent."""
        payload = encode_groups(groups)
        completions = sum(len(g.completions) for g in groups)
        if len(payload) > limits.JUDGE_BYTES_MAX or completions > limits.JUDGE_COMPLETIONS_MAX:
            self._say("batch too large for peers to judge", level="warning", bytes=len(payload), n=completions)
            return None
        answers, asked = await self._collect(payload, completions)
        if len(answers) < self._quorum:
            return None
        judges, sizes = sorted(answers), [len(g.completions) for g in groups]
        scores = np.array([answers[judge] for judge in judges], dtype=np.float64)
        weights = self.trust.weights(judges)
        combined = combine(scores, weights, sizes)
        combined[(~np.isnan(scores)).sum(axis=0) < self._quorum] = np.nan
        self.trust.learn(judges, scores, sizes)
        return Verdict(
            scores=_nested(combined.tolist(), sizes),
            answered=len(judges),
            asked=asked,
            agreement=float(weights.mean()),
        )

    async def _collect(self, payload: bytes, n: int) -> tuple[dict[str, list[float]], int]:
        """Scores by peer, NaN where absent, of those that answered within the budget; and how many were asked."""
        candidates = self._candidates()
        deadline = self._clock.now() + self._budget_s
        answers: dict[str, list[float]] = {}
        running: dict[asyncio.Task[list[float] | None], str] = {}
        asked = 0
        try:
            while True:
                while candidates and len(answers) + len(running) < self._count:
                    peer = candidates.pop()
                    running[asyncio.ensure_future(self._ask(peer, payload, n, deadline))] = peer
                    asked += 1
                left = deadline - self._clock.now()
                if not running or left <= 0:
                    return answers, asked
                done, _ = await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for task in [t for t in running if t in done]:  # `done` has no order
                    peer, found = running.pop(task), task.result()
                    self._remember(peer, found is not None)
                    if found is not None:
                        answers[peer] = found
        finally:
            for task, peer in running.items():
                task.cancel()
                self._remember(peer, False)
            await asyncio.gather(*running, return_exceptions=True)

    def _candidates(self) -> list[str]:
        """Live peers in random order; those left out for now only where there are not enough others."""
        alive = sorted(self._alive())
        self._failures = {p: n for p, n in self._failures.items() if p in alive}
        self._left_out = {p: n - 1 for p, n in self._left_out.items() if n > 1 and p in alive}
        self._rng.shuffle(alive)
        return sorted(alive, key=lambda peer: self._left_out.get(peer, 0), reverse=True)  # taken from the end

    def _remember(self, peer: str, answered: bool) -> None:
        if answered:
            self._failures.pop(peer, None)
            return
        self._failures[peer] = self._failures.get(peer, 0) + 1
        self._left_out[peer] = min(2 ** min(self._failures[peer], 16), LEFT_OUT_BATCHES_MAX)

    async def _ask(self, peer: str, payload: bytes, n: int, deadline: float) -> list[float] | None:
        """One peer's scores; None when it refused or failed."""
        try:
            stream = await self._open(peer, JUDGE, min(OPEN_SECONDS, max(0.1, deadline - self._clock.now())))
            try:
                left = max(0.1, deadline - self._clock.now())
                await stream.send(JudgeRequest(payload_size=len(payload), seconds=left).SerializeToString())
                await send_payload(stream, payload)
                reply = JudgeReply()
                parse(reply, await stream.recv(left))
                return self._checked(peer, reply, n)
            finally:
                stream.cancel("answered")
        except (PeerFault, StreamClosed, DialError, asyncio.TimeoutError) as error:
            self._trouble(peer if isinstance(error, PeerFault) else f"judge {peer[-6:]}", error)
            return None

    def _checked(self, peer: str, reply: JudgeReply, n: int) -> list[float] | None:
        if reply.refusal:
            self._say("not judged", level="debug", peer=peer, reason=reply.refusal[: limits.REASON_CHARS_MAX])
            return None
        scores = list(reply.scores)
        if len(scores) != n or not all(math.isnan(s) or 0.0 <= s <= 1.0 for s in scores):
            raise PeerFault("bad_judgement", f"{len(scores)} scores for {n} completions, or some outside [0, 1]")
        return scores if not all(math.isnan(s) for s in scores) else None

    # ------------------------------------------------------------------------------------------------ answering

    async def serve(self, peer: str, stream: Stream) -> None:
        """Handler of "Judge" streams."""
        request = JudgeRequest()
        parse(request, await stream.recv(FRAME_SECONDS))
        if not 0 < request.payload_size <= limits.JUDGE_BYTES_MAX:
            raise PeerFault("bad_message", f"{request.payload_size} bytes to judge, limit {limits.JUDGE_BYTES_MAX}")
        if peer in self._waiting or len(self._waiting) >= limits.JUDGE_REQUESTS_MAX:
            return await _reply(stream, JudgeReply(refusal="busy with other requests"))
        self._waiting.add(peer)
        try:
            seconds = min(request.seconds, limits.JUDGE_SECONDS_MAX) if request.seconds > 0 else 0.0
            deadline = self._clock.now() + seconds
            payload = await receive_payload(stream, request.payload_size, FRAME_SECONDS, fault="bad_message")
            groups = decode_groups(payload)
            async with self._busy:
                if self._clock.now() >= deadline:
                    reply = JudgeReply(refusal="too late")
                else:
                    reply = await self._judged(groups)
        finally:
            self._waiting.discard(peer)
        await _reply(stream, reply)

    async def _judged(self, groups: list[Group]) -> JudgeReply:
        try:
            scores = await self._run(lambda: self._judge(groups))
        except Exception as error:  # a model, a server or a user's function: anything may come out of it
            self._say("cannot judge for a peer", level="warning", cause=f"{type(error).__name__}: {error}")
            return JudgeReply(refusal="this peer's judge failed")
        return JudgeReply(scores=[math.nan if s is None else s for row in scores for s in row])


def encode_groups(groups: Sequence[Group]) -> bytes:
    """As bytes of a JudgeGroups message. What is not Unicode (half a surrogate pair) becomes a question mark."""
    wire = [JudgeGroup(prompt=_unicode(g.prompt), completions=[_unicode(c) for c in g.completions]) for g in groups]
    return JudgeGroups(groups=wire).SerializeToString()


def decode_groups(payload: bytes) -> list[Group]:
    """Raises PeerFault("bad_message")."""
    wire = JudgeGroups()
    parse(wire, payload)
    sizes = [len(g.completions) for g in wire.groups]
    if not sizes or min(sizes) == 0 or sum(sizes) > limits.JUDGE_COMPLETIONS_MAX:
        raise PeerFault("bad_message", f"{sum(sizes)} completions in {len(sizes)} groups to judge")
    return [Group(g.prompt, tuple(g.completions)) for g in wire.groups]


def _unicode(text: str) -> str:
    return text.encode(errors="replace").decode()


def _nested(flat: list[float], sizes: Sequence[int]) -> Scores:
    values = iter(flat)
    return [[None if math.isnan(x) else x for x in (next(values) for _ in range(size))] for size in sizes]


async def _reply(stream: Stream, reply: JudgeReply) -> None:
    await stream.send(reply.SerializeToString())
    await stream.done_sending()
