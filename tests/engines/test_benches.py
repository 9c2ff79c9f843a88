"""Smoke runs of the benches that need an environment of their own: they yield their rows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.catalog import BENCHES, ENGINES, measure
from bench.harness import Bench
from tests.daemons import eventually

pytestmark = pytest.mark.long
MARK = "KVSTORE_SMOKE_RUN"
"""Names the run in the environment of every process that it starts."""


@pytest.mark.parametrize("name", ENGINES)
def test_a_bench_yields_its_rows_and_leaves_no_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    results = {result.name for result in measure(name, Bench(0.001, tmp_path, smoke=True))}
    assert results == {*BENCHES[name].rows}
    eventually(lambda: not _orphans(f"{MARK}={tmp_path}"))


def _orphans(mark: str) -> list[int]:
    """Returns the processes of a run that are no longer below this one."""
    return [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _is_orphan(pid, mark)]


def _is_orphan(pid: int, mark: str) -> bool:
    try:
        if mark.encode() not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return False
        while pid > 1 and pid != os.getpid():
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return False  # it has ended
    return pid <= 1
