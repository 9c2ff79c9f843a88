"""Every kind of tier passes the contract of `StorageTier`, a kind that is only in these tests too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.arena import Extent
from kvstore.core.actions import BlockIds, Copy, Where
from kvstore.core.events import OK
from kvstore.cuda.device import CudaError, Gpu, uuids
from kvstore.daemon.runtime.movers import MOVERS
from kvstore.errors import TierError
from kvstore.tiers import dram, hbm
from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.nvme import tier as nvme
from kvstore.tiers.nvme.io.posix_engine import PosixEngine
from kvstore.tiers.nvme.journal import Namespace
from kvstore.tiers.nvme.slabs import Slabs
from kvstore.tiers.nvme.tier import NvmeTier
from tests.cuda.faking import fake_cuda
from tests.tiers.contract import EXTENTS, LENGTH, LENGTHS, NAMES, SLOT, Report, Rig, TierContract, refusing
from tests.tiers.cxl import CxlTier
from tests.tiers.test_io_engine import aligned

EXTENT = 2 << 20


class Failing(Rig):
    """A rig whose tier runs out of room by a function that is made to fail."""

    def __init__(self, tier: Any, owner: Any, name: str, error: type[TierError] = TierError) -> None:
        self.tier = tier
        self._makes = owner, name, error

    @contextmanager
    def full(self) -> Iterator[None]:
        owner, name, error = self._makes
        with pytest.MonkeyPatch.context() as patch:
            refusing(patch, owner, name, lambda: error("injected: no room"))
            yield


class MemoryRig(Failing):
    """Puts blocks by writing into slots of host memory."""

    def put(self, identity: BlockIds, where: Where, payloads: Sequence[bytes]) -> None:
        for slot, data in zip(self.tier.slots(where), payloads, strict=True):
            slot[:LENGTH] = data
        if isinstance(self.tier, DramTier):
            version = np.ones(len(identity), np.uint32)
            self.tier.headers.write(identity, identity, where, version, NAMES, LENGTHS)


class TestDram(TierContract):
    @pytest.fixture
    def rig(self) -> Iterator[Rig]:
        made = MemoryRig(DramTier(EXTENTS * EXTENT, EXTENT, False), Extent, "create")
        yield made
        made.tier.close()


class NvmeRig(Failing):
    def put(self, identity: BlockIds, where: Where, payloads: Sequence[bytes]) -> None:
        done, n = Report(), len(payloads)
        slots = [aligned(data.ljust(SLOT, b"\0")) for data in payloads]
        copy = Copy(1, 0, 1, identity, [b""] * n, where, where, np.ones(n, np.uint32), False, None)
        self.tier.writer.write(copy, slots, LENGTHS, done)
        assert done.next().tolist() == [OK] * n


class TestNvme(TierContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[Rig]:
        tier = NvmeTier.open(tmp_path, EXTENTS * EXTENT, EXTENT, PosixEngine(2))
        for number, name in NAMES.items():
            tier.put_namespace(number, Namespace("one", {"block_bytes": LENGTH}, name))
        yield NvmeRig(tier, Slabs, "allocate")
        tier.close()


class HbmRig(Failing):
    def put(self, identity: BlockIds, where: Where, payloads: Sequence[bytes]) -> None:
        stream = self.tier.gpu.stream()
        for slot, data in zip(self.tier.slots(where), payloads, strict=True):
            stream.copy(slot[:LENGTH], memoryview(data))
        stream.wait()


class TestHbm(TierContract):
    @pytest.fixture
    def rig(self) -> Iterator[Rig]:
        with fake_cuda():
            tier = HbmTier(Gpu.open(uuids()[0]), EXTENTS * EXTENT, EXTENT, 1000)
            yield HbmRig(tier, tier.gpu, "allocate", CudaError)
            tier.close()


class CxlRig(MemoryRig):
    def full(self) -> AbstractContextManager[None]:
        return self._most(0)

    @contextmanager
    def _most(self, extents: int) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.tier, "_new", lambda: CxlTier(0, 0, extents)._new())
            yield


class TestCxl(TierContract):
    @pytest.fixture
    def rig(self) -> Iterator[Rig]:
        made = CxlRig(CxlTier(EXTENTS * EXTENT, EXTENT), None, "")
        yield made
        made.tier.close()


def test_every_kind_has_movers_from_and_to_dram() -> None:
    for kind in (dram.KIND, nvme.KIND, hbm.KIND):
        assert {(kind, dram.KIND), (dram.KIND, kind)} <= MOVERS.keys()
