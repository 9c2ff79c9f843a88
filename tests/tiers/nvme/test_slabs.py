"""Slab files: made whole or not at all, found again, and clear words when the disk says no."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import TierError
from kvstore.tiers.nvme.slabs import Slabs
from tests.tiers.nvme.disks import KINDS, small_disk

MIB = 1 << 20


@pytest.fixture
def slabs(tmp_path: Path) -> Iterator[Slabs]:
    made = Slabs(tmp_path, MIB)
    yield made
    made.close()


def test_allocates_the_whole_file(slabs: Slabs, tmp_path: Path) -> None:
    slabs.allocate(12)
    status = os.stat(tmp_path / "slabs" / "000012.slab")
    assert (status.st_size, stat.S_IMODE(status.st_mode)) == (MIB, 0o600)
    assert status.st_blocks * 512 >= MIB
    assert os.fstat(slabs.fd(12)).st_ino == status.st_ino


def test_direct_says_how_files_are_open(slabs: Slabs) -> None:
    slabs.allocate(0)
    flags = fcntl.fcntl(slabs.fd(0), fcntl.F_GETFL)
    assert slabs.direct == bool(flags & os.O_DIRECT)


def test_keeps_bytes_over_a_restart(slabs: Slabs, tmp_path: Path) -> None:
    slabs.allocate(3)
    fd = os.open(tmp_path / "slabs" / "000003.slab", os.O_WRONLY)
    os.pwrite(fd, b"payload", 8192)
    os.close(fd)
    slabs.sync([3])
    slabs.close()
    again = Slabs(tmp_path, MIB)
    assert again.stored() == [3]
    again.open_existing(3)
    assert (tmp_path / "slabs" / "000003.slab").read_bytes()[8192:8199] == b"payload"
    again.close()


def test_a_leftover_is_taken_over_empty(slabs: Slabs, tmp_path: Path) -> None:
    (tmp_path / "slabs" / "000005.slab").write_bytes(b"old" * MIB)
    slabs.allocate(5)
    assert (tmp_path / "slabs" / "000005.slab").read_bytes() == bytes(MIB)


def test_stored_lists_slabs_only(slabs: Slabs, tmp_path: Path) -> None:
    for extent in (2, 1_000_000, 0):
        slabs.allocate(extent)
    (tmp_path / "slabs" / "notes.txt").touch()
    (tmp_path / "slabs" / "x.slab").touch()
    assert slabs.stored() == [0, 2, 1_000_000]


def test_remove(slabs: Slabs, tmp_path: Path) -> None:
    slabs.allocate(1)
    fd = slabs.fd(1)
    slabs.remove(1)
    assert slabs.stored() == []
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    slabs.remove(1)
    (tmp_path / "slabs" / "000007.slab").touch()
    slabs.remove(7)
    assert slabs.stored() == []


def test_close_closes_all(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    slabs = Slabs(tmp_path, MIB)
    for extent in range(3):
        slabs.allocate(extent)
    slabs.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("size", "left"), [(MIB - 4096, MIB - 4096), (MIB + 1, MIB), (MIB, MIB), (0, 0)])
def test_one_that_was_cut_short_tells_so_and_gets_its_size_again(
    slabs: Slabs, tmp_path: Path, size: int, left: int
) -> None:
    path = tmp_path / "slabs" / "000001.slab"
    path.touch()
    os.truncate(path, size)
    assert slabs.open_existing(1) == left
    assert path.stat().st_size == max(size, MIB)


def test_one_that_was_cut_short_and_has_no_room_to_grow_is_refused(slabs: Slabs, tmp_path: Path) -> None:
    path = tmp_path / "slabs" / "000001.slab"
    path.touch()
    before = len(os.listdir("/proc/self/fd"))
    with (
        small_disk("limit", tmp_path, 4096),
        pytest.raises(TierError, match=r"cannot allocate 1048576 bytes"),
    ):
        slabs.open_existing(1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_missing_file_is_named(slabs: Slabs) -> None:
    with pytest.raises(TierError, match=r"000009\.slab: No such file"):
        slabs.open_existing(9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_names_folder_and_sizes_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    with small_disk(kind, tmp_path / "disk", 3 * MIB // 2):
        slabs = Slabs(tmp_path / "disk", MIB if kind == "mount" else 2 * MIB)
        if kind == "mount":
            slabs.allocate(0)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TierError, match=r"disk/slabs: .*, \d+ bytes free") as caught:
            slabs.allocate(1)
        assert f"cannot allocate {slabs.extent_bytes} bytes" in caught.value.message
        assert "make room" in caught.value.hint
        assert slabs.stored() == ([0] if kind == "mount" else [])
        assert len(os.listdir("/proc/self/fd")) == before
        if kind == "mount":
            slabs.remove(0)
            slabs.allocate(1)
        slabs.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match=r"cannot make .*/file/slabs: Not a directory"):
        Slabs(tmp_path / "file", MIB)


def test_without_direct_io_files_are_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.open

    def refuse(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return whole(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    slabs = Slabs(tmp_path, MIB)
    slabs.allocate(0)
    assert slabs.direct is False
    os.pwrite(slabs.fd(0), b"odd", 7)
    slabs.close()


def test_a_sync_that_fails_says_so(slabs: Slabs, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    slabs.allocate(4)
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(TierError, match=r"cannot sync .*000004\.slab: Input/output error"):
        slabs.sync([4])


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("../other")])
def test_a_slab_that_is_no_file_is_an_error_and_not_followed(
    slabs: Slabs, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    (tmp_path / "other").write_bytes(b"somebody's")
    make(slabs.folder / "000007.slab")
    for call in (slabs.open_existing, slabs.allocate):
        with pytest.raises(TierError, match=r"000007\.slab|in .*slabs: "):
            call(7)
    assert (tmp_path / "other").read_bytes() == b"somebody's"
    assert slabs.direct
