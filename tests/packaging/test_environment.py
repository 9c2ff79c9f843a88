"""The script that makes the environment: its progress in a log and on a terminal, and its failures."""

from __future__ import annotations

import importlib.util
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "packaging/environment.py"
PIP = """
print("Obtaining file:///here")
print("Collecting numpy>=1.26 (from kvstore==0.1.0)")
print("  Using cached numpy.whl (16 MB)")
print("Collecting rich", flush=True)
print("Installing collected packages: numpy, rich", flush=True)
"""


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_a_log_gets_one_line_per_step(module: ModuleType, tmp_path: Path) -> None:
    out = io.StringIO()
    assert module.run("packages", [sys.executable, "-c", PIP], module.Progress(tmp_path), out) == 0
    assert out.getvalue() == "packages\n"


def test_a_failed_step_shows_its_output(module: ModuleType, tmp_path: Path) -> None:
    out = io.StringIO()
    command = [sys.executable, "-c", "import sys; print('no such package'); sys.exit(3)"]
    assert module.run("packages", command, module.Progress(tmp_path), out) == 3
    assert out.getvalue() == "packages\nno such package\n"


def test_progress_counts_found_and_installed_packages(module: ModuleType, tmp_path: Path) -> None:
    site = tmp_path / "lib/python3.11/site-packages"
    (site / "pip-23.dist-info").mkdir(parents=True)
    progress = module.Progress(tmp_path)
    assert progress.text() == ""
    for line in ("Collecting numpy", "Using cached numpy.whl", "Collecting rich"):
        progress.feed(line)
    assert progress.text() == "2 found"
    progress.feed("Installing collected packages: numpy, rich")
    (site / "numpy-2.dist-info").mkdir()
    assert progress.text() == f"{'█' * 12}{'░' * 12} 1 of 2 installed"
    (site / "rich-15.dist-info").mkdir()
    (site / "kvstore-1.dist-info").mkdir()
    assert progress.text() == f"{'█' * 24} 2 of 2 installed"


def test_a_terminal_gets_one_line_that_fits(module: ModuleType, tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "w", encoding="utf-8") as out:
        slow = f"{PIP}\nimport time; time.sleep(0.7)"
        assert module.run("packages", [sys.executable, "-c", slow], module.Progress(tmp_path), out) == 0
        written = ""
        while "\n" not in written:  # a terminal hands out what was written in pieces
            written += os.read(controller, 1 << 16).decode()
    os.close(controller)
    lines = re.sub(r"\x1b\[K", "", written).replace("\r\n", "\n").split("\r")
    assert max(map(len, lines)) < 80
    assert re.search(r"0 of 2 installed", written)
    assert written.count("\n") == 1
    assert re.fullmatch(r"packages: \d s\n", lines[-1])


def test_a_failed_installation_is_reported_with_the_output_of_pip(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    command = [sys.executable, str(SCRIPT), "env", "./nothing"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert (tmp_path / "env/bin/python").exists()
    first, second, *rest = done.stdout.splitlines()
    assert first.startswith("env: Python 3.")
    assert second.startswith("env: packages")
    assert "not installable" in "".join(rest)
    assert "failed with exit code" in done.stderr


def test_the_script_needs_a_folder_and_a_requirement() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "usage: python3 packaging/environment.py" in done.stderr
