"""The whole daemon as a process: what it keeps, what it gives back, what survives its end."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore import Client, Tier
from kvstore.errors import KVStoreError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.wire import messages as m
from tests.daemons import (
    BLOCK,
    SMALL,
    WITH_NVME,
    check_limits,
    cli,
    eventually,
    got,
    greeted,
    idle,
    log_of,
    names,
    new_layout,
    payload,
    payloads,
    room_for,
    tier,
)

DRAM_BLOCKS = 8 * 126
"""About what `SMALL` holds."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(WITH_NVME) as served:
        yield served


@pytest.fixture
def client(daemon: LocalDaemon) -> Iterator[Client]:
    with Client(daemon.url, deadline_s=10, strict=True) as made:
        yield made


def settled(client: Client) -> dict[str, object]:
    """Status once nothing moves."""
    return dict(eventually(lambda: (s := client.status()) and idle(s) and s))


def fill(client: Client, n: int, block_bytes: int = BLOCK) -> None:
    """Stores n blocks that nobody asks for again, however long the disk takes."""
    ns = client.namespace(new_layout(block_bytes))
    keys = names(n, "filler")
    for at in range(0, n, 128):
        part = keys[at : at + 128]
        eventually(lambda part=part: not ns.put(part, payloads(part, block_bytes)).denied, 60.0)


# -- keeping


def test_stored_blocks_are_read_back(client: Client) -> None:
    ns = client.namespace(new_layout())
    keys = names(20)
    assert got(ns, keys) == 0
    result = ns.put(keys, payloads(keys))
    assert (result.stored, result.present, result.denied) == (20, 0, 0)
    assert ns.lookup([*keys, b"x" * 32]) == 20
    assert got(ns, keys) == 20
    again = ns.put(keys, payloads(keys))
    assert (again.stored, again.present, again.denied) == (0, 20, 0)


def test_layouts_and_their_blocks_are_apart(client: Client) -> None:
    keys = names(3)
    one, other = client.namespace(new_layout()), client.namespace(new_layout())
    one.put(keys, payloads(keys, salt=1))
    assert other.lookup(keys) == 0
    other.put(keys, payloads(keys, salt=2))
    assert got(one, keys, salt=1) == got(other, keys, salt=2) == 3


def test_blocks_of_any_size_live_beside_each_other() -> None:
    sizes = (1, 100, 4096, 4097, BLOCK, 300_003, 1 << 20)
    with LocalDaemon(WITH_NVME) as daemon, Client(daemon.url, deadline_s=10) as client:
        fill(client, DRAM_BLOCKS)
        spaces = [client.namespace(new_layout(nbytes)) for nbytes in sizes]
        keys = names(4)
        for ns in spaces:
            # As many as one extent has room for: a chain does not push itself out.
            n = 1 if ns.layout.block_bytes == 1 << 20 else 4
            assert ns.put(keys[:n], payloads(keys[:n], ns.layout.block_bytes)).stored == n
            settled(client)
            check_limits(client.status())
        for ns in spaces:
            assert got(ns, keys) >= 1


def test_blocks_evicted_from_dram_are_read_from_nvme(client: Client) -> None:
    ns = client.namespace(new_layout())
    keys = names(200)
    assert ns.put(keys, payloads(keys)).stored == 200
    settled(client)
    fill(client, DRAM_BLOCKS + 200)
    before = client.status()["counters"].get("hit_blocks_nvme", 0)
    with ns.acquire(keys) as lease:
        assert len(lease) == 200
        assert Tier.NVME in {Tier(t) for t in lease.tiers}
        out = room_for(200)
        assert lease.copy_into(out) == 200
    assert np.array_equal(out, payloads(keys))
    assert client.status()["counters"]["hit_blocks_nvme"] > before
    with ns.acquire(keys) as lease:
        assert set(lease.tiers) == {Tier.DRAM}


def test_usage_stays_below_the_limits_and_old_leaves_are_evicted_first(client: Client) -> None:
    ns = client.namespace(new_layout())
    chain = names(64, "old")
    ns.put(chain, payloads(chain))
    for _ in range(12):
        fill(client, 512)
        check_limits(client.status())
    status = settled(client)
    check_limits(status)
    assert tier(status, "nvme")["used_bytes"] > 0.9 * tier(status, "nvme")["limit_bytes"]
    found = ns.lookup(chain)
    assert got(ns, chain) == found
    assert got(ns, chain[::-1]) in (0, 64)


