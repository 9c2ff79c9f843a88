from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import Llama

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_llamacpp import KVStoreCache
from tests.engines.llamacpp.models import BLOCK, MODELS, loaded, write_model

SETTINGS = {"dram": {"limit": "256MiB", "huge_pages": False}}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(folder / f"{name}.gguf", name) for name in MODELS}


@pytest.fixture(scope="session")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(SETTINGS) as served:
        yield served


@pytest.fixture
def own_daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(SETTINGS) as served:
        yield served


@pytest.fixture
def client(daemon: LocalDaemon) -> Iterator[Client]:
    with Client(daemon.url, deadline_s=10.0) as connected:
        yield connected


@pytest.fixture
def salt() -> bytes:
    """Blocks under it are this test's alone."""
    return os.urandom(8)


@pytest.fixture
def plain(models: dict[str, Path]) -> Iterator[Callable[..., Llama]]:
    """Loads a model without a cache."""
    made: list[Llama] = []

    def make(name: str = "llama", **options: Any) -> Llama:
        made.append(loaded(models[name], **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def cached(plain: Callable[..., Llama], client: Client, salt: bytes) -> Callable[..., Llama]:
    """Loads a model with a cache. The files are newer than this process, so the test names their weights."""

    def make(name: str = "llama", **options: Any) -> Llama:
        llm = plain(name, **options)
        llm.set_cache(KVStoreCache(llm, client, BLOCK, revision="test", salt=salt))
        return llm

    return make
