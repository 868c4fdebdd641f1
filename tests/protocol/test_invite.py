"""Invites: one line in, the same line out; anything else is an error that a person understands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol import limits
from shoal.protocol.errors import ExitCode, ShoalError
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Invite, check_address

A, B = (Identity.generate(bytes([n]) * 32).peer_id for n in (1, 2))
RUN = bytes(range(32))

hosts = st.one_of(
    st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z0-9]{1,10}){0,3}", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda ip: f"[{ip}]"),
)
addresses = st.builds(lambda host, port: f"{host}:{port}", hosts, st.integers(1, 65535))


@given(
    st.lists(
        st.tuples(st.sampled_from([A, B]), st.lists(addresses, min_size=1, max_size=8).map(tuple)),
        min_size=1,
        max_size=3,
    ),
    st.binary(min_size=32, max_size=32),
    st.sampled_from([b"", bytes(range(40))]),
)
def test_round_trip(peers: list[tuple[str, tuple[str, ...]]], run_id: bytes, token: bytes) -> None:
    invite = Invite(tuple(peers), run_id, token)
    assert Invite.parse(f"  {invite}\n") == invite


def test_the_documented_form() -> None:
    text = f"shoal://{A}@a.example:7001,[::1]:7002;{B}@10.0.0.1:7003/{RUN.hex()}"
    invite = Invite.parse(text)
    assert invite.peers == ((A, ("a.example:7001", "[::1]:7002")), (B, ("10.0.0.1:7003",)))
    assert invite.run_id == RUN and invite.token == b"" and str(invite) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://x",
        f"shoal://{A}@a:1",
        f"shoal://{A}@a:1/{RUN.hex()[:-1]}",
        f"shoal://{A}@a:1/{RUN.hex().upper()[:-1]}F",
        f"shoal://{A}@a:1/{RUN.hex()}#token=",
        f"shoal://{A}@a:1/{RUN.hex()}#token=00",
        f"shoal://{A}@a:1/{RUN.hex()}#secret={'0' * 80}",
        f"shoal://{A}/{RUN.hex()}",
        f"shoal://{A}@/{RUN.hex()}",
        f"shoal://{A}@a:1,/{RUN.hex()}",
        f"shoal://{A}@a:0/{RUN.hex()}",
        f"shoal://{A}@a:65536/{RUN.hex()}",
        f"shoal://nobody@a:1/{RUN.hex()}",
        f"shoal://{A}@{','.join(['a:1'] * 9)}/{RUN.hex()}",
        f"shoal://{';'.join([f'{A}@a:1'] * 9)}/{RUN.hex()}",
        "shoal://" + "x" * limits.INVITE_CHARS_MAX,
    ],
)
def test_what_is_not_an_invite(text: str) -> None:
    with pytest.raises(ShoalError) as caught:
        Invite.parse(text)
    assert caught.value.code is ExitCode.USAGE and "expected shoal://" in caught.value.values


def test_a_bad_token_is_not_repeated_in_the_error() -> None:
    with pytest.raises(ShoalError) as caught:
        Invite.parse(f"shoal://{A}@a:1/{RUN.hex()}#token={'ab' * 39}")
    assert "abab" not in str(caught.value)


@given(st.text(max_size=200))
def test_any_text_is_an_invite_or_a_declared_error(text: str) -> None:
    for candidate in (text, f"shoal://{text}", f"shoal://{A}@{text}/{RUN.hex()}"):
        try:
            Invite.parse(candidate)
        except ShoalError as error:
            assert error.code is ExitCode.USAGE


@pytest.mark.parametrize(
    "address",
    [
        "a..b:80",  # what the resolver's encoder raises UnicodeError for
        "x" * 64 + ":80",
        ".:80",
        "-a:80",
        "host:80\n",
        "h:\u0668\u0660",
        "[:::]:80",
        "[::1%eth0]:80",
        "::1:80",
        "host",
        "a b:80",
        "a:" + "1" * limits.ADDRESS_CHARS_MAX,
    ],
)
def test_bad_addresses(address: str) -> None:
    with pytest.raises(ValueError):
        check_address(address)


@given(addresses)
def test_accepted_addresses_can_be_resolved(address: str) -> None:
    host = check_address(address).rpartition(":")[0].strip("[]")
    host.encode("idna")
