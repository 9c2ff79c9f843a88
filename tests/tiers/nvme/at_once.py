"""A tier without a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class AtOnce:
    """Stands for the tier's worker: does each job when it is submitted."""

    def submit(self, job: Callable[..., None], *args: Any) -> None:
        job(*args)

    def close(self) -> None:
        pass
