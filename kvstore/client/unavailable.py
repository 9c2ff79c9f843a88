"""Explains why the daemon did not answer: the cause in plain words, and the next command."""

from __future__ import annotations

import os
import stat

from kvstore.errors import RemoteProtocolError, UnavailableError

_NAME_IT = "KVSTORE_SOCKET or --socket names another socket"
_START = f"start the daemon: `kvstore serve`; {_NAME_IT}"


def unavailable(path: str, error: Exception) -> UnavailableError:
    """Returns the error of a client of the socket at `path` after a failed connection or exchange."""
    if isinstance(error, RemoteProtocolError):
        made = UnavailableError(f"the daemon at {path} refuses: {error.message}", error.hint)
    else:
        why, hint = _explained(path, error)
        made = UnavailableError(f"no answer from the daemon at {path}: {why}", hint)
    made.__cause__ = error
    return made


def _explained(path: str, error: Exception) -> tuple[str, str]:
    if isinstance(error, FileNotFoundError):
        return "this socket does not exist", _START
    if isinstance(error, NotADirectoryError):
        return "a part of this path is a file, not a folder", _NAME_IT
    if isinstance(error, ConnectionRefusedError):
        if not _is_socket(path):
            return "this file is not a socket", _NAME_IT
        return "no process listens on this socket, the daemon has ended", _START
    if isinstance(error, PermissionError):
        return _denied(path)
    if isinstance(error, TimeoutError | BlockingIOError):
        return (
            "the deadline has passed",
            "the daemon starts, is busy or hangs: `kvstore status` asks it again",
        )
    if isinstance(error, ConnectionError):
        return f"the connection has ended ({error})", "`kvstore status` shows whether the daemon runs"
    return str(error), "`kvstore status` shows whether the daemon runs"


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return True


def _denied(path: str) -> tuple[str, str]:
    """Explains a denied connection. Looks up no names: a directory service could be slow."""
    uid = os.geteuid()
    try:
        found = os.stat(path)
    except OSError:
        folder = os.path.dirname(path)
        return f"permission denied, uid {uid} may not enter {folder}", _other_user(path)
    mode = stat.S_IMODE(found.st_mode)
    owner = f"uid {found.st_uid}, gid {found.st_gid}, mode {mode:04o}"
    why = f"permission denied for uid {uid}, the socket has {owner}"
    if mode & stat.S_IWGRP and found.st_gid:
        command = f"sudo usermod --append --groups $(stat -c %G {path}) $USER"
        return why, f"join the group of the socket, then log in again: {command}"
    return why, _other_user(path)


def _other_user(path: str) -> str:
    return f"run this as the daemon's user (ls -l {path}), or ask the operator of the daemon for access"
