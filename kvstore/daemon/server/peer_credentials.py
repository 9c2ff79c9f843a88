"""The kernel's credentials of the peer of a Unix socket."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from array import array
from dataclasses import dataclass

_SO_PEERGROUPS = 59
_CREDENTIALS = struct.Struct("iII")
_MOST_BYTES = 1024  # the limit of Python's getsockopt: 256 groups


@dataclass(frozen=True, slots=True)
class Peer:
    """User and groups of a process at the time when it connected, the primary group first."""

    uid: int
    gids: tuple[int, ...]
    pid: int = 0

    def pidfd(self) -> int:
        """Returns a descriptor of the process that polls readable once it has ended. The caller closes it.

        Raises OSError if it has ended, or if its pid namespace hides its number.
        """
        if not self.pid:
            raise OSError(errno.ESRCH, "the peer's process can't be told from here: share the pid namespace")
        return os.pidfd_open(self.pid)


def uid_of(sock: socket.socket) -> int:
    """Returns the user of the peer of a connected Unix socket."""
    return _credentials(sock)[1]


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Returns pid, uid and gid."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def peer_of(fd: int) -> Peer:
    """Returns the peer of a connected Unix socket, with at most 256 groups where the kernel lists them."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        pid, uid, gid = _credentials(sock)
        more = array("I")
        with contextlib.suppress(OSError):
            more.frombytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_BYTES))
    return Peer(uid, (gid, *(other for other in more if other != gid)), pid)
