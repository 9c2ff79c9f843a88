from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
PRINTED = {"transformers": ["0 9", "640 576"], "blend": ["11", "605 600 90"]}


@pytest.mark.parametrize("page", PRINTED)
def test_the_example_runs_as_pasted(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ran = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == PRINTED[page]
