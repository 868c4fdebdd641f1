"""Identity files, peer ids and identity-bound certificates, against libp2p's own vectors and against hostile bytes."""

from __future__ import annotations

import datetime
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol import identity as module
from shoal.protocol.errors import ExitCode, PeerFault, ShoalError
from shoal.protocol.identity import (
    Identity,
    base58,
    base58_decode,
    make_certificate,
    parse_key,
    peer_id_of,
    public_key_from_peer_id,
    verify_certificate,
)
from shoal.protocol.version import sha256

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "libp2p_identity.json").read_text())
KEYS = {name: bytes.fromhex(value) for name, value in VECTORS["keys"].items()}
SEED = bytes(range(32))
EXTENSION = x509.ObjectIdentifier(VECTORS["tls_extension_oid"])
PREFIX = VECTORS["signature_prefix"].encode()


# --- libp2p's vectors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", VECTORS["certificates"], ids=lambda case: case["case"])
def test_certificate_vectors(case: dict) -> None:
    der = bytes.fromhex(case["certificate_der_hex"])
    if case["valid"]:
        assert verify_certificate(der) == case["peer_id"]
    else:
        with pytest.raises(PeerFault):
            verify_certificate(der)


def test_ed25519_key_vectors() -> None:
    identity = Identity.decode(KEYS["ed25519_private_key_protobuf_hex"])
    assert identity.encode() == KEYS["ed25519_private_key_protobuf_hex"]
    assert identity.public_bytes == KEYS["ed25519_public_key_protobuf_hex"]


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "secp256k1"])
def test_key_encodings(kind: str) -> None:
    for half in ("private", "public"):
        encoded = KEYS[f"{kind}_{half}_key_protobuf_hex"]
        assert parse_key(encoded)[0] == kind
        assert encoded.endswith(parse_key(encoded)[1])


# --- peer ids ---------------------------------------------------------------------------------------------------------


def test_peer_id_holds_the_public_key() -> None:
    identity = Identity.generate(SEED)
    assert identity.peer_id.startswith("12D3Koo") and len(identity.peer_id) == 52
    public_key_from_peer_id(identity.peer_id).verify(identity.sign(b"x"), b"x")
    assert Identity.generate(SEED).peer_id == identity.peer_id != Identity.generate().peer_id


def test_long_public_keys_are_hashed() -> None:
    assert peer_id_of(KEYS["ecdsa_public_key_protobuf_hex"]).startswith("Qm")


@given(st.binary(max_size=46))
def test_base58_round_trip(data: bytes) -> None:
    assert base58_decode(base58(data)) == data


@pytest.mark.parametrize("text", ["", "1", "0OIl", "12D3KooW", "1" * 65, "Qm" + "x" * 44, "é"])
def test_bad_peer_ids(text: str) -> None:
    with pytest.raises(PeerFault, match="bad_peer_id"):
        public_key_from_peer_id(text)


@given(st.text(max_size=80))
def test_any_text_is_a_peer_id_or_a_fault(text: str) -> None:
    try:
        public_key_from_peer_id(text)
    except PeerFault as fault:
        assert fault.kind == "bad_peer_id"


# --- key decoding -----------------------------------------------------------------------------------------------------


@given(st.one_of(st.binary(max_size=80), st.binary(max_size=40).map(lambda b: b"\x08\x01\x12" + b)))
def test_any_bytes_are_a_key_or_a_fault(data: bytes) -> None:
    try:
        kind, raw = parse_key(data)
    except PeerFault as fault:
        assert fault.kind == "bad_key"
    else:
        assert kind in ("rsa", "ed25519", "secp256k1", "ecdsa") and data.endswith(raw)


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"\x08" + bytes(3000),
        b"\x08\x81\x00\x12\x20" + SEED,  # a padded varint: the same key under another name
        b"\x08\x01\x12\xa0\x00" + SEED,
        b"\x08\x04\x12\x20" + SEED,
        b"\x08\x01\x1a\x20" + SEED,
        b"\x08\x01\x12\x21" + SEED,
        b"\x08\x01\x12\x1f" + SEED,
        b"\x08\xff\xff\xff\xff\xff\x01",
        b"\x08",
    ],
)
def test_keys_have_one_form(encoded: bytes) -> None:
    with pytest.raises(PeerFault, match="bad_key"):
        parse_key(encoded)


# --- certificates -----------------------------------------------------------------------------------------------------


