"""Connections: what all of them share, the blocking one, and when to try again after a failure."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import socket
import struct
import threading
import time
from typing import Any

from kvstore.client import calls
from kvstore.client.calls import Flow
from kvstore.client.protocol import POST_WAIT_S, Maps, ProtocolState
from kvstore.errors import RemoteProtocolError, UnavailableError, printable

_log = logging.getLogger(__name__)

_RECEIVE_BYTES = 256 << 10
_BACK_OFF_S = 0.05
_BACK_OFF_MAX_S = 2.0
_LATE = 3
_WATCH_EVERY_S = 0.05


class Backoff:
    """When to try again, after so many failures."""

    def __init__(self) -> None:
        self._delay_s = _BACK_OFF_S
        self._until = 0.0
        self._late = 0
        self._refused = False

    def check(self) -> None:
        """Raises UnavailableError while it is too early."""
        if time.monotonic() < self._until:
            raise UnavailableError("the daemon is away", "waiting before the next attempt")

    def failed(self, error: Exception) -> None:
        """One more failure. A call that was late may have been in a hurry: only several in a row count.

        A daemon that refuses this client will do so again: that is logged, once until it is there again.
        """
        if isinstance(error, RemoteProtocolError) and not self._refused:
            self._refused = True
            _log.warning("nothing is cached, the daemon refuses this client: %s", printable(str(error)))
        if isinstance(error, TimeoutError | BlockingIOError):
            self._late += 1
            if self._late < _LATE:
                return
        self._until = time.monotonic() + self._delay_s * random.uniform(0.5, 1.0)
        self._delay_s = min(2 * self._delay_s, _BACK_OFF_MAX_S)

    def succeeded(self) -> None:
        """The daemon is there."""
        self._delay_s, self._until, self._late = _BACK_OFF_S, 0.0, 0
        self._refused = False


class BaseConnection:
    """What blocking and asynchronous connections share: the socket, what is sent over it, and its end.

    `post` never waits. What the socket does not take stays in the session's outbox and goes out before the
    next request, or as soon as the daemon reads again: `_watch` sees to that.
    """

    def __init__(self, token: str, maps: Maps, flags: int = 0) -> None:
        self.pid = os.getpid()
        self.closed = False
        self.session = ProtocolState(token, maps)
        self._outbox = self.session.outbox
        self._sending = threading.Lock()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | flags)

    def post(self, message: Any) -> None:
        """Sends a message that needs no answer, at once or as soon as the daemon reads; from any thread.

        Does nothing in another process, or if the connection has ended.
        """
        if self.closed or os.getpid() != self.pid:
            return
        if self._outbox.post(self.session.post(message), time.monotonic()):
            self._flush()
        else:
            self._give_up()

    def ended(self) -> bool:
        """Whether the connection has ended, on either side. Its leases have ended with it."""
        if self.closed:
            return True
        try:
            return not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Closes this process's end."""
        self.closed = True
        # A post of another thread must not reach a descriptor that is somebody else's by then.
        with self._sending:
            self._sock.close()
        self._outbox.clear()

    def _check_usable(self) -> None:
        """Raises ConnectionError if the connection has ended here, or is another process's.

        After a fork it is the parent's: two processes must not read from it.
        """
        if os.getpid() != self.pid:
            raise ConnectionAbortedError("the connection belongs to another process")
        if self.closed:
            raise ConnectionResetError("the connection was closed")

    def _flush(self) -> None:
        """Sends what waits as far as the socket takes it at once, and has the rest watched."""
        # Without the lock there is nothing to do: its holder looks at the outbox again after it.
        while self._outbox and self._sending.acquire(blocking=False):
            try:
                if not self._push():
                    self._watch()
                    return
            finally:
                self._sending.release()

    def _push(self) -> bool:
        """Sends without waiting, under the lock; False if something is left."""
        try:
            while (head := self._outbox.head()) is not None:
                self._outbox.sent(self._sock.send(head, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False
        except OSError:
            self._give_up()
        return True

    def _watch(self) -> None:
        """Sees to it that what is left goes out when the daemon reads again. Called under the lock."""
        raise NotImplementedError

    def _is_late(self) -> bool:
        return self._outbox.waited_s(time.monotonic()) >= POST_WAIT_S

    def _give_up(self) -> None:
        """Ends the connection, from any thread: the daemon ends its leases then."""
        self.closed = True
        self._outbox.clear()
        # The descriptor is closed by the one who uses it.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


class Connection(BaseConnection):
    """One blocking connection."""

    def __init__(self, path: str, token: str, maps: Maps, ends: float) -> None:
        super().__init__(token, maps)
        self._timeout_s = -1.0
        self._watched = False
        try:
            self._set_timeout(ends)
            self._sock.connect(path)
            # A daemon that turns us away says why before it hangs up: read that, whoever was faster.
            with contextlib.suppress(BrokenPipeError):
                self._sock.sendall(self.session.hello())
            self.session.welcome(self._receive(ends))
        except BaseException:
            self._sock.close()
            raise

    def call(self, message: Any, ends: float) -> Any:
        """Sends a request, returns its answer. Any exception closes the connection."""
        self._check_usable()
        try:
            self._send(self.session.send(message), ends)
            return self._receive(ends)
        except BaseException:
            self.close()
            raise

    def fetch(self, message: Any, ends: float) -> tuple[Any, int]:
        """Like `call`, for an answer that brings a descriptor; -1 if it brought none."""
        self._check_usable()
        try:
            self._send(self.session.send(message), ends)
            got = -1
            while True:
                data, fds, _, _ = socket.recv_fds(self._sock, _RECEIVE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
                got = fds[0] if fds else got
                if not data:
                    raise ConnectionResetError("the daemon closed the connection")
                answer = self.session.receive(data)
                if answer is not None:
                    return answer, got
        except BaseException:
            self.close()
            raise

    def _send(self, frame: bytes, ends: float) -> None:
        """Sends what waits, then a frame, until the deadline."""
        self._set_timeout(ends)
        self._outbox.add(frame)
        with self._sending:
            while (head := self._outbox.head()) is not None:
                sent = self._sock.send(head)
                self._outbox.sent(sent)
                if sent < len(head):
                    self._set_timeout(ends)
        self._flush()

    def _watch(self) -> None:
        if self._watched:
            return
        self._watched = True
        try:
            threading.Thread(
                target=self._deliver, args=(self._sock.fileno(),), name="kvstore-posts", daemon=True
            ).start()
        except RuntimeError:
            # The interpreter ends: nobody is left who could send.
            self._give_up()

    def _deliver(self, descriptor: int) -> None:
        """Sends what waits whenever the daemon reads, in a thread of its own that ends with the last post."""
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

    def _receive(self, ends: float) -> Any:
        while True:
            data = self._sock.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("the daemon closed the connection")
            answer = self.session.receive(data)
            if answer is not None:
                return answer
            self._set_timeout(ends)

    def _set_timeout(self, ends: float) -> None:
        left = ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        # A blocking socket with a kernel timeout costs one system call a message; Python's own two more.
        # Setting it costs one too, so a timeout that is nearly right is left alone.
        if not 0.9 * left <= self._timeout_s <= 1.05 * left:
            self._timeout_s = left
            value = struct.pack("ll", int(left), int(left % 1 * 1e6) or 1)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def pump(link: Connection, flow: Flow, ends: float) -> Any:
    """Drives a flow to its end on a connection."""
    reply: Any = None
    failed: Exception | None = None
    try:
        while True:
            step = flow.send(reply) if failed is None else flow.throw(failed)
            failed = None
            if isinstance(step, calls.Post):
                link.post(step.message)
                reply = None
            elif isinstance(step, calls.Work):
                try:
                    reply = step.call()
                except Exception as error:
                    failed = error
            elif isinstance(step, calls.Fetch):
                reply = link.fetch(step.message, ends)
            else:
                reply = link.call(step, ends)
    except StopIteration as end:
        return end.value
