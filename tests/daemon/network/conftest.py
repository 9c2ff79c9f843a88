"""Network tiers for tests: a folder, or a real Valkey."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiers.network.valkeys import Server, server


@pytest.fixture(scope="module")
def valkey() -> Iterator[Server]:
    with server() as made:
        yield made


@pytest.fixture(params=["folder", "valkey"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The URL of an empty network tier."""
    if request.param == "folder":
        return f"file://{tmp_path / 'shared'}"
    made: Server = request.getfixturevalue("valkey")
    made.ask("FLUSHALL")
    return made.url


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shared"
