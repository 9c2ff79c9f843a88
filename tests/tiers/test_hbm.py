"""The HBM tier on the fake of cupy: the life of extents, blocks that move, processes that map, a GPU lost."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore import arena
from kvstore.core.actions import BlockIds, Copy, Probe, Where
from kvstore.core.events import CORRUPT, FAILED, OK
from kvstore.cuda.device import CudaError, DeviceBuffer, Gpu, uuids
from kvstore.cuda.kernels import SCRATCH_BYTES
from kvstore.errors import TierError
from kvstore.tiers import copy_engine
from kvstore.tiers.hbm import HbmTier
from kvstore.types import ALIGN
from tests.cuda.faking import fake_cuda

MIB = 1 << 20
EXTENT = 2 * MIB
BASE = 1000
LENGTH = ALIGN + 1000
SLOT = 2 * ALIGN
FINGERPRINT = b"fingerprint 16 b"
WAIT_S = 20.0
RESERVED = copy_engine.THREADS * SCRATCH_BYTES


class Told:
    """A callback that can be waited for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.threads: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, what: Any = None) -> None:
        with self._changed:
            self.calls.append(what)
            self.threads.append(threading.current_thread().name)
            self._changed.notify_all()

    def wait(self, count: int = 1) -> list[Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= count, WAIT_S), "it never came"
        assert len(self.calls) == count
        return self.calls

    def result(self) -> list[int]:
        [results] = self.wait()
        return [int(one) for one in results]


class Site:
    """A tier of up to four extents on a GPU with room for eight."""

    def __init__(self, extents: int = 4) -> None:
        self.gpu = Gpu.open(uuids()[0])
        self.tier = HbmTier(self.gpu, extents * EXTENT, EXTENT, BASE)
        self.ready, self.ended, self.lost = Told(), Told(), Told()

    def start(self) -> Site:
        self.tier.start(self.ready, self.ended, self.lost)
        self.ended.wait()
        for number in self.ready.calls:
            self.tier.format(number, SLOT)
        return self

    def put(self, number: int, index: int, data: bytes) -> None:
        [slot] = self.tier.slots(where((number, index)))
        stream = self.gpu.stream()
        stream.copy(slot[: len(data)], memoryview(data))
        stream.wait()


def payload(i: int) -> bytes:
    return (b"block %d; " % i * LENGTH)[:LENGTH]


def identity(n: int) -> BlockIds:
    words = np.zeros((n, 8), np.uint64)
    words[:, 0] = np.arange(n) + 1
    keys = [words[i].tobytes()[:8] for i in range(n)]
    sums = [arena.checksum(payload(i), arena.seed(FINGERPRINT, keys[i], LENGTH)) for i in range(n)]
    return BlockIds(np.full(n, 7, np.uint16), words, np.full(n, 8, np.uint8), np.array(sums, np.uint64))


def where(*places: tuple[int, int]) -> Where:
    return Where(np.array([e << 32 | i for e, i in places], np.uint64))


def held(memory: memoryview | DeviceBuffer) -> bytes:
    if isinstance(memory, memoryview):
        return bytes(memory)
    out, stream = bytearray(memory.nbytes), memory.gpu.stream()
    stream.copy(memoryview(out), memory)
    stream.wait()
    return bytes(out)


def copied(site: Site, sources: list[Any], targets: list[Any], n: int) -> list[int]:
    told = start_copy(site, sources, targets, n)
    assert told.result() == told.result()
    assert told.threads[0].startswith("kvstore-hbm")
    return told.result()


def start_copy(site: Site, sources: list[Any], targets: list[Any], n: int) -> Told:
    told, places = Told(), where(*((0, 0) for _ in range(n)))
    copy = Copy(1, 0, 2, identity(n), [b""] * n, places, places, np.ones(n, np.uint32), True, None)
    site.tier.copy(copy, sources, targets, {7: FINGERPRINT}, {7: LENGTH}, told)
    return told


def host(*payloads: bytes) -> list[memoryview]:
    slots = [memoryview(bytearray(SLOT)) for _ in payloads]
    for slot, data in zip(slots, payloads, strict=True):
        slot[: len(data)] = data
    return slots


