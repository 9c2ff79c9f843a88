"""Memory of a GPU through I/O engines and the NVMe tier, on the fake of cupy.

Engines that cannot reach it move it by host buffers; one that can is made here, of the posix engine: the
fake's device memory has addresses that it can read.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import arena, native
from kvstore.core.actions import BlockIds, Copy, Where
from kvstore.core.events import CORRUPT, FAILED, OK
from kvstore.cuda.device import DeviceBuffer, Gpu, uuids
from kvstore.errors import MisuseError, TierError
from kvstore.tiers.base import OTHERS_EVERY, BlockIO, Owner
from kvstore.tiers.nvme.encryption import BlockCipher
from kvstore.tiers.nvme.io.bounce_buffers import BounceBufferEngine
from kvstore.tiers.nvme.io.posix_engine import PosixEngine
from kvstore.tiers.nvme.io.transforms import DeviceIO, EncryptedIO, TagError
from kvstore.tiers.nvme.journal import Namespace
from kvstore.tiers.nvme.key_files import MasterKey
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.types import ALIGN, ENCRYPTION_BYTES, Layout, slot_bytes
from tests.cuda.faking import fake_cuda
from tests.tiers.nvme.at_once import make_extents
from tests.tiers.test_hbm import Told, held
from tests.tiers.test_io_engine import Waiter, aligned, noise, run

MIB = 1 << 20
SLOT = 2 * ALIGN
LENGTH = SLOT - 100


class Reaching(PosixEngine):
    """Moves device memory itself, as GDS does."""

    device_memory = True
    straight = 0

    def __init__(self) -> None:
        super().__init__(threads=2)
        self.registered: list[int] = []

    def _make_queue(self, threads: int, task_bytes: int, queue_pieces: int) -> native.PortableQueue:
        return native.PortableQueue(threads, task_bytes, queue_pieces, OTHERS_EVERY, self._move)

    def _move(self, pieces: list[native.FilePiece]) -> list[int]:
        return native.move_files(
            [(fd, offset, self._reached(buffer), write) for fd, offset, buffer, write in pieces]
        )

    def _reached(self, buffer: Any) -> Any:
        if not isinstance(buffer, DeviceBuffer):
            return buffer
        self.straight += 1
        buffer.gpu.select()
        memory = (ctypes.c_char * buffer.nbytes).from_address(buffer.address)
        return memoryview(memory).cast("B")

    def register(self, buffer: DeviceBuffer) -> None:
        self.registered.append(buffer.address)

    def unregister(self, buffer: DeviceBuffer) -> None:
        self.registered.remove(buffer.address)


@pytest.fixture
def control() -> Iterator[Any]:
    with fake_cuda(each_bytes=64 * MIB) as made:
        yield made


@pytest.fixture
def gpu(control: Any) -> Gpu:
    return Gpu.open(uuids()[0])


@pytest.fixture(params=["direct", "buffered"])
def fd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if request.param == "direct" else 0)
    opened = os.open(tmp_path / "file", flags, 0o600)
    yield opened
    os.close(opened)


@pytest.fixture
def engine() -> Iterator[BounceBufferEngine]:
    made = BounceBufferEngine(PosixEngine(2), 8 * SLOT)
    yield made
    made.close()


def filled(gpu: Gpu, *blocks: bytes, slot: int = SLOT) -> list[DeviceBuffer]:
    """Slots of one allocation, with these bytes at their heads."""
    whole, stream = gpu.allocate(max(1, len(blocks)) * slot), gpu.stream()
    slots = [whole.part(i * slot, (i + 1) * slot) for i in range(len(blocks))]
    for place, data in zip(slots, blocks, strict=True):
        stream.copy(place[: len(data)], memoryview(data))
    stream.wait()
    return slots


def through(fd: int, index: int, buffer: DeviceBuffer, write: bool, holds: Any = None) -> DeviceIO:
    return DeviceIO(fd, index * SLOT, buffer, write, SLOT, LENGTH, holds)


class TestEngines:
    def test_written_bytes_are_read(self, engine: BounceBufferEngine, gpu: Gpu, fd: int) -> None:
        blocks = [noise(LENGTH, i) for i in range(50)]
        slots = filled(gpu, *blocks)
        assert run(engine, [through(fd, i, slot, True) for i, slot in enumerate(slots)]) == [None] * 50
        there = filled(gpu, *([b"\xff" * SLOT] * 50))
        order = np.random.default_rng(1).permutation(50).tolist()
        assert run(engine, [through(fd, i, there[i], False) for i in order]) == [None] * 50
        assert [held(slot)[:LENGTH] for slot in there] == blocks
        assert [held(slot)[LENGTH:] for slot in there] == [b"\xff" * 100] * 50, "only payloads arrive"

    def test_nothing_of_another_block_is_written_behind_one(
        self, engine: BounceBufferEngine, gpu: Gpu, fd: int
    ) -> None:
        secret = filled(gpu, b"secret" * SLOT, slot=6 * SLOT)[0][:SLOT]
        assert run(engine, [DeviceIO(fd, 0, secret, True, SLOT, SLOT)]) == [None]
        short = filled(gpu, b"short" * SLOT, slot=5 * SLOT)[0][:SLOT]
        assert run(engine, [DeviceIO(fd, 0, short, True, SLOT, 5)]) == [None]
        assert Path(f"/proc/self/fd/{fd}").read_bytes() == b"short" + bytes(SLOT - 5)

    def test_bounced_and_plain_blocks_of_one_batch(
        self, engine: BounceBufferEngine, gpu: Gpu, fd: int
    ) -> None:
        blocks = [noise(SLOT, i) for i in range(4)]
        slots = filled(gpu, *(block[:LENGTH] for block in blocks))
        ios = [BlockIO(fd, i * SLOT, aligned(blocks[i]), True) if i % 2 else through(fd, i, slots[i], True)
               for i in range(4)]  # fmt: skip
        assert run(engine, ios) == [None] * 4
        [there] = filled(gpu, b"")
        assert run(engine, [through(fd, 3, there, False)]) == [None]
        assert held(there)[:LENGTH] == blocks[3][:LENGTH]

    def test_failures_are_a_blocks_own(self, engine: BounceBufferEngine, gpu: Gpu, fd: int) -> None:
        slots = filled(gpu, *(noise(LENGTH, i) for i in range(3)))
        assert run(engine, [through(fd, i, slot, True) for i, slot in enumerate(slots)]) == [None] * 3
        asked: list[bytes] = []

        def not_the_second(slot: memoryview) -> bool:
            asked.append(bytes(slot[:LENGTH]))
            return asked[-1] != noise(LENGTH, 1)

        there, waiter = filled(gpu, b"", b"", b"", b"", b""), Waiter()
        ios = [through(fd, i, there[i], False, not_the_second) for i in range(3)]
        ios += [through(-1, 0, there[3], False), through(fd, 1000, there[4], False)]
        engine.submit(ios, waiter)
        assert waiter.outcomes() == [None, errno.EBADMSG, None, errno.EBADF, errno.EIO]
        assert isinstance(waiter.calls[0][1], TagError)
        assert len(asked) == 3
        assert not any(held(there[1])), "what is wrong never gets there"

    def test_sealed_ones_are_opened_on_their_way(self, engine: BounceBufferEngine, gpu: Gpu, fd: int) -> None:
        seal = BlockCipher(bytes(32), bytes(16), LENGTH)
        size = slot_bytes(LENGTH + ENCRYPTION_BYTES)
        blocks = [noise(LENGTH, i) for i in range(10)]

        def sealed(i: int, buffer: DeviceBuffer, write: bool, holds: Any = None) -> EncryptedIO:
            return EncryptedIO(fd, i * size, buffer, write, seal, b"%d" % i, size, holds)

        ios = [sealed(i, slot, True) for i, slot in enumerate(filled(gpu, *blocks))]
        assert run(engine, ios) == [None] * 10
        assert not any(block[:64] in Path(f"/proc/self/fd/{fd}").read_bytes() for block in blocks)
        there = filled(gpu, *([b""] * 10))
        assert run(engine, [sealed(i, slot, False) for i, slot in enumerate(there)]) == [None] * 10
        assert [held(slot)[:LENGTH] for slot in there] == blocks
        [other] = filled(gpu, b"")
        assert run(engine, [EncryptedIO(fd, 0, other, False, seal, b"5", size)]) == [errno.EBADMSG]
        assert run(engine, [sealed(0, other, False, lambda plain: False)]) == [errno.EBADMSG]
        assert not any(held(other))

    def test_a_gpu_that_is_lost_fails_its_blocks_and_no_others(
        self, engine: BounceBufferEngine, gpu: Gpu, control: Any, fd: int
    ) -> None:
        slots = filled(gpu, noise(LENGTH), noise(LENGTH))
        assert run(engine, [through(fd, 0, slots[0], True)]) == [None]
        control.lose(0)
        plain = aligned(SLOT)
        ios = [through(fd, 1, slots[1], True), through(fd, 0, slots[1], False), BlockIO(fd, 0, plain, False)]
        outcomes = run(engine, ios)
        assert outcomes == [errno.EIO, errno.EIO, None]
        assert plain[:LENGTH] == noise(LENGTH)

    def test_memory_that_an_engine_cannot_access_fails(
        self, engine: BounceBufferEngine, gpu: Gpu, fd: int
    ) -> None:
        assert not engine.device_memory
        [slot] = filled(gpu, noise(SLOT))
        assert run(engine, [BlockIO(fd, 0, slot, True)]) == [errno.EINVAL]

    def test_misuse_starts_nothing(self, engine: BounceBufferEngine, gpu: Gpu, fd: int) -> None:
        [slot] = filled(gpu, noise(LENGTH))
        bad = BlockIO(fd, 0, memoryview(bytes(ALIGN)), False)
        with pytest.raises(MisuseError, match="read-only"):
            engine.submit([through(fd, 0, slot, True), bad], Waiter())
        assert os.fstat(fd).st_size == 0

    @pytest.mark.parametrize("register", ["yes", "no"])
    def test_buffers_are_pinned_once_and_let_go(
        self, fd: int, register: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with fake_cuda(register=register):
            import cupy  # noqa: PLC0415

            pinned: dict[int, int] = cupy.cuda.runtime._pinned
            gpu, engine = Gpu.open(uuids()[0]), BounceBufferEngine(PosixEngine(1), 2 * SLOT)
            asked: list[int] = []
            monkeypatch.setattr(Gpu, "register", counting(Gpu.register, asked))
            [slot] = filled(gpu, noise(LENGTH))
            for _ in range(20):
                assert run(engine, [through(fd, 0, slot, True), through(fd, 1, slot, True)]) == [None] * 2
            assert len(asked) <= 2, "of two buffers"
            assert len(pinned) == (len(asked) if register == "yes" else 0)
            large = filled(gpu, b"", slot=2 * SLOT)[0]
            assert run(engine, [DeviceIO(fd, 0, large, False, 2 * SLOT, LENGTH)]) == [None]
            assert list(pinned.values()) == ([2 * SLOT] if register == "yes" else [])
            engine.close()
            assert pinned == {}
            with pytest.raises(TierError, match="closed"):
                engine.submit([through(fd, 0, slot, True)], Waiter())


def counting(call: Callable[..., bool], asked: list[int]) -> Callable[..., bool]:
    def counted(gpu: Gpu, view: memoryview) -> bool:
        asked.append(view.nbytes)
        return call(gpu, view)

    return counted


class Folder:
    """A tier whose namespace 1 is plain and 2 is encrypted, in extents 0 and 1."""

    def __init__(self, path: Path, engine: PosixEngine) -> None:
        master = MasterKey("the test's key", bytes(range(32)))
        self.tier = NvmeTier.open(path, 2 * MIB, MIB, engine, master, {"one": False, "two": True})
        self.tier.load()
        make_extents(self.tier)
        self.names: dict[int, bytes] = {}
        for number, tenant in ((1, "one"), (2, "two")):
            layout = Layout(model="m", block_bytes=LENGTH)
            self.names[number] = layout.fingerprint(tenant)
            self.tier.put_namespace(number, Namespace(tenant, layout.to_map(), self.names[number]))
            self.tier.format(number - 1, slot_bytes(LENGTH + (number == 2) * ENCRYPTION_BYTES), Owner(tenant))

    def copy(self, number: int, blocks: Sequence[bytes]) -> Copy:
        n = len(blocks)
        words = np.zeros((n, 8), np.uint64)
        words[:, 0] = np.arange(n) + 1
        keys = [words[i].tobytes()[:8] for i in range(n)]
        seeds = [arena.seed(self.names[number], key, LENGTH) for key in keys]
        sums = np.array([arena.checksum(b, s) for b, s in zip(blocks, seeds, strict=True)], np.uint64)
        who = BlockIds(np.full(n, number, np.uint16), words, np.full(n, 8, np.uint8), sums)
        place = Where(np.array([(number - 1) << 32 | i for i in range(n)], np.uint64))
        return Copy(1, 2, 1, who, [b""] * n, place, place, np.ones(n, np.uint32), False, None)

    def write(self, copy: Copy, slots: Sequence[Any]) -> list[int]:
        told = Told()
        self.tier.writer.write(copy, slots, {1: LENGTH, 2: LENGTH}, told)
        return told.result()

    def read(self, copy: Copy, slots: Sequence[Any]) -> list[int]:
        told = Told()
        self.tier.reader.read(copy, slots, self.names, {1: LENGTH, 2: LENGTH}, told)
        return told.result()


@pytest.mark.parametrize("reaching", [False, True])
class TestTier:
    @pytest.fixture
    def io(self, reaching: bool) -> PosixEngine:
        return Reaching() if reaching else PosixEngine(2)

    @pytest.fixture
    def folder(self, tmp_path: Path, io: PosixEngine, control: Any) -> Iterator[Folder]:
        made = Folder(tmp_path, io)
        yield made
        made.tier.close()

    @pytest.mark.parametrize("number", [1, 2])
    def test_from_either_memory_into_the_other(
        self, folder: Folder, io: PosixEngine, gpu: Gpu, reaching: bool, number: int
    ) -> None:
        blocks = [noise(LENGTH, i) for i in range(12)]
        copy = folder.copy(number, blocks)
        assert folder.write(copy, filled(gpu, *blocks)) == [OK] * 12
        here = [aligned(SLOT) for _ in blocks]
        assert folder.read(copy, here) == [OK] * 12
        assert [bytes(slot[:LENGTH]) for slot in here] == blocks
        there = filled(gpu, *([b""] * 12))
        assert folder.read(copy, there) == [OK] * 12
        assert [held(slot)[:LENGTH] for slot in there] == blocks
        if isinstance(io, Reaching):
            assert io.straight == (24 if number == 1 else 0), "what is sealed never goes straight"
        changed = [noise(LENGTH, 100 + i) for i in range(12)]
        copy = folder.copy(number, changed)
        assert folder.write(copy, [aligned(block + bytes(100)) for block in changed]) == [OK] * 12
        assert folder.read(copy, there) == [OK] * 12
        assert [held(slot)[:LENGTH] for slot in there] == changed

    def test_wrong_bytes_are_found(self, folder: Folder, gpu: Gpu) -> None:
        blocks = [noise(LENGTH, i) for i in range(4)]
        wrong = [*blocks[:2], b"?" + blocks[2][1:], blocks[3]]
        for number in (1, 2):
            copy = folder.copy(number, blocks)
            assert folder.write(copy, filled(gpu, *wrong)) == [OK] * 4
            assert folder.read(copy, filled(gpu, b"", b"", b"", b"")) == [OK, OK, CORRUPT, OK]

    def test_slots_of_another_size(self, folder: Folder, io: PosixEngine, gpu: Gpu) -> None:
        blocks = [noise(LENGTH, i) for i in range(4)]
        copy = folder.copy(1, blocks)
        assert folder.write(copy, filled(gpu, *blocks, slot=3 * ALIGN)) == [OK] * 4
        there = filled(gpu, *([b""] * 4), slot=4 * ALIGN)
        assert folder.read(copy, there) == [OK] * 4
        assert [held(slot)[:LENGTH] for slot in there] == blocks
        if isinstance(io, Reaching):
            assert io.straight == 0, "it would take the neighbour's room"

    def test_a_gpu_lost_while_it_verifies(self, folder: Folder, gpu: Gpu, control: Any) -> None:
        blocks = [noise(LENGTH, i) for i in range(4)]
        copy, slots = folder.copy(1, blocks), filled(gpu, *blocks)
        assert folder.write(copy, slots) == [OK] * 4
        control.lose(0, after=1)
        assert folder.read(copy, slots) == [FAILED] * 4

    def test_a_gpu_lost(
        self, folder: Folder, gpu: Gpu, control: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        blocks = [noise(LENGTH, i) for i in range(4)]
        copy, slots = folder.copy(1, blocks), filled(gpu, *blocks)
        assert folder.write(copy, slots) == [OK] * 4
        control.lose(0)
        assert folder.read(copy, slots) == [FAILED] * 4
        assert folder.write(copy, slots) == [FAILED] * 4
        assert folder.read(copy, [aligned(SLOT) for _ in blocks]) == [OK] * 4

    def test_allocations_are_registered_with_the_engine(
        self, folder: Folder, io: PosixEngine, gpu: Gpu
    ) -> None:
        whole = gpu.allocate(4 * MIB)
        folder.tier.engine.register(whole)
        if isinstance(io, Reaching):
            assert io.registered == [whole.address]
        folder.tier.engine.unregister(whole)
        if isinstance(io, Reaching):
            assert io.registered == []
