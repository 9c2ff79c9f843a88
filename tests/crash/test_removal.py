"""The first of two NVMe devices is removed, and each step of that fails or ends with a kill."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client, Layout
from kvstore.errors import UnavailableError
from kvstore.tiers.nvme.tier import REMOVED
from tests.crash import files
from tests.crash.shimmed import ShimmedDaemon
from tests.crash.steps import AT_ONCE, BLOCK, Puts, steps_done
from tests.daemons import eventually, log_of, names, room_for

FAULTS = {"commit": ("kill", "ENOSPC"), "apply": ("kill",), "committed": ("kill",), "unlink": ("kill", "EIO")}
"""By step, what happens there."""

SHARED = "commit", "apply", "committed"
"""Steps of which there are fewer where more changes share a commit."""

LAYOUT = Layout(model="removal", block_bytes=BLOCK)
BLOCKS = 12
_TRIES = 4


def settings(folder: Path, kept: bool) -> dict[str, Any]:
    second = folder / "second"
    second.mkdir()
    device = {"path": second, "limit": 16 << 20}
    nvme = {"limit": 16 << 20, "io_threads": 2, "devices": {"nvme1": device}}
    dram = {"limit": 16 << 20, "huge_pages": False}
    daemon = {"changes": folder / "changes.json"} if kept else {}
    return {"dram": dram, "nvme": nvme, "daemon": daemon}


def load(daemon: ShimmedDaemon) -> Puts:
    puts = Puts()
    with Client(daemon.url, deadline_s=10, strict=True) as client:
        puts.run(client.namespace(LAYOUT), client, names(BLOCKS, "removal"))
    return puts


def remove(daemon: ShimmedDaemon, since: Path) -> bool:
    """Lets steps count and removes the first device. Returns whether the daemon is still there."""
    since.touch()
    try:
        with Client(daemon.url, deadline_s=10, strict=True) as client:
            client.control("change", patch={"nvme": {"path": None}})
            eventually(lambda: left(client))
        eventually((daemon.folder / "nvme" / REMOVED).exists)
    except UnavailableError:
        return False
    return True


def left(client: Client) -> bool:
    return all(tier["name"] != "nvme" for tier in client.status()["tiers"])


def all_steps() -> list[tuple[str, str]]:
    """Every step of a removal with every fault: the steps that all runs reach, see `steps.all_steps`."""
    done = reduce(and_, (_count() for _ in range(3)))
    assert set(done) == set(FAULTS)
    return [
        (f"{step}:{n}", fault)
        for step, faults in FAULTS.items()
        for n in range(1, done[step] + 1)
        for fault in faults
    ]


def _count() -> Counter[str]:
    """Returns how many of each step a removal has."""
    with tempfile.TemporaryDirectory(prefix="kvstore-removal-") as name:
        log, since = Path(name) / "steps", Path(name) / "since"
        with ShimmedDaemon(settings(Path(name), True), ["--log", str(log), "--from", str(since)]) as daemon:
            assert len(load(daemon).written) == BLOCKS
            assert remove(daemon, since)
            return Counter({step: n for step, n in steps_done(log).items() if step in FAULTS})


def visit(at: str, fault: str, kept: bool) -> list[str]:
    """What is wrong after the removal met a fault and the daemon was started again.

    A step that is not reached is tried again. It may be missing if changes shared a commit each time.
    """
    problems: list[str] = []
    for _ in range(_TRIES):
        with tempfile.TemporaryDirectory(prefix="kvstore-removal-") as name:
            problems = _visit(Path(name), at, fault, kept)
        if problems != ["not reached"]:
            break
    else:
        step, _, number = at.partition(":")
        if step in SHARED and int(number) > 1:
            return []
    return [f"{fault} at {at}, {'kept' if kept else 'not kept'}: {problem}" for problem in problems]


def _visit(folder: Path, at: str, fault: str, kept: bool) -> list[str]:
    problems = []
    since = folder / "since"
    with ShimmedDaemon(settings(folder, kept), ["--at", at, "--do", fault, "--from", str(since)]) as daemon:
        puts = load(daemon)
        lives = remove(daemon, since)
        daemon.kill()
        if f"shim: {fault} at {at}" not in log_of(daemon):
            return ["not reached"]
        first, second = daemon.folder / "nvme", folder / "second"
        is_kept = kept and json.loads((folder / "changes.json").read_text()) == {"nvme": {"path": None}}
        if kept and not is_kept:
            problems.append("the change was answered or applied before it was kept")
        noted = (first / REMOVED).exists()
        there = [second] if is_kept or noted else [first, second]
        committed = {record.key for each in there for record in files.records(each)}
        if lives and not noted:
            problems.append("the device is gone without a note")
        daemon.options = []
        daemon.start()
        with Client(daemon.url, deadline_s=10, strict=True) as client:
            if left(client) is not (len(there) == 1):
                problems.append("the first device is there, or not, against its note and the configuration")
            served = _served(client, puts, problems)
            if served != committed:
                problems.append(f"{len(served ^ committed)} blocks are served or on record, but not both")
            if not left(client):
                client.control("change", patch={"nvme": {"path": None}})
                eventually(lambda: left(client))
            if client.status()["counters"].get("quarantined_blocks", 0):
                problems.append("records did not prove their slots")
        if any(word in log_of(daemon) for word in ("Traceback", "AssertionError")):
            problems.append(f"a traceback in the log: {daemon.log_tail()}")
    return problems


def _served(client: Client, puts: Puts, problems: list[str]) -> set[bytes]:
    served = set()
    ns = client.namespace(LAYOUT)
    for key, entry in puts.book.entries.items():
        out = room_for(1, BLOCK)
        if ns.get([key], out):
            served.add(key)
            problems += filter(None, [puts.book.wrong(key, entry.floor, out[0].data)])
    return served


@pytest.mark.long
def test_whichever_step_of_a_removal_fails_no_block_of_another_device_is_lost() -> None:
    visits = [(*step, n % 3 > 0) for n, step in enumerate(all_steps())]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(visit, *zip(*visits, strict=True)))
    assert not [problem for problems in found for problem in problems]
    assert len(visits) > BLOCKS
