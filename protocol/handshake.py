"""The handshake: four frames after which both ends know who the other is and that it may be here. Sans-IO.

    dialer                                   dialed
    Hello      who, to whom, run, nonce  →
                                         ←   Challenge   nonce, signature and admission proof over the transcript
    Proof      signature, admission      →
                                         ←   Welcome     session token (and, to a newcomer, the admission key)

A Refusal may come in place of either reply. The transcript holds both peer ids, both nonces, the run, both boot ids and
incarnations, the token's id, and the hash of the dialed side's TLS certificate. So a frame is good for one connection
only: a replay fails on the nonces, and a relay between two honest peers fails because the certificate that the dialer
saw is not the one that the dialed side has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError, Message

from . import limits
from .admission import Admission, Bans
from .errors import ExitCode, PeerFault, ShoalError
from .identity import Identity, public_key_from_peer_id
from .invite import check_address
from .signing import sign_body, verify_body
from .version import sha256
from .wire_pb2 import Challenge, Hello, Proof, Refusal, Signed, Welcome

NONCE_BYTES = 32
BOOT_ID_BYTES = 16
SESSION_BYTES = 32
# Incarnations are Unix seconds or a few more. What a peer claims to know of ours ends well below what it accepts from
# us, so that a false claim cannot push a newcomer out of the range for good.
INCARNATION_MAX = 2**48
INCARNATION_KNOWN_MAX = 2**47

_CODES = {
    Refusal.WRONG_PROTOCOL: ExitCode.MISMATCH,
    Refusal.WRONG_RUN: ExitCode.MISMATCH,
}
_WHAT = {
    Refusal.WRONG_PROTOCOL: "The other peer speaks another version of the protocol",
    Refusal.WRONG_RUN: "The other peer is in another run",
    Refusal.WRONG_PEER: "The address belongs to another peer",
    Refusal.NOT_ADMITTED: "The swarm does not admit this peer",
    Refusal.BANNED: "The swarm has banned this peer",
    Refusal.IDENTITY_IN_USE: "Another live process has this identity",
    Refusal.BUSY: "The other peer asks to be tried again a little later",
    Refusal.BAD_PROOF: "The other peer did not accept the proof of identity",
}


class Refused(ShoalError):
    """The other side refused, or could not be accepted. `permanent`: trying again as things are is of no use."""

    def __init__(self, reason: int, *, values: str, todo: str) -> None:
        what = _WHAT.get(reason, "The other peer refused the connection")  # type: ignore[call-overload]
        super().__init__(what, values=values, todo=todo, code=_CODES.get(reason, ExitCode.REFUSED))  # type: ignore[call-overload]
        self.reason = reason
        self.permanent = reason != Refusal.BUSY


@dataclass(frozen=True)
class Self:
    """This side of a handshake."""

    identity: Identity
    run_id: bytes
    boot_id: bytes
    incarnation: int
    addresses: tuple[str, ...]
    admission: Admission
    bans: Bans = field(default_factory=Bans)
    protocol: int = limits.PROTOCOL_VERSION


@dataclass(frozen=True)
class Other:
    """What the handshake proved about the other side."""

    peer: str
    boot_id: bytes
    incarnation: int
    addresses: tuple[str, ...]


def decode(message: Message, frame: bytes) -> None:
    """Parse one handshake frame. Raises PeerFault("bad_handshake")."""
    if len(frame) > limits.HANDSHAKE_FRAME_BYTES_MAX:
        raise PeerFault("bad_handshake", f"frame of {len(frame)} bytes, limit {limits.HANDSHAKE_FRAME_BYTES_MAX}")
    try:
        message.ParseFromString(frame)
    except DecodeError as error:
        raise PeerFault("bad_handshake", f"{type(message).__name__}: {error}") from None


def plain(text: str) -> str:
    """A stranger's text, fit for a terminal and a log: bounded, no control characters, no line breaks."""
    return "".join(c if c.isprintable() else "?" for c in text[: limits.REASON_CHARS_MAX])


def _need(condition: bool, detail: str) -> None:
    if not condition:
        raise PeerFault("bad_handshake", detail)


def check_addresses(addresses: Sequence[str]) -> tuple[str, ...]:
    """Addresses named by a peer. Raises PeerFault("bad_handshake")."""
    _need(len(addresses) <= limits.ADDRESSES_MAX, f"{len(addresses)} addresses")
    try:
        return tuple(check_address(a) for a in addresses)
    except ValueError as error:
        raise PeerFault("bad_handshake", str(error)) from None


