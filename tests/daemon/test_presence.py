"""Presence tables: lookups without a request give the answers of requests, to those who may have them."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import AsyncClient, Client, native
from kvstore.client import connection, presence_tables
from kvstore.client.estimates import Estimate, StoredPrefix
from kvstore.errors import DeniedError, UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.types import PRESENCE_READY, PRESENCE_RETIRED
from kvstore.wire import messages as m
from tests.daemon.hits import figures, since
from tests.daemon.tables import KEYS, requests, with_table
from tests.daemons import SMALL, WITH_NVME, Peer, eventually, got, greeted, idle, names, new_layout, payloads
from tests.processes import stop
from tests.spawner import spawn
from tests.tenants import ATTACKER, FRIEND, VICTIM, Member, TenantDaemon, needs_root, peer_of

pytestmark = pytest.mark.skipif(native.presence is None, reason="the C extension was not built")

TENANTS = f"""
[tenants.victim]
uids = [{VICTIM}]
role = "admin"
[tenants.attacker]
uids = [{ATTACKER}]
[tenants.friend]
uids = [{FRIEND}]
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(WITH_NVME) as served:
        yield served


@pytest.fixture
def client(daemon: LocalDaemon) -> Iterator[Client]:
    with Client(daemon.url, deadline_s=10, strict=True) as connected:
        yield connected


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return requests(monkeypatch)


def table_of(client: Client, ns: Any) -> Any:
    """The table of a namespace that the client has mapped."""
    return client._maps.presence.get(ns.layout.fingerprint(ns._scope.owner or "default"))


def by_request(client: Client) -> Client:
    """The client, which uses no tables from now on."""
    client.ping()  # what is mapped belongs to one run of the daemon
    client._maps.presence.may_ask = lambda namespace: False  # type: ignore[method-assign]
    return client


def test_what_is_mapped_answers_without_a_request(client: Client, asked: list[str]) -> None:
    ns = client.namespace(new_layout())
    ns.put(KEYS[:10], payloads(KEYS[:10]))
    with_table(client, ns)
    asked.clear()
    assert ns.lookup(KEYS) == 10
    assert ns.contains(KEYS).tolist() == [True] * 10 + [False] * 14
    assert client.contains([(ns, KEYS), (ns, KEYS[9:11])])[1].tolist() == [True, False]
    assert client.lookup([(ns, KEYS, None, None)], [(ns, KEYS)])[0] == [StoredPrefix(10, 10)]
    assert ns.lookup(tuple(KEYS[:3])) == 3
    assert not asked
    ns.put(KEYS[10:20], payloads(KEYS[10:20]), parent=KEYS[9])
    assert ns.lookup(KEYS) == 20
    ns.invalidate(KEYS[4:6])
    assert (ns.lookup(KEYS), int(ns.contains(KEYS).sum())) == (4, 18)
    assert not {"Lookup", "Contains"} & set(asked)
    assert ns.lookup([bytearray(KEYS[0])]) == 1, "keys that are no bytes are sent"
    assert got(ns, KEYS) == 4


def test_the_asyncio_client_maps_tables_too(daemon: LocalDaemon, asked: list[str]) -> None:
    async def run() -> None:
        async with AsyncClient(daemon.url, deadline_s=10, strict=True) as client:
            ns = client.namespace(new_layout())
            await ns.put(KEYS, payloads(KEYS))
            for _ in range(100):
                asked.clear()
                assert await ns.lookup([*KEYS, b"k" * 32]) == len(KEYS)
                if not asked:
                    break
                await asyncio.sleep(0.01)
            assert not asked
            assert (await ns.contains(KEYS)).all()
            both = await client.lookup([(ns, KEYS, None, None)], [(ns, KEYS)])
            assert both[0] == [StoredPrefix(len(KEYS), len(KEYS))]
            assert not asked

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["chain", "independent"])
def test_tables_and_requests_give_the_same_answers(client: Client, daemon: LocalDaemon, kind: str) -> None:
    dice, keys = random.Random(kind), names(600, kind)
    ns = client.namespace(replace(new_layout(), kind=kind))
    ns.put(keys[:1], payloads(keys[:1]))
    with_table(client, ns)
    with by_request(Client(daemon.url, deadline_s=10, strict=True)) as other:
        same = other.namespace(ns.layout)
        for _ in range(150):
            start, n = dice.randrange(570), dice.randint(1, 30)
            some = keys[start : start + n]
            if dice.random() < 0.7:
                parent = keys[start - 1] if start and kind == "chain" else None
                if parent is None or bool(same.contains([parent])[0]):
                    ns.put(some, payloads(some), parent=parent)
            else:
                ns.invalidate(some)
            there = ns.contains(keys).tolist()
            assert there == same.contains(keys).tolist()
            for length in (1, 40, 600):
                found = ns.lookup(keys[:length], prompt=0)
                assert found == same.lookup(keys[:length], prompt=0)
                assert found == [*there[:length], False].index(False)
            asked = [(ns, keys[:30], 0, Estimate(1e-9, 1.0, dice.randrange(40)))]
            assert client.lookup(asked) == other.lookup([(same, *asked[0][1:])])
        assert table_of(client, ns) is not None
        if kind == "independent":
            twice = [keys[0], keys[0]]
            ns.put(twice[:1], payloads(twice[:1]))
            assert ns.lookup(twice) == same.lookup(twice) == 1


