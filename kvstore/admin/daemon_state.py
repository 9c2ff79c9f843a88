"""The daemon as paths see it. What it says of itself is asked for every so often, however many want it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from kvstore.admin.metrics import exposition
from kvstore.client.aio import AsyncClient

_T = TypeVar("_T")

FRESH_S = 0.5
"""How old a snapshot may be."""

_MOST_PAGES = 64


class DaemonState:
    """Ways to the daemon, and what it said of itself just now."""

    def __init__(self, client: AsyncClient, changing: AsyncClient) -> None:
        """`changing` has the patience that changes take."""
        self.client, self.changing = client, changing
        self._status = _Shared(lambda: client.control("status"))
        self._pages: dict[tuple[Any, ...], _Shared[dict[str, Any]]] = {}
        self._figures = _Shared(lambda: client.control("figures"))
        self._metrics = _Shared(self._read_metrics)

    async def close(self) -> None:
        """Closes idle connections."""
        await self.client.close()
        await self.changing.close()

    async def status(self) -> dict[str, Any]:
        """The daemon as a whole, without tenants. Raises UnavailableError while the daemon is away."""
        return await self._status.get()

    async def figures(self) -> dict[str, Any]:
        """All that is counted and measured. Raises UnavailableError."""
        return await self._figures.get()

    async def metrics(self) -> bytes:
        """All that is counted and measured, as Prometheus reads it. Raises UnavailableError."""
        return await self._metrics.get()

    async def _read_metrics(self) -> bytes:
        return exposition(await self.status(), await self.figures())

    async def page(self, call: str, **arguments: Any) -> dict[str, Any]:
        """A page of tenants or namespaces. Raises UnavailableError and DeniedError."""
        key = call, *arguments.items()
        shared = self._pages.pop(key, None) or _Shared(lambda: self.client.control(call, **arguments))
        self._pages[key] = shared
        if len(self._pages) > _MOST_PAGES:
            self._pages.pop(next(iter(self._pages)))
        return await shared.get()


class _Shared(Generic[_T]):
    """One answer for all who ask at about the same time."""

    def __init__(self, ask: Callable[[], Awaitable[_T]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[_T] | None = None
        self._asked_s = -FRESH_S
        self._answer: _T | None = None

    async def get(self) -> _T:
        if self._answer is not None and time.monotonic() - self._asked_s < FRESH_S:
            return self._answer
        # Who comes meanwhile shares a failure too: else they would wait for a daemon that hangs one by one.
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_again())
        return await asyncio.shield(self._asking)

    async def _ask_again(self) -> _T:
        try:
            asked_s = time.monotonic()
            self._answer, self._asked_s = await self._ask(), asked_s
            return self._answer
        finally:
            self._asking = None
