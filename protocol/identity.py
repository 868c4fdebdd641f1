"""Who a peer is: an Ed25519 key in one locked file, its libp2p peer id, and the TLS certificate bound to it.

The file is libp2p's protobuf form of the private key (`08 01 12 40`, 32-byte seed, 32-byte public key), so it is the
identity of the hivemind DHT as well. Peer ids and certificates follow the libp2p peer-id and TLS specifications: a
self-signed P-256 leaf (an Ed25519 leaf fails in gRPC) whose extension carries the host key and its signature over the
leaf's key. Does not cover: what is signed (signing.py) or who may enter (admission.py).
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import os
import secrets
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15

from . import limits
from .errors import ExitCode, PeerFault, ShoalError
from .version import sha256

_PRIVATE_PREFIX = bytes.fromhex("08011240")
_ED25519_PUBLIC_PREFIX = bytes.fromhex("08011220")
_KEY_TYPES = {0: "rsa", 1: "ed25519", 2: "secp256k1", 3: "ecdsa"}
_TLS_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_TLS_PREFIX = b"libp2p-tls-handshake:"
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
# The largest key that libp2p allows in practice is RSA 8192; anything longer is hostile.
_PUBLIC_KEY_BYTES_MAX = 2048
# An honest leaf has about 500 bytes, one with an RSA 8192 host key about 2,700.
_CERTIFICATE_BYTES_MAX = 8 * 1024


# --- encodings --------------------------------------------------------------------------------------------------------


def base58(data: bytes) -> str:
    """Bitcoin's base58, as libp2p writes peer ids."""
    number, text = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = _BASE58[digit] + text
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + text