def test_estimates_of_blocks_that_must_be_loaded_are_asked_for(client: Client, asked: list[str]) -> None:
    ns = client.namespace(new_layout())
    chains = [names(100, f"estimate {i}") for i in range(20)]
    for chain in chains:
        ns.put(chain, payloads(chain))
    with_table(client, ns)
    eventually(lambda: idle(client.status()))
    asked.clear()
    found = client.lookup([(ns, chain, 0, None) for chain in chains])[0]
    assert [each.blocks for each in found] == [100] * 20
    assert not asked, "it is not asked whether they are worth loading"
    hurry = Estimate(1e-9, 1.0)
    assert not all(client.lookup([(ns, chain, 0, hurry)])[0][0].worth_loading == 100 for chain in chains)
    assert "Lookup" in asked
    asked.clear()
    assert client.lookup([(ns, chains[-1], 0, hurry)])[0] == [StoredPrefix(100, 100)], (
        "the last one is in DRAM"
    )
    assert not asked


def test_a_killed_daemon_answers_nothing_more() -> None:
    layout = new_layout()
    with LocalDaemon(SMALL) as daemon, Client(daemon.url, deadline_s=5) as client:
        ns = client.namespace(layout)
        ns.put(KEYS, payloads(KEYS))
        with_table(client, ns)
        with Client(daemon.url, deadline_s=5, strict=True) as strict:
            told = with_table(strict, strict.namespace(layout))
            daemon.kill()
            assert (ns.lookup(KEYS), ns.contains(KEYS).any()) == (0, False)
            with pytest.raises(UnavailableError):
                told.lookup(KEYS)
        daemon.start()
        eventually(lambda: client.status()["namespaces"] == 0 and ns.put(KEYS[:5], payloads(KEYS[:5])).stored)
        assert ns.lookup(KEYS) == 5, "DRAM was lost, and the table of it"
        with_table(client, ns)
        assert ns.lookup(KEYS) == 5


def test_a_daemon_that_hangs_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence_tables, "HEARD_S", 0.2)
    with LocalDaemon(SMALL) as daemon, Client(daemon.url, deadline_s=5) as client:
        ns = client.namespace(new_layout())
        ns.put(KEYS, payloads(KEYS))
        with_table(client, ns)
        stop(daemon.pid)
        try:
            time.sleep(0.2)
            assert ns.lookup(KEYS, deadline_s=0.1) == 0, "it would not serve what its table has"
            assert not ns.contains(KEYS, deadline_s=0.1).any()
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        eventually(lambda: ns.lookup(KEYS) == len(KEYS))


def test_a_table_that_grows_is_replaced(client: Client, asked: list[str]) -> None:
    ns, keys = client.namespace(new_layout()), names(3000, "grows")
    ns.put(KEYS, payloads(KEYS))
    with_table(client, ns)
    first = table_of(client, ns)
    for at in range(0, 3000, 500):
        ns.put(keys[at : at + 500], payloads(keys[at : at + 500]), parent=keys[at - 1] if at else None)
        assert ns.lookup(keys) == at + 500
    assert first.is_retired
    eventually(lambda: ns.lookup(keys) == 3000 and table_of(client, ns) not in (None, first))
    with_table(client, ns)
    asked.clear()
    assert ns.lookup(keys) == 3000
    assert not asked
    assert bytes(first._memory).strip(b"\0") == bytes([PRESENCE_RETIRED]), "it tells nothing"


