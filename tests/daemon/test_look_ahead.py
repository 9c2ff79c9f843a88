"""Look-ahead with a real device: the next part of a chain is there before it is asked for."""

from __future__ import annotations

from typing import Any

from kvstore import Client, Tier
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import WITH_NVME, eventually, got, idle, names, new_layout, payloads


def stored_below(client: Client, n: int) -> tuple[Any, list[bytes]]:
    """A chain that only NVMe has any more."""
    ns, keys = client.namespace(new_layout()), names(n)
    assert ns.put(keys, payloads(keys)).stored == n
    filler = client.namespace(new_layout())
    for i in range(12):
        part = names(128, f"filler {i}")
        eventually(lambda part=part: not filler.put(part, payloads(part)).denied, 60.0)
    eventually(lambda: idle(client.status()))
    return ns, keys


def test_following_blocks_are_promoted_with_requested_blocks() -> None:
    settings = {**WITH_NVME, "nvme": {**WITH_NVME["nvme"], "prefetch_blocks": 16}}
    with LocalDaemon(settings) as daemon, Client(daemon.url, deadline_s=10, strict=True) as client:
        ns, keys = stored_below(client, 64)
        with ns.acquire(keys[:16]) as lease:
            assert set(lease.tiers) == {Tier.NVME}
        eventually(lambda: idle(client.status()))
        assert client.status()["counters"]["ahead_blocks"] == 16
        with ns.acquire(keys[:32]) as lease:
            assert set(lease.tiers) == {Tier.DRAM}
        assert got(ns, keys) == 64


def test_nothing_is_prefetched_by_default() -> None:
    with LocalDaemon(WITH_NVME) as daemon, Client(daemon.url, deadline_s=10, strict=True) as client:
        ns, keys = stored_below(client, 64)
        with ns.acquire(keys[:16]) as lease:
            assert len(lease) == 16
        eventually(lambda: idle(client.status()))
        assert "ahead_blocks" not in client.status()["counters"]
        with ns.acquire(keys[:32]) as lease:
            assert set(lease.tiers[16:]) == {Tier.NVME}
