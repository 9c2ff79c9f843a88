"""A REST interface of one's own beside a served daemon, and requests to it by the standard library alone."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from kvstore.daemon.tenancy.auth import hash_of, new_token
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import eventually
from tests.spawner import spawn

VIEW, OPERATE, EXPIRED = (new_token(bytes([n]) * 32) for n in (1, 2, 3))


def free_port() -> int:
    """A port of loopback that nobody has just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def settings(**more: object) -> dict[str, Any]:
    """The `admin` section: a port, and tokens of every kind."""
    tokens: list[dict[str, object]] = [
        {"name": "grafana", "hash": f"sha256:{hash_of(VIEW).hex()}"},
        {"name": "ops", "hash": f"sha256:{hash_of(OPERATE).hex()}", "role": "operate"},
        {
            "name": "left",
            "hash": f"sha256:{hash_of(EXPIRED).hex()}",
            "expires": datetime(2020, 1, 1, tzinfo=UTC),
        },
    ]
    return {"listen": f"127.0.0.1:{free_port()}", "requests_per_s": 10_000, "tokens": tokens, **more}


@dataclass(frozen=True)
class Answer:
    """Status, headers in lower case, body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class _OverUnix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(str(self._path))


class ServedAdmin:
    """Runs `kvstore admin` with a daemon's configuration while the `with` block lasts."""

    command: Sequence[str] = (sys.executable, "-m", "kvstore")

    def __init__(self, daemon: LocalDaemon) -> None:
        self.daemon = daemon
        self.socket = daemon.folder / "admin.sock"
        self.log = daemon.folder / "admin.log"
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> ServedAdmin:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()

    def start(self) -> None:
        command = [*self.command, "admin", "-c", str(self.daemon.folder / "kvstore.toml")]
        with self.log.open("ab") as log:
            self.process = spawn(command, stdout=log, stderr=log, start_new_session=True)
        eventually(self._answers, within_s=30)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self.get("/livez").status == 200
        except (OSError, http.client.HTTPException):
            return False

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(15) == 0, self.log.read_text()

    def connection(self, over_tcp: bool = False) -> http.client.HTTPConnection:
        if not over_tcp:
            return _OverUnix(self.socket)
        text = (self.daemon.folder / "kvstore.toml").read_text()
        port = int(text.split('listen = "127.0.0.1:')[1].split('"')[0])
        return http.client.HTTPConnection("127.0.0.1", port, timeout=10)

    def get(self, path: str, token: str = "", over_tcp: bool = False, **more: Any) -> Answer:
        """One request on a connection of its own; on the Unix socket as whoever runs the tests."""
        headers = dict(more.pop("headers", {}))
        if token:
            headers["Authorization"] = f"Bearer {token}"
        connection = self.connection(over_tcp)
        try:
            connection.request(more.pop("method", "GET"), path, headers=headers, **more)
            got = connection.getresponse()
            named = {name.lower(): value for name, value in got.getheaders()}
            return Answer(got.status, named, got.read())
        finally:
            connection.close()


def self_signed(certificate: Path, key: Path) -> None:
    """Writes a certificate for 127.0.0.1, and its key."""
    made, name = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")]),
    )
    now, loopback = datetime.now(UTC), x509.IPAddress(ip_address("127.0.0.1"))
    builder = x509.CertificateBuilder(name, name, made.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([loopback]), critical=False)
    certificate.write_bytes(builder.sign(made, hashes.SHA256()).public_bytes(Encoding.PEM))
    key.write_bytes(made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def problem(answer: Answer, status: int) -> dict[str, Any]:
    """The problem that an answer is, with everything that one has."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/problem+json"
    said: dict[str, Any] = answer.json
    assert set(said) == {"type", "title", "status", "detail", "hint"}
    assert said["status"] == status
    assert said["detail"]
    return said
