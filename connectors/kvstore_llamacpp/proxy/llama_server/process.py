"""Starts llama-server on loopback with a private folder of slot files, and ends it."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore.errors import ConfigError, UnavailableError
from kvstore_llamacpp.proxy.llama_server.http_client import NoAnswerError, ask
from kvstore_llamacpp.proxy.llama_server.options import ServerOptions

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "kvstore-llama-proxy-"
_POLL_S = 0.1
_STOP_S = 10.0
_SET_DEATH_SIGNAL = 1


class LlamaServer:
    """A running llama-server: `port` on loopback, `folder` of slot files."""

    def __init__(self, options: ServerOptions, folder: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        self._options = options
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """The process id; 0 before the start."""
        return self._process.pid if self._process else 0

    async def start(self, timeout_s: float) -> None:
        """Starts the process and waits until it has loaded its model.

        Raises ConfigError if it cannot be started, UnavailableError if it ends or takes over `timeout_s`.
        """
        command = self._options.command(self.port, self.folder)
        try:
            # Its own session: Ctrl-C reaches the proxy alone, which ends it in order.
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent
            )
        except OSError as error:
            raise ConfigError(f"cannot start {command[0]}: {error}", "check the program behind --") from error
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_until_ready()
        except TimeoutError as error:
            raise UnavailableError(
                f"llama-server has not loaded its model in {timeout_s:g} s", "raise --start-timeout"
            ) from error

    async def _wait_until_ready(self) -> None:
        ended = asyncio.ensure_future(self.wait())
        try:
            while not ended.done():
                with suppress(NoAnswerError):
                    status, _ = await ask(self.port, b"GET", b"/health", timeout_s=_STOP_S)
                    if status == 200:
                        return
                await asyncio.wait([ended], timeout=_POLL_S)
        finally:
            ended.cancel()
        raise UnavailableError(
            f"llama-server ended with exit code {self.exit_code}", "its own output has the reason"
        )

    @property
    def exit_code(self) -> int:
        """The exit code, as a shell tells it: 128 and the number of a signal. 0 while it runs."""
        code = self._process.returncode if self._process else 0
        return 128 - code if code is not None and code < 0 else code or 0

    async def wait(self) -> int:
        """Waits for the end of the process. Returns its exit code."""
        assert self._process is not None, "start it first"
        await self._process.wait()
        return self.exit_code

    async def stop(self) -> None:
        """Ends the process and those that it has started: in order, and by force after 10 s."""
        if self._process is None or self._process.returncode is not None:
            return
        for how in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, how)
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await self._process.wait()
                return


@contextmanager
def slot_folder(parent: Path | None) -> Iterator[Path]:
    """Makes a private folder for slot files, in shared memory by default, and removes it afterwards.

    Removes those of proxies that were killed. Raises ConfigError if none can be made.
    """
    if parent is None:
        parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    try:
        _remove_left(parent)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise ConfigError(f"cannot make a folder in {parent}: {error}", "use --slot-folder") from error
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_left(parent: Path) -> None:
    """Removes folders of this user that no process has locked."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


_LIBC = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """Makes the kernel end the child with the proxy, even if that is killed."""
    _LIBC.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
