"""Gives llama-server's slots to requests: one request a slot at a time, the others wait in a line."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore_llamacpp.blocks import common_prefix

Tokens = npt.NDArray[np.int32]
NO_TOKENS: Tokens = np.zeros(0, np.int32)

_LEAST_SHARE = 0.1
"""llama-server's own limit. Nearly all prompts begin with the same token."""


class FullError(Exception):
    """As many requests wait as may."""


@dataclass(slots=True, eq=False)
class Slot:
    """A slot, and the tokens that it had when the proxy last saw it.

    llama-server may have dropped them since: it compares tokens itself, so a wrong guess costs time only.
    """

    number: int
    tokens: Tokens = field(default_factory=lambda: NO_TOKENS)
    busy: bool = False
    used_s: float = 0.0


class SlotPool:
    """All slots of a server. Used in one event loop."""

    def __init__(self, count: int, most_waiting: int) -> None:
        self.slots = [Slot(number) for number in range(count)]
        self._most_waiting = most_waiting
        self._waiting: deque[asyncio.Future[Slot]] = deque()

    @property
    def waiting(self) -> int:
        """The number of requests without a slot."""
        return len(self._waiting)

    async def take(self, tokens: Sequence[int] | Tokens) -> Slot:
        """Returns a slot for a prompt: the free one with the longest common prefix, else that idle longest.

        Raises FullError if too many requests wait.
        """
        free = [slot for slot in self.slots if not slot.busy]
        if free:
            slot = max(free, key=lambda each: (_shared(each.tokens, tokens), -each.used_s))
            slot.busy = True
            return slot
        if len(self._waiting) >= self._most_waiting:
            raise FullError(f"{self._most_waiting} requests wait for {len(self.slots)} slots")
        turn: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(turn.result())
            else:
                with suppress(ValueError):
                    self._waiting.remove(turn)
            raise

    def take_idle(self) -> Slot | None:
        """Returns the free slot with tokens that was not used for the longest time, for its memory."""
        idle = [slot for slot in self.slots if not slot.busy and len(slot.tokens)]
        if not idle:
            return None
        slot = min(idle, key=lambda each: each.used_s)
        slot.busy = True
        return slot

    def give_back(self, slot: Slot) -> None:
        """Ends the use of a slot. The request that waits longest gets it."""
        slot.used_s = time.monotonic()
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(slot)
                return
        slot.busy = False

    def forget(self) -> None:
        """Notes that any slot may have other tokens now."""
        for slot in self.slots:
            slot.tokens = NO_TOKENS


def _shared(held: Tokens, tokens: Sequence[int] | Tokens) -> int:
    """Returns the length of a common prefix that is worth a slot with another prompt behind it; else 0."""
    n = common_prefix(held, tokens)
    return n if n >= _LEAST_SHARE * len(tokens) else 0
