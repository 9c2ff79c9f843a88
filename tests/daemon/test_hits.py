"""The hit ratio: what the daemon counts for whole prompts, against the prompts' own count."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore import AsyncClient, Client, Layout
from kvstore.client import prompts as asked
from kvstore.client.connection import REPORT_S
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.insight.hit_counters import HitCounters, spread
from kvstore.daemon.requests.prompts import Prompts
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.errors import MisuseError
from kvstore.lab.experiment import Experiment, Options
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.lab.replay import Options as LiveOptions
from kvstore.lab.replay import replay
from kvstore.lab.traces import Trace
from kvstore.types import MAX_BLOCK_BYTES
from kvstore.wire import messages as m
from tests.admin.serving import VIEW, ServedAdmin, settings
from tests.core.world import World
from tests.daemon.hits import Figures, conversations, counted, figures, since
from tests.daemon.test_faults import scribble
from tests.daemons import SMALL, WITH_NVME, Peer, eventually, greeted, idle, names, new_layout
from tests.lab.small import chats

BLOCK = 4096
POINT = 0.001


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon({**WITH_NVME, "admin": settings()}) as served:
        yield served


@pytest.fixture
def client(daemon: LocalDaemon) -> Iterator[Client]:
    with Client(daemon.url, deadline_s=30, strict=True) as connected:
        yield connected


@pytest.fixture(scope="module")
def small_dram() -> Iterator[Client]:
    """A client of a daemon whose NVMe holds more than its DRAM, for blocks of one size."""
    with LocalDaemon(WITH_NVME) as served, Client(served.url, deadline_s=30, strict=True) as connected:
        yield connected


@pytest.fixture
def ns(client: Client, request: pytest.FixtureRequest) -> Any:
    return client.namespace(Layout(model=request.node.name, block_bytes=BLOCK, block_tokens=16))


def keys_of(prompt: list[int]) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in prompt]


def blocks_of(n: int) -> np.ndarray:
    return np.zeros((n, BLOCK), np.uint8)


def counting(client: Client) -> Callable[[], Figures]:
    """What is counted from now on, once leases are over."""
    before = figures(client)
    return lambda: since(before, figures(client))


# -- whatever a client does, each of its prompts counts once


def look_up_and_acquire(ns: Any, keys: list[bytes]) -> int:
    found: int = ns.lookup(keys)
    if found:
        with ns.acquire(keys[:found]) as lease:
            assert len(lease) == found
    return found


def look_up_and_get_all(ns: Any, keys: list[bytes]) -> int:
    ns.lookup(keys)
    return int(ns.get(keys, blocks_of(len(keys))))


def poll_and_get(ns: Any, keys: list[bytes]) -> int:
    found = [ns.lookup(keys) for _ in range(3)][-1]
    return int(ns.get(keys[:found], blocks_of(found))) if found else 0


def get_alone(ns: Any, keys: list[bytes]) -> int:
    return int(ns.get(keys, blocks_of(len(keys))))


def acquire_in_parts(ns: Any, keys: list[bytes]) -> int:
    found, have = ns.lookup(keys), 0
    while have < found:
        with ns.acquire(keys[have : min(found, have + 3)]) as lease:
            have += len(lease)
    return have


def acquire_on_another_thread(ns: Any, keys: list[bytes]) -> int:
    found = ns.lookup(keys)
    have: list[int] = [0]

    def acquire() -> None:
        with ns.acquire(keys[:found]) as lease:
            have[0] = len(lease)

    if found:
        thread = threading.Thread(target=acquire)
        thread.start()
        thread.join()
    return have[0]


def prefetch_and_get(ns: Any, keys: list[bytes]) -> int:
    ns.prefetch(keys)
    return get_alone(ns, keys)


def reserve_after(ns: Any, keys: list[bytes]) -> int:
    have = look_up_and_acquire(ns, keys)
    if have < len(keys):
        with ns.reserve(keys[have:], keys[have - 1] if have else None) as room:
            for i in range(len(room)):
                room.fill(i, bytes(BLOCK))
            room.commit()
    return have


WAYS = [
    look_up_and_acquire,
    look_up_and_get_all,
    poll_and_get,
    get_alone,
    acquire_in_parts,
    acquire_on_another_thread,
    prefetch_and_get,
    reserve_after,
]


def run(ns: Any, keys: list[bytes], way: Callable[[Any, list[bytes]], int]) -> int:
    """One prompt as an engine has it: what is there is taken, the rest is put."""
    have = way(ns, keys)
    if have < len(keys):
        ns.put(keys[have:], blocks_of(len(keys) - have), parent=keys[have - 1] if have else None)
    return have


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_each_prompt_counts_once(client: Client, ns: Any, way: Callable[[Any, list[bytes]], int]) -> None:
    prompts, count = conversations(seed=1), counting(client)
    truth = counted(prompts)
    assert 0.3 < truth["found"] / truth["requested"] < 0.8
    got = sum(run(ns, keys_of(prompt), way) for prompt in prompts)
    missed = truth["requested"] - truth["found"]
    assert got == truth["found"]
    assert eventually(lambda: count() == {**truth, "delivered": got, "missed": missed}), count()


def test_identical_prompts_at_the_same_time_are_as_many_prompts(client: Client, ns: Any) -> None:
    """Four workers of one client, each with prompts of its own that it asks again and again."""
    mine = [[keys_of([1000 * n + i for i in p]) for p in conversations(n, 20) * 2] for n in range(1, 5)]
    truth = [counted([tuple(key for key in keys) for keys in prompts]) for prompts in mine]
    count, failed = counting(client), list[BaseException]()

    def work(n: int) -> None:
        try:
            for i, keys in enumerate(mine[n]):
                run(ns, keys, WAYS[(n + i) % 5])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    requested, found = (sum(each[what] for each in truth) for what in ("requested", "found"))
    assert eventually(lambda: (c := count())["delivered"] == found and c), count()
    assert (count()["requested"], count()["found"]) == (requested, found)


def test_two_threads_with_one_prompt_count_as_two_prompts(client: Client, ns: Any) -> None:
    keys, count = keys_of(list(range(7000, 7010))), counting(client)
    for _ in range(2):
        thread = threading.Thread(target=lambda: [ns.lookup(keys) for _ in range(5)])
        thread.start()
        thread.join()
    assert count() == {"requested": 20, "missed": 20}


def test_an_async_client_counts_alike(client: Client, daemon: LocalDaemon) -> None:
    workers = [[keys_of([9000 * n + i for i in p]) for p in conversations(n, 15)] for n in range(1, 5)]
    truth = [counted([tuple(keys) for keys in prompts]) for prompts in workers]
    count = counting(client)

    async def work(ns: Any, prompts: list[list[bytes]]) -> None:
        for keys in prompts:
            found = await ns.lookup(keys)
            assert found == await ns.lookup(keys), "a poll"
            if found:
                assert await ns.get(keys[:found], blocks_of(found)) == found
            if found < len(keys):
                parent = keys[found - 1] if found else None
                await ns.put(keys[found:], blocks_of(len(keys) - found), parent=parent)

    async def all_of_them() -> None:
        async with AsyncClient(daemon.url, deadline_s=30, strict=True) as connected:
            ns = connected.namespace(Layout(model="async-hits", block_bytes=BLOCK))
            await asyncio.gather(*(work(ns, prompts) for prompts in workers))
            await asyncio.sleep(4 * REPORT_S)  # connections that end may take their last reports with them

    asyncio.run(all_of_them())
    requested, found = (sum(each[what] for each in truth) for what in ("requested", "found"))
    wanted = {"requested": requested, "found": found, "delivered": found, "missed": requested - found}
    assert eventually(lambda: count() == wanted), (count(), wanted)


@pytest.mark.parametrize("stored", [0, 1, 26, 27, 500, 699, 700])
def test_a_long_prompt_with_few_requested_keys_counts_as_a_whole(
    client: Client, ns: Any, stored: int
) -> None:
    keys = keys_of(list(range(700)))
    if stored:
        ns.put(keys[:stored], blocks_of(stored))
    count = counting(client)
    assert ns.lookup(keys) == ns.lookup(keys) == stored
    assert ns.get(keys, blocks_of(700)) == stored
    wanted = {"requested": 700, "found": stored, "delivered": stored, "missed": 700 - stored}
    assert eventually(lambda: count() == {k: n for k, n in wanted.items() if n}), count()


def test_a_later_request_for_the_same_keys_is_another_prompt(
    client: Client, ns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, count = keys_of([1, 2, 3]), counting(client)
    assert ns.lookup(keys) == 0
    assert count()["requested"] == 3
    monkeypatch.setattr(asked, "POLL_S", 0.0)
    ns.lookup(keys)
    assert count()["requested"] == 6, "no poll any more"
    monkeypatch.undo()
    ns.put(keys, blocks_of(3))
    ns.lookup(keys)
    assert count()["requested"] == 9, "it was stored meanwhile"
    for _ in range(2):
        assert ns.get(keys, blocks_of(3)) == 3
    assert count()["requested"] == 12, "the first one was still that of the look-up"


def test_callers_mark_the_first_request_of_a_prompt(client: Client, ns: Any) -> None:
    keys, count = keys_of([5, 6, 7, 8]), counting(client)
    assert [ns.lookup(keys, prompt=n) for n in (4, 0, 0)] == [0, 0, 0]
    assert count() == {"requested": 4, "missed": 4}
    ns.put(keys, blocks_of(4))
    assert ns.lookup(keys, prompt=0) == 4
    with ns.acquire(keys[1:], prompt=0) as lease:
        assert len(lease) == 3
    assert eventually(lambda: count() == {"requested": 4, "missed": 4, "delivered": 3})
    assert [ns.lookup(some, prompt=4) for some in (keys, keys[:2], [])] == [4, 2, 0]
    assert count() == {"requested": 16, "found": 6, "delivered": 3, "missed": 10}
    for wrong in (-1, 1 << 30):
        with pytest.raises(MisuseError, match="prompt"):
            ns.lookup(keys, prompt=wrong)


# -- in all places alike


def test_a_trace_its_replay_its_simulation_and_metrics_agree(tmp_path: Path) -> None:
    """Look up, then acquire what was found: acquires alone never miss."""
    path = chats(tmp_path / "trace", 250, apart_ms=25)
    study = Experiment(path, Options(block_bytes=64 << 10))
    section = {"dram": {"limit": "5MiB", "huge_pages": False}, "policy": {"eviction": "lru"}}
    whole = {**section, "scrub": {"rate": 0}, "admin": settings()}
    with LocalDaemon(whole) as daemon, ServedAdmin(daemon) as admin, Client(daemon.url) as client:
        live = replay(client, Trace(path), LiveOptions(concurrency=1, block_bytes=64 << 10))
        served = sum(live.hits_by_tier.values())
        seen = eventually(lambda: (s := metrics(admin)).get("kvstore_delivered_blocks_total") == served and s)
        [space] = admin.get("/v1/namespaces", VIEW).json["namespaces"]
    [point] = study.report(["lru"], ["5MiB"]).points
    hit, missed = seen["kvstore_hit_blocks_total"], seen["kvstore_missed_blocks_total"]
    assert live.token_hit_ratio is not None
    assert 0.2 < live.token_hit_ratio < 0.6
    assert hit / (hit + missed) == pytest.approx(live.token_hit_ratio, abs=POINT)
    assert point.block_hit_ratio == pytest.approx(live.token_hit_ratio, abs=POINT)
    requested = seen["kvstore_requested_tokens_total"]
    assert requested == live.blocks * live.block_tokens
    for name in ("hit", "delivered"):
        ratio = seen[f"kvstore_{name}_tokens_total"] / requested
        assert ratio == pytest.approx(live.token_hit_ratio, abs=POINT), name
    prompts = space["prompts"]
    assert prompts["requested_blocks"] == live.blocks
    assert prompts["found_blocks"] == prompts["delivered_blocks"] == {"dram": hit}
    assert (prompts["hit_ratio"], prompts["delivered_ratio"]) == (hit / live.blocks, hit / live.blocks)


def metrics(admin: ServedAdmin) -> dict[str, float]:
    """Sums of all samples of a name."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(admin.get("/metrics", VIEW).body.decode()):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


