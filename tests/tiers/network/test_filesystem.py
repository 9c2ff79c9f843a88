"""Blocks in a shared folder: real files, on what filesystems can be mounted here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.tiers.network import Settings, member, objects, open_backend
from kvstore.tiers.network.base import Backend, Name
from tests.tiers.network.contract import Contract


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def backend(folder: Path) -> Iterator[Backend]:
    made = open_backend(Settings(f"file://{folder}"))
    yield made
    made.close()


class TestFilesystem(Contract):
    @pytest.fixture(autouse=True)
    def _folder(self, folder: Path) -> None:
        self.folder = folder

    def alter(self, backend: Backend, name: Name, change) -> None:
        file = self.folder / objects.path(name)
        file.write_bytes(change(file.read_bytes()))


class TestFilesystemUnderALimit(TestFilesystem):
    @pytest.fixture
    def backend(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
        monkeypatch.setattr(member, "BEAT_S", 0.05)
        made = open_backend(Settings(f"file://{folder}", limit_bytes=1 << 30))
        yield made
        made.close()
