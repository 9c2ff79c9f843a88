"""GETs of signed URLs directly into memory, over kept connections on the caller's thread.

Each request is a generator that yields where it waits, and one `select` waits for all requests of a call. So
a call ends in time whatever a server does, and no code touches its memory afterwards. Only plain responses
are handled. All others (a redirect, an error, no length) are left to obstore.
"""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvstore.tiers.network.base import Outcome
from kvstore.tiers.network.objectstore.http import HEAD_BYTES, Head, StaleError, fill, receive_head, send
from kvstore.tiers.network.resolver import Address, NoAnswer, Resolver, SocketAddress
from kvstore.tiers.network.sockets import Steps, connect, run

_AT_ONCE = 8
_IDLE, _IDLE_S = 64, 20.0
"""The most idle connections, and their age in s. S3 closes idle connections after about 30 s."""

_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


@dataclass(slots=True)
class Get:
    """A read of the bytes `start` to `stop` of an object of `total` bytes, into the memory of `into`.

    `of`: index of the object in the call. `answer`: OK, MISSING, TORN if the object has another size, or None
    if the response was not understood.
    """

    url: str
    start: int
    stop: int
    total: int
    into: Sequence[memoryview]
    of: int
    answer: Outcome | None = None

    def request(self) -> bytes:
        """Returns the request's bytes."""
        url = urlsplit(self.url)
        ranged = "" if self._whole else f"Range: bytes={self.start}-{self.stop - 1}\r\n"
        head = f"GET {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n{ranged}\r\n"
        return head.encode("ascii")

    def judge(self, head: Head) -> Outcome | None:
        """Returns OK if the requested bytes follow a head, else the answer."""
        if head.length < 0:
            return None
        if head.status == 416:
            return Outcome.TORN
        if head.status == 200 and self._whole:
            return Outcome.OK if head.length == self.total else Outcome.TORN
        span = _RANGE.fullmatch(head.fields.get("content-range", ""))
        if head.status != 206 or span is None:
            return None
        if int(span[3]) != self.total:
            return Outcome.TORN
        same = (int(span[1]), int(span[2]) + 1) == (self.start, self.stop)
        return Outcome.OK if same and head.length == self.stop - self.start else None

    @property
    def _whole(self) -> bool:
        return self.start == 0 and self.stop == self.total


class Fetcher:
    """Connections to the host of one service. Thread-safe."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: an http or https URL of the service. Does not connect yet."""
        url = urlsplit(endpoint)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._address = Address(url.hostname or "", url.port or (443 if self._tls else 80))
        self._resolver = Resolver()
        self._lock = threading.Lock()
        self._idle: deque[tuple[socket.socket, float]] = deque()
        self._closed = threading.Event()

    def fetch(self, gets: Sequence[Get], ends: float) -> Iterator[Get]:
        """Runs requests until `ends`. Yields each one when it has ended, with its answer."""
        try:
            addresses = self._resolver.resolve(self._address, ends)
        except (OSError, NoAnswer):
            return  # obstore reports the error
        jobs = {self._get(get, addresses): get for get in gets}
        for job in run(jobs, ends, self._closed.is_set, _AT_ONCE):
            yield jobs[job]

    def close(self) -> None:
        """Ends running requests. Closing twice does nothing."""
        with self._lock:
            self._closed.set()
            idle, self._idle = self._idle, deque()
        for connection, _ in idle:
            connection.close()

    def _get(self, get: Get, addresses: Sequence[SocketAddress]) -> Steps[None]:
        """Runs one request. Retries on another connection if the server has closed a kept one."""
        with suppress(OSError):
            while (connection := self._take_idle()) is not None:
                with suppress(StaleError):
                    yield from self._exchange(get, connection)
                    return
            connection = yield from connect(self._address, addresses, self._tls)
            yield from self._exchange(get, connection)

    def _exchange(self, get: Get, connection: socket.socket) -> Steps[None]:
        """Sends a request and receives its response. Keeps the connection if possible. Raises OSError."""
        keep = False
        try:
            yield from send(connection, get.request())
            head = yield from receive_head(connection)
            answer = get.judge(head)
            if answer is Outcome.OK:
                rest = yield from fill(connection, get.into, head.rest)
                keep = head.kept and not rest
            elif head.status == 404 and 0 <= head.length <= HEAD_BYTES:
                body = memoryview(bytearray(head.length))
                rest = yield from fill(connection, [body], head.rest)
                answer = Outcome.MISSING if b"<Code>NoSuchKey</Code>" in bytes(body) else None
                keep = head.kept and not rest
            get.answer = answer
        finally:
            self._put_back(connection, keep)

    def _take_idle(self) -> socket.socket | None:
        """Returns a kept connection, None if there is none."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection, since = self._idle.pop()
            if time.monotonic() - since < _IDLE_S:
                return connection
            connection.close()

    def _put_back(self, connection: socket.socket, keep: bool) -> None:
        with self._lock:
            if keep and not self._closed.is_set() and len(self._idle) < _IDLE:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()
