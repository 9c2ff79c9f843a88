"""Pieces of files, moved by the C extension with and without io_uring, and by its twin."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from kvstore.native import END_OF_FILE, portable_files
from tests.daemons import eventually

try:
    from kvstore.native import _native
except ImportError:
    pytest.skip("the C extension was not built: no compiler, or no Python.h", allow_module_level=True)

Move: TypeAlias = Callable[[list[Any]], list[int]]
MOVES = [_native.move_files, portable_files.move_files]


@pytest.fixture(params=MOVES, ids=["native", "portable"])
def move(request: pytest.FixtureRequest) -> Move:
    made: Move = request.param
    return made


@pytest.fixture
def fd(tmp_path: Path) -> Any:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 300])
def test_pieces_are_written_and_read(move: Move, fd: int, count: int) -> None:
    dice = random.Random(count)
    data = [dice.randbytes(dice.choice((1, 511, 4096, 70_001))) for _ in range(count)]
    starts = [sum(map(len, data[:i])) for i in range(count)]
    order = dice.sample(range(count), count)
    assert move([(fd, starts[i], data[i], True) for i in order]) == [0] * count
    assert os.pread(fd, 1 << 26, 0) == b"".join(data)
    room = [bytearray(len(each)) for each in data]
    assert move([(fd, starts[i], room[i], False) for i in order]) == [0] * count
    assert room == data


def test_each_piece_has_its_own_outcome(move: Move, fd: int, tmp_path: Path) -> None:
    os.pwrite(fd, b"x" * 10_000, 0)
    reading = os.open(tmp_path / "file", os.O_RDONLY)
    good, short = bytearray(10_000), bytearray(4096)
    pieces = [
        (fd, 0, good, False),
        (-1, 0, bytearray(8), False),
        (fd, 8192, short, False),  # the file ends within
        (reading, 0, b"y", True),
        (fd, 1 << 40, bytearray(8), False),
        (fd, 10_000, b"z", True),
    ]
    assert move(pieces) == [0, errno.EBADF, END_OF_FILE, errno.EBADF, END_OF_FILE, 0]
    assert (good, short[:1808], os.pread(fd, 2, 9_999)) == (b"x" * 10_000, b"x" * 1808, b"xz")
    os.close(reading)


def test_no_bytes_are_moved_at_once(move: Move, fd: int) -> None:
    assert move([(fd, 0, bytearray(), False), (fd, 5, b"", True)]) == [0, 0]


@pytest.mark.parametrize(
    "wrong",
    [
        (0, -1, bytearray(8), False),
        (0, 0, bytes(8), False),
        (0, 0, memoryview(bytearray(8))[::2], False),
        (0, 0, "text", True),
        (0, 0, None, True),
        (0, 0, bytearray(8)),
        "text",
        None,
    ],
)
def test_bad_input_moves_nothing(move: Move, fd: int, wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError, BufferError)):
        move([(fd, 0, b"abc", True), wrong])
    assert os.fstat(fd).st_size == 0


@pytest.mark.parametrize("wrong", [None, 7])
def test_pieces_that_are_no_list(move: Move, wrong: Any) -> None:
    with pytest.raises(TypeError):
        move(wrong)


def test_pipes_are_no_files(move: Move) -> None:
    """System calls say why: a ring would wait for a pipe's bytes."""
    ends = os.pipe()
    os.write(ends[1], b"abc")
    assert move([(ends[0], 0, bytearray(3), False)]) == [errno.ESPIPE]
    for end in ends:
        os.close(end)


def test_a_device_without_room(move: Move) -> None:
    fd = os.open("/dev/full", os.O_RDWR)
    assert move([(fd, 0, b"abc", True)] * 3) == [errno.ENOSPC] * 3
    os.close(fd)


def test_threads_have_rings_of_their_own_that_end_with_them(fd: int) -> None:
    """Otherwise descriptors would leak, or one thread would take the completions of another."""
    before, failures = len(os.listdir("/proc/self/fd")), []

    def work(me: int) -> None:
        for turn in range(20):
            data = [random.Random(f"{me} {turn} {i}").randbytes(3000) for i in range(40)]
            pieces = [(fd, (me * 40 + i) * 3000, each, True) for i, each in enumerate(data)]
            room = [bytearray(3000) for _ in data]
            if _native.move_files(pieces) != [0] * 40:
                failures.append("write")
            reads = [(fd, piece[1], room[i], False) for i, piece in enumerate(pieces)]
            if _native.move_files(reads) != [0] * 40 or room != data:
                failures.append("read")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    # a thread that was joined may still free what it had
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)


_WITHOUT_RINGS = """
import resource, os, sys
low = len(os.listdir("/proc/self/fd")) + 1
from kvstore.native import _native
fd = os.open(sys.argv[1], os.O_RDWR)
resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 1, fd + 1))  # no descriptor is left for a ring
assert _native.move_files([(fd, i * 8, bytes([i]) * 8, True) for i in range(9)]) == [0] * 9
room = [bytearray(8) for _ in range(9)]
assert _native.move_files([(fd, i * 8, room[i], False) for i in range(9)]) == [0] * 9
assert room == [bytes([i]) * 8 for i in range(9)]
print(_native.why_no_io_uring())
"""


def test_without_a_ring_pieces_are_moved_one_after_another(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-c", _WITHOUT_RINGS, str(tmp_path / "file")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.strip(), "there is a ring"


_FORKED = """
import os, random, sys
from kvstore.native import _native
fd = os.open(sys.argv[1], os.O_RDWR)
def work(me):
    for turn in range(50):
        data = [random.Random(f"{me} {turn} {i}").randbytes(3000) for i in range(40)]
        at = [(me * 40 + i) * 3000 for i in range(40)]
        room = [bytearray(3000) for _ in data]
        assert _native.move_files([(fd, at[i], data[i], True) for i in range(40)]) == [0] * 40
        assert _native.move_files([(fd, at[i], room[i], False) for i in range(40)]) == [0] * 40
        assert room == data
work(0)
child = os.fork()
work(1 if child else 2)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_fork_has_a_ring_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-c", _FORKED, str(tmp_path / "file")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
