from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from kvstore.lab.local_daemon import LocalDaemon
from kvstore_llamacpp.checks import SERVED_MODELS

PAGE = (Path(__file__).parents[3] / "docs/llama-cpp.md").read_text(encoding="utf-8")


def test_the_example_runs_as_pasted(models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon) -> None:
    """With a model whose name is that of a blob of Ollama, behind the name of the page."""
    [example] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    blob = tmp_path / "sha256-0123"
    blob.write_bytes(models["llama"].read_bytes())
    (tmp_path / "model.gguf").symlink_to(blob)
    environment = {**os.environ, "KVSTORE_SOCKET": own_daemon.url}
    said = []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", example], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        said.append([int(n) for n in re.findall(r"restored_tokens=(\d+)", ran.stdout)])
    (first, second), (again, once_more) = said
    assert (first, second) == (0, 0)
    assert again > 1000
    assert once_more == 0 or once_more >= again


def test_the_page_names_every_served_model() -> None:
    table = PAGE.partition("### Supported models")[2].partition("\n### ")[0]
    assert all(f"`{name}`" in table for name in SERVED_MODELS)
