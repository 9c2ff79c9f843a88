"""HTTP/1.1 requests to llama-server on loopback, each on a connection of its own.

A connection that is closed before its answer cancels the request in llama-server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import h11

Headers = Sequence[tuple[bytes, bytes]]

_READ_BYTES = 1 << 16
_CONNECT_S = 5.0


class NoAnswerError(Exception):
    """llama-server is gone, late, or answers with something other than HTTP."""


class Answer:
    """The status and the headers of an answer, and the pieces of its body as they come."""

    def __init__(self, reader: asyncio.StreamReader, connection: h11.Connection) -> None:
        self._reader = reader
        self._connection = connection
        self.status = 0
        self.headers: Headers = ()

    async def start(self) -> None:
        """Reads status and headers. Raises NoAnswerError."""
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                self.status, self.headers = event.status_code, list(event.headers)
                return
            if not isinstance(event, h11.InformationalResponse):
                raise NoAnswerError("llama-server has closed the connection")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the body. Raises NoAnswerError if it is cut."""
        while True:
            event = await self._next()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise NoAnswerError("llama-server has closed the connection")

    async def _next(self) -> Any:
        try:
            while (event := self._connection.next_event()) is h11.NEED_DATA:
                self._connection.receive_data(await self._reader.read(_READ_BYTES))
        except (OSError, h11.RemoteProtocolError) as error:
            raise NoAnswerError(f"llama-server does not answer: {error}") from error
        return event


@asynccontextmanager
async def exchange(
    port: int, method: bytes, target: bytes, headers: Headers = (), body: bytes = b""
) -> AsyncIterator[Answer]:
    """Sends a request, and yields its answer. The connection is closed afterwards. Raises NoAnswerError."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except (OSError, TimeoutError) as error:
        raise NoAnswerError(f"llama-server does not answer: {error}") from error
    try:
        connection = h11.Connection(h11.CLIENT)
        own = [(b"host", b"127.0.0.1:%d" % port), (b"connection", b"close")]
        if body or method not in (b"GET", b"HEAD"):
            own.append((b"content-length", b"%d" % len(body)))
        raw = connection.send(h11.Request(method=method, target=target, headers=[*own, *headers]))
        raw = (raw or b"") + (connection.send(h11.Data(body)) or b"") if body else raw
        writer.write((raw or b"") + (connection.send(h11.EndOfMessage()) or b""))
        answer = Answer(reader, connection)
        try:
            await writer.drain()
        except OSError as error:
            raise NoAnswerError(f"llama-server does not answer: {error}") from error
        await answer.start()
        yield answer
    finally:
        writer.transport.abort()


async def ask(
    port: int,
    method: bytes,
    target: bytes,
    headers: Headers = (),
    body: bytes = b"",
    timeout_s: float = 60.0,
) -> tuple[int, bytes]:
    """Returns the status and the body of an answer. Raises NoAnswerError, also after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s), exchange(port, method, target, headers, body) as answer:
            return answer.status, b"".join([piece async for piece in answer.pieces()])
    except TimeoutError as error:
        raise NoAnswerError(f"llama-server has not answered {target.decode()} in {timeout_s:g} s") from error
