"""The "Manifest" stream: what run this is, from which base model and parameters it started. Everything a newcomer needs.

The manifest's hash is the run id that the invite named, so nobody can hand out another. The genesis is signed by the
founder, whose id is in it; its state hash is what round 0's state must have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from ...protocol import limits
from ...protocol.errors import PeerFault
from ...protocol.identity import Identity
from ...protocol.signing import sign_body, verify_body
from ...protocol.transport import Stream
from ...protocol.version import genesis_lineage, sha256
from ...protocol.wire_pb2 import Genesis, ManifestReply, ManifestRequest, Signed
from .frames import parse

MANIFEST_SECONDS = 15.0


@dataclass(frozen=True)
class RunInfo:
    """What a member says about the run. `genesis` is None while the founder still prepares the first state."""

    manifest: bytes
    base_hash: bytes
    layout_hash: bytes
    genesis: Signed | None


def make_genesis(identity: Identity, run_id: bytes, state_hash: bytes) -> Signed:
    """Sign what round 0 is. `state_hash`: of the parameters alone (`genesis_hash`)."""
    genesis = Genesis(
        founder=identity.peer_id,
        state_hash=state_hash,
        lineage=genesis_lineage(run_id, identity.peer_id, state_hash),
    )
    return sign_body(identity, "genesis", "founder", run_id, genesis.SerializeToString(deterministic=True))


def open_genesis(signed: Signed, run_id: bytes) -> Genesis:
    """Verify a genesis. Raises PeerFault."""
    genesis = Genesis()
    try:
        genesis.ParseFromString(signed.body)
    except DecodeError as error:
        raise PeerFault("bad_genesis", str(error)) from None
    verify_body(signed, genesis.founder, "genesis", "founder", run_id)
    if genesis.lineage != genesis_lineage(run_id, genesis.founder, genesis.state_hash):
        raise PeerFault("bad_genesis", "the lineage does not follow from founder and state")
    return genesis


async def serve_manifest(stream: Stream, info: Callable[[], RunInfo]) -> None:
    """Handler of one "Manifest" stream."""
    parse(ManifestRequest(), await stream.recv(MANIFEST_SECONDS))
    known = info()
    reply = ManifestReply(manifest=known.manifest, base_hash=known.base_hash, layout_hash=known.layout_hash)
    if known.genesis is not None:
        reply.genesis.CopyFrom(known.genesis)
    await stream.send(reply.SerializeToString())
    await stream.done_sending()


async def fetch_manifest(stream: Stream, run_id: bytes) -> RunInfo:
    """Ask for it on an open stream. Raises PeerFault when it is not the run's, StreamClosed, asyncio.TimeoutError."""
    try:
        await stream.send(ManifestRequest().SerializeToString())
        reply = ManifestReply()
        parse(reply, await stream.recv(MANIFEST_SECONDS))
    finally:
        stream.cancel("manifest read")
    if len(reply.manifest) > limits.MANIFEST_BYTES_MAX or sha256(reply.manifest) != run_id:
        raise PeerFault("bad_manifest", f"hash {sha256(reply.manifest).hex()[:16]}, expected {run_id.hex()[:16]}")
    if len(reply.base_hash) not in (0, 32) or len(reply.layout_hash) not in (0, 32):
        raise PeerFault("bad_manifest", "a hash of another size than 32 bytes")
    genesis = reply.genesis if reply.HasField("genesis") else None
    if genesis is not None:
        open_genesis(genesis, run_id)
    return RunInfo(reply.manifest, reply.base_hash, reply.layout_hash, genesis)
