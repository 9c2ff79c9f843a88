"""Jobs: work that takes many small steps, so that no single event holds the core up for long."""

from __future__ import annotations

from typing import Protocol


class Job(Protocol):
    """Work in steps. Every Tick calls `step` of all jobs; `Placement.next_wakeup` asks all for `wakes_at`."""

    def step(self, now: float) -> None:
        """Takes one step if one is due at `now`."""

    def wakes_at(self) -> float:
        """Returns when the next step is due; infinity if there is nothing to do."""
