"""Non-blocking sockets as generators, which run concurrently on the caller's thread until a deadline.

After `run` no generator executes, so no memory of its caller is read or written.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeAlias, TypeVar

from kvstore.tiers.network.resolver import Address, SocketAddress

_CHECK_STOPPED_EVERY_S = 0.1

_T = TypeVar("_T")
Steps: TypeAlias = Generator[tuple[socket.socket, int], int, _T]
"""Yields a socket and the events of `select.poll` that it waits for. Receives the events that occurred."""


def connect(
    address: Address, addresses: Sequence[SocketAddress], tls: ssl.SSLContext | None
) -> Steps[socket.socket]:
    """Connects to the first of `addresses` that accepts. Completes the TLS handshake. Raises OSError."""
    code = errno.EADDRNOTAVAIL
    for family, target in addresses:
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            if family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = connection.connect_ex(target)
            if code == errno.EINPROGRESS:
                yield connection, select.POLLOUT
                code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not code and tls is None:
                return connection
            if not code and tls is not None:
                secured = tls.wrap_socket(
                    connection, server_hostname=address.host, do_handshake_on_connect=False
                )
                connection = secured
                yield from retry(secured, secured.do_handshake, select.POLLIN)
                return secured
        except BaseException:
            connection.close()
            raise
        connection.close()
    raise OSError(code, os.strerror(code))


def retry(connection: socket.socket, operation: Callable[[], _T], events: int) -> Steps[_T]:
    """Repeats an operation until it does not block. `events`: events that it waits for without TLS."""
    while True:
        try:
            return operation()
        except BlockingIOError:
            yield connection, events
        except ssl.SSLWantReadError:
            yield connection, select.POLLIN
        except ssl.SSLWantWriteError:
            yield connection, select.POLLOUT


def run(
    jobs: Iterable[Steps[None]], ends: float, stopped: Callable[[], bool], at_once: int
) -> Iterator[Steps[None]]:
    """Runs up to `at_once` jobs concurrently. Yields each job when it has ended.

    Closes the other jobs at `ends`, or within 100 ms once `stopped` returns True.
    """
    unstarted = iter(jobs)
    running: dict[Steps[None], tuple[socket.socket, int]] = {}
    try:
        while True:
            while new := list(islice(unstarted, at_once - len(running))):
                for job in new:
                    if (waits := next(job, None)) is None:
                        yield job
                    else:
                        running[job] = waits
            left_s = ends - time.monotonic()
            if not running or left_s <= 0 or stopped():
                return
            for job, events in _wait(running, min(left_s, _CHECK_STOPPED_EVERY_S)):
                try:
                    running[job] = job.send(events)
                except StopIteration:
                    del running[job]
                    yield job
    finally:
        for job in running:
            job.close()


def _wait(
    running: dict[Steps[None], tuple[socket.socket, int]], wait_s: float
) -> list[tuple[Steps[None], int]]:
    """Waits until events occur. Returns the jobs that wait for them."""
    poll, pending = select.poll(), set[int]()
    for connection, events in running.values():
        poll.register(connection, events)
        # TLS may have received bytes that a poll does not see.
        if events & select.POLLIN and isinstance(connection, ssl.SSLSocket) and connection.pending():
            pending.add(connection.fileno())
    ready = dict(poll.poll(0 if pending else wait_s * 1000))
    for number in pending:
        ready[number] = ready.get(number, 0) | select.POLLIN
    waiting = [(job, ready.get(connection.fileno())) for job, (connection, _) in running.items()]
    return [(job, events) for job, events in waiting if events is not None]
