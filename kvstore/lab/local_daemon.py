"""A daemon of one's own: a child process with its socket, and unless told otherwise its data, in a temporary
folder that goes away with it. For replays, the demo, tests and benches.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from kvstore import Client
from kvstore.config import parse
from kvstore.errors import KVStoreError, UnavailableError

Settings = Mapping[str, Mapping[str, object]]
"""Sections of the configuration and their keys, e.g. {"dram": {"limit": "64MiB"}}."""

_LOG_TAIL_CHARS = 2000


class LocalDaemon:
    """Runs `kvstore serve` for as long as the `with` block lasts.

    `settings` override the default configuration; the socket is always our own. An `nvme` section without a
    `path` gets a folder in the temporary one; without the section there is no NVMe tier. Entering raises
    ConfigError for settings that cannot be, UnavailableError with the end of the daemon's log if it does not
    answer within `start_timeout_s`. With `supervised`, `kvstore supervise` runs it, so that DRAM outlives it.
    """

    popen: ClassVar[Callable[..., Any]] = subprocess.Popen
    """Starts the process."""

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
        """What a Client connects to."""
        return f"unix://{self.socket}"

    @property
    def operators_url(self) -> str:
        """What a Client connects to that is to be an operator."""
        own = self._settings.get("daemon", {}).get("operator_socket")
        return f"unix://{own}" if own else self.url

    @property
    def socket(self) -> Path:
        """The path of the daemon's socket."""
        return self.folder / "kvstore.sock"

    @property
    def pid(self) -> int:
        """The running daemon's process id; 0 if it does not run. It is not the supervisor's."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.stop()
        finally:
            self._remove()

    def start(self) -> None:
        """Starts the daemon and waits until it answers. Call it only when none runs.

        A supervisor that is there starts it by itself: then this only waits.
        """
        assert not self._pid, "the daemon already runs"
        if self._process is None:
            with (self.folder / "daemon.log").open("ab") as log:
                # In a session of its own, so that Ctrl-C reaches only us and we stop it in order.
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
        """Asks the daemon to end (SIGTERM) and waits. Raises KVStoreError if it fails or takes too long."""
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
        """Ends the daemon at once (SIGKILL), as a crash would. `start` brings up the next one."""
        if self._supervised and self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._last_pid, self._pid = self._pid, 0
        elif not self._supervised:
            self._end()

    def _end(self) -> None:
        """Nothing of ours runs any longer."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process, self._pid = None, 0

    def restart(self) -> None:
        """A clean stop, then a start on the same data; a supervisor does both and keeps DRAM."""
        if self._supervised and self._process is not None:
            self._last_pid, self._pid = self._pid, 0
            self._process.send_signal(signal.SIGUSR1)
        else:
            self.stop()
        self.start()

    def log_tail(self) -> str:
        """The end of what the daemon wrote to stdout and stderr, as a hint; empty if it wrote nothing."""
        try:
            text = (self.folder / "daemon.log").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""
        return f"its log ends: {text[-_LOG_TAIL_CHARS:]}" if text else ""

    def _wait_for_answer(self, process: subprocess.Popen[bytes]) -> int:
        """The process id of a daemon that answers, and is not the one that was told to end."""
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
    """A key as TOML writes it: in quotes unless it is plain."""
    return name if name.isidentifier() and name.isascii() else json.dumps(name)


def _toml(value: object) -> str:
    """A value as TOML writes it; JSON's strings, numbers and booleans are TOML's too."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, datetime):
        return value.isoformat()
    return json.dumps(os.fspath(value) if isinstance(value, os.PathLike) else value, ensure_ascii=False)
