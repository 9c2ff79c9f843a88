"""A disk that is full, and one that takes no writes for a while."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.types import Layout
from tests.crash import files
from tests.crash.shimmed import ShimmedDaemon
from tests.daemons import (
    BLOCK,
    WITH_NVME,
    check_limits,
    eventually,
    got,
    log_of,
    names,
    payload,
    payloads,
    room_for,
)
from tests.tiers.nvme.disks import small_disk

LAYOUT = Layout(model="disk", block_bytes=BLOCK)


def test_a_kill_on_a_full_disk_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    """The slabs leave no room, so that records are what meets the end of the disk."""
    with small_disk("mount", tmp_path / "disk", (8 << 20) + (200 << 10)):
        folder = tmp_path / "disk" / "nvme"
        settings = {"dram": WITH_NVME["dram"], "nvme": {"path": folder, "limit": 16 << 20, "io_threads": 2}}
        chains = [names(16, f"full/{i}") for i in range(200)]
        put: set[bytes] = set()
        with LocalDaemon(settings) as daemon:
            eventually(lambda: "bytes free" in log_of(daemon))  # no more slabs: LMDB gets what is left
            for seed in range(3):
                _fill_until_killed(daemon, chains[seed::3], put)
                committed = {record.key for record in files.records(folder)}
                assert committed
                daemon.start()
                with Client(daemon.url, deadline_s=20, strict=True) as client:
                    ns = client.namespace(LAYOUT)
                    for key in put:
                        out = room_for(1)
                        assert ns.get([key], out) or key not in committed
                        assert not out.any() or out[0].tobytes() == payload(key)
                    status = client.status()
                    assert "quarantined_blocks" not in status["counters"]
                    check_limits(status)
            assert "the disk is full" in log_of(daemon)


def _fill_until_killed(daemon: LocalDaemon, chains: list[list[bytes]], put: set[bytes]) -> None:
    killed = threading.Event()

    def load() -> None:
        with Client(daemon.url, deadline_s=5) as client:
            for keys in chains:
                if killed.is_set():
                    return
                put.update(keys)
                client.namespace(LAYOUT).put(keys, payloads(keys))

    thread = threading.Thread(target=load)
    thread.start()
    time.sleep(0.15)  # the moment of the kill, not a wait for anything
    killed.set()
    daemon.kill()
    thread.join()


def test_reads_go_on_where_nothing_can_be_written(tmp_path: Path) -> None:
    """By the shim: no file system can be remounted read-only while a daemon has its files open."""
    read_only = tmp_path / "read-only"
    old, meanwhile, after = names(100, "old"), names(4, "meanwhile"), names(100, "after")
    settings = {
        "dram": {"limit": 16 << 20, "huge_pages": False},
        "nvme": {"limit": 32 << 20, "io_threads": 2},
    }
    with ShimmedDaemon(settings, ["--while", str(read_only), "--do", "EROFS"]) as daemon:
        with Client(daemon.url, deadline_s=20, strict=True) as client:
            ns = client.namespace(LAYOUT)
            assert ns.put(old, payloads(old)).stored == len(old)
            eventually(lambda: client.status()["counters"].get("written_blocks", 0) == len(old))
            read_only.touch()
            assert ns.put(meanwhile, payloads(meanwhile)).stored == len(meanwhile)
            eventually(lambda: client.status()["counters"].get("failed_blocks", 0) == len(meanwhile))
            assert "Read-only file system" in log_of(daemon)
            assert got(ns, old) == len(old)
            assert got(ns, meanwhile) == len(meanwhile)
            read_only.unlink()
            assert ns.put(after, payloads(after)).stored == len(after)
            written = len(old) + len(after)
            eventually(lambda: client.status()["counters"].get("written_blocks", 0) >= written)
        daemon.kill()
        on_record = {record.key for record in files.records(daemon.folder / "nvme")}
        assert on_record >= {*old, *after}
        daemon.options = []
        daemon.start()
        with Client(daemon.url, deadline_s=20, strict=True) as client:
            ns = client.namespace(LAYOUT)
            assert got(ns, old) == len(old)
            assert got(ns, after) == len(after)
            assert [got(ns, [key]) for key in meanwhile] == [key in on_record for key in meanwhile]
