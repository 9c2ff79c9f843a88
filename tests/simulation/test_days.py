"""Hours of a daemon in simulated time, and that growth is seen."""

from __future__ import annotations

import pytest

from kvstore.daemon.requests.session import Session
from tests.simulation.days import live

FEW = 0.5
"""In a few hours a figure may differ by this share: what is under way is a part of so little."""


def test_nothing_grows_for_hours() -> None:
    report = live(seed=2, hours=4, an_hour=40)
    assert not report.violation
    assert report.hits
    assert max(report.grown().values()) < FEW, report.failures


def test_a_leak_of_ten_objects_an_answer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Session.answer

    def kept(self: Session, request: int, action: object) -> None:
        self.services.calls.__dict__.setdefault("kept", []).extend(object() for _ in range(10))
        answer(self, request, action)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "answer", kept)
    report = live(seed=2, hours=4, an_hour=40)
    assert report.grown()["objects"] > FEW
    assert report.failures
