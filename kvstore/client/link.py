"""One blocking connection: sends, receives, and drives a flow; and when to try again after a failure."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from typing import Any

from kvstore.client import flows
from kvstore.client.flows import Flow
from kvstore.client.session import Maps, Session
from kvstore.errors import UnavailableError

_RECEIVE_BYTES = 256 << 10
_BACK_OFF_S = 0.05
_BACK_OFF_MAX_S = 2.0
_LATE = 3


class Backoff:
    """When to try again, after so many failures."""

    def __init__(self) -> None:
        self._delay_s = _BACK_OFF_S
        self._until = 0.0
        self._late = 0

    def check(self) -> None:
        """Raises UnavailableError while it is too early."""
        if time.monotonic() < self._until:
            raise UnavailableError("the daemon is away", "waiting before the next attempt")

    def failed(self, error: Exception) -> None:
        """One more failure. A call that was late may have been in a hurry: only several in a row count."""
        if isinstance(error, TimeoutError | BlockingIOError):
            self._late += 1
            if self._late < _LATE:
                return
        self._until = time.monotonic() + self._delay_s * random.uniform(0.5, 1.0)
        self._delay_s = min(2 * self._delay_s, _BACK_OFF_MAX_S)

    def succeeded(self) -> None:
        """The daemon is there."""
        self._delay_s, self._until, self._late = _BACK_OFF_S, 0.0, 0


class Link:
    """One blocking connection."""

    def __init__(self, path: str, token: str, maps: Maps, ends: float) -> None:
        self.pid = os.getpid()
        self.session = Session(token, maps)
        self._send_lock = threading.Lock()
        self._timeout_s = -1.0
        self.closed = False
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
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
        """Sends a request, returns its answer. OSError (timeouts too) or RemoteProtocolError: close it."""
        self._check_process()
        self._set_timeout(ends)
        with self._send_lock:
            self._sock.sendall(self.session.send(message))
        return self._receive(ends)

    def fetch(self, message: Any, ends: float) -> tuple[Any, int]:
        """Like `call`, for an answer that brings a descriptor; -1 if it brought none."""
        self._set_timeout(ends)
        with self._send_lock:
            self._sock.sendall(self.session.send(message))
        got = -1
        while True:
            data, fds, _, _ = socket.recv_fds(self._sock, _RECEIVE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            got = fds[0] if fds else got
            if not data:
                raise ConnectionResetError("the daemon closed the connection")
            answer = self.session.receive(data)
            if answer is not None:
                return answer, got

    def _check_process(self) -> None:
        """After a fork the connection is the parent's: two processes must not read from it."""
        if os.getpid() != self.pid:
            raise ConnectionAbortedError("the connection belongs to another process")

    def post(self, message: Any) -> None:
        """Sends a message that needs no answer; does nothing in another process, or if the link is gone."""
        if os.getpid() == self.pid:
            with self._send_lock, contextlib.suppress(OSError):
                self._sock.sendall(self.session.post(message))

    def close(self) -> None:
        """Closes this process's end."""
        self.closed = True
        self._sock.close()

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


def pump(link: Link, flow: Flow, ends: float) -> Any:
    """Drives a flow to its end on a connection."""
    reply: Any = None
    failed: Exception | None = None
    try:
        while True:
            step = flow.send(reply) if failed is None else flow.throw(failed)
            failed = None
            if isinstance(step, flows.Post):
                link.post(step.message)
                reply = None
            elif isinstance(step, flows.Work):
                try:
                    reply = step.call()
                except Exception as error:
                    failed = error
            elif isinstance(step, flows.Fetch):
                reply = link.fetch(step.message, ends)
            else:
                reply = link.call(step, ends)
    except StopIteration as end:
        return end.value
