"""What the policies share: rows that go first, and a batch that offers from more than one queue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np

from kvstore.core.blocks import Rows
from kvstore.core.policy.queue import Queue
from kvstore.core.policy.shelf import Shelf


class Ranked(ABC):
    """A policy over queues, in front of which goes what will not be used again soon."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._segments = shelf.segments
        self._cool = Queue(shelf.segments)

    @abstractmethod
    def _queues(self) -> Iterable[Queue]:
        """All queues but that of cool rows."""

    @abstractmethod
    def _rank(self, n: int) -> Rows:
        """Up to n rows that are not cool, the first to go first."""

    def coldest(self, n: int, now: float) -> Rows:
        """See Policy."""
        if not len(self._cool):
            return self._rank(n)
        first = self._cool.head(n)
        return np.concatenate((first, self._rank(n - len(first)))) if len(first) < n else first

    def remove(self, rows: Rows) -> None:
        """See Policy."""
        self._segments.forget(rows)

    def cool(self, rows: Rows) -> None:
        """See Policy: the end of a chain first."""
        self._cool.prepend(self._segments.known(rows)[::-1])

    def __len__(self) -> int:
        return len(self._cool) + sum(len(queue) for queue in self._queues())

    def ram_bytes(self) -> int:
        """See Policy."""
        return self._cool.ram_bytes() + sum(queue.ram_bytes() for queue in self._queues())
