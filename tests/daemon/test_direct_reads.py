"""Reads without a request: they deliver what a lease would, and only what the client may have."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore import AsyncClient, Client, native
from kvstore.client import protocol
from kvstore.client.connection import REPORT_S
from kvstore.errors import DeniedError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.wire import messages as m
from tests.daemon.hits import figures, since
from tests.daemon.tables import requests, with_table
from tests.daemon.test_presence import TENANTS
from tests.daemons import (
    BLOCK,
    SMALL,
    WITH_NVME,
    Peer,
    eventually,
    got,
    idle,
    names,
    new_layout,
    payload,
    payloads,
)
from tests.tenants import FRIEND, VICTIM, Member, TenantDaemon, needs_root

pytestmark = pytest.mark.skipif(native.presence is None, reason="the C extension was not built")

KEYS = names(24, "direct")


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


def read(ns: Any, keys: list[bytes], **how: Any) -> tuple[int, list[bytes]]:
    """The number of blocks that a get delivers, and their bytes."""
    out = np.zeros((len(keys), BLOCK), np.uint8)
    n = ns.get(keys, out, **how)
    return n, [row.tobytes() for row in out[:n]]


def stored(client: Client, keys: list[bytes] = KEYS) -> Any:
    """A namespace with these blocks, and with a table that answers."""
    ns = client.namespace(new_layout())
    ns.put(keys, payloads(keys))
    return with_table(client, ns)


def test_blocks_in_dram_are_read_without_a_request(client: Client, asked: list[str]) -> None:
    ns = stored(client, KEYS[:20])
    assert read(ns, KEYS[:20]) == (20, [payload(key) for key in KEYS[:20]])
    asked.clear()
    for some in (KEYS[:20], KEYS, KEYS[:1], KEYS[3:7], KEYS[22:]):
        expected = [payload(key) for key in some if key in KEYS[:20]]
        assert read(ns, some) == (len(expected), expected)
    assert ns.get([], bytearray()) == 0
    assert read(ns, KEYS[:3], verify=False) == (3, [payload(key) for key in KEYS[:3]])
    assert not asked


def test_the_asyncio_client_reads_without_a_request(daemon: LocalDaemon, asked: list[str]) -> None:
    async def run() -> None:
        async with AsyncClient(daemon.url, deadline_s=10, strict=True) as client:
            ns, out = client.namespace(new_layout()), np.zeros((24, BLOCK), np.uint8)
            await ns.put(KEYS, payloads(KEYS))
            for _ in range(100):
                asked.clear()
                assert await ns.get(KEYS, out) == 24
                if not asked:
                    break
                await asyncio.sleep(0.01)
            assert not asked
            assert [row.tobytes() for row in out] == [payload(key) for key in KEYS]

    asyncio.run(run())


def test_what_is_written_again_or_invalidated_is_not_read(client: Client) -> None:
    dice, ns = random.Random(1), stored(client)
    salts = dict.fromkeys(KEYS, 0)
    for salt in range(1, 60):
        first = dice.randrange(24)
        ns.invalidate(KEYS[first:])
        assert read(ns, KEYS) == (first, [payload(key, salt=salts[key]) for key in KEYS[:first]])
        again = [payload(key, salt=salt) for key in KEYS[first:]]
        ns.put(KEYS[first:], again, parent=KEYS[first - 1] if first else None)
        salts.update(dict.fromkeys(KEYS[first:], salt))
        assert read(ns, KEYS) == (24, [payload(key, salt=salts[key]) for key in KEYS])


def test_a_corrupt_block_is_found_and_the_others_are_delivered() -> None:
    with LocalDaemon(SMALL) as daemon, Client(daemon.url, deadline_s=10, strict=True) as client:
        ns = stored(client)
        with ns.reserve(KEYS[:1]) as room:
            assert not len(room), "the block is there"
        lease = ns.acquire(KEYS)
        place = int(np.frombuffer(lease._slots.records, "<u8")[3 * 10])
        lease.release()
        _overwrite(client, ns, place)
        n, blocks = read(ns, KEYS)
        assert (n, blocks) == (10, [payload(key) for key in KEYS[:10]])
        eventually(lambda: not ns.contains(KEYS)[10])
        assert client.status()["counters"]["quarantined_blocks"] == 1


def _overwrite(client: Client, ns: Any, place: int) -> None:
    """Damages the payload of a slot, as a client of the tenant can."""
    others = names(1, "to be mapped writable")
    ns.put(others, payloads(others))
    extent = client._maps.get(place >> 32, True)
    assert extent is not None
    slot_bytes = next(iter(extent._tables))  # type: ignore[union-attr]
    extent.payload(slot_bytes, place & 0xFFFFFFFF, BLOCK)[:8] = bytes(8)


def test_blocks_in_other_tiers_are_read_under_a_lease(client: Client, asked: list[str]) -> None:
    ns = client.namespace(new_layout())
    chains = [names(100, f"spill {i}") for i in range(20)]
    for chain in chains:
        ns.put(chain, payloads(chain))
    with_table(client, ns)
    eventually(lambda: idle(client.status()))
    for chain in chains[:3]:
        for request in (["Acquire"], []):
            asked.clear()
            assert read(ns, chain) == (100, [payload(key) for key in chain])
            assert [each for each in asked if each != "Map"] == request


def test_the_use_of_blocks_is_reported(client: Client) -> None:
    ns = stored(client)
    client.ping()
    time.sleep(1.5 * REPORT_S)
    before, served = figures(client), client.status()["counters"]["served_bytes"]
    assert [read(ns, KEYS[:10], prompt=10)[0] for _ in range(3)] == [10] * 3
    assert read(ns, [*KEYS, *names(6, "absent")], prompt=30)[0] == 24
    time.sleep(1.5 * REPORT_S)
    assert since(before, figures(client)) == {
        "requested": 60,
        "found": 54,
        "delivered": 54,
        "missed": 6,
    }
    assert client.status()["counters"]["served_bytes"] - served == 54 * BLOCK


def test_reports_that_are_sent_early_start_no_more_threads(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_KEYS_WAIT", 1)
    ns = stored(client)
    before, started = figures(client), threading.active_count()
    for _ in range(20):
        assert read(ns, KEYS)[0] == len(KEYS)
    assert threading.active_count() <= started + 1
    eventually(lambda: since(before, figures(client)).get("delivered") == 20 * len(KEYS))
    # A report that waits is sent although an earlier one was not waited for.
    monkeypatch.setattr(protocol, "_KEYS_WAIT", 1024)
    assert read(ns, KEYS)[0] == len(KEYS)
    eventually(lambda: since(before, figures(client)).get("delivered") == 21 * len(KEYS))


def test_blocks_that_are_read_stay_longest() -> None:
    tiny = {**SMALL, "policy": {"eviction": "lru"}}
    with LocalDaemon(tiny) as daemon, Client(daemon.url, deadline_s=10, strict=True) as client:
        ns = stored(client)
        for i in range(40):
            more = names(100, f"flood {i}")
            ns.put(more, payloads(more))
            with_table(client, ns)
            assert read(ns, KEYS)[0] == len(KEYS), i
        assert "dropped_blocks" in client.status()["counters"], "the flood is larger than memory"


def test_many_reads_are_reported_in_parts(asked: list[str]) -> None:
    n, nbytes = 2500, 64
    keys, blocks = names(n, "many"), np.random.default_rng(1).integers(0, 255, (n, nbytes), np.uint8)
    with LocalDaemon(SMALL) as daemon, Client(daemon.url, deadline_s=10, strict=True) as client:
        ns = client.namespace(new_layout(nbytes))
        assert ns.put(keys, blocks).stored == n
        with_table(client, ns)
        for _ in range(3):
            served, out = client.status()["counters"].get("served_bytes", 0), np.zeros_like(blocks)
            asked.clear()
            assert ns.get(keys, out) == n
            assert (out == blocks).all()
            assert set(asked) <= {"Map"}
            assert client.status()["counters"]["served_bytes"] - served == n * nbytes


def test_readers_beside_writers_get_right_bytes() -> None:
    """Blocks come and go in a small memory while others read: nobody gets wrong bytes."""
    with LocalDaemon(SMALL) as daemon, Client(daemon.url, deadline_s=10, strict=True) as client:
        layout, over = new_layout(), threading.Event()
        chains = [names(24, f"beside {i}") for i in range(60)]
        ns = client.namespace(layout)
        ns.put(chains[0], payloads(chains[0]))
        wrong, hits = [], [0, 0]

        def check(which: int) -> None:
            dice = random.Random(which)
            with Client(daemon.url, deadline_s=10) as reader:
                own = reader.namespace(layout)
                while not over.is_set():
                    chain = dice.choice(chains)
                    n, blocks = read(own, chain)
                    wrong.extend(i for i in range(n) if blocks[i] != payload(chain[i]))
                    hits[which] += n

        readers = [threading.Thread(target=check, args=(which,)) for which in range(2)]
        for reader in readers:
            reader.start()
        dice, ends = random.Random(7), time.monotonic() + 6
        while time.monotonic() < ends:
            chain = dice.choice(chains)
            ns.put(chain, payloads(chain))
            if dice.random() < 0.2:
                ns.invalidate(dice.choice(chains)[dice.randrange(24) :])
        over.set()
        for reader in readers:
            reader.join()
        assert not wrong
        assert all(hits)


@needs_root
def test_readers_of_a_published_namespace_read_until_it_ends(asked: list[str]) -> None:
    with TenantDaemon(SMALL, TENANTS) as served, Member(served, VICTIM) as victim:
        ns = victim.namespace(new_layout())
        ns.put(KEYS, payloads(KEYS))
        assert ns.publish(["friend"])
        with Member(served, FRIEND) as friend:
            theirs = friend.namespace(ns.layout, owner="victim")
            with_table(friend, theirs, "victim")

            def direct() -> bool:
                asked.clear()
                assert got(theirs, KEYS) == len(KEYS)
                return not asked

            eventually(direct)
            ns.publish([])
            with pytest.raises(DeniedError):
                got(theirs, KEYS)


def test_reports_that_make_no_sense_are_refused(daemon: LocalDaemon) -> None:
    layout = new_layout()
    with Peer(daemon.socket) as peer:
        peer.hello()
        opened = peer.ask(m.Open(1, layout.to_map(), "", 0.0))
        for report in (
            m.BlocksRead(opened.namespace, 32, bytes(32), 1),
            m.BlocksRead(opened.namespace, 32, bytes(32 * 10), (1 << 32) - 1),
            m.BlocksRead(opened.namespace + 5, 32, bytes(32), 1),
        ):
            peer.send(report)
            assert peer.ask(m.Ping(2)).value == 0
        peer.send(m.BlocksRead(opened.namespace, 32, bytes(33), 1))
        assert isinstance(peer.receive(), m.Failure)
