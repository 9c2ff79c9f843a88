"""Queues of block I/O, in C and in Python: which pieces move when, what fails, who is kept alive.

Most tests call `next` themselves, so that one thread moves everything. A file opened with O_APPEND then shows
the order: each piece is appended to it, wherever it was to go.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from kvstore.native import END_OF_FILE, PortableQueue

try:
    from kvstore.native import _native
except ImportError:
    pytest.skip("the C extension was not built: no compiler, or no Python.h", allow_module_level=True)

Make: TypeAlias = Callable[[int, int, int, int], PortableQueue]
WAIT_S = 30.0
PIECE = 8


@pytest.fixture(params=[_native.IOQueue, PortableQueue], ids=["native", "portable"])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


@pytest.fixture
def queue(make: Make) -> PortableQueue:
    return make(2, PIECE, 1 << 14, 8)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    yield fd
    os.close(fd)


def drained(queue: PortableQueue) -> list[tuple[Any, list[tuple[int, int | None]]]]:
    """Closes a queue and returns what ends then, each error by its number."""
    queue.close()
    ended = []
    while (each := queue.next()) is not None:
        token, failures = each
        numbers = [(i, e.errno if isinstance(e, OSError) else e) for i, e in failures]
        ended.append((token, numbers))
    return ended


def content(fd: int) -> bytes:
    return os.pread(fd, 1 << 24, 0)


def test_transfers_of_any_length_are_written_and_read(make: Make, fd: int) -> None:
    data = [bytes([i]) * size for i, size in enumerate((0, 1, 7, 8, 9, 100, 4096, 0, 70_001, 0))]
    starts = [sum(map(len, data[:i])) for i in range(len(data))]
    queue = make(3, 4096, 1 << 14, 8)
    assert queue.submit([(fd, at, each, True) for at, each in zip(starts, data, strict=True)], "w", False)
    assert queue.next() == ("w", [])
    assert content(fd) == b"".join(data)
    room = [bytearray(len(each)) for each in data]
    assert queue.submit([(fd, at, each, False) for at, each in zip(starts, room, strict=True)], "r", True)
    assert drained(queue) == [("r", [])]
    assert room == data


def test_batches_move_in_the_order_of_submission(queue: PortableQueue, log: int) -> None:
    for name in b"abc":
        assert queue.submit([(log, 0, bytes([name]) * 20, True), (log, 0, bytes([name]), True)], name, False)
    assert [token for token, _ in drained(queue)] == [*b"abc"]
    assert content(log) == b"a" * 21 + b"b" * 21 + b"c" * 21


@pytest.mark.parametrize("every", [1, 2, 8])
def test_urgent_tasks_go_first_except_one_of_so_many(make: Make, log: int, every: int) -> None:
    queue = make(1, PIECE, 1 << 14, every)
    for _ in range(30):
        assert queue.submit([(log, 0, b"o", True)], None, False)
    for _ in range(30):
        assert queue.submit([(log, 0, b"u", True)], None, True)
    assert len(drained(queue)) == 60
    turns = (b"u" * (every - 1) + b"o") * 60
    order = content(log)
    both = min(order.rindex(b"u"), order.rindex(b"o")) + 1
    assert order[:both] == turns[:both]
    assert (order.count(b"u"), order.count(b"o")) == (30, 30)


@pytest.mark.parametrize(
    ("threads", "transfers", "size", "tasks"),
    [
        (1, 3, 4096, [3]),
        (2, 300, 4096, [64, 64, 64, 64, 44]),  # a task delays urgent ones: it has a limit
        (4, 1, 64 << 10, [1]),  # little to move wakes one thread
        (4, 3, 32 << 10, [3]),
        (4, 16, 4096, [4, 4, 4, 4]),
        (4, 5, 128 << 10, [1, 1, 1, 1, 1]),
        (4, 2, 512 << 10, [1] * 4),  # two pieces each
        (8, 5, 1, [4, 1]),
        (1, 5, 300 << 10, [1] * 10),
    ],
)
def test_a_batch_is_divided_among_threads(
    make: Make, log: int, threads: int, transfers: int, size: int, tasks: list[int]
) -> None:
    queue = make(threads, 256 << 10, 1 << 14, 2)
    assert queue.submit([(log, 0, b"\0" * size, True)] * transfers, None, False)
    for _ in range(transfers + 10):  # one of these between any two tasks of the other lane
        assert queue.submit([(log, 0, b"u", True)], None, True)
    drained(queue)
    step = min(size, 256 << 10)
    runs = [-(-len(run) // step) for run in re.findall(rb"\0+", content(log))]
    assert runs == tasks


def test_a_full_lane_refuses_whole_batches(make: Make, log: int) -> None:
    queue = make(1, PIECE, 4, 8)
    two, three = [(log, 0, b"2" * PIECE, True)] * 2, [(log, 0, b"3" * 2 * PIECE + b"3", True)]
    for urgent in (False, True):
        assert all(queue.submit(each, None, urgent) for each in (three, two, [], [(log, 0, b"1", True)]))
    want = [[], [(0, errno.EAGAIN), (1, errno.EAGAIN)], [], []]
    outcomes = []
    for _ in range(8):
        ended = queue.next()
        assert ended is not None
        outcomes.append(ended[1])
    assert sorted(outcomes, key=str) == sorted(want * 2, key=str)
    assert content(log).count(b"2") == 0
    assert queue.submit(two * 2, None, False), "there is room again"
    assert drained(queue) == [(None, [])]
    assert content(log).count(b"2") == 4 * PIECE


def test_each_transfer_has_an_outcome_of_its_own(queue: PortableQueue, fd: int, tmp_path: Path) -> None:
    os.pwrite(fd, b"x" * 100, 0)
    reading = os.open(tmp_path / "file", os.O_RDONLY)
    good, full = bytearray(100), os.open("/dev/full", os.O_RDWR)
    transfers = [
        (fd, 0, good, False),
        (-1, 0, bytearray(30), False),
        (fd, 90, bytearray(30), False),  # the file ends within
        (reading, 0, b"y" * 30, True),
        (full, 0, b"y", True),
        (fd, 100, b"z" * 30, True),
    ]
    assert queue.submit(transfers, "t", False)
    failures = [(1, errno.EBADF), (2, END_OF_FILE), (3, errno.EBADF), (4, errno.ENOSPC)]
    assert drained(queue) == [("t", failures)]
    assert (bytes(good), content(fd)) == (b"x" * 100, b"x" * 100 + b"z" * 30)
    os.close(reading)
    os.close(full)


def test_a_transfer_that_failed_is_not_continued(make: Make, fd: int, log: int) -> None:
    os.truncate(fd, PIECE + 1)
    room = bytearray(b"?" * 4 * PIECE)
    queue = make(1, PIECE, 1 << 14, 2)  # urgent tasks and pieces of the read by turns
    assert queue.submit([(fd, 0, room, False)], "read", False)
    for target in (log, log, fd):  # the third one is after the read met the end, and moves the end
        assert queue.submit([(target, 3 * PIECE, b"x" * PIECE, True)], None, True)
    assert dict(drained(queue))["read"] == [(0, END_OF_FILE)]
    assert room[2 * PIECE :] == b"?" * 2 * PIECE


class NoBuffer:
    """Has a length and parts, as memory of a GPU."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, part: slice) -> NoBuffer:
        return self


