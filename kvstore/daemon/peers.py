"""Who the kernel says is at the other end of a Unix socket."""

from __future__ import annotations

import contextlib
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


def peer_of(fd: int) -> Peer:
    """The peer of a connected Unix socket. Supplementary groups only from kernels that tell, 256 at most."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, gid = _CREDENTIALS.unpack(raw)
        more = array("I")
        with contextlib.suppress(OSError):
            more.frombytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_BYTES))
    return Peer(uid, (gid, *(other for other in more if other != gid)))
