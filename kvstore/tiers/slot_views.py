"""Views of slots in host memory, one by one or as runs of neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from kvstore.core.actions import Where


class SlotViews(Sequence[memoryview]):
    """Writable views of slots, made when they are asked for.

    `view(place, count)` returns the bytes of `count` neighbouring slots from a place on.
    """

    def __init__(self, where: Where, view: Callable[[int, int], memoryview]) -> None:
        self.where = where
        self._view = view

    def __len__(self) -> int:
        return len(self.where)

    @overload
    def __getitem__(self, i: int) -> memoryview: ...
    @overload
    def __getitem__(self, i: slice) -> list[memoryview]: ...
    def __getitem__(self, i: int | slice) -> memoryview | list[memoryview]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        return self.run(i, 1)

    def run(self, first: int, count: int) -> memoryview:
        """Returns the bytes of `count` slots from slot number `first` on, which are neighbours."""
        return self._view(int(self.where.place[first]), count)
