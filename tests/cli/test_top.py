"""`kvstore top`: rates between two samples."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from kvstore import Client
from kvstore.cli.top import between, sample
from kvstore.errors import DeniedError
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import SMALL, WITH_NVME, cli, names, new_layout, payloads
from tests.tenants import VICTIM, Member, TenantDaemon, needs_root


def test_top_shows_current_requests() -> None:
    with LocalDaemon(WITH_NVME) as daemon, Client(daemon.url, deadline_s=10, strict=True) as client:
        ns, keys = client.namespace(new_layout()), names(20)
        ns.put(keys, payloads(keys))
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                with ns.acquire([*keys, *names(20, "absent")]) as lease:
                    assert len(lease) == 20

        reading = threading.Thread(target=read)
        reading.start()
        try:
            args = ("--socket", str(daemon.socket), "--every", "0.5s", "--count", "2")
            done = cli("top", *args, "--json")
            text = cli("top", *args)
        finally:
            stop.set()
            reading.join()
    assert (done.returncode, done.stderr) == (0, "")
    looks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(looks) == 2
    for look in looks:
        assert look["seconds"] >= 0.5
        assert look["hit_ratio"] == pytest.approx(0.5, abs=0.1)
        dram, nvme = look["tiers"]
        assert (dram["name"], nvme["name"]) == ("dram", "nvme")
        assert dram["hit_blocks_per_s"] > 0
        # Found blocks count at once, delivered blocks when their lease ends.
        served = pytest.approx(dram["hit_blocks_per_s"] * ns.layout.block_bytes, rel=0.2)
        assert dram["served_bytes_per_s"] == served
        [acquire] = [call for call in look["calls"] if call["call"] == "acquire"]
        assert acquire["per_s"] > 0
        assert 0 < acquire["p50_s"] <= acquire["p99_s"] < 10
        assert look["tenants"][0]["tenant"] == "default"
    assert "acquire" in text.stdout
    assert "% delivered" in text.stdout


def look(at: float, instance: str = "a", **more: Any) -> dict[str, Any]:
    nothing: dict[str, Any] = {
        **{"uptime_s": 1.0, "blocks": 0, "connections": 1, "queued_requests": 0, "problems": []},
        **{"tiers": [], "calls": [], "hits": [], "decisions": [], "devices": [], "holdings": []},
        **{"bounds_s": [0.1, 0.2], "at": at, "instance": instance},
    }
    return nothing | more


def test_rates_are_increments_since_the_previous_sample() -> None:
    def hits(found: int, misses: int, delivered: int) -> list[dict[str, Any]]:
        rows = (
            ("requested", "", found + misses),
            ("found", "dram", found),
            ("missed", "", misses),
            ("delivered", "dram", delivered),
            ("too_late", "", found - delivered),
        )
        return [
            {"tenant": "a", "what": what, "tier": t, "blocks": n, "tokens": 0, "bytes": 8 * n}
            for what, t, n in rows
        ]

    def calls(*counts: int) -> list[dict[str, Any]]:
        return [{"call": "lookup", "waited": False, "counts": list(counts), "sum_s": 0.0}]

    holdings = [
        {"tenant": "a", "tier": "dram", "used_bytes": 64},
        {"tenant": "", "tier": "dram", "used_bytes": 1},
    ]
    before = look(10.0, hits=hits(100, 100, 100), calls=calls(50, 0, 0))
    now = look(12.0, hits=hits(130, 110, 120), calls=calls(50, 98, 2), holdings=holdings)
    seen = between(before, now)
    assert (seen["hit_ratio"], seen["delivered_ratio"]) == (0.75, 0.5)
    assert (seen["requested_blocks_per_s"], seen["too_late_blocks_per_s"]) == (20.0, 5.0)
    assert seen["missed_blocks_per_s"] == 5.0
    assert seen["calls"] == [{"call": "lookup", "per_s": 50.0, "p50_s": 0.2, "p99_s": 0.2}]
    assert [(t["tenant"], t["asked_blocks_per_s"], t["hit_ratio"]) for t in seen["tenants"]] == [
        ("a", 20.0, 0.75),
        ("", 0.0, None),
    ]
    nothing = between(now, look(13.0, hits=hits(130, 110, 120), calls=now["calls"]))
    assert nothing["hit_ratio"] is None
    assert nothing["calls"] == [{"call": "lookup", "per_s": 0.0, "p50_s": None, "p99_s": None}]
    other = between(now, look(14.0, "b", hits=hits(4, 0, 4), calls=calls(1, 0, 0)))
    assert (other["hit_ratio"], other["calls"][0]["per_s"]) == (1.0, 0.5)


@pytest.mark.parametrize("every", ["0", "2h", "soon"])
def test_an_invalid_interval_is_refused(every: str) -> None:
    done = cli("top", "--every", every)
    assert done.returncode == 2
    assert "--every" in done.stderr


def test_top_without_a_daemon_fails_with_a_message() -> None:
    done = cli("top", "--socket", "/nowhere/kvstore.sock", "--count", "1")
    assert done.returncode == 2
    assert "no answer from the daemon" in done.stderr


@needs_root
def test_tenants_cannot_watch_others() -> None:
    with (
        TenantDaemon(SMALL, f"[tenants.chat]\nuids = [{VICTIM}]\n") as daemon,
        Member(daemon, VICTIM) as member,
        pytest.raises(DeniedError, match="only operators"),
    ):
        sample(member)
