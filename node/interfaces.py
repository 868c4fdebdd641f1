"""This machine's own IP addresses, as others may see them."""

from __future__ import annotations

import socket


def interface_addresses() -> list[str]:
    """Addresses of the interfaces that routes go through, and those of the host name. Sends nothing."""
    found: dict[str, None] = {}
    # Connecting a UDP socket only asks the routing table which own address would be used.
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                found[probe.getsockname()[0].partition("%")[0]] = None
        except OSError:
            continue
    try:
        for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            found[str(info[4][0]).partition("%")[0]] = None
    except OSError:
        pass
    return list(found)
