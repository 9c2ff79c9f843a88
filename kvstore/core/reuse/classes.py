"""Reuse classes: blocks of one class are expected to be used again alike.

A class combines the number of uses, the interval between the last two uses, and the number of blocks that
were first stored together. Blocks with a client's hint have classes of their own. A class number is a
position in a C-ordered array of `SHAPE`. A *kind* is a class number with the `HIGH_PRIORITY` bit.
"""

from __future__ import annotations

import numpy as np

from kvstore.core.reuse.curves import SPANS, Floats, Ints

_COUNTS, _INTERVALS, _AMOUNTS = 4, 6, 3
SHAPE = (_COUNTS + 1, _INTERVALS, _AMOUNTS)
"""Uses x interval x amount. The last row of uses holds the hinted classes."""
CLASSES = int(np.prod(SHAPE)), SPANS
"""The shape of a column of a tenant's `Counts`."""
HIGH_PRIORITY, CLASS_MASK = 128, 127
"""Bits of a kind: a client asked to keep the block longer; the class number."""
MOST_USES = 15
"""Further uses are not counted."""

_HINTED = _COUNTS
_INTERVAL_EDGES_S = (4.0, 10.0, 25.0, 62.5)
_HINT_EDGES_S = (10.0, 60.0, 300.0, 1800.0, 7200.0)


def new_class(interval: int, n: int, mean: float) -> int:
    """Returns the class of n blocks stored together for the first time.

    `interval` is that of their parent, `mean` the tenant's mean number of blocks stored together.
    """
    return interval * _AMOUNTS + int(n >= mean / 4) + int(n >= mean)


def hinted_class(next_use_s: float | None) -> int:
    """Returns the class of blocks that a client expects to use in `next_use_s` seconds (None: never)."""
    if next_use_s is None:
        return _HINTED * _INTERVALS * _AMOUNTS + 1
    return (_HINTED * _INTERVALS + int(np.searchsorted(_HINT_EDGES_S, next_use_s))) * _AMOUNTS


def classes_after(classes: Ints, uses: Ints, intervals_s: Floats) -> Ints:
    """Returns the classes after one more use, `intervals_s` after the one before; `uses` counts it."""
    counts = np.minimum(np.log2(uses).astype(np.int64), _COUNTS - 1)
    intervals = 1 + np.searchsorted(_INTERVAL_EDGES_S, intervals_s, "left")
    amounts = np.where(classes // (_INTERVALS * _AMOUNTS) == _HINTED, 1, classes % _AMOUNTS)
    after: Ints = (counts * _INTERVALS + intervals) * _AMOUNTS + amounts
    return after


def interval_of(number: int) -> int:
    """Returns the interval of a class; 0 if it is unknown."""
    return number // _AMOUNTS % _INTERVALS if number < _HINTED * _INTERVALS * _AMOUNTS else 0


def describe(number: int) -> str:
    """Returns a class in words."""
    count, interval, amount = (int(i) for i in np.unravel_index(number, SHAPE))
    if count == _HINTED:
        edges = (*(f"{e:.0f} s" for e in _HINT_EDGES_S), "later")
        return "told: not used again" if amount else f"told: used again within {edges[interval]}"
    uses = ("once", "2 or 3 times", "4 to 7 times", "8 times or more")[count]
    gaps = ("", *(f"up to {e:g} s" for e in _INTERVAL_EDGES_S), f"over {_INTERVAL_EDGES_S[-1]:g} s")
    together = ("few", "some", "many")[amount]
    gap = f", {gaps[interval]} apart" if interval else ""
    return f"used {uses}{gap}, stored with {together} others"
