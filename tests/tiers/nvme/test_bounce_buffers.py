"""How sealed blocks move: through few buffers, in order, one's failure nobody else's."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.errors import TierError
from kvstore.tiers.base import OTHERS_EVERY, BlockIO
from kvstore.tiers.nvme.encryption import BlockCipher
from kvstore.tiers.nvme.io.bounce_buffers import BounceBufferEngine
from kvstore.tiers.nvme.io.posix_engine import PosixEngine
from kvstore.tiers.nvme.io.transforms import EncryptedIO, TagError
from kvstore.types import ALIGN, ENCRYPTION_BYTES
from tests.tiers.faulty import Faults, FaultyEngine
from tests.tiers.test_io_engine import Waiter, aligned, noise, run

BLOCK, SLOT = 2 * ALIGN - ENCRYPTION_BYTES, 2 * ALIGN
SEAL = BlockCipher(bytes(32), bytes(16), BLOCK)


def sealed(fd: int, index: int, buffer: memoryview, write: bool) -> EncryptedIO:
    return EncryptedIO(fd, index * SLOT, buffer, write, SEAL, b"%d" % index, SLOT)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    yield opened
    os.close(opened)


class ByHand:
    """Moves nothing before it is told to."""

    name = "by hand"
    device_memory = False

    def __init__(self) -> None:
        self.waiting: list[tuple[Sequence[BlockIO], Callable[[list[OSError | None]], None]]] = []

    def submit(
        self, ios: Sequence[BlockIO], done: Callable[[list[OSError | None]], None], urgent: bool = False
    ) -> None:
        self.waiting.append((ios, done))

    def offsets(self) -> list[int]:
        return [io.offset // SLOT for ios, _ in self.waiting for io in ios]

    def end(self, error: OSError | None = None) -> None:
        ios, done = self.waiting.pop(0)
        done([error] * len(ios))

    def release(self, fd: int) -> None:
        pass

    register = unregister = release

    def close(self) -> None:
        assert not self.waiting


def test_many_blocks_pass_through_few_buffers(fd: int) -> None:
    engine = BounceBufferEngine(FaultyEngine(PosixEngine(2), Faults(reorder=0.5)), 3 * SLOT)
    data = [noise(BLOCK, i) for i in range(100)]
    sources = [aligned(block) for block in data]
    assert run(engine, [sealed(fd, i, slot, True) for i, slot in enumerate(sources)]) == [None] * 100
    slots = [aligned(SLOT) for _ in data]
    assert run(engine, [sealed(fd, i, slot, False) for i, slot in enumerate(slots)]) == [None] * 100
    assert [bytes(slot[:BLOCK]) for slot in slots] == data
    on_disk = Path(f"/proc/self/fd/{fd}").read_bytes()
    assert len(on_disk) == 100 * SLOT
    assert not any(block[:64] in on_disk for block in data)
    engine.close()


def test_no_more_move_than_there_are_buffers_and_the_oldest_first() -> None:
    inner = ByHand()
    engine, waiter = BounceBufferEngine(inner, 2 * SLOT), Waiter()
    ios: list[BlockIO] = [sealed(-1, i, aligned(SLOT), False) for i in range(4)]
    engine.submit([ios[0], BlockIO(-1, 9 * SLOT, aligned(SLOT), False), *ios[1:]], waiter)
    assert inner.offsets() == [9, 0, 1], "what is plain needs no buffer"
    inner.end()
    assert inner.offsets() == [0, 1]
    inner.end(OSError(errno.EIO, "no"))
    assert inner.offsets() == [1, 2]
    inner.end(OSError(errno.EIO, "no"))
    inner.end()
    assert waiter.calls == []
    inner.end(OSError(errno.EAGAIN, "no"))
    assert waiter.outcomes() == [errno.EIO, None, errno.EIO, errno.EBADMSG, errno.EAGAIN]
    assert [type(error) for error in waiter.calls[0] if error][2] is TagError
    engine.close()


def test_urgent_blocks_go_first_and_the_oldest_of_them_before_the_others() -> None:
    inner = ByHand()
    engine, waiter = BounceBufferEngine(inner, SLOT), Waiter()
    for indices, urgent in (([0], False), ([1, 2], False), ([3, 4], True), ([5, 6], True), ([7], False)):
        engine.submit([sealed(-1, i, aligned(SLOT), False) for i in indices], waiter, urgent)
    order = []
    while inner.waiting:
        order += inner.offsets()
        inner.end(OSError(errno.EIO, "no"))
    assert order == [0, 3, 4, 5, 6, 1, 2, 7]
    engine.close()


def test_background_blocks_move_beside_a_stream_of_urgent_ones() -> None:
    inner = ByHand()
    engine, waiter = BounceBufferEngine(inner, SLOT), Waiter()
    engine.submit([sealed(-1, i, aligned(SLOT), False) for i in (0, 1)], waiter)
    for turn in range(2 * OTHERS_EVERY):
        engine.submit([sealed(-1, 2 + turn, aligned(SLOT), False)], waiter, urgent=True)
        inner.end(OSError(errno.EIO, "no"))
        if inner.offsets() == [1]:
            break
    assert inner.offsets() == [1]
    while inner.waiting:
        inner.end(OSError(errno.EIO, "no"))
    engine.close()


def test_buffers_of_one_size_make_room_for_another() -> None:
    inner = ByHand()
    engine = BounceBufferEngine(inner, 2 * SLOT)
    waiters = [Waiter(), Waiter()]
    engine.submit([sealed(-1, i, aligned(SLOT), False) for i in range(2)], waiters[0])
    large = EncryptedIO(-1, 0, aligned(SLOT), False, SEAL, b"0", 2 * SLOT)
    engine.submit([large], waiters[1])
    inner.end(OSError(errno.EIO, "no"))
    assert inner.offsets() == [1]
    inner.end(OSError(errno.EIO, "no"))
    assert [len(io.buffer) for ios, _ in inner.waiting for io in ios] == [2 * SLOT]
    inner.end(OSError(errno.EIO, "no"))
    assert waiters[1].outcomes() == [errno.EIO]
    engine.close()


def test_a_block_that_cannot_be_sealed_fails_alone(fd: int) -> None:
    engine = BounceBufferEngine(PosixEngine(2))
    ios: list[BlockIO] = [sealed(fd, 0, aligned(ALIGN), True), sealed(fd, 1, aligned(SLOT), True)]
    assert run(engine, ios) == [errno.EINVAL, None]
    engine.close()


def test_close_waits_for_blocks_that_wait_for_a_buffer(fd: int) -> None:
    engine, waiters = BounceBufferEngine(PosixEngine(1), SLOT), [Waiter() for _ in range(50)]
    for i, waiter in enumerate(waiters):
        engine.submit([sealed(fd, i, aligned(noise(BLOCK, i)), True)], waiter)
    engine.close()
    assert [waiter.outcomes() for waiter in waiters] == [[None]] * 50
    with pytest.raises(TierError, match="closed"):
        engine.submit([sealed(fd, 0, aligned(SLOT), True)], Waiter())
    engine.close()
