"""Runs a daemon to measure. All its extents are ready before the first block is put."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness import expect
from kvstore import Client, Layout, native
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.types import extent_bytes

_WITHIN_S = 60.0
_TABLE_WITHIN_S = 120.0


@contextmanager
def serve(
    dram_bytes: int, nvme: tuple[Path, int] | None = None, hbm_bytes: int = 0, **more: dict[str, object]
) -> Iterator[tuple[Client, LocalDaemon]]:
    """Yields a strict client and its daemon. `nvme`: folder and limit in bytes; `hbm_bytes`: pool per GPU.

    `more`: further sections of the settings. The default eviction policy is `lru`, which refuses no block.
    """
    settings: dict[str, dict[str, object]] = {
        "dram": {"limit": dram_bytes},
        "hbm": {"limit": hbm_bytes},
        "policy": {"eviction": "lru"},
        **more,
    }
    if nvme is not None:
        settings["nvme"] = {"path": nvme[0], "limit": nvme[1]}
    with LocalDaemon(settings) as daemon, Client(daemon.url, deadline_s=30.0, strict=True) as client:
        wait_until(client, complete)
        yield client, daemon


def wait_until(
    client: Client, done: Callable[[dict[str, Any]], bool], pause_s: float = 0.01, within_s: float = _WITHIN_S
) -> None:
    """Waits until the status of the daemon satisfies `done`. Raises TimeoutError after `within_s`."""
    ends = time.monotonic() + within_s
    while not done(client.status()):
        if time.monotonic() > ends:
            raise TimeoutError(f"the daemon did not get there within {within_s:g} s")
        time.sleep(pause_s)


def wait_for_table(client: Client, layout: Layout, keys: list[bytes]) -> None:
    """Returns when lookups need no request, at once if they need one anyway, without the native module."""
    ends, space = time.monotonic() + _TABLE_WITHIN_S, client.namespace(layout)
    while native.presence is not None:
        expect(space.lookup(keys), len(keys), "blocks found")
        table = client._maps.presence.get(layout.fingerprint("default"))
        if table is not None and table.find(keys, leading=True) is not None:
            return
        expect(time.monotonic() < ends, True, "presence table filled in time")
        time.sleep(0.01)


def complete(status: dict[str, Any]) -> bool:
    return all(
        tier["capacity_bytes"] > tier["limit_bytes"] - extent_bytes(tier["limit_bytes"])
        for tier in status["tiers"]
    )
