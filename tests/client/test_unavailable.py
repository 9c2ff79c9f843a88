"""The errors of clients without a daemon: cause and next command."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.client.unavailable import unavailable
from kvstore.errors import RemoteProtocolError, UnavailableError
from tests.tenants import VICTIM, as_user, needs_root


def error_of(path: Path) -> UnavailableError:
    """What a client of this socket raises."""
    with Client(f"unix://{path}", deadline_s=0.2) as client, pytest.raises(UnavailableError) as caught:
        client.status()
    return caught.value


def test_a_missing_socket(tmp_path: Path) -> None:
    error = error_of(tmp_path / "a.sock")
    assert error.message == f"no answer from the daemon at {tmp_path}/a.sock: this socket does not exist"
    assert error.hint == "start the daemon: `kvstore serve`; KVSTORE_SOCKET or --socket names another socket"


def test_a_socket_that_a_dead_daemon_left(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "a.sock"))
    error = error_of(tmp_path / "a.sock")
    assert error.message.endswith(": no process listens on this socket, the daemon has ended")
    assert "`kvstore serve`" in error.hint


def test_paths_that_are_no_socket(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = error_of(tmp_path / "file")
    assert error.message.endswith(": this file is not a socket")
    assert error.hint == "KVSTORE_SOCKET or --socket names another socket"
    error = error_of(tmp_path / "file" / "a.sock")
    assert error.message.endswith(": a part of this path is a file, not a folder")


def test_a_daemon_that_does_not_answer(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "a.sock"))
        bound.listen()
        error = error_of(tmp_path / "a.sock")
    assert error.message.endswith(": the deadline has passed")
    assert "`kvstore status` asks it again" in error.hint


@needs_root
@pytest.mark.parametrize(
    ("mode", "gid", "hint"),
    [
        (0o660, VICTIM + 1, "usermod --append --groups $(stat -c %G"),
        (0o600, VICTIM + 1, "the operator"),
        (0o660, 0, "the operator"),
    ],
)
def test_a_socket_without_permission(mode: int, gid: int, hint: str) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as bound:
        os.chmod(folder, 0o755)
        path = Path(folder) / "a.sock"
        bound.bind(str(path))
        bound.listen()
        path.chmod(mode)
        os.chown(path, 0, gid)
        message, found = as_user(VICTIM, lambda: (error_of(path).message, error_of(path).hint))
    owner = f"the socket has uid 0, gid {gid}, mode 0{mode:o}"
    assert message == f"no answer from the daemon at {path}: permission denied for uid {VICTIM}, {owner}"
    assert hint in found


@needs_root
def test_a_folder_without_permission() -> None:
    with tempfile.TemporaryDirectory() as folder:
        message = as_user(VICTIM, lambda: error_of(Path(folder) / "a.sock").message)
    assert message.endswith(f": permission denied, uid {VICTIM} may not enter {folder}")


def test_other_errors_keep_their_text() -> None:
    assert "refuses: why" in unavailable("/a", RemoteProtocolError("why", "what to do")).message
    assert "the connection has ended (reset)" in unavailable("/a", ConnectionResetError("reset")).message
    error = unavailable("/a", OSError(24, "Too many open files"))
    assert "Too many open files" in error.message
    assert isinstance(error.__cause__, OSError)
