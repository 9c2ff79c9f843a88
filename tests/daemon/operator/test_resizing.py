"""Tiers that are resized while their daemon runs: files, memory, blocks, and what can not be."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Client
from kvstore.errors import DeniedError
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import (
    BLOCK,
    SMALL,
    WITH_NVME,
    check_limits,
    eventually,
    got,
    idle,
    names,
    new_layout,
    payloads,
    tier,
)

MIB = 1 << 20


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LocalDaemon]:
    kept = {"changes": tmp_path / "changes.json"}
    with LocalDaemon({**WITH_NVME, "daemon": kept}) as served:
        yield served


def resize(client: Client, name: str, limit_mib: int, **more: Any) -> dict[str, Any]:
    return dict(client.control("change", patch={name: {"limit": f"{limit_mib}MiB"}}, **more))


def settled(client: Client, name: str, mib: int) -> dict[str, Any]:
    """The tier, once it has so much."""
    return eventually(
        lambda: (t := tier(client.status(), name))["capacity_bytes"] == mib * MIB and t, within_s=30
    )


def slabs(daemon: LocalDaemon) -> list[str]:
    folder = daemon.folder / "nvme" / "slabs"
    sizes = {}
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # the daemon removes it just now
            sizes[path.name] = path.stat().st_size
    assert set(sizes.values()) <= {8 * MIB}
    return sorted(sizes)


def shared_mib(pid: int) -> int:
    """Memory that a daemon's extents take, in MiB."""
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # it is closed just now
            if "memfd:kvstore-dram-" in os.readlink(path := f"/proc/{pid}/fd/{fd}"):
                file = os.stat(path)
                found[file.st_ino] = file.st_blocks * 512
    return sum(found.values()) // MIB


def store(ns: Any, keys: list[bytes]) -> int:
    return sum(ns.put(keys[i : i + 50], payloads(keys[i : i + 50])).stored for i in range(0, len(keys), 50))


def stored(ns: Any, keys: list[bytes]) -> int:
    """How many of the chains that `store` made are there, in blocks, every one of them compared."""
    return sum(got(ns, keys[i : i + 50]) for i in range(0, len(keys), 50))


def test_more_dram_keeps_more_blocks_and_less_keeps_fewer_all_of_them_right() -> None:
    settings = {**SMALL, "policy": {"eviction": "lru"}}
    with LocalDaemon(settings) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        settled(client, "dram", 16)
        ns, keys = client.namespace(new_layout()), names(1800)
        store(ns, keys)
        before = client.status()["blocks"]
        assert before < 1100
        assert list(resize(client, "dram", 32)["changed"]) == [f"dram.limit = {32 * MIB}"]
        assert tier(client.status(), "dram")["limit_bytes"] == 32 * MIB
        settled(client, "dram", 32)
        other = client.namespace(new_layout())
        store(other, keys)
        assert client.status()["blocks"] > 1700
        assert stored(other, keys) > 1700
        assert shared_mib(daemon.pid) == 32
        resize(client, "dram", 8)
        settled(client, "dram", 8)
        status = client.status()
        check_limits(status)
        eventually(lambda: shared_mib(daemon.pid) == 8)
        assert 300 < tier(status, "dram")["blocks"] <= 512
        assert 0 < stored(other, keys) + stored(ns, keys) <= 512
        store(client.namespace(new_layout()), keys)
        check_limits(client.status())


