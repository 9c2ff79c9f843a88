"""The blocking client: thread-safe, with a deadline on every call and a miss whenever the daemon is away.

Each call has a connection of its own, so a slow call never delays another thread. A forked process opens its
own connections. Reconnecting backs off from 50 ms to 2 s; calls in between miss at once.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, Self

from kvstore.client.base import BaseClient
from kvstore.client.calls.call import Blocking, Exchange, Flow, Pipeline, Step, Work
from kvstore.client.calls.namespace import NamespaceCalls
from kvstore.client.connection import RECEIVE_BYTES, REPORT_S, BaseConnection, in_order
from kvstore.client.extents import Maps
from kvstore.types import Layout
from kvstore.wire import messages as m

_WATCH_EVERY_S = 0.05


class Connection(BaseConnection):
    """One blocking connection."""

    def __init__(self, path: str, token: str, maps: Maps, ends_s: float) -> None:
        super().__init__(token, maps)
        self._timeout_s = -1.0
        try:
            self._set_timeout(ends_s)
            self._sock.connect(path)
            # A daemon that refuses the client sends its reason before it hangs up: read the answer.
            with contextlib.suppress(BrokenPipeError):
                self._sock.sendall(self.protocol.hello())
            self.protocol.welcome(self._receive(ends_s))
        except BaseException:
            self._sock.close()
            raise

    def call(self, message: Any, ends_s: float) -> Any:
        """See BaseConnection."""
        self._check_usable()
        try:
            self._send(self.protocol.send(message), ends_s)
            if not isinstance(message, m.Map | m.MapPresence):
                return self._receive(ends_s)
            while (answer := self._read_with_descriptor()) is None:
                self._set_timeout(ends_s)
            return answer
        except BaseException:
            self.close()
            raise

    def call_all(self, messages: Sequence[Any], ends_s: float) -> list[Any]:
        """See BaseConnection."""
        self._check_usable()
        try:
            self._send_all(messages)
            return in_order(messages, [self._receive(ends_s) for _ in messages])
        except BaseException:
            self.close()
            raise

    def _send(self, frame: bytes, ends_s: float) -> None:
        """Sends waiting frames, then this one, until the deadline."""
        self._set_timeout(ends_s)
        self._outbox.add(frame)
        with self._sending:
            while (head := self._outbox.head()) is not None:
                sent = self._sock.send(head)
                self._outbox.sent(sent)
                if sent < len(head):
                    self._set_timeout(ends_s)
        self._flush()

    def _report_later(self) -> None:
        timer = threading.Timer(REPORT_S, self._reports_are_due)
        timer.daemon = True
        timer.start()

    def _start_watching(self) -> None:
        descriptor = self._sock.fileno()
        threading.Thread(target=self._deliver, args=(descriptor,), name="kvstore-posts", daemon=True).start()

    def _deliver(self, descriptor: int) -> None:
        """Sends waiting frames whenever the daemon reads. Runs in a thread that ends after the last frame."""
        writable = select.poll()
        writable.register(descriptor, select.POLLOUT)
        while True:
            if self._is_late():
                self._give_up()
            writable.poll(1000 * _WATCH_EVERY_S)
            if self._sending.acquire(timeout=_WATCH_EVERY_S):
                try:
                    if self.closed or self._push():
                        self._watched = False
                        break
                finally:
                    self._sending.release()
        self._flush()

    def _receive(self, ends_s: float) -> Any:
        answer = self.protocol.received()
        while answer is None:
            self._set_timeout(ends_s)
            answer = self.protocol.receive(self._sock.recv(RECEIVE_BYTES))
        return answer

    def _set_timeout(self, ends_s: float) -> None:
        left = ends_s - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        # A message costs one system call with a timeout of the kernel, three with Python's. Setting the
        # timeout costs one more, so a nearly right timeout is not set again.
        if not 0.9 * left <= self._timeout_s <= 1.05 * left:
            self._timeout_s = left
            value = struct.pack("ll", int(left), int(left % 1 * 1e6) or 1)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


class Client(BaseClient, Blocking):
    """A blocking client. Thread-safe; every call has a connection of its own."""

    def namespace(self, layout: Layout, owner: str = "", ttl_s: float = 0.0) -> Namespace:
        """Returns the blocks of one layout. Needs no daemon yet.

        `owner`: the tenant that owns the blocks, "" for the client's own. Another tenant's blocks can be read
        while that tenant publishes them to this one. Blocks expire `ttl_s` seconds after they were stored
        (0: as configured).
        """
        return Namespace(self, self._scope(layout, owner, ttl_s))

    def close(self) -> None:
        """Closes all connections; later calls miss."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drive(self, exchange: Exchange, flow: Flow[Any]) -> Any:
        try:
            step = next(flow)
            while True:
                try:
                    reply = self._reply(exchange, step)
                except BaseException as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(reply)
        except StopIteration as end:
            return end.value

    def _reply(self, exchange: Exchange, step: Any) -> Any:
        if not isinstance(step, Step):
            return exchange.connection.call(step, exchange.ends_s)
        if isinstance(step, Work):
            return step.call()
        if isinstance(step, Pipeline):
            return exchange.connection.call_all(step.messages, exchange.ends_s)
        return self._connect(exchange.ends_s)

    def _connect(self, ends_s: float) -> Connection:
        return Connection(self.path, self._token, self._maps, ends_s)


class Namespace(NamespaceCalls, Blocking):
    """The blocks of one layout. Thread-safe. Calls raise only MisuseError, unless strict.

    `keys` are one chain in prompt order: the parent of each block is the one before it.
    """
