"""The I/O engines of the NVMe tier, in order of preference. A new engine adds a row."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.tiers.base import IOEngine
from kvstore.tiers.nvme.io.kvikio_engine import KvikioEngine, why_not
from kvstore.tiers.nvme.io.posix_engine import PosixEngine

ENGINES: list[tuple[Callable[[], str], Callable[[int], IOEngine]]] = [
    (why_not, KvikioEngine),
    (lambda: "", PosixEngine),
]
"""Pairs: a function that returns why an engine cannot run here (empty if it can), and the engine's class."""


def best_engine(threads: int) -> IOEngine:
    """Returns the first engine that can run on this machine, started."""
    return next(start(threads) for reason, start in ENGINES if not reason())
