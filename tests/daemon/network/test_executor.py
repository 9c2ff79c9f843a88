"""What calls to a backend leave behind."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.daemon.network.executor import BackendExecutor
from kvstore.tiers.network.base import NetworkError
from kvstore.tiers.network.filesystem.call_pool import CallPool
from tests.daemons import eventually


class Payload:
    """Memory that a call reads or writes."""


def failing(payload: Payload) -> Any:
    def fail(*_: Any) -> list[Any]:
        raise NetworkError(f"{type(payload).__name__} is not written")

    return fail


@pytest.fixture
def no_collector() -> Any:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_failed_call_frees_its_memory_without_the_garbage_collector() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        core: Any = SimpleNamespace(loop=loop, post=loop.call_soon_threadsafe)
        nothing: Any = None
        executor = BackendExecutor(core, nothing, 1, 5.0, lambda problem: None)
        payload = Payload()
        left = weakref.ref(payload)
        assert await executor.transfer(failing(payload), 5.0) == []
        del payload
        await loop.run_in_executor(None, eventually, lambda: left() is None)  # the thread drops its reference

    asyncio.run(run())


@pytest.mark.usefixtures("no_collector")
def test_a_failed_call_to_a_folder_frees_its_memory_without_the_garbage_collector() -> None:
    pool, payload = CallPool("test", 1), Payload()
    left = weakref.ref(payload)
    with pytest.raises(NetworkError) as raised:
        pool.run([failing(payload)], time.monotonic() + 5.0, None)
    del payload, raised
    eventually(lambda: left() is None)  # the thread drops its reference
    pool.close()
