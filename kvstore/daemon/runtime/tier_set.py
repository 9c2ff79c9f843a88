"""The storage tiers of one daemon, by the core's number and by name."""

from __future__ import annotations

import threading
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.core.queues.device_queue import TierSpec
from kvstore.core.view import View
from kvstore.tiers.base import StorageTier
from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.types import HBM_EXTENTS

DRAM = 0
"""The number of the DRAM tier."""


class TierSet:
    """DRAM, NVMe devices, GPU pools and tiers of other kinds. NVMe devices and pools change at run time."""

    def __init__(
        self,
        view: View,
        dram: DramTier,
        devices: dict[str, NvmeTier],
        pools: Mapping[str, HbmTier],
        others: Iterable[tuple[TierSpec, StorageTier]] = (),
    ) -> None:
        self.dram = dram
        self.devices = devices
        self.pools = dict(pools)
        self.others = {spec.name: tier for spec, tier in others}
        self.changes = 0
        """Counts added and removed NVMe devices."""
        self.on_retired: Callable[[Path], None] = lambda folder: None
        """Called with the folder of a removed NVMe device when that is closed, on a thread."""
        self._view = view
        self._closing: list[threading.Thread] = []
        self._by_name: Mapping[str, StorageTier] = ChainMap[str, Any](
            {self.name_of(DRAM): dram}, self.devices, self.pools, self.others
        )

    def name_of(self, tier: int) -> str:
        """Returns the name of a tier."""
        return self._view.tiers[tier].name

    def at(self, tier: int) -> StorageTier:
        """Returns the tier of this number. KeyError if the device is gone."""
        return self._by_name[self.name_of(tier)]

    def device_at(self, tier: int) -> NvmeTier:
        """Returns the NVMe device of this number."""
        return self.devices[self.name_of(tier)]

    def pool_at(self, tier: int) -> HbmTier:
        """Returns the GPU pool of this number."""
        return self.pools[self.name_of(tier)]

    def add(self, name: str, device: NvmeTier) -> None:
        """Adds an NVMe device."""
        self.devices[name] = device
        self.changes += 1

    def close(self, tier: int) -> None:
        """Removes a device or pool from the set, and closes it on a thread: a device may take long."""
        name, close = self.name_of(tier), self.at(tier).close
        device = self.devices.pop(name, None)
        if device is not None:
            self.changes += 1
            close = partial(self._retire, device)
        self.pools.pop(name, None)
        closing = threading.Thread(target=close, name=f"kvstore-close-{name}", daemon=True)
        closing.start()
        self._closing = [each for each in self._closing if each.is_alive()] + [closing]

    def _retire(self, device: NvmeTier) -> None:
        self.on_retired(device.retire())

    def wait_for_closed(self, within_s: float) -> None:
        """Waits until removed devices are closed, so that their folders can be used again. On any thread."""
        ends = time.monotonic() + within_s
        for closing in self._closing:
            closing.join(max(0.0, ends - time.monotonic()))

    def pool_on(self, uuid: str) -> int:
        """Returns the number of a GPU's pool, or of DRAM if the GPU has none."""
        if uuid:
            for tier in self._view.memory[1:]:
                pool = self.pools.get(self.name_of(tier))
                if pool is not None and pool.gpu.uuid == uuid:
                    return tier
        return DRAM

    def memory_of(self, extent: int) -> int | None:
        """Returns the number of the memory tier that has an extent, None if there is none."""
        if extent < HBM_EXTENTS:
            return DRAM
        for tier in self._view.memory[1:]:
            pool = self.pools.get(self.name_of(tier))
            if pool is not None and pool.base <= extent < pool.base + HBM_EXTENTS:
                return tier
        return None
