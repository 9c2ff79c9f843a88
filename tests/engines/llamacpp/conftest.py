from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import Llama

from kvstore import Client
from kvstore_llamacpp import KVStoreCache
from tests.engines import gguf_fixtures, stores
from tests.engines.gguf_models import BLOCK
from tests.engines.llamacpp.models import loaded

client, own_daemon, salt = stores.client, stores.own_daemon, stores.salt
models, daemon = gguf_fixtures.models, gguf_fixtures.daemon


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