def base58_decode(text: str) -> bytes:
    """Inverse of `base58`. Raises PeerFault("bad_peer_id")."""
    if len(text) > limits.PEER_ID_CHARS_MAX:
        raise PeerFault("bad_peer_id", f"{len(text)} characters, limit {limits.PEER_ID_CHARS_MAX}")
    number = 0
    for char in text:
        digit = _BASE58.find(char)
        if digit < 0:
            raise PeerFault("bad_peer_id", f"{char!r} is not base58")
        number = number * 58 + digit
    body = number.to_bytes((number.bit_length() + 7) // 8, "big")
    return bytes(len(text) - len(text.lstrip("1"))) + body


def peer_id_of(public_key: bytes) -> str:
    """Peer id of a protobuf-encoded public key: identity multihash up to 42 bytes, else sha2-256."""
    if len(public_key) <= 42:
        return base58(bytes([0x00, len(public_key)]) + public_key)
    return base58(bytes([0x12, 0x20]) + sha256(public_key))


@lru_cache(maxsize=limits.MEMBERS_MAX)
def public_key_from_peer_id(peer_id: str) -> ed25519.Ed25519PublicKey:
    """The Ed25519 key that a "12D3Koo…" id contains. Raises PeerFault("bad_peer_id")."""
    raw = base58_decode(peer_id)
    if len(raw) != 38 or raw[:2] != b"\x00\x24" or raw[2:6] != _ED25519_PUBLIC_PREFIX:
        raise PeerFault("bad_peer_id", f"{peer_id[:20]} does not hold an Ed25519 key")
    return ed25519.Ed25519PublicKey.from_public_bytes(raw[6:])


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    for offset in range(at, min(len(data), at + 5)):
        value |= (data[offset] & 0x7F) << shift
        if not data[offset] & 0x80:
            if offset > at and data[offset] == 0:
                break  # padded: one key would have several encodings, and so several peer ids
            return value, offset + 1
        shift += 7
    raise PeerFault("bad_key", "varint does not end or is padded")


def parse_key(encoded: bytes) -> tuple[str, bytes]:
    """(type, data) of libp2p's PublicKey or PrivateKey protobuf, which must be in its one deterministic form."""
    if len(encoded) > _PUBLIC_KEY_BYTES_MAX or encoded[:1] != b"\x08":
        raise PeerFault("bad_key", "not a key in deterministic protobuf")
    kind, at = _varint(encoded, 1)
    if encoded[at : at + 1] != b"\x12" or kind not in _KEY_TYPES:
        raise PeerFault("bad_key", f"key type {kind}")
    size, at = _varint(encoded, at + 1)
    if len(encoded) - at != size:
        raise PeerFault("bad_key", f"{len(encoded) - at} bytes of key, announced {size}")
    return _KEY_TYPES[kind], encoded[at:]


def _der_parts(data: bytes, count: int, tag: int) -> list[bytes]:
    """Exactly `count` DER elements of `tag`. Raises PeerFault("bad_certificate")."""
    parts, at = [], 0
    while at < len(data) and len(parts) < count:
        if len(data) < at + 2 or data[at] != tag:
            raise PeerFault("bad_certificate", "unexpected DER element")
        size, at = data[at + 1], at + 2
        if size >= 0x80:
            width = size & 0x7F
            if width not in (1, 2) or len(data) < at + width:
                raise PeerFault("bad_certificate", "impossible DER length")
            size, at = int.from_bytes(data[at : at + width], "big"), at + width
            if size < (0x80 if width == 1 else 0x100):
                raise PeerFault("bad_certificate", "DER length is not the shortest")
        if len(data) < at + size:
            raise PeerFault("bad_certificate", "DER element is cut off")
        parts.append(data[at : at + size])
        at += size
    if at != len(data) or len(parts) != count:
        raise PeerFault("bad_certificate", "trailing or missing DER")
    return parts


def _der(tag: int, body: bytes) -> bytes:
    width = 0 if len(body) < 0x80 else 1 if len(body) < 0x100 else 2
    size = bytes([0x80 | width]) + len(body).to_bytes(width, "big") if width else bytes([len(body)])
    return bytes([tag]) + size + body


# --- certificates -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Certificate:
    """A leaf certificate with its key. `binding` is the sha-256 of the DER form (32 bytes)."""

    pem: bytes
    key_pem: bytes
    binding: bytes


def make_certificate(identity: Identity) -> Certificate:
    """A new self-signed P-256 leaf that carries `identity` in libp2p's extension."""
    key = ec.generate_private_key(ec.SECP256R1())
    spki = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    signed = _der(0x04, identity.public_bytes) + _der(0x04, identity.sign(_TLS_PREFIX + spki))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, CERTIFICATE_NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of peers are never trusted, so validity says nothing.
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(4096, 1, 1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(CERTIFICATE_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.UnrecognizedExtension(_TLS_EXTENSION, _der(0x30, signed)), critical=False)
        .sign(key, hashes.SHA256())
    )
    der = certificate.public_bytes(serialization.Encoding.DER)
    return Certificate(
        pem=certificate.public_bytes(serialization.Encoding.PEM),
        key_pem=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        binding=sha256(der),
    )


# Every leaf has the same name: it says nothing, the extension does.
CERTIFICATE_NAME = "shoal.invalid"


# x509 has no common base class: several of its errors are neither ValueError nor each other.
_X509_ERRORS = (
    ValueError,
    TypeError,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
    InvalidSignature,
    UnsupportedAlgorithm,
)


def verify_certificate(der: bytes) -> str:
    """The peer id that a certificate proves. Raises PeerFault("bad_certificate" or "bad_key")."""
    if len(der) > _CERTIFICATE_BYTES_MAX:
        raise PeerFault("bad_certificate", f"{len(der)} bytes, limit {_CERTIFICATE_BYTES_MAX}")
    try:
        certificate = x509.load_der_x509_certificate(der)
        extension = certificate.extensions.get_extension_for_oid(_TLS_EXTENSION).value
        leaf = certificate.public_key()
        spki = leaf.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        certificate.verify_directly_issued_by(certificate)
    except _X509_ERRORS as error:
        raise PeerFault("bad_certificate", f"{type(error).__name__}: {error}") from None
    if not isinstance(extension, x509.UnrecognizedExtension):
        raise PeerFault("bad_certificate", "the extension has another form")
    (signed,) = _der_parts(extension.value, 1, 0x30)
    public, signature = _der_parts(signed, 2, 0x04)
    _verify_host_key(public, signature, _TLS_PREFIX + spki)
    return peer_id_of(public)


def _verify_host_key(public: bytes, signature: bytes, message: bytes) -> None:
    kind, data = parse_key(public)
    try:
        if kind == "ed25519":
            ed25519.Ed25519PublicKey.from_public_bytes(data).verify(signature, message)
        elif kind == "secp256k1":
            key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256K1(), data)
            key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
        else:
            key = serialization.load_der_public_key(data)
            if kind == "ecdsa" and isinstance(key, ec.EllipticCurvePublicKey):
                key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
            elif kind == "rsa" and isinstance(key, rsa.RSAPublicKey):
                key.verify(signature, message, PKCS1v15(), hashes.SHA256())
            else:
                raise PeerFault("bad_key", f"{kind} announced, {type(key).__name__} found")
    except (InvalidSignature, ValueError, UnsupportedAlgorithm) as error:
        raise PeerFault("bad_certificate", f"host key signature: {type(error).__name__}") from None


