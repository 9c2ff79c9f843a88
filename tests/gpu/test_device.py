"""The device room, the HBM tier and device memory through the NVMe tier, on a real GPU. What it cannot show:
a GPU that is lost, which nothing here provokes.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.core.events import CORRUPT, OK
from kvstore.cuda.device import CudaError, Gpu, resolve, uuids, why_not
from kvstore.tiers.nvme.io import kvikio_engine
from kvstore.tiers.nvme.io.posix_engine import PosixEngine
from tests.cuda.test_device import EXPORTER, IMPORTER, child, ended, filled, held, line
from tests.tiers.nvme.test_device_io import SLOT, Folder
from tests.tiers.nvme.test_device_io import filled as slots_of
from tests.tiers.test_hbm import BASE, EXTENT, Site, Told, copied, host, payload, probed, where
from tests.tiers.test_hbm import LENGTH as PAYLOAD
from tests.tiers.test_io_engine import aligned, noise

MIB = 1 << 20
BIG = 256 * MIB


@pytest.fixture
def gpu() -> Gpu:
    return Gpu.open(uuids()[0])


@pytest.fixture
def site(gpu: Gpu) -> Iterator[Site]:
    made = Site().start()
    assert made.ended.calls == [None]
    yield made
    made.tier.close()
    assert made.lost.calls == []


class TestDevice:
    def test_names(self) -> None:
        assert why_not() == ""
        for i, uuid in enumerate(uuids()):
            assert uuid.startswith(("GPU-", "MIG-"))
            assert len(uuid) == 40
            assert resolve(i) == resolve(f"cuda:{i}") == resolve(uuid) == uuid

    def test_memory_is_zeroed_and_returned(self, gpu: Gpu) -> None:
        before, total = gpu.memory()
        assert 0 < before <= total
        buffer = gpu.allocate(BIG)
        assert not any(held(buffer.part(0, MIB)) + held(buffer.part(BIG - MIB, BIG)))
        assert gpu.memory()[0] <= before - BIG
        stream = gpu.stream()
        stream.copy(buffer.part(0, 4), memoryview(b"dirt"))
        stream.wait()
        gpu.free(buffer)
        again = gpu.allocate(BIG)
        assert not any(held(again.part(0, MIB)))
        gpu.free(again)

    def test_too_much_harms_nothing(self, gpu: Gpu) -> None:
        with pytest.raises(CudaError, match=r"are free.*hbm\.limit") as e:
            gpu.allocate(gpu.memory()[1] + MIB)
        assert not e.value.lost
        buffer = filled(gpu, b"still works")
        assert held(buffer) == b"still works"
        gpu.free(buffer)

    @pytest.mark.parametrize("pinned", [False, True])
    def test_copies_every_way(self, gpu: Gpu, pinned: bool) -> None:
        source, target = (memoryview(mmap.mmap(-1, 64 * MIB)) for _ in range(2))
        source[:] = np.random.default_rng(2).bytes(64 * MIB)
        if pinned:
            assert gpu.register(source)
            assert gpu.register(target)
            assert gpu.register(target), "it is"
        there, beside, stream = gpu.allocate(64 * MIB), gpu.allocate(64 * MIB), gpu.stream()
        stream.copy(there, source)
        stream.copy(beside, there)
        stream.zero(beside.part(5, 10))
        stream.copy(target, beside)
        stream.wait()
        assert target[:5] == source[:5]
        assert target[5:10] == bytes(5)
        assert target[10:] == source[10:]
        if pinned:
            gpu.unregister(source)
            gpu.unregister(target)
        gpu.free(there)
        gpu.free(beside)

    def test_memory_that_is_mapped_read_only_still_copies(self, gpu: Gpu, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(noise(MIB))
        with (tmp_path / "file").open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), MIB, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED))
        pinned = gpu.register(view, readonly=True)
        there, stream = gpu.allocate(MIB), gpu.stream()
        stream.copy(there, view)
        stream.wait()
        assert held(there) == noise(MIB)
        if pinned:
            gpu.unregister(view)
        gpu.free(there)

    def test_other_libraries_see_the_same_memory(self, gpu: Gpu) -> None:
        import cupy  # noqa: PLC0415

        whole = filled(gpu, bytes(range(200)))
        part = whole.part(50, 100)
        assert cupy.asarray(part).get().tobytes() == bytes(range(50, 100))
        seen = cupy.from_dlpack(part)
        seen += 1
        cupy.cuda.get_current_stream().synchronize()
        assert held(part) == bytes(range(51, 101))
        del seen
        gpu.free(whole)

    def test_scratch_is_given_back(self, gpu: Gpu) -> None:
        stream = gpu.stream()
        for nbytes in (1000, 3 * MIB, BIG):
            assert stream.scratch(nbytes).nbytes == nbytes
        stream.wait()
        before = gpu.memory()[0]
        assert stream.scratch(BIG).nbytes == BIG
        assert gpu.memory()[0] == before
        stream.close()
        assert gpu.memory()[0] >= before + BIG


class TestSharing:
    @pytest.mark.parametrize("kill", [False, True])
    def test_another_process_sees_it_and_may_die(self, gpu: Gpu, kill: bool) -> None:
        buffer = filled(gpu, b"exported" * (MIB // 2))
        importer = child(IMPORTER, gpu.uuid, handle=gpu.export(buffer).hex(), nbytes=buffer.nbytes)
        assert bytes.fromhex(line(importer)) == b"exported"
        assert line(importer) == "written"
        assert held(buffer.part(0, 8)) == b"backrted"
        assert ended(importer, kill) == (-signal.SIGKILL if kill else 0)
        assert held(buffer.part(0, 8)) == b"backrted"
        gpu.free(buffer)
        assert gpu.memory()[0] > 0

    def test_an_export_is_readable_after_the_exporter_died(self, gpu: Gpu) -> None:
        exporter = child(EXPORTER, gpu.uuid)
        buffer = gpu.open_export(bytes.fromhex(line(exporter)), 4 * MIB)
        assert held(buffer.part(0, 8)) == b"exported"
        ended(exporter, kill=True)
        assert held(buffer.part(0, 8)) == b"exported", "the driver keeps memory that is mapped"
        gpu.close_export(buffer)
        assert gpu.memory()[0] > 0

    def test_a_handle_of_nothing(self, gpu: Gpu) -> None:
        with pytest.raises(CudaError) as e:
            gpu.open_export(bytes(64), MIB)
        assert not e.value.lost
        assert gpu.memory()[0] > 0


class TestTier:
    def test_blocks_move_every_way_and_wrong_ones_are_found(self, site: Site) -> None:
        n = 40
        first = site.tier.slots(where(*((BASE, i) for i in range(n))))
        second = site.tier.slots(where(*((BASE + 1, i) for i in range(n))))
        source, out = host(*(payload(i) for i in range(n))), host(*([b""] * n))
        assert copied(site, [*source], [*first], n) == [OK] * n
        assert copied(site, [*first], [*second], n) == [OK] * n
        assert copied(site, [*second], [*out], n) == [OK] * n
        assert [bytes(slot[:PAYLOAD]) for slot in out] == [payload(i) for i in range(n)]
        assert probed(site, n) == [OK] * n
        site.put(BASE, 7, b"?")
        want = [CORRUPT if i == 7 else OK for i in range(n)]
        assert probed(site, n) == want
        assert copied(site, [*first], [*second], n) == want
        assert copied(site, [*first], [*out], n) == want

    def test_pinned_slots_move_too(self, site: Site) -> None:
        memory = memoryview(mmap.mmap(-1, EXTENT))
        assert site.gpu.register(memory)
        source = memory[: len(payload(0))]
        source[:] = payload(0)
        assert copied(site, [memory[:SLOT]], site.tier.slots(where((BASE, 0))), 1) == [OK]
        site.gpu.unregister(memory)

    def test_extents_come_and_go(self, site: Site) -> None:
        site.put(BASE, 3, b"secret")
        ready, gone, ended_, failed = Told(), Told(), Told(), Told()
        site.tier.renew(BASE, ready, failed)
        assert ready.wait() == [BASE + 4]
        site.tier.format(BASE + 4, EXTENT)
        assert not any(held(site.tier.slots(where((BASE + 4, 0)))[0]))
        site.tier.remove(BASE + 1, gone)
        assert gone.wait() == [None]
        site.tier.grow(1, ready, ended_)
        assert ended_.wait() == [None]
        assert ready.calls == [BASE + 4, BASE + 5]
        assert failed.calls == []

    def test_an_extent_is_reassigned_after_its_last_mapping(self, site: Site) -> None:
        site.put(BASE, 0, b"exported")
        keeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        handle = site.tier.handle(BASE, os.pidfd_open(keeper.pid))
        importer = child(IMPORTER, site.gpu.uuid, handle=handle.hex(), nbytes=EXTENT)
        assert bytes.fromhex(line(importer)) == b"exported"
        assert line(importer) == "written"
        assert site.tier.handle(BASE, os.pidfd_open(importer.pid)) == handle
        gone = Told()
        site.tier.remove(BASE, gone)
        keeper.communicate(b"\n")
        [slot] = site.tier.slots(where((BASE + 1, 0)))
        assert copied(site, host(payload(0)), [slot], 1) == [OK]
        assert gone.calls == []
        assert ended(importer, kill=True) == -signal.SIGKILL
        assert gone.wait() == [None]


class TestNvme:
    @pytest.fixture(params=["posix", "kvikio"])
    def folder(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
        if request.param == "kvikio" and kvikio_engine.why_not():
            pytest.skip(kvikio_engine.why_not())
        made = Folder(tmp_path, PosixEngine(2) if request.param == "posix" else kvikio_engine.KvikioEngine(2))
        yield made
        made.tier.close()

    @pytest.mark.parametrize("number", [1, 2])
    def test_from_either_memory_into_the_other(self, folder: Folder, gpu: Gpu, number: int) -> None:
        blocks = [noise(SLOT - 100, i) for i in range(30)]
        copy, slots = folder.copy(number, blocks), slots_of(gpu, *blocks)
        whole: Any = slots[0].root
        folder.tier.engine.register(whole)
        assert folder.write(copy, slots) == [OK] * 30
        here = [aligned(SLOT) for _ in blocks]
        assert folder.read(copy, here) == [OK] * 30
        assert [bytes(slot[: SLOT - 100]) for slot in here] == blocks
        stream = gpu.stream()
        stream.zero(whole)
        stream.wait()
        assert folder.read(copy, slots) == [OK] * 30
        assert [held(slot)[: SLOT - 100] for slot in slots] == blocks
        wrong = folder.copy(number, [b"?" + block[1:] for block in blocks])
        assert folder.read(wrong, slots) == [CORRUPT] * 30
        folder.tier.engine.unregister(whole)
        gpu.free(whole)
