"""Daemons with tenants, and their members: users by number, as the kernel sees them.

Only root can be somebody else, so what uses this runs as root, or says that it does not run.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.client.sync import Connection
from kvstore.lab.local_daemon import LocalDaemon, Settings
from kvstore.wire import messages as m
from tests.daemons import Peer, eventually, log_of

VICTIM, ATTACKER, FRIEND, NOBODY = 61001, 61002, 61003, 61099
_PR_SET_DUMPABLE = 4

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as several users")


class TenantDaemon(LocalDaemon):
    """A daemon whose socket everybody can reach; `tenants` is the part of the configuration about them."""

    def __init__(self, settings: Settings, tenants: str, supervised: bool = False) -> None:
        everybody = {**settings, "daemon": {"socket_mode": 0o666}}
        super().__init__(everybody, supervised=supervised)
        self.tenants = tenants

    def _config_text(self) -> str:
        return f"{super()._config_text()}\n{self.tenants}"

    def start(self) -> None:
        self.folder.chmod(0o755)
        super().start()

    def reload(self, tenants: str) -> str:
        """Has the daemon read other tenants; what it says to that."""
        file = self.folder / "kvstore.toml"
        file.write_text(file.read_text().replace(self.tenants, tenants))
        self.tenants = tenants
        before = len(_reloads(self))
        os.kill(self.pid, signal.SIGHUP)
        return str(eventually(lambda: _reloads(self)[before:])[0])


def _reloads(daemon: LocalDaemon) -> list[str]:
    return [line for line in log_of(daemon).splitlines() if "reloaded:" in line]


@contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """Who connects in here is this user to the daemon."""
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@contextmanager
def acting_as_root() -> Iterator[None]:
    """Within `acting_as`: root again."""
    uid = os.geteuid()
    os.seteuid(0)
    os.setegid(0)
    try:
        yield
    finally:
        os.setegid(uid)
        os.seteuid(uid)


class Member(Client):
    """A client that connects as a user."""

    def __init__(
        self, daemon: LocalDaemon, uid: int, deadline_s: float = 10.0, strict: bool = True, **more: Any
    ) -> None:
        self.uid = uid
        super().__init__(daemon.url, deadline_s=deadline_s, strict=strict, **more)

    def _connect(self, ends_s: float) -> Connection:
        with acting_as(self.uid):
            return super()._connect(ends_s)


@contextmanager
def peer_of(daemon: LocalDaemon, uid: int, token: str = "") -> Iterator[Peer]:
    """A raw connection of a user that has said Hello."""
    with acting_as(uid):
        peer = Peer(daemon.socket)
    with peer:
        welcome = peer.ask(m.Hello(m.MAGIC, m.VERSION, token))
        assert isinstance(welcome, m.Welcome), welcome
        yield peer


def as_user(uid: int, work: Callable[[], Any]) -> Any:
    """What `work` returns in a process of that user; it fails if that raises."""
    told, tell = os.pipe()
    pid = _fork(uid, lambda: _tell(tell, work))
    os.close(tell)
    with os.fdopen(told, "rb") as file:
        raw = file.read()
    os.waitpid(pid, 0)
    good, result = pickle.loads(raw)
    assert good, result
    return result


@contextmanager
def process_of(uid: int, work: Callable[[], Any]) -> Iterator[int]:
    """The number of a process of that user that has done `work` and stays until the end."""
    told, tell = os.pipe()
    waits, end = os.pipe()

    def stay() -> None:
        kept = work()
        os.write(tell, b"." if kept is not None else b"!")
        os.close(end)
        os.read(waits, 1)

    pid = _fork(uid, stay)
    os.close(tell)
    os.close(waits)
    try:
        assert os.read(told, 1) == b".", "the process did not get to work"
        yield pid
    finally:
        os.close(end)
        os.close(told)
        os.waitpid(pid, 0)


def _fork(uid: int, work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        # As after an exec: else /proc would be root's, and refuse what it grants others.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        work()
    finally:
        os._exit(0)


def _tell(tell: int, work: Callable[[], Any]) -> None:
    try:
        result = True, work()
    except BaseException:
        result = False, traceback.format_exc()
    with os.fdopen(tell, "wb") as file:
        pickle.dump(result, file)


def found_on_disk(daemon: LocalDaemon, what: bytes) -> list[str]:
    """Files of the NVMe folder that hold these bytes."""
    files = [f for f in sorted((daemon.folder / "nvme").rglob("*")) if f.is_file()]
    return [str(f.relative_to(daemon.folder)) for f in files if what in f.read_bytes()]


def found_in_memory(pid: int, what: bytes) -> list[str]:
    """Memory files that a process has open, and mappings of it, that hold these bytes."""
    found = []
    for link in sorted(Path(f"/proc/{pid}/fd").iterdir()):
        with suppress(OSError):
            name = os.readlink(link)
            if name.startswith("/memfd:") and what in link.read_bytes():
                found.append(name)
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, access, *_ = line.split()
            start, stop = (int(x, 16) for x in place.split("-"))
            if not access.startswith("rw"):
                continue
            with suppress(OSError, OverflowError, ValueError):
                memory.seek(start)
                if what in memory.read(stop - start):
                    found.append(line)
    return found
