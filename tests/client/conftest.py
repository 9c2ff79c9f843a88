from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.drivers import AsyncioDriver, BlockingDriver, Driver


@pytest.fixture(params=[BlockingDriver, AsyncioDriver], ids=["sync", "aio"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    made = request.param()
    yield made
    made.stop()
