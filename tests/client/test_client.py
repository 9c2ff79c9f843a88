"""The contract of both clients, against a real daemon: every call, from threads, forks and event loops."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import itertools
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvstore import AsyncClient, Client, Layout, PutResult, split_urls
from kvstore.client.extents import Maps
from kvstore.client.leases import Lease
from kvstore.client.protocol import ProtocolState
from kvstore.client.sync import Namespace
from kvstore.errors import DeniedError, MisuseError, UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.wire import messages as m
from tests.client.drivers import Driver
from tests.daemons import (
    BLOCK,
    SMALL,
    WITH_NVME,
    eventually,
    got,
    idle,
    names,
    new_layout,
    payload,
    payloads,
    room_for,
    tier,
)
from tests.processes import stop

LAYOUT = Layout("misuse", BLOCK)
MARGIN_S = 1.0
"""What a loaded machine may add to a deadline."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(WITH_NVME) as served:
        yield served


@pytest.fixture(scope="module")
def picky() -> Iterator[LocalDaemon]:
    """A daemon that takes few keys at a time."""
    with LocalDaemon({**WITH_NVME, "limits": {"batch_keys": 16, "leases_per_connection": 4}}) as served:
        yield served


@pytest.fixture
def ns(client: Client) -> Namespace:
    return client.namespace(new_layout())


def in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a forked child; its wait status."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


# -- every call


def test_put_get_lookup(ns: Namespace) -> None:
    keys = names(6)
    assert ns.put(keys, payloads(keys)) == PutResult(stored=6)
    assert ns.lookup(keys) == 6
    out = room_for(6)
    assert ns.get(keys, out) == 6
    assert np.array_equal(out, payloads(keys))


def test_contains_counts_each_key_for_itself(ns: Namespace) -> None:
    keys = names(5)
    ns.put(keys, payloads(keys))
    ns.invalidate(keys[1:3])
    asked = [keys[4], b"?" * 32, keys[1], keys[0], keys[3], keys[2], keys[4]]
    present = ns.contains(asked)
    assert present.dtype == np.bool_
    assert present.tolist() == [True, False, False, True, True, False, True]
    assert ns.lookup(keys) == 1


def test_contains_has_an_answer_for_each_of_many_keys(ns: Namespace) -> None:
    keys = [b"%032d" % n for n in range(10_000)]  # several requests
    some = keys[::1000]
    for key in some:
        ns.put([key], payloads([key]))
    assert np.flatnonzero(ns.contains(keys)).tolist() == list(range(0, 10_000, 1000))
    assert ns.contains([]).tolist() == []


def test_put_takes_arrays_and_sequences_of_buffers(ns: Namespace) -> None:
    keys = names(6)
    assert ns.put(keys[:2], [payload(k) for k in keys[:2]]).stored == 2
    assert ns.put(keys[2:4], [memoryview(payload(k)) for k in keys[2:4]], parent=keys[1]).stored == 2
    floats = payloads(keys[4:]).view(np.float32)
    assert ns.put(keys[4:], floats, parent=keys[3]).stored == 2
    assert got(ns, keys) == 6


