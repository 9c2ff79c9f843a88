"""Pools of GPU memory: opened at a start, one a GPU, and left when their GPU is lost.

None of them is needed: what keeps one from being there is said, and blocks are served from DRAM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvstore.config import Config, format_size
from kvstore.core import events as ev
from kvstore.core.transfers.devices import TierSpec
from kvstore.cuda.device import Gpu, resolve, uuids, why_not
from kvstore.cuda.errors import CudaError
from kvstore.errors import KVStoreError, TierError
from kvstore.tiers.hbm import HbmTier
from kvstore.types import HBM_EXTENTS, Tier, extent_bytes

if TYPE_CHECKING:
    from kvstore.daemon.runtime.executor import Shell

_log = logging.getLogger(__name__)


def open_pools(config: Config) -> tuple[dict[str, HbmTier], list[str]]:
    """The configured pools by name, hbm0 and so on, and why there are not all of them."""
    if not config.hbm.limit:
        return {}, []
    if reason := why_not():
        return {}, [f"hbm.limit: no pool of GPU memory: {reason}"]
    try:
        wanted = list(dict.fromkeys(map(resolve, uuids() if config.hbm.gpus is None else config.hbm.gpus)))
    except KVStoreError as error:
        return {}, [f"hbm.gpus: no pool of GPU memory: {error}"]
    pools: dict[str, HbmTier] = {}
    problems = []
    for uuid in wanted:
        try:
            pools[f"hbm{len(pools)}"] = _open(config, uuid, len(pools))
        except KVStoreError as error:
            problems.append(f"no pool of GPU memory on {uuid}: {error}")
    return pools, problems


def _open(config: Config, uuid: str, number: int) -> HbmTier:
    gpu, limit = Gpu.open(uuid), config.hbm.limit
    free, total = gpu.memory()
    if limit > free:
        raise TierError(
            f"hbm.limit is {format_size(limit)}, {format_size(free)} of {format_size(total)} are free",
            "lower hbm.limit, or have engines on it take less (gpu_memory_utilization)",
        )
    return HbmTier(gpu, limit, extent_bytes(limit, len(config.tenants)), (number + 1) * HBM_EXTENTS)


def spec(name: str, pool: HbmTier) -> TierSpec:
    """What the core is told of a pool."""
    return TierSpec(Tier.HBM, pool.limit_bytes, pool.extent_bytes, table=False, name=name)


class Pinner:
    """Has CUDA know the memory of extents of DRAM, so that copies to and from GPUs are asynchronous and fast.

    What it refuses is copied all the same, through memory of the driver's own.
    """

    def __init__(self, pools: Iterable[HbmTier]) -> None:
        self._gpu = next((pool.gpu for pool in pools), None)
        self._pinned: dict[int, memoryview] = {}

    def pin(self, number: int, view: memoryview) -> None:
        """An extent is there. Takes some 100 ms a GiB."""
        try:
            if self._gpu is not None and self._gpu.register(view):
                self._pinned[number] = view
        except CudaError as error:
            _log.warning("extent %d of DRAM is not pinned for GPUs: %s", number, error)

    def unpin(self, number: int) -> None:
        """An extent is about to be given back, which it can't be while it is pinned."""
        view = self._pinned.pop(number, None)
        if view is not None and self._gpu is not None:
            try:
                self._gpu.unregister(view)
            except CudaError as error:
                _log.warning("extent %d of DRAM stays pinned: %s", number, error)


def lost(shell: Shell, tier: int, error: CudaError) -> None:
    """A GPU is gone, or the daemon's context on it: its blocks are served from below."""
    said = f"{shell.placement.residency.tiers[tier].spec.name} is lost: {error}"
    _log.error("%s", said)
    shell.problems.append(said)
    shell.handle(ev.LoseDevice(tier))
