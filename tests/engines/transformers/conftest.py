from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvstore import Client
from kvstore_transformers import PrefixCache
from tests.engines import stores
from tests.engines.transformers.models import BLOCK

client, daemon, own_daemon, salt = stores.client, stores.daemon, stores.own_daemon, stores.salt


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """With more of them, which thread gets which rows depends on how many rows there are, and so do bits."""
    torch.set_num_threads(1)


@pytest.fixture
def cached(client: Client, salt: bytes) -> Callable[..., PrefixCache]:
    """Makes a PrefixCache for a model."""

    def make(model: Any, **options: Any) -> PrefixCache:
        return PrefixCache(model, client, **{"block_tokens": BLOCK, "salt": salt, **options})

    return make
