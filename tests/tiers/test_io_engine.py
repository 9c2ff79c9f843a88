"""What every I/O engine owes the daemon, and what each adds. A new engine gets a class of a few lines."""

from __future__ import annotations

import errno
import gc
import logging
import mmap
import os
import random
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore import native
from kvstore.errors import MisuseError, TierError
from kvstore.tiers.base import OTHERS_EVERY, BlockIO, IOEngine
from kvstore.tiers.nvme.io.bounce_buffers import BounceBufferEngine
from kvstore.tiers.nvme.io.posix_engine import PosixEngine
from kvstore.types import ALIGN
from tests.tiers.faulty import Faults, FaultyEngine

MIB = 1 << 20
WAIT_S = 30.0


def aligned(content: int | bytes) -> memoryview:
    """Page-aligned memory for direct I/O: so many zeros, or a copy of these bytes."""
    data = bytes(content)
    memory = mmap.mmap(-1, max(len(data), 1))
    memory[: len(data)] = data
    return memoryview(memory)[: len(data)]


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed * 1_000_003 + nbytes).randbytes(nbytes)


class Waiter:
    """A completion callback that can be waited for."""

    def __init__(self) -> None:
        self.calls: list[list[OSError | None]] = []
        self.threads: list[threading.Thread] = []
        self._event = threading.Event()

    def __call__(self, outcomes: list[OSError | None]) -> None:
        self.calls.append(outcomes)
        self.threads.append(threading.current_thread())
        self._event.set()

    def outcomes(self) -> list[int | None]:
        assert self._event.wait(WAIT_S), "the batch never ended"
        assert len(self.calls) == 1
        return [None if error is None else error.errno for error in self.calls[0]]


def run(engine: IOEngine, ios: Sequence[BlockIO]) -> list[int | None]:
    waiter = Waiter()
    engine.submit(ios, waiter)
    return waiter.outcomes()


