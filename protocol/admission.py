"""Who may enter: open, allowlist or token; the sessions of those who did; bans with their evidence. No I/O.

Tokens. A run has one admission key K (32 random bytes, made by the founder). An invite's token is an 8-byte id and the
secret HMAC(K, id). A newcomer proves the secret, a member proves K, each by an HMAC over the handshake's transcript
with its own role in it, so nothing secret is ever sent and nothing can be replayed. Who was admitted receives K over
the authenticated connection: every member can check every token and write invites, and no death of the founder closes
the run. The first identity that uses a token owns it: members ask and tell each other (node/swarm/tokens.py), and believe
what they are told, because whoever has K could as well have used the token itself.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

from . import limits
from .errors import PeerFault

Mode = Literal["open", "allowlist", "token"]
TOKEN_ID_BYTES = 8
USED_BY_ANOTHER = "the token was used by another identity; ask for an invite of your own"
RandomBytes = Callable[[int], bytes]


def _mac(key: bytes, *parts: bytes) -> bytes:
    digest = hmac.new(key, digestmod=sha256)
    for part in parts:
        digest.update(part)
    return digest.digest()


@dataclass
class Admission:
    """One peer's part in admission: what it can prove and what it accepts.

    Attributes:
        mode: from the manifest.
        allowed: peer ids, in allowlist mode.
        key: K in token mode; empty for a newcomer that has a token only.
        token: own invite token (id and secret), for a newcomer.
        bindings: token id → the first identity that used it, here.
        heard: the same as other members told us, oldest first.
        revoked: token ids that admit nobody any more.
    """

    mode: Mode = "open"
    allowed: frozenset[str] = frozenset()
    key: bytes = b""
    token: bytes = b""
    bindings: dict[bytes, str] = field(default_factory=dict)
    heard: dict[bytes, str] = field(default_factory=dict)
    revoked: set[bytes] = field(default_factory=set)

    def new_token(self, random_bytes: RandomBytes) -> bytes:
        """Token id and secret (40 bytes) for an invite; empty outside token mode. Raises ValueError without K."""
        if self.mode != "token":
            return b""
        if not self.key:
            raise ValueError("this peer does not have the run's admission key")
        token_id = random_bytes(TOKEN_ID_BYTES)
        return token_id + _mac(self.key, b"shoal/v1/token\0", token_id)

    @property
    def token_id(self) -> bytes:
        """What the dialer names in its Hello: empty for a member."""
        return b"" if self.key or self.mode != "token" else self.token[:TOKEN_ID_BYTES]

    def _secret(self, token_id: bytes) -> bytes:
        if self.key:
            return _mac(self.key, b"shoal/v1/token\0", token_id) if token_id else _mac(self.key, b"shoal/v1/member\0")
        return self.token[TOKEN_ID_BYTES:]

    def prove(self, role: str, token_id: bytes, transcript: bytes) -> bytes:
        """HMAC over the transcript (32 bytes), empty where the mode needs none."""
        if self.mode != "token":
            return b""
        secret = self._secret(token_id)
        return _mac(secret, b"shoal/v1/admission/", role.encode(), b"\0", transcript) if secret else b""

    def check(self, peer: str, role: str, token_id: bytes, transcript: bytes, proof: bytes) -> str | None:
        """Why `peer`, in `role`, is not admitted; None when it is. Binds a token to the first who proves it."""
        if self.mode == "open":
            return None
        if self.mode == "allowlist":
            return None if peer in self.allowed else "not on the run's allowlist"
        if not hmac.compare_digest(proof, self.prove(role, token_id, transcript)) or not proof:
            if not token_id and not proof:
                return "no token was shown, and this run admits by token; ask for an invite that has one"
            return "the token is not of this run" if token_id else "a member's proof is wrong"
        if not token_id or role != "dialer":
            return None
        if token_id in self.revoked:
            return "the token was revoked"
        owner = self.owner(token_id)
        if owner not in (None, peer):
            return USED_BY_ANOTHER
        if token_id not in self.bindings and len(self.bindings) >= limits.BINDINGS_MAX:
            return "too many tokens are in use"
        self.bindings[token_id] = peer
        return None

    def owner(self, token_id: bytes) -> str | None:
        """Who was the first to use a token, as far as this member knows."""
        return self.bindings.get(token_id) or self.heard.get(token_id)

    def hear(self, token_id: bytes, peer: str) -> None:
        """Another member admitted `peer` by a token. What is known already stays; the oldest hearsay makes room."""
        if self.owner(token_id) is None:
            self.heard[token_id] = peer
            if len(self.heard) > limits.BINDINGS_MAX:
                del self.heard[next(iter(self.heard))]

    def release(self, token_id: bytes) -> None:
        """The one that a token was just bound to was not admitted after all."""
        self.bindings.pop(token_id, None)

    def revoke(self, token: bytes) -> str | None:
        """Let a token (or its id) admit nobody any more; returns who had used it. What they have open is not ended."""
        token_id = token[:TOKEN_ID_BYTES]
        self.revoked.add(token_id)
        return self.owner(token_id)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, for the data directory; holds secrets."""
        return {
            "key": self.key.hex(),
            "token": self.token.hex(),
            "bindings": {k.hex(): v for k, v in self.bindings.items()},
            "heard": {k.hex(): v for k, v in self.heard.items()},
            "revoked": sorted(t.hex() for t in self.revoked),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Inverse of `to_dict`; mode and allowlist are the manifest's."""
        self.key = bytes.fromhex(saved["key"])
        self.token = bytes.fromhex(saved["token"])
        self.bindings = {bytes.fromhex(k): str(v) for k, v in saved["bindings"].items()}
        self.heard = {bytes.fromhex(k): str(v) for k, v in saved.get("heard", {}).items()}
        self.revoked = {bytes.fromhex(t) for t in saved["revoked"]}


@dataclass
class Session:
    """An admitted dialer. `live` turns False the moment it is revoked; every frame looks at it."""

    peer: str
    boot_id: bytes
    token: bytes
    since: float
    live: bool = True


class Sessions:
    """Sessions by their token; the one used longest ago goes first when there are too many."""

    def __init__(self, random_bytes: RandomBytes) -> None:
        self._random = random_bytes
        self._by_token: OrderedDict[bytes, Session] = OrderedDict()

    def start(self, peer: str, boot_id: bytes, now: float) -> Session:
        """A new session; the peer's oldest ends when it has too many."""
        for oldest in self.of(peer)[: -limits.SESSIONS_PER_PEER_MAX + 1]:
            self._end(oldest)
        session = Session(peer, boot_id, self._random(32), now)
        self._by_token[session.token] = session
        if len(self._by_token) > limits.SESSIONS_MAX:
            self._by_token.popitem(last=False)[1].live = False
        return session

    def find(self, token: bytes) -> Session | None:
        session = self._by_token.get(token)
        if session is not None:
            self._by_token.move_to_end(token)
        return session

    def of(self, peer: str) -> list[Session]:
        return [s for s in self._by_token.values() if s.peer == peer]

    def revoke(self, peer: str, *, but_boot: bytes | None = None) -> int:
        """End the sessions of a peer (of its other processes, with `but_boot`); returns how many."""
        ended = [s for s in self.of(peer) if s.boot_id != but_boot]
        for session in ended:
            self._end(session)
        return len(ended)

    def _end(self, session: Session) -> None:
        session.live = False
        del self._by_token[session.token]


@dataclass
class Bans:
    """Peers that are refused, each with the reason and its evidence (bytes, may be empty)."""

    entries: dict[str, tuple[str, bytes]] = field(default_factory=dict)

    def add(self, peer: str, reason: str, evidence: bytes = b"") -> bool:
        """True when this is news. Raises PeerFault("too_many_bans" or "evidence_too_large")."""
        if peer in self.entries:
            return False
        if len(evidence) > limits.EVIDENCE_BYTES_MAX:
            raise PeerFault("evidence_too_large", f"{len(evidence)} bytes, limit {limits.EVIDENCE_BYTES_MAX}")
        if len(self.entries) >= limits.MEMBERS_MAX:
            raise PeerFault("too_many_bans", peer)
        self.entries[peer] = (reason[: limits.REASON_CHARS_MAX], evidence)
        return True

    def lift(self, peer: str) -> bool:
        return self.entries.pop(peer, None) is not None

    def reason(self, peer: str) -> str | None:
        return self.entries[peer][0] if peer in self.entries else None

    def to_dict(self) -> dict[str, Any]:
        return {peer: [reason, evidence.hex()] for peer, (reason, evidence) in self.entries.items()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Iterable[str]]) -> Bans:
        return cls({peer: (reason, bytes.fromhex(evidence)) for peer, (reason, evidence) in saved.items()})
