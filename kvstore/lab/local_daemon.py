"""Runs a daemon as a child process. Its socket and, by default, its data are in a temporary folder.

For replays, the demo, tests and benches.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from kvstore import Client
from kvstore.config import parse
from kvstore.errors import KVStoreError, UnavailableError

Settings = Mapping[str, Mapping[str, object]]
"""Sections of the configuration and their keys, e.g. {"dram": {"limit": "64MiB"}}."""

_LOG_TAIL_CHARS = 2000


class LocalDaemon:
    """Runs `kvstore serve` during the `with` block.

    `settings` override the default configuration, except the socket. An `nvme` section without a `path` gets
    a folder in the temporary folder; without the section there is no NVMe tier. `supervised`: the daemon runs
    under `kvstore supervise`, which keeps DRAM through restarts. Entering raises ConfigError for invalid
    settings, and UnavailableError with the end of the daemon's log if the daemon does not answer within
    `start_timeout_s` seconds.
    """

    popen: ClassVar[Callable[..., Any]] = subprocess.Popen
    """The function that starts the process."""

    def __init__(
        self, settings: Settings | None = None, start_timeout_s: float = 60.0, supervised: bool = False
    ) -> None:
        self._settings = {name: dict(section) for name, section in (settings or {}).items()}
        self._start_timeout_s = start_timeout_s
        self._folder: Path | None = None
        self._supervised = supervised
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = self._last_pid = 0

    @property
    def folder(self) -> Path:
        """The temporary folder."""
        assert self._folder is not None, "enter the context first"
        return self._folder

    @property
    def url(self) -> str:
        """The URL for clients."""
        return f"unix://{self.socket}"

    @property
    def operators_url(self) -> str:
        """The URL for operators."""
        own = self._settings.get("daemon", {}).get("operator_socket")
        return f"unix://{own}" if own else self.url

    @property
    def socket(self) -> Path:
        """The path of the daemon's socket."""
        return self.folder / "kvstore.sock"

    @property
    def pid(self) -> int:
        """The process id of the running daemon, not of its supervisor; 0 if none runs."""
        return self._pid

    def __enter__(self) -> LocalDaemon:
        self._folder = Path(tempfile.mkdtemp(prefix="kvstore-"))
        try:
            text = self._config_text()
            parse(text, "the daemon's settings")
            (self.folder / "kvstore.toml").write_text(text, encoding="utf-8")
            self.start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self.stop()
        finally:
            self._remove()

    def start(self) -> None:
        """Starts the daemon and waits until it answers. No daemon may be running.

        A running supervisor starts the daemon; then this method only waits.
        """
        assert not self._pid, "the daemon already runs"
        if self._process is None:
            with (self.folder / "daemon.log").open("ab") as log:
                # A session of its own keeps Ctrl-C from the daemon, so that `stop` ends it in order.
                self._process = type(self).popen(
                    self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        try:
            self._pid = self._wait_for_answer(self._process)
        except BaseException:
            self._end()
            raise

    def _command(self) -> list[str]:
        how = "supervise" if self._supervised else "serve"
        return [sys.executable, "-P", "-m", "kvstore", how, "-c", str(self.folder / "kvstore.toml")]

    def stop(self, timeout_s: float = 30.0) -> None:
        """Sends SIGTERM and waits. Raises KVStoreError if the daemon fails or takes over `timeout_s`."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._end()
            raise KVStoreError(f"the daemon did not stop within {timeout_s:g} s", self.log_tail()) from None
        self._process, self._pid = None, 0
        if code not in (0, -signal.SIGTERM):
            raise KVStoreError(f"the daemon stopped with exit code {code}", self.log_tail())

    def kill(self) -> None:
        """Sends SIGKILL, as a crash would, and waits for the end. `start` starts the next daemon."""
        if self._supervised and self._pid:
            handle = os.pidfd_open(self._pid)
            try:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                select.select([handle], [], [])
            finally:
                os.close(handle)
            self._last_pid, self._pid = self._pid, 0
        elif not self._supervised:
            self._end()

    def _end(self) -> None:
        """Kills all processes of this object."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process, self._pid = None, 0

    def restart(self) -> None:
        """Stops and starts the daemon on the same data. A supervisor does both and keeps DRAM."""
        if self._supervised and self._process is not None:
            self._last_pid, self._pid = self._pid, 0
            self._process.send_signal(signal.SIGUSR1)
        else:
            self.stop()
        self.start()

    def log_tail(self) -> str:
        """Returns the end of the daemon's log as a hint; empty if the log is empty."""
        try:
            text = (self.folder / "daemon.log").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""
        return f"its log ends: {text[-_LOG_TAIL_CHARS:]}" if text else ""

    def _wait_for_answer(self, process: subprocess.Popen[bytes]) -> int:
        """Waits for an answer from a daemon other than the last. Returns its process id."""
        give_up_s = time.monotonic() + self._start_timeout_s
        last: UnavailableError | None = None
        while time.monotonic() < give_up_s:
            code = process.poll()
            if code is not None:
                raise UnavailableError(f"the daemon ended with exit code {code}", self.log_tail())
            if self.socket.exists():
                try:
                    with Client(self.operators_url, token="") as client:
                        pid = int(client.status()["pid"])
                    if pid != self._last_pid:
                        return pid
                except UnavailableError as e:
                    last = e
            time.sleep(0.02)
        cause = f": {last.message}" if last else ", and has made no socket"
        raise UnavailableError(
            f"no answer from the daemon in {self._start_timeout_s:g} s{cause}", self.log_tail()
        )

    def _config_text(self) -> str:
        settings = {name: dict(section) for name, section in self._settings.items()}
        settings.setdefault("daemon", {})["socket"] = self.socket
        settings.setdefault("admin", {}).setdefault("socket", self.folder / "admin.sock")
        if "nvme" in settings and "path" not in settings["nvme"]:
            folder = self.folder / "nvme"
            folder.mkdir()
            settings["nvme"]["path"] = folder
        lines = []
        for name, section in settings.items():
            lines.append(f"[{name}]")
            lines += [f"{_key(key)} = {_toml(value)}" for key, value in section.items()]
        return "\n".join(lines) + "\n"

    def _remove(self) -> None:
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._folder = None


def _key(name: str) -> str:
    """Formats a TOML key; quoted unless it is a bare key."""
    return name if name.isidentifier() and name.isascii() else json.dumps(name)


def _toml(value: object) -> str:
    """Formats a TOML value. Strings, numbers and booleans are the same in JSON and TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, datetime):
        return value.isoformat()
    return json.dumps(os.fspath(value) if isinstance(value, os.PathLike) else value, ensure_ascii=False)