def test_get_takes_any_writable_buffer(ns: Namespace) -> None:
    keys = names(2)
    ns.put(keys, payloads(keys))
    out = bytearray(2 * BLOCK)
    assert ns.get(keys, out) == 2
    assert out == payload(keys[0]) + payload(keys[1])
    halves = np.zeros((2, BLOCK // 2), np.float16)
    assert ns.get(keys, halves, verify=False) == 2
    assert halves.tobytes() == bytes(out)


@pytest.mark.parametrize("verify", [True, False])
def test_get_fills_a_buffer_for_each_block(ns: Namespace, verify: bool) -> None:
    keys = names(6)
    ns.put(keys, payloads(keys))
    for asked in (keys, [*keys, b"?" * 32]):
        # In another order than the blocks, with memory between them.
        room = np.zeros((8, 2 * BLOCK), np.uint8)
        out = [room[7 - i, :BLOCK] for i in range(len(asked))]
        assert ns.get(asked, out, verify) == 6
        assert [each.tobytes() for each in out[:6]] == [payload(key) for key in keys]
        assert not room[:, BLOCK:].any()


def test_get_stops_at_the_first_missing_block(ns: Namespace) -> None:
    keys = names(5)
    ns.put(keys[:3], payloads(keys[:3]))
    assert got(ns, keys) == 3
    assert got(ns, [*keys[:2], b"?" * 32, keys[2]]) == 2


def test_calls_without_keys_do_nothing(ns: Namespace) -> None:
    assert ns.lookup([]) == 0
    assert ns.get([], bytearray()) == 0
    assert ns.put([], []) == PutResult()
    with ns.acquire([]) as lease:
        assert len(lease) == 0
        assert lease.blocks == []


def test_keys_of_all_lengths_differ_from_zero_padded_ones(ns: Namespace) -> None:
    keys = [b"a" + bytes(n) for n in range(64)]
    for i, key in enumerate(keys):
        assert ns.put([key], [payload(key, salt=i)]).stored == 1
    for i, key in enumerate(keys):
        assert got(ns, [key], salt=i) == 1
    assert ns.lookup([b"a" * 3]) == 0


def test_pin_unpin_and_prefetch_count_blocks(ns: Namespace) -> None:
    keys = names(5)
    ns.put(keys[:4], payloads(keys[:4]))
    assert ns.pin(keys, ttl_s=60) == 4
    assert ns.unpin(keys[:1]) == 1
    assert ns.unpin(keys) == 3
    assert ns.prefetch(keys) == 4


def test_pinned_blocks_are_not_evicted(ns: Namespace, client: Client) -> None:
    keys = names(20)
    ns.put(keys, payloads(keys))
    assert ns.pin(keys, ttl_s=60) == 20
    flood = client.namespace(new_layout())
    for i in range(40):
        some = names(128, f"flood {i}")
        flood.put(some, payloads(some))
    assert got(ns, keys) == 20
    assert ns.unpin(keys) == 20


def test_invalidated_keys_are_misses(ns: Namespace) -> None:
    keys = names(4)
    ns.put(keys, payloads(keys))
    assert ns.invalidate([*keys[2:], b"?" * 32]) == 2
    assert ns.lookup(keys) == got(ns, keys) == 2
    assert ns.put(keys, payloads(keys)).stored == 2
    assert got(ns, keys) == 4


def test_a_chain_needs_its_parent(ns: Namespace) -> None:
    keys = names(2)
    result = ns.put(keys[1:], payloads(keys[1:]), parent=keys[0])
    assert (result.stored, result.denied, result.why) == (0, 1, "the parent is not stored")
    ns.put(keys[:1], payloads(keys[:1]))
    assert ns.put(keys[1:], payloads(keys[1:]), parent=keys[0]).stored == 1


# -- leases and reservations


def test_zero_copy_views_are_read_only_and_equal(ns: Namespace) -> None:
    keys = names(3)
    ns.put(keys, payloads(keys))
    with ns.acquire(keys) as lease:
        assert lease.verify() == 3
        assert [bytes(view) for view in lease.blocks] == [payload(k) for k in keys]
        for view in lease.blocks:
            assert view.readonly
            with pytest.raises(TypeError):
                view[0] = 1
            assert not np.frombuffer(view, np.uint8).flags.writeable
    with pytest.raises(MisuseError, match="has ended"):
        lease.blocks  # noqa: B018
    with pytest.raises(MisuseError, match="has ended"):
        lease.copy_into(room_for(3))
    lease.release()


def test_the_kernel_refuses_writes_through_a_reading_map(ns: Namespace) -> None:
    keys = names(1)
    ns.put(keys, payloads(keys))
    with ns.acquire(keys) as lease:
        address = np.frombuffer(lease.blocks[0], np.uint8).ctypes.data

        def write() -> None:
            faulthandler.disable()
            ctypes.memset(address, 0, 1)

        status = in_child(write)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGSEGV
        assert lease.verify() == 1


def test_leased_slots_are_not_reused_under_eviction(ns: Namespace, client: Client) -> None:
    keys = names(10)
    ns.put(keys, payloads(keys))
    with ns.acquire(keys) as lease:
        flood = client.namespace(new_layout())
        for i in range(12):
            some = names(128, f"press {i}")
            flood.put(some, payloads(some))
        ns.invalidate(keys)
        for i in range(12):
            some = names(128, f"press again {i}")
            flood.put(some, payloads(some))
        assert [bytes(view) for view in lease.blocks] == [payload(k) for k in keys]


def test_blocks_that_were_invalidated_under_a_lease_do_not_verify(ns: Namespace) -> None:
    keys = names(2)
    ns.put(keys, payloads(keys))
    with ns.acquire(keys) as lease:
        ns.invalidate(keys[1:])
        assert lease.verify() == 1
        assert lease.copy_into(room_for(2)) == 1


def test_reserved_blocks_are_misses_until_the_commit(ns: Namespace) -> None:
    keys = names(3)
    with ns.reserve(keys) as reservation:
        assert reservation.wanted == [0, 1, 2]
        for view, key in zip(reservation.blocks, keys, strict=True):
            view[:] = payload(key)
        assert ns.lookup(keys) == 0
        assert reservation.commit() == PutResult(stored=3)
    assert got(ns, keys) == 3
    with pytest.raises(MisuseError, match="has ended"):
        reservation.commit()


def test_a_reservation_is_aborted_at_the_end_of_its_with_block(ns: Namespace, client: Client) -> None:
    keys = names(3)
    with ns.reserve(keys) as reservation:
        reservation.fill(0, payload(keys[0]))
    with pytest.raises(ZeroDivisionError), ns.reserve(keys):
        raise ZeroDivisionError
    assert ns.lookup(keys) == 0
    assert client.status()["reservations"] == 0


def test_a_reservation_has_slots_only_for_missing_blocks(ns: Namespace) -> None:
    keys = names(4)
    ns.put(keys[:1], payloads(keys[:1]))
    with ns.reserve(keys) as reservation:
        assert reservation.wanted == [1, 2, 3]
        assert reservation.result.present == 1
        with ns.reserve(keys) as other:
            assert len(other) == 0
            assert other.result.present == 4
        for i, wanted in enumerate(reservation.wanted):
            reservation.fill(i, payload(keys[wanted]))
        assert reservation.commit() == PutResult(stored=3, present=1)
    assert got(ns, keys) == 4


def test_layers_are_written_and_read_by_ranges(ns: Namespace) -> None:
    keys, layers = names(3), 4
    step = BLOCK // layers
    with ns.reserve(keys) as reservation:
        for layer in range(layers):
            for i, key in enumerate(keys):
                reservation.write(i, payload(key)[layer * step : (layer + 1) * step], layer * step)
        reservation.commit()
    with ns.acquire(keys) as lease:
        part = bytearray(step)
        for layer in range(layers):
            for i, key in enumerate(keys):
                lease.read(i, part, layer * step)
                assert part == payload(key)[layer * step : (layer + 1) * step]
        for i, offset, n in [(3, 0, 1), (-1, 0, 1), (0, BLOCK, 1), (0, -1, 4), (0, 0, BLOCK + 1)]:
            with pytest.raises(MisuseError, match=f"bytes {offset} to {offset + n} of block {i}"):
                lease.read(i, bytearray(n), offset)
    assert got(ns, keys) == 3


def test_a_range_written_after_a_fill_counts(ns: Namespace) -> None:
    [key] = names(1)
    with ns.reserve([key]) as reservation:
        reservation.fill(0, bytes(BLOCK))
        reservation.write(0, payload(key))
        reservation.commit()
    assert got(ns, [key]) == 1


def test_blocks_are_gathered_from_parts_and_scattered_into_parts(ns: Namespace) -> None:
    keys, cuts = names(3), [0, 1, 4097, BLOCK]
    with ns.reserve(keys) as reservation:
        for i, key in enumerate(keys):
            block = payload(key)
            reservation.gather(i, [block[a:b] for a, b in itertools.pairwise(cuts)])
        reservation.commit()
    assert got(ns, keys) == 3
    sizes = [BLOCK - 1000, 0, 1000]
    with ns.acquire(keys) as lease:
        for i, key in enumerate(keys):
            parts = [np.zeros(n, np.uint8) for n in sizes]
            assert lease.scatter(i, parts)
            assert np.concatenate(parts).tobytes() == payload(key)
        with pytest.raises(MisuseError, match=f"block 1 has {BLOCK - 1} bytes instead of {BLOCK}"):
            lease.scatter(1, [bytearray(BLOCK - 1)])
        with pytest.raises(MisuseError, match="block 1 is read-only"):
            lease.scatter(1, [bytes(BLOCK)])
        with pytest.raises(MisuseError, match="block 3"):
            lease.scatter(3, [bytearray(BLOCK)])


def test_scattered_blocks_are_verified(ns: Namespace) -> None:
    good, bad = names(2)
    ns.put([good], payloads([good]))
    with ns.reserve([bad], parent=good) as reservation:
        view = reservation.blocks[0]
        view[:] = payload(bad)
        reservation.commit()
        view[17] ^= 1
    out = [bytearray(BLOCK)]
    with ns.acquire([good, bad]) as lease:
        assert lease.scatter(0, out)
        assert not lease.scatter(1, out)
    # NVMe has the block as it was before or after the change: whichever, what comes next is right.
    assert got(ns, [good, bad]) in (1, 2)


def test_an_empty_reservation_shares_no_connection(client: Client) -> None:
    ns = client.namespace(new_layout())
    keys = names(200)
    ns.put(keys, payloads(keys))
    with ns.reserve(keys[:1]) as reservation:
        assert reservation.commit() == PutResult(present=1)
    assert len(client._idle) == len(set(map(id, client._idle)))

    def look(n: int) -> bool:
        return all(ns.lookup([*keys[:n], b"?" * 32]) == n for _ in range(200))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(look, [3, 170]))


# -- misuse


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda ns: ns.put([b""], [bytes(BLOCK)]), "a key of 0 bytes"),
        (lambda ns: ns.lookup([b"x" * 65]), "a key of 65 bytes"),
        (lambda ns: ns.lookup([b"ab", b"a"]), "keys of one call differ in length"),
        (lambda ns: ns.lookup([*names(600), [1]]), "a key is a list"),
        (lambda ns: ns.get([b"ab", b"abc"], room_for(2)), "keys of one call differ in length"),
        (lambda ns: ns.acquire(["text"]), "a key is a str"),
        (lambda ns: ns.put([b"k"], [bytes(BLOCK - 1)]), f"block 0 has {BLOCK - 1} bytes instead of {BLOCK}"),
        (lambda ns: ns.put([b"k"], room_for(2)), f"blocks has {2 * BLOCK} bytes instead of {BLOCK}"),
        (lambda ns: ns.put([b"k"], []), "0 blocks for 1 keys"),
        (lambda ns: ns.put([b"k"], room_for(1, 2 * BLOCK)[:, ::2]), "C-contiguous"),
        (lambda ns: ns.get([b"k"], bytearray(BLOCK + 1)), f"out has {BLOCK + 1} bytes instead of {BLOCK}"),
        (lambda ns: ns.get([b"k"], bytes(BLOCK)), "out is read-only"),
        (lambda ns: ns.get([b"k"], []), "0 buffers for 1 keys"),
        (lambda ns: ns.get([b"k"], [bytes(BLOCK)]), r"out\[0\] is read-only"),
        (lambda ns: ns.get([b"k"], [bytearray(1)]), rf"out\[0\] has 1 bytes instead of {BLOCK}"),
        (lambda ns: ns.put([b"k"], room_for(1), parent=b"p" * 65), "65 bytes"),
        (lambda ns: ns.put([b"k"], room_for(1), parent="parent"), "str"),
        (lambda ns: ns.reserve([b"k"], parent=b"p" * 65), "65 bytes"),
        (lambda ns: ns.pin([b"k"], ttl_s=0), "ttl_s is 0"),
        (lambda ns: ns.pin([b"k"], ttl_s=-1), "ttl_s is -1"),
        (lambda ns: ns.pin([b"k"], ttl_s=1e9), "ttl_s is 1000000000.0"),
        (lambda ns: ns.lookup([b"k"], deadline_s=0), "deadline_s is 0"),
        (lambda ns: ns.pin([b"k"], ttl_s=float("nan")), "ttl_s is nan"),
        (lambda ns: ns.get([b"k"], room_for(1), deadline_s=-1), "deadline_s is -1"),
        (lambda ns: ns.lookup([b"k"], deadline_s=float("nan")), "deadline_s is nan"),
    ],
)
def test_misuse_of_calls_is_raised_before_any_message(ns: Namespace, call: Callable, why: str) -> None:
    with pytest.raises(MisuseError, match=why):
        call(ns)
    keys = names(2)
    assert ns.put(keys, payloads(keys)).stored == 2, "the next call is not hurt"


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda c: c.namespace(LAYOUT, owner="../a"), "'../a' can't be a tenant's name"),
        (lambda c: c.namespace(LAYOUT, owner="a\n"), "can't be a tenant's name"),
        (lambda c: c.namespace(LAYOUT, owner=None), "None can't be a tenant's name"),
        (lambda c: c.namespace(LAYOUT, ttl_s=-1), "ttl_s is -1"),
        (lambda c: c.namespace(LAYOUT, ttl_s=float("nan")), "ttl_s is nan"),
        (lambda c: c.namespace(LAYOUT, ttl_s=float("inf")), "ttl_s is inf"),
        (lambda c: c.namespace(LAYOUT).publish("team-a"), r"tenants is 'team-a' \(a list of names"),
        (lambda c: c.namespace(LAYOUT).publish(["a", "b/c"]), "'b/c' can't be a tenant's name"),
        (lambda c: c.invalidate(model=7), "model is 7"),
        (lambda c: c.delete_tenant(""), "'' can't be a tenant's name"),
        (lambda c: c.namespace(LAYOUT).lookup([b"k"], recompute_tokens_per_s=0), "tokens_per_s is 0"),
        (lambda c: c.namespace(LAYOUT).acquire([b"k"], recompute_tokens_per_s=-1), "tokens_per_s is -1"),
        (
            lambda c: c.namespace(LAYOUT).get([b"k"], room_for(1), recompute_tokens_per_s=float("inf")),
            "tokens_per_s is inf",
        ),
    ],
)
def test_misuse_of_tenants_and_speeds_is_raised(driver: Driver, call: Callable, why: str) -> None:
    with pytest.raises(MisuseError, match=why):
        call(driver.client("unix:///nowhere/kvstore.sock", strict=True))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"recompute_tokens_per_s": float("nan")}, "tokens_per_s is nan"),
        ({"token": "kvs_\udc80"}, "this can't be a token"),
        ({"token": b"kvs_"}, "this can't be a token"),
        ({"token": "x" * 5000}, "this can't be a token"),
        ({"deadline_s": 0}, "deadline_s is 0"),
    ],
)
def test_misuse_of_settings_is_raised(driver: Driver, settings: dict, why: str) -> None:
    with pytest.raises(MisuseError, match=why):
        driver.client("unix:///nowhere/kvstore.sock", **settings)


