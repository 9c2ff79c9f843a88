"""The table of movers: how blocks are copied from a tier of one kind to a tier of another.

A mover starts one copy and calls `done` with its results. A new kind of tier adds its movers to `MOVERS`.
Which blocks are copied, and when, is not covered here: the core decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.core.actions import Copy
from kvstore.tiers import dram, hbm
from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.nvme import tier as nvme
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.results import Done


@dataclass(frozen=True, slots=True)
class CopyJob:
    """One copy and what its mover needs. `fingerprints` and `lengths` (bytes) are by namespace number.

    `stored_at` says when each block was stored, in s since 1970: 0 for a block without a TTL, None if no
    block has one.
    """

    copy: Copy
    fingerprints: dict[int, bytes]
    lengths: dict[int, int]
    stored_at: npt.NDArray[np.float64] | None
    done: Done


Mover: TypeAlias = Callable[[Any, Any, CopyJob], None]
"""Receives the source tier, the target tier and the job."""


def within_dram(source: DramTier, target: DramTier, job: CopyJob) -> None:
    """Copies from one extent in DRAM to another."""
    target.move(job.copy, job.fingerprints, job.lengths, job.done)


def to_nvme(source: DramTier | HbmTier, target: NvmeTier, job: CopyJob) -> None:
    """Writes slots of memory to a device and records them."""
    slots = source.slots(job.copy.source_where)
    target.writer.write(job.copy, slots, job.lengths, job.done, job.stored_at)


def from_nvme(source: NvmeTier, target: DramTier | HbmTier, job: CopyJob) -> None:
    """Reads blocks from a device into slots of memory."""
    slots = target.slots(job.copy.target_where)
    source.reader.read(job.copy, slots, job.fingerprints, job.lengths, job.done, job.copy.urgent)


def to_gpu(source: DramTier | HbmTier, target: HbmTier, job: CopyJob) -> None:
    """Copies into a GPU's memory, by that GPU."""
    _by_gpu(target, source, target, job)


def from_gpu(source: HbmTier, target: DramTier, job: CopyJob) -> None:
    """Copies from a GPU's memory to DRAM, by that GPU."""
    _by_gpu(source, source, target, job)


def _by_gpu(pool: HbmTier, source: DramTier | HbmTier, target: DramTier | HbmTier, job: CopyJob) -> None:
    copy = job.copy
    sources, targets = [*source.slots(copy.source_where)], [*target.slots(copy.target_where)]
    pool.copy(copy, sources, targets, job.fingerprints, job.lengths, job.done)


MOVERS: dict[tuple[str, str], Mover] = {
    (dram.KIND, dram.KIND): within_dram,
    (dram.KIND, nvme.KIND): to_nvme,
    (hbm.KIND, nvme.KIND): to_nvme,
    (nvme.KIND, dram.KIND): from_nvme,
    (nvme.KIND, hbm.KIND): from_nvme,
    (dram.KIND, hbm.KIND): to_gpu,
    (hbm.KIND, hbm.KIND): to_gpu,
    (hbm.KIND, dram.KIND): from_gpu,
}
"""By (kind of the source tier, kind of the target tier)."""
