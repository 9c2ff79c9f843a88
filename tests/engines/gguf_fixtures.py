"""Fixtures of the tests with GGUF models: the models' files, and a daemon with room for their blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.gguf_models import MODELS, write_model

ROOMY = {"dram": {"limit": "1GiB", "huge_pages": False}}
"""Blocks of each size need an extent of 64 MiB of their own. Models and types of KV make ten sizes."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(folder / f"{name}.gguf", name) for name in MODELS}


@pytest.fixture(scope="session")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(ROOMY) as served:
        yield served
