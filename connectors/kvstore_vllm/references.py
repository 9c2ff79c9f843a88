"""References to pages that are being saved, or will be: vLLM gives such a page to no other request."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any


class PageReferences:
    """Counts references in vLLM's block pool. A page is free when its last request and reference are gone."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._now: list[Any] = []
        self._saving: deque[tuple[int, list[Any]]] = deque()

    def hold(self, block_ids: Iterable[int]) -> list[Any]:
        """Returns the blocks, which belong to a request now, each with one more reference."""
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        return blocks

    def drop(self, blocks: list[Any]) -> None:
        """Gives references back."""
        self._pool.free_blocks(reversed(blocks))

    def save(self, blocks: list[Any]) -> None:
        """Gives references back when the saves of the next step have ended."""
        self._now += blocks

    def number(self, number: int) -> None:
        """Numbers the step of the latest saves."""
        if self._now:
            self._saving.append((number, self._now))
            self._now = []

    def ended(self, number: int) -> None:
        """Gives back the references of the steps up to `number`: all their saves have ended."""
        while self._saving and self._saving[0][0] <= number:
            self.drop(self._saving.popleft()[1])

    def __bool__(self) -> bool:
        """Whether saves that have begun hold pages."""
        return bool(self._now or self._saving)
