"""The manifest and the genesis: nobody can hand out another run, and nobody but its founder begins it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.swarm.manifest import RunInfo, fetch_manifest, make_genesis, open_genesis, serve_manifest
from shoal.protocol import limits
from shoal.protocol.errors import PeerFault
from shoal.protocol.identity import Identity
from shoal.protocol.signing import sign_body
from shoal.protocol.transport import Stream, StreamClosed
from shoal.protocol.version import genesis_lineage, sha256
from shoal.protocol.wire_pb2 import Genesis, ManifestReply, Signed

from .memory import MemoryNet, run

MANIFEST = b'{"model": "tiny"}'
RUN = sha256(MANIFEST)


@pytest.fixture(scope="module")
def founder(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.open(tmp_path_factory.mktemp("founder") / "identity")


async def fetch(info: RunInfo, run_id: bytes = RUN) -> RunInfo:
    async def serve(peer: str, stream: Stream) -> None:
        await serve_manifest(stream, lambda: info)

    return await fetch_manifest(await MemoryNet({"a": serve}).open("a", "Manifest", 1), run_id)


def test_a_newcomer_gets_everything_it_needs(founder: Identity) -> None:
    genesis = make_genesis(founder, RUN, sha256(b"state"))
    info = RunInfo(MANIFEST, sha256(b"base"), sha256(b"layout"), genesis)
    assert run(fetch(info)) == info
    opened = open_genesis(genesis, RUN)
    assert opened.founder == founder.peer_id and opened.lineage == genesis_lineage(
        RUN, founder.peer_id, sha256(b"state")
    )
    early = RunInfo(MANIFEST, b"", b"", None)
    assert run(fetch(early)) == early  # the founder still prepares the first state


def test_another_manifest_is_refused() -> None:
    with pytest.raises(PeerFault, match="bad_manifest"):
        run(fetch(RunInfo(b"{}", b"", b"", None)))
    large = b"x" * (limits.MANIFEST_BYTES_MAX + 1)
    with pytest.raises(PeerFault, match="bad_manifest"):
        run(fetch(RunInfo(large, b"", b"", None), sha256(large)))
    with pytest.raises(PeerFault, match="32 bytes"):
        run(fetch(RunInfo(MANIFEST, b"short", b"", None)))


def test_a_genesis_of_somebody_else_another_run_or_another_lineage_is_refused(
    founder: Identity, tmp_path: Path
) -> None:
    other = Identity.open(tmp_path / "identity")
    state = sha256(b"state")
    body = make_genesis(founder, RUN, state).body
    wrong = Genesis(founder=founder.peer_id, state_hash=state, lineage=sha256(b"elsewhere")).SerializeToString()
    for bad in (
        sign_body(other, "genesis", "founder", RUN, body),
        make_genesis(founder, sha256(b"other run"), state),
        sign_body(founder, "genesis", "founder", RUN, wrong),
        sign_body(founder, "update", "origin", RUN, body),
    ):
        with pytest.raises(PeerFault):
            run(fetch(RunInfo(MANIFEST, b"", b"", bad)))


@given(st.binary(max_size=200), st.binary(max_size=70))
def test_any_bytes_for_a_genesis_end_in_the_declared_error(body: bytes, signature: bytes) -> None:
    with pytest.raises(PeerFault):
        open_genesis(Signed(body=body, signature=signature), RUN)


@pytest.mark.parametrize("frame", [b"\xff\xff", b"", ManifestReply(manifest=b"x").SerializeToString()])
def test_any_other_reply_is_its_senders_fault(frame: bytes) -> None:
    async def story() -> None:
        async def serve(peer: str, stream: Stream) -> None:
            await stream.recv(1)
            await stream.send(frame)

        with pytest.raises(PeerFault):
            await fetch_manifest(await MemoryNet({"a": serve}).open("a", "Manifest", 1), RUN)

    run(story())


def test_silence_and_a_broken_stream_are_nobodys_fault() -> None:
    async def story() -> None:
        async def mute(peer: str, stream: Stream) -> None:
            await asyncio.sleep(1e6)

        async def broken(peer: str, stream: Stream) -> None:
            raise ConnectionResetError

        net = MemoryNet({"mute": mute, "broken": broken})
        with pytest.raises(asyncio.TimeoutError):
            await fetch_manifest(await net.open("mute", "Manifest", 1), RUN)
        with pytest.raises(StreamClosed):
            await fetch_manifest(await net.open("broken", "Manifest", 1), RUN)

    run(story())
