from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.lab.served import ServedDaemon
from tests.engines.vllm.engine import Engine, connector
from tests.engines.vllm.models import make_model

SETTINGS = {"dram": {"limit": "128MiB", "huge_pages": False}, "nvme": {"limit": "256MiB"}}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def plain(model: Path) -> Iterator[Engine]:
    """The reference: an engine without the connector."""
    with Engine(model) as engine:
        yield engine


@pytest.fixture(scope="session")
def daemon() -> Iterator[ServedDaemon]:
    with ServedDaemon(SETTINGS) as served:
        yield served


@pytest.fixture(scope="session", params=["async", "sync"])
def engine(request: pytest.FixtureRequest, model: Path, daemon: ServedDaemon) -> Iterator[Engine]:
    """An engine with the connector, for each way to load."""
    with Engine(model, **connector(daemon, load=request.param, weights_revision=request.param)) as made:
        made.mode = request.param
        yield made


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A client of a small daemon, for tests that need no engine."""
    with (
        ServedDaemon({"dram": {"limit": "16MiB", "huge_pages": False}}) as served,
        Client(served.url, deadline_s=10.0) as made,
    ):
        yield made
