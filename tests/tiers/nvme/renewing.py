"""`python -m tests.tiers.nvme.renewing FOLDER N`: an NVMe extent goes from tenant a to tenant b.

At the N-th step of all, whatever it is, the process is killed. Besides the steps of `tests/crash/shim.py`
there are those of slabs: before and after one is removed or allocated, and while it is an empty file.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import arena
from kvstore.core.actions import BlockIds, Copy, Where
from kvstore.tiers.base import Owner
from kvstore.tiers.nvme.io.posix_engine import PosixEngine
from kvstore.tiers.nvme.journal import Namespace
from kvstore.tiers.nvme.slabs import Slabs
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.types import ALIGN
from tests.crash.shim import Steps, _hook_device, _hook_records

EXTENT = 1 << 20
SECRET = b"the secret of tenant a" * (ALIGN // 22)
OTHER = b"the bytes of tenant b!" * (ALIGN // 22)
LENGTH = len(SECRET)
SPACES = {1: ("a", b"a" * 16), 2: ("b", b"b" * 16)}
PAYLOADS = {1: SECRET, 2: OTHER}
_WITHIN_S = 20


def open_tier(folder: Path) -> NvmeTier:
    """Two extents."""
    return NvmeTier.open(folder, 2 * EXTENT, EXTENT, PosixEngine(1))


def identity(number: int) -> BlockIds:
    """Who the block is: the one of its namespace."""
    key = b"k".ljust(64, b"\0")
    checksum = arena.checksum(PAYLOADS[number], arena.seed(SPACES[number][1], b"k", LENGTH))
    words = np.frombuffer(key, np.uint64).reshape(1, 8)
    one = np.ones(1, np.uint8)
    return BlockIds(np.full(1, number, np.uint16), words, one, np.array([checksum], np.uint64))


PLACE = Where(np.array([0 << 32 | 3], np.uint64))


def put(tier: NvmeTier, number: int) -> None:
    """Gives extent 0 to a namespace's tenant and writes its block there."""
    tenant, fingerprint = SPACES[number]
    tier.put_namespace(number, Namespace(tenant, {"block_bytes": LENGTH}, fingerprint))
    tier.format(0, ALIGN, Owner(tenant))
    copy = Copy(1, 0, 1, identity(number), [b""], PLACE, PLACE, np.ones(1, np.uint32), False, None)
    slot = memoryview(mmap.mmap(-1, ALIGN))  # aligned, as direct I/O has it
    slot[:LENGTH] = PAYLOADS[number]
    [results] = _told(lambda done: tier.writer.write(copy, [slot], {number: LENGTH}, done))
    assert results.tolist() == [0]


def renew(tier: NvmeTier) -> None:
    """What the core asks for: the block is dropped, then the extent changes hands."""
    tier.drop(identity(1), PLACE)
    assert _told(lambda done: tier.renew(0, done, done)) == (0,)


def _told(start: Callable[[Callable[..., None]], None]) -> Sequence[Any]:
    """What a callback on another thread was told."""
    ended, told = threading.Event(), []

    def done(*args: Any) -> None:
        told.append(args)
        ended.set()

    start(done)
    assert ended.wait(_WITHIN_S)
    return tuple(told[0])


class _Steps(Steps):
    """Counts all steps as one: how many of each there are depends on what the journal finds waiting."""

    def reach(self, name: str, torn: Any = None) -> None:
        super().reach("step", torn)


def _hook_slabs(steps: Steps) -> None:
    remove, allocate, fallocate = Slabs.remove, Slabs.allocate, os.posix_fallocate

    def around(call: Callable[..., None]) -> Callable[..., None]:
        def shimmed(*args: Any) -> None:
            steps.reach("before")
            call(*args)
            steps.reach("after")

        return shimmed

    Slabs.remove, Slabs.allocate = around(remove), around(allocate)  # type: ignore[method-assign]
    os.posix_fallocate = around(fallocate)


def main() -> None:
    folder, number = sys.argv[1:]
    tier = open_tier(Path(folder))
    tier.load()
    steps = _Steps(f"step:{number}", "kill", None, None)
    _hook_device(steps)
    _hook_records(steps)
    _hook_slabs(steps)
    renew(tier)
    put(tier, 2)
    tier.close()


if __name__ == "__main__":
    main()
