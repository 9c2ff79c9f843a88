"""Who the kernel says is at the other end of a Unix socket."""

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
_MOST_BYTES = 1024  # what Python's getsockopt takes: 256 groups


@dataclass(frozen=True, slots=True)
class Peer:
    """A process when it connected: its user and its groups, the primary one first."""

    uid: int
    gids: tuple[int, ...]
    pid: int = 0

    def pidfd(self) -> int:
        """A descriptor of the process, which polls readable when that has ended; the caller closes it.

        OSError if it has, or is in a namespace from which its number can't be told.
        """
        if not self.pid:
            raise OSError(errno.ESRCH, "the peer's process can't be told from here: share the pid namespace")
        return os.pidfd_open(self.pid)


def uid_of(sock: socket.socket) -> int:
    """The user of the process at the other end of a connected Unix socket."""
    return _credentials(sock)[1]


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """pid, uid, gid."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def peer_of(fd: int) -> Peer:
    """The peer of a connected Unix socket. Supplementary groups only from kernels that tell, 256 at most."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        pid, uid, gid = _credentials(sock)
        more = array("I")
        with contextlib.suppress(OSError):
            more.frombytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_BYTES))
    return Peer(uid, (gid, *(other for other in more if other != gid)), pid)
