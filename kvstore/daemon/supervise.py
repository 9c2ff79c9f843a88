"""A small service manager for one daemon: starts it, keeps its descriptors, restarts it when it dies.

It implements the parts of systemd's protocols that the daemon uses (FDSTORE, LISTEN_FDS, READY, WATCHDOG). It
knows nothing about blocks. It has one thread, so forking is safe.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kvstore import logs

_log = logging.getLogger("kvstore.supervise")

_FIRST_FD = 3
_MOST_FDS = 4096
_MESSAGE_BYTES = 8192
_BACK_OFF_S, _BACK_OFF_MAX_S = 0.1, 10.0
_STEADY_S = 10.0
_WATCHDOG_S = 30.0


class Supervisor:
    """Runs `kvstore serve` with `arguments` until SIGTERM or SIGINT. `log_format`: of its own messages."""

    def __init__(self, arguments: Sequence[str], log_format: str = "text") -> None:
        self._log_format = log_format
        # Without -P, Python would import modules from the working directory first.
        self._command = [sys.executable, "-P", "-m", "kvstore", "serve", *arguments]
        self._kept: dict[str, int] = {}
        self._pid = 0
        self._started = 0.0
        self._fed = 0.0
        self._ready = self._was_ready = False
        self._ending = False
        self._restarting = False
        self._delay_s = _BACK_OFF_S
        self._signals: set[int] = set()

    def run(self) -> int:
        """Returns the daemon's last exit code. A daemon that was never ready is not restarted."""
        logs.start("info", self._log_format)
        handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)
        wakes, wake = socket.socketpair()
        with tempfile.TemporaryDirectory(prefix="kvstore-supervise-") as folder, wakes, wake:
            wake.setblocking(False)
            wakes.setblocking(False)
            signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
            for number in handled:
                signal.signal(number, lambda number, _: self._signals.add(number))
            address = Path(folder) / "notify"
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as heard:
                heard.bind(str(address))
                os.environ["NOTIFY_SOCKET"] = str(address)
                return self._watch(heard, wakes)

    def _watch(self, heard: socket.socket, wakes: socket.socket) -> int:
        with selectors.DefaultSelector() as selector:
            selector.register(heard, selectors.EVENT_READ)
            selector.register(wakes, selectors.EVENT_READ)
            self._start()
            while True:
                selector.select(1.0)
                _drain(wakes)
                self._listen(heard)
                self._handle_signals()
                code = self._reap()
                if code is not None:
                    self._listen(heard)
                    if not self._should_restart(code, selector):
                        return code
                    self._start()
                elif self._ready and time.monotonic() - self._fed > _WATCHDOG_S:
                    _log.error("the daemon's event loop has not turned for %g s: killed", _WATCHDOG_S)
                    os.kill(self._pid, signal.SIGKILL)
                    self._fed = time.monotonic()

    def _handle_signals(self) -> None:
        received, self._signals = self._signals, set()
        if received & {signal.SIGTERM, signal.SIGINT} and not self._ending:
            self._ending = True
            os.kill(self._pid, signal.SIGTERM)
        if signal.SIGUSR1 in received and not self._ending:
            self._restarting = True
            os.kill(self._pid, signal.SIGTERM)
        if signal.SIGHUP in received:
            os.kill(self._pid, signal.SIGHUP)

    def _should_restart(self, code: int, selector: selectors.BaseSelector) -> bool:
        """Returns whether to restart a daemon that has ended. Waits longer each time if it dies early."""
        restart, self._restarting = self._restarting, False
        if self._ending or (code == 0 and not restart):
            return False
        if not self._was_ready:
            _log.error("the daemon ended with exit code %d before it was ready", code)
            return False
        if restart:
            return True
        _log.warning("the daemon ended with exit code %d: started again", code)
        if time.monotonic() - self._started > _STEADY_S:
            self._delay_s = _BACK_OFF_S
        selector.select(self._delay_s)  # a signal ends the wait
        self._delay_s = min(2 * self._delay_s, _BACK_OFF_MAX_S)
        return not self._signals & {signal.SIGTERM, signal.SIGINT}

    def _start(self) -> None:
        self._ready, self._started = False, time.monotonic()
        self._pid = os.fork()
        if not self._pid:
            self._become_daemon()

    def _become_daemon(self) -> None:
        """Runs the daemon in the child, with the kept descriptors from 3 on and their names in `environ`."""
        try:
            signal.set_wakeup_fd(-1)
            high = _FIRST_FD + len(self._kept) + 1
            copies = [os.dup(fd) for fd in self._kept.values()]
            while copies and min(copies) < high:
                copies = [os.dup(fd) if fd < high else fd for fd in copies]
            for number, fd in enumerate(copies, _FIRST_FD):
                os.dup2(fd, number, inheritable=True)
            os.environ |= {
                "LISTEN_PID": str(os.getpid()),
                "LISTEN_FDS": str(len(copies)),
                "LISTEN_FDNAMES": ":".join(self._kept),
                "WATCHDOG_USEC": str(int(_WATCHDOG_S * 1e6)),
            }
            os.execv(self._command[0], self._command)
        finally:
            os._exit(127)

    def _reap(self) -> int | None:
        """Returns the exit code of the daemon, as a shell does, or None while it runs."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid:
            return None
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _listen(self, heard: socket.socket) -> None:
        """Reads the daemon's notifications."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(heard, _MESSAGE_BYTES, 16, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            sent = dict(line.partition("=")[::2] for line in data.decode(errors="replace").splitlines())
            name = sent.get("FDNAME", "")
            if "FDSTORE" in sent:
                fds = self._keep(name, fds)
            for fd in fds:
                os.close(fd)
            if "FDSTOREREMOVE" in sent and name in self._kept:
                os.close(self._kept.pop(name))
            if "READY" in sent:
                self._ready = self._was_ready = True
            self._fed = time.monotonic()

    def _keep(self, name: str, fds: list[int]) -> list[int]:
        """Keeps a single descriptor under its name. Returns the descriptors that are not kept."""
        if len(fds) != 1 or not name or name in self._kept or len(self._kept) >= _MOST_FDS:
            return fds
        self._kept[name] = fds[0]
        return []


def _drain(wakes: socket.socket) -> None:
    try:
        while wakes.recv(4096):
            pass
    except BlockingIOError:
        return
