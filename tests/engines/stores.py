"""Fixtures of the engines' tests: daemons, a client, a salt. A conftest takes those that it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon

SETTINGS = {"dram": {"limit": "256MiB", "huge_pages": False}}


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