def test_status_counts_blocks_by_tier(daemon: LocalDaemon, client: Client) -> None:
    fill(client, 10)
    status = settled(client)
    assert status["pid"] == daemon.pid
    assert [t["name"] for t in status["tiers"]] == ["dram", "nvme"]
    assert tier(status, "dram")["limit_bytes"] == 16 << 20
    assert tier(status, "nvme")["limit_bytes"] == 64 << 20
    assert tier(status, "dram")["used_bytes"] >= 10 * BLOCK
    assert not status["problems"]
    assert int(status["connections"]) >= 1


def test_the_status_command_shows_it(daemon: LocalDaemon) -> None:
    shown = cli("status", "--socket", str(daemon.socket))
    assert shown.returncode == 0, shown.stderr
    assert "nvme" in shown.stdout


# -- descriptors


def map_of(daemon: LocalDaemon, client: Client, writable: bool) -> tuple[int, int]:
    """(descriptor, bytes) of an extent, as the daemon passes it."""
    fill(client, 1)
    with greeted(daemon) as (peer, _):
        mapped = peer.ask(m.Map(9, 0, writable))
        assert isinstance(mapped, m.Mapped)
        [fd] = peer.fds
        return os.dup(fd), mapped.extent_bytes


def test_a_read_only_descriptor_cannot_be_mapped_writable(daemon: LocalDaemon, client: Client) -> None:
    fd, nbytes = map_of(daemon, client, writable=False)
    try:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(PermissionError):
            mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
        with mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as view:
            assert len(view) == nbytes
    finally:
        os.close(fd)


def test_no_client_can_resize_an_extent(daemon: LocalDaemon, client: Client) -> None:
    fd, nbytes = map_of(daemon, client, writable=True)
    try:
        assert os.fstat(fd).st_size == nbytes
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        for size in (0, nbytes * 2):
            with pytest.raises(PermissionError) as refused:
                os.ftruncate(fd, size)
            assert refused.value.errno == errno.EPERM
    finally:
        os.close(fd)


def test_an_extent_that_is_not_there_is_denied(daemon: LocalDaemon) -> None:
    with greeted(daemon) as (peer, _):
        for extent in (999, 2**64 - 1):
            answer = peer.ask(m.Map(3, extent, False))
            assert isinstance(answer, m.Denied)
            assert answer.why == f"there is no extent {extent}"
        assert isinstance(peer.ask(m.Ping(4)), m.Value)


# -- ends and starts


def test_a_clean_restart_keeps_nvme_bit_for_bit(daemon: LocalDaemon, client: Client) -> None:
    layouts = [new_layout(), new_layout(16_000)]
    keys = names(150)
    for layout in layouts:
        ns = client.namespace(layout)
        assert ns.put(keys[:100], payloads(keys[:100], layout.block_bytes)).stored == 100
        assert ns.put(keys[100:], payloads(keys[100:], layout.block_bytes), parent=keys[99]).stored == 50
    daemon.restart()
    with Client(daemon.url, deadline_s=10) as after:
        check_limits(after.status())
        assert after.status()["counters"]["restored_blocks_nvme"] >= 300
        for layout in layouts:
            ns = after.namespace(layout)
            assert ns.lookup(keys) == 150
            assert got(ns, keys) == 150
            tail = names(1, "tail")
            assert ns.put(tail, payloads(tail, layout.block_bytes), parent=keys[-1]).stored == 1


def test_invalidated_blocks_do_not_come_back(daemon: LocalDaemon, client: Client) -> None:
    ns = client.namespace(new_layout())
    keys = names(10)
    ns.put(keys, payloads(keys, salt=1))
    settled(client)
    assert ns.invalidate(keys) == 10
    ns.put(keys[:5], payloads(keys[:5], salt=2))
    daemon.restart()
    with Client(daemon.url, deadline_s=10) as after:
        assert got(after.namespace(ns.layout), keys, salt=2) == 5


