from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import Llama

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_llamacpp import KVStoreCache
from tests.engines import stores
from tests.engines.gguf_models import BLOCK, MODELS, write_model
from tests.engines.llamacpp.models import loaded

client, own_daemon, salt = stores.client, stores.own_daemon, stores.salt

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
