"""The file system below an NVMe folder fills up, turns read-only or is pulled out while the daemon runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.errors import DeniedError, UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.tiers.nvme.tier import REMOVED
from tests.admin.serving import OPERATE, ServedAdmin, settings
from tests.crash import files
from tests.daemon.operator.test_devices import MIB, store, stored, used
from tests.daemons import (
    BLOCK,
    WITH_NVME,
    cli,
    eventually,
    got,
    idle,
    log_of,
    names,
    new_layout,
    payloads,
    tier,
)
from tests.tiers.nvme.disks import Ext4, ext4, small_disk

N = 1500
"""More blocks than DRAM holds."""


@pytest.fixture
def disk(tmp_path: Path) -> Any:
    with ext4(tmp_path / "disk", 160 * MIB) as made:
        yield made


def on(folder: Path, **more: Any) -> dict[str, Any]:
    return {**WITH_NVME, "nvme": {**WITH_NVME["nvme"], "path": folder / "nvme", **more}}


FAILURES: dict[str, Callable[[Ext4], None]] = {"read-only": Ext4.abort, "pulled out": Ext4.pull}


@pytest.mark.parametrize("failure", FAILURES)
def test_dram_is_served_while_the_file_system_fails_and_nothing_committed_is_lost(
    disk: Ext4, failure: str
) -> None:
    readable = failure == "read-only"
    with LocalDaemon({**on(disk.folder), "admin": settings()}) as daemon, ServedAdmin(daemon) as admin:
        with Client(daemon.url, strict=True, deadline_s=10) as client:
            layout, old, new = new_layout(), names(N, "old"), names(800, "new")
            ns = client.namespace(layout)
            store(ns, old)
            eventually(lambda: idle(client.status()))
            FAILURES[failure](disk)
            assert store(ns, new) == len(new)
            eventually(lambda: not tier(client.status(), "nvme")["writable"])
            began = time.monotonic()
            assert stored(ns, new) == len(new), "DRAM has them"
            found = stored(ns, old)
            assert found == N if readable else found < N
            assert time.monotonic() - began < 10
            # It says so: in status, metrics, events, /readyz and the log.
            nvme = eventually(lambda: (t := tier(client.status(), "nvme"))["readable"] is readable and t)
            assert not nvme["writable"]
            shown = lambda line: line in admin.get("/metrics", OPERATE).body  # noqa: E731
            eventually(lambda: shown(b'kvstore_tier_writable{tier="nvme"} 0.0'))
            assert shown(b'kvstore_tier_readable{tier="nvme"} 0.0') is not readable
            ready = admin.get("/readyz", OPERATE)
            assert (ready.status, b"are suspended after failures" in ready.body) == (503, True)
            told = client.control("events", what=["unwritable", "unreadable"])["events"]
            expected = {"unwritable"} if readable else {"unwritable", "unreadable"}
            assert {event["what"] for event in told} == expected
            log = log_of(daemon)
            assert f"a write in {disk.folder}/nvme/slabs failed: " in log
            assert "nvme: Writes to a device are suspended" in log
            why = "Read-only file system" if readable else "Input/output error"
            with pytest.raises(DeniedError, match=f"it could not be recorded: .*{why} .is there room"):
                ns.invalidate(new[:10])
            assert got(ns, new[:10]) == 0, "misses now, though they may come back"
            assert "Traceback" not in log_of(daemon)
        daemon.stop()
        with pytest.raises(UnavailableError, match=f"cannot use folder {disk.folder}/nvme: {why}"):
            daemon.start()
        disk.unmount()
        assert disk.mount()
        committed = {record.key for record in files.records(disk.folder / "nvme")}
        assert set(old) <= committed
        daemon.start()
        with Client(daemon.url, strict=True, deadline_s=10) as client:
            ns = client.namespace(layout)
            assert {key for key in (*old, *new) if got(ns, [key])} == committed
            assert tier(client.status(), "nvme")["writable"]
            assert client.status()["counters"].get("quarantined_blocks", 0) == 0


@pytest.mark.parametrize("name", ["nvme", "nvme1"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_device_whose_file_system_fails_can_be_removed_and_added_again(
    disk: Ext4, tmp_path: Path, failure: str, name: str
) -> None:
    good = tmp_path / "good"
    good.mkdir()
    bad = disk.folder / "nvme"
    bad.mkdir(mode=0o700)
    first, second = (bad, good) if name == "nvme" else (good, bad)
    nvme = {"path": first, "limit": "32MiB", "devices": {"nvme1": {"path": second, "limit": "32MiB"}}}
    with LocalDaemon({**WITH_NVME, "nvme": nvme}) as daemon:
        with Client(daemon.url, strict=True, deadline_s=10) as client:
            layout, keys, other = new_layout(), names(N), "nvme1" if name == "nvme" else "nvme"
            ns = client.namespace(layout)
            store(ns, keys)
            eventually(lambda: idle(client.status()))
            held = used(client)
            FAILURES[failure](disk)
            with pytest.raises(DeniedError, match="could not be recorded"):
                ns.invalidate(keys[:10])
            with Pings(daemon) as pings:
                assert "is gone" in cli("device", "remove", name, "--socket", str(daemon.socket)).stdout
                eventually(lambda: name not in used(client), within_s=60)
            assert pings.longest_s < 2
            [said] = [each for each in client.status()["problems"] if "removed as it is" in each]
            assert said.startswith(f"{name} fails")
            # Deletions are durable again, and the blocks of the other device are all there.
            assert used(client)[other] >= held[other] - 10 * BLOCK, "all but what was invalidated"
            ns.invalidate(keys[10:20])
            assert stored(ns, keys[50:]) > N // 4
            # Files of the folder are closed: the drive can be replaced.
            eventually(lambda: not _open_files(daemon.pid, disk.folder))
            disk.unmount()
            assert disk.make()
            bad.mkdir(mode=0o700)
            added = cli("device", "add", name, str(bad), "--limit", "32MiB", "--socket", str(daemon.socket))
            assert "is new" in added.stdout
            store(ns, keys[20:])
            eventually(lambda: used(client).get(name, 0) > MIB)
            eventually(lambda: idle(client.status()))
            assert "Traceback" not in log_of(daemon)
        daemon.restart()
        with Client(daemon.url, strict=True, deadline_s=10) as client:
            ns = client.namespace(layout)
            assert set(used(client)) == {"dram", "nvme", "nvme1"}
            assert not any(got(ns, [key]) for key in keys[10:20])
            assert stored(ns, keys[50:]) > N // 2


def test_a_device_that_failed_and_comes_back_brings_no_deleted_block(disk: Ext4, tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir()
    device = {"path": good, "limit": "32MiB"}
    with LocalDaemon(on(disk.folder, limit="32MiB", devices={"nvme1": device})) as daemon:
        with Client(daemon.url, strict=True, deadline_s=10) as client:
            layout, keys = new_layout(), names(N)
            ns = client.namespace(layout)
            store(ns, keys)
            eventually(lambda: idle(client.status()))
            ns.invalidate(keys[-10:])
            disk.pull()
            client.control("change", patch={"nvme": {"path": None}})
            eventually(lambda: "nvme" not in used(client), within_s=60)
            ns.invalidate(keys[:50])
            assert ns.put(keys[:50], payloads(keys[:50], salt=1)).stored == 50
            eventually(lambda: idle(client.status()))
            daemon.stop()
        disk.unmount()
        assert disk.mount()
        assert not (disk.folder / "nvme" / REMOVED).exists(), "nothing could be noted there"
        assert files.records(disk.folder / "nvme")
        daemon.start()
        with Client(daemon.url, strict=True, deadline_s=10) as client:
            ns = client.namespace(layout)
            assert got(ns, keys[:50], salt=1) == 50
            assert "was absent while blocks were invalidated" in log_of(daemon)


def test_a_full_file_system_is_used_again_when_there_is_room(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with small_disk("mount", folder, 80 * MIB):
        ballast = folder / "ballast"
        with LocalDaemon(on(folder)) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
            eventually(lambda: tier(client.status(), "nvme")["capacity_bytes"] == 64 * MIB)
            layout, keys = new_layout(), names(3000)
            ns = client.namespace(layout)
            store(ns, keys[:200])
            eventually(lambda: idle(client.status()))
            with ballast.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(MIB)):
                    pass
            with ballast.open("ab", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            for i in range(200, 3000, 50):
                ns.put(keys[i : i + 50], payloads(keys[i : i + 50]))
                assert got(ns, keys[i : i + 50]) == 50, "DRAM takes and serves them"
                if not tier(client.status(), "nvme")["writable"]:
                    break
            assert not tier(client.status(), "nvme")["writable"]
            assert "is there room on the disk?" in log_of(daemon)
            assert stored(ns, keys[:200]) == 200
            ballast.unlink()
            eventually(lambda: tier(client.status(), "nvme")["writable"], within_s=40)
            before = used(client)["nvme"]
            store(ns, names(400, "later"))
            eventually(lambda: idle(client.status()) and used(client)["nvme"] > before + 3 * MIB)
            daemon.kill()
            committed = {record.key for record in files.records(folder / "nvme")}
            daemon.start()
            ns = client.namespace(layout)
            everything = [*keys, *names(400, "later")]
            assert {key for key in everything if got(ns, [key])} == committed
            assert set(keys[:200]) <= committed


class Pings:
    """A client that does nothing but ask. `longest_s` is its longest wait."""

    def __init__(self, daemon: LocalDaemon) -> None:
        self.longest_s = 0.0
        self._url = daemon.url
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Pings:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        with Client(self._url, strict=True, deadline_s=10) as client:
            while not self._done.is_set():
                began = time.monotonic()
                client.ping()
                self.longest_s = max(self.longest_s, time.monotonic() - began)


def _open_files(pid: int, folder: Path) -> list[str]:
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.append(str(fd.readlink()))
    return [name for name in found if name.startswith(str(folder))]
