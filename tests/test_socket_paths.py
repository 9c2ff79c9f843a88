"""Where daemon, clients and commands look for sockets without options."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client, socket_paths
from kvstore.config import Config
from kvstore.errors import TierError
from tests.tenants import VICTIM, as_user, needs_root


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with `run` for /run/kvstore, `shared` for /tmp, and `xdg` of the user of `somebody`."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("KVSTORE_SOCKET", raising=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for each, mode in {"run": 0o755, "shared": 0o1777, "xdg": 0o700}.items():
            (folder / each).mkdir()
            (folder / each).chmod(mode)
        if os.geteuid() == 0:
            os.chown(folder / "xdg", VICTIM, VICTIM)
        monkeypatch.setattr(socket_paths, "SYSTEM_FOLDER", folder / "run")
        monkeypatch.setattr(socket_paths, "_SHARED_FOLDER", folder / "shared")
        yield folder


def somebody(work: Callable[[], Any]) -> Any:
    return as_user(VICTIM, work)


def private(places: Path) -> Path:
    return places / "shared" / f"kvstore-{VICTIM}"


def test_root_and_owners_of_the_system_folder_use_it(places: Path) -> None:
    assert socket_paths.daemon_socket() == places / "run" / "kvstore.sock"
    assert socket_paths.find_daemon() == Config().daemon.socket == places / "run" / "kvstore.sock"
    assert Config().admin.socket == places / "run" / "admin.sock"
    assert Client().path == str(places / "run" / "kvstore.sock")


@needs_root
def test_the_service_user_uses_the_system_folder_that_it_owns(places: Path) -> None:
    os.chown(places / "run", VICTIM, VICTIM)
    assert somebody(socket_paths.daemon_socket) == places / "run" / "kvstore.sock"


@needs_root
def test_other_users_use_their_runtime_folder(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(places / "xdg"))
    assert somebody(lambda: Config().daemon.socket) == places / "xdg" / "kvstore" / "kvstore.sock"


@needs_root
@pytest.mark.parametrize("given", ["", "relative", "run", "missing"])
def test_a_runtime_folder_of_somebody_else_is_ignored(
    places: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    absolute = given in ("run", "missing")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(places / given) if absolute else given)
    assert somebody(socket_paths.daemon_socket) == private(places) / "kvstore.sock"


@needs_root
def test_the_private_folder_is_made_for_its_user_alone(places: Path) -> None:
    def make() -> None:
        os.umask(0)
        for _ in range(2):
            socket_paths.make_folder(socket_paths.default_folder())

    somebody(make)
    found = private(places).stat()
    assert (found.st_uid, found.st_mode & 0o777) == (VICTIM, 0o700)


def _foreign(folder: Path) -> None:
    folder.mkdir()


def _link(folder: Path) -> None:
    target = folder.with_name("target")
    target.mkdir(mode=0o700)
    os.chown(target, VICTIM, VICTIM)
    folder.symlink_to(target)


def _writable(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    os.chown(folder, VICTIM, VICTIM)


@needs_root
@pytest.mark.parametrize("prepare", [_foreign, _link, _writable])
def test_a_private_folder_that_others_can_change_is_neither_served_nor_asked(
    places: Path, prepare: Callable[[Path], None]
) -> None:
    prepare(private(places))
    (private(places) / "kvstore.sock").touch()

    def refused() -> str:
        with suppress(OSError):
            try:
                socket_paths.make_folder(socket_paths.default_folder())
            except TierError as error:
                return str(error)
        return ""

    assert "no folder that only this user may write (another user may have made it" in somebody(refused)
    assert somebody(socket_paths.find_daemon) == places / "run" / "kvstore.sock"


@needs_root
def test_clients_prefer_their_own_daemon_and_else_use_the_one_of_the_node(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(places / "xdg"))
    own, system = places / "xdg" / "kvstore" / "kvstore.sock", places / "run" / "kvstore.sock"
    found = []

    def look() -> list[str]:
        client = Client()
        with socket.socket(socket.AF_UNIX) as listener:
            socket_paths.make_folder(own.parent)
            found.append(client.path)
            listener.bind(str(own))
            found.append(client.path)
        own.unlink()
        found.append(client.path)
        return found

    assert somebody(look) == [str(own), str(own), str(own)]
    system.touch()
    found.clear()
    assert somebody(look) == [str(system), str(own), str(system)]


def test_the_environment_wins(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_SOCKET", "unix:///elsewhere/kvstore.sock")
    assert Client().path == "/elsewhere/kvstore.sock"
    assert Client("unix:///named.sock").path == "/named.sock"
