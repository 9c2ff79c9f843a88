"""A wall clock that jumps: what was stored stays, and the order in which it goes is the order of its use."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import Client
from kvstore.types import Layout
from tests.crash.shimmed import ShimmedDaemon
from tests.daemons import BLOCK, eventually, names, payloads

YEAR_S = 365 * 86400
LAYOUT = Layout(model="clock", block_bytes=BLOCK)
SETTINGS = {
    "policy": {"eviction": "lru"},  # whose order is known
    "scrub": {"rate": 0},  # a block that is being looked at is not evicted: another goes for it
    "dram": {"limit": 16 << 20, "huge_pages": False},
    "nvme": {"limit": 16 << 20, "io_threads": 2},
}
SLOTS = 1024
CHAIN = 20


@pytest.mark.parametrize("years", [-1, 1])
def test_jumps_of_the_clock_lose_nothing_and_keep_the_order(tmp_path: Path, years: int) -> None:
    clock = tmp_path / "clock"
    clock.write_text("0")
    old, new, last = (_chains(n, prefix) for n, prefix in ((15, "old"), (15, "new"), (30, "last")))
    with ShimmedDaemon(SETTINGS, ["--clock", str(clock)]) as daemon:
        _store(daemon, old)
        clock.write_text(str(years * YEAR_S))  # inside a run
        _store(daemon, new)
        daemon.kill()
        clock.write_text("0")  # and between two
        daemon.start()
        assert _there(daemon, old + new) == CHAIN * len(old + new)
        _store(daemon, last)
        # Only the oldest blocks had to go.
        assert _there(daemon, new + last) == CHAIN * len(new + last)
        assert _there(daemon, old) <= SLOTS - CHAIN * len(new + last)
        daemon.kill()
        daemon.start()
        assert _there(daemon, new + last) == CHAIN * len(new + last)


def _chains(n: int, prefix: str) -> list[list[bytes]]:
    return [names(CHAIN, f"{prefix}/{i}") for i in range(n)]


def _store(daemon: ShimmedDaemon, chains: list[list[bytes]]) -> None:
    """Puts chains, each when the one before it is on NVMe."""
    with Client(daemon.url, deadline_s=20, strict=True) as client:
        for keys in chains:
            wanted = _written(client) + CHAIN
            assert client.namespace(LAYOUT).put(keys, payloads(keys)).stored == len(keys)
            eventually(lambda wanted=wanted: _written(client) == wanted)


def _written(client: Client) -> int:
    return int(client.status()["counters"].get("written_blocks", 0))


def _there(daemon: ShimmedDaemon, chains: list[list[bytes]]) -> int:
    with Client(daemon.url, deadline_s=20, strict=True) as client:
        return sum(client.namespace(LAYOUT).lookup(keys) for keys in chains)
