"""The pages for newcomers: their program, their flag, and the links from each page to the next."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from kvstore.lab.local_daemon import LocalDaemon

DOCS = Path(__file__).parents[2] / "docs"
WAY = ("install", "first-daemon", "first-engine", "dashboard", "lab")
"""The pages that a newcomer reads, in order."""


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def test_the_first_program_prints_what_the_page_shows() -> None:
    text = page("first-daemon")
    [program] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    shown = re.findall(r"```text\n(PutResult.*?)```", text, re.DOTALL)
    assert len(shown) == 2
    with LocalDaemon({"dram": {"limit": "16MiB"}, "nvme": {"limit": "32MiB"}}) as daemon:
        for output in shown:
            ran = subprocess.run(
                [sys.executable, "-c", program],
                capture_output=True, text=True, timeout=60, check=False,
                env={**os.environ, "KVSTORE_SOCKET": daemon.url},
            )  # fmt: skip
            assert ran.stdout == output, ran.stderr
            daemon.restart()


def test_the_flag_of_the_first_engine_is_that_of_the_engines_page() -> None:
    flag = r"--kv-transfer-config ('\{.*?\}')"
    [first], [tested, *_] = (re.findall(flag, page(name), re.DOTALL) for name in ("first-engine", "vllm"))
    assert first == tested


def test_each_page_for_newcomers_links_to_the_next() -> None:
    for name, following in pairwise(WAY):
        assert re.findall(r"^\*\*Next:\*\* \[.*\]\((.*)\.md\)", page(name), re.MULTILINE) == [following]
