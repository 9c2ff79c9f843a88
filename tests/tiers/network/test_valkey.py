"""The valkey backend, against real Valkey servers."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from kvstore.errors import ConfigError
from kvstore.tiers.network import BackendSettings, objects, open_backend
from kvstore.tiers.network.base import Backend, Name, NetworkError, Outcome
from kvstore.tiers.network.resolver import Address
from kvstore.tiers.network.valkey.backend import Valkey
from kvstore.tiers.network.valkey.url import parse
from tests.processes import stop
from tests.tiers.network.contract import SPACE, Contract, block, ends, payload, wanted
from tests.tiers.network.valkeys import Cluster, Server, cluster, server, tls_proxy


def opened(url: str, **settings) -> Valkey:
    backend = open_backend(BackendSettings(url, **settings))
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


@pytest.fixture(scope="module")
def moving() -> Iterator[Cluster]:
    with cluster() as made:
        made.move(range(5461), 0, 1)
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


class TestClusterByOneHost(TestCluster):
    """Of which the URL does not say that it is one."""

    @pytest.fixture
    def backend(self, three: Cluster) -> Iterator[Backend]:
        three.clear()
        self.cluster = three
        backend = opened(three.servers[1].url)
        yield backend
        backend.close()


class TestClusterOnTheMove(TestCluster):
    """A third of the slots is on its way from one node to another."""

    @pytest.fixture
    def backend(self, moving: Cluster) -> Iterator[Backend]:
        moving.clear()
        self.cluster = moving
        backend = opened(moving.url)
        yield backend
        backend.close()

    def alter(self, backend: Backend, name: Name, change) -> None:
        key = objects.path(name)
        with self.cluster.holder(key) as client:
            raw = client.get(key)
            client.execute_command("ASKING")
            client.execute_command("SET", key, change(raw))


class TestTls(TestTcp):
    """By a proxy of the test's own: the server here was built without TLS."""

    @pytest.fixture
    def backend(self, running: Server, tmp_path) -> Iterator[Backend]:
        running.ask("FLUSHALL")
        self.server = running
        with tls_proxy(running, tmp_path) as (port, ca):
            backend = opened(f"rediss://localhost:{port}?ca={ca}")
            yield backend
            backend.close()


def test_tls_that_is_not_trusted(running: Server, tmp_path) -> None:
    with tls_proxy(running, tmp_path) as (port, ca):
        for url in (f"rediss://localhost:{port}", f"rediss://127.0.0.1:{port}?ca={ca}"):
            backend = opened(url)
            with pytest.raises(NetworkError) as caught:
                backend.health(ends())
            assert caught.value.fatal
            backend.close()


def test_a_slot_that_moves(three: Cluster) -> None:
    """Blocks are found before, while and after their slot goes to another node."""
    three.clear()
    put, late = block(b"k"), block(b"k")
    key = objects.path(put.name)
    backend = opened(three.url)
    assert backend.write([put], ends()) == [Outcome.OK]
    source = three.servers.index(three.owner(key))
    target = (source + 1) % 3
    slot = three.slot(key)

    def found() -> bool:
        got = wanted(put)
        return backend.read([got], ends()) == [Outcome.OK] and payload(got) == payload(put)

    try:
        three.move([slot], source, target)
        assert found()
        place = three.servers[target]
        three.servers[source].ask("MIGRATE", "127.0.0.1", place.port, key, 0, 5000)
        assert place.ask("DBSIZE") == 1
        assert found()
        assert backend.probe([put.name], ends()) == [Outcome.OK]
        assert [listed.name for listed in backend.list(SPACE, ends())] == [put.name]
        assert backend.write([late], ends()) == [Outcome.OK]
        three.moved(slot, source, target)
        assert found()
        assert backend.delete([put.name], ends()) == [Outcome.OK]
        assert not found()
    finally:
        three.moved(slot, source, target)
        three.move([slot], target, source)
        three.moved(slot, target, source)
        backend.close()


def test_a_node_of_a_cluster_that_is_away() -> None:
    """Its blocks fail, the others' do not."""
    with cluster("cluster-require-full-coverage no") as three:
        backend = opened(three.url)
        blocks = [block(bytes([i])) for i in range(30)]
        assert backend.write(blocks, ends()) == [Outcome.OK] * 30
        gone = three.owner(objects.path(blocks[0].name))
        lost = [three.owner(objects.path(b.name)) is gone for b in blocks]
        right = [Outcome.FAILED if away else Outcome.OK for away in lost]
        stop(gone.process.pid)
        until = ends(0.5)
        assert backend.read([wanted(b) for b in blocks], until) == right
        assert time.monotonic() < until + 0.05
        gone.signal(signal.SIGCONT)
        assert backend.read([wanted(b) for b in blocks], ends()) == [Outcome.OK] * 30
        gone.kill()
        for _ in range(2):
            assert backend.read([wanted(b) for b in blocks], ends()) == right
            assert backend.probe([b.name for b in blocks], ends()) == right
        backend.close()


