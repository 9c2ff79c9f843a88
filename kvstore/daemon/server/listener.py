"""Listening sockets: made, accepted from, removed.

Accepting is cheap, opening a connection is not. Accepted connections are opened in turns of their users, each
user's at a bounded rate, so that a crowd that connects delays neither another user nor an answer.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from kvstore.core.queues.fair_queue import FairQueue
from kvstore.daemon.server.peer_credentials import uid_of
from kvstore.errors import KVStoreError, TierError

_log = logging.getLogger(__name__)

_BACKLOG = 256
_ACCEPTED_AT_ONCE = 8
_OPENED_PER_S, _BURST = 200.0, 256.0
_QUEUED = 256
_USERS = 1024
_REST_S = 0.004
_TRY_AGAIN_S = 0.2
_NO_ROOM = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM


class Listener:
    """Accepts connections from a listening socket until it is closed; the socket stays open.

    A user has at most `_QUEUED` connections that wait to be opened; one more is closed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        connect: Callable[[], asyncio.BaseProtocol],
    ) -> None:
        """`connect` makes the protocol of each new connection."""
        self._loop = loop
        self._sock = sock
        self._connect = connect
        self._accepted: FairQueue[socket.socket] = FairQueue((1.0,), 1, _QUEUED, 1)
        self._users: set[int] = set()
        self._opening: asyncio.Task[None] | None = None
        self._short_of_descriptors = False
        self._timer: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        loop.add_reader(sock, self._accept)

    def close(self) -> None:
        """Accepts nothing more, and closes what has been accepted and not opened."""
        self._loop.remove_reader(self._sock)
        if self._timer is not None:
            self._timer.cancel()
        if self._opening is not None:
            self._opening.cancel()
        for peer in self._accepted.discard(lambda _: True):
            peer.close()

    def _accept(self) -> None:
        crowded = False
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                peer, _ = self._sock.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._tell(error)
                    self._pause(_TRY_AGAIN_S)
                    crowded = False
                break  # else nobody is there, or has gone again
            self._short_of_descriptors = False
            crowded |= not self._queue(peer)
        if crowded:
            self._pause(_REST_S)
        if self._opening is None and self._accepted.waiting(0):
            self._opening = self._loop.create_task(self._open_all())

    def _queue(self, peer: socket.socket) -> bool:
        """Has a connection wait for its turn; closes it and returns False if too many of its user wait."""
        uid = uid_of(peer)
        if uid not in self._users:
            while len(self._users) >= _USERS:
                self._accepted.forget(self._users.pop())
            self._users.add(uid)
            self._accepted.set(uid, 1.0, _OPENED_PER_S, _BURST)
        queued = self._accepted.put(uid, 0, 1, peer)
        if not queued:
            peer.close()
        return queued

    async def _open_all(self) -> None:
        """Opens what has been accepted, one in a round of the loop at the most."""
        while self._accepted.waiting(0):
            now = self._loop.time()
            taken = self._accepted.take(now)
            if taken is None:
                await asyncio.sleep(self._accepted.ready_at(now) - now)
                continue
            try:
                await self._loop.connect_accepted_socket(self._connect, taken[3])
            except Exception as error:
                taken[3].close()
                _log.warning("a connection could not be opened: %r", error)
        self._opening = None

    def _tell(self, error: OSError) -> None:
        if not self._short_of_descriptors:
            self._short_of_descriptors = True
            hint = "raise the limit of open files (LimitNOFILE=)"
            _log.error("no connection can be accepted: %s; %s", error.strerror, hint)

    def _pause(self, for_s: float) -> None:
        """Nothing is accepted for a moment, though the socket is readable."""
        self._loop.remove_reader(self._sock)
        self._timer = self._loop.call_later(for_s, self._loop.add_reader, self._sock, self._accept)


def listen(path: Path, mode: int) -> socket.socket:
    """A bound, listening socket. TierError names the path if it can't be had or another daemon has it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _remove_stale(path)
        old = os.umask(0o777 & ~mode)
        try:
            listener.bind(str(path))
        finally:
            os.umask(old)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise TierError(f"cannot listen on {path}: {error.strerror or error}", "set daemon.socket") from error
    except KVStoreError:
        listener.close()
        raise
    return listener


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of what is at a path; None if there is nothing."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def unlink_own(path: Path, made: tuple[int, int] | None) -> None:
    """Removes a socket of that `identity`: by now, another daemon's may be at its path."""
    if made is not None and identity(path) == made:
        path.unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    """Removes a socket that nobody serves. TierError if somebody does, or if it is no socket."""
    if not path.is_socket():
        raise TierError(f"{path} exists and is no socket", "set daemon.socket to another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise TierError(f"cannot tell who serves {path}: {error.strerror}") from error
    raise TierError(f"another daemon serves {path}", "stop it, or set daemon.socket to another path")
