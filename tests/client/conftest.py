from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from tests.client.drivers import AsyncioDriver, BlockingDriver, Driver
from tests.daemons import eventually, idle


@pytest.fixture(params=[BlockingDriver, AsyncioDriver], ids=["sync", "aio"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    made = request.param()
    yield made
    made.stop()


@pytest.fixture
def client(driver: Driver, daemon: LocalDaemon) -> Iterator[Client]:
    """A client of either kind of the module's `daemon`: both have these calls, see `drivers`."""
    with driver.client(daemon.url, deadline_s=10) as made:
        yield made
    with Client(daemon.url, deadline_s=10) as other:
        eventually(lambda: idle(other.status()), 3)
