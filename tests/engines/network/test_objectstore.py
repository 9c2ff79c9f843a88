"""Blocks in servers of others that speak S3: moto's, and rclone's, which checks signatures."""

from __future__ import annotations

import uuid

import pytest

from kvstore.tiers.network import BackendSettings, open_backend
from kvstore.tiers.network.base import Backend, Name, NetworkError, Outcome
from kvstore.tiers.network.objects import path
from tests.engines.network import servers
from tests.tiers.network.contract import SPACE, Contract, block, ends, payload, wanted

PREFIX = "kv/blocks"


def opened(endpoint: str, bucket: str, user: str = servers.KEY, password: str = servers.SECRET) -> Backend:
    url = f"s3://{bucket}/{PREFIX}?endpoint={endpoint}&region=us-east-1&unsigned_payload=1"
    return open_backend(BackendSettings(url, user=user, password=password))


class OnServer(Contract):
    """The contract, and what needs a real server. `endpoint`: its URL."""

    @pytest.fixture
    def s3(self, endpoint):
        return servers.client(endpoint)

    @pytest.fixture
    def bucket(self, s3) -> str:
        name = f"bucket-{uuid.uuid4().hex}"
        s3.create_bucket(Bucket=name)
        return name

    @pytest.fixture
    def backend(self, endpoint, bucket, s3):
        self.s3, self.bucket = s3, bucket
        one = opened(endpoint, bucket)
        yield one
        one.close()

    def alter(self, backend: Backend, name: Name, change) -> None:
        key = f"{PREFIX}/{path(name)}"
        raw = self.s3.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        self.s3.put_object(Bucket=self.bucket, Key=key, Body=change(raw))

    @pytest.mark.parametrize("straight", [True, False])
    def test_large_blocks(self, backend, straight) -> None:
        backend._signs = straight
        put = block(b"k", 64 << 20, parent=b"above")
        assert backend.write([put], ends(60)) == [Outcome.OK]
        got = wanted(put)
        assert backend.read([got], ends(60)) == [Outcome.OK]
        assert payload(got) == payload(put)

    def test_foreign_objects_are_left_alone(self, backend, bucket, s3) -> None:
        put = block(b"k")
        backend.write([put], ends())
        others = [f"{PREFIX}/readme", f"{PREFIX}/kvstore-1/x/y", path(put.name), "odd name/<a>&b"]
        for key in others:
            s3.put_object(Bucket=bucket, Key=key, Body=b"foreign")
        assert [listed.name for listed in backend.list(None, ends())] == [put.name]
        backend.delete([put.name], ends())
        left = {found["Key"] for found in s3.list_objects_v2(Bucket=bucket)["Contents"]}
        assert left == set(others)

    def test_a_bucket_that_is_not_there(self, endpoint) -> None:
        backend = opened(endpoint, "no-such-bucket")
        for call in (
            lambda: backend.write([block(b"k")], ends()),
            lambda: backend.read([wanted(block(b"k"))], ends()),
            lambda: list(backend.list(SPACE, ends())),
            lambda: backend.health(ends()),
        ):
            with pytest.raises(NetworkError, match="no-such-bucket: there is no such bucket") as told:
                call()
            assert told.value.fatal
        backend.close()

    def test_lists_of_several_pages(self, backend) -> None:
        blocks = [block(i.to_bytes(2, "little"), 10) for i in range(1100)]
        assert backend.write(blocks, ends(60)) == [Outcome.OK] * 1100
        assert {listed.name for listed in backend.list(SPACE, ends(60))} == {b.name for b in blocks}
        assert backend.delete([b.name for b in blocks], ends(60)) == [Outcome.OK] * 1100
        assert list(backend.list(SPACE, ends())) == []


class TestMoto(OnServer):
    @pytest.fixture(scope="class")
    def endpoint(self):
        with servers.moto() as endpoint:
            yield endpoint


class TestRclone(OnServer):
    # Its server for a folder removes the old file first: readers may get a 404 then, which is a miss.
    replaces_at_once = False

    @pytest.fixture(scope="class")
    def endpoint(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("rclone") / "buckets"
        folder.mkdir()
        with servers.rclone(folder) as endpoint:
            yield endpoint

    @pytest.mark.parametrize(("user", "password"), [(servers.KEY, "wrong"), ("nobody", servers.SECRET)])
    def test_wrong_credentials(self, endpoint, bucket, user, password) -> None:
        backend = opened(endpoint, bucket, user, password)
        for call in (
            lambda: backend.write([block(b"k")], ends()),
            lambda: backend.read([wanted(block(b"k"))], ends()),
            lambda: list(backend.list(SPACE, ends())),
            lambda: backend.health(ends()),
        ):
            with pytest.raises(NetworkError, match="access is refused") as told:
                call()
            assert told.value.fatal
        backend.close()
