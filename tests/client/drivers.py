"""Both clients by one set of blocking calls, so that one test serves both.

`BlockingDriver` hands out the blocking client as it is. `AsyncioDriver` runs an event loop in a thread and
wraps what the asyncio client hands out, so that its calls block.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvstore import AsyncClient, AsyncNamespace, Client, Put
from kvstore.client import aio, sync
from kvstore.client.extents import Maps
from kvstore.client.leases import Reservation

DEADLINE_S = 20.0


class BlockingDriver:
    """The blocking client."""

    module = sync

    def client(self, url: str | None = None, **settings: Any) -> Client:
        return Client(url, **settings)

    def in_place(self, what: Callable[[], Any]) -> Any:
        """Calls what must not wait, where the client's user would call it."""
        return what()

    def connection(self, path: Path) -> Any:
        return sync.Connection(str(path), "", Maps(), time.monotonic() + DEADLINE_S)

    def call(self, connection: Any, message: Any, deadline_s: float = DEADLINE_S) -> Any:
        return connection.call(message, time.monotonic() + deadline_s)

    def stop(self) -> None:
        pass


class AsyncioDriver:
    """The asyncio client in an event loop of its own. A forked process gets a loop of its own."""

    module = aio

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def client(self, url: str | None = None, **settings: Any) -> Any:
        return _Blocking(self, AsyncClient(url, **settings))

    def in_place(self, what: Callable[[], Any]) -> Any:
        """Calls `what` in the loop, and awaits its result if that is needed."""

        async def run() -> Any:
            result = what()
            return await result if inspect.isawaitable(result) else result

        if self._pid != os.getpid():
            self._start()
        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(2 * DEADLINE_S)

    def connection(self, path: Path) -> Any:
        async def connect() -> aio.AsyncConnection:
            return await aio.AsyncConnection("", Maps()).connect(str(path), time.monotonic() + DEADLINE_S)

        return self.in_place(connect)

    def call(self, connection: Any, message: Any, deadline_s: float = DEADLINE_S) -> Any:
        return self.in_place(lambda: connection.call(message, time.monotonic() + deadline_s))

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


Driver = BlockingDriver | AsyncioDriver


def _unwrapped(value: Any) -> Any:
    """An argument as the asyncio client takes it: with its own namespaces."""
    if isinstance(value, list | tuple):
        return type(value)(_unwrapped(each) for each in value)
    if isinstance(value, dict):
        return {name: _unwrapped(each) for name, each in value.items()}
    if isinstance(value, Put):
        return replace(value, namespace=_unwrapped(value.namespace), chain=_unwrapped(value.chain))
    return value._inner if isinstance(value, _Blocking) else value


class _Blocking:
    """An asyncio client, namespace or reservation whose calls block."""

    def __init__(self, driver: AsyncioDriver, inner: Any) -> None:
        self._driver = driver
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            result = self._driver.in_place(lambda: value(*_unwrapped(args), **_unwrapped(kwargs)))
            wrapped = isinstance(result, AsyncNamespace | Reservation)
            return _Blocking(self._driver, result) if wrapped else result

        return call

    def __len__(self) -> int:
        return len(self._inner)

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> _Blocking:
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.in_place(
            self._inner.close if isinstance(self._inner, AsyncClient) else self._inner.abort
        )