def test_a_kill_during_puts_loses_no_recorded_block() -> None:
    with LocalDaemon(WITH_NVME) as daemon:
        layout = new_layout()
        keys = names(40, "early")
        with Client(daemon.url, deadline_s=10) as client:
            client.namespace(layout).put(keys, payloads(keys))
            settled(client)
        stop = threading.Event()
        chains: list[list[bytes]] = []

        def put_on_and_on() -> None:
            with Client(daemon.url, deadline_s=2) as client:
                ns = client.namespace(layout)
                while not stop.is_set():
                    chain = names(32, f"chain {len(chains)}")
                    chains.append(chain)
                    ns.put(chain, payloads(chain))

        writer = threading.Thread(target=put_on_and_on)
        writer.start()
        with Client(daemon.url, deadline_s=10) as client:
            # Some are on record: a busy device may be far behind.
            eventually(lambda: client.status()["counters"].get("written_blocks", 0) > len(keys) + 2 * 32)
        daemon.kill()
        stop.set()
        writer.join()
        daemon.start()
        with Client(daemon.url, deadline_s=10) as client:
            ns = client.namespace(layout)
            assert got(ns, keys) == 40
            whole = sum(got(ns, chain) for chain in chains)
            assert 0 < whole <= 32 * len(chains)
            status = settled(client)
            check_limits(status)
            assert status["counters"].get("quarantined_blocks", 0) == 0
            more = names(16, "more")
            assert ns.put(more, payloads(more)).stored == 16


def test_on_evict_writes_everything_down_before_a_stop() -> None:
    with LocalDaemon({**SMALL, "nvme": {"limit": "64MiB", "write_policy": "on_evict"}}) as daemon:
        layout, keys = new_layout(), names(300)
        with Client(daemon.url, deadline_s=10) as client:
            client.namespace(layout).put(keys, payloads(keys))
            assert tier(settled(client), "nvme")["used_bytes"] == 0
        daemon.restart()
        with Client(daemon.url, deadline_s=10) as client:
            assert got(client.namespace(layout), keys) == 300


def test_without_nvme_a_restart_forgets_and_nothing_is_wrong() -> None:
    with LocalDaemon(SMALL) as daemon:
        layout, keys = new_layout(), names(10)
        with Client(daemon.url, deadline_s=10) as client:
            ns = client.namespace(layout)
            ns.put(keys, payloads(keys))
            daemon.restart()
            assert got(ns, keys) == 0
            assert ns.put(keys, payloads(keys)).stored == 10
            assert got(ns, keys) == 10


def test_a_smaller_limit_is_kept_to_from_the_start() -> None:
    with LocalDaemon(WITH_NVME) as daemon:
        layout, keys = new_layout(), names(3000)
        with Client(daemon.url, deadline_s=10) as client:
            for at in range(0, len(keys), 250):
                part = keys[at : at + 250]
                client.namespace(layout).put(part, payloads(part))
                settled(client)
            assert tier(client.status(), "nvme")["used_bytes"] > 40 << 20
        daemon.stop()
        file = daemon.folder / "kvstore.toml"
        file.write_text(file.read_text().replace('limit = "64MiB"', 'limit = "16MiB"'))
        daemon.start()
        with Client(daemon.url, deadline_s=10) as client:
            status = settled(client)
            check_limits(status)
            assert tier(status, "nvme")["limit_bytes"] == 16 << 20
            slabs = list((daemon.folder / "nvme" / "slabs").iterdir())
            assert sum(s.stat().st_size for s in slabs) <= 16 << 20
            held = [k for k in keys if got(client.namespace(layout), [k])]
            assert 100 < len(held) <= 1024
        assert "beyond the limit" in log_of(daemon)


def test_a_stop_leaves_no_socket_and_a_killed_daemons_socket_is_taken_over() -> None:
    with LocalDaemon(SMALL) as daemon:
        daemon.kill()
        assert daemon.socket.exists()
        daemon.start()
        daemon.stop()
        assert not daemon.socket.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_in_order(number: signal.Signals) -> None:
    with LocalDaemon(SMALL) as daemon:
        assert daemon._process is not None
        process = daemon._process
        os.kill(daemon.pid, number)
        assert process.wait(10) == 0
        assert not daemon.socket.exists()
        daemon.kill()
        assert "Traceback" not in log_of(daemon)


def test_a_stop_does_not_wait_for_clients_that_stay() -> None:
    with LocalDaemon(WITH_NVME) as daemon, Client(daemon.url, deadline_s=5) as client:
        ns = client.namespace(new_layout())
        keys = names(4)
        ns.put(keys, payloads(keys))
        lease = ns.acquire(keys)
        blocks = lease.blocks
        room = ns.reserve(names(2, "never"))
        started = time.monotonic()
        daemon.stop()
        assert time.monotonic() - started < 5
        assert lease.ended
        assert [bytes(view) for view in blocks] == [payload(k) for k in keys]
        lease.release()
        room.abort()


def test_a_daemon_that_cannot_start_says_why_in_its_log() -> None:
    with (
        pytest.raises(KVStoreError, match="exit code 2"),
        LocalDaemon({**SMALL, "nvme": {"path": "/dev/null/nvme"}}),
    ):
        pass
