"""Several devices in the NVMe tier of a real daemon: they share the work, come and go, break one by one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvstore import Client
from kvstore.config import parse
from kvstore.daemon import lifecycle
from kvstore.daemon.composition import Daemon
from kvstore.daemon.main import open_tiers
from kvstore.errors import DeniedError
from kvstore.lab.local_daemon import LocalDaemon
from tests.admin.serving import OPERATE, ServedAdmin, problem, settings
from tests.admin.test_changes import change
from tests.daemons import (
    SMALL,
    WITH_NVME,
    check_limits,
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
from tests.tiers.nvme.old_format import to_format_4

MIB = 1 << 20
N = 2400


@pytest.fixture
def second(tmp_path: Path) -> Path:
    folder = tmp_path / "second"
    folder.mkdir()
    return folder


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LocalDaemon]:
    """One device of 64 MiB; changes are kept."""
    with LocalDaemon({**WITH_NVME, "daemon": {"changes": tmp_path / "changes.json"}}) as served:
        yield served


def both(second: Path, **more: Any) -> dict[str, Any]:
    """Settings with two devices of 32 MiB."""
    device = {"path": second, "limit": "32MiB"}
    nvme = {**WITH_NVME["nvme"], "limit": "32MiB", "devices": {"nvme1": device}}
    return {**WITH_NVME, "nvme": nvme, **more}


def add(client: Client, folder: Path, limit_mib: int = 64, **more: Any) -> dict[str, Any]:
    device = {"path": str(folder), "limit": limit_mib * MIB}
    return dict(client.control("change", patch={"nvme": {"devices": {"nvme1": device}}}, **more))


def remove(client: Client, **more: Any) -> dict[str, Any]:
    return dict(client.control("change", patch={"nvme": {"devices": {"nvme1": None}}}, **more))


def store(ns: Any, keys: list[bytes]) -> int:
    return sum(ns.put(keys[i : i + 50], payloads(keys[i : i + 50])).stored for i in range(0, len(keys), 50))


def stored(ns: Any, keys: list[bytes]) -> int:
    """How many of the chains that `store` made are there, in blocks, every one of them compared."""
    return sum(got(ns, keys[i : i + 50]) for i in range(0, len(keys), 50))


@contextmanager
def users(daemon: LocalDaemon) -> Iterator[None]:
    """Stores and compares blocks in two threads meanwhile. Fails if a call fails or a copy is damaged."""
    wrong: list[str] = []
    done = threading.Event()
    layout, keys = new_layout(), names(N)

    def use() -> None:
        try:
            with Client(daemon.url, strict=True, deadline_s=10) as mine:
                ns = mine.namespace(layout)
                while not done.is_set():
                    store(ns, keys)
                    stored(ns, keys)
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not wrong
    with Client(daemon.url, strict=True, deadline_s=10) as client:
        assert client.status()["counters"].get("quarantined_blocks", 0) == 0


def used(client: Client) -> dict[str, int]:
    return {each["name"]: each["used_bytes"] for each in client.status()["tiers"]}


def gone(client: Client) -> bool:
    return "nvme1" not in used(client)


def whole(client: Client) -> bool:
    """Whether nvme1 has all of its extents."""
    return tier(client.status(), "nvme1")["capacity_bytes"] > 56 * MIB


def test_two_devices_share_blocks_and_both_recover_after_a_crash(second: Path) -> None:
    with LocalDaemon(both(second)) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        layout, keys = new_layout(), names(N)
        store(client.namespace(layout), keys)
        eventually(lambda: idle(client.status()))
        held = used(client)
        assert held["nvme"] == held["nvme1"] > 0
        check_limits(client.status())
        assert stored(client.namespace(layout), keys) == N
        daemon.kill()
        daemon.start()
        assert stored(client.namespace(layout), keys) == N
        check_limits(client.status())
        hits = client.status()["counters"]
        assert hits["hit_blocks_nvme"] > 0
        assert hits["hit_blocks_nvme1"] > 0


def test_an_added_device_takes_blocks_and_survives_restarts(daemon: LocalDaemon, second: Path) -> None:
    with Client(daemon.url, strict=True, deadline_s=10) as client:
        layout, keys = new_layout(), names(N)
        ns = client.namespace(layout)
        store(ns, keys[:400])
        tried = add(client, second, dry_run=True)
        assert tried["changed"] == ("nvme.devices.nvme1 is new",)
        assert not os.listdir(second)
        assert add(client, second)["kept"]
        eventually(lambda: whole(client))
        store(ns, keys[400:])
        eventually(lambda: idle(client.status()))
        assert used(client)["nvme1"] > 4 * MIB
        assert stored(ns, keys) == N
        daemon.restart()
        assert used(client)["nvme1"] > 4 * MIB
        assert stored(client.namespace(layout), keys) == N
        kinds = [e["what"] for e in client.control("events", what=["joined"])["events"]]
        assert not kinds, "it was there from the start"


def test_a_removed_device_is_emptied_and_can_be_added_again(daemon: LocalDaemon, second: Path) -> None:
    with Client(daemon.url, strict=True, deadline_s=10) as client:
        layout, keys = new_layout(), names(N)
        ns = client.namespace(layout)
        for _ in range(2):
            add(client, second)
            eventually(lambda: whole(client))
            store(ns, keys)
            eventually(lambda: idle(client.status()))
            assert used(client)["nvme1"] > 4 * MIB
            tried = remove(client, dry_run=True)
            [row] = tried["consequences"]
            assert (row["tenant"], row["tier"]) == ("", "nvme1")
            assert row["evicted_bytes"] == used(client)["nvme1"]
            remove(client)
            eventually(lambda: gone(client), within_s=30)
            assert not os.listdir(second / "slabs")
            left = stored(ns, keys)
            assert N // 3 < left <= N
            check_limits(client.status())
        daemon.kill()
        daemon.start()
        assert gone(client)
        assert stored(client.namespace(layout), keys) >= left - 1000, "what only DRAM had is lost"
        assert "Traceback" not in log_of(daemon)


def test_reads_and_writes_continue_while_a_device_is_added_and_removed(
    daemon: LocalDaemon, second: Path
) -> None:
    with Client(daemon.url, strict=True, deadline_s=10) as client, users(daemon):
        for _ in range(4):
            add(client, second)
            time.sleep(0.7)
            remove(client)
            eventually(lambda: gone(client), within_s=30)
            check_limits(client.status())


def test_after_a_crash_during_a_removal_the_device_is_absent(daemon: LocalDaemon, second: Path) -> None:
    with Client(daemon.url, strict=True, deadline_s=10) as client:
        layout, keys = new_layout(), names(N)
        add(client, second)
        eventually(lambda: whole(client))
        store(client.namespace(layout), keys)
        eventually(lambda: idle(client.status()))
        remove(client)
        daemon.kill()
        daemon.start()
        assert gone(client)
        assert stored(client.namespace(layout), keys) > 0
        # What was left on it may be from before something was invalidated elsewhere: it is not taken in.
        with pytest.raises(DeniedError, match="holds a cache already"):
            add(client, second)
        assert gone(client)


@pytest.mark.parametrize(
    ("path", "said", "hint"),
    [
        ("absent", "No such file", "mount the device"),
        ("a file", "Not a directory", "mount the device"),
        ("full", "there is 'photos'", "must be empty"),
        ("nvme", "is given twice", "remove one of the two"),
    ],
)
def test_an_unusable_device_is_refused_and_changes_nothing(
    daemon: LocalDaemon, tmp_path: Path, path: str, said: str, hint: str
) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "full" / "photos").mkdir(parents=True)
    folder = daemon.folder / "nvme" if path == "nvme" else tmp_path / path
    with Client(daemon.url, strict=True, deadline_s=10) as client:
        with pytest.raises(DeniedError, match=said) as refused:
            add(client, folder)
        assert hint in refused.value.hint
        assert gone(client)
        assert client.control("settings")["changes"] == {}
        store(client.namespace(new_layout()), names(50))


def test_a_daemon_without_nvme_can_have_no_second_device(second: Path) -> None:
    with LocalDaemon(SMALL) as daemon, Client(daemon.url, strict=True) as client:
        with pytest.raises(DeniedError, match=r"nvme.devices.nvme1: there is no NVMe tier") as refused:
            add(client, second)
        assert refused.value.hint == "restart the daemon"


def test_a_device_that_cannot_be_opened_at_the_start_is_reported(second: Path) -> None:
    with LocalDaemon(both(second)) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        layout, keys = new_layout(), names(N)
        store(client.namespace(layout), keys)
        eventually(lambda: idle(client.status()))
        daemon.stop()
        aside = second.rename(second.with_name("aside"))
        second.touch()
        daemon.start()
        [said] = client.status()["problems"]
        assert said.startswith("nvme.devices.nvme1 is left out: ")
        assert 0 < stored(client.namespace(layout), keys) < N
        daemon.stop()
        second.unlink()
        aside.rename(second)
        daemon.start()
        assert not client.status()["problems"]
        assert stored(client.namespace(layout), keys) > N // 3, "what was on it is back"


@pytest.mark.parametrize("forgets", [True, False])
def test_blocks_deleted_while_a_device_was_absent_are_not_restored(second: Path, forgets: bool) -> None:
    with LocalDaemon(both(second)) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        layout, keys = new_layout(), names(N)
        store(client.namespace(layout), keys)
        eventually(lambda: idle(client.status()))
        assert client.namespace(layout).invalidate(keys[-50:]) == 50
        daemon.stop()
        aside = second.rename(second.with_name("aside"))
        second.touch()
        daemon.start()
        left = stored(client.namespace(layout), keys[:-50])
        assert 0 < left < N - 50
        if forgets:
            ns = client.namespace(layout)
            ns.invalidate(keys[:50])
            assert ns.put(keys[:50], payloads(keys[:50], salt=1)).stored == 50
            eventually(lambda: idle(client.status()))
        daemon.stop()
        second.unlink()
        aside.rename(second)
        daemon.start()
        ns = client.namespace(layout)
        assert got(ns, keys[-50:]) == 0
        assert ("was absent while blocks were invalidated" in log_of(daemon)) is forgets
        if forgets:
            assert got(ns, keys[:50], salt=1) == 50
            assert stored(ns, keys[50:-50]) < N - 100
            store(ns, keys)
            daemon.restart()
            assert used(client)["nvme1"] > MIB, "what came after it is kept"
        else:
            assert stored(ns, keys[:-50]) == N - 50


def test_devices_that_were_absent_in_turn_restore_no_deleted_block(second: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    settings = both(second)
    settings["nvme"]["path"] = first
    with LocalDaemon(settings) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        file = daemon.folder / "kvstore.toml"
        two, layout, keys = file.read_text(), new_layout(), names(N)

        def starts(config: str) -> Any:
            daemon.stop()
            file.write_text(config)
            daemon.start()
            return client.namespace(layout)

        store(client.namespace(layout), keys)
        eventually(lambda: idle(client.status()))
        alone = "".join(line for line in two.splitlines(True) if "nvme1" not in line)
        x, y = keys[: N // 2], keys[N // 2 :]
        for path, deleted in ((first, x), (second, y)):
            ns = starts(alone.replace(str(first), str(path)))
            for part in (x, y) if path == first else ():
                assert 0 < sum(ns.contains(part)) < len(part), "each device has a part of both"
            ns.invalidate(deleted)
            assert not any(ns.contains(deleted))
        ns = starts(two)
        assert not any(ns.contains(x)), "the second device was absent when these were deleted"
        assert not any(ns.contains(y)), "the first device was absent when these were deleted"


def to_format_3(folder: Path, generation: int) -> None:
    """Rewrites the records as a daemon wrote them whose generation is a number."""
    to_format_4(folder)
    with lmdb.open(str(folder / "records"), max_dbs=8) as env, env.begin(write=True) as txn:
        meta = env.open_db(b"meta", txn, create=False)
        assert txn.delete(b"generations", db=meta)
        for key, number in ((b"format", 3), (b"generation", generation)):
            txn.put(key, number.to_bytes(8, "little"), db=meta)


@pytest.mark.parametrize("generation", [6, 7])
def test_devices_of_the_format_before_keep_their_blocks_if_they_missed_no_deletion(
    second: Path, generation: int
) -> None:
    with LocalDaemon(both(second)) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        layout, keys = new_layout(), names(N)
        store(client.namespace(layout), keys)
        eventually(lambda: idle(client.status()))
        assert client.namespace(layout).invalidate(keys[-50:]) == 50
        daemon.stop()
        to_format_3(daemon.folder / "nvme", 7)
        to_format_3(second, generation)
        for _ in range(2):
            daemon.start()
            ns = client.namespace(layout)
            assert got(ns, keys[-50:]) == 0
            found = stored(ns, keys[:-50])
            assert found == N - 50 if generation == 7 else 0 < found < N - 50
            # The second start reads the history that the first one has converted.
            ns.invalidate(keys[-50:])
            daemon.stop()


def test_a_device_of_another_node_brings_no_block_into_another_namespace(
    second: Path, tmp_path: Path
) -> None:
    theirs, ours, keys = new_layout(), new_layout(), names(400)
    another = {**WITH_NVME, "nvme": {**WITH_NVME["nvme"], "path": second}}
    with LocalDaemon(another) as other, Client(other.url, strict=True) as client:
        store(client.namespace(theirs), keys)
        eventually(lambda: idle(client.status()))
    with LocalDaemon(WITH_NVME) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        store(client.namespace(ours), keys[:100])
        eventually(lambda: idle(client.status()))
        daemon.stop()
        with (daemon.folder / "kvstore.toml").open("a") as file:
            file.write(f'[nvme.devices.nvme1]\npath = "{second}"\nlimit = "64MiB"\n')
        daemon.start()
        assert "are forgotten" in log_of(daemon)
        assert got(client.namespace(ours), keys[:50]) == 50
        assert stored(client.namespace(theirs), keys) == 0
        store(client.namespace(theirs), keys)
        assert stored(client.namespace(theirs), keys) == 400


def test_a_tenant_has_its_limit_over_all_devices_together(second: Path) -> None:
    tenants = {"small": {"uids": [os.getuid()], "role": "admin", "nvme": {"limit": 16 * MIB}}}
    settings = both(second, tenants=tenants)
    with LocalDaemon(settings) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        store(client.namespace(new_layout()), names(N))
        eventually(lambda: idle(client.status()))
        parts = client.control("tenant", name="small")["tiers"]
        nvme = [part for part in parts if part["name"] != "dram"]
        assert sum(part["limit_bytes"] for part in nvme) == 16 * MIB
        assert all(0 < part["used_bytes"] <= part["limit_bytes"] for part in nvme)


def test_floors_that_exceed_whole_extents_of_a_device_are_refused(second: Path) -> None:
    tenants = {f"t{i}": {"uids": [70000 + i], "nvme": {"floor": 8 * MIB}} for i in range(8)}
    tenants["me"] = {"uids": [os.getuid()], "role": "admin"}
    settings = {**WITH_NVME, "tenants": tenants}
    with LocalDaemon(settings) as daemon, Client(daemon.url, strict=True) as client:
        with pytest.raises(DeniedError, match=r"floors of nvme1? take"):
            add(client, second, 8)
        assert gone(client)
        assert not os.listdir(second)


def test_sealed_blocks_are_sealed_on_every_device(second: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    tenants = {"me": {"uids": [os.getuid()], "role": "admin", "encrypt": True}}
    changes = {"changes": tmp_path / "changes.json"}
    sealed = {**WITH_NVME, "tenants": tenants, "encryption": {"key_file": key}, "daemon": changes}
    with LocalDaemon(sealed) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        layout, keys = new_layout(), names(N)
        ns = client.namespace(layout)
        store(ns, keys[:50])
        add(client, second)
        eventually(lambda: whole(client))
        store(ns, keys)
        eventually(lambda: idle(client.status()))
        daemon.stop()
        plain = bytes(payloads(keys[:1])[0])
        raw = b"".join(path.read_bytes() for path in (second / "slabs").iterdir())
        assert len(raw) > 8 * MIB
        assert all(bytes(block) not in raw for block in payloads(keys[::40]))
        assert plain not in raw
        daemon.start()
        assert stored(client.namespace(layout), keys) > N // 2


def test_a_hanging_device_does_not_block_the_other(second: Path) -> None:
    with LocalDaemon(both(second)) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        layout, keys = new_layout(), names(N)
        ns = client.namespace(layout)
        store(ns, keys)
        eventually(lambda: idle(client.status()))
        client.control("set_device", name="nvme1", state="fenced", instead_of=None)
        began = time.monotonic()
        there = stored(ns, keys)
        assert 0 < there < N
        assert time.monotonic() - began < 8
        store(ns, names(300, "more"))
        assert client.control("device", name="nvme1")["state"] == "fenced"
        client.control("set_device", name="nvme1", state="serving", instead_of=None)
        assert stored(ns, keys) > there


def test_fsck_and_doctor_look_at_every_device(second: Path) -> None:
    with LocalDaemon(both(second)) as daemon:
        with Client(daemon.url, strict=True, deadline_s=10) as client:
            store(client.namespace(new_layout()), names(400))
            eventually(lambda: idle(client.status()))
        config = str(daemon.folder / "kvstore.toml")
        assert str(second) in cli("doctor", "-c", config, "--json").stdout
        daemon.stop()
        lines = cli("fsck", "-c", config, "--json").stdout.splitlines()
        reports = [json.loads(line) for line in lines]
        assert [report["folder"] for report in reports] == [str(daemon.folder / "nvme"), str(second)]
        assert all(report["records"] > 100 and not report["problems"] for report in reports)
        slab = next((second / "slabs").iterdir())
        with slab.open("r+b") as file:
            file.write(b"\xff" * 8192)
        ran = cli("fsck", "-c", config, "--json")
        assert ran.returncode == 1
        assert [json.loads(line)["problems"] > 0 for line in ran.stdout.splitlines()] == [False, True]
        daemon.start()


def test_a_device_removed_while_it_is_added_is_removed_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, second: Path
) -> None:
    # As with many millions of rows, which take a while to get their column.
    monkeypatch.setattr("kvstore.core.reconfiguration.hotplug._ROWS_AT_ONCE", 1)
    text = f'dram.limit = "8MiB"\n[nvme]\npath = "{tmp_path / "first"}"\nlimit = "16MiB"\n'
    config, both_of_them = parse(text), parse(f'{text}[nvme.devices.nvme1]\npath = "{second}"\n')

    async def run() -> None:
        daemon = Daemon(config, asyncio.get_running_loop(), open_tiers(config, {}))
        await lifecycle.start(daemon)
        daemon.placement.residency.blocks._fresh = 50
        daemon.reload.apply(both_of_them, [], daemon.devices.opener(both_of_them)())
        assert len(daemon.view.tiers) == 2
        daemon.reload.apply(config, [])
        await asyncio.sleep(0.5)
        assert daemon.view.tiers[2].gone
        assert list(daemon.tiers.devices) == ["nvme"]
        await lifecycle.stop(daemon, 1.0)

    asyncio.run(run())
    assert not os.listdir(second / "slabs")


# -- over REST, and by commands


def test_a_device_over_rest(tmp_path: Path, second: Path) -> None:
    kept = {"changes": tmp_path / "changes.json"}
    with (
        LocalDaemon({**WITH_NVME, "daemon": kept, "admin": settings()}) as daemon,
        ServedAdmin(daemon) as admin,
    ):
        path, wanted = "/v1/devices/nvme1/settings", {"path": str(second), "limit": 64 * MIB}
        assert problem(admin.get(path, OPERATE), 404)["hint"] == "PUT adds it"
        assert change(admin, "PUT", f"{path}?dry_run=true", wanted).json["changed"] == [
            "nvme.devices.nvme1 is new"
        ]
        made = change(admin, "PUT", path, wanted)
        assert made.json["changed"] == ["nvme.devices.nvme1 is new"]
        seen = admin.get(path, OPERATE)
        assert seen.json == {**wanted, "write_budget": 0}
        assert seen.headers["etag"] == made.headers["etag"]
        names_of = lambda: [d["name"] for d in admin.get("/v1/devices", OPERATE).json["devices"]]  # noqa: E731
        eventually(lambda: names_of() == ["dram", "nvme", "nvme1"])
        budget = change(admin, "PUT", path, {**wanted, "write_budget": "2x"})
        assert budget.json["changed"] == ["nvme.devices.nvme1.write_budget = 2x"]
        device = admin.get("/v1/devices/nvme1", OPERATE).json
        assert device["admission"]["bytes_a_day"] == 128 * MIB
        other = problem(change(admin, "PUT", path, {**wanted, "path": "/mnt/other"}), 409)
        assert "can't change while the daemon runs: nvme.devices.nvme1.path" in other["detail"]
        late = change(admin, "DELETE", path, headers={"If-Match": made.headers["etag"]})
        problem(late, 412)
        limit = b'kvstore_tier_limit_bytes{tier="nvme1"} 6.7108864e+07'
        eventually(lambda: limit in admin.get("/metrics", OPERATE).body)
        assert change(admin, "DELETE", path).json["changed"] == ["nvme.devices.nvme1 is gone"]
        eventually(lambda: names_of() == ["dram", "nvme"], within_s=30)
        problem(change(admin, "DELETE", path), 404)
        bad = problem(change(admin, "PUT", "/v1/devices/tape/settings", wanted), 409)
        assert "nvme.devices.tape" in bad["detail"]
        problem(change(admin, "PUT", path, {**wanted, "path": "mnt"}), 422)
        eventually(lambda: b'tier="nvme1"' not in admin.get("/metrics", OPERATE).body)


def test_devices_by_commands(daemon: LocalDaemon, second: Path) -> None:
    socket = ("--socket", str(daemon.socket))
    tried = cli("device", "add", "nvme1", str(second), "--limit", "64MiB", "--dry-run", *socket)
    assert (tried.returncode, tried.stderr) == (0, "")
    assert "would be: nvme.devices.nvme1 is new" in tried.stdout
    done = cli(
        "device", "add", "nvme1", str(second), "--limit", "64MiB", "--write-budget", "1x", *socket, "--json"
    )
    assert json.loads(done.stdout)["changed"] == ["nvme.devices.nvme1 is new"]
    eventually(lambda: "nvme1" in cli("device", "list", *socket).stdout)
    refused = cli("device", "remove", "nvme7", *socket)
    assert (refused.returncode, "no device 'nvme7' is configured" in refused.stderr) == (2, True)
    assert cli("device", "add", "tape", str(second), *socket).returncode != 0
    assert "--limit" in cli("device", "add", "nvme2", str(second), "--limit", "much", *socket).stderr
    assert "is now: nvme.devices.nvme1 is gone" in cli("device", "remove", "nvme1", *socket).stdout
    eventually(lambda: "nvme1" not in cli("device", "list", *socket).stdout, within_s=30)
    told = [json.loads(line) for line in cli("events", "--json", *socket).stdout.splitlines()]
    assert {"joined", "leaving", "left"} <= {event["what"] for event in told}


def test_a_reload_adds_and_removes_devices_of_the_file(second: Path) -> None:
    with LocalDaemon(WITH_NVME) as daemon, Client(daemon.url, strict=True) as client:
        config = daemon.folder / "kvstore.toml"
        before = config.read_text()
        config.write_text(f'{before}\n[nvme.devices.nvme1]\npath = "{second}"\nlimit = "64MiB"\n')
        os.kill(daemon.pid, signal.SIGHUP)
        eventually(lambda: not gone(client) and whole(client))
        config.write_text(before)
        os.kill(daemon.pid, signal.SIGHUP)
        eventually(lambda: gone(client), within_s=30)


def test_a_removed_device_takes_no_share_of_the_scrubber(second: Path) -> None:
    settings = {**WITH_NVME, "scrub": {"rate": "1GiB"}}
    with LocalDaemon(settings) as daemon, Client(daemon.url, deadline_s=10) as client:
        assert store(client.namespace(new_layout()), names(50)) == 50
        add(client, second)
        passes = lambda name: client.status()["counters"].get(f"scrub_passes_{name}", 0)  # noqa: E731
        eventually(lambda: passes("nvme1"))
        remove(client)
        eventually(lambda: "nvme1" not in [each["name"] for each in client.status()["tiers"]])
        before, others = passes("nvme1"), passes("nvme")
        eventually(lambda: passes("nvme") > others + 3)
        assert passes("nvme1") == before
