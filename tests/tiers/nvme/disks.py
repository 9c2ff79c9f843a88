"""Disks that fill up soon, turn read-only, or are pulled out."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import struct
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


_EXT4_IOC_SHUTDOWN = 2 << 30 | 4 << 16 | ord("X") << 8 | 125
_WITHOUT_LOG = 2


class Ext4:
    """A file system of its own at `folder`, on a loop device."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder = folder
        self._image = folder.with_name(f"{folder.name}.img")
        with self._image.open("wb") as file:
            file.truncate(nbytes)
        folder.mkdir()

    def make(self) -> bool:
        """Returns whether this user may make and mount it."""
        made = _ran("mkfs.ext4", "-q", "-F", str(self._image))
        return made and self.mount()

    def mount(self) -> bool:
        return _ran("mount", "-o", "loop", str(self._image), str(self.folder))

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True)

    def abort(self) -> None:
        """It is read-only from now on, as after an error."""
        assert _ran("mount", "-o", "remount,abort", str(self.folder))

    def pull(self) -> None:
        """All reads and writes fail from now on, as if the drive had been pulled out."""
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("I", _WITHOUT_LOG))
        finally:
            os.close(fd)


def _ran(*command: str) -> bool:
    found = shutil.which(command[0]) is not None
    return found and not subprocess.run(command, capture_output=True, check=False).returncode


@contextmanager
def ext4(folder: Path, nbytes: int) -> Iterator[Ext4]:
    """Skips the test if the file system cannot be mounted here."""
    disk = Ext4(folder, nbytes)
    if not disk.make():
        pytest.skip("may not mount a file system")
    try:
        yield disk
    finally:
        disk.unmount()
