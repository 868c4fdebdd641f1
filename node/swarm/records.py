"""The "Records" stream: the commit records behind a state, for a newcomer and for whoever had to download one.

They say which updates a state holds, and where a branch leaves another one: without them a peer could neither tell which of
its own updates were adopted nor resolve a fork older than its arrival. Nothing here is trusted: the receiver checks that the
records form the chain that ends in its state, and every vote on them (history.build_log).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice

from ...protocol import limits
from ...protocol.ballot_wire import encode_commit
from ...protocol.commit import CommitLog
from ...protocol.errors import PeerFault
from ...protocol.transport import DialError, Stream, StreamClosed
from ...protocol.wire_pb2 import CommitRequest
from .frames import parse

# One frame of them, and all of them together: a peer that gives one in every nine seconds is not waited for to the end.
RECORDS_SECONDS = 10.0
ALL_RECORDS_SECONDS = 60.0

OpenStream = Callable[[str, str, float], Awaitable[Stream]]


async def serve_records(stream: Stream, log: CommitLog, tip: bytes) -> None:
    """Handler of one "Records" stream: the records that end in the lineage asked for (or in ours), oldest first; the newest
    of them where not all may be sent."""
    request = CommitRequest()
    parse(request, await stream.recv(RECORDS_SECONDS))
    wanted = request.lineage if log.get(request.lineage) is not None else tip
    for frame in _newest(log, wanted)[::-1]:
        await stream.send(frame)
    await stream.done_sending()


def _newest(log: CommitLog, tip: bytes) -> list[bytes]:
    """As many records back from `tip` as one answer may hold, newest first."""
    frames, size = [], 0
    for record in islice(log.chain(tip), limits.COMMIT_RECORDS_KEPT):
        frame = encode_commit(record.checked.commit).SerializeToString()
        size += len(frame)
        if size > limits.COMMIT_RECORDS_BYTES_MAX:
            break
        frames.append(frame)
    return frames


async def fetch_records(
    open_stream: OpenStream, peers: Iterable[str], lineage: bytes, trouble: Callable[[str, BaseException], None]
) -> list[bytes]:
    """Serialized commits, oldest first, of the first peer that gives any; empty when nobody does. Not checked."""
    for peer in peers:
        try:
            if found := await asyncio.wait_for(_fetch(open_stream, peer, lineage), ALL_RECORDS_SECONDS):
                return found
        except (StreamClosed, DialError, asyncio.TimeoutError, PeerFault) as error:
            trouble(peer, error)
    return []


async def _fetch(open_stream: OpenStream, peer: str, lineage: bytes) -> list[bytes]:
    found: list[bytes] = []
    size = 0
    stream = await open_stream(peer, "Records", RECORDS_SECONDS)
    try:
        await stream.send(CommitRequest(lineage=lineage).SerializeToString())
        while True:
            try:
                frame = await stream.recv(RECORDS_SECONDS)
            except StreamClosed as end:
                if end.clean:
                    return found
                raise
            size += len(frame)
            if len(found) >= limits.COMMIT_RECORDS_KEPT or size > limits.COMMIT_RECORDS_BYTES_MAX:
                raise PeerFault(
                    "bad_records",
                    f"more than {limits.COMMIT_RECORDS_KEPT} records or {limits.COMMIT_RECORDS_BYTES_MAX} bytes",
                )
            found.append(frame)
    finally:
        stream.cancel("records read")
