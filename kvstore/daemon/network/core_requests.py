"""Requests that the network tier itself sends to the placement core."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvstore.daemon.network.ports import Core

CLIENT = -1
"""The network tier's client number in the core. No connection has this number."""


class Callback:
    """A requester that passes its answer to a function."""

    def __init__(self, call: Callable[[Any], None]) -> None:
        self._call = call

    def answer(self, request: int, action: Any) -> None:
        """See Requester."""
        self._call(action)


async def ask(core: Core, event: Any) -> Any:
    """Sends a request to the core and returns its answer."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answered(action: Any) -> None:
        if not answer.done():  # the task may have been cancelled
            answer.set_result(action)

    core.ask(Callback(answered), 0, event)
    return await answer