def transcript(hello: Hello, challenge: Challenge, binding: bytes) -> bytes:
    """sha-256 over everything that either side said before it proved itself, and the dialed side's certificate."""
    parts = [
        str(hello.protocol).encode(),
        hello.run_id,
        hello.dialer.encode(),
        hello.dialed.encode(),
        hello.nonce,
        hello.boot_id,
        str(hello.incarnation).encode(),
        hello.token_id,
        *(a.encode() for a in hello.addresses),
        challenge.nonce,
        challenge.boot_id,
        str(challenge.incarnation).encode(),
        binding,
    ]
    return sha256(b"shoal/v1/handshake\0", *(len(p).to_bytes(4, "big") + p for p in parts))


class Dialer:
    """The connecting side: `hello()`, then `on_challenge`, then `on_welcome`."""

    def __init__(self, me: Self, peer: str, binding: bytes, random_bytes: Callable[[int], bytes]) -> None:
        """`binding`: hash of the certificate that the connection proved to be `peer`'s."""
        self._me, self._peer, self._binding = me, peer, binding
        self._nonce = random_bytes(NONCE_BYTES)
        self._hello = Hello(
            protocol=me.protocol,
            run_id=me.run_id,
            dialer=me.identity.peer_id,
            dialed=peer,
            nonce=self._nonce,
            boot_id=me.boot_id,
            incarnation=me.incarnation,
            addresses=me.addresses,
            token_id=me.admission.token_id,
        )
        self._other: Other | None = None  # set by a good Challenge: what Welcome must follow

    def hello(self) -> bytes:
        return _tagged(1, self._hello)

    def on_challenge(self, frame: bytes) -> bytes:
        """The Proof. Raises Refused or PeerFault."""
        challenge = Challenge()
        _need(self._other is None, "a second Challenge")
        self._parse(2, challenge, frame)
        _need(len(challenge.nonce) == NONCE_BYTES, "nonce of another size")
        _need(len(challenge.boot_id) == BOOT_ID_BYTES, "boot id of another size")
        _need(challenge.incarnation <= INCARNATION_MAX, "impossible incarnation")
        body = transcript(self._hello, challenge, self._binding)
        me, run_id = self._me, self._me.run_id
        verify_body(Signed(body=body, signature=challenge.proof), self._peer, "handshake", "dialed", run_id)
        why = me.admission.check(self._peer, "dialed", self._hello.token_id, body, challenge.admission)
        if why is not None:
            raise Refused(
                Refusal.NOT_ADMITTED,
                values=f"{self._peer}: {why}; this peer expects {me.admission.mode} admission",
                todo="The address may be an impostor's: ask for a new invite.",
            )
        self._other = Other(self._peer, challenge.boot_id, challenge.incarnation, ())
        proof = Proof(
            proof=sign_body(me.identity, "handshake", "dialer", run_id, body).signature,
            admission=me.admission.prove("dialer", self._hello.token_id, body),
        )
        return _tagged(3, proof)

    def on_welcome(self, frame: bytes) -> tuple[Welcome, Other]:
        """What the session needs. Raises Refused or PeerFault."""
        welcome = Welcome()
        self._parse(4, welcome, frame)
        other = self._other
        if other is None:
            raise PeerFault("bad_handshake", "Welcome before Challenge")
        _need(welcome.incarnation_known <= INCARNATION_KNOWN_MAX, "impossible incarnation")
        _need(welcome.seq_known <= limits.INT64_MAX, "impossible sequence number")
        _need(len(welcome.session) == SESSION_BYTES, "session token of another size")
        _need(len(welcome.admission_key) in (0, 32), "admission key of another size")
        _need(len(welcome.observed) <= limits.ADDRESS_CHARS_MAX, "observed address too long")
        return welcome, Other(other.peer, other.boot_id, other.incarnation, check_addresses(welcome.addresses))

    def _parse(self, tag: int, message: Message, frame: bytes) -> None:
        if frame[:1] == b"\0":
            refusal = Refusal()
            _untag(0, refusal, frame)
            raise Refused(
                refusal.reason,
                values=f"mine {self._mine(refusal.reason)}; theirs {plain(refusal.theirs)}",
                todo=plain(refusal.todo) or "Ask whoever runs the swarm.",
            )
        _untag(tag, message, frame)

    def _mine(self, reason: int) -> str:
        return {
            Refusal.WRONG_PROTOCOL: f"protocol {self._me.protocol}",
            Refusal.WRONG_RUN: f"run {self._me.run_id.hex()}",
            Refusal.WRONG_PEER: f"expected {self._peer}",
        }.get(reason, self._me.identity.peer_id)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Refuse:
    """The dialed side's answer is no. `frame` is the Refusal to send; `detail` is for the log."""

    frame: bytes
    reason: int
    detail: str


