"""Signatures over bodies of the wire: one domain string per type and role, always bound to the run.

A signature covers `shoal/v1/<type>/<role>` NUL run_id body: what is signed for one purpose or run serves no other.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from cryptography.exceptions import InvalidSignature

from . import limits
from .errors import PeerFault
from .identity import Identity, public_key_from_peer_id
from .version import sha256
from .wire_pb2 import Signed

_verified: OrderedDict[bytes, None] = OrderedDict()
_lock = threading.Lock()  # verification also happens in worker threads


def covered(type_: str, role: str, run_id: bytes, body: bytes) -> bytes:
    """The bytes that a signature covers."""
    return f"shoal/v1/{type_}/{role}".encode() + b"\0" + run_id + body


def sign_body(identity: Identity, type_: str, role: str, run_id: bytes, body: bytes) -> Signed:
    """Sign `body`."""
    return Signed(body=body, signature=identity.sign(covered(type_, role, run_id, body)))


def verify_body(signed: Signed, signer: str, type_: str, role: str, run_id: bytes) -> bytes:
    """The body, if `signer` signed it for this purpose and run. Raises PeerFault("bad_signature" or "bad_peer_id")."""
    if len(signed.signature) != 64 or len(signed.body) > limits.SIGNED_BODY_BYTES_MAX:
        raise PeerFault("bad_signature", f"signature of {len(signed.signature)} bytes")
    message = covered(type_, role, run_id, signed.body)
    key = sha256(signer.encode(), b"\0", signed.signature, message)
    with _lock:
        if key in _verified:
            _verified.move_to_end(key)
            return signed.body
    try:
        public_key_from_peer_id(signer).verify(signed.signature, message)
    except InvalidSignature:
        raise PeerFault("bad_signature", f"{type_}/{role} is not signed by {signer[-8:]}") from None
    with _lock:
        _verified[key] = None
        if len(_verified) > limits.SIGNATURES_KEPT_MAX:
            _verified.popitem(last=False)
    return signed.body