def with_most_on_nvme(client: Client, ns: Any, n: int) -> list[bytes]:
    """Keys of a chain whose blocks are all on NVMe, and no more than half of them in DRAM."""
    keys = names(n, ns.layout.model)
    for at in range(0, n, 50):
        parent = keys[at - 1] if at else None
        ns.put(keys[at : at + 50], np.zeros((50, ns.layout.block_bytes), np.uint8), parent=parent)
        eventually(lambda: idle(client.status()))
    return keys


def test_tiers_count_apart(small_dram: Client) -> None:
    client = small_dram
    ns = client.namespace(Layout(model="tiers", block_bytes=128 << 10))
    keys = with_most_on_nvme(client, ns, 250)

    def by_tier() -> dict[tuple[str, str], int]:
        return {(row["what"], row["tier"]): row["blocks"] for row in client.control("figures")["hits"]}

    before = by_tier()
    assert ns.lookup(keys) == 250
    found = {tier: by_tier()["found", tier] - before.get(("found", tier), 0) for tier in ("dram", "nvme")}
    assert found["dram"] + found["nvme"] == 250
    assert found["nvme"] > 125
    for at in range(0, 250, 10):
        assert ns.get(keys[at : at + 10], np.empty((10, 128 << 10), np.uint8)) == 10
    eventually(lambda: by_tier()["delivered", "nvme"] - before.get(("delivered", "nvme"), 0) > 100)
    assert by_tier()["requested", ""] - before.get(("requested", ""), 0) == 250


