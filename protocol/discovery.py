"""Finding somebody to talk to: which addresses to try in which order, how long to wait, and what has failed why.

Covers the peer cache on disk and the retry policy; both pure but for the cache's file. LAN and DHT are lan.py and dht.py.
A dead bootstrap peer never strands a node: the invite may name several peers, and everybody met before is remembered.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from . import limits
from .errors import ExitCode, PeerFault, ShoalError
from .identity import public_key_from_peer_id
from .invite import check_address

BACKOFF_SECONDS_MIN = 0.5
SECONDS_LEFT_MIN = 0.001  # less than this before the deadline is rounding
# More causes than this in one line help nobody.
DESCRIBED_MAX = 8


def _read_bounded(path: Path) -> bytes:
    """No more of a file than tells that it is too large."""
    with path.open("rb") as file:
        return file.read(limits.CACHE_BYTES_MAX + 1)


class PeerCache:
    """Peers that were connected to, newest first, in a small JSON file. A damaged file is set aside, not fatal."""

    def __init__(
        self,
        path: Path,
        *,
        read: Callable[[Path], bytes] = _read_bounded,
        replace: Callable[[Path, Path], None] = os.replace,
    ) -> None:
        """Read the file; `read` and `replace` are the disk's."""
        self.peers: dict[str, list[str]] = {}
        self.warning = ""
        self._encoded: bytes | None = None
        try:
            self.peers = _parse_cache(read(path))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, PeerFault) as error:
            aside = path.with_name(path.name + ".damaged")
            self.warning = f"peer cache {path} cannot be used ({error}); set aside as {aside.name}, starting without it"
            try:
                replace(path, aside)
            except OSError as failed:
                self.warning = f"peer cache {path} cannot be used ({error}) nor set aside ({failed})"

    def met(self, peer: str, addresses: Sequence[str]) -> None:
        """Remember a peer at the front, its newest addresses first. `encoded` is what to write."""
        known = self.peers.get(peer, [])
        merged = list(dict.fromkeys([*addresses, *known]))[: limits.ADDRESSES_MAX]
        if merged == known and next(iter(self.peers)) == peer:
            return
        self.peers.pop(peer, None)
        self.peers = dict(itertools.islice({peer: merged, **self.peers}.items(), limits.CACHE_PEERS_MAX))
        self._encoded = None

    def forget(self, peer: str) -> None:
        self.peers.pop(peer, None)
        self._encoded = None

    def encoded(self) -> bytes:
        """The file's content; made anew only when something changed: it is asked for often."""
        if self._encoded is None:
            rows = ",\n ".join(_row(peer, tuple(addresses)) for peer, addresses in self.peers.items())
            self._encoded = f'{{"peers": [\n {rows}\n]}}'.encode()
        return self._encoded


@lru_cache(maxsize=1 << 14)  # the order changes often, the rows seldom; shared by all nodes of a simulation
def _row(peer: str, addresses: tuple[str, ...]) -> str:
    return json.dumps([peer, addresses])


def _parse_cache(content: bytes) -> dict[str, list[str]]:
    """Raises ValueError or PeerFault for anything that `PeerCache.encoded` does not write."""
    if len(content) > limits.CACHE_BYTES_MAX:
        raise ValueError(f"larger than {limits.CACHE_BYTES_MAX} bytes")
    try:
        listed = json.loads(content)["peers"]
        peers: dict[str, list[str]] = {}
        for peer, addresses in listed[: limits.CACHE_PEERS_MAX]:
            public_key_from_peer_id(peer)
            peers[peer] = [check_address(a) for a in addresses[: limits.ADDRESSES_MAX]]
        return peers
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a list of peers: {type(error).__name__}: {error}") from None


@dataclass(frozen=True)
class Candidate:
    """One address of one peer, and how it is known ("invite", "cache", "lan", "dht")."""

    peer: str
    address: str
    source: str


def candidates(sources: Iterable[tuple[str, Iterable[tuple[str, Iterable[str]]]]], me: str) -> list[Candidate]:
    """All addresses in the order to try: sources as given, the first addresses of all peers before their second ones."""
    found: dict[tuple[str, str], Candidate] = {}
    for source, peers in sources:
        listed = [(peer, list(addresses)) for peer, addresses in peers if peer != me]
        for rank in range(limits.ADDRESSES_MAX):
            for peer, addresses in listed:
                if rank < len(addresses):
                    found.setdefault((peer, addresses[rank]), Candidate(peer, addresses[rank], source))
    return list(found.values())


