"""What is cached of existence checks, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvstore.daemon.network.existence import ExistenceChecks
from kvstore.tiers.network.base import Name


def test_expired_results_take_no_memory() -> None:
    clock = SimpleNamespace(now=0.0)
    nothing: Any = None
    checks = ExistenceChecks(nothing, nothing, lambda: clock.now)
    for i in range(2000):
        clock.now = i / 100
        checks.note([Name(bytes(16), i.to_bytes(4, "big"))], exist=bool(i % 2))
        # Hits of 5 s, at 100 results a second.
        assert len(checks._cached) <= 502
    assert len(checks._cached) >= 400
