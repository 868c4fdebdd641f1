"""The "Records" stream: the commit records behind a state, for a newcomer and for whoever had to download one.

They say which updates a state holds, and where a branch leaves another one: without them a peer could neither tell which of
its own updates were adopted nor resolve a fork older than its arrival. Nothing here is trusted: the receiver checks that the
records form the chain that ends in its state, and every vote on them (history.build_log).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from ...protocol import limits
from ...protocol.ballot_wire import encode_commit
from ...protocol.commit import CommitLog
from ...protocol.errors import PeerFault
from ...protocol.transport import DialError, Stream, StreamClosed
from ...protocol.wire_pb2 import CommitRequest
from .frames import parse

RECORDS_SECONDS = 10.0

OpenStream = Callable[[str, str, float], Awaitable[Stream]]


async def serve_records(stream: Stream, log: CommitLog, tip: bytes) -> None:
    """Handler of one "Records" stream: the records that end in the lineage asked for (or in ours), oldest first."""
    request = CommitRequest()
    parse(request, await stream.recv(RECORDS_SECONDS))
    wanted = request.lineage if log.get(request.lineage) is not None else tip
    for record in list(log.chain(wanted))[::-1]:
        await stream.send(encode_commit(record.checked.commit).SerializeToString())
    await stream.done_sending()


async def fetch_records(
    open_stream: OpenStream, peers: Iterable[str], lineage: bytes, trouble: Callable[[str, BaseException], None]
) -> list[bytes]:
    """Serialized commits, oldest first, of the first peer that gives any; empty when nobody does. Not checked."""
    for peer in peers:
        try:
            if found := await _fetch(await open_stream(peer, "Records", RECORDS_SECONDS), lineage):
                return found
        except (StreamClosed, DialError, asyncio.TimeoutError, PeerFault) as error:
            trouble(peer, error)
    return []


async def _fetch(stream: Stream, lineage: bytes) -> list[bytes]:
    found: list[bytes] = []
    try:
        await stream.send(CommitRequest(lineage=lineage).SerializeToString())
        while True:
            try:
                found.append(await stream.recv(RECORDS_SECONDS))
            except StreamClosed as end:
                if end.clean:
                    return found
                raise
            if len(found) > limits.COMMIT_RECORDS_KEPT:
                raise PeerFault("bad_records", f"more than {limits.COMMIT_RECORDS_KEPT}")
    finally:
        stream.cancel("records read")