def test_misuse_is_raised_without_a_daemon_too(driver: Driver) -> None:
    ns = driver.client("unix:///nowhere/kvstore.sock").namespace(new_layout())
    with pytest.raises(MisuseError, match="a key of 65 bytes"):
        ns.lookup([b"x" * 65])
    with pytest.raises(MisuseError, match="differ in length"):
        ns.lookup([b"a", b"ab"])
    with pytest.raises(MisuseError, match="instead of"):
        ns.put([b"k"], [b"short"])


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("tcp://localhost", "cannot connect to 'tcp://localhost'"),
        ("relative/path", "unix:///absolute/path"),
        ("unix:///" + "x" * 107, "socket path of 108 bytes"),
        ("unix:///a.sock,unix:///b.sock", "several daemons"),
    ],
)
def test_invalid_urls_are_refused(driver: Driver, url: str, why: str) -> None:
    with pytest.raises(MisuseError, match=why):
        driver.client(url)


def test_a_list_of_daemons_is_split() -> None:
    assert split_urls("") == [""]
    assert split_urls("unix:///a.sock") == ["unix:///a.sock"]
    assert split_urls("unix:///a.sock, /run/b.sock") == ["unix:///a.sock", "/run/b.sock"]


@pytest.mark.parametrize(
    ("urls", "why"),
    [
        ("unix:///a.sock,", "an empty URL"),
        (",", "an empty URL"),
        ("unix:///a.sock,tcp://b", "cannot connect to 'tcp://b'"),
        ("unix:///a.sock,/a.sock", "named twice"),
        ("unix:///a.sock unix:///b.sock", "several daemons"),
    ],
)
def test_an_invalid_list_of_daemons_is_refused(urls: str, why: str) -> None:
    with pytest.raises(MisuseError, match=why):
        split_urls(urls)


