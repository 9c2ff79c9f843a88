from __future__ import annotations

import itertools
import os
import select
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from kvstore.lab.local_daemon import LocalDaemon
from kvstore_lmcache import KVStoreAdapter
from tests.engines import stores

daemon, own_daemon = stores.daemon, stores.own_daemon

SHAPE = (2, 4, 16, 64)  # K and V, layers, tokens, heads and their dimensions
WAIT_S = 20

_number = itertools.count()


@pytest.fixture
def adapter_of(daemon: LocalDaemon) -> Iterator[Callable[..., KVStoreAdapter]]:
    """Makes an adapter as LMCache's factory does, with other options."""
    made = []

    def make(**options: Any) -> KVStoreAdapter:
        given = {"url": daemon.url, "revision": "test", "deadline_s": 10, **options}
        made.append(KVStoreAdapter(given))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def model() -> str:
    """Objects of it are this test's alone."""
    return f"tests/model-{next(_number)}-{os.getpid()}"


def names(model: str, n: int, group: int = 0, rank: int = 1, salt: str = "", first: int = 0) -> list[Any]:
    return [ObjectKey(i.to_bytes(16, "big"), model, rank, group, salt) for i in range(first, first + n)]


def things(
    n: int, shape: Sequence[int] = SHAPE, dtype: Any = torch.bfloat16, fill: int | None = None
) -> list[Any]:
    """LMCache's memory objects, of random bytes or of one byte."""
    made = []
    for _ in range(n):
        size = torch.Size(shape).numel() * dtype.itemsize
        raw = (
            torch.full((size,), fill, dtype=torch.uint8)
            if fill is not None
            else torch.randint(0, 256, (size,), dtype=torch.uint8)
        )
        meta = MemoryObjMetadata(torch.Size(shape), dtype, 0, size, 1, fmt=MemoryFormat.KV_2LTD)
        made.append(TensorMemoryObj(raw, meta, parent_allocator=None))
    return made


def bytes_of(thing: Any) -> bytes:
    return bytes(thing.byte_array)


def descs(
    shape: Sequence[int] = SHAPE, dtype: Any = torch.bfloat16, groups: Sequence[int] = (0,)
) -> dict[int, Any]:
    return {group: MemoryLayoutDesc([torch.Size(shape)], [dtype]) for group in groups}


def ended(fd: int, ask: Callable[[], Any]) -> Any:
    """Waits for a result as LMCache's controllers do: by the descriptor."""
    while (answer := ask()) in (None, {}):
        assert select.select([fd], [], [], WAIT_S)[0], "no task has ended"
        consume_fd(fd)
    return answer


def store(adapter: KVStoreAdapter, keys: list[Any], objects: list[Any]) -> Any:
    task = adapter.submit_store_task(keys, objects)
    return ended(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)[task]


def look_up(adapter: KVStoreAdapter, keys: list[Any], told: dict[int, Any] | None = None) -> list[int]:
    told = descs() if told is None else told
    task = adapter.submit_lookup_and_lock_task(keys, told)
    found = ended(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
    adapter.submit_unlock(keys)
    return set_bits(found, len(keys))


def load(adapter: KVStoreAdapter, keys: list[Any], objects: list[Any]) -> list[int]:
    task = adapter.submit_load_task(keys, objects)
    found = ended(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
    return set_bits(found, len(keys))


def set_bits(bitmap: Any, n: int) -> list[int]:
    return [i for i in range(n) if bitmap.test(i)]
