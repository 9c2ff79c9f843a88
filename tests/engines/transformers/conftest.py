from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_transformers import PrefixCache
from tests.engines.transformers.models import BLOCK

SETTINGS = {"dram": {"limit": "256MiB", "huge_pages": False}}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """With more of them, which thread gets which rows depends on how many rows there are, and so do bits."""
    torch.set_num_threads(1)


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
def cached(client: Client, salt: bytes) -> Callable[..., PrefixCache]:
    """Makes a PrefixCache for a model."""

    def make(model: Any, **options: Any) -> PrefixCache:
        return PrefixCache(model, client, **{"block_tokens": BLOCK, "salt": salt, **options})

    return make
