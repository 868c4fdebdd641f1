"""The peer cache on disk, the order of attempts, and when to stop trying."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol import limits
from shoal.protocol.discovery import (
    DESCRIBED_MAX,
    SECONDS_LEFT_MIN,
    Attempts,
    Candidate,
    PeerCache,
    announceable,
    candidates,
    join_address,
    kind_of,
)
from shoal.protocol.errors import ExitCode
from shoal.protocol.identity import Identity
from shoal.protocol.invite import check_address

PEERS = [Identity.generate(bytes([n]) * 32).peer_id for n in range(4)]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["peers", *PEERS, "a:1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["peers", "x"]), inner, max_size=2),
    max_leaves=12,
)


# --- the cache ---------------------------------------------------------------------------------------------------------


def test_no_file_is_an_empty_cache_and_no_warning(tmp_path: Path) -> None:
    cache = PeerCache(tmp_path / "peers.json")
    assert (cache.peers, cache.warning) == ({}, "")


def test_what_is_written_is_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    cache = PeerCache(path)
    cache.met(PEERS[0], ["a:1"])
    cache.met(PEERS[1], ["b:1", "[::1]:2"])
    cache.met(PEERS[0], ["c:3"])
    path.write_bytes(cache.encoded())
    again = PeerCache(path)
    assert list(again.peers.items()) == [(PEERS[0], ["c:3", "a:1"]), (PEERS[1], ["b:1", "[::1]:2"])]
    assert again.warning == ""
    again.forget(PEERS[0])
    again.forget(PEERS[0])
    assert list(again.peers) == [PEERS[1]]


def test_cache_and_addresses_are_bounded_and_the_newest_stay(tmp_path: Path) -> None:
    cache = PeerCache(tmp_path / "peers.json")
    for n in range(limits.CACHE_PEERS_MAX + 10):
        cache.met(f"peer {n}", ["a:1"])
    assert len(cache.peers) == limits.CACHE_PEERS_MAX
    assert next(iter(cache.peers)) == f"peer {limits.CACHE_PEERS_MAX + 9}" and "peer 9" not in cache.peers
    for port in range(1, 30):
        cache.met(PEERS[0], [f"a:{port}"])
    assert cache.peers[PEERS[0]] == [f"a:{port}" for port in range(29, 29 - limits.ADDRESSES_MAX, -1)]


def test_the_largest_cache_fits_into_the_bytes_that_are_read(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    cache = PeerCache(path)
    host = ".".join(["a" * 63] * 3 + ["a" * 50])
    for n in range(limits.CACHE_PEERS_MAX):
        peer = Identity.generate(n.to_bytes(32, "big")).peer_id
        cache.met(peer, [f"{host}{m}:65535" for m in range(limits.ADDRESSES_MAX)])
    path.write_bytes(cache.encoded())
    assert len(cache.encoded()) < limits.CACHE_BYTES_MAX
    assert PeerCache(path).peers == cache.peers


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"peers": {"a": 1}}',
        b'{"peers": 3}',
        b'{"peers": [[1, ["a:1"]]]}',
        b'{"peers": [["12D3KooW", ["a:1"]]]}',
        json.dumps({"peers": [[PEERS[0], ["not an address"]]]}).encode(),
        json.dumps({"peers": [[PEERS[0], 5]]}).encode(),
        json.dumps({"peers": [[PEERS[0], [None]]]}).encode(),
        b"[" * 100_000,
        b" " * (limits.CACHE_BYTES_MAX + 1),
    ],
)
def test_a_damaged_file_is_set_aside(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(content)
    cache = PeerCache(path)
    assert cache.peers == {}
    assert "peers.json.damaged" in cache.warning
    assert not path.exists() and (tmp_path / "peers.json.damaged").read_bytes() == content


@given(JSON)
def test_no_json_at_all_can_stop_the_node(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    path = tmp_path_factory.mktemp("cache") / "peers.json"
    path.write_text(json.dumps(value))
    cache = PeerCache(path)
    assert bool(cache.warning) != path.exists()
    for addresses in cache.peers.values():
        assert all(check_address(a) for a in addresses)


def test_a_file_that_cannot_even_be_set_aside_only_warns(tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only file system")

    path = tmp_path / "peers.json"
    path.write_text("{")
    cache = PeerCache(path, replace=refuse)
    assert cache.peers == {} and "read-only file system" in cache.warning


# --- candidates --------------------------------------------------------------------------------------------------------


def test_first_addresses_of_all_come_before_second_ones_and_sources_in_order() -> None:
    found = candidates(
        [
            ("invite", [("ann", ["a:1", "a:2"]), ("bob", ["b:1"])]),
            ("cache", [("bob", ["b:1", "b:2"]), ("me", ["m:1"]), ("cat", [])]),
        ],
        "me",
    )
    assert [(c.peer, c.address, c.source) for c in found] == [
        ("ann", "a:1", "invite"),
        ("bob", "b:1", "invite"),
        ("ann", "a:2", "invite"),
        ("bob", "b:2", "cache"),
    ]


@given(
    st.lists(st.tuples(st.sampled_from("abcm"), st.lists(st.sampled_from(["x:1", "y:1", "z:1"]), max_size=20))),
    st.lists(st.tuples(st.sampled_from("abcm"), st.lists(st.sampled_from(["x:1", "y:1", "z:1"]), max_size=20))),
)
def test_everybody_known_is_tried_once_but_never_ourselves(
    invite: list[tuple[str, list[str]]], cache: list[tuple[str, list[str]]]
) -> None:
    found = candidates([("invite", invite), ("cache", cache)], "m")
    pairs = [(c.peer, c.address) for c in found]
    assert len(set(pairs)) == len(pairs)
    kept = limits.ADDRESSES_MAX
    assert set(pairs) == {(p, a) for p, addresses in [*invite, *cache] for a in addresses[:kept] if p != "m"}


# --- attempts ----------------------------------------------------------------------------------------------------------

ANN = Candidate("ann", "a:1", "invite")
BOB = Candidate("bob", "b:1", "cache")


def test_only_permanent_causes_end_the_trying() -> None:
    attempts = Attempts(started=0.0)
    attempts.failed(ANN, "banned", True)
    attempts.failed(BOB, "timed out", False)
    wait, reason = attempts.next_wait(1.0, random.Random(0))
    assert wait is not None and "banned" in reason and "timed out" in reason
    attempts.failed(BOB, "wrong token", True)
    wait, reason = attempts.next_wait(2.0, random.Random(0))
    assert wait is None and "waiting does not mend" in reason
    attempts.failed(ANN, "timed out", False)  # the latest cause of an address counts
    assert attempts.next_wait(3.0, random.Random(0))[0] is not None


@given(st.integers(0, 2**32))
def test_backoff_doubles_up_to_its_bound(seed: int) -> None:
    attempts, rng = Attempts(started=0.0), random.Random(seed)
    attempts.failed(ANN, "timed out", False)
    for n in range(40):
        wait, _ = attempts.next_wait(1e6, rng)  # without a deadline, never given up
        expected = min(2.0**n, limits.RECONNECT_BACKOFF_SECONDS_MAX)
        assert wait is not None and 0.75 * expected <= wait <= 1.25 * expected


@given(st.integers(0, 2**32), st.floats(0.1, 100))
def test_the_deadline_ends_the_trying_after_a_last_attempt_at_it(seed: int, seconds_max: float) -> None:
    attempts, rng, now = Attempts(started=5.0, seconds_max=seconds_max), random.Random(seed), 5.0
    for _ in range(1000):
        wait, reason = attempts.next_wait(now, rng)
        if wait is None:
            break
        assert wait > 0
        now += wait
    else:
        pytest.fail("never gave up")
    assert f"nobody answered within {seconds_max:g} s" == reason
    assert now == pytest.approx(5.0 + seconds_max, abs=SECONDS_LEFT_MIN)


def test_nobody_known_yet_is_no_reason_to_give_up() -> None:
    attempts = Attempts(started=0.0)
    wait, reason = attempts.next_wait(0.0, random.Random(0))
    assert wait is not None and "none known" in reason


def test_a_long_list_of_failures_is_cut() -> None:
    attempts = Attempts(started=0.0)
    for port in range(1, 101):
        attempts.failed(Candidate("ann", f"a:{port}", "cache"), "refused", False)
    assert attempts.describe().endswith(f"and {100 - DESCRIBED_MAX} more")
    assert len(attempts.describe()) < 400


def test_the_error_says_what_was_tried_and_what_to_do() -> None:
    attempts = Attempts(started=0.0, seconds_max=3.0)
    attempts.failed(ANN, "connection refused", False)
    error = attempts.error("nobody answered within 3 s")
    assert error.code is ExitCode.UNREACHABLE
    assert "nobody answered within 3 s" in error.values and "a:1 (invite): connection refused" in error.values
    assert error.what and "new invite" in error.todo


# --- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "kind"),
    [
        ("localhost", "loopback"),
        ("127.0.0.1", "loopback"),
        ("[::1]", "loopback"),
        ("0.0.0.0", "unspecified"),
        ("::", "unspecified"),
        ("fe80::1%eth0", "link-local"),
        ("169.254.1.1", "link-local"),
        ("10.0.0.1", "private"),
        ("192.168.1.9", "private"),
        ("fd00::1", "private"),
        ("8.8.8.8", "public"),
        ("2a00:1450::1", "public"),
        ("peer.example.org", "name"),
        ("", "name"),
        ("1.2.3.4.5", "name"),
    ],
)
def test_kinds_of_hosts(host: str, kind: str) -> None:
    assert kind_of(host) == kind


def test_what_the_user_says_is_announced_as_it_is() -> None:
    said = [f"host{n}:1" for n in range(20)]
    assert announceable("127.0.0.1", 5, ["10.0.0.1"], said) == said[: limits.ADDRESSES_MAX]


@pytest.mark.parametrize(
    ("listen", "interfaces", "expected"),
    [
        ("127.0.0.1", ["10.0.0.1"], ["127.0.0.1:5"]),
        ("::1", [], ["[::1]:5"]),
        ("box.example.org", [], ["box.example.org:5"]),
        (
            "0.0.0.0",
            ["127.0.0.1", "10.0.0.1", "fe80::1%eth0", "8.8.8.8", "0.0.0.0"],
            ["8.8.8.8:5", "10.0.0.1:5"],
        ),
        ("", ["fd00::1"], ["[fd00::1]:5"]),
        ("::", ["127.0.0.1", "fe80::1"], ["127.0.0.1:5"]),
    ],
)
def test_listening_everywhere_announces_what_others_can_reach(
    listen: str, interfaces: list[str], expected: list[str]
) -> None:
    assert announceable(listen, 5, interfaces, []) == expected


OUTSIDE = "9.9.9.9:7000"


@pytest.mark.parametrize(
    ("listen", "interfaces", "observed", "expected"),
    [
        # behind a one-to-one NAT: the host that a peer on the internet saw, our own port, after what we know
        ("", ["10.0.0.1"], [(OUTSIDE, "8.8.4.4:51234")], ["10.0.0.1:5", "8.8.4.4:5"]),
        ("10.0.0.1", [], [(OUTSIDE, "8.8.4.4:51234")], ["10.0.0.1:5", "8.8.4.4:5"]),
        ("", ["10.0.0.1"], [("host.example.org:7000", "8.8.4.4:51234")], ["10.0.0.1:5", "8.8.4.4:5"]),
        ("::", ["fd00::1"], [("[2620:fe::fe]:7000", "[2001:4860::8]:51234")], ["[fd00::1]:5", "[2001:4860::8]:5"]),
        # known already
        ("", ["8.8.4.4"], [(OUTSIDE, "8.8.4.4:51234")], ["8.8.4.4:5"]),
        # seen from inside, or seen as something that nobody outside can reach
        ("", ["10.0.0.1"], [("10.0.0.2:7000", "8.8.4.4:51234")], ["10.0.0.1:5"]),
        ("", ["10.0.0.1"], [("127.0.0.1:7000", "8.8.4.4:51234")], ["10.0.0.1:5"]),
        ("", ["10.0.0.1"], [(OUTSIDE, "192.168.1.7:51234"), (OUTSIDE, "127.0.0.1:1")], ["10.0.0.1:5"]),
        # not an address at all
        ("", ["10.0.0.1"], [(OUTSIDE, ""), (OUTSIDE, "unix:"), (OUTSIDE, "x:y:z"), ("", "8.8.4.4:1")], ["10.0.0.1:5"]),
        # one says otherwise; equally many say otherwise
        ("", [], [(OUTSIDE, f"{h}:1") for h in ("8.8.4.4", "8.8.8.8", "8.8.8.8")], ["127.0.0.1:5", "8.8.8.8:5"]),
        ("", [], [(OUTSIDE, f"{h}:1") for h in ("8.8.8.8", "8.8.4.4")], ["127.0.0.1:5", "8.8.4.4:5"]),
        # whoever listens on loopback alone is not to be reached
        ("127.0.0.1", ["10.0.0.1"], [(OUTSIDE, "8.8.4.4:51234")], ["127.0.0.1:5"]),
    ],
)
def test_what_others_saw_of_us_is_announced_if_they_saw_it_from_outside(
    listen: str, interfaces: list[str], observed: list[tuple[str, str]], expected: list[str]
) -> None:
    assert announceable(listen, 5, interfaces, [], observed) == expected
    assert announceable(listen, 5, interfaces, ["said.example.org:1"], observed) == ["said.example.org:1"]


@given(
    st.lists(st.ip_addresses().map(str), max_size=12),
    st.lists(st.tuples(st.text(max_size=40), st.text(max_size=300)), max_size=5),
)
def test_whatever_others_say_what_is_announced_is_valid_and_not_too_much(
    interfaces: list[str], observed: list[tuple[str, str]]
) -> None:
    told = announceable("", 5, interfaces, [], [*observed, (OUTSIDE, "8.8.4.4:1")])
    assert 1 <= len(told) <= limits.ADDRESSES_MAX and told[-1] == "8.8.4.4:5"
    assert all(check_address(address) for address in announceable("", 5, interfaces, [], observed))


@given(st.ip_addresses(), st.integers(1, 65535))
def test_every_joined_address_is_a_valid_address(host: object, port: int) -> None:
    assert check_address(join_address(str(host).partition("%")[0], port))
    assert join_address("[::1]", port) == f"[::1]:{port}"
