"""Copies blocks into, out of and within one GPU's memory, on a few threads with a stream each.

Blocks in GPU memory are verified there by a kernel, blocks in host memory by the processor. Not covered here:
the order of batches and their number at a time, which the core decides.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from kvstore import arena
from kvstore.core.actions import BlockIds
from kvstore.core.events import CORRUPT, FAILED, OK
from kvstore.cuda.checksums import checksums, reserve
from kvstore.cuda.device import CudaError, DeviceBuffer, Gpu, Stream
from kvstore.cuda.kernels import spans
from kvstore.tiers.base import Memory
from kvstore.tiers.results import Done, Results

_log = logging.getLogger(__name__)

THREADS = 2
QUEUE_BLOCKS = 1 << 14


@dataclass(slots=True)
class Batch:
    """Blocks to copy and verify, or without `sources` only to verify. `lengths`: bytes of payloads."""

    identity: BlockIds
    sources: Sequence[Memory] | None
    targets: Sequence[Memory]
    fingerprints: list[bytes]
    lengths: list[int]
    done: Done
    refused: bool = False


class CopyEngine:
    """Calls back once a batch, on its threads, also after a failure."""

    def __init__(self, gpu: Gpu, failed: Callable[[CudaError], None]) -> None:
        """`failed` receives errors of CUDA on one of the threads."""
        self._gpu = gpu
        self._failed = failed
        self._queue: SimpleQueue[Batch | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._blocks = 0
        self._given_up = False
        self._closed = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Starts the threads and reserves their device memory. CudaError if it is short."""
        streams = [self._gpu.stream() for _ in range(THREADS)]
        for stream in streams:
            reserve(stream)
        with self._lock:
            if self._closed:
                return
            for i, stream in enumerate(streams):
                name = f"kvstore-hbm-{i}"
                self._threads.append(
                    threading.Thread(target=self._work, args=(stream,), name=name, daemon=True)
                )
                self._threads[i].start()

    def submit(self, batch: Batch) -> None:
        """Queues a batch. It ends FAILED if the queue is full or no thread runs. Any thread may call."""
        n = len(batch.targets)
        with self._lock:
            if self._threads and not self._closed:
                batch.refused = self._blocks + n > QUEUE_BLOCKS
                self._blocks += n
                self._queue.put(batch)
                return
        batch.done(np.full(n, FAILED, np.uint8))

    def give_up(self) -> None:
        """Ends all waiting batches FAILED, because the GPU is lost."""
        self._given_up = True

    def close(self) -> None:
        """Returns when all submitted batches have ended. A second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, stream: Stream) -> None:
        while (batch := self._queue.get()) is not None:
            results = np.full(len(batch.targets), FAILED, np.uint8)
            try:
                if not (batch.refused or self._given_up):
                    results = _run(batch, stream)
            except CudaError as error:
                _settle(stream)
                self._failed(error)
            except Exception:
                _settle(stream)
                _log.exception("blocks cannot be moved")
            with self._lock:
                self._blocks -= len(batch.targets)
            try:
                batch.done(results)
            except Exception:
                _log.exception("a completion callback failed")
            del batch  # the next wait may be long, and must not keep memory alive
        with contextlib.suppress(CudaError):
            stream.close()


def _settle(stream: Stream) -> None:
    """Waits for copies under way of a failed batch, because its slots may be reused."""
    with contextlib.suppress(CudaError):
        stream.wait()


def _run(batch: Batch, stream: Stream) -> Results:
    n, lengths = len(batch.targets), batch.lengths
    targets = [batch.targets[i][: lengths[i]] for i in range(n)]
    if batch.sources is not None:
        for i, target in enumerate(targets):
            stream.copy(target, batch.sources[i][: lengths[i]])
        stream.wait()
    seeds = [arena.seed(batch.fingerprints[i], batch.identity.key(i), lengths[i]) for i in range(n)]
    good = _checksums(stream, targets, seeds) == batch.identity.checksum
    return np.where(good, OK, CORRUPT).astype(np.uint8)


def _checksums(stream: Stream, blocks: Sequence[Memory], seeds: list[int]) -> npt.NDArray[np.uint64]:
    on_gpu = [block for block in blocks if isinstance(block, DeviceBuffer)]
    if len(on_gpu) == len(blocks):
        return checksums(stream, *spans(on_gpu), seeds)
    host = [block for block in blocks if isinstance(block, memoryview)]
    return np.array([arena.checksum(host[i], seeds[i]) for i in range(len(host))], np.uint64)
