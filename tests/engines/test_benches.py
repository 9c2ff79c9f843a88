"""Smoke runs of the benches that need an environment of their own: they yield their rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.catalog import BENCHES, ENGINES, measure
from bench.harness import Bench

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", ENGINES)
def test_a_bench_yields_its_rows(name: str, tmp_path: Path) -> None:
    results = {result.name for result in measure(name, Bench(0.001, tmp_path, smoke=True))}
    assert results == {*BENCHES[name].rows}
