"""Weights are named in the background, by a given name or by the content of files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvstore import Weights, WeightsNaming
from kvstore.errors import ConfigError
from kvstore.weights import naming


class Named(Weights):
    """The weights of an engine with a name."""

    __slots__ = ()
    engine = "Engine"
    hint = "set an option"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that are older than this process, as far as it knows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    started_ns = (folder / "model.safetensors").stat().st_ctime_ns + 1
    monkeypatch.setattr(naming, "process_started_ns", lambda: started_ns)
    return folder


def test_a_model_is_a_folder_or_has_a_commit(files: Path) -> None:
    assert Named.of_model(str(files), None) == Named(path=files)
    assert Named.of_model("some/model", "abc", ", chosen").revision() == "commit:abc, chosen"
    with pytest.raises(ConfigError, match=r"nothing tells which weights 'some/model' has .set an option"):
        Named.of_model("some/model", None)


def test_the_name_is_that_of_the_content(files: Path) -> None:
    made = WeightsNaming([Named(path=files)])
    assert made.wait(30)
    assert made.revision() == made.known() == Named(path=files).revision()
    assert Named.is_by_content(made.known())
    assert WeightsNaming([Named("a"), Named("b"), Named("a")]).known() == "a, draft b"


def test_files_that_change_have_no_name(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = list[BaseException]()
    digest = naming.files_digest

    def late(*arguments: object) -> object:
        time.sleep(0.02)  # a tick of the file system's clock
        (files / "model.safetensors").write_bytes(b"others!")
        return digest(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(naming, "files_digest", late)
    made = WeightsNaming([Named(path=files)], failed.append)
    assert made.wait(30)
    assert made.known() == ""
    with pytest.raises(
        ConfigError, match=r"changed after the engine started: Engine may have read it before"
    ):
        made.revision()
    assert len(failed) == 1
    with pytest.raises(ConfigError, match=r"restart the engine, or set an option"):
        WeightsNaming([Named(path=files)])


def test_missing_files_are_told_with_the_hint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no files of a model.*: set an option"):
        WeightsNaming([Named("a"), Named(path=tmp_path / "empty")])