def test_readers_and_writers_go_on_while_dram_shrinks_and_grows(daemon: LocalDaemon) -> None:
    with Client(daemon.url, strict=True, deadline_s=10) as client:
        settled(client, "dram", 16)
        layout, keys = new_layout(), names(600)
        ns = client.namespace(layout)
        assert store(ns, keys) == 600
        eventually(lambda: idle(client.status()))
        ends, wrong, reads = threading.Event(), list[str](), [0]

        def read(first: int) -> None:
            with Client(daemon.url, deadline_s=10) as mine:
                space, at = mine.namespace(layout), first
                while not ends.is_set():
                    some = keys[at * 50 % 600 :][:50]
                    with space.acquire(some) as lease:
                        views = [bytes(view) for view in lease.blocks]
                        if b"".join(views) != payloads(some[: len(views)]).tobytes():
                            wrong.append("other bytes in place")
                    if got(space, some) != 50:
                        wrong.append("some are not there")
                    reads[0], at = reads[0] + 1, at + 5

        threads = [threading.Thread(target=read, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        with ns.acquire(keys[:40]) as held:
            for mib in (6, 24, 10):
                resize(client, "dram", mib)
                settled(client, "dram", mib)
                check_limits(client.status())
            held.verify()
            assert np.array_equal(np.stack([np.asarray(b) for b in held.blocks]), payloads(keys[:40]))
        ends.set()
        for thread in threads:
            thread.join()
        assert not wrong
        assert reads[0]
        assert stored(ns, keys) == 600, "what left DRAM is on NVMe"


def test_a_lower_limit_waits_for_leased_and_pinned_blocks() -> None:
    with LocalDaemon(SMALL) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        settled(client, "dram", 16)
        ns, keys = client.namespace(new_layout()), names(900)
        store(ns, keys)
        assert stored(ns, keys) == 900
        leased = [ns.acquire(keys[i : i + 50]) for i in range(0, 900, 50)]
        resize(client, "dram", 2)
        threading.Event().wait(0.2)
        pages = [bytes(b) for lease in leased for b in lease.blocks]
        assert b"".join(pages) == payloads(keys).tobytes()
        beyond = tier(client.status(), "dram")
        assert (beyond["limit_bytes"], beyond["used_bytes"]) == (2 * MIB, 900 * BLOCK)
        assert ns.pin(keys[:4], ttl_s=60) == 4
        for lease in leased:
            lease.release()
        settled(client, "dram", 2)
        assert got(ns, keys[:4]) == 4, "what is pinned stays"


def test_nvme_grows_and_shrinks_with_its_files_and_a_restart_finds_all_of_it(daemon: LocalDaemon) -> None:
    with Client(daemon.url, strict=True, deadline_s=10) as client:
        settled(client, "nvme", 64)
        assert len(slabs(daemon)) == 8
        resize(client, "nvme", 96)
        settled(client, "nvme", 96)
        assert len(slabs(daemon)) == 12
        ns, keys = client.namespace(new_layout()), names(1500)
        for i in range(0, 1500, 50):
            store(ns, keys[i : i + 50])
            eventually(lambda: idle(client.status()))
        resize(client, "nvme", 40)
        settled(client, "nvme", 40)
        eventually(lambda: len(slabs(daemon)) == 5)
        eventually(lambda: idle(client.status()))
        assert stored(ns, keys) == 1500, "there is room for all of it"
        for again in (daemon.restart, daemon.kill):
            again()
            if not daemon.pid:
                daemon.start()
            status = settled(client, "nvme", 40)
            assert status["limit_bytes"] == 40 * MIB
            assert len(slabs(daemon)) == 5
        assert stored(ns, keys) == 1500


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1])
def test_after_a_kill_in_the_middle_the_new_limits_hold(after_s: float, tmp_path: Path) -> None:
    kept = {"changes": tmp_path / "changes.json"}
    with (
        LocalDaemon({**WITH_NVME, "daemon": kept}, supervised=True) as daemon,
        Client(daemon.url, strict=True, deadline_s=10) as client,
    ):
        settled(client, "nvme", 64)
        ns, keys = client.namespace(new_layout()), names(700)
        store(ns, keys)
        eventually(lambda: idle(client.status()))
        client.control("change", patch={"dram": {"limit": "4MiB"}, "nvme": {"limit": "24MiB"}})
        threading.Event().wait(after_s)
        daemon.kill()
        daemon.start()
        settled(client, "dram", 4)
        settled(client, "nvme", 24)
        check_limits(client.status())
        assert (shared_mib(daemon.pid), len(slabs(daemon))) == (4, 3)
        assert stored(ns, keys) == 700
        resize(client, "dram", 16)
        settled(client, "dram", 16)
        daemon.kill()
        daemon.start()
        settled(client, "dram", 16)
        assert shared_mib(daemon.pid) == 16
        assert stored(ns, keys) == 700


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ({"dram": {"limit": "65MiB"}}, ("dram.limit is 65MiB", "four times", "restart")),
        ({"nvme": {"limit": "1GiB"}}, ("nvme.limit is 1GiB", "four times")),
        ({"nvme": {"limit": "6MiB"}}, ("nvme.limit is 6MiB", "one extent", "raise nvme.limit")),
        ({"dram": {"limit": "2MiB"}}, ("dram.limit is 2MiB", "pins keep", "unpin")),
        ({"dram": {"limit": "4MiB"}, "tenants": {"default": {"dram": {"floor": "5MiB"}}}}, ("floors",)),
    ],
)
def test_impossible_changes_are_refused_without_effect(
    daemon: LocalDaemon, patch: dict[str, Any], said: tuple[str, ...]
) -> None:
    with Client(daemon.url, strict=True, deadline_s=10) as client:
        settled(client, "dram", 16)
        settled(client, "nvme", 64)
        ns, keys = client.namespace(new_layout()), names(200)
        store(ns, keys)
        assert ns.pin(keys, ttl_s=60) == 200
        before = client.control("settings")
        for dry_run in (True, False):
            with pytest.raises(DeniedError) as refused:
                client.control("change", patch=patch, dry_run=dry_run)
            for words in said:
                assert words in str(refused.value)
        assert client.control("settings") == before
        assert tier(client.status(), "dram")["limit_bytes"] == 16 * MIB
        assert tier(client.status(), "nvme")["limit_bytes"] == 64 * MIB
