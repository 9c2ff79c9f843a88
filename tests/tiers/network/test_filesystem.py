"""Blocks in a shared folder: real files, on what filesystems can be mounted here."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore import native
from kvstore.errors import ConfigError
from kvstore.native import portable_files
from kvstore.tiers.network import BackendSettings, objects, open_backend
from kvstore.tiers.network.base import Backend, Name, NetworkError, Outcome
from kvstore.tiers.network.filesystem.backend import HEAD_BYTES, Filesystem
from tests.daemons import eventually
from tests.tiers.network.contract import OTHER, SPACE, WAIT_S, Contract, block, ends, payload, wanted
from tests.tiers.network.sharing import hurry

OK, MISSING, TORN, FULL, FAILED = Outcome


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def backend(folder: Path) -> Iterator[Filesystem]:
    made = Filesystem(folder, threads=4)
    yield made
    made.close()


def mounted(kind: str, at: Path, options: str = "rw") -> Iterator[Path]:
    """A file system of its own; a test that needs one is skipped where none may be mounted."""
    at.mkdir()
    command = ["mount", "-t", kind, "-o", options, "none", str(at)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip(f"{kind} can't be mounted here")
    yield at
    subprocess.run(["umount", "-l", at], check=True)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    yield from mounted("tmpfs", tmp_path / "small", "size=1m")


@pytest.fixture
def memory_only(tmp_path: Path) -> Iterator[Path]:
    yield from mounted("ramfs", tmp_path / "ramfs")


def temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.glob("kvstore-1/nodes/*/*") if path.name.isdecimal()]


def count_direct(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each file that is opened from now on, whether for direct I/O."""
    seen: list[bool] = []
    real = os.open

    def opening(path, flags, *args, **more):
        fd = real(path, flags, *args, **more)
        if not flags & os.O_DIRECTORY:
            seen.append(bool(flags & os.O_DIRECT))
        return fd

    monkeypatch.setattr(os, "open", opening)
    return seen


class TestFilesystem(Contract):
    @pytest.fixture(autouse=True)
    def _folder(self, folder: Path) -> None:
        self.folder = folder

    def alter(self, backend: Backend, name: Name, change) -> None:
        file = self.folder / objects.path(name)
        file.write_bytes(change(file.read_bytes()))


