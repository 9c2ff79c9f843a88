"""Default places of the Unix sockets. Daemon, clients and commands find each other here without options.

Root and the service's user have `/run/kvstore`. Other users have a private folder of their own.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvstore.errors import TierError

SYSTEM_FOLDER = Path("/run/kvstore")
"""Folder of the sockets of the node's daemon."""

DAEMON_SOCKET = "kvstore.sock"
ADMIN_SOCKET = "admin.sock"

_SHARED_FOLDER = Path("/tmp")  # `make_folder` and `find_daemon` check the owner
_OTHERS_WRITE = 0o022


def default_folder() -> Path:
    """Returns the folder of this user's sockets. It may not exist.

    `/run/kvstore` for root and for users that may write there; otherwise `$XDG_RUNTIME_DIR/kvstore`, or
    `/tmp/kvstore-UID` if that variable names no folder of this user.
    """
    if os.geteuid() == 0 or os.access(SYSTEM_FOLDER, os.W_OK | os.X_OK, effective_ids=True):
        return SYSTEM_FOLDER
    given = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    # `su` keeps the variable of the user before.
    if given.is_absolute() and _belongs_to_us(given):
        return given / "kvstore"
    return _SHARED_FOLDER / f"kvstore-{os.geteuid()}"


def daemon_socket() -> Path:
    """Returns the path where this user's daemon listens by default."""
    return default_folder() / DAEMON_SOCKET


def admin_socket() -> Path:
    """Returns the path where this user's REST interface listens by default."""
    return default_folder() / ADMIN_SOCKET


def find_daemon() -> Path:
    """Returns the default path for clients: this user's socket, or the node's if only that one exists.

    Returns the node's path as well if another user owns or may write the folder of this user's socket.
    """
    own, system = daemon_socket(), SYSTEM_FOLDER / DAEMON_SOCKET
    if not _belongs_to_us(own.parent):
        return system
    return own if os.path.lexists(own) or not os.path.lexists(system) else system


def make_folder(folder: Path) -> None:
    """Makes the folder of a socket. Raises OSError, and TierError for an unsafe one.

    This user's own default folder gets mode 0700, and must not belong to or be writable by other users.
    """
    if folder == SYSTEM_FOLDER or folder != default_folder():
        folder.mkdir(parents=True, exist_ok=True)
        return
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not _belongs_to_us(folder):
            raise TierError(
                f"{folder} is no folder that only this user may write",
                "another user may have made it: remove it, or set XDG_RUNTIME_DIR or daemon.socket",
            ) from None


def _belongs_to_us(folder: Path) -> bool:
    """Returns whether it is a folder, not a link, that this user owns and no other user may write."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return ours and not found.st_mode & _OTHERS_WRITE