def test_deleted_namespaces_have_no_table(client: Client, asked: list[str]) -> None:
    ns = client.namespace(new_layout())
    ns.put(KEYS, payloads(KEYS))
    first = table_of(client, with_table(client, ns))
    ns.invalidate()
    assert first.is_retired
    assert (ns.lookup(KEYS), ns.contains(KEYS).any()) == (0, False)
    ns.put(KEYS[:3], payloads(KEYS[:3]))
    assert ns.lookup(KEYS) == 3


def test_namespaces_with_a_ttl_have_no_table(client: Client, asked: list[str]) -> None:
    ns = client.namespace(new_layout(), ttl_s=60.0)
    for _ in range(3):
        ns.put(KEYS, payloads(KEYS))
        assert ns.lookup(KEYS) == len(KEYS)
    assert asked.count("Lookup") == 3
    assert asked.count("MapPresence") == 1, "it is not asked about every time"
    plain = client.namespace(new_layout())
    plain.put(KEYS, payloads(KEYS))
    first = table_of(client, with_table(client, plain))
    client.namespace(plain.layout, ttl_s=60.0).put(KEYS[:1], payloads(KEYS[:1]))
    assert first.is_retired


def test_tables_rest_while_requests_are_recorded(daemon: LocalDaemon, asked: list[str]) -> None:
    with Client(daemon.operators_url, deadline_s=10, strict=True) as client:
        ns = client.namespace(new_layout())
        ns.put(KEYS, payloads(KEYS))
        with_table(client, ns)
        with Peer(daemon.socket) as peer:
            peer.hello()
            peer.ask(m.RecordStart(1, 60.0, 1 << 20))
            asked.clear()
            assert ns.lookup(KEYS) == len(KEYS)
            assert asked.count("Lookup") == 1


def test_what_may_be_on_the_network_is_asked_for(tmp_path: Path, asked: list[str]) -> None:
    settings, layout = {**SMALL, "network": {"url": f"file://{tmp_path}"}}, new_layout()
    with LocalDaemon(settings) as one, Client(one.url, deadline_s=10, strict=True) as client:
        ns = client.namespace(layout)
        ns.put(KEYS, payloads(KEYS))
        assert ns.handoff(KEYS) == len(KEYS)
    with LocalDaemon(settings) as two, Client(two.url, deadline_s=10, strict=True) as client:
        ns = client.namespace(layout)
        ns.put(KEYS[:10], payloads(KEYS[:10]))
        with_table(client, ns)
        asked.clear()
        assert (ns.lookup(KEYS[:10]), ns.contains(KEYS[:10]).all()) == (10, True)
        assert not asked, "all keys are on the node"
        assert (ns.lookup(KEYS), ns.contains(KEYS).all()) == (len(KEYS), True)
        assert asked == ["Lookup", "Contains"]


def test_a_client_without_the_extension_asks(daemon: LocalDaemon) -> None:
    layout = new_layout()
    code = f"""if True:
        import sys, numpy as np
        from kvstore import Client, Layout, native
        from tests.daemons import payloads, names
        keys = names(24, "presence")
        with Client({daemon.url!r}, deadline_s=10, strict=True) as client:
            ns = client.namespace(Layout(model={layout.model!r}, block_bytes={layout.block_bytes}))
            ns.put(keys, payloads(keys))
            assert native.presence is None
            assert [ns.lookup(keys) for _ in range(5)] == [24] * 5
            assert ns.contains(keys).all() and not client._maps.presence._tables
    """
    process = spawn([sys.executable, "-c", code], env={**os.environ, "KVSTORE_NATIVE": "0"})
    assert process.wait(60) == 0


# -- other versions of the wire


class Daemon11(LocalDaemon):
    """A daemon that speaks version 11."""

    def _command(self) -> list[str]:
        code = (
            "import sys; from pathlib import Path; import kvstore.wire.messages as m; m.VERSION = 11;"
            "from kvstore.daemon.main import run; sys.exit(run(Path(sys.argv[1])))"
        )
        return [sys.executable, "-P", "-c", code, str(self.folder / "kvstore.toml")]


