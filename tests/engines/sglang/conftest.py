from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.sglang.engine import Engine
from tests.engines.sglang.models import make_model

SETTINGS = {"dram": {"limit": "128MiB", "huge_pages": False}, "scrub": {"rate": 0}}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def plain(model: Path) -> Iterator[Engine]:
    """The reference: an engine without HiCache."""
    with Engine(model) as engine:
        yield engine


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(SETTINGS) as served:
        yield served