def test_the_url_is_read_from_the_environment(
    driver: Driver, daemon: LocalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_SOCKET", daemon.url)
    with driver.client() as client:
        assert client.status()["pid"] == daemon.pid
    monkeypatch.setenv("KVSTORE_SOCKET", str(daemon.socket))
    with driver.client() as client:
        client.ping()


def test_a_layout_too_large_for_the_daemon_is_denied_with_a_hint(driver: Driver, daemon: LocalDaemon) -> None:
    layout = new_layout(64 << 20)
    with driver.client(daemon.url, strict=True) as client:
        with pytest.raises(DeniedError, match=r"67108864 bytes does not fit .* \(raise dram.limit\)"):
            client.namespace(layout).lookup([b"k"])
        client.ping()
    with driver.client(daemon.url) as client:
        assert client.namespace(layout).put([b"k"], [bytes(64 << 20)]).denied == 1


# -- many keys


def test_calls_beyond_a_batch_are_made_in_batches(driver: Driver, picky: LocalDaemon) -> None:
    with driver.client(picky.url, deadline_s=10) as client:
        ns = client.namespace(new_layout())
        keys = names(100)
        assert ns.put(keys, payloads(keys)).stored == 100
        assert ns.lookup(keys) == 100
        assert ns.lookup([*keys[:50], b"?" * 32]) == 50
        assert got(ns, keys) == 100
        assert ns.prefetch(keys) == 100
        assert ns.pin(keys, ttl_s=5) == 100
        assert ns.unpin(keys) == 100
        assert ns.invalidate(keys[20:]) == 80
        assert ns.lookup(keys) == 20


def test_lookups_of_long_prompts_count_exactly(
    driver: Driver, daemon: LocalDaemon, picky: LocalDaemon
) -> None:
    keys = names(1500)
    for served in (daemon, picky):
        with driver.client(served.url, deadline_s=10) as client:
            ns = client.namespace(new_layout(100))
            for at in range(0, 1100, 100):
                some = keys[at : at + 100]
                assert ns.put(some, payloads(some, 100), parent=keys[at - 1] if at else None).stored == 100
                assert ns.lookup(keys) == at + 100
            for n in (1, 15, 16, 17, 511, 512, 513, 1099, 1100, 1101):
                assert ns.lookup(keys[:n]) == min(n, 1100)


def test_lookups_of_long_prompts_find_a_lost_parent(ns: Namespace) -> None:
    keys = names(600)
    for at in range(0, 600, 200):
        some = keys[at : at + 200]
        assert ns.put(some, payloads(some), parent=keys[at - 1] if at else None).stored == 200
    ns.invalidate(keys[477:478])
    assert got(ns, keys) == 477
    assert ns.lookup(keys[:500]) == 477
    assert ns.lookup(keys) == 477


def test_too_many_leases_of_one_client_are_denied_with_a_reason(driver: Driver, picky: LocalDaemon) -> None:
    with driver.client(picky.url, deadline_s=5, strict=True) as client, contextlib.ExitStack() as held:
        ns = client.namespace(new_layout())
        keys = names(1)
        ns.put(keys, payloads(keys))
        for _ in range(4):
            held.enter_context(ns.acquire(keys))
        with pytest.raises(DeniedError, match=r"too many leases \(at most 4 leases"):
            ns.acquire(keys)
        held.close()
        assert len(ns.acquire(keys)) == 1


# -- threads, forks, event loops


def test_threads_share_a_client(client: Client, ns: Namespace) -> None:
    shared = names(16, "shared")
    ns.put(shared, payloads(shared))

    def work(number: int) -> None:
        keys = names(12, f"thread {number}")
        for i in range(12):
            parent = keys[i - 1] if i else None
            assert ns.put([keys[i]], [payload(keys[i])], parent=parent).stored == 1
            assert ns.lookup([*keys, b"?" * 32]) == i + 1
            assert got(ns, keys) == i + 1
            assert got(ns, shared) == 16
            with (
                ns.acquire(shared) as lease,
                ns.reserve(names(2, f"reservation {number} {i}")) as reservation,
            ):
                assert lease.verify() == 16
                reservation.abort()

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, i) for i in range(8)]:
            done.result()
    assert len(client._idle) <= 24


