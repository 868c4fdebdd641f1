"""The records behind a state: what is handed on, and what a peer that gives too many, too large or too slowly costs."""

from __future__ import annotations

import asyncio

import pytest

from shoal.node.swarm import records
from shoal.node.swarm.records import fetch_records, serve_records
from shoal.protocol import limits
from shoal.protocol.ballot_messages import Commit, Exchange, Value, Vote, decode_value
from shoal.protocol.commit import CommitLog, check_commit
from shoal.protocol.errors import PeerFault
from shoal.protocol.transport import Stream
from shoal.protocol.version import sha256
from shoal.protocol.wire_pb2 import Commit as WireCommit

from .memory import MemoryNet, run

ROOT = sha256(b"root")
E = ("a", "b", "c")


def log_of(rounds: int) -> CommitLog:
    log, base = CommitLog(ROOT, 0, electorate=E), ROOT
    for round_ in range(1, rounds + 1):
        value = Value(round_, base, sha256(b"state"), (), E, (), Exchange.NOTHING)
        votes = tuple(Vote(v, round_, base, 0, value.hash, False, b"") for v in "ab")
        base = value.lineage
        log.add(check_commit(Commit(0, value, votes), E, round_, value.base_lineage), 1, tip=base)
    return log


def newest(log: CommitLog) -> bytes:
    return max((r for r in log._records.values()), key=lambda r: r.round).lineage


def fetched(*servers) -> tuple[list[bytes], list[BaseException]]:
    """What comes of asking these peers in turn, and their troubles."""
    troubles: list[BaseException] = []

    async def main() -> list[bytes]:
        net = MemoryNet({f"p{i}": server for i, server in enumerate(servers)})
        peers = [f"p{i}" for i in range(len(servers))]
        return await fetch_records(net.opener("me"), peers, ROOT, lambda peer, error: troubles.append(error))

    return run(main()), troubles


def serving(log: CommitLog):
    async def serve(peer: str, stream: Stream) -> None:
        await serve_records(stream, log, newest(log))

    return serve


def flood(count: int, size: int, pause: float = 0.0):
    async def serve(peer: str, stream: Stream) -> None:
        await stream.recv(1.0)
        for _ in range(count):
            await asyncio.sleep(pause)
            await stream.send(bytes(size))
        await stream.done_sending()

    return serve


def rounds_of(found: list[bytes]) -> list[int]:
    return [decode_value(WireCommit.FromString(frame).value).round for frame in found]


def test_all_records_come_oldest_first():
    found, troubles = fetched(serving(log_of(5)))
    assert rounds_of(found) == [1, 2, 3, 4, 5]
    assert not troubles


def test_as_many_as_are_kept_are_taken_and_not_one_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "COMMIT_RECORDS_KEPT", 7)
    found, troubles = fetched(flood(7, 1))
    assert len(found) == 7
    assert not troubles
    found, troubles = fetched(flood(8, 1), flood(2, 1))
    assert len(found) == 2
    (fault,) = troubles
    assert isinstance(fault, PeerFault)
    assert fault.kind == "bad_records"


def test_bytes_are_bounded_on_both_sides(monkeypatch: pytest.MonkeyPatch):
    log = log_of(9)
    one = len(fetched(serving(log))[0][-1])
    monkeypatch.setattr(limits, "COMMIT_RECORDS_BYTES_MAX", 4 * one + 3)
    found, troubles = fetched(serving(log))
    assert rounds_of(found) == [6, 7, 8, 9]  # the newest of them, which end in the state
    assert not troubles
    found, troubles = fetched(flood(9, one))
    assert not found
    assert [type(t) for t in troubles] == [PeerFault]


def test_a_peer_that_gives_them_drop_by_drop_is_left_for_the_next():
    found, troubles = fetched(flood(1000, 1, pause=0.9 * records.RECORDS_SECONDS), flood(3, 1))
    assert len(found) == 3
    assert [type(t) for t in troubles] == [asyncio.TimeoutError]