class IOEngineContract(ABC):
    """Run by every engine: a subclass makes one."""

    @abstractmethod
    def make(self) -> IOEngine:
        """The engine to test."""

    @pytest.fixture
    def engine(self) -> Iterator[IOEngine]:
        made = self.make()
        yield made
        made.close()

    @pytest.fixture(params=["direct", "buffered"])
    def fd(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if request.param == "direct" else 0)
        try:
            fd = os.open(tmp_path / "file", flags, 0o600)
        except OSError:
            pytest.skip("no direct I/O in this folder")
        yield fd
        os.close(fd)

    @pytest.mark.parametrize(
        "nbytes", [ALIGN, 512 << 10, (512 << 10) - ALIGN, (512 << 10) + ALIGN, 3 * MIB + ALIGN]
    )
    def test_written_bytes_are_read(self, engine: IOEngine, fd: int, nbytes: int) -> None:
        blocks = [noise(nbytes, seed) for seed in range(5)]
        assert (
            run(engine, [BlockIO(fd, i * nbytes, aligned(b), True) for i, b in enumerate(blocks)])
            == [None] * 5
        )
        buffers = [aligned(nbytes) for _ in blocks]
        reads = [BlockIO(fd, i * nbytes, buffers[i], False) for i in (3, 0, 4, 2, 1)]
        assert run(engine, reads) == [None] * 5
        assert [bytes(b) for b in buffers] == blocks

    def test_neighbours_stay_untouched(self, engine: IOEngine, fd: int) -> None:
        assert run(engine, [BlockIO(fd, 0, aligned(b"\x11" * (3 * ALIGN)), True)]) == [None]
        assert run(engine, [BlockIO(fd, ALIGN, aligned(b"\x22" * ALIGN), True)]) == [None]
        room = aligned(5 * ALIGN)
        assert run(engine, [BlockIO(fd, 0, room[ALIGN : 4 * ALIGN], False)]) == [None]
        want = [0, 0x11, 0x22, 0x11, 0]
        assert bytes(room) == b"".join(bytes([value]) * ALIGN for value in want)

    def test_an_empty_batch_ends(self, engine: IOEngine) -> None:
        assert run(engine, []) == []

    def test_a_block_of_no_bytes_moves(self, engine: IOEngine, fd: int) -> None:
        assert run(engine, [BlockIO(fd, 0, memoryview(bytearray()), False)]) == [None]

    def test_ends_on_a_thread_of_the_engine(self, engine: IOEngine, fd: int) -> None:
        for ios in ([], [BlockIO(fd, 0, aligned(noise(ALIGN)), True)]):
            waiter = Waiter()
            engine.submit(ios, waiter)
            waiter.outcomes()
            assert waiter.threads[0] is not threading.current_thread()

    def test_one_failed_block_fails_no_other(self, engine: IOEngine, fd: int) -> None:
        data = noise(2 * MIB)
        assert run(engine, [BlockIO(fd, 0, aligned(data), True)]) == [None]
        good = [aligned(MIB), aligned(MIB)]
        ios = [
            BlockIO(fd, 0, good[0], False),
            BlockIO(-1, 0, aligned(MIB), False),
            BlockIO(fd, 8 * MIB, aligned(MIB), False),
            BlockIO(fd, MIB, good[1], False),
        ]
        assert run(engine, ios) == [None, errno.EBADF, errno.EIO, None]
        assert b"".join(bytes(b) for b in good) == data

    @pytest.mark.parametrize("file_bytes", [0, ALIGN, MIB, MIB + ALIGN, MIB + 1000, 2 * MIB - 1])
    def test_a_read_past_the_end_is_an_error(self, engine: IOEngine, fd: int, file_bytes: int) -> None:
        os.truncate(fd, file_bytes)
        assert run(engine, [BlockIO(fd, 0, aligned(2 * MIB), False)]) == [errno.EIO]

    def test_a_write_to_a_file_opened_for_reading_is_an_error(
        self, engine: IOEngine, fd: int, tmp_path: Path
    ) -> None:
        reading = os.open(tmp_path / "file", os.O_RDONLY)
        assert run(engine, [BlockIO(reading, 0, aligned(ALIGN), True)]) == [errno.EBADF]
        os.close(reading)

    def test_many_batches_from_many_threads(self, engine: IOEngine, fd: int) -> None:
        blocks, failures = 24, []

        def client(me: int) -> None:
            for turn in range(3):
                base = me * blocks * 64 * 1024
                data = [noise(64 << 10, 1000 * me + 100 * turn + i) for i in range(blocks)]
                writes = [BlockIO(fd, base + i * 65536, aligned(d), True) for i, d in enumerate(data)]
                buffers = [aligned(65536) for _ in data]
                reads = [BlockIO(fd, base + i * 65536, b, False) for i, b in enumerate(buffers)]
                if run(engine, writes) + run(engine, reads) != [None] * 2 * blocks:
                    failures.append("an outcome")
                if [bytes(b) for b in buffers] != data:
                    failures.append("bytes")

        threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

    def test_keeps_buffers_while_they_move_and_not_longer(self, engine: IOEngine, fd: int) -> None:
        class Buffer(bytearray):
            """Can be watched, unlike its base."""

        data = noise(4 * MIB)
        memory = Buffer(data)
        gone = weakref.ref(memory)
        buffered = os.open(f"/proc/self/fd/{fd}", os.O_RDWR & ~os.O_DIRECT)
        waiter = Waiter()
        engine.submit([BlockIO(buffered, 0, memoryview(memory), True)], waiter)
        del memory
        gc.collect()
        assert waiter.outcomes() == [None]
        assert os.pread(buffered, 4 * MIB, 0) == data
        os.close(buffered)
        until = time.monotonic() + WAIT_S
        while gone() is not None and time.monotonic() < until:
            time.sleep(0.001)
        assert gone() is None

    def test_a_raising_callback_affects_no_other(
        self, engine: IOEngine, fd: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(_: list[OSError | None]) -> None:
            raise ZeroDivisionError("in the callback")

        with caplog.at_level(logging.CRITICAL + 1):
            for _ in range(16):
                engine.submit([BlockIO(fd, 0, aligned(noise(ALIGN)), True)], broken)
            for _ in range(16):
                assert run(engine, [BlockIO(fd, 0, aligned(ALIGN), True)]) == [None]

    def test_a_callback_may_submit(self, engine: IOEngine, fd: int) -> None:
        data, buffer, waiter = noise(MIB), aligned(MIB), Waiter()

        def then_read(outcomes: list[OSError | None]) -> None:
            assert outcomes == [None]
            engine.submit([BlockIO(fd, 0, buffer, False)], waiter)

        engine.submit([BlockIO(fd, 0, aligned(data), True)], then_read)
        assert waiter.outcomes() == [None]
        assert bytes(buffer) == data

    @pytest.mark.parametrize("flood_is_urgent", [True, False])
    def test_a_flood_of_one_urgency_does_not_starve_the_other(
        self, engine: IOEngine, fd: int, flood_is_urgent: bool
    ) -> None:
        assert run(engine, [BlockIO(fd, 0, aligned(noise(MIB)), True)]) == [None]
        stop, flood_ended, waiter = threading.Event(), threading.Semaphore(0), Waiter()

        def again(outcomes: list[OSError | None]) -> None:
            if stop.is_set():
                flood_ended.release()
                return
            engine.submit([BlockIO(fd, 0, aligned(ALIGN), False)], again, flood_is_urgent)

        for _ in range(16):
            again([])
        engine.submit([BlockIO(fd, 0, aligned(MIB), False)], waiter, not flood_is_urgent)
        assert waiter.outcomes() == [None]
        stop.set()
        for _ in range(16):
            assert flood_ended.acquire(timeout=WAIT_S)

    def test_close_waits_and_refuses_more(self, fd: int) -> None:
        engine = self.make()
        waiters = [Waiter() for _ in range(32)]
        for i, waiter in enumerate(waiters):
            engine.submit([BlockIO(fd, i * MIB, aligned(noise(MIB, i)), True)], waiter)
        engine.close()
        assert [len(waiter.calls) for waiter in waiters] == [1] * 32
        assert os.fstat(fd).st_size == 32 * MIB
        with pytest.raises(TierError, match="closed"):
            engine.submit([], Waiter())
        engine.close()

    @pytest.mark.parametrize(
        ("buffer", "words"),
        [
            (memoryview(bytes(ALIGN)), "read-only"),
            (memoryview(bytearray(2 * ALIGN))[::2], "contiguous"),
            (memoryview(bytearray(ALIGN)).cast("Q"), "format Q"),
        ],
    )
    def test_misuse_raises_at_once_and_starts_nothing(
        self, engine: IOEngine, fd: int, buffer: memoryview, words: str
    ) -> None:
        waiter = Waiter()
        with pytest.raises(MisuseError, match=words):
            engine.submit(
                [BlockIO(fd, 0, aligned(noise(ALIGN)), True), BlockIO(fd, 0, buffer, False)], waiter
            )
        assert run(engine, []) == []
        assert waiter.calls == []
        assert os.fstat(fd).st_size == 0


class TestPosix(IOEngineContract):
    """With io_uring where the kernel lets it."""

    def make(self) -> IOEngine:
        return PosixEngine()


class TestSystemCalls(IOEngineContract):
    """Without the C extension."""

    @pytest.fixture(autouse=True)
    def portable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "IOQueue", native.PortableQueue)

    def make(self) -> IOEngine:
        return PosixEngine()

    @pytest.mark.parametrize("call", ["preadv", "pwritev"])
    def test_short_transfers_are_continued(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        whole: Callable[..., int] = getattr(os, call)
        monkeypatch.setattr(os, call, lambda fd, buffers, offset: whole(fd, [buffers[0][:1000]], offset))
        engine, data, buffer = (
            PosixEngine(threads=2, task_bytes=2 * ALIGN),
            noise(5 * ALIGN),
            aligned(5 * ALIGN),
        )
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        assert run(engine, [BlockIO(fd, ALIGN, aligned(data), True)]) == [None]
        assert run(engine, [BlockIO(fd, ALIGN, buffer, False)]) == [None]
        assert bytes(buffer) == data
        os.close(fd)
        engine.close()

    @pytest.mark.parametrize(("moved", "want"), [(1000, errno.EIO), (ALIGN, errno.EINVAL)])
    def test_direct_io_that_stops_at_an_odd_place_met_the_end(
        self, monkeypatch: pytest.MonkeyPatch, moved: int, want: int
    ) -> None:
        """Some file systems answer EINVAL, not 0, to a direct read that goes on from there."""
        answers = iter([moved])

        def odd(*_: object) -> int:
            for answer in answers:
                return answer
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        monkeypatch.setattr(os, "preadv", odd)
        engine = PosixEngine(threads=1)
        assert run(engine, [BlockIO(0, 0, aligned(4 * ALIGN), False)]) == [want]
        engine.close()

    def test_tasks_start_in_the_order_of_submission(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[tuple[int, int]] = []

        def spy(_: int, buffers: Sequence[memoryview], offset: int) -> int:
            seen.append((offset, len(buffers[0])))
            return len(buffers[0])

        monkeypatch.setattr(os, "preadv", spy)
        engine = PosixEngine(threads=1, task_bytes=2 * ALIGN)
        run(engine, [BlockIO(0, at, memoryview(bytearray(3 * ALIGN)), False) for at in (0, 65536)])
        engine.close()
        assert seen == [(0, 2 * ALIGN), (2 * ALIGN, ALIGN), (65536, 2 * ALIGN), (65536 + 2 * ALIGN, ALIGN)]

    def test_urgent_tasks_start_first_except_one_of_eight(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gate, entered = threading.Event(), threading.Event()
        seen: list[int] = []

        def spy(_: int, buffers: Sequence[memoryview], offset: int) -> int:
            entered.set()
            gate.wait(WAIT_S)
            seen.append(offset)
            return len(buffers[0])

        monkeypatch.setattr(os, "preadv", spy)
        engine = PosixEngine(threads=1, task_bytes=ALIGN)
        engine.submit([BlockIO(0, 0, aligned(ALIGN), False)], Waiter())
        assert entered.wait(WAIT_S)
        urgent, others = 1, 2
        engine.submit([BlockIO(0, others, aligned(20 * ALIGN), False)], Waiter())
        engine.submit([BlockIO(0, urgent, aligned(30 * ALIGN), False)], Waiter(), urgent=True)
        gate.set()
        engine.close()
        lanes = [offset % ALIGN for offset in seen[1:]]
        turns = ([urgent] * (OTHERS_EVERY - 1) + [others]) * 5
        last = max(i for i, lane in enumerate(lanes) if lane == urgent) + 1
        assert lanes[:last] == turns[:last]
        assert lanes[last:] == [others] * (50 - last)
        for lane in (urgent, others):
            mine = [offset for offset in seen[1:] if offset % ALIGN == lane]
            assert mine == sorted(mine)

    def test_each_lane_has_a_bound_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = threading.Event()

        def slow(_: int, buffers: Sequence[memoryview], __: int) -> int:
            gate.wait(WAIT_S)
            return len(buffers[0])

        monkeypatch.setattr(os, "preadv", slow)
        engine = PosixEngine(threads=1, task_bytes=ALIGN, queue_pieces=4)
        waiters = {lane: [Waiter() for _ in range(3)] for lane in (False, True)}
        for urgent, mine in waiters.items():
            for waiter in mine:
                engine.submit([BlockIO(0, 0, aligned(3 * ALIGN), False)], waiter, urgent)
        gate.set()
        for mine in waiters.values():
            # One batch may have begun to move before the second came.
            outcomes = [waiter.outcomes() for waiter in mine]
            assert outcomes[0] == [None]
            assert outcomes[2] == [errno.EAGAIN]
        engine.close()

    def test_several_tasks_are_at_the_device_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        together = threading.Barrier(4)

        def meet(_: int, buffers: Sequence[memoryview], __: int) -> int:
            together.wait(WAIT_S)
            return len(buffers[0])

        monkeypatch.setattr(os, "preadv", meet)
        engine = PosixEngine(threads=4, task_bytes=ALIGN)
        assert run(engine, [BlockIO(0, 0, memoryview(bytearray(4 * ALIGN)), False)]) == [None]
        engine.close()

    @pytest.mark.parametrize(
        ("blocks", "pages", "tasks"), [(1, 16, 1), (3, 8, 1), (16, 1, 4), (1, 128, 1), (4, 128, 4)]
    )
    def test_little_to_move_wakes_one_thread(
        self, monkeypatch: pytest.MonkeyPatch, blocks: int, pages: int, tasks: int
    ) -> None:
        moved: list[int] = []

        def spy(pieces: Sequence[Any]) -> list[int]:
            moved.append(sum(len(piece[2]) for piece in pieces))
            return [0] * len(pieces)

        monkeypatch.setattr(native, "IOQueue", partial(native.PortableQueue, move=spy))
        engine = PosixEngine(threads=4)
        ios = [BlockIO(0, n << 20, aligned(pages * ALIGN), False) for n in range(blocks)]
        assert run(engine, ios) == [None] * blocks
        engine.close()
        assert sum(moved) == blocks * pages * ALIGN
        assert len(moved) == tasks

    def test_a_full_queue_answers_eagain(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = threading.Event()
        whole = os.pwritev

        def slow(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            gate.wait(WAIT_S)
            return whole(fd, buffers, offset)

        monkeypatch.setattr(os, "pwritev", slow)
        engine = PosixEngine(threads=1, task_bytes=ALIGN, queue_pieces=4)
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        accepted, refused = Waiter(), Waiter()
        engine.submit([BlockIO(fd, 0, aligned(4 * ALIGN), True)], accepted)
        engine.submit([BlockIO(fd, 65536, aligned(2 * ALIGN), True) for _ in range(2)], refused)
        gate.set()
        assert accepted.outcomes() == [None]
        assert refused.outcomes() == [errno.EAGAIN] * 2
        assert os.fstat(fd).st_size == 4 * ALIGN
        assert run(engine, [BlockIO(fd, 0, aligned(ALIGN), True)]) == [None]
        os.close(fd)
        engine.close()

    def test_settings_that_cannot_work(self) -> None:
        for threads, task_bytes in ((0, ALIGN), (1, 0), (1, 1000)):
            with pytest.raises(MisuseError, match="threads"):
                PosixEngine(threads, task_bytes)


class TestBouncing(IOEngineContract):
    """With blocks that are not sealed; see test_bounce.py for those that are."""

    def make(self) -> IOEngine:
        return BounceBufferEngine(PosixEngine(threads=2))


class TestFaultyWithoutFaults(IOEngineContract):
    def make(self) -> IOEngine:
        return FaultyEngine(PosixEngine(threads=2), Faults())


class TestFaultyThatOnlyDelays(IOEngineContract):
    """Late and out of order is allowed by the contract."""

    def make(self) -> IOEngine:
        return FaultyEngine(PosixEngine(threads=2), Faults(reorder=0.5, delay=0.5, delay_s=0.005))


class TestFaulty:
    BLOCKS = 64

    def outcomes(
        self, tmp_path: Path, faults: Faults, seed: int
    ) -> tuple[list[int | None], list[int], dict[str, int]]:
        """Outcomes of reading ones, how many bytes of each are wrong, what was injected."""
        path = tmp_path / "ones"
        path.write_bytes(b"\x01" * 2 * ALIGN * self.BLOCKS)
        fd = os.open(path, os.O_RDONLY)
        engine = FaultyEngine(PosixEngine(), faults, seed)
        buffers = [aligned(2 * ALIGN) for _ in range(self.BLOCKS)]
        got = run(engine, [BlockIO(fd, 2 * ALIGN * i, b, False) for i, b in enumerate(buffers)])
        engine.close()
        os.close(fd)
        return got, [2 * ALIGN - bytes(b).count(1) for b in buffers], engine.injected

    def test_errors(self, tmp_path: Path) -> None:
        got, wrong, injected = self.outcomes(tmp_path, Faults(error=0.3), 1)
        assert 5 < injected["error"] < 40
        assert [w == 0 for w in wrong] == [o is None for o in got]
        assert got.count(errno.EIO) == injected["error"]

    def test_short(self, tmp_path: Path) -> None:
        got, wrong, injected = self.outcomes(tmp_path, Faults(short=0.3), 1)
        assert got.count(errno.EIO) == injected["short"] > 5
        assert {(o, w) for o, w in zip(got, wrong, strict=True)} == {(None, 0), (errno.EIO, ALIGN)}

    def test_corrupt(self, tmp_path: Path) -> None:
        got, wrong, injected = self.outcomes(tmp_path, Faults(corrupt=0.3), 1)
        assert got == [None] * self.BLOCKS
        assert sum(wrong) == injected["corrupt"] > 5

    def test_one_seed_gives_the_same_faults_again(self, tmp_path: Path) -> None:
        faults = Faults(error=0.2, short=0.2, corrupt=0.2, reorder=0.5)
        assert self.outcomes(tmp_path, faults, 7) == self.outcomes(tmp_path, faults, 7)
        assert self.outcomes(tmp_path, faults, 7) != self.outcomes(tmp_path, faults, 8)

    def test_a_delayed_batch_is_passed(self) -> None:
        engine = FaultyEngine(PosixEngine(), Faults(delay=0.5, delay_s=0.05), 3)
        order: list[int] = []
        for i in range(16):
            engine.submit([], lambda _, i=i: order.append(i))
        engine.close()
        assert sorted(order) == list(range(16))
        assert order != list(range(16))