def test_a_key_put_by_many_threads_at_once_is_stored_once(ns: Namespace) -> None:
    keys = names(20)
    start = threading.Barrier(6)

    def work(_: int) -> PutResult:
        start.wait()
        return ns.put(keys, payloads(keys))

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(work, range(6)))
    assert sum(r.stored for r in results) == 20
    assert all(r.stored + r.present == 20 for r in results)
    assert got(ns, keys) == 20


def test_a_fork_gets_its_own_connection(ns: Namespace, client: Client) -> None:
    keys, childs = names(4), names(4, "child")
    ns.put(keys, payloads(keys))
    lease = ns.acquire(keys)
    connections = client.status()["connections"]

    def work() -> None:
        assert client.status()["connections"] == connections + 1
        assert got(ns, keys) == 4
        assert {connection.pid for connection in client._idle} == {os.getpid()}
        assert ns.put(childs, payloads(childs)).stored == 4
        lease.release()

    assert in_child(work) == 0
    assert client.status()["leases"] == 1
    assert lease.verify() == 4
    lease.release()
    assert client.status()["leases"] == 0
    assert got(ns, childs) == 4
    assert got(ns, keys) == 4


def test_a_reservation_belongs_to_the_process_that_made_it(ns: Namespace, client: Client) -> None:
    keys = names(3)
    with ns.reserve(keys) as reservation:
        for i, key in enumerate(keys):
            reservation.fill(i, payload(key))

        def leave() -> None:
            assert ns.lookup([b"?" * 32]) == 0
            reservation.abort()
            assert ns.lookup(keys) == 0
            assert {connection.pid for connection in client._idle} == {os.getpid()}

        def commit() -> None:
            with contextlib.suppress(MisuseError):
                assert reservation.commit().stored == 0
            assert ns.lookup(keys) == 0

        assert in_child(leave) == 0
        assert in_child(commit) == 0
        assert reservation.commit().stored == 3
    assert got(ns, keys) == 3


