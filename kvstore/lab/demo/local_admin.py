"""Runs the REST interface and dashboard of a local daemon as a child process, on a port of this machine."""

from __future__ import annotations

import hashlib
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvstore.errors import KVStoreError, UnavailableError

USUAL_PORT = 9400
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 15.0


class LocalAdmin:
    """Runs `kvstore admin` from `start` to `stop`. `section` belongs into the settings of the daemon."""

    def __init__(self) -> None:
        self.port = _free_port(USUAL_PORT)
        self.token = f"kvs_{secrets.token_urlsafe(32)}"
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address of the dashboard."""
        return f"http://127.0.0.1:{self.port}/"

    @property
    def section(self) -> dict[str, Any]:
        """The section `admin` of the configuration: the address, and a token that may read."""
        digest = hashlib.sha256(self.token.encode()).hexdigest()
        token = {"name": "demo", "hash": f"sha256:{digest}", "role": "view"}
        return {"listen": f"127.0.0.1:{self.port}", "tokens": [token]}

    def start(self, folder: Path) -> None:
        """Starts the process with `folder/kvstore.toml` and waits until it listens.

        Raises UnavailableError with the last line of its log if it does not listen within 30 s. Call `stop`
        in either case.
        """
        self._folder = folder
        command = [sys.executable, "-P", "-m", "kvstore", "admin", "-c", str(folder / "kvstore.toml")]
        with (folder / "admin.log").open("ab") as log:
            # A session of its own keeps Ctrl-C from the process, so that `stop` ends it in order.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        give_up_s = time.monotonic() + _START_TIMEOUT_S
        while not _listens(self.port):
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                raise UnavailableError("the dashboard does not start", self._log_tail())
            time.sleep(0.05)

    def check(self) -> None:
        """Raises KVStoreError if the process has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise KVStoreError(f"the dashboard ended with exit code {self._process.poll()}", self._log_tail())

    def stop(self) -> None:
        """Sends SIGTERM and waits; after 15 s, SIGKILL. Does nothing without a process."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _log_tail(self) -> str:
        assert self._folder is not None
        lines = (self._folder / "admin.log").read_text(encoding="utf-8", errors="replace").splitlines()
        return f"its log ends: {lines[-1]}" if lines else ""


def _free_port(wanted: int) -> int:
    """Returns the wanted port, or another one if it is in use."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise KVStoreError("no port of 127.0.0.1 is free", "end another program")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
