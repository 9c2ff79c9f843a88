"""Pools of GPU memory: one for each configured GPU, opened at the start, closed when the GPU is lost.

The daemon runs without pools. A pool that cannot be opened is reported, and blocks are served from DRAM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvstore.config import Config, format_size
from kvstore.core import events as ev
from kvstore.core.queues.device_queue import TierSpec
from kvstore.cuda.device import Gpu, resolve, uuids, why_not
from kvstore.cuda.errors import CudaError
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.problems import Problems
from kvstore.errors import KVStoreError, TierError
from kvstore.tiers.hbm import HbmTier
from kvstore.types import HBM_EXTENTS, Tier, extent_bytes

_log = logging.getLogger(__name__)


def open_pools(config: Config) -> tuple[dict[str, HbmTier], list[str]]:
    """Opens the configured pools. Returns them by name (hbm0 and so on), and why some are left out."""
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
    """Returns the core's description of a pool."""
    return TierSpec(Tier.HBM, pool.limit_bytes, pool.extent_bytes, table=False, name=name)


class Pinner:
    """Registers DRAM extents with CUDA, which makes copies to and from GPUs asynchronous and fast.

    Extents that CUDA refuses are copied too, through the driver's own buffers.
    """

    def __init__(self, pools: Iterable[HbmTier]) -> None:
        self._gpu = next((pool.gpu for pool in pools), None)
        self._pinned: dict[int, memoryview] = {}

    def pin(self, number: int, view: memoryview) -> None:
        """Registers an extent. Takes about 100 ms a GiB."""
        try:
            if self._gpu is not None and self._gpu.register(view):
                self._pinned[number] = view
        except CudaError as error:
            _log.warning("extent %d of DRAM is not pinned for GPUs: %s", number, error)

    def unpin(self, number: int) -> None:
        """Unregisters an extent before it is freed."""
        view = self._pinned.pop(number, None)
        if view is not None and self._gpu is not None:
            try:
                self._gpu.unregister(view)
            except CudaError as error:
                _log.warning("extent %d of DRAM stays pinned: %s", number, error)


def lost(core: Executor, problems: Problems, tier: int, error: CudaError) -> None:
    """Reports a lost GPU, or a lost CUDA context on it. Its blocks are served from lower tiers."""
    problems.report(f"{core.view.tiers[tier].name} is lost: {error}")
    core.handle(ev.LoseDevice(tier))