def probed(site: Site, n: int) -> list[int]:
    told = Told()
    probe = Probe(1, 2, SLOT, identity(n), where(*((BASE, i) for i in range(n))))
    site.tier.probe(probe, {7: FINGERPRINT}, {7: LENGTH}, told)
    return told.result()


@pytest.fixture
def control() -> Iterator[Any]:
    with fake_cuda(each_bytes=16 * MIB + RESERVED) as made:
        yield made


@pytest.fixture
def site(control: Any) -> Iterator[Site]:
    made = Site().start()
    yield made
    made.tier.close()


def used(site: Site) -> int:
    """What the extents of a tier that is started take."""
    free, total = site.gpu.memory()
    return total - free - RESERVED


class TestExtents:
    def test_all_are_made_and_given_back(self, control: Any) -> None:
        site = Site()
        assert used(site) == -RESERVED
        site.start()
        assert site.ready.calls == [BASE, BASE + 1, BASE + 2, BASE + 3]
        assert site.ended.calls == [None]
        assert used(site) == 4 * EXTENT
        assert site.lost.calls == []
        site.tier.close()
        assert used(site) == -RESERVED
        assert control.files() == []
        site.tier.close()

    def test_more_and_fewer(self, site: Site) -> None:
        ready, ended, gone = Told(), Told(), Told()
        site.tier.grow(2, ready, ended)
        ended.wait()
        assert ready.calls == [BASE + 4, BASE + 5]
        assert used(site) == 6 * EXTENT
        site.tier.remove(BASE + 1, gone)
        assert gone.wait() == [None]
        assert used(site) == 5 * EXTENT
        with pytest.raises(KeyError):
            site.tier.slots(where((BASE + 1, 0)))
        again = Told()
        site.tier.remove(BASE + 1, again)
        assert again.wait() == [None]
        assert used(site) == 5 * EXTENT

    def test_a_number_is_never_used_again(self, site: Site) -> None:
        for expected in (BASE + 4, BASE + 5):
            gone, ready = Told(), Told()
            site.tier.remove(expected - 4, gone)
            gone.wait()
            site.tier.grow(1, ready, Told())
            assert ready.wait() == [expected]

    def test_renewed_ones_are_zeros_with_another_number(self, site: Site) -> None:
        site.put(BASE, 3, b"secret")
        ready, failed = Told(), Told()
        site.tier.renew(BASE, ready, failed)
        assert ready.wait() == [BASE + 4]
        assert failed.calls == []
        assert used(site) == 4 * EXTENT
        site.tier.format(BASE + 4, EXTENT)
        [whole] = site.tier.slots(where((BASE + 4, 0)))
        assert held(whole) == bytes(EXTENT)
        with pytest.raises(KeyError):
            site.tier.renew(BASE, ready, failed)

    def test_slots_fill_an_extent_without_headers(self, site: Site) -> None:
        count = EXTENT // SLOT
        slots = site.tier.slots(where(*((BASE + 1, i) for i in range(count))))
        assert [slot.nbytes for slot in slots] == [SLOT] * count
        assert [slot.address for slot in slots] == [slots[0].address + i * SLOT for i in range(count)]
        assert slots[0].address % ALIGN == 0

    def test_no_memory_at_the_start(self, control: Any) -> None:
        site = Site(extents=9).start()
        [error] = site.ended.calls
        assert isinstance(error, TierError)
        assert f"0 of {16 * MIB + RESERVED} are free" in str(error)
        assert "hbm.limit" in str(error)
        assert len(site.ready.calls) == 8
        assert site.lost.calls == []
        [slot] = site.tier.slots(where((BASE + 7, 0)))
        assert copied(site, host(payload(0)), [slot], 1) == [OK], "what there is works"
        site.tier.close()

    def test_no_memory_to_verify_with(self) -> None:
        with fake_cuda(each_bytes=RESERVED - MIB):
            site = Site().start()
            assert "hbm.limit" in site.ended.calls[0].hint
            assert site.ready.calls == []
            assert start_copy(site, host(payload(0)), host(b""), 1).result() == [FAILED]
            site.tier.close()

    def test_no_memory_to_grow(self, site: Site) -> None:
        ready, ended = Told(), Told()
        site.tier.grow(5, ready, ended)
        [error] = ended.wait()
        assert "hbm.limit" in error.hint
        assert ready.calls == [BASE + 4, BASE + 5, BASE + 6, BASE + 7]

    def test_listeners_see_every_extent_until_it_is_freed(self, site: Site) -> None:
        class Watcher:
            def __init__(self) -> None:
                self.known: dict[int, int] = {}
                self.changed = Told()

            def register(self, buffer: DeviceBuffer) -> None:
                self.known[buffer.address] = buffer.nbytes
                self.changed()

            def unregister(self, buffer: DeviceBuffer) -> None:
                held(buffer)
                del self.known[buffer.address]
                raise ZeroDivisionError("in a watcher")

        watcher, gone, ended = Watcher(), Told(), Told()
        site.tier.watch(watcher)
        watcher.changed.wait(4)
        site.tier.grow(1, Told(), ended)
        ended.wait()
        assert list(watcher.known.values()) == [EXTENT] * 5
        logging.disable()
        site.tier.remove(BASE, gone)
        assert gone.wait() == [None]
        logging.disable(logging.NOTSET)
        assert len(watcher.known) == 4