def test_own_certificate_proves_its_identity() -> None:
    identity = Identity.generate(SEED)
    made = make_certificate(identity)
    certificate = x509.load_pem_x509_certificate(made.pem)
    der = certificate.public_bytes(serialization.Encoding.DER)
    assert verify_certificate(der) == identity.peer_id
    assert made.binding == sha256(der)
    assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
    assert make_certificate(identity).binding != made.binding


def _certificate(
    extension: Callable[[bytes], list[tuple[x509.ObjectIdentifier, bytes]]],
    signer: ec.EllipticCurvePrivateKey | None = None,
) -> bytes:
    """DER of a leaf with any extensions; `extension` gets the leaf's SPKI."""
    key = ec.generate_private_key(ec.SECP256R1())
    spki = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(2100, 1, 1))
    )
    for oid, value in extension(spki):
        builder = builder.add_extension(x509.UnrecognizedExtension(oid, value), critical=False)
    return builder.sign(signer or key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def _der(tag: int, body: bytes) -> bytes:
    width = (len(body).bit_length() + 7) // 8
    return (
        bytes([tag])
        + (bytes([len(body)]) if len(body) < 128 else bytes([128 + width]) + len(body).to_bytes(width, "big"))
        + body
    )


def _signed(public: bytes, signature: bytes) -> list[tuple[x509.ObjectIdentifier, bytes]]:
    return [(EXTENSION, _der(0x30, _der(0x04, public) + _der(0x04, signature)))]


def test_rsa_host_keys_are_understood_and_kinds_must_match() -> None:
    key = rsa.generate_private_key(65537, 2048)
    data = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)

    def encoded(kind: int) -> bytes:
        return bytes([8, kind, 0x12, 0x80 | len(data) & 0x7F, len(data) >> 7]) + data

    def sign(spki: bytes) -> bytes:
        return key.sign(PREFIX + spki, PKCS1v15(), hashes.SHA256())

    assert verify_certificate(_certificate(lambda spki: _signed(encoded(0), sign(spki)))) == peer_id_of(encoded(0))
    with pytest.raises(PeerFault, match="bad_key"):
        verify_certificate(_certificate(lambda spki: _signed(encoded(3), sign(spki))))


@pytest.mark.parametrize(
    "extension",
    [
        lambda spki: [],
        lambda spki: [(EXTENSION, b"")],
        lambda spki: [(EXTENSION, b"\x30")],
        lambda spki: [(EXTENSION, b"\x31\x00")],
        lambda spki: [(EXTENSION, b"\x30\x83\x00\x00\x00")],
        lambda spki: [(EXTENSION, b"\x30\x81")],
        lambda spki: [(EXTENSION, b"\x30\x05\x04\x01")],
        lambda spki: [(EXTENSION, b"\x30\x81\x02\x04\x00")],  # a length that is not the shortest
        lambda spki: [(EXTENSION, b"\x30\x03\x04\x01\x00")],
        lambda spki: [(EXTENSION, _der(0x30, _der(0x04, b"a") + _der(0x04, b"b") + b"\x04\x00"))],
        lambda spki: _signed(b"\x08\x01\x12\x20" + SEED, bytes(64)),
        lambda spki: _signed(b"\x08\x03\x12\x03abc", bytes(64)),
        lambda spki: _signed(b"\x08\x02\x12\x21" + bytes(33), bytes(64)),
        lambda spki: _signed(Identity.generate(SEED).public_bytes, Identity.generate(SEED).sign(b"other:" + spki)),
        # another's signed extension on a leaf of one's own
        lambda spki: _signed(Identity.generate(SEED).public_bytes, Identity.generate(SEED).sign(PREFIX + b"theirs")),
    ],
)
def test_bad_extensions(extension: Callable[[bytes], list[tuple[x509.ObjectIdentifier, bytes]]]) -> None:
    with pytest.raises(PeerFault):
        verify_certificate(_certificate(extension))


def test_leaf_must_sign_itself() -> None:
    identity = Identity.generate(SEED)
    other = ec.generate_private_key(ec.SECP256R1())
    der = _certificate(lambda spki: _signed(identity.public_bytes, identity.sign(PREFIX + spki)), signer=other)
    with pytest.raises(PeerFault, match="bad_certificate"):
        verify_certificate(der)


def test_certificates_that_the_parser_rejects_in_its_own_ways() -> None:
    good = x509.load_pem_x509_certificate(make_certificate(Identity.generate(SEED)).pem)
    der = good.public_bytes(serialization.Encoding.DER)
    # The subject-alternative-name extension renamed to basicConstraints: a duplicate, no ValueError in x509.
    twice = der.replace(bytes.fromhex("0603551d11"), bytes.fromhex("0603551d13"))
    version_9 = der.replace(bytes.fromhex("a003020102"), bytes.fromhex("a003020109"), 1)
    for bad, why in ((twice, "DuplicateExtension"), (version_9, "InvalidVersion"), (der + bytes(9000), "limit")):
        with pytest.raises(PeerFault, match=why):
            verify_certificate(bad)


