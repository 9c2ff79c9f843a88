"""A pool of workers for calls of Mooncake, which end by their deadline and cannot crash the daemon.

Mooncake's C++ client waits long for a master or peer that hangs, and it crashes its process if it is closed
during a call. So it runs in a process of its own (`client_process`). Each worker has a connection to that
process and memory that both sides map. A caller uses a worker alone and waits until its deadline. A worker
with a late answer is not used until the answer arrives. Other nodes can access the memory that the client has
registered: that of workers, and none of the daemon's.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import Pipe

from kvstore.tiers.network.base import NetworkError
from kvstore.tiers.network.mooncake.client_process import Answer, Request

WORKER_BYTES = 16 << 20
"""The initial memory of a worker. It grows to the largest object. Unused pages take no RAM."""

_HANGS_AFTER_S = 60.0
"""The process is ended if an answer is late by this time."""

_RESTART_AFTER_S = 1.0
"""The least time between two starts of the process."""

_CHECK_EVERY_S = 0.05
"""The time between checks for late answers while no worker is free."""

_END_WITHIN_S = 3.0
_KILLED_S = 0.5

_ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_STORE_CLIENT_SETUP_RETRIES": "3",
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "5000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
}
"""Default settings of Mooncake, with which workers are free again after 5 s."""


class Worker:
    """A connection to the client process, and memory. Not thread-safe."""

    def __init__(self) -> None:
        self.connection, self.remote_end = Pipe()
        self.descriptor = os.memfd_create("kvstore-mooncake")
        self.asked_at: float | None = None
        """The time at which an unanswered request was sent."""
        self._nbytes = 0
        self.fit(WORKER_BYTES)

    def fit(self, nbytes: int) -> None:
        """Grows the memory to `nbytes`."""
        if nbytes > self._nbytes:
            os.ftruncate(self.descriptor, nbytes)
            self.memory = memoryview(mmap.mmap(self.descriptor, nbytes))
            self._nbytes = nbytes

    def answered(self) -> bool:
        """Returns whether no answer is missing. Raises EOFError or OSError if the process has ended."""
        if self.asked_at is not None and self.connection.poll(0):
            self.connection.recv()
            self.asked_at = None
        return self.asked_at is None

    def close(self) -> None:
        """Closes the connection and the memory file. No caller may use the worker."""
        self.connection.close()
        self.remote_end.close()
        os.close(self.descriptor)


class _ClientProcess:
    """A client process and its workers."""

    def __init__(self, settings: Mapping[str, object], workers: int) -> None:
        self.free = [Worker() for _ in range(workers)]
        self.late: list[Worker] = []
        ends = [(worker.remote_end.fileno(), worker.descriptor) for worker in self.free]
        arguments = json.dumps({**settings, "workers": ends})
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{__package__}.client_process", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**_ENVIRONMENT, **os.environ},
            pass_fds=[fd for pair in ends for fd in pair],
            start_new_session=True,
        )
        for worker in self.free:
            worker.remote_end.close()

    def failed(self) -> bool:
        """Returns whether the process has ended or hangs. Frees workers whose late answers have arrived."""
        try:
            answered = [worker for worker in self.late if worker.answered()]
        except (EOFError, OSError):
            return True
        self.late = [worker for worker in self.late if worker not in answered]
        self.free += answered
        before = time.monotonic() - _HANGS_AFTER_S
        overdue = any(worker.asked_at is not None and worker.asked_at < before for worker in self.late)
        return overdue or self._process.poll() is not None

    def end(self, within_s: float) -> None:
        """Ends the process, and kills it after `within_s`. Closes the workers that no caller has."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # stuck in the kernel
                self._process.wait(_KILLED_S)
        for worker in [*self.free, *self.late]:
            worker.close()
        self.free, self.late = [], []


class SubprocessPool:
    """The workers of one client process, which is started when it is needed. Thread-safe."""

    def __init__(self, settings: Mapping[str, object], count: int) -> None:
        self._settings = settings
        self._count = count
        self._changed = threading.Condition()
        self._client: _ClientProcess | None = None
        self._restart_at = 0.0
        self._closed = False

    @contextmanager
    def take(self, ends: float) -> Iterator[Worker | None]:
        """Takes a worker for the caller. Yields None if none is free by `ends`."""
        with self._changed:
            process = self._process_with_worker(ends)
            worker = process.free.pop() if process else None
        try:
            yield worker
        finally:
            if process is not None and worker is not None:
                self._give_back(process, worker)

    def _process_with_worker(self, ends: float) -> _ClientProcess | None:
        while not self._closed:
            now = time.monotonic()
            if self._client is not None and self._client.failed():
                self._client.end(0)
                self._client = None
            if now >= ends:
                return None
            if self._client is None and now >= self._restart_at:
                self._restart_at = now + _RESTART_AFTER_S
                self._client = _ClientProcess(self._settings, self._count)
            if self._client is not None and self._client.free:
                return self._client
            self._changed.wait(min(_CHECK_EVERY_S, ends - now))
        return None

    def _give_back(self, process: _ClientProcess, worker: Worker) -> None:
        with self._changed:
            if process is not self._client:
                worker.close()
            elif worker.asked_at is None:
                process.free.append(worker)
            else:
                process.late.append(worker)
            self._changed.notify()

    def close(self) -> None:
        """Ends the process and the calls under way. Closing twice does nothing."""
        with self._changed:
            self._closed = True
            process, self._client = self._client, None
            self._changed.notify_all()
        if process is not None:
            process.end(_END_WITHIN_S)


def ask(worker: Worker, request: Request, ends: float) -> list[int]:
    """Returns Mooncake's code of each key, none if there is no answer by `ends`. Raises NetworkError."""
    try:
        worker.asked_at = time.monotonic()
        worker.connection.send(request)
        if not worker.connection.poll(max(0.0, ends - time.monotonic())):
            return []
        answer: Answer = worker.connection.recv()
    except (EOFError, OSError):
        return []  # the process has ended: the next call starts another
    worker.asked_at = None
    if isinstance(answer, tuple):
        why, fatal = answer
        raise NetworkError(why, _LIBRARY_HINT if fatal else "is the master up?", fatal)
    return answer


_LIBRARY_HINT = "apt install libibverbs1, or install what the message names"
