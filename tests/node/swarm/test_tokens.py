"""One token, one identity, at whichever member it is used: over real sockets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from shoal.node.swarm import tokens as tokens_module
from shoal.node.swarm.tokens import TOKENS, Tokens
from shoal.protocol.admission import Admission
from shoal.protocol.handshake import Refused
from shoal.protocol.transport import Stream, StreamClosed
from shoal.protocol.version import sha256
from shoal.protocol.wire_pb2 import Refusal, TokenUse

from .test_mesh import Node, S, node, run, until

K = b"k" * 32


async def members(count: int, *pairs: tuple[int, int]) -> list[Node]:
    """Members with the run's key, connected as `pairs` say."""
    made = [await node(n + 1, admission=Admission("token", key=K)) for n in range(count)]
    for a, b in pairs:
        await made[a].mesh.connect(made[b].address, made[b].id)
        await until(lambda a=a, b=b: made[a].id in made[b].mesh.connected())
    return made


async def newcomer(seed: int, token: bytes) -> Node:
    return await node(seed, admission=Admission("token", token=token))


async def refused(who: Node, at: Node) -> None:
    with pytest.raises(Refused) as caught:
        await who.mesh.connect(at.address, at.id)
    assert caught.value.reason == Refusal.NOT_ADMITTED and "another identity" in caught.value.values


def owner(member: Node, token: bytes) -> str | None:
    return member.me.admission.owner(token[:8])


def test_a_token_used_at_one_member_admits_nobody_else_at_another() -> None:
    async def test() -> None:
        a, b = await members(2, (0, 1))
        token = a.me.admission.new_token(os.urandom)
        x, y = await newcomer(8, token), await newcomer(9, token)
        await x.mesh.connect(a.address, a.id)
        await until(lambda: owner(b, token) == x.id)  # it was told
        await refused(y, b)
        await refused(y, a)
        assert not y.me.admission.key and y.id not in b.mesh.connected()
        # the first one may come again, with its token, anywhere
        x.me.admission.key = b""
        await x.mesh.connect(b.address, b.id)
        assert x.me.admission.key == K

    run(test)


def test_who_was_told_still_knows_when_the_first_member_is_gone() -> None:
    """b never heard of it; it asks c, who did."""

    async def test() -> None:
        a, b, c = await members(3, (0, 2), (1, 2))
        token = a.me.admission.new_token(os.urandom)
        x, y = await newcomer(8, token), await newcomer(9, token)
        await x.mesh.connect(a.address, a.id)
        await until(lambda: owner(c, token) == x.id)
        await a.mesh.close()
        assert owner(b, token) is None
        await refused(y, b)
        assert owner(b, token) == x.id and not b.me.admission.bindings

    run(test)


def test_who_was_not_told_is_asked_by_the_next_member() -> None:
    async def test() -> None:
        (a,) = await members(1)
        token = a.me.admission.new_token(os.urandom)
        x, y = await newcomer(8, token), await newcomer(9, token)
        await x.mesh.connect(a.address, a.id)
        b = await node(2, admission=Admission("token", key=K))
        await b.mesh.connect(a.address, a.id)
        await refused(y, b)

    run(test)


def test_of_two_at_the_same_time_both_members_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        a, b, c = await members(3, (0, 1), (0, 2), (1, 2))
        token = a.me.admission.new_token(os.urandom)
        x, y = await newcomer(8, token), await newcomer(9, token)
        both = [one.mesh._accepting._tokens for one in (a, b)]
        ask_all, asked = Tokens._ask_all, 0

        async def together(self: Tokens, use: TokenUse) -> list[str]:
            """Ask only when both handshakes have come so far, and end only when both have asked."""
            nonlocal asked
            if use.used:
                return await ask_all(self, use)
            await until(lambda: all(t._pending for t in both))
            answers = await ask_all(self, use)
            asked += 1
            await until(lambda: asked == 2)
            return answers

        monkeypatch.setattr(Tokens, "_ask_all", together)
        results = await asyncio.gather(
            x.mesh.connect(a.address, a.id), y.mesh.connect(b.address, b.id), return_exceptions=True
        )
        first, second = sorted((x, y), key=lambda n: sha256(token[:8], n.id.encode()))
        outcome = {x.id: results[0], y.id: results[1]}
        assert isinstance(outcome[second.id], Refused) and not isinstance(outcome[first.id], BaseException)
        await until(lambda: all(owner(m, token) == first.id for m in (a, b, c)))
        assert not any(t._pending for t in both)

    run(test)


def test_a_silent_or_lying_member_keeps_nobody_out_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(peer: str, stream: Stream) -> None:
        await stream.recv(S)
        await stream.recv(S)

    async def confused(peer: str, stream: Stream) -> None:
        await stream.recv(S)
        await stream.send(TokenUse(token_id=b"another!", peer="somebody").SerializeToString())

    async def junk(peer: str, stream: Stream) -> None:
        await stream.recv(S)
        await stream.send(b"\xff junk")

    async def closing(peer: str, stream: Stream) -> None:
        stream.cancel("no")

    async def test(handler: Callable[[str, Stream], Awaitable[None]], faults: int) -> None:
        a, b = await members(2, (0, 1))
        b.mesh.serve(TOKENS, handler)
        x = await newcomer(8, a.me.admission.new_token(os.urandom))
        await x.mesh.connect(a.address, a.id)
        await until(lambda: a.mesh.traffic.faults["bad_message"] == faults)

    monkeypatch.setattr(tokens_module, "ASK_SECONDS", 0.3)
    # two faults: when it was asked, and when it was told
    for handler, faults in ((silent, 0), (confused, 2), (junk, 2), (closing, 0)):
        run(lambda handler=handler, faults=faults: test(handler, faults))


def test_requests_that_make_no_sense_are_charged() -> None:
    async def test() -> None:
        a, b = await members(2, (0, 1))
        for bad in (
            TokenUse(token_id=b"short", peer="x"),
            TokenUse(token_id=b"12345678"),
            TokenUse(token_id=b"12345678", peer="x" * 1000),
        ):
            stream = await a.mesh.open(b.id, TOKENS, S)
            await stream.send(bad.SerializeToString())
            with pytest.raises(StreamClosed, match="bad_message"):
                await stream.recv(S)
        assert b.mesh.traffic.charged[a.id] == 3 and not b.me.admission.heard

    run(test)


def test_outside_token_mode_nothing_is_kept() -> None:
    async def test() -> None:
        a, b = await node(1), await node(2)
        await a.mesh.connect(b.address, b.id)
        stream = await a.mesh.open(b.id, TOKENS, S)
        await stream.send(TokenUse(token_id=b"12345678", peer="x", used=True).SerializeToString())
        assert TokenUse.FromString(await stream.recv(S)).peer == "" and not b.me.admission.heard

    run(test)


def test_a_handshake_that_breaks_while_others_are_asked_leaves_no_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        (a,) = await members(1)
        token = a.me.admission.new_token(os.urandom)
        x, y = await newcomer(8, token), await newcomer(9, token)

        async def broken(self: Tokens, use: TokenUse) -> list[str]:
            raise StreamClosed("the newcomer is gone")

        with monkeypatch.context() as patch:
            patch.setattr(Tokens, "_ask_all", broken)
            with pytest.raises(Exception, match="ended"):
                await x.mesh.connect(a.address, a.id)
        assert owner(a, token) is None and not a.mesh._accepting._tokens._pending
        await y.mesh.connect(a.address, a.id)
        await refused(x, a)

    run(test)
