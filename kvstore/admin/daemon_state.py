"""Cached state of the daemon: any number of callers cause at most one request per `FRESH_S`.

Not covered: changes, and answers about single blocks. Routers send these through the clients directly.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from kvstore.admin.metrics import exposition, open_metrics
from kvstore.client.aio import AsyncClient

_T = TypeVar("_T")

FRESH_S = 0.5
"""Maximum age of a cached answer, in seconds."""

_MOST_PAGES = 64


class DaemonState:
    """Clients of the daemon, and its latest answers."""

    def __init__(self, client: AsyncClient, changing: AsyncClient) -> None:
        """`changing` is used for changes; its deadline is longer."""
        self.client, self.changing = client, changing
        self._status = _Shared(lambda: client.control("status"))
        self._pages: dict[tuple[Any, ...], _Shared[dict[str, Any]]] = {}
        self._figures = _Shared(lambda: client.control("figures"))
        self._metrics = _Shared(self._read_metrics)
        self._open_metrics = _Shared(self._read_open_metrics)

    async def close(self) -> None:
        """Closes idle connections."""
        await self.client.close()
        await self.changing.close()

    async def status(self) -> dict[str, Any]:
        """Returns the daemon's status, without tenants. Raises UnavailableError while no daemon answers."""
        return await self._status.get()

    async def figures(self) -> dict[str, Any]:
        """Returns all counters and measurements. Raises UnavailableError."""
        return await self._figures.get()

    async def metrics(self) -> bytes:
        """Returns all metrics in Prometheus' text format. Raises UnavailableError."""
        return await self._metrics.get()

    async def open_metrics(self) -> bytes:
        """Returns all metrics in the format OpenMetrics. Raises UnavailableError."""
        return await self._open_metrics.get()

    async def _read_metrics(self) -> bytes:
        return exposition(await self.status(), await self.figures())

    async def _read_open_metrics(self) -> bytes:
        return open_metrics(await self.status(), await self.figures())

    async def page(self, call: str, **arguments: Any) -> dict[str, Any]:
        """Returns a page of tenants, namespaces or transfers. Raises UnavailableError, DeniedError."""
        key = call, *arguments.items()
        shared = self._pages.pop(key, None) or _Shared(lambda: self.client.control(call, **arguments))
        self._pages[key] = shared
        if len(self._pages) > _MOST_PAGES:
            self._pages.pop(next(iter(self._pages)))
        return await shared.get()


class _Shared(Generic[_T]):
    """Runs one call for all callers that ask within `FRESH_S`."""

    def __init__(self, ask: Callable[[], Awaitable[_T]]) -> None:
        self._ask = ask
        self._pending: asyncio.Task[_T] | None = None
        self._asked_s = -FRESH_S
        self._answer: _T | None = None

    async def get(self) -> _T:
        if self._answer is not None and time.monotonic() - self._asked_s < FRESH_S:
            return self._answer
        # Concurrent callers share a failure too. Otherwise each would wait out the deadline in turn.
        if self._pending is None:
            self._pending = asyncio.create_task(self._refresh())
        return await asyncio.shield(self._pending)

    async def _refresh(self) -> _T:
        try:
            asked_s = time.monotonic()
            self._answer, self._asked_s = await self._ask(), asked_s
            return self._answer
        finally:
            self._pending = None
