"""Object stores: the contract over obstore's own stores and over S3, and a server that misbehaves."""

from __future__ import annotations

import pytest

from bench.s3server import S3Server, Stored
from kvstore.tiers.network import Settings, open_backend
from kvstore.tiers.network.base import Backend, Name
from kvstore.tiers.network.objects import path
from kvstore.tiers.network.objectstore import ObjectStore
from tests.tiers.network.contract import Contract

obstore = pytest.importorskip("obstore")
stores = pytest.importorskip("obstore.store")


PREFIX = "some/prefix"


def opened(server: S3Server, bucket: str = "bucket", more: str = "") -> Backend:
    url = f"s3://{bucket}/{PREFIX}?endpoint={server.endpoint}&region=us-east-1&unsigned_payload=1{more}"
    return open_backend(Settings(url, user="key", password="secret"))


@pytest.fixture
def server():
    one = S3Server()
    yield one
    one.close()


class OfObstore(Contract):
    def alter(self, backend: Backend, name: Name, change) -> None:
        raw = bytes(obstore.get(backend._store, path(name)).bytes())
        obstore.put(backend._store, path(name), change(raw), use_multipart=False)


class TestMemory(OfObstore):
    @pytest.fixture
    def backend(self):
        one = ObjectStore(stores.MemoryStore(), "memory")
        yield one
        one.close()


class TestFolder(OfObstore):
    @pytest.fixture
    def backend(self, tmp_path):
        one = ObjectStore(stores.LocalStore(tmp_path), "a folder")
        yield one
        one.close()


class TestS3(Contract):
    @pytest.fixture
    def backend(self, server):
        one = opened(server)
        yield one
        one.close()

    @pytest.fixture(autouse=True)
    def keep(self, server) -> None:
        self.server = server

    def alter(self, backend: Backend, name: Name, change) -> None:
        key = f"{PREFIX}/{path(name)}"
        kept = self.server.objects[key]
        self.server.objects[key] = Stored(change(kept.body), kept.modified_s)
