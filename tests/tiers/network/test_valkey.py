"""The valkey backend, against real Valkey servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.tiers.network import Settings, objects, open_backend
from kvstore.tiers.network.base import Backend, Name
from kvstore.tiers.network.valkey import Valkey
from tests.tiers.network.contract import Contract
from tests.tiers.network.valkeys import Cluster, Server, cluster, server


def opened(url: str, **settings) -> Valkey:
    backend = open_backend(Settings(url, **settings))
    assert isinstance(backend, Valkey)
    return backend


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with server() as made:
        yield made


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


class TestTcp(Contract):
    @pytest.fixture
    def backend(self, running: Server) -> Iterator[Backend]:
        running.ask("FLUSHALL")
        self.server = running
        backend = opened(self.url())
        yield backend
        backend.close()

    def url(self) -> str:
        return self.server.url

    def alter(self, backend: Backend, name: Name, change) -> None:
        with self.server.client() as client:
            client.set(objects.path(name), change(client.get(objects.path(name))))


class TestUnix(TestTcp):
    def url(self) -> str:
        return f"unix://{self.server.socket}?ttl=3600"


class TestCluster(Contract):
    @pytest.fixture
    def backend(self, three: Cluster) -> Iterator[Backend]:
        three.clear()
        self.cluster = three
        backend = opened(three.url)
        yield backend
        backend.close()

    def alter(self, backend: Backend, name: Name, change) -> None:
        key = objects.path(name)
        with self.cluster.owner(key).client() as client:
            client.set(key, change(client.get(key)))
