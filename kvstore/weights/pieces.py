"""Digests files by content on several threads, with progress in the log.

A file is cut into pieces. Each thread reads a piece and digests it while it is in the CPU's cache. This is as
fast as BLAKE3's own threads over a memory map, and a file that is truncated meanwhile cannot raise SIGBUS.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path

from blake3 import blake3

from kvstore.weights.files import FileState, ModelFile

PIECE_BYTES = 64 << 20
_STEP_BYTES = 1 << 20  # fits a core's cache
_MOST_THREADS = 16  # enough for any disk, and few enough to share the memory's bandwidth with an engine
_QUIET_S = 2.0
_REPORT_S = 10.0

_buffers = threading.local()


def digest_each(files: Iterable[ModelFile], logger: logging.Logger) -> dict[FileState, bytes]:
    """Returns the digest of each file's bytes, 32 bytes, by its state. Equal states are read once.

    Logs its progress every 10 s, and its end if it took more than 2 s. Raises OSError for unreadable files.
    """
    paths = {file.state: file.path for file in files}
    began_s = time.monotonic()
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="weights")
    try:
        pieces = {
            state: [pool.submit(_piece, path, at) for at in range(0, state.size, PIECE_BYTES)]
            for state, path in paths.items()
        }
        _follow([piece for each in pieces.values() for piece in each], began_s, logger)
        return {state: _joined(state, each) for state, each in pieces.items()}
    finally:
        # After an error or an interrupt nothing more is read.
        pool.shutdown(cancel_futures=True)


def _joined(state: FileState, pieces: list[Future[tuple[bytes, int]]]) -> bytes:
    whole = blake3(f"kvstore file 1, {PIECE_BYTES} bytes a piece, {state.size} bytes".encode())
    for piece in pieces:
        whole.update(piece.result()[0])
    return whole.digest()


def _piece(path: Path, start: int) -> tuple[bytes, int]:
    """Returns digest and length of the piece at an offset, shorter where the file ends."""
    buffer: memoryview | None = getattr(_buffers, "own", None)
    if buffer is None:
        buffer = _buffers.own = memoryview(bytearray(_STEP_BYTES))
    digest, at = blake3(), start
    with path.open("rb", buffering=0) as file:
        while at < start + PIECE_BYTES and (n := os.preadv(file.fileno(), [buffer], at)):
            digest.update(buffer[:n])
            at += n
    return digest.digest(), at - start


def _follow(pieces: list[Future[tuple[bytes, int]]], began_s: float, logger: logging.Logger) -> None:
    """Waits until all pieces are digested or one has failed."""
    while True:
        ended, left = wait(pieces, _REPORT_S, FIRST_EXCEPTION)
        failed = any(piece.exception() for piece in ended)
        took_s = time.monotonic() - began_s
        if failed or not left:
            break
        logger.info("digests weights: %.1f GB in %.0f s so far", _gigabytes(ended), took_s)
    if not failed and took_s > _QUIET_S:
        logger.info("digested %.1f GB of weights in %.1f s", _gigabytes(pieces), took_s)


def _gigabytes(pieces: Iterable[Future[tuple[bytes, int]]]) -> float:
    return sum(piece.result()[1] for piece in pieces) / 1e9