class TestUnderALimit(TestFilesystem):
    @pytest.fixture
    def backend(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
        hurry(monkeypatch)
        made = open_backend(BackendSettings(f"file://{folder}", limit_bytes=1 << 30))
        # Bytes are granted when the folder has been counted, which takes a while on a busy machine.
        first = block(b"first")
        eventually(lambda: made.write([first], ends()) == [Outcome.OK])
        made.delete([first.name], ends())
        yield made
        made.close()


class TestWithoutDirectIO(TestFilesystem):
    @pytest.fixture
    def folder(self, memory_only: Path) -> Path:
        return memory_only

    def test_files_are_opened_without(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        backend.write([block(b"first")], ends())
        seen = count_direct(monkeypatch)
        backend.write([block(b"k")], ends())
        assert backend.read([wanted(block(b"k"))], ends()) == [OK]
        assert not any(seen)


def test_direct_io_is_used_where_it_is(backend: Filesystem, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.write([block(b"first")], ends())
    backend.read([wanted(block(b"first"))], ends())
    seen = count_direct(monkeypatch)
    backend.write([block(b"k")], ends())
    assert backend.read([wanted(block(b"k"))], ends()) == [OK]
    assert seen == [True, True]


def test_a_file_has_nothing_of_other_blocks(folder: Path) -> None:
    backend = Filesystem(folder, threads=1)
    large, tiny = block(b"large", 90_000), block(b"tiny", 5000)
    backend.write([large, tiny], ends())
    raw = (folder / objects.path(tiny.name)).read_bytes()
    assert len(raw) == HEAD_BYTES + 8192
    assert raw[HEAD_BYTES : HEAD_BYTES + 5000] == payload(tiny)
    assert not any(raw[HEAD_BYTES + 5000 :])
    assert not any(raw[objects.HEADER_BYTES : HEAD_BYTES])
    backend.close()


@pytest.mark.parametrize("url", ["file:relative", "file:///", "file://host/mnt", "file:"])
def test_a_url_that_names_no_folder(url: str) -> None:
    with pytest.raises(ConfigError, match=r"names no folder.*file:///"):
        open_backend(BackendSettings(url))


class TestAFolderThatIsAway:
    def test_one_that_is_not_there_is_made(self, folder: Path, backend: Filesystem) -> None:
        backend.health(ends())
        assert folder.stat().st_mode & 0o777 == 0o700

    def test_not_with_its_parents(self, tmp_path: Path) -> None:
        backend = Filesystem(tmp_path / "mount" / "kvstore")
        for call in (
            lambda: backend.health(ends()),
            lambda: backend.read([wanted(block(b"k"))], ends()),
            lambda: list(backend.list(None, ends())),
        ):
            with pytest.raises(NetworkError, match=r"mount/kvstore: ENOENT.*is .*mount mounted") as caught:
                call()
            assert not caught.value.fatal
        assert not list(tmp_path.iterdir())
        backend.close()

    def test_one_that_went_away_is_not_made_again(self, folder: Path, backend: Filesystem) -> None:
        backend.write([block(b"k")], ends())
        folder.rename(folder.with_name("away"))
        with pytest.raises(NetworkError, match="mounted"):
            backend.write([block(b"other")], ends())
        assert not folder.exists()
        folder.with_name("away").rename(folder)
        assert backend.read([wanted(block(b"k"))], ends()) == [OK]

    def test_a_file_in_its_place(self, folder: Path) -> None:
        folder.write_bytes(b"")
        backend = Filesystem(folder, threads=4)
        with pytest.raises(NetworkError, match="ENOTDIR") as caught:
            backend.health(ends())
        assert caught.value.fatal
        backend.close()


class TestNoRoom:
    def test_a_full_disk(self, small: Path) -> None:
        backend = Filesystem(small)
        blocks = [block(f"{i}".encode(), 100_000) for i in range(20)]
        outcomes = backend.write(blocks, ends())
        assert {*outcomes} == {OK, FULL}
        assert not temporaries(small)
        there = [b for b, outcome in zip(blocks, outcomes, strict=True) if outcome is OK]
        assert len(there) >= 6
        assert backend.read([wanted(b) for b in there], ends()) == [OK] * len(there)
        backend.delete([b.name for b in there], ends())
        assert backend.write(blocks[-2:], ends()) == [OK, OK]
        backend.close()

    def test_read_only_is_full_and_is_read(self, small: Path) -> None:
        backend = Filesystem(small)
        put = block(b"k")
        backend.write([put], ends())
        os.utime(small / objects.path(put.name), (0, 0))
        subprocess.run(["mount", "-o", "remount,ro", small], check=True)
        again = Filesystem(small)
        assert again.write([block(b"new"), put], ends()) == [FULL, OK]
        got = wanted(put)
        assert again.read([got], ends()) == [OK]
        assert payload(got) == payload(put)
        assert again.probe([put.name], ends()) == [OK]
        assert [listed.name for listed in again.list(None, ends())] == [put.name]
        assert again.delete([put.name], ends()) == [FAILED]
        with pytest.raises(NetworkError, match=r"EROFS.*mounted read-only"):
            again.health(ends())
        backend.close()
        again.close()

    @pytest.mark.parametrize(("number", "outcome"), [(errno.EDQUOT, FULL), (errno.EIO, FAILED)])
    def test_errors_that_come_with_close(self, backend, monkeypatch, number: int, outcome: Outcome) -> None:
        """As NFS tells them; a fake, of `os.close`."""
        backend.write([block(b"first")], ends())
        real = os.close

        def closing(fd: int) -> None:
            direct = os.readlink(f"/proc/self/fd/{fd}").rpartition("/")[2].isdecimal()
            real(fd)
            if direct:
                raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "close", closing)
        assert backend.write([block(b"k")], ends()) == [outcome]
        monkeypatch.undo()
        assert backend.probe([block(b"k").name], ends()) == [MISSING]


class TestHanging:
    """System calls that do not come back: a fake, of `os.preadv` and the like."""

    @pytest.fixture
    def hang(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(native, "move_files", portable_files.move_files)
        back = threading.Event()
        self.inside: list[int] = []

        def hang(call: str) -> threading.Event:
            real = getattr(os, call)

            def hanging(*args, **more):
                self.inside.append(threading.get_ident())
                back.wait()
                return real(*args, **more)

            monkeypatch.setattr(os, call, hanging)
            return back

        yield hang
        back.set()

    def fails_late(self, call: Callable[[float], list[Outcome]]) -> None:
        """Calls until a thread hangs in it: on a busy machine, that may be after the first deadline."""
        for within_s in (0.1, 1.0, WAIT_S):
            assert call(ends(within_s)) == [FAILED]
            if self.inside:
                return
        pytest.fail("no thread came to the system call")

    def test_a_read_touches_nothing_later(self, backend: Filesystem, hang) -> None:
        put, got = block(b"k"), wanted(block(b"k"))
        backend.write([put], ends())
        back = hang("preadv")
        self.fails_late(lambda until: backend.read([got], until))
        back.set()
        assert backend.read([wanted(put)] * 8, ends()) == [OK] * 8
        assert not any(got.memory)
        assert not got.checksum

    def test_a_write_that_is_late_does_not_appear(self, backend: Filesystem, hang, folder: Path) -> None:
        put = block(b"k")
        backend.write([block(b"first")], ends())
        back = hang("pwritev")
        self.fails_late(lambda until: backend.write([put], until))
        assert temporaries(folder)
        put.memory[:] = bytes(len(put.memory))
        back.set()
        # The late thread takes its file away when it comes back, which may be after any other call.
        eventually(lambda: not temporaries(folder))
        assert backend.probe([put.name], ends()) == [MISSING]
        assert backend.write([block(b"second")] * 8, ends()) == [OK] * 8

    def test_all_threads(self, backend: Filesystem, hang) -> None:
        put = block(b"k")
        backend.write([put], ends())
        back = hang("preadv")
        while len(self.inside) < 4:
            assert backend.read([wanted(put)] * 50, ends(0.1)) == [FAILED] * 50
        assert backend.probe([put.name], ends(0.1)) == [FAILED]
        with pytest.raises(NetworkError, match="did not answer in time"):
            backend.health(ends(0.1))
        with pytest.raises(NetworkError, match="did not answer in time"):
            list(backend.list(None, ends(0.1)))
        assert not backend._pool._waiting
        back.set()
        assert backend.read([wanted(put)], ends()) == [OK]

    def test_closing_ends_calls(self, backend: Filesystem, hang) -> None:
        put = block(b"k")
        backend.write([put], ends())
        hang("preadv")

        def close() -> None:
            eventually(lambda: self.inside)
            backend.close()

        threading.Thread(target=close).start()
        # Without the close, this call would last for an hour.
        assert backend.read([wanted(put)], ends(3600)) == [FAILED]


class TestForeign:
    def test_a_link_in_a_block_s_place(self, backend: Filesystem, folder: Path, tmp_path: Path) -> None:
        put = block(b"k")
        backend.write([put], ends())
        file = folder / objects.path(put.name)
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
        assert backend.read([wanted(put)], ends()) == [TORN]
        assert backend.probe([put.name], ends()) == [MISSING]
        assert not list(backend.list(None, ends()))
        assert backend.write([put], ends()) == [OK]
        assert backend.read([wanted(put)], ends()) == [OK]
        assert not file.is_symlink()

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_a_link_in_a_folder_s_place(self, folder: Path, tmp_path: Path, depth: int) -> None:
        backend, put = Filesystem(folder), block(b"k")
        backend.write([put], ends())
        place = folder.joinpath(*objects.path(put.name).split("/")[:depth])
        place.rename(tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")
        before = sorted(tmp_path.rglob("elsewhere/**/*"))
        assert backend.read([wanted(put)], ends()) == [TORN]
        assert backend.write([block(b"k"), block(b"k", space=OTHER)], ends())[0] is FAILED
        assert backend.delete([put.name], ends()) == [FAILED]
        assert not list(backend.list(SPACE, ends()))
        assert sorted(tmp_path.rglob("elsewhere/**/*")) == before
        backend.close()

    @pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
    def test_something_else_in_a_block_s_place(self, backend: Filesystem, folder: Path, make) -> None:
        put = block(b"k")
        file = folder / objects.path(put.name)
        file.parent.mkdir(parents=True)
        make(file)
        assert backend.read([wanted(put)], ends()) == [TORN]
        assert backend.probe([put.name], ends()) == [MISSING]
        assert not list(backend.list(None, ends()))

    def test_foreign_files_are_not_listed(self, backend: Filesystem, folder: Path) -> None:
        put = block(b"k")
        backend.write([put], ends())
        file = folder / objects.path(put.name)
        for path in (
            folder / "README",
            folder / "kvstore-1" / "notes",
            folder / "kvstore-1" / "nodes" / "notes",
            file.parent.parent / "notes",
            file.parent / "notes",
            file.with_suffix(".old"),
            file.with_name(file.name.upper() + "AA"),
        ):
            path.write_bytes(b"foreign")
        assert [listed.name for listed in backend.list(None, ends())] == [put.name]
        assert [listed.name for listed in backend.list(SPACE, ends())] == [put.name]


class TestClocks:
    @pytest.mark.parametrize("beyond_s", [-7 * 3600, 7 * 3600])
    def test_a_host_with_a_wrong_clock(self, backend, folder, monkeypatch, beyond_s: float) -> None:
        """A fake, of `time.time`: files' times are the kernel's."""
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + beyond_s)
        put = block(b"k")
        backend.write([put], ends())
        [listed] = backend.list(SPACE, ends())
        assert -2 < listed.age_s < 60
        before = (folder / objects.path(put.name)).stat().st_mtime_ns
        assert backend.read([wanted(put)], ends()) == [OK]
        assert (folder / objects.path(put.name)).stat().st_mtime_ns == before

    def test_a_use_is_noted_once_an_hour(self, backend: Filesystem, folder: Path) -> None:
        put = block(b"k")
        backend.write([put], ends())
        file = folder / objects.path(put.name)
        for use in (
            lambda: backend.read([wanted(put)], ends()),
            lambda: backend.write([put], ends()),
        ):
            for age_s, noted in ((3000, False), (4000, True), (1e9, True), (-1e9, False)):
                then = time.time() - age_s
                os.utime(file, (then, then))
                assert use() == [OK]
                assert (abs(file.stat().st_mtime - time.time()) < 60) is noted