@dataclass
class Attempts:
    """What was tried and failed, and whether to go on. Pure: time and randomness come in."""

    started: float
    seconds_max: float = 0.0  # 0: for ever
    rounds: int = 0
    failures: dict[Candidate, tuple[str, bool]] = field(default_factory=dict)

    def failed(self, candidate: Candidate, cause: str, permanent: bool) -> None:
        self.failures[candidate] = (cause, permanent)

    @property
    def hopeless(self) -> bool:
        """Whether every address failed for a reason that waiting does not mend."""
        return bool(self.failures) and all(permanent for _, permanent in self.failures.values())

    def next_wait(self, now: float, rng: random.Random) -> tuple[float | None, str]:
        """Seconds until all are tried again, or None to give up; with the reason. Doubles from 1 s up to a bound, ± 25 %."""
        self.rounds += 1
        if self.hopeless:
            return None, "every address refused for a reason that waiting does not mend"
        left = self.started + self.seconds_max - now
        if self.seconds_max > 0 and left < SECONDS_LEFT_MIN:
            return None, f"nobody answered within {self.seconds_max:g} s"
        wait = min(BACKOFF_SECONDS_MIN * 2 ** min(self.rounds, 16), limits.RECONNECT_BACKOFF_SECONDS_MAX)
        wait *= 0.75 + 0.5 * rng.random()
        if self.seconds_max > 0:
            wait = min(wait, left)  # one last try at the deadline, not after it
        return wait, f"trying again in {wait:.1f} s; so far {self.describe()}"

    def describe(self) -> str:
        """The first addresses with their causes, and how many more, in one line."""
        parts = [f"{c.address} ({c.source}): {cause}" for c, (cause, _) in self.failures.items()]
        if len(parts) > DESCRIBED_MAX:
            parts[DESCRIBED_MAX:] = [f"and {len(parts) - DESCRIBED_MAX} more"]
        return "; ".join(parts) or "none known"

    def error(self, reason: str) -> ShoalError:
        """The end of trying, in three parts."""
        return ShoalError(
            "No peer of the run could be reached",
            values=f"{reason}; tried {self.describe()}",
            todo="Check that a peer is up (`shoal doctor` on its machine shows what others can reach), "
            "or ask for a new invite.",
            code=ExitCode.UNREACHABLE,
        )


@lru_cache(maxsize=4096)
def kind_of(host: str) -> str:
    """ "loopback", "private", "link-local", "unspecified", "public" or "name"."""
    try:
        ip = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return "loopback" if host == "localhost" else "name"
    if ip.is_unspecified:
        return "unspecified"
    if ip.is_loopback:
        return "loopback"
    if ip.is_link_local:
        return "link-local"
    return "private" if ip.is_private else "public"


def announceable(
    listen: str,
    port: int,
    interfaces: Sequence[str],
    announce: Sequence[str],
    observed: Sequence[tuple[str, str]] = (),
) -> list[str]:
    """What to tell others: what the user says, else where we listen, else this machine's addresses that others can reach;
    and last, because it is a guess, where peers on the internet saw us come from.

    Loopback is announced only when we listen on nothing else: then it is right for a swarm on one machine.

    Args:
        listen: the address that we listen on; empty or unspecified for all.
        interfaces: this machine's addresses.
        announce: "host:port" as the user wants it; replaces everything else.
        observed: for each peer that let us in, the address where we dialed it and the one that it saw us at ("host:port").
            The latter's port is that of an outgoing connection: its host goes with our own port, which is right behind a
            one-to-one NAT or a forwarded port. Only a peer that itself has a public address can know: others see us from
            inside. The host that most of them saw.
    """
    if announce:
        return list(announce)[: limits.ADDRESSES_MAX]
    if listen and kind_of(listen) != "unspecified":
        hosts = [listen]
    else:
        useful = [host for host in interfaces if kind_of(host) in ("private", "public")]
        hosts = sorted(useful, key=lambda h: kind_of(h) != "public") or ["127.0.0.1"]
    told = [join_address(host, port) for host in hosts][: limits.ADDRESSES_MAX]
    seen = _seen_from_outside(observed)
    if seen is None or kind_of(listen) == "loopback":
        return told
    return list(dict.fromkeys([*told[: limits.ADDRESSES_MAX - 1], join_address(seen, port)]))


def _seen_from_outside(observed: Sequence[tuple[str, str]]) -> str | None:
    """Our public host as most peers with public addresses saw it; the smaller text among equals."""
    hosts = Counter(
        host_of(seen)
        for dialed, seen in observed
        if host_of(dialed) and kind_of(host_of(dialed)) in ("public", "name") and kind_of(host_of(seen)) == "public"
    )
    return min(hosts, key=lambda host: (-hosts[host], host), default=None)


def host_of(address: str) -> str:
    """The host of "host:port", without brackets."""
    return address.rpartition(":")[0].strip("[]")


def join_address(host: str, port: int) -> str:
    """host:port, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
