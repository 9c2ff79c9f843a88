from __future__ import annotations

import logging

import pytest

from kvstore import ExceptionBarrier


def test_failures_are_counted_and_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    guard = ExceptionBarrier(logging.getLogger("a.connector"), clock=lambda: now)
    for _ in range(3):
        with guard("lookup"):
            raise ValueError("the disk is square")
    with guard("save"):
        raise OSError("no")
    assert guard.failures == {"lookup": 3, "save": 1}
    [line] = [r.getMessage() for r in caplog.records]
    assert line.startswith("lookup failed and counts as a miss (1 since")
    assert "the disk is square" in caplog.text
    now = 160.5
    with guard("save"):
        raise OSError("again")
    assert caplog.records[-1].getMessage().startswith("save failed and counts as a miss (4 since")
    assert len(caplog.records) == 2


def test_results_and_interrupts_pass_the_barrier() -> None:
    guard = ExceptionBarrier(logging.getLogger("a.connector"))

    def hook() -> int:
        with guard("hook"):
            return 7
        return 0

    assert hook() == 7
    assert not guard.failures
    with pytest.raises(KeyboardInterrupt), guard("hook"):
        raise KeyboardInterrupt
    assert not guard.failures