def test_forks_of_a_client_in_use_by_threads(ns: Namespace) -> None:
    keys = names(8)
    ns.put(keys, payloads(keys))
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            assert got(ns, keys) == 8

    def child() -> None:
        for _ in range(5):
            assert got(ns, keys) == 8

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            assert in_child(child) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_many_calls_of_one_event_loop(daemon: LocalDaemon) -> None:
    async def work() -> None:
        async with AsyncClient(daemon.url, deadline_s=10, strict=True) as a:
            ns = a.namespace(new_layout())
            keys = names(6)
            assert await ns.put(keys, payloads(keys)) == PutResult(stored=6)
            outs = [room_for(6) for _ in range(20)]
            assert await asyncio.gather(*(ns.get(keys, out) for out in outs)) == [6] * 20
            assert all(np.array_equal(out, payloads(keys)) for out in outs)
            assert len(a._idle) == len(set(map(id, a._idle)))

    asyncio.run(work())


def test_a_cancelled_call_waits_for_its_copy(
    daemon: LocalDaemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, keys = new_layout(), names(1)
    client.namespace(layout).put(keys, payloads(keys))
    copying, go_on = threading.Event(), threading.Event()

    def slowly(lease: Lease, out: memoryview, verify: bool) -> int:
        copying.set()
        go_on.wait(10)
        return 0

    monkeypatch.setattr(Lease, "copy_into", slowly)

    async def work() -> None:
        async with AsyncClient(daemon.url, deadline_s=10) as a:
            call = asyncio.create_task(a.namespace(layout).get(keys, room_for(1)))
            await asyncio.to_thread(copying.wait, 10)
            call.cancel()
            done, _ = await asyncio.wait([call], timeout=0.1)
            assert not done, "the buffer is the caller's again, and still written to"
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(work())


# -- when the daemon is away


def test_no_daemon_is_a_miss_within_the_deadline(driver: Driver) -> None:
    with driver.client("unix:///nowhere/kvstore.sock", deadline_s=0.2) as client:
        ns = client.namespace(new_layout())
        keys = names(2)
        started = time.monotonic()
        assert ns.lookup(keys) == 0
        assert got(ns, keys) == 0
        result = ns.put(keys, payloads(keys))
        assert (result.stored, result.denied) == (0, 2)
        assert result.why
        assert len(ns.acquire(keys)) == 0
        with ns.reserve(keys) as reservation:
            assert len(reservation) == 0
            assert reservation.commit().denied == 2
        assert ns.prefetch(keys) == ns.pin(keys, 1) == ns.unpin(keys) == ns.invalidate(keys) == 0
        assert time.monotonic() - started < 0.2 + MARGIN_S


def test_strict_clients_raise_instead_of_missing(driver: Driver) -> None:
    with driver.client("unix:///nowhere/kvstore.sock", strict=True) as client:
        ns = client.namespace(new_layout())
        keys = names(1)
        for call in (
            lambda: ns.lookup(keys),
            lambda: ns.get(keys, room_for(1)),
            lambda: ns.put(keys, payloads(keys)),
            lambda: ns.acquire(keys),
            lambda: ns.reserve(keys),
            lambda: ns.pin(keys, 1),
            client.status,
        ):
            with pytest.raises(UnavailableError):
                call()
    with pytest.raises(
        UnavailableError, match=r"no answer .*/nowhere/kvstore.sock.* \(start the daemon: `kvstore serve`"
    ):
        driver.client("unix:///nowhere/kvstore.sock").status()


def test_a_killed_daemon_is_a_miss_and_its_successor_is_used(driver: Driver) -> None:
    with LocalDaemon(WITH_NVME) as daemon, driver.client(daemon.url, deadline_s=10) as client:
        ns = client.namespace(new_layout())
        keys = names(20)
        ns.put(keys, payloads(keys))
        eventually(lambda: idle(client.status()))
        with ns.acquire(keys) as lease:
            views = lease.blocks
            assert not lease.ended
            daemon.kill()
            assert got(ns, keys) == 0
            assert ns.put(keys, payloads(keys)).stored == 0
            assert [bytes(v) for v in views] == [payload(k) for k in keys]
            assert lease.ended
        daemon.start()
        assert eventually(lambda: got(ns, keys), 5) == 20
        daemon.restart()
        assert got(ns, keys) == 20, "a clean restart is not even a miss"


def test_deadlines_hold_while_the_daemon_is_stopped(driver: Driver) -> None:
    deadline_s = 0.25
    with LocalDaemon(WITH_NVME) as daemon, driver.client(daemon.url, deadline_s=deadline_s) as client:
        ns = client.namespace(new_layout())
        keys = names(4)
        ns.put(keys, payloads(keys))
        lease, reservation = ns.acquire(keys), ns.reserve(names(1, "later"))
        reservation.fill(0, payload(keys[0]))

        def in_time(call: Callable[[], object]) -> object:
            started = time.monotonic()
            try:
                return call()
            finally:
                assert time.monotonic() - started < deadline_s + MARGIN_S

        stop(daemon.pid)
        try:
            assert in_time(lambda: ns.lookup(keys)) == 0
            time.sleep(0.1)
            assert in_time(lambda: got(ns, keys)) == 0
            assert in_time(lambda: ns.put(keys, payloads(keys)).stored) == 0
            assert in_time(lambda: len(ns.acquire(keys))) == 0
            assert in_time(reservation.commit).stored == 0  # type: ignore[attr-defined]
            in_time(lease.release)
            with pytest.raises(UnavailableError):
                in_time(client.status)
            strict = driver.client(daemon.url, deadline_s=deadline_s, strict=True)
            with pytest.raises(UnavailableError):
                in_time(lambda: strict.namespace(ns.layout).lookup(keys))
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert eventually(lambda: got(ns, keys), 5) == 4
        eventually(lambda: idle(client.status()), 5)


def test_a_connection_to_an_earlier_daemon_keeps_its_own_maps() -> None:
    maps = Maps()
    sessions = [ProtocolState("", maps) for _ in range(3)]
    for session, instance in zip(sessions, (b"last", b"next", b"next"), strict=True):
        session.welcome(m.Welcome(m.VERSION, instance, 1 << 20, 16, 16))
    last, following, other = (session.maps for session in sessions)
    for known in (following, last):
        fd = os.memfd_create("extent")
        os.ftruncate(fd, 4096)
        known.add(0, False, fd, 4096)
    assert following.get(0, False) is other.get(0, False)
    assert following.get(0, False) is not last.get(0, False)


def test_a_reservation_of_a_killed_daemon_stores_nothing(driver: Driver) -> None:
    with LocalDaemon(SMALL) as daemon, driver.client(daemon.url, deadline_s=2) as client:
        ns = client.namespace(new_layout())
        keys = names(2)
        with ns.reserve(keys) as reservation:
            daemon.restart()
            for i, key in enumerate(keys):
                reservation.fill(i, payload(key))
            result = reservation.commit()
            assert (result.stored, result.denied) == (0, 2)
            assert result.why
        assert eventually(lambda: ns.put(keys, payloads(keys)).stored, 5) == 2
        assert got(ns, keys) == 2


def test_leases_survive_many_concurrent_calls(driver: Driver) -> None:
    crowd = 80
    with LocalDaemon(SMALL) as daemon, driver.client(daemon.url, deadline_s=10) as client:
        ns = client.namespace(new_layout())
        keys = names(crowd)
        ns.put(keys, payloads(keys))
        with ThreadPoolExecutor(crowd) as pool:
            stop(daemon.pid)
            calls = [pool.submit(ns.acquire, [key]) for key in keys]
            time.sleep(0.2)
            os.kill(daemon.pid, signal.SIGCONT)
            leases = [call.result() for call in calls]
        assert [len(lease) for lease in leases] == [1] * crowd
        assert client.status()["leases"] == crowd
        for lease in leases:
            lease.release()
        eventually(lambda: client.status()["leases"] == 0, 2)


def test_a_lease_without_its_connection_verifies_nothing(driver: Driver) -> None:
    # What was used before the flood has to go.
    settings = SMALL | {"policy": {"eviction": "lru"}}
    with LocalDaemon(settings) as daemon, driver.client(daemon.url, deadline_s=0.2) as client:
        ns = client.namespace(new_layout())
        keys = names(4)
        ns.put(keys, payloads(keys))
        lease = ns.acquire(keys)
        stop(daemon.pid)
        assert ns.lookup(keys) == 0
        os.kill(daemon.pid, signal.SIGCONT)
        with driver.client(daemon.url, deadline_s=5) as other:
            eventually(lambda: other.status()["leases"] == 0, 2)
            flood = other.namespace(new_layout())
            for i in range(12):
                some = names(128, f"flood {i}")
                flood.put(some, payloads(some))
        out = room_for(4)
        with contextlib.suppress(MisuseError):
            good = lease.copy_into(out)
            assert np.array_equal(out[:good], payloads(keys[:good]))
            assert good == 0
            assert lease.verify() == 0


def test_a_cancelled_call_leaves_no_lease(daemon: LocalDaemon, client: Client) -> None:
    async def work() -> None:
        async with AsyncClient(daemon.url, deadline_s=10) as a:
            ns = a.namespace(new_layout())
            keys = names(64)
            await ns.put(keys, payloads(keys))
            for i in range(40):
                task = asyncio.create_task(ns.get(keys, room_for(64)))
                await asyncio.sleep(i * 5e-5)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            out = room_for(64)
            assert await ns.get(keys, out) == 64
            assert np.array_equal(out, payloads(keys))

    asyncio.run(work())
    eventually(lambda: idle(client.status()), 3)


def test_a_deadline_shortens_the_prefix(driver: Driver) -> None:
    with LocalDaemon(WITH_NVME) as daemon, driver.client(daemon.url, deadline_s=5) as client:
        ns = client.namespace(new_layout())
        keys = names(100)
        ns.put(keys, payloads(keys))
        eventually(lambda: idle(client.status()))
        flood = client.namespace(new_layout())
        for i in range(10):
            some = names(128, f"cut {i}")
            flood.put(some, payloads(some))
        n = got(ns, keys, deadline_s=0.003)
        assert 0 <= n <= 100
        assert got(ns, keys) == 100


def test_a_full_store_denies_blocks_with_a_reason(driver: Driver) -> None:
    with LocalDaemon({"dram": {"limit": "2MiB", "huge_pages": False}}) as daemon:
        layout = new_layout(1 << 20)
        with driver.client(daemon.url, deadline_s=5) as client, contextlib.ExitStack() as held:
            ns = client.namespace(layout)
            keys = names(4)
            assert ns.put(keys[:1], payloads(keys[:1], 1 << 20)).stored == 1
            held.enter_context(ns.acquire(keys[:1]))
            result = ns.put(keys[1:], payloads(keys[1:], 1 << 20))
            assert (result.stored, result.denied, result.why) == (0, 3, "no room")
            assert tier(client.status(), "dram")["used_bytes"] <= 2 << 20
            held.close()
            assert ns.put(keys[1:2], payloads(keys[1:2], 1 << 20)).stored == 1


def test_two_clients_share_blocks(driver: Driver, daemon: LocalDaemon) -> None:
    layout = Layout(model="shared by two", block_bytes=BLOCK)
    keys = names(5)
    with driver.client(daemon.url, deadline_s=5) as one, driver.client(daemon.url, deadline_s=5) as two:
        one.namespace(layout).put(keys, payloads(keys))
        assert got(two.namespace(layout), keys) == 5
