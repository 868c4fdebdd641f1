"""Peers on the local network, by zeroconf (mDNS). A hint only: whoever is found must still pass the handshake.

One service per peer, named by its peer id, under `_shoal._tcp.local.`; the run's first 16 hex digits are in the text
record, so that other runs are not dialled. Everything read from the network is bounded. A machine without multicast
finds nobody and goes on.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from . import limits
from .discovery import join_address, kind_of
from .errors import PeerFault
from .identity import public_key_from_peer_id

SERVICE = "_shoal._tcp.local."
LOOKUP_MS = 3000
FOUND_MAX = limits.MEMBERS_MAX


class Lan:
    """Announces this peer and reports others of the same run."""

    def __init__(self, peer: str, run_id: bytes, port: int, hosts: Sequence[str]) -> None:
        """`hosts`: IP addresses to announce."""
        self._peer, self._run, self._port = peer, run_id.hex()[:16], port
        self._hosts = [h for h in hosts if kind_of(h) not in ("name", "unspecified")]
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self.found: dict[str, list[str]] = {}

    async def start(self, on_found: Callable[[str, list[str]], None]) -> None:
        """Announce and browse until `close`. Raises OSError where there is no usable network."""
        self._zeroconf = AsyncZeroconf(ip_version=IPVersion.All)
        addresses = [
            socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host.strip("[]"))
            for host in self._hosts
        ]
        if addresses:
            info = AsyncServiceInfo(
                SERVICE,
                f"{self._peer}.{SERVICE}",
                addresses=addresses,
                port=self._port,
                properties={"run": self._run},
                server=f"{self._peer.lower()}.local.",
            )
            await self._zeroconf.async_register_service(info)

        async def look(name: str) -> None:
            info = AsyncServiceInfo(SERVICE, name)
            if self._zeroconf is None or not await info.async_request(self._zeroconf.zeroconf, LOOKUP_MS):
                return
            peer, addresses = read_service(name, info.properties, info.parsed_addresses(), info.port or 0, self._run)
            if peer and peer != self._peer and len(self.found) < FOUND_MAX and self.found.get(peer) != addresses:
                self.found[peer] = addresses
                on_found(peer, addresses)

        def changed(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
            if state_change is not ServiceStateChange.Removed and len(self._looking) < FOUND_MAX:
                task = asyncio.ensure_future(look(name))
                self._looking.add(task)
                task.add_done_callback(self._looking.discard)

        import asyncio

        self._looking: set[asyncio.Task[None]] = set()
        self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE, handlers=[changed])

    async def close(self) -> None:
        """Withdraw the announcement."""
        for task in getattr(self, "_looking", ()):
            task.cancel()
        if self._browser is not None:
            await self._browser.async_cancel()
        if self._zeroconf is not None:
            await self._zeroconf.async_unregister_all_services()
            await self._zeroconf.async_close()
            self._zeroconf = None


def read_service(
    name: str, properties: dict[bytes, bytes | None], hosts: Sequence[str], port: int, run: str
) -> tuple[str, list[str]]:
    """Peer id and addresses of a service of our run; ("", []) for anything else."""
    peer = name.partition(".")[0]
    if properties.get(b"run") != run.encode() or not 0 < port < 65536:
        return "", []
    try:
        public_key_from_peer_id(peer)
    except PeerFault:
        return "", []
    return peer, [join_address(host, port) for host in hosts[: limits.ADDRESSES_MAX]]
