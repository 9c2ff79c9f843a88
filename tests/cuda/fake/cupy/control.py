"""What tests tell the fake while it runs, and its files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

ILLEGAL_ADDRESS, ECC_UNCORRECTABLE, LAUNCH_FAILURE = 700, 214, 719

_falls: dict[int, tuple[int, int]] = {}
_lost: dict[int, int] = {}


def prefix() -> str:
    """How the names of all files of this world begin."""
    return f"fake-cuda-{os.environ.get('FAKE_CUDA_WORLD', '0')}-"


def files() -> list[Path]:
    """Every allocation of this world, of processes that live; those of dead ones are removed."""
    found = []
    for path in Path("/dev/shm").glob(prefix() + "memory-*"):
        pid = int(path.name.split("-")[-2])
        if Path(f"/proc/{pid}").exists():
            found.append(path)
        else:
            path.unlink(missing_ok=True)
    return found


def used_bytes(ordinal: int | None = None) -> int:
    """Memory that all processes have allocated, of one GPU or of all."""
    used = 0
    for path in files():
        if ordinal is None or path.name.split("-")[-3] == str(ordinal):
            with suppress(FileNotFoundError):  # its process gives it back just now
                used += path.stat().st_size
    return used


def lose(ordinal: int, code: int = LAUNCH_FAILURE, after: int = 0) -> None:
    """From now on a GPU is lost to every process; with `after`, to this one, so many waits later."""
    if after:
        _falls[ordinal] = after, code
    else:
        Path("/dev/shm", f"{prefix()}lost-{ordinal}").write_text(str(code))


def why_lost(ordinal: int) -> int:
    """The error that every call on this GPU has from now on, 0 if it is not lost."""
    path = Path("/dev/shm", f"{prefix()}lost-{ordinal}")
    if ordinal not in _lost and path.exists():
        _lost[ordinal] = int(path.read_text())
    return _lost.get(ordinal, 0)


def waited(ordinal: int) -> None:
    """Somebody waits for work: that may be when it falls."""
    after, code = _falls.get(ordinal, (0, 0))
    if after == 1:
        _lost[ordinal] = code
    if after:
        _falls[ordinal] = after - 1, code


def end_world() -> None:
    """Removes all files of this world, whoever made them."""
    for path in Path("/dev/shm").glob(prefix() + "*"):
        path.unlink(missing_ok=True)
