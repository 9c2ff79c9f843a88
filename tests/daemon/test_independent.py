"""Independent namespaces in real daemons: restarts from NVMe and from kept memory, and the network tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Client, Tier
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.tiers.network import objects
from kvstore.tiers.network.base import Name
from kvstore.types import Layout
from tests.daemons import SMALL, WITH_NVME, eventually, got, names, new_layout, payloads, tier

KEYS = names(40)
STORED = KEYS[::2]


def independent() -> Layout:
    return replace(new_layout(), kind="independent")


def check(ns: Any) -> None:
    """The namespace has every second key, and is one of independent blocks."""
    assert ns.contains(KEYS).tolist() == [i % 2 == 0 for i in range(len(KEYS))]
    assert ns.lookup(KEYS) == 1
    assert got(ns, STORED[::-1]) == len(STORED)


def links(client: Client, key: bytes) -> tuple[str, int]:
    """(parent, children) of a block."""
    [state] = client.explain([key])
    return state["parent"], state["children"]


def test_records_on_nvme_keep_the_kind() -> None:
    layout = independent()
    with LocalDaemon(WITH_NVME) as daemon:
        with Client(daemon.url, deadline_s=10) as client:
            assert client.namespace(layout).put(STORED, payloads(STORED)).stored == len(STORED)
        daemon.restart()
        with Client(daemon.url, deadline_s=10, strict=True) as client:
            # Nobody has opened the namespace since: the records alone tell the kind.
            [found] = client.control("namespaces")["namespaces"]
            assert found["layout"] == layout.to_map()
            assert found["layout"]["kind"] == "independent"
            assert links(client, STORED[1]) == (b"", 0)
            ns = client.namespace(layout)
            check(ns)
            assert ns.invalidate(STORED[:1]) == 1
            [state] = client.explain(STORED[:1])
            assert state["state"] == "not stored", "no hole"


@pytest.mark.parametrize("settings", [SMALL, WITH_NVME], ids=["memory alone", "with NVMe"])
def test_memory_that_is_kept_serves_independent_blocks(settings: dict[str, Any]) -> None:
    layout = independent()
    with LocalDaemon(settings, supervised=True) as daemon, Client(daemon.url, deadline_s=10) as client:
        ns = client.namespace(layout)
        assert ns.put(STORED, payloads(STORED)).stored == len(STORED)
        daemon.kill()
        daemon.start()
        with ns.acquire(STORED) as lease:
            assert set(lease.tiers) == {Tier.DRAM}
        check(ns)
        assert client.status()["counters"]["restored_blocks_dram"] == len(STORED)
        assert links(client, STORED[1]) == (b"", 0)
        assert ns.put(KEYS[1:2], payloads(KEYS[1:2])).stored == 1


def test_independent_blocks_are_evicted_to_nvme_and_promoted_one_by_one() -> None:
    many = names(1500)
    with LocalDaemon(WITH_NVME) as daemon, Client(daemon.url, deadline_s=20) as client:
        ns = client.namespace(independent())
        for at in range(0, len(many), 100):
            assert ns.put(many[at : at + 100], payloads(many[at : at + 100])).denied == 0
        assert tier(client.status(), "dram")["used_bytes"] <= 16 << 20
        assert ns.contains(many).all()
        some = [many[i] for i in np.random.default_rng(1).permutation(len(many))[:200]]
        assert got(ns, some) == 200


def test_the_network_serves_independent_blocks_beside_those_of_the_node(tmp_path: Path) -> None:
    layout, shared = independent(), tmp_path / "shared"
    settings = {**SMALL, "network": {"url": f"file://{shared}"}}
    with LocalDaemon(settings) as first, LocalDaemon(settings) as second:
        a, b = (Client(each.url, deadline_s=20, strict=True) for each in (first, second))
        with a, b:
            for client in (a, b):
                eventually(lambda client=client: client.status()["network"]["usable"])
            ours, theirs = a.namespace(layout), b.namespace(layout)
            ours.put(STORED, payloads(STORED))
            assert ours.handoff(STORED, deadline_s=20) == len(STORED)
            raw = (shared / objects.path(Name(layout.fingerprint(), STORED[3]))).read_bytes()
            header = objects.parse(raw)
            assert header is not None
            assert header.parent == b""
            # Blocks of this node lie between those of the network.
            theirs.put(KEYS[1:6:2], payloads(KEYS[1:6:2]))
            assert theirs.contains(KEYS).tolist() == [i % 2 == 0 or i < 6 for i in range(len(KEYS))]
            assert theirs.lookup(KEYS) == 7
            with theirs.acquire(KEYS) as lease:
                assert lease.verify() == 7
            assert b.status()["network"]["counters"]["hit_blocks"] == 4, "the node had the other three"
            assert got(theirs, STORED[::-1]) == len(STORED)
            assert links(b, STORED[2]) == (b"", 0)
            assert theirs.prefetch(KEYS) == 7
