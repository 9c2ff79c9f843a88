"""HTTP/1.1 on non-blocking sockets, as generators that yield where they would wait."""

from __future__ import annotations

import re
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvstore.tiers.network.sockets import Steps, retry

HEAD_BYTES = 1 << 14
"""The most bytes of a response head."""

_STATUS = re.compile(r"HTTP/1\.1 (\d{3})\b")
_LENGTH = re.compile(r"\d{1,18}")


class StaleError(OSError):
    """A connection ended before the first byte of a response."""


@dataclass(slots=True)
class Head:
    """The head of a response, and the bytes received after it."""

    status: int
    fields: dict[str, str]
    rest: memoryview

    @property
    def length(self) -> int:
        """Bytes of the body, -1 if the head does not tell."""
        length = self.fields.get("content-length", "")
        return int(length) if _LENGTH.fullmatch(length) and "transfer-encoding" not in self.fields else -1

    @property
    def kept(self) -> bool:
        """Whether the connection can be used again after the body."""
        return self.length >= 0 and self.fields.get("connection", "").lower() != "close"


def send(connection: socket.socket, request: bytes) -> Steps[None]:
    """Sends a whole request."""
    left = memoryview(request)
    try:
        while left:
            left = left[(yield from retry(connection, partial(connection.send, left), select.POLLOUT)) :]
    except (BrokenPipeError, ConnectionResetError):
        raise StaleError from None


def _receive(connection: socket.socket, target: memoryview) -> Steps[int]:
    """Receives at least 1 byte into memory, and returns the number. Raises OSError at the end."""
    nbytes = yield from retry(connection, partial(connection.recv_into, target), select.POLLIN)
    if not nbytes:
        raise ConnectionResetError("the server closed the connection")
    return nbytes


def receive_head(connection: socket.socket) -> Steps[Head]:
    """Receives the head of a response. Raises OSError if there is none or it is malformed."""
    buffer, have, end = memoryview(bytearray(HEAD_BYTES)), 0, -1
    while end < 0:
        if have == len(buffer):
            raise OSError("the response head is too long")
        try:
            have += yield from _receive(connection, buffer[have:])
        except ConnectionResetError:
            if have:
                raise
            raise StaleError from None
        end = bytes(buffer[:have]).find(b"\r\n\r\n")
    first, *lines = bytes(buffer[:end]).decode("latin-1").split("\r\n")
    status = _STATUS.match(first)
    if status is None:
        raise OSError("not HTTP/1.1")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Head(int(status[1]), fields, buffer[end + 4 : have])


def fill(connection: socket.socket, into: Sequence[memoryview], rest: memoryview) -> Steps[memoryview]:
    """Fills memory from `rest` and then from the connection. Returns the unused part of `rest`."""
    for target in into:
        have = min(len(rest), len(target))
        target[:have] = rest[:have]
        rest = rest[have:]
        while have < len(target):
            have += yield from _receive(connection, target[have:])
    return rest