# -- found, and not delivered


def test_corrupt_blocks_are_found_and_not_delivered() -> None:
    layout = Layout(model="corrupt", block_bytes=16 << 10)
    keys = names(5)
    with LocalDaemon(SMALL) as daemon, Client(daemon.url, deadline_s=10) as client:
        ns = client.namespace(layout)
        ns.put(keys, np.zeros((5, 16 << 10), np.uint8))
        with greeted(daemon, layout) as (peer, number):
            scribble(peer, peer.ask(m.Acquire(5, number, 32, keys[2], 1.0, 0.0)))
        eventually(lambda: not client.status()["leases"])
        count = counting(client)
        assert ns.get(keys, np.zeros((5, 16 << 10), np.uint8)) == 2
        assert eventually(lambda: (c := count()).get("delivered") == 2 and c), count()
        assert count() == {"requested": 5, "found": 5, "delivered": 2, "corrupt": 1}


def test_blocks_slower_to_load_than_to_compute_are_not_worth_loading(small_dram: Client) -> None:
    client = small_dram
    ns = client.namespace(Layout(model="unworthy", block_bytes=128 << 10, block_tokens=1))
    keys = with_most_on_nvme(client, ns, 250)
    count = counting(client)
    worth = ns.lookup(keys, recompute_tokens_per_s=1e15)
    assert worth < 125
    wanted = {"requested": 250, "found": 250, "not_worth_loading": 250 - worth}
    assert count() == wanted
    assert ns.lookup(keys, recompute_tokens_per_s=1e15) == worth
    assert count() == wanted, "a poll decides nothing anew"