# --- the identity -----------------------------------------------------------------------------------------------------


class Identity:
    """An Ed25519 key pair. Made by `generate` or `open`."""

    def __init__(self, key: ed25519.Ed25519PrivateKey, lock: int | None = None) -> None:
        self._key = key
        self._lock = lock
        raw = key.public_key().public_bytes_raw()
        self.public_bytes = _ED25519_PUBLIC_PREFIX + raw  # libp2p protobuf form
        self.peer_id = peer_id_of(self.public_bytes)

    @classmethod
    def generate(cls, seed: bytes | None = None) -> Identity:
        """A new one; 32 bytes of `seed` make it reproducible (for the simulator and tests)."""
        make = ed25519.Ed25519PrivateKey
        return cls(make.generate() if seed is None else make.from_private_bytes(seed))

    @classmethod
    def decode(cls, encoded: bytes) -> Identity:
        """From libp2p's protobuf form (68 bytes). Raises ValueError."""
        if len(encoded) != 68 or encoded[:4] != _PRIVATE_PREFIX:
            raise ValueError(f"{len(encoded)} bytes are not an Ed25519 private key in libp2p's form")
        identity = cls(ed25519.Ed25519PrivateKey.from_private_bytes(encoded[4:36]))
        if identity.public_bytes[4:] != encoded[36:]:
            raise ValueError("the public half does not belong to the private half")
        return identity

    def encode(self) -> bytes:
        """libp2p's protobuf form (68 bytes): secret."""
        return _PRIVATE_PREFIX + self._key.private_bytes_raw() + self.public_bytes[4:]

    def sign(self, message: bytes) -> bytes:
        """64 bytes."""
        return self._key.sign(message)

    @classmethod
    def open(cls, path: Path) -> Identity:
        """The identity in `path`, made if there is none, and locked until `close`. Never replaces a file.

        Raises:
            ShoalError: LOCKED when another process uses it, CONFIG when others may read it or it is damaged, DISK.
        """
        try:
            _create(path)
            descriptor = _open_to_lock(path)
        except OSError as error:
            raise _unusable(path, error) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls._checked(descriptor, path)
        except BlockingIOError:
            os.close(descriptor)
            raise ShoalError(
                "The identity is in use by another process",
                values=f"{path} is locked; one identity can run once",
                todo="Stop the other process, or give this one its own --data-dir.",
                code=ExitCode.LOCKED,
            ) from None
        except OSError as error:  # a folder, a filesystem without locks, a bad disk
            os.close(descriptor)
            raise _unusable(path, error) from None
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def _checked(cls, descriptor: int, path: Path) -> Identity:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if mode & 0o077:
            raise ShoalError(
                "The identity file can be read by others",
                values=f"{path} has mode {mode:04o}, expected 0600",
                todo=f"Run: chmod 600 {path}",
                code=ExitCode.CONFIG,
            )
        try:
            identity = cls.decode(os.read(descriptor, 4096))
        except ValueError as error:
            raise ShoalError(
                "The identity file is damaged",
                values=f"{path}: {error}",
                todo="Restore it from a backup, or move it away to start as a new peer.",
                code=ExitCode.CONFIG,
            ) from None
        identity._lock = descriptor
        return identity

    def close(self) -> None:
        """Release the lock on the file."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _unusable(path: Path, error: OSError) -> ShoalError:
    return ShoalError(
        "The identity file cannot be read, locked or made",
        values=f"found {error.strerror} at {path}, expected one file of 68 bytes that can be locked",
        todo="Check the path, the folder's owner, permissions and free space, and that its filesystem has locks.",
        code=ExitCode.DISK,
    )


def _open_to_lock(path: Path) -> int:
    """Open for reading, and for writing where the mode allows it: over NFS an exclusive lock needs that."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _create(path: Path) -> None:
    """Write a new key, complete and fsynced, unless the file exists: two processes at once end up with one key."""
    if path.exists():
        return
    # Named by chance, not by process id: a crash's leftover must not stop the next start (in a container both are 1).
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        key = Identity.generate().encode()
        if os.write(descriptor, key) != len(key):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
        try:
            os.link(temporary, path)  # unlike a rename, never replaces
        except FileExistsError:
            pass
    finally:
        os.close(descriptor)
        os.unlink(temporary)
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