class TestBlocks:
    def test_in_within_and_out(self, site: Site) -> None:
        n = 20
        first = site.tier.slots(where(*((BASE, i) for i in range(n))))
        second = site.tier.slots(where(*((BASE + 1, 2 * i) for i in range(n))))
        out = host(*([b""] * n))
        assert copied(site, host(*(payload(i) for i in range(n))), [*first], n) == [OK] * n
        assert copied(site, [*first], [*second], n) == [OK] * n
        assert copied(site, [*second], [*out], n) == [OK] * n
        assert [bytes(slot[:LENGTH]) for slot in out] == [payload(i) for i in range(n)]
        assert not any(any(slot[LENGTH:]) for slot in out), "only the payload moves"

    @pytest.mark.parametrize("way", ["in", "within", "out"])
    def test_wrong_bytes_are_found_on_the_far_side(self, site: Site, way: str) -> None:
        wrong = host(payload(0), payload(1), payload(2)[:-1] + b"!")
        there = site.tier.slots(where(*((BASE, i) for i in range(3))))
        beside = site.tier.slots(where(*((BASE + 1, i) for i in range(3))))
        into_gpu = copied(site, [*wrong], [*there], 3)
        if way == "in":
            assert into_gpu == [OK, OK, CORRUPT]
        else:
            targets: list[Any] = [*beside] if way == "within" else [*host(b"", b"", b"")]
            assert copied(site, [*there], targets, 3) == [OK, OK, CORRUPT]

    def test_a_probe(self, site: Site) -> None:
        for i in range(3):
            site.put(BASE, i, payload(i))
        assert probed(site, 3) == [OK, OK, OK]
        site.put(BASE, 1, b"?")
        assert probed(site, 3) == [OK, CORRUPT, OK]

    def test_an_empty_batch_ends(self, site: Site) -> None:
        assert copied(site, [], [], 0) == []

    def test_a_batch_that_cannot_be_fails_alone(self, site: Site) -> None:
        [slot] = site.tier.slots(where((BASE, 0)))
        logging.disable()
        assert copied(site, [memoryview(bytes(10))], [slot], 1) == [FAILED]
        logging.disable(logging.NOTSET)
        assert copied(site, host(payload(0)), [slot], 1) == [OK]
        assert site.lost.calls == []

    def test_slots_of_a_batch_that_failed_are_left_alone(self, site: Site) -> None:
        slots = site.tier.slots(where((BASE, 0), (BASE, 1)))
        logging.disable()
        assert copied(site, [*host(payload(0)), memoryview(bytes(10))], [*slots], 2) == [FAILED, FAILED]
        logging.disable(logging.NOTSET)
        site.put(BASE, 0, b"another's")
        for _ in range(2):  # both threads wait for their streams
            told = [start_copy(site, [*host(payload(0))], [slots[1]], 1) for _ in range(4)]
            assert [each.result() for each in told] == [[OK]] * 4
        assert held(slots[0])[:9] == b"another's"

    def test_a_raising_callback_affects_no_other(self, site: Site, caplog: pytest.LogCaptureFixture) -> None:
        [slot] = site.tier.slots(where((BASE, 0)))
        with caplog.at_level(logging.CRITICAL + 1):
            for _ in range(4):
                told = start_copy(site, host(payload(0)), [slot], 1)
                told.wait()

            def broken(_: Any) -> None:
                raise ZeroDivisionError

            probe = Probe(1, 2, SLOT, identity(1), where((BASE, 0)))
            for _ in range(4):
                site.tier.probe(probe, {7: FINGERPRINT}, {7: LENGTH}, broken)
            assert probed(site, 1) == [OK]

    def test_too_much_at_a_time_is_refused(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(copy_engine, "QUEUE_BLOCKS", 4)
        gate, run = threading.Event(), copy_engine._run

        def slow(*args: Any) -> Any:
            assert gate.wait(WAIT_S)
            return run(*args)

        monkeypatch.setattr(copy_engine, "_run", slow)
        slots = site.tier.slots(where((BASE, 0), (BASE, 1)))
        batches = [start_copy(site, host(payload(0), payload(1)), [*slots], 2) for _ in range(3)]
        gate.set()
        assert [told.result() for told in batches] == [[OK, OK], [OK, OK], [FAILED, FAILED]]
        assert copied(site, host(payload(0)), slots[:1], 1) == [OK], "there is room again"

    def test_close_waits_and_later_copies_fail(self, control: Any) -> None:
        site = Site().start()
        slots = site.tier.slots(where(*((BASE, i) for i in range(50))))
        batches = [start_copy(site, host(payload(0)), [slot], 1) for slot in slots]
        site.tier.close()
        assert [told.calls[0].tolist() for told in batches] == [[OK]] * 50
        assert start_copy(site, host(payload(0)), slots[:1], 1).result() == [FAILED]


class TestProcesses:
    @pytest.fixture
    def process(self) -> Iterator[subprocess.Popen[bytes]]:
        made = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        yield made
        made.kill()
        made.communicate()

    def test_an_extent_is_reassigned_after_its_last_importer_ended(
        self, site: Site, process: subprocess.Popen[bytes]
    ) -> None:
        site.put(BASE, 0, b"secret")
        [slot] = site.tier.slots(where((BASE, 0)))
        fds = open_fds()
        handle = site.tier.handle(BASE, os.pidfd_open(process.pid))
        assert len(handle) == 64
        assert site.tier.handle(BASE, os.pidfd_open(process.pid)) == handle
        assert open_fds() == fds + 1, "one a process"
        ready, failed = Told(), Told()
        site.tier.renew(BASE, ready, failed)
        with pytest.raises(KeyError):
            site.tier.handle(BASE, os.pidfd_open(process.pid))
        assert open_fds() == fds + 1
        eventually(lambda: not any(held(slot)), "zeroed at once")
        source, beside = host(payload(0)), site.tier.slots(where((BASE + 1, 0)))
        until = time.monotonic() + 0.6
        while time.monotonic() < until:
            assert copied(site, [*source], [*beside], 1) == [OK], "blocks move meanwhile"
        assert ready.calls == []
        assert used(site) == 4 * EXTENT, "and nothing else is in its place"
        process.kill()
        assert ready.wait() == [BASE + 4]
        assert used(site) == 4 * EXTENT
        assert open_fds() == fds
        assert failed.calls == []

    def test_ended_importers_are_not_waited_for(self, site: Site, process: subprocess.Popen[bytes]) -> None:
        fds = open_fds()
        pidfd = os.pidfd_open(process.pid)
        process.kill()
        process.wait()
        site.tier.handle(BASE, pidfd)
        gone = Told()
        site.tier.remove(BASE, gone)
        assert gone.wait() == [None]
        assert open_fds() == fds

    def test_all_of_them_are_waited_for(self, site: Site, process: subprocess.Popen[bytes]) -> None:
        other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        site.tier.handle(BASE, os.pidfd_open(process.pid))
        site.tier.handle(BASE, os.pidfd_open(other.pid))
        gone = Told()
        site.tier.remove(BASE, gone)
        other.communicate(b"\n")
        time.sleep(0.5)
        assert gone.calls == []
        process.kill()
        assert gone.wait() == [None]
        assert used(site) == 3 * EXTENT

    def test_close_does_not_wait_for_importers(self, control: Any, process: subprocess.Popen[bytes]) -> None:
        site, fds = Site().start(), open_fds()
        site.tier.handle(BASE, os.pidfd_open(process.pid))
        site.tier.handle(BASE + 1, os.pidfd_open(process.pid))
        gone = Told()
        site.tier.remove(BASE, gone)
        site.tier.close()
        assert gone.calls == []
        assert used(site) == -RESERVED
        assert open_fds() == fds

    def test_where_there_is_no_ipc(self, process: subprocess.Popen[bytes]) -> None:
        with fake_cuda(ipc="no"):
            site, fds = Site().start(), open_fds()
            with pytest.raises(CudaError, match="CUDA IPC does not work here"):
                site.tier.handle(BASE, os.pidfd_open(process.pid))
            assert open_fds() == fds
            gone = Told()
            site.tier.remove(BASE, gone)
            assert gone.wait() == [None]
            site.tier.close()


def open_fds() -> int:
    return sum("pidfd" in _link(fd) for fd in os.listdir("/proc/self/fd"))


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def eventually(check: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < until, what
        time.sleep(0.01)


class TestLoss:
    @pytest.fixture(autouse=True)
    def quiet(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.CRITICAL + 1)

    def test_in_the_middle_of_copies(self, site: Site, control: Any) -> None:
        slots = site.tier.slots(where(*((BASE, i) for i in range(40))))
        control.lose(0, after=20)
        batches = [start_copy(site, host(payload(0)), [slot], 1) for slot in slots]
        outcomes = [told.result()[0] for told in batches]
        assert {OK, FAILED} == set(outcomes)
        assert outcomes.count(OK) <= 20
        [error] = site.lost.wait()
        assert isinstance(error, CudaError)
        assert error.lost
        assert probed(site, 2) == [FAILED, FAILED]
        assert [told.result() for told in batches] == [[one] for one in outcomes]

    def test_a_gpu_that_answers_again_stays_lost(self, site: Site, control: Any) -> None:
        site.put(BASE, 0, payload(0))
        control.lose(0, after=1)
        assert probed(site, 1) == [FAILED]
        site.lost.wait()
        control._lost.clear()
        assert site.gpu.memory()
        assert probed(site, 1) == [FAILED]

    def test_later_work_fails_and_the_loss_is_reported_once(self, site: Site, control: Any) -> None:
        control.lose(0)
        ready, failed, ended, gone = Told(), Told(), Told(), Told()
        site.tier.renew(BASE, ready, failed)
        site.tier.remove(BASE + 1, gone)
        site.tier.grow(1, ready, ended)
        assert [e.lost for told in (failed, gone, ended) for e in told.wait()] == [True] * 3
        assert ready.calls == []
        [slot] = site.tier.slots(where((BASE + 2, 0)))
        assert copied(site, host(payload(0)), [slot], 1) == [FAILED]
        site.lost.wait()
        with pytest.raises(CudaError):
            site.tier.handle(BASE + 2, os.pidfd_open(os.getpid()))
        site.tier.close()
        assert len(site.lost.calls) == 1

    def test_a_lost_gpu_waits_for_no_importer(self, site: Site, control: Any) -> None:
        site.tier.handle(BASE, os.pidfd_open(os.getpid()))
        gone, ended = Told(), Told()
        site.tier.remove(BASE, gone)
        time.sleep(0.3)
        assert gone.calls == []
        control.lose(0)
        site.tier.grow(1, Told(), ended)
        assert ended.wait()[0].lost
        assert gone.wait()[0].lost

    def test_before_the_start(self, control: Any) -> None:
        site = Site()
        control.lose(0)
        site.start()
        assert site.ended.calls[0].lost
        site.lost.wait()
        site.tier.close()
