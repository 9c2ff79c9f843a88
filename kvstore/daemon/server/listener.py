"""Listening sockets: binds them, accepts connections, removes them.

Accepting is cheap, opening a connection is not. Accepted connections are queued by user and opened fairly, at
a bounded rate for each user. So many connections of one user delay neither other users nor answers.
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
from kvstore.daemon.server.peer_credentials import peer_of, uid_of
from kvstore.errors import KVStoreError, TierError
from kvstore.socket_paths import make_folder

_log = logging.getLogger(__name__)

_BACKLOG = 256
_ACCEPTED_AT_ONCE = 8
_OPENED_PER_S, _BURST = 200.0, 256.0
_QUEUED = 256
_USERS = 1024
_REST_S = 0.004
_TRY_AGAIN_S = 0.2
_PROBE_S = 2.0
_MANAGER = 1  # systemd listens for its services
_NO_ROOM = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM


class Listener:
    """Accepts connections from a listening socket until `close`, which does not close the socket.

    Queues at most `_QUEUED` accepted connections of a user. Further connections are closed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        connect: Callable[[], asyncio.BaseProtocol],
    ) -> None:
        """`connect` returns the protocol of a new connection."""
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
        """Stops accepting, and closes accepted connections that were not opened."""
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
                    self._log_shortage(error)
                    self._pause(_TRY_AGAIN_S)
                    crowded = False
                break  # other errors: no peer is waiting, or it has gone
            self._short_of_descriptors = False
            crowded |= not self._queue(peer)
        if crowded:
            self._pause(_REST_S)
        if self._opening is None and self._accepted.waiting(0):
            self._opening = self._loop.create_task(self._open_all())

    def _queue(self, peer: socket.socket) -> bool:
        """Queues a connection. Closes it and returns False if its user has too many queued."""
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
        """Opens queued connections, at most one in a round of the loop."""
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

    def _log_shortage(self, error: OSError) -> None:
        if not self._short_of_descriptors:
            self._short_of_descriptors = True
            hint = "raise the limit of open files (LimitNOFILE=)"
            _log.error("no connection can be accepted: %s; %s", error.strerror, hint)

    def _pause(self, for_s: float) -> None:
        """Stops accepting for `for_s` seconds."""
        self._loop.remove_reader(self._sock)
        self._timer = self._loop.call_later(for_s, self._loop.add_reader, self._sock, self._accept)


def listen(path: Path, mode: int, key: str = "daemon.socket") -> socket.socket:
    """Returns a listening socket bound to `path`, the value of `key`. Raises TierError if that fails."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        make_folder(path.parent)
        if path.exists():
            _remove_stale(path, key)
        old = os.umask(0o777 & ~mode)
        try:
            listener.bind(str(path))
        finally:
            os.umask(old)
        listener.listen(_BACKLOG)
    except (OSError, KVStoreError) as error:
        listener.close()
        if isinstance(error, KVStoreError):
            raise
        raise TierError(*_explained(path, key, error)) from error
    return listener


def _explained(path: Path, key: str, error: OSError) -> tuple[str, str]:
    """Returns the message and the hint for a path that cannot be used."""
    failed = f"cannot listen on {path}"
    elsewhere = f"set {key} to a path in a folder that this user may write"
    if isinstance(error, PermissionError):
        what = f"permission denied, uid {os.geteuid()} may not write in {_existing(path.parent)}"
        return f"{failed}: {what}", f"{elsewhere}, or run as the owner of that folder"
    if isinstance(error, NotADirectoryError | FileExistsError):
        return f"{failed}: {_existing(path.parent)} is a file, not a folder", elsewhere
    if isinstance(error, FileNotFoundError):
        return f"{failed}: the folder {path.parent} does not exist and cannot be made", elsewhere
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{failed}: the disk is full", f"make room: df -h {_existing(path.parent)}; or set {key}"
    return f"{failed}: {error.strerror or error}", elsewhere


def _existing(folder: Path) -> Path:
    """Returns the nearest existing path, `folder` itself or one above it."""
    return next((each for each in (folder, *folder.absolute().parents) if os.path.lexists(each)), folder)


def identity(path: Path) -> tuple[int, int] | None:
    """Returns device and inode of a path, None if it does not exist."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def unlink_own(path: Path, made: tuple[int, int] | None) -> None:
    """Removes a socket that has the `identity` of `made`: another daemon may have replaced it."""
    if made is not None and identity(path) == made:
        path.unlink(missing_ok=True)


def _remove_stale(path: Path, key: str) -> None:
    """Removes a socket without a server. Raises TierError if it has one, or if `path` is no socket."""
    elsewhere = f"set {key} to another path"
    if not path.is_socket():
        raise TierError(f"{path} exists and is not a socket", f"{elsewhere}, or move that file: ls -l {path}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except PermissionError as error:
            owner, uid = path.lstat().st_uid, os.geteuid()
            why = f"{path} is a socket of uid {owner}, and uid {uid} may not connect to it"
            raise TierError(why, f"{elsewhere}, or run as that user") from error
        except OSError as error:
            why = f"{path} is a socket that does not answer: {error.strerror or error}"
            raise TierError(why, f"{elsewhere}, or stop its process: ss -xlp src {path}") from error
        pid = peer_of(probe.fileno()).pid
    stop = "systemctl stop kvstore.socket kvstore" if pid == _MANAGER else f"kill {pid}"
    raise TierError(f"another process serves {path}: pid {pid}", f"stop it: `{stop}`; or {elsewhere}")
