"""Connections to the daemon: the part that blocking and asyncio connections share, and the back-off.

Not covered: the wait of a request for its answer (`sync`, `aio`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from kvstore.client.extents import Maps
from kvstore.client.protocol import POST_WAIT_S, ProtocolState
from kvstore.errors import RemoteProtocolError, UnavailableError, printable
from kvstore.types import Key

_log = logging.getLogger(__name__)

RECEIVE_BYTES = 256 << 10
_BACK_OFF_S = 0.05
_BACK_OFF_MAX_S = 2.0
_LATE = 3
_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
REPORT_S = 0.25
"""Longest time (s) that reports of lookups and reads wait for another message."""


def in_order(messages: Sequence[Any], answers: Iterable[Any]) -> list[Any]:
    """Returns the answers in the order of their requests. Raises RemoteProtocolError if one is missing."""
    by_id = {answer.id: answer for answer in answers}
    if by_id.keys() != {message.id for message in messages}:
        raise RemoteProtocolError("the daemon answered other requests than were sent")
    return [by_id[message.id] for message in messages]


class Backoff:
    """Delays reconnection after failures, from 50 ms to 2 s. `logs`: refusals, which no caller is told."""

    def __init__(self, logs: bool = True) -> None:
        self._logs = logs
        self.succeeded()

    def succeeded(self) -> None:
        """Resets the delay."""
        self._delay_s, self._until, self._late = _BACK_OFF_S, 0.0, 0
        self._refused = False

    def check(self) -> None:
        """Raises UnavailableError until the delay is over."""
        if time.monotonic() < self._until:
            raise UnavailableError("the daemon is away", "waiting before the next attempt")

    def failed(self, error: Exception) -> None:
        """Delays reconnection. Late calls do so only from the third in a row on: a deadline may be short.

        Logs the first refusal since the last success: the daemon will refuse the client again.
        """
        if isinstance(error, RemoteProtocolError) and not self._refused and self._logs:
            self._refused = True
            _log.warning("nothing is cached, the daemon refuses this client: %s", printable(str(error)))
        if isinstance(error, TimeoutError | BlockingIOError):
            self._late += 1
            if self._late < _LATE:
                return
        self._until = time.monotonic() + self._delay_s * random.uniform(0.5, 1.0)
        self._delay_s = min(2 * self._delay_s, _BACK_OFF_MAX_S)


class BaseConnection:
    """The part that blocking and asyncio connections share: the socket, posts and closing.

    `post` never waits. Bytes that the socket does not take stay in the outbox. They are sent before the next
    request, or by `_watch` as soon as the daemon reads again.
    """

    def __init__(self, token: str, maps: Maps, flags: int = 0) -> None:
        self.pid = os.getpid()
        self.closed = False
        self.protocol = ProtocolState(token, maps)
        self._outbox = self.protocol.outbox
        self._descriptor = -1
        self._watched = False
        self._timed = False
        self._sending = threading.Lock()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | flags)

    def call(self, message: Any, ends_s: float) -> Any:
        """Sends a request; returns its answer, or a coroutine of it. Any exception closes the connection.

        `ends_s` is the deadline in monotonic seconds. Raises TimeoutError when it has passed. The answer to
        a Map may bring a descriptor, see `take_descriptor`.
        """
        raise NotImplementedError

    def call_all(self, messages: Sequence[Any], ends_s: float) -> Any:
        """Sends all requests, then returns the list of their answers, or a coroutine of it.

        The daemon may answer them in any order. See `call` for failures.
        """
        raise NotImplementedError

    def _send_all(self, messages: Sequence[Any]) -> None:
        """Sends requests without waiting. What the socket does not take is sent while answers are read.

        The daemon need not read on before its answers are read.
        """
        for message in messages:
            self._outbox.add(self.protocol.send(message))
        self._flush()

    def take_descriptor(self) -> int:
        """Returns the descriptor that the last answer has brought, -1 without one. The caller closes it."""
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def post(self, message: Any) -> None:
        """Sends a message without an answer, at once or as soon as the daemon reads; from any thread.

        Does nothing in a forked process, or if the connection has ended.
        """
        if not self.closed and os.getpid() == self.pid:
            self._post(self.protocol.post(message))

    @property
    def lags(self) -> bool:
        """Whether the daemon has not taken all messages yet."""
        return bool(self._outbox)

    def report(self, namespace: int, asks: int, tiers: bytes) -> None:
        """Reports a lookup that needed no request: with the next message, at latest after `REPORT_S`.

        `asks`: blocks of its prompt, 0 if they are counted already. `tiers`: those of newly found blocks.
        """
        if not asks and not tiers:
            return
        self.protocol.reports.add_lookup(namespace, asks, tiers)
        self._report_soon()

    def report_read(self, namespace: int, keys: Sequence[Key], key_bytes: int) -> None:
        """Reports blocks that were read without a request, as `report` does: soon if there are many."""
        if self.protocol.reports.add_read(namespace, keys, key_bytes):
            self._report_soon()
        else:
            self.send_reports()

    def _report_soon(self) -> None:
        # The timer runs on when reports are sent earlier: a thread for each would cost more than a read.
        if not self._timed:
            self._timed = True
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
                self._report_later()

    def send_reports(self) -> None:
        """Sends the waiting reports."""
        if not self.closed and os.getpid() == self.pid and (frames := self.protocol.reported()):
            self._post(frames)

    def _reports_are_due(self) -> None:
        self._timed = False
        self.send_reports()

    def _report_later(self) -> None:
        """Calls `_reports_are_due` after `REPORT_S`."""
        raise NotImplementedError

    def _post(self, frame: bytes) -> None:
        if self._outbox.post(frame, time.monotonic()):
            self._flush()
        else:
            self._give_up()

    def ended(self) -> bool:
        """Returns whether the connection has ended, on either side. Its leases have ended with it."""
        if self.closed:
            return True
        try:
            return not self._sock.recv(1, _PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Closes this process's end of the connection."""
        self.closed = True
        # Another thread must not post to the descriptor after the kernel has reused it.
        with self._sending:
            self._sock.close()
        self._outbox.clear()
        if (descriptor := self.take_descriptor()) >= 0:
            os.close(descriptor)

    def _check_usable(self) -> None:
        """Raises ConnectionError if the connection was closed, or belongs to the parent of this process."""
        if os.getpid() != self.pid:
            raise ConnectionAbortedError("the connection belongs to another process")
        if self.closed:
            raise ConnectionResetError("the connection was closed")

    def _read_with_descriptor(self) -> Any:
        """Receives once; returns the answer if it is complete. Keeps a descriptor for `take_descriptor`."""
        data, descriptors, _, _ = socket.recv_fds(self._sock, RECEIVE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if descriptors:
            self._descriptor = descriptors[0]
        return self.protocol.receive(data)

    def _flush(self) -> None:
        """Sends the waiting frames that the socket takes at once; `_watch` sends the rest."""
        # The holder of the lock checks the outbox again after releasing it.
        while self._outbox and self._sending.acquire(blocking=False):
            try:
                if not self._push():
                    self._watch()
                    return
            finally:
                self._sending.release()

    def _push(self) -> bool:
        """Sends without waiting; returns False if frames are left. The caller holds the lock."""
        try:
            while (head := self._outbox.head()) is not None:
                self._outbox.sent(self._sock.send(head, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False
        except OSError:
            self._give_up()
        return True

    def _watch(self) -> None:
        """Sends waiting frames when the daemon reads again. The caller holds the lock."""
        if self._watched:
            return
        self._watched = True
        try:
            self._start_watching()
        except RuntimeError:
            # The interpreter is shutting down, or the loop is closed: no frames are sent any more.
            self._give_up()

    def _start_watching(self) -> None:
        raise NotImplementedError

    def _is_late(self) -> bool:
        return self._outbox.waited_s(time.monotonic()) >= POST_WAIT_S

    def _give_up(self) -> None:
        """Ends the connection, from any thread. The daemon then ends its leases."""
        self.closed = True
        self._outbox.clear()
        # Only `close` closes the descriptor: another thread may be using it.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
