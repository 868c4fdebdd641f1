"""Asking peers to judge: quorum, budget, replacement, liars; and what hostile askers and answerers get."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.judging import Group, Scores, connect
from shoal.node.rl.config import JudgeConfig
from shoal.node.swarm.peer_judges import JUDGE, PeerJudges, decode_groups, encode_groups
from shoal.protocol import limits
from shoal.protocol.clock import RealClock
from shoal.protocol.errors import PeerFault
from shoal.protocol.transport import Stream
from shoal.protocol.wire_pb2 import JudgeReply, JudgeRequest

from .memory import InlineClock, MemoryNet, run

GROUPS = [Group("2+2=", ("4", "5", "4")), Group("3+3=", ("7", "6"))]
TRUTH: Scores = [[1.0, 0.0, 1.0], [0.0, 1.0]]


def honest(groups: Sequence[Group]) -> Scores:
    return [[float(eval(g.prompt[:-1]) == int(c)) for c in g.completions] for g in groups]


def liar(groups: Sequence[Group]) -> Scores:
    return [[1.0 - s for s in row if s is not None] for row in honest(groups)]


def judges(net: MemoryNet, names: str, judge: Any = honest, **settings: Any) -> PeerJudges:
    """The judge part of "me", with peers called by one letter each; all of `names` are alive."""
    settings = {"count": 3, "quorum": 2, "budget_seconds": 20.0} | settings
    return PeerJudges(
        open_stream=net.opener("me"),
        alive=lambda: set(names),
        clock=InlineClock(),
        rng=random.Random(1),
        judge=judge,
        **settings,
    )


def net_of(**peers: Any) -> MemoryNet:
    """Peers by name: a judge, or a handler of streams."""
    net = MemoryNet({})
    for name, what in peers.items():
        net.handlers[name] = what if asyncio.iscoroutinefunction(what) else judges(net, "", what).serve
    return net


async def silent(peer: str, stream: Stream) -> None:
    await asyncio.sleep(10_000)


def test_the_peers_scores_come_back_in_order() -> None:
    async def test() -> None:
        net = net_of(a=honest, b=honest, c=honest, d=honest)
        verdict = await judges(net, "abcd").ask(GROUPS)
        assert verdict is not None and verdict.scores == TRUTH
        assert (verdict.answered, verdict.asked) == (3, 3)
        assert not net.server_errors

    run(test())


def test_one_of_four_lies_and_soon_nobody_listens() -> None:
    async def test() -> None:
        asker = judges(net_of(a=honest, b=liar, c=honest, d=honest), "abcd", count=4)
        for _ in range(20):
            verdict = await asker.ask(GROUPS)
            assert verdict is not None and verdict.scores == TRUTH
        weights = dict(zip("abcd", asker.trust.weights(list("abcd")).tolist(), strict=True))
        assert weights["b"] == 0.05 and min(weights[p] for p in "acd") > 0.8

    run(test())


def test_who_fails_is_replaced_and_left_out_for_a_while() -> None:
    def broken(groups: Sequence[Group]) -> Scores:
        raise RuntimeError("no model")

    async def test() -> None:
        net = net_of(a=broken, b=honest, c=honest, d=honest)  # and e cannot be reached
        asker = judges(net, "abcde")
        for _ in range(4):
            verdict = await asker.ask(GROUPS)
            assert verdict is not None and verdict.scores == TRUTH and verdict.answered == 3
        assert net.opened.count("a") <= 2 and net.opened.count("e") <= 2

    run(test())


def test_the_budget_ends_the_wait_and_the_quorum_decides() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        asker = judges(net_of(a=honest, b=honest, c=silent), "abc")
        started = loop.time()
        verdict = await asker.ask(GROUPS)
        assert verdict is not None and verdict.scores == TRUTH and verdict.answered == 2
        assert loop.time() - started <= 20.1
        started = loop.time()
        alone = judges(net_of(a=honest, b=silent, c=silent), "abc")
        assert await alone.ask(GROUPS) is None
        assert loop.time() - started <= 20.1
        assert await judges(net_of(), "").ask(GROUPS) is None  # nobody is there

    run(test())


def test_what_only_some_could_judge_is_not_judged_without_a_quorum() -> None:
    def half(groups: Sequence[Group]) -> Scores:
        return [honest(groups)[0], [None for _ in groups[1].completions]]

    async def test() -> None:
        verdict = await judges(net_of(a=honest, b=half, c=half), "abc").ask(GROUPS)
        assert verdict is not None and verdict.scores == [TRUTH[0], [None, None]]

    run(test())


@pytest.mark.parametrize(
    "reply",
    [
        JudgeReply(scores=[0.5] * 4).SerializeToString(),
        JudgeReply(scores=[0.5] * 6).SerializeToString(),
        JudgeReply(scores=[0.5, 0.5, 0.5, 0.5, 1.5]).SerializeToString(),
        JudgeReply(scores=[0.5, 0.5, 0.5, 0.5, -math.inf]).SerializeToString(),
        JudgeReply(refusal="x" * 100_000).SerializeToString(),
        JudgeReply(scores=[math.nan] * 5).SerializeToString(),
        b"\xff\xff\xff",
        b"",
    ],
)
def test_an_answer_that_is_none_does_not_count(reply: bytes) -> None:
    async def hostile(peer: str, stream: Stream) -> None:
        request = JudgeRequest.FromString(await stream.recv(5))
        got = 0
        while got < request.payload_size:
            got += len(await stream.recv(5))
        await stream.send(reply)

    async def test() -> None:
        troubles: list[str] = []
        asker = judges(
            net_of(a=honest, b=hostile, c=honest), "abc", trouble=lambda where, error: troubles.append(where)
        )
        verdict = await asker.ask(GROUPS)
        assert verdict is not None and verdict.scores == TRUTH and verdict.answered == 2
        is_fault = not (JudgeReply(refusal="x").SerializeToString()[:1] == reply[:1] or b"\xc0\x7f" in reply)
        assert troubles == (["b"] if is_fault else [])  # charged to the whole peer id

    run(test())


async def _serve_raw(request: bytes, frames: Sequence[bytes], judge: Any = honest) -> JudgeReply | BaseException:
    """What a peer that sends these frames gets back, or what the server makes of it."""
    net = net_of(a=judge)
    stream = await net.open("a", JUDGE, 5.0)
    await stream.send(request)
    for frame in frames:
        await stream.send(frame)
    try:
        return JudgeReply.FromString(await stream.recv(60.0))
    except Exception as closed:
        return net.server_errors[0] if net.server_errors else closed


def _ask(size: int, seconds: float = 10.0) -> bytes:
    return JudgeRequest(payload_size=size, seconds=seconds).SerializeToString()


@pytest.mark.parametrize(
    ("request_", "frames"),
    [
        (_ask(0), []),
        (_ask(limits.JUDGE_BYTES_MAX + 1), []),
        (_ask(2**63), []),
        (b"\xff", []),
        (_ask(3), [b"\xff\xff\xff"]),
        (_ask(3), [b"1234"]),
        (_ask(3), [b""]),
        (_ask(len(encode_groups([Group("p", ())]))), [encode_groups([Group("p", ())])]),
        (
            _ask(len(encode_groups([Group("p", ("",) * 5000)]))),
            [encode_groups([Group("p", ("",) * 5000)])],
        ),
    ],
)
def test_a_bad_request_is_charged(request_: bytes, frames: list[bytes]) -> None:
    found = run(_serve_raw(request_, frames))
    assert isinstance(found, PeerFault) and found.kind == "bad_message"


def test_a_judge_that_raises_refuses_and_lives() -> None:
    def broken(groups: Sequence[Group]) -> Scores:
        raise RuntimeError("secret path /home/me")

    payload = encode_groups(GROUPS)
    reply = run(_serve_raw(_ask(len(payload)), [payload], broken))
    assert isinstance(reply, JudgeReply) and reply.refusal == "this peer's judge failed"
    reply = run(_serve_raw(_ask(len(payload), seconds=math.nan), [payload]))
    assert isinstance(reply, JudgeReply) and reply.refusal == "too late"


def test_of_each_peer_one_request_at_a_time() -> None:
    async def test() -> None:
        net = net_of(a=honest)
        payload = encode_groups(GROUPS)
        first, second = await net.open("a", JUDGE, 5.0, me="x"), await net.open("a", JUDGE, 5.0, me="x")
        await first.send(_ask(len(payload)))
        await asyncio.sleep(0.1)
        await second.send(_ask(len(payload)))
        refused = JudgeReply.FromString(await second.recv(5.0))
        assert "busy" in refused.refusal
        await first.send(payload)
        assert len(JudgeReply.FromString(await first.recv(5.0)).scores) == 5
        third = await net.open("a", JUDGE, 5.0, me="x")  # its turn is over: again
        await third.send(_ask(len(payload)))
        await third.send(payload)
        assert not JudgeReply.FromString(await third.recv(5.0)).refusal

    run(test())


def test_a_batch_too_large_is_not_sent() -> None:
    async def test() -> None:
        net = net_of(a=honest, b=honest)
        asker = judges(net, "ab", count=2)
        assert await asker.ask([Group("p", ("x",) * (limits.JUDGE_COMPLETIONS_MAX + 1))]) is None
        assert await asker.ask([Group("x" * limits.JUDGE_BYTES_MAX, ("a", "b"))]) is None
        assert net.opened == []

    run(test())


texts = st.text(max_size=20)


@given(st.lists(st.builds(Group, texts, st.lists(texts, min_size=1, max_size=4).map(tuple)), min_size=1, max_size=4))
def test_groups_survive_the_wire(groups: list[Group]) -> None:
    assert decode_groups(encode_groups(groups)) == groups


@given(st.binary(max_size=200))
def test_any_bytes_are_groups_or_a_fault(payload: bytes) -> None:
    try:
        assert decode_groups(payload)
    except PeerFault as fault:
        assert fault.kind == "bad_message"


def test_peers_that_ask_each_other_at_once_do_not_wait_for_each_other() -> None:
    """Each asks in its learner's thread, the only worker of its clock, which is busy until the other has judged."""
    net, asks, clocks = MemoryNet({}), {}, {"a": RealClock(), "b": RealClock()}

    def connected(name: str, other: str) -> None:
        judging = SimpleNamespace(
            asks_peers=True, judge=lambda groups: TRUTH, use_peers=lambda ask: asks.__setitem__(name, ask)
        )
        config = JudgeConfig(ask="peers", peers=1, quorum=1, budget_seconds=30.0)
        node = SimpleNamespace(
            learner=SimpleNamespace(judging=judging),
            config=SimpleNamespace(run=SimpleNamespace(judge=config)),
            mesh=SimpleNamespace(
                open=net.opener(name), serve=lambda method, handler: net.handlers.__setitem__(name, handler)
            ),
            members=SimpleNamespace(alive=lambda: {other}),
            clock=clocks[name],
            rng=random.Random(0),
            trouble=lambda where, error: None,
            say=lambda *a, **k: None,
        )
        connect(node)

    async def test() -> None:
        connected("a", "b")
        connected("b", "a")
        both = [clocks[name].run(lambda name=name: asks[name](GROUPS)) for name in "ab"]
        verdicts = await asyncio.wait_for(asyncio.gather(*both), 20)
        assert all(verdict is not None and verdict.scores == TRUTH for verdict in verdicts)

    try:
        asyncio.run(test())
    finally:
        for clock in clocks.values():
            clock.close()