def test_a_daemon_of_version_11_is_not_asked_for_a_table(asked: list[str]) -> None:
    with Daemon11(SMALL) as daemon, Client(daemon.url, deadline_s=10, strict=True) as client:
        ns = client.namespace(new_layout())
        ns.put(KEYS, payloads(KEYS))
        assert [ns.lookup(KEYS) for _ in range(5)] == [len(KEYS)] * 5
        assert ns.contains(KEYS).all()
        assert asked.count("Lookup") == 5
        assert "MapPresence" not in asked


def test_a_client_of_version_11_is_answered(
    daemon: LocalDaemon, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    monkeypatch.setattr(m, "VERSION", 11)
    with Client(daemon.url, deadline_s=10, strict=True) as client:
        ns = client.namespace(new_layout())
        ns.put(KEYS, payloads(KEYS))
        assert [ns.lookup(KEYS) for _ in range(5)] == [len(KEYS)] * 5
        assert "MapPresence" not in asked


# -- who may map


def descriptor_of(peer: Peer, namespace: int) -> tuple[Any, int]:
    """The answer to a request for a table, and its descriptor."""
    before = len(peer.fds)
    answer = peer.ask(m.MapPresence(9, namespace))
    return answer, peer.fds[before] if len(peer.fds) > before else -1


@pytest.fixture(scope="module")
def tenants() -> Iterator[TenantDaemon]:
    with TenantDaemon(SMALL, TENANTS) as served:
        yield served


def test_a_descriptor_can_neither_be_written_nor_cut(daemon: LocalDaemon) -> None:
    with greeted(daemon) as (peer, namespace):
        answer, fd = descriptor_of(peer, namespace)
        assert (answer.foreign, answer.network) == (False, False)
        assert os.fstat(fd).st_size == answer.table_bytes
        with pytest.raises(PermissionError):
            mmap.mmap(fd, answer.table_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        for cut in (lambda: os.ftruncate(fd, 0), lambda: os.write(fd, b"x")):
            with pytest.raises(OSError, match=r"Invalid argument|Bad file descriptor"):
                cut()
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_SHRINK
        assert seals & fcntl.F_SEAL_GROW
        assert seals & fcntl.F_SEAL_SEAL
        same, _ = descriptor_of(peer, namespace)
        assert same.table_bytes == answer.table_bytes


@needs_root
def test_only_those_who_may_read_get_a_table(tenants: TenantDaemon) -> None:
    with Member(tenants, VICTIM) as victim, peer_of(tenants, ATTACKER) as attacker:
        ns = victim.namespace(new_layout())
        ns.put(KEYS, payloads(KEYS))
        own = with_table(victim, ns, "victim")
        assert ns.publish(["friend"])
        assert isinstance(attacker.ask(m.Open(7, ns.layout.to_map(), "victim", 0.0)), m.Denied)
        for number in (0, 1, 2, 77):
            answer, fd = descriptor_of(attacker, number)
            assert isinstance(answer, m.Denied), number
            assert fd < 0
        with Member(tenants, FRIEND) as friend:
            theirs = friend.namespace(ns.layout, owner="victim")
            with_table(friend, theirs, "victim")
            table = friend._maps.presence.get(ns.layout.fingerprint("victim"))
            assert theirs.lookup(KEYS) == len(KEYS) == own.lookup(KEYS)
            ns.publish([])
            assert table.is_retired
            for call in (theirs.lookup, theirs.contains):
                with pytest.raises(DeniedError):
                    call(KEYS)
            assert bytes(table._memory).strip(b"\0") == bytes([PRESENCE_RETIRED])


@needs_root
def test_root_gets_no_table_of_others(tenants: TenantDaemon) -> None:
    both = TENANTS.replace(f"uids = [{FRIEND}]", f"uids = [{FRIEND}, 0]")
    with TenantDaemon(SMALL, both) as daemon, Member(daemon, VICTIM) as victim:
        ns = victim.namespace(new_layout())
        ns.put(KEYS, payloads(KEYS))
        ns.publish(["friend"])
        for uid, gets in ((FRIEND, True), (0, False)):
            with peer_of(daemon, uid) as peer:
                opened = peer.ask(m.Open(7, ns.layout.to_map(), "victim", 0.0))
                answer, fd = descriptor_of(peer, opened.namespace)
                assert (answer.table_bytes > 0, fd >= 0) == (gets, gets)


@needs_root
def test_tables_end_with_a_reload_of_tenants() -> None:
    with TenantDaemon(SMALL, TENANTS) as daemon, Member(daemon, VICTIM) as victim:
        ns = victim.namespace(new_layout())
        ns.put(KEYS, payloads(KEYS))
        with_table(victim, ns, "victim")
        table = victim._maps.presence.get(ns.layout.fingerprint("victim"))
        daemon.reload(TENANTS + "\n[tenants.more]\nuids = [61777]\n")
        assert table.is_retired
        assert ns.lookup(KEYS) == len(KEYS)


# -- the hit ratio


def use(client: Client, asks: Client) -> list[dict[str, int]]:
    """What the daemon counts of the same prompts, by client."""
    counts = []
    for each in (client, asks):
        ns = each.namespace(new_layout())
        ns.put(KEYS[:16], payloads(KEYS[:16]))
        with_table(each, ns) if each is client else ns.lookup(KEYS)
        each.ping()
        before = figures(client)
        for prompt in (KEYS, KEYS[:8], names(5, "none"), KEYS[:16], KEYS[:16]):
            found = ns.lookup(prompt)
            assert ns.lookup(prompt) == found, "a poll, which does not count"
            with ns.acquire(prompt[:found]) as lease:
                assert len(lease) == found
            ns.put(prompt[:1], payloads(prompt[:1]))
        ns.lookup(KEYS, prompt=24)
        ns.lookup(KEYS, prompt=0)
        each.ping()
        counts.append(since(before, figures(client)))
    return counts


def test_prompts_count_as_those_of_requests(client: Client, daemon: LocalDaemon) -> None:
    with by_request(Client(daemon.url, deadline_s=10, strict=True)) as asks:
        counted, expected = use(client, asks)
    assert counted == expected
    assert counted["requested"] > counted["found"] > 0


def test_an_idle_client_reports_within_a_second(
    client: Client, daemon: LocalDaemon, asked: list[str]
) -> None:
    ns = client.namespace(new_layout())
    ns.put(KEYS, payloads(KEYS))
    with_table(client, ns)
    with Client(daemon.url, deadline_s=10, strict=True) as other:
        time.sleep(connection.REPORT_S + 0.1)
        before = figures(other)
        asked.clear()
        assert ns.lookup(KEYS, prompt=24) == 24
        assert "Lookup" not in asked
        assert not since(before, figures(other))
        eventually(lambda: since(before, figures(other)) == {"requested": 24, "found": 24}, 2)


def test_a_closed_client_has_reported(daemon: LocalDaemon, client: Client) -> None:
    with Client(daemon.url, deadline_s=10, strict=True) as other:
        ns = other.namespace(new_layout())
        ns.put(KEYS, payloads(KEYS))
        with_table(other, ns)
        other.ping()
        before = figures(client)
        assert ns.lookup(KEYS, prompt=24) == 24
    eventually(lambda: since(before, figures(client)) == {"requested": 24, "found": 24}, 0.5)


@pytest.mark.parametrize("found", [b"\xff" * 64, b"", b"\1\0\0\0" * 16])
def test_reports_of_broken_clients_harm_nobody(daemon: LocalDaemon, client: Client, found: bytes) -> None:
    with greeted(daemon) as (peer, namespace):
        peer.send(m.LookedUp(namespace, 1 << 63, found), m.LookedUp(77, 1, found))
        assert peer.ask(m.Ping(3)) == m.Value(3, 0)
        assert figures(client)
    with greeted(daemon) as (peer, namespace):
        peer.send(m.LookedUp(namespace, 1, b"\0" * 65))
        assert "found" in peer.refused().why


def test_tables_are_counted_as_memory(client: Client) -> None:
    ns, before = client.namespace(new_layout()), client.status()["core_ram_bytes"]
    ns.put(KEYS, payloads(KEYS))
    with_table(client, ns)
    table = table_of(client, ns)
    assert np.frombuffer(table._memory, np.uint64)[0] == PRESENCE_READY
    assert client.status()["core_ram_bytes"] - before >= len(table._memory)
