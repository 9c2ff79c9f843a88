"""Sources to build from, and commands that are run and waited for."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore import Client
from kvstore.errors import UnavailableError

ROOT = Path(__file__).parents[2]
MINORS = range(11, 15)
"""Supported minor versions of Python 3."""

FILES = ("CHANGELOG.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "pyproject.toml")
SOURCES = (*FILES, "connectors", "docs", "kvstore", "packaging", "systemd")


def run(*command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env, cwd=cwd)
    assert ran.returncode == 0, f"{shlex.join(command)}: {ran.stdout}{ran.stderr}"
    return ran.stdout + ran.stderr


@contextmanager
def running(*command: str, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs until the block ends, and then ends well."""
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process
        process.terminate()
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(url: str, pid_was: int = 0) -> dict[str, Any] | None:
    """A daemon's status; None while there is none, or still the one from before."""
    try:
        with Client(url) as client:
            status = client.status()
    except UnavailableError:
        return None
    return status if status["pid"] != pid_was else None


def copy_of_sources(folder: Path, what: tuple[str, ...] = SOURCES) -> Path:
    for name in what:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(
                source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
            )
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return folder