@pytest.mark.parametrize(
    "wrong",
    [(0, bytes(16)), (0, memoryview(bytearray(32))[::2]), (0, NoBuffer()), (-1, bytearray(16))],
    ids=["read-only", "not contiguous", "no buffer", "negative offset"],
)
def test_a_buffer_that_cannot_be_used_fails_no_other(make: Make, fd: int, wrong: tuple[int, Any]) -> None:
    queue = make(1, 64, 1 << 14, 8)  # all are one task
    transfers = [(fd, 0, b"a" * 20, True), (fd, *wrong, False), (fd, 20, b"b" * 20, True)]
    assert queue.submit(transfers, "t", False)
    assert drained(queue) == [("t", [(1, errno.EINVAL)])]
    assert content(fd) == b"a" * 20 + b"b" * 20


@pytest.mark.parametrize("wrong", [None, 7, [None], ["text"], [(0, 0, b"")], [(0, 0, None, True, 1)]])
def test_transfers_that_are_none_start_nothing(queue: PortableQueue, fd: int, wrong: Any) -> None:
    transfers = [(fd, 0, b"abc", True), *wrong] if isinstance(wrong, list) else wrong
    with pytest.raises((TypeError, ValueError)):
        queue.submit(transfers, "t", False)
    assert drained(queue) == []
    assert content(fd) == b""


@pytest.mark.parametrize("numbers", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0), (-1, 1, 1, 1)])
def test_numbers_that_cannot_work(make: Make, numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="number"):
        make(*numbers)


