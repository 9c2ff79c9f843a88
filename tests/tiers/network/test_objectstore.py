"""Object stores: the contract over obstore's own stores and over S3, and a server that misbehaves."""

from __future__ import annotations

import ssl
from ipaddress import ip_address

import pytest
from cryptography import x509

from bench.s3server import S3Server, Stored
from kvstore.tiers.network import BackendSettings, open_backend
from kvstore.tiers.network.base import Backend, Name, NetworkError, Outcome
from kvstore.tiers.network.objects import path
from kvstore.tiers.network.objectstore.backend import ObjectStore
from tests.certificates import certificates
from tests.tiers.network.contract import Contract, block, ends, payload, wanted

obstore = pytest.importorskip("obstore")
stores = pytest.importorskip("obstore.store")


LOOPBACK = ip_address("127.0.0.1")

PREFIX = "some/prefix"


def opened(server: S3Server, bucket: str = "bucket", more: str = "") -> Backend:
    url = f"s3://{bucket}/{PREFIX}?endpoint={server.endpoint}&region=us-east-1&unsigned_payload=1{more}"
    return open_backend(BackendSettings(url, user="key", password="secret"))


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


class OnS3Server(Contract):
    @pytest.fixture
    def backend(self, server):
        self.server = server
        one = opened(server)
        yield one
        one.close()

    def alter(self, backend: Backend, name: Name, change) -> None:
        key = f"{PREFIX}/{path(name)}"
        kept = self.server.objects[key]
        self.server.objects[key] = Stored(change(kept.body), kept.modified_s)


class TestS3(OnS3Server):
    @pytest.fixture
    def server(self):
        one = S3Server()
        yield one
        one.close()


class TestS3OverTLS(OnS3Server):
    """With a certificate that the environment says is to be trusted."""

    @pytest.fixture
    def server(self, tmp_path, monkeypatch):
        authority, served = tmp_path / "authority.pem", tmp_path / "served.pem"
        for file, data in zip((authority, served), certificates(x509.IPAddress(LOOPBACK)), strict=True):
            file.write_bytes(data)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(served)
        one = S3Server(tls=context)
        yield one
        one.close()

    def test_blocks_come_straight(self, backend) -> None:
        put = block(b"k", 20 << 20)
        assert backend.write([put], ends()) == [Outcome.OK]
        asked = len(self.server.requests)
        got = wanted(put)
        assert backend.read([got], ends()) == [Outcome.OK]
        assert payload(got) == payload(put)
        assert len(self.server.requests) == asked + 3

    def test_an_untrusted_certificate(self, server, monkeypatch) -> None:
        monkeypatch.delenv("SSL_CERT_FILE")
        backend = opened(server)
        with pytest.raises(NetworkError, match="s3://bucket"):
            backend.read([wanted(block(b"k"))], ends())
        assert not server.requests
        backend.close()
