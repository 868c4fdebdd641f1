"""The invite: one line that is all a newcomer needs.

    shoal://<peer_id>@host:port[,host:port…][;<peer_id>@host:port…]/<run_id hex>[#token=<hex>]

Several addresses of one peer are separated by commas, further peers by semicolons, so that one dead bootstrap peer
never makes an invite useless. The token part is a secret of the run: whoever has it may enter once.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from . import limits
from .errors import ExitCode, PeerFault, ShoalError
from .identity import public_key_from_peer_id

# DNS labels, or an IPv6 address in brackets: what name resolution cannot even encode never gets that far.
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_ADDRESS = re.compile(rf"(?:\[([0-9A-Fa-f:.]{{2,45}})\]|{_LABEL}(?:\.{_LABEL})*\.?):([0-9]{{1,5}})")
_TOKEN_BYTES = 40  # id (8) and secret (32)


def check_address(address: str) -> str:
    """`host:port`, IPv6 in brackets. Raises ValueError."""
    match = _ADDRESS.fullmatch(address) if len(address) <= limits.ADDRESS_CHARS_MAX else None
    if match is None or not 0 < int(match[2]) < 65536:
        raise ValueError(f"{address[:80]!r} is not host:port")
    if match[1] is not None:
        ipaddress.IPv6Address(match[1])  # its AddressValueError is a ValueError
    return address


@dataclass(frozen=True)
class Invite:
    """Where a run can be entered.

    Attributes:
        peers: (peer id, its addresses), in the order to try.
        run_id: 32 bytes.
        token: token id and secret (40 bytes), or empty.
    """

    peers: tuple[tuple[str, tuple[str, ...]], ...]
    run_id: bytes
    token: bytes = b""

    def __str__(self) -> str:
        where = ";".join(f"{peer}@{','.join(addresses)}" for peer, addresses in self.peers)
        return f"shoal://{where}/{self.run_id.hex()}" + (f"#token={self.token.hex()}" if self.token else "")

    @classmethod
    def parse(cls, text: str) -> Invite:
        """Raises ShoalError (code USAGE) that says what is wrong with the line."""
        text = text.strip()
        try:
            return cls._parse(text)
        except (ValueError, PeerFault) as error:
            raise ShoalError(
                "This is not an invite",
                values=f"{error}; expected shoal://<peer_id>@host:port/<run_id>[#token=…]",
                todo="Copy the whole line that `shoal invite` printed, quoted because of the # in it.",
                code=ExitCode.USAGE,
            ) from None

    @classmethod
    def _parse(cls, text: str) -> Invite:
        if len(text) > limits.INVITE_CHARS_MAX:
            raise ValueError(f"{len(text)} characters, at most {limits.INVITE_CHARS_MAX}")
        if not text.startswith("shoal://"):
            raise ValueError(f"it begins with {text[:16]!r}")
        rest, _, fragment = text[len("shoal://") :].partition("#")
        where, slash, run = rest.rpartition("/")
        if not slash or not re.fullmatch(r"[0-9a-f]{64}", run):
            raise ValueError(f"run id {run[:70]!r} is not 64 hex digits")
        token = b""
        if fragment:
            if not re.fullmatch(rf"token=[0-9a-f]{{{2 * _TOKEN_BYTES}}}", fragment):
                raise ValueError(f"the part after # is not token= and {2 * _TOKEN_BYTES} hex digits")
            token = bytes.fromhex(fragment[len("token=") :])
        peers = []
        for part in where.split(";"):
            peer, at, addresses = part.partition("@")
            if not at:
                raise ValueError(f"{part[:80]!r} has no @")
            public_key_from_peer_id(peer)
            peers.append((peer, tuple(check_address(a) for a in addresses.split(","))))
            if len(peers[-1][1]) > limits.ADDRESSES_MAX or len(peers) > limits.ADDRESSES_MAX:
                raise ValueError(f"more than {limits.ADDRESSES_MAX} addresses or peers")
        return cls(tuple(peers), bytes.fromhex(run), token)
