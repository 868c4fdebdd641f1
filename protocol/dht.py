"""Peers over the open internet, by the hivemind DHT in this process, with the same Ed25519 identity. Optional extra.

Used for finding peers and for nothing else: its clock and its storage are not to be relied on. Each peer stores one record
under the run's key, signed by itself; whoever reads one checks the signature before dialling, and the handshake after.

`DHTNode` is asyncio in one process; `hivemind.DHT` forks, which beside gRPC threads is trouble, and is not used.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import limits
from .errors import ExitCode, PeerFault, ShoalError
from .identity import Identity
from .invite import check_address
from .signing import sign_body, verify_body
from .wire_pb2 import Signed

RECORD_SECONDS = 600.0
CALL_SECONDS = 20.0


def sign_addresses(identity: Identity, run_id: bytes, addresses: Sequence[str]) -> bytes:
    """A record for the DHT."""
    body = json.dumps({"peer": identity.peer_id, "addresses": list(addresses)}).encode()
    return sign_body(identity, "dht", "peer", run_id, body).SerializeToString()


def read_record(peer: str, record: bytes, run_id: bytes) -> list[str]:
    """The addresses in a record. Raises PeerFault("bad_dht_record" or "bad_signature")."""
    try:
        if len(record) > limits.DHT_RECORD_BYTES_MAX:
            raise ValueError(f"{len(record)} bytes")
        body = json.loads(verify_body(Signed.FromString(record), peer, "dht", "peer", run_id))
        if body["peer"] != peer or len(body["addresses"]) > limits.ADDRESSES_MAX:
            raise ValueError("names another peer or too many addresses")
        return [check_address(a) for a in body["addresses"]]
    except PeerFault:
        raise
    except Exception as error:  # protobuf, JSON and type errors of hostile bytes
        raise PeerFault("bad_dht_record", f"{type(error).__name__}: {error}") from None


class Dht:
    """This peer's place in the DHT."""

    def __init__(self, identity: Identity, identity_path: Path, run_id: bytes, rng: random.Random) -> None:
        """`rng`: draws which of many records are read."""
        self._rng = rng
        self._identity, self._path, self._run_id = identity, identity_path, run_id
        self._p2p: Any = None
        self._node: Any = None

    async def start(self, listen: str, bootstrap: Sequence[str]) -> list[str]:
        """Join (or found) the DHT; its own multiaddresses. hivemind's own deadlines bound it (15 s for its process to start).

        Raises:
            ShoalError: code DEPENDENCY without hivemind, UNREACHABLE when no bootstrap peer answers.
        """
        try:
            from hivemind.dht.node import DHTNode
            from hivemind.p2p import P2P
        except ImportError as error:
            raise ShoalError(
                "The DHT needs the package hivemind",
                values=f"node.dht.enabled = true, but {error}",
                todo="Install it with `pip install 'shoal[dht]'`, or set node.dht.enabled = false.",
                code=ExitCode.DEPENDENCY,
            ) from None
        try:
            self._p2p = await P2P.create(
                identity_path=str(self._path),
                host_maddrs=[listen],
                initial_peers=list(bootstrap) or None,
                # hivemind's check reads RSA keys only and fails with ours. Our lock on the file and the handshake's
                # refusal of a second session do its work.
                check_if_identity_free=False,
            )
            self._node = await DHTNode.create(p2p=self._p2p, initial_peers=list(bootstrap) or None, num_workers=2)
            visible = await self._p2p.get_visible_maddrs()
        except Exception as error:  # hivemind names no family of errors: libp2p's, its own, OSError, assertions
            await self.close()
            raise ShoalError(
                "The DHT could not be joined",
                values=f"bootstrap {list(bootstrap) or 'none'}: {type(error).__name__}: {error}",
                todo="Check node.dht.bootstrap and node.dht.listen, or set node.dht.enabled = false.",
                code=ExitCode.UNREACHABLE,
            ) from None
        return [str(m) for m in visible]

    @property
    def _key(self) -> str:
        return f"shoal/v1/{self._run_id.hex()}"

    async def announce(self, addresses: Sequence[str]) -> bool:
        """Store our record; False when the DHT did not take it, in time or at all: it is only a way to be found."""
        from hivemind.utils import get_dht_time

        record = sign_addresses(self._identity, self._run_id, addresses)
        store = self._node.store(self._key, record, get_dht_time() + RECORD_SECONDS, subkey=self._identity.peer_id)
        try:
            return bool(await asyncio.wait_for(store, CALL_SECONDS))
        except Exception:  # as in `start`; the timeout is one of them
            return False

    async def find(self) -> dict[str, list[str]]:
        """Peers of this run and their addresses, drawn from all that are announced; records that do not verify are left out."""
        try:
            found = await asyncio.wait_for(self._node.get(self._key, latest=True), CALL_SECONDS)
        except Exception:  # as in `start`; the timeout is one of them
            return {}
        peers: dict[str, list[str]] = {}
        if found is None or not isinstance(found.value, dict):
            return peers
        # Whoever answers chooses the order, and anybody may add records: each has the same chance to be read.
        stored = [(peer, getattr(record, "value", record)) for peer, record in found.value.items()]
        records = [
            (p, r) for p, r in stored if isinstance(p, str) and isinstance(r, bytes) and p != self._identity.peer_id
        ]
        self._rng.shuffle(records)
        for peer, record in records[: limits.DHT_CHECKED_MAX]:
            try:
                peers[peer] = read_record(peer, record, self._run_id)
            except PeerFault:
                continue
            if len(peers) == limits.DHT_RECORDS_MAX:
                break
        return peers

    async def close(self) -> None:
        """Leave the DHT and end its process. May be called at any time, and again."""
        node, p2p, self._node, self._p2p = self._node, self._p2p, None, None
        try:
            if node is not None:
                await node.shutdown()
        finally:
            if p2p is not None:
                await p2p.shutdown()
