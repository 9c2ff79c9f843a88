"""Curves of reuse: how likely the blocks of a class are used again, by the time since their last use.

The curve of a class counts, for each span of ages, the blocks that reached it and the blocks used within it.
Blocks are counted in cohorts that joined their classes at about the same time. So a block that has left every
tier still counts as not used again. Blocks that join at once are of one prompt and are mostly used together.
So they count as one piece of evidence: a class whose blocks join 50 at once needs 50 times as many of them to
be trusted as much. From a curve follow

- the *density* of a block: the highest P(used by then) / E[time kept] over all times to keep it (Gittins'
  index), which is what its slot earns, in uses/s;
- the *chance* that it is used again at all.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SPANS = 40
TICKS_A_S = 8
_FIRST_S, _RATIO = 1.0, 1.35
_EDGES = np.concatenate(([0.0], _FIRST_S * _RATIO ** np.arange(SPANS - 1)))
_EDGE_LIST = _EDGES.tolist()
_WIDTHS = np.diff(_EDGES, append=_FIRST_S * _RATIO ** (SPANS - 1))
_NOT_LATER = np.where(np.triu(np.ones((SPANS, SPANS), np.bool_)), 0.0, np.inf)
_COHORTS = 160
_COHORT_S = 2.0
_BLUR = 0.15
_HALF_LIFE = 1 << 17
_AT_ONCE = 12
_EXPECTED = 0.1 * np.minimum(_WIDTHS, 1.0) * 0.998 ** np.arange(SPANS)
_PRIOR = _EXPECTED / (1 + _EXPECTED / 2)
"""P(used within a span) before anything is known: the hazard, in uses/s, falls with age, as `lru` has it."""
_LEAN = np.append(1.0, _PRIOR[1:] / _PRIOR[:-1])
"""What a span is expected to have of the span before it."""
_WEIGHT, _SMOOTH, _SURE = 30.0, 0.5, 0.98


def tick(now: float) -> float:
    """Rounds a time down to 1/8 s, the resolution of the curves."""
    return int(now * TICKS_A_S) / TICKS_A_S


def span_of(age_s: Floats) -> Ints:
    """Returns the span of each age. The first span is 1 s, each next one 35 % longer than the one before."""
    # Kept short: called very often, with few ages.
    return np.maximum(_EDGES.searchsorted(age_s, "right") - 1, 0)


def one_span_of(age_s: float) -> int:
    """Returns the span of one age."""
    return max(bisect_right(_EDGE_LIST, age_s) - 1, 0)


class Counts(NamedTuple):
    """Blocks used within each span, and blocks that reached it. Both have the shape (classes, spans).

    `together`: the sum, over the blocks of each class, of how many blocks of the class joined at once.
    """

    used: npt.NDArray[np.float32]
    reached: npt.NDArray[np.float32]
    together: npt.NDArray[np.float32]


class ReuseCurves:
    """The curves of `shape` classes, for blocks of one tenant.

    The axes are nested groups, the outermost first. Classes with few blocks borrow from their groups. A class
    number is a position in a C-ordered array. `joins` counts blocks.
    """

    def __init__(self, shape: tuple[int, ...], known: Counts | None = None) -> None:
        self._shape = shape
        self._classes = n = int(np.prod(shape))
        used, reached = np.zeros((2, n, SPANS), np.float32)
        counts = known or Counts(used, reached, np.zeros(n, np.float32))
        self._used, self._reached = (column.astype(np.float32).reshape(n, SPANS) for column in counts[:2])
        self._together = counts.together.astype(np.float32)
        self._start = np.zeros(_COHORTS)
        self._at_span = np.zeros(_COHORTS, np.int64)
        self._waiting = np.zeros((_COHORTS, n), np.float32)
        self._cohorts = 0
        self.joins = int(self._reached[:, 0].sum())
        self._next_step_s = 0.0
        self._next = 0
        self.density = np.zeros((n, SPANS), np.float32)
        self.chance = np.zeros((n, SPANS), np.float32)
        self._learn(np.arange(n if known else 1))
        if known is None:
            self.density[:], self.chance[:] = self.density[0], self.chance[0]

    def counts(self) -> Counts:
        """Returns a copy of the counts."""
        return Counts(self._used.copy(), self._reached.copy(), self._together.copy())

    @property
    def ram_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in (self._used, self._reached, self._waiting, self.density, self.chance))

    def joined(self, classes: Ints, now: float) -> None:
        """Adds blocks to these classes, at once: they are mostly used together."""
        self._step(now)
        counts = np.bincount(classes, minlength=self._classes).astype(np.float32)
        self._waiting[self._cohorts - 1] += counts
        self._reached[:, 0] += counts
        self._together += counts * counts
        self.joins += len(classes)
        if self.joins // _HALF_LIFE > (self.joins - len(classes)) // _HALF_LIFE:
            # Old counts weigh less.
            self._used *= 0.5
            self._reached *= 0.5
            self._together *= 0.5

    def used(self, classes: Ints, since: Floats, now: float) -> None:
        """Counts a use of blocks that have been in these classes since `since`."""
        now = self._step(now)
        spans = span_of(now - since)
        np.add.at(self._used, (classes, spans), 1)
        cohorts = self._leave(classes, since)
        # A cohort may be a little younger than its blocks.
        at = np.where(cohorts >= 0, self._at_span[cohorts], spans)
        while (behind := at < spans).any():
            at += behind
            np.add.at(self._reached, (classes[behind], at[behind]), 1)

    def left(self, classes: Ints, since: Floats) -> None:
        """Removes unused blocks from the classes in which they have been since `since`."""
        self._leave(classes, since)

    def _leave(self, classes: Ints, since: Floats) -> Ints:
        cohorts: Ints = np.searchsorted(self._start[: self._cohorts], since, "right") - 1
        known = cohorts >= 0
        np.subtract.at(self._waiting, (cohorts[known], classes[known]), 1)
        return cohorts

    # -- cohorts

    def _step(self, now: float) -> float:
        """Ages the cohorts. Returns the current tick; blocks that join now belong to the last cohort."""
        now = tick(now)
        if now < self._next_step_s and self._cohorts:
            return now
        self._next_step_s = now + _FIRST_S
        self._grow_older(now)
        if not self._cohorts or now - self._start[self._cohorts - 1] >= _COHORT_S:
            self._merge(now)
            self._start[self._cohorts] = now
            self._at_span[self._cohorts] = 0
            self._waiting[self._cohorts] = 0
            self._cohorts += 1
        return now

    def _ends(self, now: float) -> Floats:
        return np.append(self._start[1 : self._cohorts], now)

    def _grow_older(self, now: float) -> None:
        n = self._cohorts
        spans = span_of(np.maximum(0.0, now - self._ends(now))) if n else np.empty(0, np.int64)
        at = self._at_span
        while len(late := np.flatnonzero(at[:n] < spans)):
            at[late] += 1
            np.add.at(self._reached.T, at[late], self._waiting[late])

    def _merge(self, now: float) -> None:
        """Joins neighbours that are close together for their age, or the oldest two if all are used."""
        n = self._cohorts
        if n < 2:
            return
        ends = self._ends(now)
        close = (ends[1:] - self._start[: n - 1] <= _BLUR * (now - ends[1:])) & (
            self._at_span[1:n] == self._at_span[: n - 1]
        )
        first = int(close.argmax()) if close.any() else (0 if n == _COHORTS else -1)
        if first >= 0:
            self._waiting[first] += self._waiting[first + 1]
            for column in (self._start, self._at_span, self._waiting):
                column[first + 1 : n - 1] = column[first + 2 : n]
            self._cohorts -= 1

    # -- densities and chances

    def learn(self) -> None:
        """Updates `density` and `chance` of a few classes; the next call updates others."""
        known = np.flatnonzero(self._reached[:, 0])
        order = np.concatenate((known[known >= self._next], known[known < self._next]))
        some = order[:_AT_ONCE]
        if len(some):
            self._next = int(some[-1]) + 1
            self._learn(some)

    def _learn(self, some: Ints) -> None:
        q = self._hazards(some)
        reach: Floats = np.cumprod(1 - q, axis=1, dtype=np.float64) / (1 - q)
        times = _from_the_end(reach * _WIDTHS * (1 - q / 2))
        self.density[some] = _best_rate(_from_the_end(reach * q), times)
        # Ages that no block has reached count as ages without reuse.
        q *= self._reached.any(axis=0)
        reach = np.cumprod(1 - q, axis=1, dtype=np.float64)
        self.chance[some] = 1 - reach[:, -1:] * (1 - q) / reach

    def _hazards(self, some: Ints) -> Floats:
        """Returns P(used within a span | reached it). A class borrows from wider groups and its last span."""
        used = self._used.reshape(*self._shape, SPANS)
        reached = self._reached.reshape(*self._shape, SPANS)
        together = self._together.reshape(self._shape)
        groups = len(self._shape)
        group = _PRIOR
        for level in range(groups):
            rest = tuple(range(level, groups))
            reached_of = reached.sum(axis=rest)
            weight = _weight(together.sum(axis=rest), reached_of[..., 0])[..., None]
            group = (used.sum(axis=rest) + weight * group) / (reached_of + weight)
            group = group[..., None, :]
        expected = np.broadcast_to(group, used.shape).reshape(-1, SPANS)[some]
        weight = _weight(self._together[some], self._reached[some, 0])
        reached_some = self._reached[some].T.astype(np.float64) + weight
        out: Floats = (self._used[some].T + weight * (1 - _SMOOTH) * expected.T) / reached_some
        leaning = weight * _SMOOTH * _LEAN[:, None] / reached_some
        last = expected[:, 0]
        for own, lean in zip(out, leaning, strict=True):
            last = np.minimum(own + lean * last, _SURE)
            own[:] = last
        return np.ascontiguousarray(out.T)


def _weight(together: npt.NDArray[np.float32], blocks: npt.NDArray[np.float32]) -> Floats:
    """Returns the weight, in blocks, of what classes borrow: 30 times the mean number that joined at once."""
    mean: Floats = together / np.maximum(blocks, 1.0)
    return _WEIGHT * np.maximum(mean, 1.0)


def _best_rate(hits: Floats, times: Floats) -> Floats:
    """Returns the highest hits / time from each span to any later end."""
    earned = hits[:, :-1, None] - hits[:, None, 1:]
    spent = times[:, :-1, None] - times[:, None, 1:]
    spent += _NOT_LATER
    earned /= spent
    best: Floats = earned.max(axis=2)
    return best


def _from_the_end(values: Floats) -> Floats:
    """Returns sums from each column to the last, and 0.

    Differences of these sums keep their precision where values fall.
    """
    sums = np.zeros((len(values), values.shape[1] + 1))
    sums[:, :-1] = values[:, ::-1].cumsum(axis=1)[:, ::-1]
    return sums
