"""Starts processes from one that has imported all they need: real ones, without the seconds of imports.

`spawn` takes the place of `subprocess.Popen` for `python -m kvstore` and for engines to test with. Each
process is a fork that gets its own session, arguments, environment, files, folder and limits. Tests of the
start itself use `subprocess`.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import random
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple


class Program(NamedTuple):
    """What `python -m` starts here."""

    imports: tuple[str, ...]
    own_environment: bool
    """Its imports read the environment: only processes with the same one share them."""


PROGRAMS = {
    "kvstore": Program(("kvstore.admin.main", "kvstore.cli", "kvstore.daemon.main"), False),
    "tests.engines.vllm.serve": Program(("tests.engines.vllm.serve",), True),
    "tests.engines.vllm.api_server": Program(("tests.engines.vllm.api_server",), True),
}
_ROOT = Path(__file__).parent.parent
_LIMITS = (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_MEMLOCK)
_REQUEST_BYTES = 1 << 20
_PYTHONPATH = os.environ.get("PYTHONPATH")


class Spawned:
    """A process that was started here: what tests use of `subprocess.Popen`."""

    def __init__(self, args: Sequence[str], told: socket.socket) -> None:
        self.args, self.returncode = list(args), None
        self._told = told
        self.pid = int(told.recv(64))

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._end_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. TimeoutExpired if it still runs after `timeout` seconds."""
        code = self._end_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Nothing if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _end_within(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            self._told.settimeout(timeout_s)
            try:
                status = self._told.recv(64)
            except (BlockingIOError, TimeoutError):
                return None
            assert status, "the spawner has ended"
            self.returncode = os.waitstatus_to_exitcode(int(status))
            self._told.close()
        return self.returncode

    def __del__(self) -> None:
        self._told.close()


def spawn(
    args: Sequence[str],
    stdin: int | None = None,
    stdout: IO[Any] | int | None = None,
    stderr: IO[Any] | int | None = None,
    env: Mapping[str, str] | None = None,
    start_new_session: bool = False,
) -> Any:
    """Starts a command; through a spawner if it is `python -m` of one of PROGRAMS, else by `subprocess`.

    So also where other modules than the spawner's are to be imported.
    """
    variables = dict(os.environ if env is None else env)
    args = [arg for i, arg in enumerate(args) if (i, arg) != (1, "-P")]
    program = PROGRAMS.get(args[2]) if args[:2] == [sys.executable, "-m"] else None
    if program is None or variables.get("PYTHONPATH") != _PYTHONPATH:
        return subprocess.Popen(
            args, stdin=stdin, stdout=stdout, stderr=stderr, env=env, start_new_session=start_new_session
        )
    asked = {
        "args": list(args[3:]),
        "env": variables,
        "cwd": os.getcwd(),
        "new_session": start_new_session,
        "limits": [resource.getrlimit(each) for each in _LIMITS],
    }
    with open(os.devnull, "r+b") as null:
        files = [null if file in (None, subprocess.DEVNULL) else file for file in (stdin, stdout, stderr)]
        numbers = [file if isinstance(file, int) else file.fileno() for file in files]
        if stderr == subprocess.STDOUT:
            numbers[2] = numbers[1]
        told = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # pytest changes this one for each test.
        same = tuple(sorted(each for each in variables.items() if each[0] != "PYTEST_CURRENT_TEST"))
        told.connect(_address(os.getpid(), args[2], same if program.own_environment else None))
        socket.send_fds(told, [json.dumps(asked).encode()], numbers)
        return Spawned(args, told)


@cache
def _address(_pid: int, module: str, environment: tuple[tuple[str, str], ...] | None) -> str:
    """The socket of this process's own spawner for a module, which ends with this process."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    address = f"\0kvstore-tests-{os.getpid()}-{os.urandom(8).hex()}"
    listener.bind(address)
    listener.listen(64)
    ours, theirs = socket.socketpair()
    fds = (listener.fileno(), theirs.fileno())
    command = [sys.executable, "-m", "tests.spawner", module, *map(str, fds)]
    env = None if environment is None else dict(environment)
    process = subprocess.Popen(command, pass_fds=fds, start_new_session=True, cwd=_ROOT, env=env)
    listener.close()
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return address


def _serve(listener: socket.socket, parent: socket.socket) -> dict[str, Any] | None:
    """Forks whenever it is asked to. In the fork: what that was. None when the parent has ended."""
    poll, running = select.poll(), dict[int, tuple[int, socket.socket]]()
    for each in (listener, parent):
        poll.register(each, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == parent.fileno():
                return None
            if fd != listener.fileno():
                pid, told = running.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                _, status = os.waitpid(pid, 0)
                _tell(told, status)
                told.close()
                continue
            told, _ = listener.accept()
            message, files, _, _ = socket.recv_fds(told, _REQUEST_BYTES, 3)
            pid = os.fork()
            if not pid:
                for sock in (listener, parent, told, *(sock for _, sock in running.values())):
                    sock.detach()
                _take(files)
                return dict(json.loads(message))
            for file in files:
                os.close(file)
            _tell(told, pid)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, told
            poll.register(pidfd, select.POLLIN)


def _tell(told: socket.socket, number: int) -> None:
    with suppress(OSError):  # whoever asked may have ended
        told.send(str(number).encode())


def _take(files: list[int]) -> None:
    """These become the process's stdin, stdout and stderr; nothing else stays open."""
    for at, file in enumerate(files):
        os.dup2(file, at)
    os.closerange(3, 4096)


def _become(module: str, asked: Mapping[str, Any]) -> None:
    if asked["new_session"]:
        os.setsid()
    # Ignored where the tests run in the background of a script: Ctrl-C would do nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    time.tzset()
    random.seed()
    for which, limits in zip(_LIMITS, asked["limits"], strict=True):
        resource.setrlimit(which, limits)
    sys.argv = [module, *asked["args"]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    """`python -m tests.spawner MODULE LISTENER PARENT`: the descriptors of its two sockets."""
    module = sys.argv[1]
    listener, parent = (socket.socket(fileno=int(arg)) for arg in sys.argv[2:])
    for each in PROGRAMS[module].imports:
        importlib.import_module(each)
    gc.collect()
    gc.freeze()
    asked = _serve(listener, parent)
    if asked is not None:
        _end(_exit_code(module, asked))


def _exit_code(module: str, asked: Mapping[str, Any]) -> int:
    try:
        _become(module, asked)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> None:
    """Ends the process in order, but does not free its memory piece by piece: that would copy it all."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with suppress(OSError):
            file.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
