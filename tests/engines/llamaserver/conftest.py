from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.lab.local_daemon import LocalDaemon
from tests.engines import gguf_fixtures, stores
from tests.engines.llamaserver.build import why_not
from tests.engines.llamaserver.serving import Served, alone, proxied
from tests.programs import SKIP_NOTHING

own_daemon = stores.own_daemon
models, daemon = gguf_fixtures.models, gguf_fixtures.daemon


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    if reason := why_not():
        (pytest.fail if SKIP_NOTHING else pytest.skip)(reason)


@pytest.fixture(scope="module")
def direct(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """llama-server alone: what it answers is right."""
    with alone(models["llama"], tmp_path_factory.mktemp("direct")) as served:
        yield served


@pytest.fixture
def proxy(models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon) -> Iterator[Served]:
    """A proxy with an empty store of its own."""
    with proxied(models["llama"], tmp_path, own_daemon.url) as served:
        yield served
