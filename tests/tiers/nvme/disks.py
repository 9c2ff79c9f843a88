"""Disks that fill up soon."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

KINDS = ("mount", "limit")


@contextmanager
def small_disk(kind: str, folder: Path, nbytes: int) -> Iterator[None]:
    """Within, `folder` has little room: `nbytes` in a file system of its own, or as the limit of every file.

    Skips the test if the file system cannot be mounted here.
    """
    folder.mkdir(exist_ok=True)
    if kind == "limit":
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
