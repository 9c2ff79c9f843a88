from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from kvstore.lab.local_daemon import LocalDaemon
from tests.programs import Skipped, must_run, untested
from tests.spawner import spawn

# `make test` takes a quarter of the examples. `pytest --hypothesis-profile=explore` looks for what the same
# few examples of every run don't meet.
_slow = [HealthCheck.too_slow, HealthCheck.filter_too_much]
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=_slow)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=25)
settings.register_profile("explore", settings.get_profile("ci"), derandomize=False, max_examples=5000)
settings.load_profile("ci")

LocalDaemon.popen = staticmethod(spawn)
_skipped = Skipped.of_environment()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report = yield
    if report.skipped and must_run(report):
        report.outcome, report.longrepr = "failed", f"nothing may be skipped here: {report.longrepr[2]}"
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes a skipped test for a later run."""
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.note(report.nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what an earlier run has tested as well as this one would."""
    items[:] = [item for item in items if _skipped.wants(item)]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says at the end what was not tested, and what would change that."""
    for line in untested(terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line(line)
