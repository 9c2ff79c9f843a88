"""HTTP/1.1 over a socket that doesn't block, in steps that yield where they would wait."""

from __future__ import annotations

import re
import selectors
import socket
import ssl
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

HEAD_BYTES = 1 << 14
"""A head is no longer than that."""

_STATUS = re.compile(r"HTTP/1\.1 (\d{3})\b")
_LENGTH = re.compile(r"\d{1,18}")

_T = TypeVar("_T")
Steps: TypeAlias = Generator[tuple[socket.socket, int], None, _T]
"""Goes on until it has to wait; yields for what: a socket, and events of `selectors`."""


class StaleError(OSError):
    """A connection ended before anything was answered on it."""


@dataclass(slots=True)
class Head:
    """The head of an answer, and the first bytes of the body that came with it."""

    status: int
    fields: dict[str, str]
    rest: memoryview

    @property
    def length(self) -> int:
        """Bytes of the body; -1 if the head does not say."""
        told = self.fields.get("content-length", "")
        return int(told) if _LENGTH.fullmatch(told) and "transfer-encoding" not in self.fields else -1

    @property
    def kept(self) -> bool:
        """Whether the connection may be used again, when the body has been read."""
        return self.length >= 0 and self.fields.get("connection", "").lower() != "close"


def shake_hands(connection: socket.socket) -> Steps[None]:
    """Begins TLS, if that is what the connection is for."""
    while isinstance(connection, ssl.SSLSocket):
        try:
            connection.do_handshake()
            return
        except ssl.SSLWantReadError:
            yield connection, selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            yield connection, selectors.EVENT_WRITE


def send(connection: socket.socket, request: bytes) -> Steps[None]:
    """Sends all of a request."""
    left = memoryview(request)
    while left:
        try:
            left = left[connection.send(left) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            yield connection, selectors.EVENT_WRITE
        except ssl.SSLWantReadError:
            yield connection, selectors.EVENT_READ
        except (BrokenPipeError, ConnectionResetError):
            raise StaleError from None


def _receive(connection: socket.socket, room: memoryview) -> Steps[int]:
    """Bytes read into memory, 1 at least. OSError if there are no more."""
    while True:
        try:
            got = connection.recv_into(room)
        except (BlockingIOError, ssl.SSLWantReadError):
            yield connection, selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            yield connection, selectors.EVENT_WRITE
        else:
            if not got:
                raise ConnectionResetError("ended")
            return got


def receive_head(connection: socket.socket) -> Steps[Head]:
    """The head of an answer. OSError if there is none, or nothing that is one."""
    buffer, have, end = memoryview(bytearray(HEAD_BYTES)), 0, -1
    while end < 0:
        if have == len(buffer):
            raise OSError("a head without end")
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
    """Fills memory with what has come and what comes. What has come beyond that is left."""
    for room in into:
        have = min(len(rest), len(room))
        room[:have] = rest[:have]
        rest = rest[have:]
        while have < len(room):
            have += yield from _receive(connection, room[have:])
    return rest
