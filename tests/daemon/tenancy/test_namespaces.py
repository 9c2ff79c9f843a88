"""More namespaces than a tenant may have open, with real daemons: unused ones are closed, unnoticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from kvstore import Client
from kvstore.daemon.tenancy import namespaces
from kvstore.errors import DeniedError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.types import Layout
from kvstore.wire import messages as m
from tests.daemon.runtime.test_executor import WHO, Asker, Node, on_node
from tests.daemons import SMALL, WITH_NVME, Peer, eventually, got, names, new_layout, payloads

KEYS = names(3)
SIZE = 4096
AT_ONCE = 100


def stored(client: Client, layout: Layout, salt: int = 0) -> int:
    return client.namespace(layout).put(KEYS, payloads(KEYS, SIZE, salt)).stored


def opened(peer: Peer, layouts: list[Layout]) -> list[int]:
    """The numbers that a connection gets for these namespaces."""
    numbers = []
    for at in range(0, len(layouts), AT_ONCE):
        some = layouts[at : at + AT_ONCE]
        peer.send(*(m.Open(i + 1, layout.to_map(), "", 0.0) for i, layout in enumerate(some)))
        answers = [peer.receive() for _ in some]
        assert {type(answer) for answer in answers} == {m.Opened}, answers[-1]
        numbers += [answer.namespace for answer in answers]
    return numbers


def looking_up(number: int) -> m.Lookup:
    return m.Lookup(1, number, len(KEYS[0]), b"".join(KEYS), 1.0, 0.0)


def on_record(folder: Path) -> int:
    """How many namespaces a folder has on record."""
    with lmdb.open(str(folder / "nvme" / "records"), readonly=True, lock=False, max_dbs=8) as env:
        table = env.open_db(b"namespaces", create=False)
        with env.begin() as transaction:
            return int(transaction.stat(table)["entries"])


def test_three_thousand_empty_namespaces_in_a_row() -> None:
    empty, full = [new_layout(SIZE) for _ in range(3000)], [new_layout(SIZE) for _ in range(4)]
    with LocalDaemon(WITH_NVME) as daemon:
        with Client(daemon.url, strict=True) as one, Client(daemon.url, strict=True) as two:
            held = one.namespace(empty[0])
            assert held.lookup(KEYS) == 0
            for i, layout in enumerate(full):
                assert stored(one, layout, salt=i) == 3
                with Peer(daemon.socket) as peer:
                    peer.hello()
                    opened(peer, empty[i * 750 : (i + 1) * 750])
            status = one.status()
            assert status["namespaces"] == 1024
            for i, layout in enumerate(full):
                assert got(one.namespace(layout), KEYS, salt=i) == 3
                assert got(two.namespace(layout), KEYS, salt=i) == 3
            # This one has been closed, which neither of its users notices.
            assert got(held, KEYS) == 0
            assert stored(two, empty[0], salt=9) == 3
            assert got(held, KEYS, salt=9) == 3
            assert one.status()["namespaces"] == 1024
            eventually(lambda: one.status()["copies_under_way"] == 0)
        daemon.stop()
        assert on_record(daemon.folder) == 1024
        daemon.start()
        with Client(daemon.url, strict=True) as one:
            assert one.status()["namespaces"] == 5
            for i, layout in [*enumerate(full), (9, empty[0])]:
                assert got(one.namespace(layout), KEYS, salt=i) == 3
            assert got(one.namespace(empty[1]), KEYS) == 0
        daemon.stop()
        assert on_record(daemon.folder) == 6


@pytest.fixture(scope="module")
def two_at_most() -> Iterator[LocalDaemon]:
    with LocalDaemon({**SMALL, "limits": {"namespaces_per_tenant": 2}}) as daemon:
        yield daemon


@pytest.fixture
def small(two_at_most: LocalDaemon) -> Iterator[LocalDaemon]:
    """A daemon without blocks, and a tenant that may have two namespaces."""
    yield two_at_most
    with Client(two_at_most.url, strict=True) as client:
        client.invalidate()


def test_numbers_of_closed_namespaces_never_show_others_blocks(small: LocalDaemon) -> None:
    layouts = [new_layout(SIZE) for _ in range(m.NAMESPACES + 2)]
    with Client(small.url, strict=True) as client, Peer(small.socket) as peer:
        peer.hello()
        numbers = opened(peer, layouts)
        assert len(set(numbers)) == len(layouts)
        assert stored(client, layouts[-1]) == 3
        found = {number: peer.ask(looking_up(number)) for number in (numbers[2], numbers[-2], numbers[-1])}
        assert [answer.value for answer in found.values()] == [0, 0, 3]
        answer = peer.ask(looking_up(numbers[0]))
        assert isinstance(answer, m.Denied)
        assert "unknown namespace" in answer.why
        [again] = opened(peer, layouts[:1])
        assert again > max(numbers)


def test_a_client_uses_more_namespaces_than_the_daemon_remembers(small: LocalDaemon) -> None:
    with Client(small.url, strict=True) as client:
        first = client.namespace(new_layout(SIZE))
        assert stored(client, first.layout) == 3
        for _ in range(m.NAMESPACES + 1):
            assert client.namespace(new_layout(SIZE)).lookup(KEYS[:1]) == 0
        assert got(first, KEYS) == 3


def test_where_all_have_blocks_one_more_is_refused_by_name(small: LocalDaemon) -> None:
    layouts = [new_layout(SIZE) for _ in range(3)]
    with Client(small.url, strict=True) as client:
        assert [stored(client, layout) for layout in layouts[:2]] == [3, 3]
        with pytest.raises(DeniedError, match=r"2 namespaces .* in use.*limits\.namespaces_per_tenant"):
            client.namespace(layouts[2]).lookup(KEYS)
        client.namespace(layouts[0]).invalidate()
        assert stored(client, layouts[2]) == 3
        assert [got(client.namespace(layout), KEYS) for layout in layouts[1:]] == [3, 3]


def test_a_waiter_for_the_first_block_keeps_a_namespace_open(small: LocalDaemon) -> None:
    layout = new_layout(SIZE)
    with Client(small.url, strict=True) as client, Peer(small.socket) as peer:
        peer.hello()
        [number] = opened(peer, [layout])
        peer.send(m.Acquire(7, number, len(KEYS[0]), b"".join(KEYS), 5.0, 0.0, "", 5.0))
        for _ in range(6):
            assert client.namespace(new_layout(SIZE)).lookup(KEYS) == 0
        assert stored(client, layout) == 3
        granted = peer.receive()
        assert isinstance(granted, m.Granted)
        assert granted.id == 7
        assert len(granted.slots) == 3 * 24


def test_domains_of_readers_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "_UNUSED_KEPT", 16)

    async def work(node: Node) -> None:
        domains = node.daemon.catalog._domains
        for i in range(200):
            asker = Asker()
            node.daemon.catalog.publish(asker, 0, node.space, [f"reader{i}"])
            await asker.answered
            if i == 0:
                first = node.space.domain
                second, _ = node.daemon.catalog.open(WHO, Layout("second", SIZE))
                assert second is not None
                node.daemon.catalog.publish(Asker(), 0, second, ["somebody"])
        assert len(domains._numbers) == len(domains._tags) < 60
        assert domains.owner(first) == (first, b""), "nobody has it any more"
        for used in (node.space.domain, second.domain):
            tag = domains.owner(used)[1]
            assert len(tag) == 16
            assert domains.by_tag(tag) == (0, used)

    on_node(None, work)
