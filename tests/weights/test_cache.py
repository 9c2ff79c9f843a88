"""Digests are remembered: a file is read once per node. What cannot be trusted is not believed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore import files_digest
from kvstore.weights import cache as caches
from kvstore.weights import digest, pieces
from kvstore.weights.cache import DigestCache, cache_folder
from kvstore.weights.files import model_files
from tests.tenants import VICTIM, needs_root


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digest, "_SETTLED_NS", 0)
    return tmp_path / "cache" / "kvstore" / "weights"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read, once per piece."""
    found: list[str] = []
    read = pieces._piece

    def piece(path: Path, start: int) -> tuple[bytes, int]:
        found.append(path.name)
        return read(path, start)

    monkeypatch.setattr(pieces, "_piece", piece)
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for name in ("a", "b"):
        (made / name).write_text(f"weights {name}")
    return made


def test_a_file_is_read_once(model: Path, reads: list[str], folder: Path) -> None:
    first = files_digest(model)
    assert sorted(reads) == ["a", "b"]
    assert files_digest(model) == first
    assert len(reads) == 2
    (model / "b").write_text("WEIGHTS b")
    assert files_digest(model).hexdigest != first.hexdigest
    assert reads[2:] == ["b"]
    assert (folder.stat().st_mode & 0o777, (folder / "digests").stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.parametrize("change", ["replaced", "written", "touched"])
def test_any_other_state_is_read_again(model: Path, reads: list[str], change: str) -> None:
    files_digest(model)
    path, before = model / "a", (model / "a").stat()
    if change == "replaced":
        (model / "new").write_text("weights A")
        (model / "new").replace(path)
    elif change == "written":
        path.write_text("weights A")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    files_digest(model)
    assert reads[2:] == ["a"]


def test_a_file_that_just_changed_is_not_remembered(
    model: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "_SETTLED_NS", 60 * 10**9)
    files_digest(model)
    files_digest(model)
    assert len(reads) == 4


def test_the_digest_of_a_file_that_changes_meanwhile_is_not_remembered(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, left = pieces._piece, ["once"]

    def piece(path: Path, start: int) -> tuple[bytes, int]:
        result = read(path, start)
        if path.name == "a" and left:
            left.clear()
            path.write_text("others a!")
        return result

    monkeypatch.setattr(pieces, "_piece", piece)
    files_digest(model)
    with DigestCache(cache_folder(), digest._log) as cache:
        assert cache.read() == pieces.digest_each(model_files(model).values(), digest._log)


# -- what is not believed


def forge(model: Path) -> None:
    """Remembers a wrong digest of `a`."""
    with DigestCache(cache_folder(), digest._log) as cache:
        cache.add({model_files(model)["a"].state: b"wrong".ljust(32)})


def test_a_trusted_cache_is_believed(model: Path) -> None:
    """The control of the next tests."""
    right = files_digest(model)
    forge(model)
    assert files_digest(model).hexdigest != right.hexdigest


def _to(mode: int) -> Callable[[Path], None]:
    return lambda path: path.chmod(mode)


def _linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _given(path: Path) -> None:
    os.chown(path, VICTIM, VICTIM)


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("digests", _to(0o602)),
        ("digests", _to(0o620)),
        ("digests", _linked),
        ("", _to(0o702)),
        ("", _to(0o720)),
        ("", _linked),
        pytest.param("digests", _given, marks=needs_root),
        pytest.param("", _given, marks=needs_root),
    ],
)
def test_a_cache_that_others_may_write_is_ignored(
    model: Path, folder: Path, where: str, change: Callable[[Path], None]
) -> None:
    right = files_digest(model)
    forge(model)
    change(folder / where)
    assert files_digest(model) == right


def test_a_corrupt_cache_is_ignored(model: Path, folder: Path) -> None:
    right = files_digest(model)
    forge(model)
    path = folder / "digests"
    raw = path.read_bytes()
    cut = [raw[:end] for end in (0, 1, 20, len(raw) - 1)]
    flipped = [raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :] for at in range(0, len(raw), 7)]
    for damaged in (*cut, *flipped, b"\0" * 500, os.urandom(500), raw + raw):
        path.write_bytes(damaged)
        assert files_digest(model) == right
        path.unlink()


@pytest.mark.parametrize("place", ["/proc/none", "/dev/null/x", "relative"])
def test_an_unusable_cache_folder_only_costs_time(
    model: Path, reads: list[str], place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", place)
    monkeypatch.setenv("HOME", "/proc/none")
    monkeypatch.chdir(tmp_path)
    assert files_digest(model) == files_digest(model)
    assert len(reads) == 4
    assert not (tmp_path / "relative").exists()


def test_without_the_variable_it_is_in_the_home_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    files_digest(model)
    assert (tmp_path / ".cache" / "kvstore" / "weights" / "digests").exists()


def test_the_oldest_are_forgotten(
    model: Path, reads: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "MOST_FILES", 3)
    for number in range(5):
        (model / f"file {number}").write_text("x")
        files_digest(model / f"file {number}")
    assert len((folder / "digests").read_text().splitlines()) == 1 + 3
    del reads[:]
    for number in range(4, -1, -1):
        files_digest(model / f"file {number}")
    assert reads == ["file 1", "file 0"]


def test_the_largest_cache_is_read_whole(folder: Path) -> None:
    """Else its checksum would fail, and nothing would be remembered."""
    largest = (1 << 64) - 1
    states = [caches.FileState(largest, number, largest, -largest, -largest) for number in range(5000)]
    with DigestCache(folder, digest._log) as cache:
        cache.add(dict.fromkeys(states, b"\xff" * 32))
        assert list(cache.read()) == states[-caches.MOST_FILES :]


# -- several processes

_PROCESS = """
import sys, time
from kvstore import files_digest
from kvstore.weights import digest, pieces
digest._SETTLED_NS = 0
read, count = pieces._piece, []
def slowly(path, start):
    count.append(path)
    print("reads", flush=True)
    time.sleep(0.5)
    return read(path, start)
pieces._piece = slowly
print("ready", flush=True)
sys.stdin.readline()
print(files_digest(sys.argv[1]).hexdigest, len(count), flush=True)
"""


def test_one_of_several_processes_reads(model: Path) -> None:
    command = [sys.executable, "-c", _PROCESS, str(model)]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0].splitlines()[-1].split() for process in started]
    assert {name for name, _ in answers} == {files_digest(model).hexdigest}
    assert sorted(int(count) for _, count in answers) == [0, 0, 0, 2]


def test_other_models_do_not_wait(model: Path, tmp_path: Path, reads: list[str]) -> None:
    (tmp_path / "adapter").write_text("small")
    process = subprocess.Popen(
        [sys.executable, "-c", _PROCESS.replace("0.5", "60"), str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "reads\n"
        files_digest(tmp_path / "adapter")
        assert reads == ["adapter"]
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    # A killed process holds nothing back.
    files_digest(model)
    assert sorted(reads[1:]) == ["a", "b"]
