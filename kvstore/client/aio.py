"""The client for event loops: the calls of `sync`, awaited; copies run in the loop's threads.

Made and used in one event loop. Names, arguments and results are those of `kvstore.client.sync`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar

from kvstore.client.base import BaseClient
from kvstore.client.calls.call import Awaiting, Call, Exchange, Fetch, Flow, Step, Work
from kvstore.client.calls.namespace import NamespaceCalls
from kvstore.client.calls.scope import Scope
from kvstore.client.connection import RECEIVE_BYTES, BaseConnection
from kvstore.client.extents import Maps
from kvstore.client.protocol import POST_WAIT_S
from kvstore.types import Layout

T = TypeVar("T")

_WATCH_EVERY_S = 0.1
_QUEUE_FULL_S = 0.002


class AsyncConnection(BaseConnection):
    """One connection on the running loop."""

    def __init__(self, token: str, maps: Maps) -> None:
        super().__init__(token, maps, socket.SOCK_NONBLOCK)
        self._loop = asyncio.get_running_loop()
        self._watched = False

    async def connect(self, path: str, ends_s: float) -> Self:
        """Connects and shakes hands; the connection itself. Any exception closes it."""
        try:
            async with _until(ends_s):
                while not self._reach(path):  # noqa: ASYNC110 - no event says that the queue has room
                    await asyncio.sleep(_QUEUE_FULL_S)
                # A daemon that refuses says why before it hangs up: its answer is read even so.
                with contextlib.suppress(BrokenPipeError):
                    await self._loop.sock_sendall(self._sock, self.protocol.hello())
                self.protocol.welcome(await self._receive())
        except BaseException:
            self.close()
            raise
        return self

    def _reach(self, path: str) -> bool:
        """Connects; False while the daemon's queue of connections is full, for which there is no event."""
        try:
            self._sock.connect(path)
        except BlockingIOError:
            return False
        return True

    async def call(self, message: Any, ends_s: float) -> Any:
        """Sends a request, returns its answer. Any exception, and a cancellation, closes the connection."""
        self._check_usable()
        try:
            async with _until(ends_s):
                self._send(self.protocol.send(message))
                return await self._receive()
        except BaseException:
            self.close()
            raise

    async def fetch(self, message: Any, ends_s: float) -> tuple[Any, int]:
        """Like `call`, for an answer that brings a descriptor: (answer, fd), fd -1 if it brings none."""
        self._check_usable()
        try:
            async with _until(ends_s):
                self._send(self.protocol.send(message))
                await self._readable()
                while (answer := self._read_with_descriptor()) is None:
                    await self._readable()
                return answer, self._take_descriptor()
        except BaseException:
            self.close()
            raise

    async def _readable(self) -> None:
        ready = asyncio.Event()
        self._loop.add_reader(self._sock.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_reader(self._sock.fileno())

    def close(self) -> None:
        """Closes this process's end. Call it in the loop of the connection."""
        # A forked process shares the parent's epoll set, which must keep watching.
        if self._watched and os.getpid() == self.pid:
            self._unwatch()
        super().close()

    def _send(self, frame: bytes) -> None:
        """Sends a frame behind those that wait. Returns at once: the answer comes only after all are sent."""
        self._outbox.add(frame)
        self._flush()

    def _watch(self) -> None:
        if self._watched:
            return
        self._watched = True
        try:
            self._loop.call_soon_threadsafe(self._add_writer)
        except RuntimeError:
            # The loop is closed and sends no more.
            self._give_up()

    def _add_writer(self) -> None:
        if self._watched:
            self._loop.add_writer(self._sock.fileno(), self._writable)
            self._loop.call_later(POST_WAIT_S, self._end_if_late)

    def _unwatch(self) -> None:
        self._watched = False
        if not self._loop.is_closed():
            self._loop.remove_writer(self._sock.fileno())

    def _writable(self) -> None:
        if self._sending.acquire(blocking=False):
            try:
                done = self._push()
            finally:
                self._sending.release()
            if done:
                self._unwatch()
                self._flush()

    def _end_if_late(self) -> None:
        if self._watched and self._is_late():
            self._give_up()
        elif self._watched:
            self._loop.call_later(_WATCH_EVERY_S, self._end_if_late)

    async def _receive(self) -> Any:
        while True:
            answer = self.protocol.receive(await self._loop.sock_recv(self._sock, RECEIVE_BYTES))
            if answer is not None:
                return answer


def _until(ends_s: float) -> asyncio.Timeout:
    """Ends its block with TimeoutError at that monotonic second."""
    return asyncio.timeout(max(ends_s - time.monotonic(), 0.001))


class AsyncClient(BaseClient, Awaiting):
    __doc__ = BaseClient.__doc__

    def namespace(self, layout: Layout, owner: str = "", ttl_s: float = 0.0) -> AsyncNamespace:
        """Returns the blocks of one layout. Needs no daemon yet. See `Client.namespace`."""
        return AsyncNamespace(self, self._scope(layout, owner, ttl_s))

    async def close(self) -> None:
        """Closes all connections; later calls miss."""
        self._close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _perform(self, call: Call[T]) -> T:
        exchange = self._exchange()
        result: T = await self._drive(exchange, self._flow(exchange, call))
        return result

    async def _drive(self, exchange: Exchange, flow: Flow[Any]) -> Any:
        try:
            step = next(flow)
            while True:
                try:
                    reply = await self._reply(exchange, step)
                except BaseException as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(reply)
        except StopIteration as end:
            return end.value

    async def _reply(self, exchange: Exchange, step: Any) -> Any:
        if not isinstance(step, Step):
            return await exchange.connection.call(step, exchange.ends_s)
        if isinstance(step, Work):
            return await _in_thread(step.call)
        if isinstance(step, Fetch):
            return await exchange.connection.fetch(step.message, exchange.ends_s)
        return await AsyncConnection(self._token, self._maps).connect(self.path, exchange.ends_s)


async def _in_thread(call: Callable[[], T]) -> T:
    """Runs a copy in a thread. A cancelled caller waits for its end: until then it writes to the buffer."""
    copying = asyncio.get_running_loop().run_in_executor(None, call)
    cancelled: asyncio.CancelledError | None = None
    while not copying.done():
        try:
            await asyncio.wait([copying])
        except asyncio.CancelledError as error:
            cancelled = error
    failed = copying.exception()
    if cancelled is not None:
        raise cancelled from failed
    return copying.result()


class AsyncNamespace(NamespaceCalls, Awaiting):
    """The blocks of one layout. Calls are awaited; leases and reservations work as with `Namespace`.

    `keys` are one chain in prompt order: each block's parent is the one before it.
    """

    def __init__(self, client: AsyncClient, scope: Scope) -> None:
        super().__init__(client, scope)
        self._perform = client._perform