class Dialed:
    """The accepting side: `on_hello` → Challenge, `on_proof` → who it is; then `welcome`."""

    def __init__(self, me: Self, binding: bytes, random_bytes: Callable[[int], bytes]) -> None:
        """`binding`: hash of our own certificate."""
        self._me, self._binding = me, binding
        self._nonce = random_bytes(NONCE_BYTES)
        self._hello = Hello()
        self._begun = False
        self._body: bytes | None = None  # the transcript that Proof must prove, once
        self._admitted = False

    @property
    def token_id(self) -> bytes:
        """Of the invite that the dialer came with; empty for a member, and outside token mode."""
        return self._hello.token_id if self._me.admission.mode == "token" else b""

    def on_hello(self, frame: bytes) -> bytes | Refuse:
        """The Challenge, or a refusal. Raises PeerFault for what is not a Hello."""
        _need(not self._begun, "a second Hello")
        self._begun = True
        hello, me = self._hello, self._me
        _untag(1, hello, frame)
        if hello.protocol != me.protocol:  # first: another version's fields may have other sizes
            return refuse(Refusal.WRONG_PROTOCOL, f"protocol {me.protocol}", "Install the same version of shoal.")
        _need(len(hello.nonce) == NONCE_BYTES, "nonce of another size")
        _need(len(hello.boot_id) == BOOT_ID_BYTES, "boot id of another size")
        _need(len(hello.run_id) <= 32 and len(hello.token_id) in (0, 8), "run or token id of another size")
        _need(hello.incarnation <= INCARNATION_MAX, "impossible incarnation")
        check_addresses(hello.addresses)
        if hello.run_id != me.run_id:
            return refuse(Refusal.WRONG_RUN, f"run {me.run_id.hex()}", "Ask for an invite to this run.")
        if hello.dialed != me.identity.peer_id:
            return refuse(Refusal.WRONG_PEER, me.identity.peer_id, "Ask for a new invite: the address has moved.")
        public_key_from_peer_id(hello.dialer)
        if hello.dialer == me.identity.peer_id:
            todo = "Give this process its own data directory; one identity can run once."
            return refuse(Refusal.IDENTITY_IN_USE, f"the peer you dialled is {hello.dialer} itself", todo)
        if (reason := me.bans.reason(hello.dialer)) is not None:
            return refuse(Refusal.BANNED, reason, "Only the swarm's members can lift a ban.")
        challenge = Challenge(nonce=self._nonce, boot_id=me.boot_id, incarnation=me.incarnation)
        self._body = transcript(hello, challenge, self._binding)
        challenge.proof = sign_body(me.identity, "handshake", "dialed", me.run_id, self._body).signature
        challenge.admission = me.admission.prove("dialed", hello.token_id, self._body)
        return _tagged(2, challenge)

    def on_proof(self, frame: bytes) -> Other | Refuse:
        """Who the dialer is, proven and admitted, or a refusal. Raises PeerFault for what is not a Proof."""
        body, self._body = self._body, None
        if body is None:
            raise PeerFault("bad_handshake", "Proof before Challenge, or a second one")
        proof, hello, me = Proof(), self._hello, self._me
        _untag(3, proof, frame)
        signed = Signed(body=body, signature=proof.proof)
        try:
            verify_body(signed, hello.dialer, "handshake", "dialer", me.run_id)
        except PeerFault as fault:
            return refuse(Refusal.BAD_PROOF, fault.detail, "The connection may be intercepted; try another network.")
        why = me.admission.check(hello.dialer, "dialer", hello.token_id, body, proof.admission)
        if why is not None:
            return refuse(Refusal.NOT_ADMITTED, f"{me.admission.mode} admission: {why}", "Ask a member for an invite.")
        self._admitted = True
        return Other(hello.dialer, hello.boot_id, hello.incarnation, tuple(hello.addresses))

    def welcome(self, session: bytes, *, incarnation_known: int, seq_known: int, observed: str) -> bytes:
        """The last frame; carries the admission key to whoever came with a token. Raises RuntimeError before that."""
        if not self._admitted:
            raise RuntimeError("a Welcome for somebody who has not proven anything")
        me = self._me
        return _tagged(
            4,
            Welcome(
                session=session,
                incarnation_known=incarnation_known,
                seq_known=seq_known,
                admission_key=me.admission.key if self._hello.token_id else b"",
                addresses=me.addresses,
                observed=observed[: limits.ADDRESS_CHARS_MAX],
            ),
        )


def refuse(reason: int, theirs: str, todo: str) -> Refuse:
    """A refusal that shows the dialed side's value."""
    limit = limits.REASON_CHARS_MAX
    message = Refusal(reason=reason, theirs=theirs[:limit], todo=todo[:limit])  # type: ignore[arg-type]
    return Refuse(b"\0" + message.SerializeToString(), reason, theirs)


def _tagged(tag: int, message: Message) -> bytes:
    return bytes([tag]) + message.SerializeToString()


def _untag(tag: int, message: Message, frame: bytes) -> None:
    _need(frame[:1] == bytes([tag]), "frame out of turn")
    _need(len(frame) <= limits.HANDSHAKE_FRAME_BYTES_MAX, f"frame of {len(frame)} bytes")
    decode(message, frame[1:])
