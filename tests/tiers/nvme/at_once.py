"""A tier without a job thread."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from kvstore.tiers.base import StorageTier
from kvstore.tiers.job_thread import ExtentJobs


class AtOnce(ExtentJobs):
    """Runs each job when it is submitted."""

    def __init__(self) -> None:
        super().__init__("at once")

    def submit(self, job: Callable[..., None], *args: Any) -> bool:
        """Runs the job."""
        job(*args)
        return True


def make_extents(tier: StorageTier) -> list[int]:
    """Starts a tier and returns the numbers of its new extents once all are made."""
    made: list[int] = []
    ended: SimpleQueue[object] = SimpleQueue()
    tier.start(made.append, ended.put)
    assert ended.get(timeout=20) is None
    return made
