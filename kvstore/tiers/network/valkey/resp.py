"""RESP2, the protocol of Valkey and Redis, without a socket: encodes commands, parses replies.

Bulk strings are received directly into the caller's memory. Lengths that the server claims are bounded. Time
limits are the connection's task.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvstore.errors import RemoteProtocolError

BUFFER_BYTES = 16 << 10
"""The buffer for lines and small replies. A longer line is an error."""

_MAX_REPLY_BYTES = 16 << 20  # of replies that are not received into the caller's memory
_MAX_BULK_BYTES = 1 << 40
_MAX_DEPTH = 8
_STRANGE = "is it a Valkey or Redis server?"
_ITEM_BYTES = 64  # the overhead of an array item in `_MAX_REPLY_BYTES`


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error reply. Its first word is the error code."""

    text: str

    @property
    def code(self) -> str:
        """The error code."""
        return self.text.partition(" ")[0]


Reply: TypeAlias = "int | bytes | Refusal | list[Reply] | None"
"""Simple and bulk strings are bytes, a null is None. A bulk in the caller's memory is its length."""

ReplyParser: TypeAlias = Generator[memoryview, int, Reply]
"""Yields memory for the next bytes, receives their number, and returns a reply."""


def command(*parts: bytes | str | int) -> bytes:
    """Returns an encoded command."""
    raw = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"".join((b"*%d\r\n" % len(raw), *(b"$%d\r\n%b\r\n" % (len(part), part) for part in raw)))


def command_around(before: Sequence[bytes], nbytes: int, behind: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Returns the bytes before and after an argument of `nbytes` that is sent from its own memory."""
    head = command(*before).partition(b"\r\n")[2]
    tail = command(*behind).partition(b"\r\n")[2]
    return b"*%d\r\n%b$%d\r\n" % (len(before) + 1 + len(behind), head, nbytes), b"\r\n" + tail


class Reader:
    """Parses replies from pieces of any size."""

    def __init__(self) -> None:
        self._raw = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._raw)
        self._start = self._stop = 0

    @property
    def empty(self) -> bool:
        """Whether all received bytes are parsed."""
        return self._start == self._stop

    def reply(self, into: Sequence[memoryview] = ()) -> ReplyParser:
        """Parses the next reply. Raises RemoteProtocolError.

        A bulk string fills the memory of `into` in order, and its rest is discarded. The reply is then the
        bulk's length.
        """
        kind, rest = yield from self._line()
        if kind == b"$" and into:
            nbytes = _length(rest, _MAX_BULK_BYTES)
            if nbytes is not None:
                yield from self._into(into, nbytes)
            return nbytes
        return (yield from self._value(kind, rest, [_MAX_REPLY_BYTES], 0))

    def _value(self, kind: bytes, rest: bytes, left: list[int], depth: int) -> ReplyParser:
        """Parses a reply after its first line. `left`: bytes that it may still have."""
        left[0] -= _ITEM_BYTES + len(rest)
        if left[0] < 0 or depth > _MAX_DEPTH:
            raise RemoteProtocolError("a reply is too long")
        match kind:
            case b"+":
                return rest
            case b"-":
                return Refusal(rest.decode(errors="replace"))
            case b":":
                return _number(rest)
            case b"$":
                nbytes = _length(rest, left[0])
                if nbytes is None:
                    return None
                left[0] -= nbytes
                raw = bytearray(nbytes)
                yield from self._into([memoryview(raw)], nbytes)
                return bytes(raw)
            case b"*":
                count = _length(rest, left[0] // _ITEM_BYTES)
                if count is None:
                    return None
                items: list[Reply] = []
                for _ in range(count):
                    line = yield from self._line()
                    items.append((yield from self._value(*line, left, depth + 1)))
                return items
        raise RemoteProtocolError(f"a reply begins with {kind + rest!r:.40}", _STRANGE)

    def _line(self) -> Generator[memoryview, int, tuple[bytes, bytes]]:
        """Returns a line's first byte and its rest."""
        while (end := self._raw.find(b"\r\n", self._start, self._stop)) < 0:
            yield from self._more()
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line[:1], line[1:]

    def _more(self) -> Generator[memoryview, int, None]:
        """Receives more bytes into the buffer."""
        if self._start:
            kept = bytes(self._view[self._start : self._stop])
            self._raw[: len(kept)] = kept
            self._start, self._stop = 0, len(kept)
        if self._stop == BUFFER_BYTES:
            raise RemoteProtocolError("a line of a reply is too long", _STRANGE)
        self._stop += yield self._view[self._stop :]

    def _into(self, into: Sequence[memoryview], nbytes: int) -> Generator[memoryview, int, None]:
        """Receives a bulk of `nbytes` and its terminator."""
        for view in into:
            part = view[:nbytes]
            nbytes -= len(part)
            yield from self._fill(part)
        while nbytes:
            part = self._view[: min(nbytes, BUFFER_BYTES)] if self.empty else self._view[:0]
            nbytes -= (yield part) if part else self._drop(nbytes)
        while self._stop - self._start < 2:
            yield from self._more()
        if self._raw[self._start : self._start + 2] != b"\r\n":
            raise RemoteProtocolError("a bulk string has no terminator")
        self._start += 2

    def _fill(self, part: memoryview) -> Generator[memoryview, int, None]:
        done = min(len(part), self._stop - self._start)
        part[:done] = self._view[self._start : self._start + done]
        self._start += done
        while done < len(part):
            done += yield part[done:]

    def _drop(self, most: int) -> int:
        """Discards up to `most` buffered bytes. Returns their number."""
        dropped = min(most, self._stop - self._start)
        self._start += dropped
        return dropped


def _number(raw: bytes) -> int:
    try:
        return int(raw)
    except ValueError:
        raise RemoteProtocolError(f"{raw!r:.40} is not a number") from None


def _length(raw: bytes, most: int) -> int | None:
    """Returns a length, None for a null. Raises RemoteProtocolError above `most`."""
    length = _number(raw)
    if not -1 <= length <= most:
        raise RemoteProtocolError(f"a reply of {length} bytes or items")
    return None if length < 0 else length
