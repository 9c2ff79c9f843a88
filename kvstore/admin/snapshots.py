"""What the daemon says of itself, asked for at most every so often, however many want to know."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from kvstore.client.aio import AsyncClient

FRESH_S = 0.5
"""How old a snapshot may be."""


class Snapshots:
    """The daemon's status and figures."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self._status = _Shared(lambda: client.control("status"))
        self._figures = _Shared(lambda: client.control("figures"))

    async def status(self) -> dict[str, Any]:
        """The daemon as a whole, without tenants. Raises UnavailableError while the daemon is away."""
        return await self._status.get()

    async def figures(self) -> dict[str, Any]:
        """All that is counted and measured: see `daemon.control`. Raises UnavailableError."""
        return await self._figures.get()


class _Shared:
    """One answer for all who ask at about the same time."""

    def __init__(self, ask: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._ask = ask
        self._lock = asyncio.Lock()
        self._asked_s = -FRESH_S
        self._answer: dict[str, Any] = {}

    async def get(self) -> dict[str, Any]:
        async with self._lock:
            now = time.monotonic()
            if now - self._asked_s >= FRESH_S:
                self._answer = await self._ask()
                self._asked_s = now
            return self._answer
