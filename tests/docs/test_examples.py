"""Every example runs and prints the documented lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

PRINTED = {
    "hello.py": ["get: 6 of 6 blocks, equal: True", "shared prefix: 3 blocks", "another prompt: 0 blocks"],
    "asyncio_prefetch.py": ["256 blocks served of 256"],
    "shared_prefix_two_processes.py": [
        "first engine: 0 blocks loaded, 18 computed",
        "second engine: 16 blocks loaded, 2 computed",
    ],
    "custom_policy.py": ["custom_policy:FIFO  73.90 %"],
}
"""Some of the lines that each example prints."""


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs(name: str) -> None:
    env = {**os.environ, "COLUMNS": "100"}
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True, text=True, timeout=120, check=False, env=env,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for line in PRINTED[name]:
        assert line in ran.stdout


def test_every_example_is_run() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == set(PRINTED)
