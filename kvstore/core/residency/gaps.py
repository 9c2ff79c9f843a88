"""Which namespaces may have stored blocks behind missing ones.

Without gaps, the parent of each stored block is stored, and a search of a prefix may skip keys. A gap is a
hole with blocks below it, or a block that is being written when blocks below it are stored already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class Gaps:
    """Holes and reservations by namespace. `on_change` is called when a namespace gets its first gap or loses
    its last one.

    `holes` counts holes. `open` has the numbers of reservations. `_gapped` has those that must end before the
    namespace is without gaps.
    """

    def __init__(self) -> None:
        self.holes: Counter[int] = Counter()
        self.open: dict[int, set[int]] = {}
        self._gapped: dict[int, set[int]] = {}
        self.on_change: Callable[[int], None] = lambda namespace: None

    def are_in(self, namespace: int) -> bool:
        """Returns whether stored blocks may lie behind missing ones."""
        return namespace in self._gapped or self.holes[namespace] > 0

    def count_holes(self, namespace: int, n: int) -> None:
        """Counts n more holes, fewer if negative."""
        before = self.holes[namespace]
        self.holes[namespace] = before + n
        if not before or not before + n:
            self.on_change(namespace)

    def begin(self, namespace: int, reservation: int, fills: bool) -> None:
        """Adds a reservation. `fills`: of holes, or of blocks whose parents are in other reservations."""
        self.open.setdefault(namespace, set()).add(reservation)
        if fills:
            self._gapped.setdefault(namespace, set()).update(self.open[namespace])
            self.on_change(namespace)

    def end(self, namespace: int, reservation: int) -> None:
        """Removes a reservation. Its blocks are stored, or are no longer there."""
        _discard(self.open, namespace, reservation)
        if _discard(self._gapped, namespace, reservation):
            self.on_change(namespace)

    def forget(self, namespace: int) -> None:
        """Forgets the holes of a namespace that is closed."""
        self.holes.pop(namespace, None)


def _discard(numbers: dict[int, set[int]], namespace: int, reservation: int) -> bool:
    """Discards a number. Returns whether it was the last one of the namespace."""
    some = numbers.get(namespace)
    if some is None:
        return False
    some.discard(reservation)
    if some:
        return False
    del numbers[namespace]
    return True
