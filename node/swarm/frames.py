"""Frames of bulk streams: decoding a message, and a payload of known size in raw frames, both ways.

Whoever receives has compared the announced size with its own limit before; here no byte more than that is kept.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError, Message

from ...protocol import limits
from ...protocol.errors import PeerFault
from ...protocol.transport import Stream


def parse(message: Message, frame: bytes) -> None:
    """Decode `frame` into `message`. Raises PeerFault("bad_message")."""
    try:
        message.ParseFromString(frame)
    except DecodeError as error:
        raise PeerFault("bad_message", f"{type(message).__name__}: {error}") from None


def concerning(peer: str, what: str, error: BaseException) -> str:
    """Whom a failed transfer is reported under: a fault under the whole peer id, which it is charged to."""
    return peer if isinstance(error, PeerFault) else f"{what} with {peer[-6:]}"


async def send_payload(stream: Stream, payload: bytes) -> None:
    """Send the bytes that a message before them announced. Raises StreamClosed."""
    for at in range(0, len(payload), limits.PAYLOAD_FRAME_BYTES):
        await stream.send(payload[at : at + limits.PAYLOAD_FRAME_BYTES])


async def receive_payload(stream: Stream, size: int, timeout_s: float, *, fault: str) -> bytes:
    """Exactly `size` bytes; `timeout_s` is for each frame.

    Raises PeerFault(`fault`) at the first byte too many and for a frame without any, StreamClosed, asyncio.TimeoutError.
    """
    data = bytearray()
    while len(data) < size:
        piece = await stream.recv(timeout_s)
        if not piece or len(data) + len(piece) > size:
            raise PeerFault(fault, f"a frame of {len(piece)} bytes after {len(data)} of {size}")
        data += piece
    return bytes(data)