def test_prefixes_are_apart(running: Server) -> None:
    running.ask("FLUSHALL")
    put = block(b"k")
    one, other = (opened(f"{running.url}?prefix={prefix}") for prefix in ("a:", "b/"))
    assert one.write([put], ends()) == [Outcome.OK]
    assert running.ask("KEYS", "*") == [b"a:" + objects.path(put.name).encode()]
    assert other.read([wanted(put)], ends()) == [Outcome.MISSING]
    assert [listed.name for listed in one.list(None, ends())] == [put.name]
    assert list(other.list(None, ends())) == []
    one.close()
    other.close()


def test_a_server_forgets_after_the_ttl(running: Server) -> None:
    put = block(b"k")
    for url, least in ((f"{running.url}?ttl=100", 90), (running.url, -1)):
        backend = opened(url)
        assert backend.write([put], ends()) == [Outcome.OK]
        assert least <= running.ask("TTL", objects.path(put.name)) <= max(100 * (least > 0), least)
        backend.close()


def test_a_long_list(running: Server) -> None:
    """Each once, foreign keys left out, and no block looks used by it."""
    running.ask("FLUSHALL")
    backend = opened(running.url)
    blocks = [block(i.to_bytes(2, "big"), 300) for i in range(2000)]
    assert backend.write(blocks, ends()) == [Outcome.OK] * 2000
    with running.client() as client:
        for i in range(500):
            client.set(f"{objects.ROOT}/{i}", "foreign")
            client.set(f"other/{i}", "foreign")
        client.set(objects.path(Name(SPACE, b"altered")), "nonsense")
    time.sleep(1.2)
    listed = list(backend.list(SPACE, ends()))
    names = [found.name for found in listed]
    assert len(names) == 2001
    assert set(names) == {b.name for b in blocks} | {Name(SPACE, b"altered")}
    assert [found.nbytes for found in listed if found.age_s > 1e6] == [len("nonsense")]
    assert running.ask("OBJECT", "IDLETIME", objects.path(names[0])) >= 1
    backend.close()


def test_a_large_batch(running: Server) -> None:
    running.ask("FLUSHALL")
    backend = opened(running.url)
    blocks = [block(bytes([i]), 2 << 20) for i in range(40)]
    assert backend.write(blocks, ends()) == [Outcome.OK] * 40
    got = [wanted(b) for b in blocks]
    assert backend.read(got, ends()) == [Outcome.OK] * 40
    assert [payload(g) for g in got] == [payload(b) for b in blocks]
    large = block(b"large", 64 << 20)
    assert backend.write([large], ends()) == [Outcome.OK]
    assert backend.read([wanted(large), wanted(large)], ends()) == [Outcome.OK] * 2
    backend.close()
    running.ask("FLUSHALL")


@pytest.mark.parametrize(
    ("url", "seeds"),
    [
        ("redis://host", [Address("host", 6379)]),
        ("redis://10.0.0.1:7000/3", [Address("10.0.0.1", 7000)]),
        ("redis://[::1]:7000,b:7001?ttl=9", [Address("::1", 7000), Address("b", 7001)]),
        ("rediss://host", [Address("host", 6379)]),
        ("unix:///run/a%20b.sock?db=2&prefix=x/", [Address("/run/a b.sock", 0)]),
    ],
)
def test_urls(url: str, seeds: list[Address]) -> None:
    endpoint = parse(url, "", "")
    assert list(endpoint.seeds) == seeds
    assert endpoint.cluster == (len(seeds) > 1)


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis://a:0",
        "redis://a:99999",
        "redis://a,,b",
        "redis://a/x",
        "redis://a?ttl=-1",
        "redis://a?ttl=x",
        "redis://a?nonsense=1",
        "redis://a?ca=/x",
        "redis://a?prefix={x}",
        "redis://a?cluster=2",
        "redis://me:hush@a",
        "rediss://a?ca=/nowhere/at/all",
        "unix://path",
        "unix://",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match=r"network\.url") as caught:
        opened(url)
    assert "hush" not in str(caught.value)


def test_a_user_without_a_password() -> None:
    with pytest.raises(ConfigError, match=r"network\.password"):
        opened("redis://a", user="me")


def test_a_list_by_one_host_has_all_of_a_cluster(three: Cluster) -> None:
    three.clear()
    writer, reader = opened(three.url), opened(three.servers[0].url)
    blocks = [block(bytes([i])) for i in range(30)]
    assert writer.write(blocks, ends()) == [Outcome.OK] * 30
    assert {listed.name for listed in reader.list(None, ends())} == {b.name for b in blocks}
    writer.close()
    reader.close()


def test_an_object_on_two_nodes_is_listed_once(moving: Cluster) -> None:
    """As it may be while it goes from one to the other."""
    moving.clear()
    source, target = moving.servers[:2]
    blocks = [block(bytes([i])) for i in range(30)]
    put = next(b for b in blocks if moving.owner(objects.path(b.name)) is source)
    key, raw = objects.path(put.name), objects.header(put) + payload(put)
    with target.client(single_connection_client=True) as client:
        client.execute_command("ASKING")
        client.execute_command("SET", key, raw)
    assert source.ask("CLUSTER", "SETSLOT", moving.slot(key), "STABLE") == b"OK"
    with source.client() as client:
        client.set(key, raw)
    moving.move([moving.slot(key)], 0, 1)
    backend = opened(moving.url)
    assert source.ask("DBSIZE") == target.ask("DBSIZE") == 1
    assert [listed.name for listed in backend.list(None, ends())] == [put.name]
    backend.close()
