"""Weights are named by content: what shares, what does not, and which files count."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore import files_digest
from kvstore.errors import ConfigError
from kvstore.weights import pieces
from tests.daemons import eventually
from tests.tenants import NOBODY, as_user, needs_root


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "part").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model-1.safetensors").write_bytes(bytes(range(256)) * 20)
    (folder / "part" / "model-2.safetensors").write_bytes(b"x" * 5000)
    (folder / "empty").touch()
    return folder


def name(path: Path) -> str:
    return files_digest(path).hexdigest


def test_copies_that_were_made_at_another_time_share(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    for path in (other / "config.json", other):
        os.utime(path, (1, 1))
    assert name(model) == name(other)
    assert len(name(model)) == 64


CHANGES: dict[str, Callable[[Path], object]] = {
    "a byte": lambda m: _flip(m / "part" / "model-2.safetensors", 4999),
    "first byte": lambda m: _flip(m / "model-1.safetensors", 0),
    "a zero more": lambda m: (m / "empty").write_bytes(b"\0"),
    "shorter": lambda m: os.truncate(m / "part" / "model-2.safetensors", 4999),
    "renamed": lambda m: (m / "empty").rename(m / "void"),
    "moved": lambda m: (m / "empty").rename(m / "part" / "empty"),
    "one more": lambda m: (m / "tokenizer.json").touch(),
    "one less": lambda m: (m / "empty").unlink(),
    "swapped": lambda m: _swap(m / "model-1.safetensors", m / "part" / "model-2.safetensors"),
}


def _flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def _swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_other_files_do_not_share(model: Path, change: Callable[[Path], object]) -> None:
    before = name(model)
    change(model)
    assert name(model) != before


def test_every_piece_of_a_large_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    monkeypatch.setattr(pieces, "_STEP_BYTES", 300)
    path = tmp_path / "weights.gguf"
    path.write_bytes(os.urandom(3500))
    names = {name(path)}
    for at in (0, 299, 300, 999, 1000, 1999, 2000, 3000, 3499):
        _flip(path, at)
        names.add(name(path))
    raw = path.read_bytes()
    path.write_bytes(raw[1000:2000] + raw[:1000] + raw[2000:])
    names.add(name(path))
    assert len(names) == 11


def test_a_file_is_named_by_its_content_and_its_own_name(model: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "model-1.safetensors"
    shutil.copy(model / "model-1.safetensors", elsewhere)
    assert name(model / "model-1.safetensors") == name(elsewhere)
    assert name(elsewhere.rename(tmp_path / "model.gguf")) != name(model / "model-1.safetensors")


def test_hidden_lock_and_compiled_files_are_no_part(model: Path) -> None:
    before = name(model)
    for path in (
        ".git/HEAD",
        ".cache/huggingface/x.metadata",
        ".gitattributes",
        "a.lock",
        "__pycache__/m.pyc",
    ):
        (model / path).parent.mkdir(parents=True, exist_ok=True)
        (model / path).write_text("anything")
    os.mkfifo(model / "pipe")
    (model / "gone.safetensors").symlink_to("nowhere")
    assert name(model) == before
    (model / "README.md").touch()
    assert name(model) != before


def test_links_are_followed(model: Path, tmp_path: Path) -> None:
    """A hub's snapshot has links to blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    shutil.copytree(model, blobs)
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("..") / "blobs" / path.name)
    (tmp_path / "link").symlink_to(snapshot)
    assert name(tmp_path / "link") == name(snapshot) == name(model)
    _flip(blobs / "model-1.safetensors", 7)
    assert name(snapshot) != name(model)


def test_links_in_a_circle_end(model: Path) -> None:
    before = name(model)
    (model / "part" / "up").symlink_to(model)
    assert name(model) == before


def test_no_files_are_an_error_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "model" / ".cache").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no files of a model in .*\(download the model, or name"):
        files_digest(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"cannot list .*No such file"):
        files_digest(tmp_path / "elsewhere")


@needs_root
def test_unreadable_files_are_an_error_with_a_hint(model: Path, tmp_path: Path) -> None:
    # Workers of pytest-xdist have folders one level deeper.
    for folder in (tmp_path, *tmp_path.parents):
        if "pytest-" in str(folder):
            folder.chmod(0o755)

    def refused() -> str:
        with pytest.raises(ConfigError) as error:
            files_digest(model)
        return str(error.value)

    for path, why in ((model / "config.json", "cannot read"), (model / "part", "cannot list")):
        path.chmod(0)
        said = as_user(NOBODY, refused)
        assert why in said
        assert "(give this user access, or name the weights yourself)" in said
        path.chmod(0o755)


def test_the_newest_file_is_told(model: Path) -> None:
    path = model / "part" / "model-2.safetensors"
    os.utime(model / "empty", ns=(10**9, 2**62))  # a time in the future, which archives may set
    eventually(lambda: time.time_ns() - path.stat().st_ctime_ns > 10**8)
    path.chmod(0o600)
    found = files_digest(model)
    assert found.newest == "part/model-2.safetensors"
    assert found.changed_ns == path.stat().st_ctime_ns


# -- files that change meanwhile


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], object]]]:
    """What is done after a piece is read, each once, in order."""
    left: list[Callable[[], object]] = []
    read = pieces._piece

    def piece(path: Path, start: int) -> tuple[bytes, int]:
        result = read(path, start)
        if left:
            left.pop(0)()
        return result

    monkeypatch.setattr(pieces, "_piece", piece)
    yield left
    assert not left


@pytest.mark.parametrize("change", [*CHANGES.values()], ids=CHANGES.keys())
def test_a_change_while_files_are_digested_is_seen(
    model: Path, meanwhile: list[Callable[[], object]], change: Callable[[Path], object]
) -> None:
    before = name(model)
    meanwhile.append(lambda: change(model))
    during = name(model)
    assert during == name(model) != before


def test_a_file_that_is_removed_before_it_is_read_is_not_missed(
    model: Path, meanwhile: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its digest would be missing."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    meanwhile.append(lambda: shutil.rmtree(model / "part"))
    during = name(model)
    assert during == name(model)


def test_files_that_keep_changing_are_an_error(model: Path, meanwhile: list[Callable[[], object]]) -> None:
    def change() -> None:
        with (model / "config.json").open("a") as file:
            file.write("more")

    meanwhile += [change] * 9  # three attempts on three files
    with pytest.raises(ConfigError, match=r"config.json in .* changes while .*\(start again when"):
        files_digest(model)


# -- progress


def test_long_digests_are_logged(
    model: Path,
    meanwhile: list[Callable[[], object]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("test of weights")
    with caplog.at_level(logging.INFO):
        files_digest(model, logger)
        assert caplog.messages == []
        monkeypatch.setattr(pieces, "_QUIET_S", 0.0)
        monkeypatch.setattr(pieces, "_REPORT_S", 0.1)
        meanwhile.append(lambda: time.sleep(0.3))
        files_digest(model, logger)
    assert {record.name for record in caplog.records} == {"test of weights"}
    assert caplog.messages[0].startswith("digests weights: 0.0 GB in 0 s so far")
    assert caplog.messages[-1].startswith("digested 0.0 GB of weights in 0.")


def test_nothing_is_read_after_an_error(
    model: Path, meanwhile: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "the disk is broken", "some-file")

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1)
    unexpected: list[int] = []
    meanwhile += [lambda: unexpected.append(1)] * 20_000
    meanwhile.insert(0, fail)
    with pytest.raises(ConfigError, match=r"cannot read some-file: the disk is broken \(give"):
        files_digest(model)
    meanwhile.clear()
    assert len(unexpected) < 10_000
