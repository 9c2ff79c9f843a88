"""The asyncio client: the calls of `sync`, awaited; copies run in the executor of the event loop.

A client belongs to one event loop. Names, arguments and results are those of `kvstore.client.sync`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

from kvstore.client.base import BaseClient
from kvstore.client.calls.call import Awaiting, Exchange, Flow, Pipeline, Step, Work
from kvstore.client.calls.namespace import NamespaceCalls
from kvstore.client.connection import RECEIVE_BYTES, REPORT_S, BaseConnection, in_order
from kvstore.client.extents import Maps
from kvstore.client.protocol import POST_WAIT_S
from kvstore.types import Layout
from kvstore.wire import messages as m

T = TypeVar("T")

_WATCH_EVERY_S = 0.1
_QUEUE_FULL_S = 0.002


class AsyncConnection(BaseConnection):
    """One connection of the running loop."""

    def __init__(self, token: str, maps: Maps) -> None:
        super().__init__(token, maps, socket.SOCK_NONBLOCK)
        self._loop = asyncio.get_running_loop()

    async def connect(self, path: str, ends_s: float) -> Self:
        """Connects and greets the daemon; returns the connection. Any exception closes it."""
        try:
            async with _until(ends_s):
                while not self._reach(path):  # noqa: ASYNC110 - no event tells that the queue has room
                    await asyncio.sleep(_QUEUE_FULL_S)
                # A daemon that refuses the client sends its reason before it hangs up: read the answer.
                with contextlib.suppress(BrokenPipeError):
                    await self._loop.sock_sendall(self._sock, self.protocol.hello())
                self.protocol.welcome(await self._receive())
        except BaseException:
            self.close()
            raise
        return self

    def _reach(self, path: str) -> bool:
        """Connects; returns False while the daemon's queue of connections is full."""
        try:
            self._sock.connect(path)
        except BlockingIOError:
            return False
        return True

    async def call(self, message: Any, ends_s: float) -> Any:
        """See BaseConnection. A cancellation also closes the connection."""
        self._check_usable()
        try:
            async with _until(ends_s):
                # Nothing waits for the rest of the frame: the daemon answers only after all of it.
                self._outbox.add(self.protocol.send(message))
                self._flush()
                if not isinstance(message, m.Map | m.MapPresence):
                    return await self._receive()
                await self._readable()
                while (answer := self._read_with_descriptor()) is None:
                    await self._readable()
                return answer
        except BaseException:
            self.close()
            raise

    async def call_all(self, messages: Sequence[Any], ends_s: float) -> list[Any]:
        """See BaseConnection. A cancellation also closes the connection."""
        self._check_usable()
        try:
            async with _until(ends_s):
                self._send_all(messages)
                return in_order(messages, [await self._receive() for _ in messages])
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
        """Closes this process's end of the connection. Call it in the loop of the connection."""
        # A forked process shares the epoll set of the parent, which must keep watching.
        if self._watched and os.getpid() == self.pid:
            self._unwatch()
        super().close()

    def _report_later(self) -> None:
        self._loop.call_later(REPORT_S, self._reports_are_due)

    def _start_watching(self) -> None:
        self._loop.call_soon_threadsafe(self._add_writer)

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
        answer = self.protocol.received()
        while answer is None:
            answer = self.protocol.receive(await self._loop.sock_recv(self._sock, RECEIVE_BYTES))
        return answer


def _until(ends_s: float) -> asyncio.Timeout:
    """Ends its block with TimeoutError at a time in monotonic seconds."""
    return asyncio.timeout(max(ends_s - time.monotonic(), 0.001))


class AsyncClient(BaseClient, Awaiting):
    """A client whose calls are awaited. Belongs to one event loop."""

    def namespace(self, layout: Layout, owner: str = "", ttl_s: float = 0.0) -> AsyncNamespace:
        """Returns the blocks of one layout. Needs no daemon yet. See `Client.namespace`."""
        return AsyncNamespace(self, self._scope(layout, owner, ttl_s))

    async def close(self) -> None:
        """Closes all connections; later calls miss."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

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
        if isinstance(step, Pipeline):
            return await exchange.connection.call_all(step.messages, exchange.ends_s)
        return await AsyncConnection(self._token, self._maps).connect(self.path, exchange.ends_s)


async def _in_thread(call: Callable[[], T]) -> T:
    """Runs a copy in a thread. A cancelled caller waits for its end, because it writes to the buffer."""
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

    `keys` are one chain in prompt order: the parent of each block is the one before it.
    """
