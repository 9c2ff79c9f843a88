"""What was seen on the network lately: for a moment it need not be asked again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvstore.tiers.network.base import Name

THERE_S = 5.0
ABSENT_S = 1.0
_MOST = 1 << 16


class ExistenceCache:
    """Names that were there, or were not, each for as long as that is believed; the latest `_MOST`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: OrderedDict[Name, tuple[bool, float]] = OrderedDict()

    def of(self, name: Name) -> bool | None:
        """Whether it is there; None: nobody knows."""
        seen = self._seen.get(name)
        return seen[0] if seen is not None and self._clock() < seen[1] else None

    def note(self, name: Name, there: bool) -> None:
        """It was seen just now, or it was not there."""
        self._seen[name] = there, self._clock() + (THERE_S if there else ABSENT_S)
        self._seen.move_to_end(name)
        if len(self._seen) > _MOST:
            self._seen.popitem(last=False)

    def clear(self) -> None:
        """Nothing is known any more."""
        self._seen.clear()
