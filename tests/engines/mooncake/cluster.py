"""A Mooncake of two processes on ports of their own: a master, and a peer that lends memory."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

SOURCE = Path(__file__).with_name("libibverbs.c")
CLIENT_TTL_S = 3
"""After so long without a sign of life the master forgets a peer and what it held."""

WAIT_S = 20.0


def without_rdma(folder: Path) -> dict[str, str]:
    """Returns environment variables with which Mooncake starts where there is no libibverbs: a fake one."""
    try:
        ctypes.CDLL("libibverbs.so.1")
        return {}
    except OSError:
        library = folder / "libibverbs.so.1"
    link = f"-Wl,-soname,libibverbs.so.1,--version-script={SOURCE.with_suffix('.map')}"
    subprocess.run(["gcc", "-shared", "-fPIC", link, "-o", str(library), str(SOURCE)], check=True)
    others = os.environ.get("LD_LIBRARY_PATH", "")
    return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(folder), others)))}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """Master and peer; `folder` is for what they say."""

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.url = f"mooncake://{self.address}?host=127.0.0.1"
        self.start_master()
        self.start_peer()

    def start_master(self) -> None:
        command = [
            *("mooncake_master", f"-rpc_port={self._port}", "-rpc_address=127.0.0.1"),
            *(f"-metrics_port={free_port()}", "-metrics_host=127.0.0.1"),
            *(f"-client_ttl={CLIENT_TTL_S}", "-default_kv_lease_ttl=500", "-logtostderr"),
        ]
        command[0] = str(Path(sys.executable).with_name(command[0]))
        with (self._folder / "master.log").open("a") as log:
            self.master = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        ends = time.monotonic() + WAIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return
            except OSError:
                assert time.monotonic() < ends
                assert self.master.poll() is None
                time.sleep(0.02)

    def start_peer(self) -> None:
        command = [sys.executable, "-m", f"{__package__}.peer", self.address, str(self._segment_bytes)]
        with (self._folder / "peer.log").open("a") as log:
            self.peer = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._hear() == "ready"

    def kill_peer(self) -> None:
        with self.peer:
            self.peer.kill()

    def _hear(self) -> Any:
        assert self.peer.stdout is not None
        return json.loads(self.peer.stdout.readline())

    def _tell(self, *what: str) -> Any:
        assert self.peer.stdin is not None
        print(json.dumps(what), file=self.peer.stdin, flush=True)
        return self._hear()

    def get(self, key: str) -> bytes:
        return base64.b64decode(self._tell("get", key))

    def put(self, key: str, value: bytes) -> int:
        return self._tell("put", key, base64.b64encode(value).decode())

    def remove(self, key: str) -> int:
        return self._tell("remove", key)

    def clear(self) -> None:
        self._tell("clear")

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_peer()
        self.master.send_signal(signal.SIGCONT)
        self.master.kill()
        self.master.wait()
