"""Digests files by content on several threads, with progress in the log.

A file is cut into pieces. Each thread reads a piece, step by step, and digests it. This is as fast as the
threads of BLAKE3 over a memory map, and a file that is truncated meanwhile cannot raise SIGBUS.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from blake3 import blake3

from kvstore.weights.files import FileState, ModelFile

PIECE_BYTES = 64 << 20
_STEP_BYTES = 8 << 20  # large: between two steps a thread waits for the interpreter's lock
_MOST_THREADS = 16  # enough for any disk, and few enough to share the memory's bandwidth with an engine
_MOST_BEHIND = 4  # for a digest in the background, which is not to slow the process down
_LOWEST_PRIORITY = 19
_QUIET_S = 2.0
_REPORT_S = 10.0

_buffers = threading.local()


def digest_each(
    files: Iterable[ModelFile], logger: logging.Logger, background: bool = False
) -> dict[FileState, bytes]:
    """Returns the digest of each file's bytes, 32 bytes, by its state. Equal states are read once.

    Logs its progress every 10 s, and its end if it took more than 2 s. `background`: with few threads, which
    leave the CPU to all others. Raises OSError for unreadable files.
    """
    paths = {file.state: file.path for file in files}
    threads = min(len(os.sched_getaffinity(0)), _MOST_BEHIND if background else _MOST_THREADS)
    progress = _Progress(logger)
    pool = ThreadPoolExecutor(threads, "weights", _lower_priority if background else None)
    try:
        pieces: dict[FileState, list[Future[tuple[bytes, int]]]] = {state: [] for state in paths}
        running: set[Future[tuple[bytes, int]]] = set()
        for state, path in paths.items():
            for at in range(0, state.size, PIECE_BYTES):
                # Few are queued: a process that ends waits for those.
                while len(running) >= 2 * threads:
                    running = progress.follow(running)
                pieces[state].append(piece := pool.submit(_piece, path, at))
                running.add(piece)
        while running:
            running = progress.follow(running)
        progress.end()
        return {state: _joined(state, each) for state, each in pieces.items()}
    finally:
        # After an error or an interrupt nothing more is read.
        pool.shutdown(cancel_futures=True)


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


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


class _Progress:
    """Counts the bytes of finished pieces, and logs them."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._began_s = self._reported_s = time.monotonic()
        self._bytes = 0

    def follow(self, running: set[Future[tuple[bytes, int]]]) -> set[Future[tuple[bytes, int]]]:
        """Waits for one of the pieces at least. Returns the others. Raises the error of a piece."""
        ended, left = wait(running, _REPORT_S, FIRST_COMPLETED)
        self._bytes += sum(piece.result()[1] for piece in ended)
        if left and time.monotonic() - self._reported_s >= _REPORT_S:
            self._reported_s = time.monotonic()
            self._logger.info("digests weights: %.1f GB in %.0f s so far", self._bytes / 1e9, self._took_s())
        return left

    def end(self) -> None:
        """Logs the end of a long digest."""
        if self._took_s() > _QUIET_S:
            self._logger.info("digested %.1f GB of weights in %.1f s", self._bytes / 1e9, self._took_s())

    def _took_s(self) -> float:
        return time.monotonic() - self._began_s
