"""Peers on the local network, by zeroconf (mDNS). A hint only: whoever is found must still pass the handshake.

One service per peer, named by its peer id, under `_shoal._tcp.local.`; the run's first 16 hex digits are in the text
record, so that other runs are not dialled. Everything read from the network is bounded. A machine without multicast
finds nobody and goes on.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence

from zeroconf import Error as ZeroconfError
from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from . import limits
from .discovery import join_address, kind_of
from .errors import PeerFault
from .identity import public_key_from_peer_id
from .invite import check_address

SERVICE = "_shoal._tcp.local."
LOOKUP_MS = 3000
# A link-local address means nothing without an interface, so it can neither be announced nor dialled.
_DIALLABLE = ("public", "private", "loopback")


class Lan:
    """Announces this peer and reports others of the same run."""

    def __init__(self, peer: str, run_id: bytes, port: int, hosts: Sequence[str]) -> None:
        """`hosts`: IP addresses to announce."""
        self._peer, self._run, self._port = peer, run_id.hex()[:16], port
        self._hosts = [h.strip("[]") for h in hosts if kind_of(h) in _DIALLABLE]
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._looking: set[asyncio.Task[None]] = set()
        self.found: dict[str, list[str]] = {}

    async def start(self, on_found: Callable[[str, list[str]], None]) -> None:
        """Announce and browse until `close`. Raises OSError where there is no usable network; nothing is left running."""
        try:
            await self._start(on_found)
        except (OSError, ZeroconfError) as error:
            await self.close()
            raise OSError(f"multicast DNS: {type(error).__name__}: {error}") from error

    async def _start(self, on_found: Callable[[str, list[str]], None]) -> None:
        self._zeroconf = AsyncZeroconf(ip_version=IPVersion.All)
        if info := self._announcement():
            # The name is our peer id: whoever answers for it is our own last process, which must not keep us out.
            await (await self._zeroconf.async_register_service(info, cooperating_responders=True))

        def changed(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
            if state_change is not ServiceStateChange.Removed and len(self._looking) < limits.LAN_LOOKUPS_MAX:
                task = asyncio.ensure_future(self._look(name, on_found))
                self._looking.add(task)
                task.add_done_callback(self._looking.discard)

        self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE, handlers=[changed])

    def _announcement(self) -> AsyncServiceInfo | None:
        """Our own service, or None with no address to announce."""
        addresses = [socket.inet_pton(socket.AF_INET6 if ":" in h else socket.AF_INET, h) for h in self._hosts]
        if not addresses:
            return None
        return AsyncServiceInfo(
            SERVICE,
            f"{self._peer}.{SERVICE}",
            addresses=addresses,
            port=self._port,
            properties={"run": self._run},
            server=f"{self._peer.lower()}.local.",
        )

    async def _look(self, name: str, on_found: Callable[[str, list[str]], None]) -> None:
        """Ask for the details of a name that was heard of; nothing that comes back may end the browsing."""
        try:
            info = AsyncServiceInfo(SERVICE, name)
            if self._zeroconf is None or not await info.async_request(self._zeroconf.zeroconf, LOOKUP_MS):
                return
        except (OSError, ZeroconfError):
            return
        self.heard(name, info.properties, info.parsed_addresses(), info.port or 0, on_found)

    def heard(
        self,
        name: str,
        properties: Mapping[bytes, bytes | None],
        hosts: Sequence[str],
        port: int,
        on_found: Callable[[str, list[str]], None],
    ) -> None:
        """Report a service if it is another peer of our run and says something new."""
        peer, addresses = read_service(name, properties, hosts, port, self._run)
        if not addresses or peer == self._peer or self.found.get(peer) == addresses:
            return
        if peer in self.found or len(self.found) < limits.LAN_FOUND_MAX:
            self.found[peer] = addresses
            on_found(peer, addresses)

    async def close(self) -> None:
        """Withdraw the announcement."""
        looking = list(self._looking)
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)
        if self._browser is not None:
            await self._browser.async_cancel()
            self._browser = None
        if self._zeroconf is not None:
            await self._zeroconf.async_unregister_all_services()
            await self._zeroconf.async_close()
            self._zeroconf = None


def read_service(
    name: str, properties: Mapping[bytes, bytes | None], hosts: Sequence[str], port: int, run: str
) -> tuple[str, list[str]]:
    """Peer id and addresses of a service of our run; ("", []) for anything else.

    Addresses that cannot be dialled (link-local, unspecified, not an IP address) are left out.
    """
    peer, _, rest = name.partition(".")
    if rest != SERVICE or properties.get(b"run") != run.encode() or not 0 < port < 65536:
        return "", []
    try:
        public_key_from_peer_id(peer)
    except PeerFault:
        return "", []
    addresses = []
    for host in hosts[: limits.ADDRESSES_MAX]:
        try:
            if kind_of(host) in _DIALLABLE:
                addresses.append(check_address(join_address(host, port)))
        except ValueError:
            continue
    return (peer, addresses) if addresses else ("", [])