def test_a_closed_queue_moves_what_waits_and_refuses_more(queue: PortableQueue, log: int) -> None:
    for token in range(3):
        assert queue.submit([(log, 0, b"x" * 20, True)], token, token == 1)
    queue.close()
    queue.close()
    assert not queue.submit([(log, 0, b"late", True)], 3, False)
    assert [token for token, _ in drained(queue)] == [1, 0, 2]
    assert content(log) == b"x" * 60
    assert queue.next() is None


def test_close_wakes_all_threads(queue: PortableQueue) -> None:
    threads = [threading.Thread(target=queue.next, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.01)
    queue.close()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)


class Watched(bytearray):
    """Can be watched, unlike its base."""


def test_buffers_are_kept_until_the_batch_ends_and_not_longer(queue: PortableQueue, fd: int) -> None:
    data, token = Watched(b"abc" * 10), Watched()
    gone = [weakref.ref(data), weakref.ref(token)]
    assert queue.submit([(fd, 0, data, True), (fd, 0, data, True)], token, False)
    del data, token
    ended = queue.next()
    assert ended is not None
    assert content(fd) == b"abc" * 10
    del ended
    assert [each() for each in gone] == [None, None]


def test_a_queue_that_is_dropped_frees_what_waits(make: Make, fd: int) -> None:
    queue: Any = make(2, PIECE, 1 << 14, 8)
    data, token, refused = Watched(b"abc"), Watched(), Watched(b"def")
    gone = [weakref.ref(each) for each in (data, token, refused)]
    for urgent in (False, True, False):
        assert queue.submit([(fd, 0, data, True)], token, urgent)
    queue.close()
    assert not queue.submit([(fd, 0, refused, True)], token, False)
    del queue, data, token, refused
    assert [each() for each in gone] == [None] * 3
    assert content(fd) == b""


def settled(threads: list[threading.Thread]) -> list[str]:
    """Waits until all threads sleep. Returns how often each has gone to sleep."""
    until, before = time.monotonic() + WAIT_S, [""]
    while time.monotonic() < until:
        said = [Path(f"/proc/self/task/{thread.native_id}/status").read_text() for thread in threads]
        now = [each.partition("\nvoluntary_ctxt_switches:")[2].split()[0] for each in said]
        if now == before and all("\nState:\tS" in each for each in said):
            return now
        before = now
        time.sleep(0.01)
    raise AssertionError("the threads never rest")


@pytest.mark.parametrize(("pieces", "tasks"), [(0, 1), (1, 1), (4, 1), (8, 2), (12, 3), (40, 4)])
def test_a_batch_wakes_a_thread_for_each_task(make: Make, fd: int, pieces: int, tasks: int) -> None:
    queue, ended = make(4, 512 << 10, 1 << 14, 8), threading.Semaphore(0)

    def work() -> None:
        while queue.next() is not None:
            ended.release()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    before = settled(threads)
    assert queue.submit([(fd, 0, b"x" * 4096, True)] * pieces, None, False)
    assert ended.acquire(timeout=WAIT_S)
    woken = sum(was != now for was, now in zip(before, settled(threads), strict=True))
    queue.close()
    for thread in threads:
        thread.join(WAIT_S)
    assert woken == tasks


_FORKED = """
import os, sys, threading
from kvstore.native import _native
queue = _native.IOQueue(2, 4096, 100, 8)
fd = os.open(sys.argv[1], os.O_RDWR)
ended = threading.Semaphore(0)
def work():
    while queue.next() is not None:
        ended.release()
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for turn in range(10):
    for _ in range(10):
        assert queue.submit([(fd, 0, b"x" * 20_000, True)], turn, False)
    child = os.fork()
    if not child:
        assert not queue.submit([(fd, 0, b"y", True)], None, False)
        queue.close()
        del queue
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
for _ in range(100):
    assert ended.acquire(timeout=30)
queue.close()
for thread in threads:
    thread.join()
assert os.pread(fd, 30_000, 0) == b"x" * 20_000
"""

_LEFT = """
import os, sys, threading
from kvstore.native import _native
queue = _native.IOQueue(2, 4096, 10_000, 8)
fd = os.open(sys.argv[1], os.O_RDWR)
def work():
    while queue.next() is not None:
        pass
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
for turn in range(10):
    assert queue.submit([(fd, 0, bytearray(1 << 20), True)], [], False)
"""


@pytest.mark.parametrize("program", [_FORKED, _LEFT], ids=["after a fork", "at the end of the process"])
def test_threads_of_a_queue_hang_no_process(tmp_path: Path, program: str) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "file")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
