"""The process that runs Mooncake's client, for `lanes`. Run as a module, with a plan in JSON.

It serves each lane on a thread of its own, one request at a time, between Mooncake and the lane's memory. It
ends when its standard input does, which is when the daemon lets go of it, or is gone.
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

_AGAIN_S = 1.0
"""How long a refusal stands before the master is asked again."""

_CONNECT_S = 5.0
_GOODBYE_S = 2
_LOCAL_BYTES = 16 << 20
"""Memory that Mooncake wants for itself; the data of blocks does not go through it."""

Request: TypeAlias = tuple[str, list[str], list[int], list[int]]
"""What to do, keys, where in the lane's memory, how many bytes there."""

Answer: TypeAlias = "list[int] | tuple[str, bool]"
"""What Mooncake said of each key, or why it can't be asked, and whether that stays so."""


class _Refused(Exception):
    """Mooncake can't be asked: why, and whether that stays so (`args`)."""


class _Store:
    """The client, connected when it is first needed."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._connecting = threading.Lock()
        self._client: Any = None
        self._refused: tuple[_Refused, float] | None = None

    def get(self) -> Any:
        """The client. Raises _Refused; may take as long as Mooncake does."""
        with self._connecting:
            if self._client is None:
                if self._refused is not None and time.monotonic() < self._refused[1]:
                    raise self._refused[0]
                try:
                    self._client = self._connect()
                except _Refused as error:
                    self._refused = error, time.monotonic() + _AGAIN_S
                    raise
            return self._client

    def _connect(self) -> Any:
        try:
            from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415
        except ImportError as error:
            raise _Refused(f"mooncake can't be imported: {error}", True) from error
        plan, client = self._plan, MooncakeDistributedStore()
        try:
            own = _own_address(plan["master"])
            code = client.setup(
                plan["host"] or own,
                plan["metadata"],
                plan["segment"],
                _LOCAL_BYTES,
                plan["protocol"],
                plan["device"],
                plan["master"],
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise _Refused(f"no Mooncake at {plan['master']}: {error}", False) from error
        if code:
            raise _Refused(f"no Mooncake at {plan['master']}: setup ended with {code}", False)
        return client

    def close(self) -> None:
        """Takes back the memory that was lent. No call may be under way, and none may follow."""
        if self._client is not None and self._plan["segment"]:
            self._client.close()


def _own_address(master: str) -> str:
    """The address that this machine has towards the master. OSError if that can't be reached."""
    host, _, port = master.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S) as connection:
        return str(connection.getsockname()[0])


class _Memory:
    """A lane's memory as Mooncake knows it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._kept: list[mmap.mmap] = []  # a transfer that Mooncake gave up may still write there
        self._nbytes = 0
        self.start = 0

    def fit(self, client: Any) -> None:
        """Registers all that the file has by now."""
        nbytes = os.fstat(self._descriptor).st_size
        if nbytes == self._nbytes:
            return
        mapped = mmap.mmap(self._descriptor, nbytes)
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        if code := client.register_buffer(start, nbytes):
            raise _Refused(f"Mooncake can't register {nbytes} bytes of memory: {code}", False)
        if self._nbytes:
            client.unregister_buffer(self.start)
        self._kept.append(mapped)
        self.start, self._nbytes = start, nbytes


class _Busy:
    """How many calls are under way: Mooncake must not be closed meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def __enter__(self) -> None:
        with self._lock:
            self.count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.count -= 1


def _call(client: Any, memory: _Memory, request: Request) -> list[int]:
    what, keys, offsets, sizes = request
    if what == "probe":
        return list(client.batch_is_exist(keys))
    if what == "delete":
        return list(client.batch_remove(keys, True))  # else readers' leases keep it from going
    memory.fit(client)
    move = client.batch_get_into if what == "read" else client.batch_put_from
    return list(move(keys, [memory.start + offset for offset in offsets], sizes))


def _serve(store: _Store, busy: _Busy, connection: Connection, memory: _Memory) -> None:
    with suppress(EOFError, OSError):  # the other side has let go: standard input ends too
        while True:
            request: Request = connection.recv()
            with busy:
                answer = _answer(store, memory, request)
            connection.send(answer)


def _answer(store: _Store, memory: _Memory, request: Request) -> Answer:
    try:
        return _call(store.get(), memory, request)
    except _Refused as error:
        return error.args[0], error.args[1]
    except Exception as error:
        return f"Mooncake failed: {error!r}", False


def main() -> None:
    """Serves until standard input ends."""
    plan = json.loads(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the daemon says when: it may have blocks to write yet
    store, busy = _Store(plan), _Busy()
    for connection, memory in plan["lanes"]:
        lane = Connection(connection), _Memory(memory)
        threading.Thread(target=_serve, args=(store, busy, *lane), daemon=True).start()
    sys.stdin.buffer.read()
    signal.alarm(_GOODBYE_S)
    if not busy.count:
        store.close()
    os._exit(0)


if __name__ == "__main__":
    main()
