"""Reads blocks from slab files into DRAM or a GPU and verifies each."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import arena
from kvstore.core.actions import BlockIds, Copy, Probe, Where
from kvstore.core.events import CORRUPT, FAILED, OK
from kvstore.cuda.checksums import checksums
from kvstore.cuda.device import CudaError, DeviceBuffer
from kvstore.cuda.kernels import spans
from kvstore.tiers.base import BlockIO, IOEngine, Memory
from kvstore.tiers.nvme.io.transforms import TagError
from kvstore.tiers.nvme.slots import SlotMap, in_gpu, submit_blocks
from kvstore.tiers.results import Done, Results, finish_for_sure, verify_all

_log = logging.getLogger(__name__)


class BlockReader:
    """Reads of one folder."""

    def __init__(self, slots: SlotMap, engine: IOEngine, folder: Path) -> None:
        """`folder` is named in errors."""
        self._folder = folder
        self._slots = slots
        self._engine = engine

    def read(
        self,
        copy: Copy,
        slots: Sequence[Memory],
        fingerprints: dict[int, bytes],
        lengths: dict[int, int],
        done: Done,
        urgent: bool = True,
    ) -> None:
        """Reads blocks into slots, all of DRAM or all of one GPU, and verifies each. Results as in CopyDone.

        `urgent`: a request waits for the blocks. If an encrypted block cannot be decrypted, it is CORRUPT and
        the contents of its slot are undefined.
        """
        self._read(copy.identity, copy.source_where, slots, fingerprints, lengths, done, urgent)

    def probe(
        self, probe: Probe, fingerprints: dict[int, bytes], lengths: dict[int, int], done: Done
    ) -> None:
        """Reads blocks into temporary memory and verifies each. Results as in CopyDone."""
        size, n = probe.slot_bytes, len(probe.identity)
        aside = memoryview(mmap.mmap(-1, size * n))
        slots = [aside[i * size : (i + 1) * size] for i in range(n)]
        self._read(probe.identity, probe.where, slots, fingerprints, lengths, done, urgent=False)

    def _read(
        self,
        identity: BlockIds,
        where: Where,
        slots: Sequence[Any],
        fingerprints: dict[int, bytes],
        lengths: dict[int, int],
        done: Done,
        urgent: bool,
    ) -> None:
        """A block that passes through host memory is verified there, any other block of a GPU by the GPU."""
        to_gpu = in_gpu(slots)
        ios = self._slots.ios(identity, where, slots, False, lengths, fingerprints)
        slots = [*slots]

        def find(errors: list[OSError | None]) -> Results:
            results = np.full(len(errors), FAILED, np.uint8)
            unverified: list[int] = []
            unverified_here: list[int] = []
            for failure in {str(e) for e in errors if e is not None and not isinstance(e, TagError)}:
                _log.error("a read in %s failed: %s", self._folder, failure)
            for i, error in enumerate(errors):
                if error is None and not to_gpu:
                    unverified_here.append(i)
                elif error is None and type(ios[i]) is BlockIO:
                    unverified.append(i)
                elif error is None:
                    results[i] = OK
                elif isinstance(error, TagError):
                    results[i] = CORRUPT
            if unverified_here:
                good = verify_all(identity, unverified_here, slots, fingerprints, lengths)
                results[unverified_here] = np.where(good, OK, CORRUPT)
            if unverified:
                try:
                    good_there = _verify_on_gpu(identity, unverified, slots, fingerprints, lengths)
                    results[unverified] = np.where(good_there, OK, CORRUPT)
                except CudaError as error:
                    _log.error("blocks in GPU memory cannot be verified: %s", error)
            return results

        submit_blocks(self._engine, ios, finish_for_sure(len(slots), find, done), urgent)


def _verify_on_gpu(
    identity: BlockIds,
    which: list[int],
    slots: Sequence[DeviceBuffer],
    fingerprints: dict[int, bytes],
    lengths: dict[int, int],
) -> npt.NDArray[np.bool_]:
    """Returns which slots of one GPU hold the bytes of their blocks. CudaError."""
    blocks, seeds = [], []
    for i in which:
        number = int(identity.namespace[i])
        length = lengths[number]
        blocks.append(slots[i][:length])
        seeds.append(arena.seed(fingerprints[number], identity.key(i), length))
    stream = slots[which[0]].gpu.thread_stream()
    good: npt.NDArray[np.bool_] = checksums(stream, *spans(blocks), seeds) == identity.checksum[which]
    return good
