"""Frames: the length of a message (u32, little-endian), then the message."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

from kvstore.errors import LocalProtocolError, RemoteProtocolError
from kvstore.wire.messages import VERSION, decode, encode

_LENGTH = struct.Struct("<I")
DEFAULT_FRAME_BYTES = 4 << 20


def pack(message: Any, limit_bytes: int = DEFAULT_FRAME_BYTES, version: int = VERSION) -> bytes:
    """Returns a message as a frame, in a version of the wire. Raises LocalProtocolError above the limit."""
    body = encode(message, version)
    if len(body) > limit_bytes:
        raise LocalProtocolError(
            f"{type(message).__name__} takes {len(body)} bytes, the limit is {limit_bytes}",
            "pass fewer keys in one call",
        )
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into messages. Buffers at most one unfinished frame."""

    def __init__(
        self, limit_bytes: int = DEFAULT_FRAME_BYTES, decode: Callable[[memoryview], Any] = decode
    ) -> None:
        """`limit_bytes` may be changed at any time. `ended` counts the complete frames."""
        self.limit_bytes = limit_bytes
        self.ended = 0
        self._decode = decode
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[Any]:
        """Adds received bytes. Yields the complete messages.

        Raises RemoteProtocolError for a frame over the limit or a bad message. The stream is useless then.
        """
        buffer = self._buffer
        if (
            not buffer
            and len(data) >= 4
            and _LENGTH.unpack_from(data)[0] == len(data) - 4 <= self.limit_bytes
        ):
            self.ended += 1
            yield self._decode(memoryview(data)[4:])
            return
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= 4:
                (length,) = _LENGTH.unpack_from(buffer, at)
                if length > self.limit_bytes:
                    raise RemoteProtocolError(
                        f"a frame of {length} bytes, the limit is {self.limit_bytes}",
                        "is the peer a kvstore client?",
                    )
                if len(buffer) - at - 4 < length:
                    break
                start, at = at + 4, at + 4 + length
                self.ended += 1
                # Released at once, because a buffer with a view cannot grow.
                with memoryview(buffer) as received, received[start:at] as body:
                    message = self._decode(body)
                yield message
        finally:
            if at:
                del buffer[:at]

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the unfinished frame so far."""
        return len(self._buffer)

    @property
    def unfinished(self) -> bool:
        """Whether a frame is unfinished. At the end of a stream, this means that the stream was cut."""
        return bool(self._buffer)