def test_blocks_after_the_deadline_are_too_late() -> None:
    w = World(dram=2, nvme=4)
    w.open(1)
    w.put(0, 1, [b"a", b"b", b"c"])
    w.finish_all()
    for i in range(8):
        w.put(0, 1, [b"more%d" % i])
        w.finish_all()
    w.get(1, [b"a"])
    assert w.acquire(0, 1, [b"a", b"b", b"c"], wait=0.5) is None
    asked = w.last_request
    w.now += 0.6
    w.send(ev.Tick())
    grant = w.answers[asked]
    assert isinstance(grant, ac.Grant)

    counters, space = HitCounters(), NamespaceEntry(1, b"", 0, BLOCK)
    connection = Prompts(counters, 0)
    connection.asked(m.Acquire(asked, 1, 1, b"abc", 0.5, 0.0, asks=3), space)
    connection.answered(asked, grant)
    connection.released(m.Release(grant.lease))
    blocks = {column: amount.blocks for column, amount in counters.of(0).items()}
    assert blocks == {
        ("requested", -2): 3,
        ("found", 0): 1,
        ("found", 1): 2,
        ("too_late", -2): 2,
        ("delivered", 0): 1,
        ("missed", -2): 0,
    }
    assert space.hits == Counter({column: n for column, n in blocks.items() if n})


# -- sums


def test_sums_are_spread_over_tiers_without_losing_any() -> None:
    for blocks in range(0, 40):
        assert sum(spread({0: 3, 1: 4, 2: 1}, blocks).values()) == blocks
    assert spread({}, 7) == {}
    assert spread({0: 2, 1: 2}, 4) == {0: 2, 1: 2}


def test_counts_of_misses_never_decrease() -> None:
    counters = HitCounters()
    counters.count(1, ("requested", -2), 100, 16, 10)
    assert counters.of(1)["missed", -2] == (100, 1600, 1000)
    counters.count(1, ("found", 0), 60, 16, 10)
    assert counters.of(1)["missed", -2] == (100, 1600, 1000), "a prompt was being asked for"
    counters.count(1, ("requested", -2), 100, 16, 10)
    assert counters.of(1)["missed", -2] == (140, 2240, 1400)


def test_no_layout_makes_sums_that_fit_into_no_message(daemon: LocalDaemon) -> None:
    layout = {**new_layout().to_map(), "block_tokens": (1 << 64) - 1}
    with Peer(daemon.socket) as peer:
        peer.hello()
        denied = peer.ask(m.Open(1, layout, "", 0.0))
    assert isinstance(denied, m.Denied)
    assert "layout.block_tokens is 18446744073709551615" in denied.why
    counters = HitCounters()
    for _ in range(3):
        counters.count(0, ("requested", -1), 1 << 40, MAX_BLOCK_BYTES, 1)
    assert msgpack.packb(counters.of(0)["requested", -1])
