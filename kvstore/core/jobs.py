"""Jobs: work that takes many small steps, so that no single event takes long."""

from __future__ import annotations

import math


class Job:
    """Work in steps. Each Tick calls `step` of all jobs; the next Tick is due at the earliest `wakes_at`."""

    _next_step: float = math.inf

    def step(self, now: float) -> None:
        """Takes a step if one is due at `now` (s)."""
        if now >= self._next_step:
            self._step(now)

    def _step(self, now: float) -> None:
        """Takes a step, and sets `_next_step`."""
        raise NotImplementedError

    def wakes_at(self) -> float:
        """Returns when the next step is due; infinity if there is nothing to do."""
        return self._next_step
