"""Reads and writes pieces of files by `preadv` and `pwritev`: for machines without the C extension."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, TypeAlias

END_OF_FILE = -1
_ALIGN = 4096

FilePiece: TypeAlias = tuple[int, int, Any, bool]
"""A descriptor, the offset there, a contiguous buffer of bytes, and whether it is written."""


def move_files(pieces: list[FilePiece]) -> list[int]:
    """Moves pieces, in any order. Returns for each its errno, 0 if it was moved whole, or `END_OF_FILE`.

    ValueError, TypeError or BufferError for a buffer or an offset that cannot be used: then nothing is moved.
    """
    for _, offset, buffer, write in pieces:
        view = memoryview(buffer)
        if not view.c_contiguous or (view.readonly and not write):
            raise BufferError("a buffer is not contiguous, or not writable")
        if offset < 0:
            raise ValueError(f"a piece of {view.nbytes} bytes at {offset}")
    return [_move(*piece) for piece in pieces]


def why_no_io_uring() -> str:
    """Returns why pieces are moved one after another, empty if they are at the device at once."""
    return "no C extension"


def _move(fd: int, offset: int, buffer: Any, write: bool) -> int:
    call: Callable[..., int] = os.pwritev if write else os.preadv
    view, moved = memoryview(buffer).cast("B"), 0
    while moved < len(view):
        try:
            n = call(fd, (view[moved:],), offset + moved)  # Python repeats EINTR
        except OSError as error:
            # Direct I/O ends short and unaligned only at the end of a file, and then fails with EINVAL.
            if error.errno != errno.EINVAL or moved % _ALIGN == 0:
                return error.errno or errno.EIO
            n = 0
        if n == 0:
            return END_OF_FILE
        moved += n
    return 0