def test_an_extension_of_a_known_form_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    pem = make_certificate(Identity.generate(SEED)).pem
    der = x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)
    monkeypatch.setattr(module, "_TLS_EXTENSION", x509.ExtensionOID.BASIC_CONSTRAINTS)
    with pytest.raises(PeerFault, match="another form"):
        verify_certificate(der)


_GOOD_DER = bytes.fromhex(VECTORS["certificates"][0]["certificate_der_hex"])


@given(st.integers(0, len(_GOOD_DER) - 1), st.binary(min_size=1, max_size=4))
def test_a_changed_certificate_is_a_fault(at: int, patch: bytes) -> None:
    changed = _GOOD_DER[:at] + patch + _GOOD_DER[at + len(patch) :]
    try:
        proven = verify_certificate(changed)
    except PeerFault as fault:
        assert fault.kind in ("bad_certificate", "bad_key")
    else:
        assert changed == _GOOD_DER and proven == VECTORS["certificates"][0]["peer_id"]


@given(st.binary(max_size=600))
def test_any_bytes_are_a_certificate_or_a_fault(data: bytes) -> None:
    with pytest.raises(PeerFault):
        verify_certificate(data)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_file_is_made_once_private_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    first = Identity.open(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == first.encode() and len(first.encode()) == 68
    assert os.listdir(tmp_path) == ["identity.key"]
    first.close()
    first.close()
    again = Identity.open(path)
    assert again.peer_id == first.peer_id
    again.close()


def test_a_read_only_file_serves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "identity.key"
    Identity.open(path).close()
    path.chmod(0o400)
    really = os.open

    def as_an_ordinary_user(name: Path, flags: int, *rest: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return really(name, flags, *rest)

    monkeypatch.setattr(os, "open", as_an_ordinary_user)
    Identity.open(path).close()


def test_second_user_in_this_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    first = Identity.open(path)
    with pytest.raises(ShoalError) as caught:
        Identity.open(path)
    assert caught.value.code is ExitCode.LOCKED and str(path) in caught.value.values
    first.close()
    Identity.open(path).close()


def test_second_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    first = Identity.open(path)
    code = (
        "import sys; from pathlib import Path; from shoal.protocol.identity import Identity\n"
        "from shoal.protocol.errors import ShoalError\n"
        "try: Identity.open(Path(sys.argv[1]))\n"
        "except ShoalError as error: sys.exit(int(error.code))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=environment, timeout=30, check=False)
    assert done.returncode == ExitCode.LOCKED
    first.close()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity.key"
    Identity.open(path).close()
    path.chmod(mode)
    with pytest.raises(ShoalError) as caught:
        Identity.open(path)
    assert (
        caught.value.code is ExitCode.CONFIG and f"{mode:04o}" in caught.value.values and "0600" in caught.value.values
    )


@pytest.mark.parametrize("content", [b"", bytes(68), b"\x08\x01\x12\x40" + bytes(64), b"\x08\x01\x12\x40" + bytes(63)])
def test_a_damaged_file_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ShoalError) as caught:
        Identity.open(path)
    assert caught.value.code is ExitCode.CONFIG
    assert path.read_bytes() == content


def test_unusable_places_are_three_part_errors(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "identity.key"):
        with pytest.raises(ShoalError) as caught:
            Identity.open(path)
        assert caught.value.code is ExitCode.DISK and caught.value.todo


def test_a_filesystem_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(module.fcntl, "flock", no_locks)
    with pytest.raises(ShoalError, match="No locks available"):
        Identity.open(tmp_path / "identity.key")


def test_a_full_disk_leaves_no_half_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda descriptor, data: len(data) // 2)
    with pytest.raises(ShoalError) as caught:
        Identity.open(tmp_path / "identity.key")
    assert caught.value.code is ExitCode.DISK and os.listdir(tmp_path) == []


def test_two_creators_end_up_with_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "identity.key"
    winner = Identity.generate(SEED).encode()
    really = os.link

    def other_was_first(source: Path, target: Path) -> None:
        path.write_bytes(winner)
        path.chmod(0o600)
        really(source, target)

    monkeypatch.setattr(os, "link", other_was_first)
    identity = Identity.open(path)
    assert identity.encode() == winner and os.listdir(tmp_path) == ["identity.key"]
    identity.close()
