"""The process that runs Mooncake's client for `subprocess_pool`. Run as a module, with settings in JSON.

It serves each worker on a thread of its own, one request at a time. Payloads move between Mooncake and the
worker's memory. The process ends when its standard input ends, because the daemon has closed it or has died.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

_RETRY_AFTER_S = 1.0
"""The time between two attempts to connect to the master."""

_CONNECT_S = 5.0
_EXIT_WITHIN_S = 2
_LOCAL_BYTES = 16 << 20
"""Memory that Mooncake needs for itself. Payloads do not pass through it."""

Request: TypeAlias = tuple[str, list[str], list[int], list[int]]
"""The operation, keys, offsets in the worker's memory, and sizes in bytes."""

Answer: TypeAlias = "list[int] | tuple[str, bool]"
"""Mooncake's code of each key, or the error and whether it is fatal."""


class _Refused(Exception):
    """Mooncake cannot be used. `args`: the reason, and whether it is fatal."""


class _Store:
    """The client, which connects at its first use."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._connecting = threading.Lock()
        self._client: Any = None
        self._last_refusal: tuple[_Refused, float] | None = None

    def get(self) -> Any:
        """Returns the client. Raises _Refused. Blocks as long as Mooncake does."""
        with self._connecting:
            if self._client is None:
                if self._last_refusal is not None and time.monotonic() < self._last_refusal[1]:
                    raise self._last_refusal[0]
                try:
                    self._client = self._connect()
                except _Refused as error:
                    self._last_refusal = error, time.monotonic() + _RETRY_AFTER_S
                    raise
            return self._client

    def _connect(self) -> Any:
        try:
            from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415
        except ImportError as error:
            raise _Refused(f"mooncake cannot be imported: {error}", True) from error
        settings, client = self._settings, MooncakeDistributedStore()
        try:
            own = _own_address(settings["master"])
            local = settings["host"] or own, settings["metadata"], settings["segment"], _LOCAL_BYTES
            code = client.setup(*local, settings["protocol"], settings["device"], settings["master"])
        except (OSError, RuntimeError, ValueError) as error:
            raise _Refused(f"no Mooncake at {settings['master']}: {error}", False) from error
        if code:
            raise _Refused(f"no Mooncake at {settings['master']}: setup failed with code {code}", False)
        return client

    def close(self) -> None:
        """Withdraws the segment from the store. No call may be under way, and none may follow."""
        if self._client is not None and self._settings["segment"]:
            self._client.close()


def _own_address(master: str) -> str:
    """Returns this machine's address towards the master. Raises OSError if the master is unreachable."""
    host, _, port = master.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S) as connection:
        return str(connection.getsockname()[0])


class _Memory:
    """A worker's memory, registered with Mooncake."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapped: list[mmap.mmap] = []  # a transfer that Mooncake abandoned may still write there
        self._nbytes = 0
        self.start = 0

    def fit(self, client: Any) -> None:
        """Registers the memory file at its present size."""
        nbytes = os.fstat(self._descriptor).st_size
        if nbytes == self._nbytes:
            return
        mapped = mmap.mmap(self._descriptor, nbytes)
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        if code := client.register_buffer(start, nbytes):
            raise _Refused(f"Mooncake cannot register {nbytes} bytes of memory: code {code}", False)
        if self._nbytes:
            client.unregister_buffer(self.start)
        self._mapped.append(mapped)
        self.start, self._nbytes = start, nbytes


def _call(client: Any, memory: _Memory, request: Request) -> list[int]:
    operation, keys, offsets, sizes = request
    if operation == "probe":
        return list(client.batch_is_exist(keys))
    if operation == "delete":
        return list(client.batch_remove(keys, True))  # forced, because readers' leases would prevent it
    memory.fit(client)
    move = client.batch_get_into if operation == "read" else client.batch_put_from
    return list(move(keys, [memory.start + offset for offset in offsets], sizes))


def _serve(store: _Store, busy: set[Connection], connection: Connection, memory: _Memory) -> None:
    """Serves one worker. `busy` has its connection during a call."""
    with suppress(EOFError, OSError):  # the daemon has closed the worker: standard input ends too
        while True:
            request: Request = connection.recv()
            busy.add(connection)
            answer = _answer(store, memory, request)
            busy.discard(connection)
            connection.send(answer)


def _answer(store: _Store, memory: _Memory, request: Request) -> Answer:
    try:
        return _call(store.get(), memory, request)
    except _Refused as error:
        return error.args[0], error.args[1]
    except Exception as error:
        return f"Mooncake failed: {error!r}", False


def main() -> None:
    """Serves requests until standard input ends."""
    settings = json.loads(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the daemon decides when to end: it may still write blocks
    store = _Store(settings)
    busy: set[Connection] = set()
    for connection, memory in settings["workers"]:
        worker = Connection(connection), _Memory(memory)
        threading.Thread(target=_serve, args=(store, busy, *worker), daemon=True).start()
    sys.stdin.buffer.read()
    signal.alarm(_EXIT_WITHIN_S)
    if not busy:  # Mooncake crashes if it is closed during a call
        store.close()
    os._exit(0)


if __name__ == "__main__":
    main()
