"""The first NVMe device is removed like any other one: clients go on, and the others keep their blocks."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.errors import DeniedError, UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.tiers.nvme.tier import REMOVED
from tests.admin.serving import OPERATE, ServedAdmin, problem, settings
from tests.admin.test_changes import change
from tests.crash import files
from tests.daemon.operator.test_devices import MIB, N, both, store, stored, used, users
from tests.daemons import check_limits, cli, eventually, got, idle, log_of, names, new_layout, payloads


@pytest.fixture
def second(tmp_path: Path) -> Path:
    folder = tmp_path / "second"
    folder.mkdir()
    return folder


@pytest.fixture(params=[True, False], ids=["kept", "not kept"])
def daemon(request: Any, tmp_path: Path, second: Path) -> Iterator[LocalDaemon]:
    """Two devices of 32 MiB. Changes are kept, or end with the daemon."""
    kept = {"daemon": {"changes": tmp_path / "changes.json"}} if request.param else {}
    with LocalDaemon(both(second, **kept)) as served:
        yield served


def keeps(daemon: LocalDaemon) -> bool:
    return "changes = " in (daemon.folder / "kvstore.toml").read_text()


def remove(client: Client, **more: Any) -> dict[str, Any]:
    return dict(client.control("change", patch={"nvme": {"path": None}}, **more))


def left(client: Client) -> bool:
    return "nvme" not in used(client)


def noted(daemon: LocalDaemon) -> Path:
    """The note in the folder of the first device, once it is closed."""
    note = daemon.folder / "nvme" / REMOVED
    eventually(note.exists)
    return note


def without_path(daemon: LocalDaemon) -> None:
    """Deletes nvme.path from the file."""
    file = daemon.folder / "kvstore.toml"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if str(daemon.folder / "nvme") not in line))


def test_the_first_device_is_removed_and_the_others_keep_their_blocks(
    daemon: LocalDaemon, second: Path
) -> None:
    with Client(daemon.url, strict=True, deadline_s=10) as client:
        layout, keys = new_layout(), names(N)
        ns = client.namespace(layout)
        store(ns, keys)
        eventually(lambda: idle(client.status()))
        held = used(client)
        tried = remove(client, dry_run=True)
        assert tried["changed"] == ("nvme.path is gone",)
        assert [(row["tier"], row["evicted_bytes"]) for row in tried["consequences"]] == [
            ("nvme", held["nvme"])
        ]
        assert remove(client)["kept"] is keeps(daemon)
        eventually(lambda: left(client), within_s=30)
        assert not os.listdir(daemon.folder / "nvme" / "slabs")
        note = noted(daemon)
        assert used(client)["nvme1"] == held["nvme1"]
        check_limits(client.status())
        assert stored(ns, keys) > N // 3
        store(ns, names(200, "later"))
        eventually(lambda: idle(client.status()))
        daemon.kill()
        committed = {record.key for record in files.records(second)}
        daemon.start()
        assert left(client)
        ns = client.namespace(layout)
        assert sum(got(ns, [key]) for key in [*keys, *names(200, "later")]) == len(committed)
        if keeps(daemon):
            assert not client.status()["problems"]
        else:
            [said] = client.status()["problems"]
            assert said == (
                "nvme.path is left out: it was removed from a running daemon (delete nvme.path from the "
                f"configuration; to use the folder again, delete {note})"
            )
            without_path(daemon)
            daemon.restart()
            assert not client.status()["problems"]
            assert sum(got(client.namespace(layout), [key]) for key in keys) > N // 3
        assert "Traceback" not in log_of(daemon)


def test_a_folder_that_is_used_again_brings_no_deleted_block(second: Path) -> None:
    with LocalDaemon(both(second)) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        layout, keys = new_layout(), names(N)
        store(client.namespace(layout), keys)
        eventually(lambda: idle(client.status()))
        remove(client)
        eventually(lambda: left(client), within_s=30)
        note, ns = noted(daemon), client.namespace(layout)
        ns.invalidate(keys[:50])
        assert ns.put(keys[:50], payloads(keys[:50], salt=1)).stored == 50
        eventually(lambda: idle(client.status()))
        daemon.stop()
        note.unlink()
        daemon.start()
        assert not client.status()["problems"]
        ns = client.namespace(layout)
        assert got(ns, keys[:50], salt=1) == 50
        store(ns, keys[50:])
        eventually(lambda: used(client)["nvme"] > MIB)


def test_clients_go_on_while_the_first_device_is_removed_and_added(
    daemon: LocalDaemon, tmp_path: Path
) -> None:
    folder = daemon.folder / "nvme"
    with Client(daemon.url, strict=True, deadline_s=10) as client:
        with users(daemon):
            for _ in range(3):
                time.sleep(0.7)
                remove(client)
                eventually(lambda: left(client), within_s=30)
                added = client.control("change", patch={"nvme": {"path": str(folder)}})
                assert added["changed"] == ("nvme.path is new",)
                assert not (folder / REMOVED).exists()
                eventually(lambda: used(client).get("nvme", 0) > MIB, within_s=30)
                check_limits(client.status())
        daemon.restart()
        assert used(client)["nvme"] > MIB, "it was added again, and is used after a restart"
        assert "Traceback" not in log_of(daemon)


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.01, 0.03, 0.1, 0.3])
def test_a_crash_during_the_removal_loses_no_block_of_the_other_device(
    daemon: LocalDaemon, second: Path, after_s: float
) -> None:
    with Client(daemon.url, strict=True, deadline_s=10) as client:
        layout, keys = new_layout(), names(N)
        store(client.namespace(layout), keys)
        eventually(lambda: idle(client.status()))
        remove(client)
        time.sleep(after_s)
        daemon.kill()
        first = daemon.folder / "nvme"
        there = [second] if keeps(daemon) or (first / REMOVED).exists() else [first, second]
        committed = {record.key for folder in there for record in files.records(folder)}
        daemon.start()
        assert left(client) is (len(there) == 1)
        ns = client.namespace(layout)
        assert {key for key in keys if got(ns, [key])} == committed
        if not left(client):
            remove(client)
            eventually(lambda: left(client), within_s=30)
        assert client.status()["counters"].get("quarantined_blocks", 0) == 0


@pytest.mark.parametrize("name", ["nvme", "nvme1"])
def test_the_last_device_is_not_removed(second: Path, name: str) -> None:
    patches = {"nvme": {"path": None}, "nvme1": {"devices": {"nvme1": None}}}
    other = "nvme1" if name == "nvme" else "nvme"
    with LocalDaemon(both(second)) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        layout, keys = new_layout(), names(200)
        store(client.namespace(layout), keys)
        client.control("change", patch={"nvme": patches[other]})
        with pytest.raises(DeniedError) as refused:
            client.control("change", patch={"nvme": patches[name]})
        said = {
            "nvme": "this can't change while the daemon runs: nvme.path",
            "nvme1": "nvme1 is the last NVMe device",
        }
        assert said[name] in str(refused.value)
        assert "restart the daemon" in refused.value.hint
        eventually(lambda: other not in used(client), within_s=30)
        assert name in used(client)
        store(client.namespace(layout), keys)
        assert stored(client.namespace(layout), keys) == 200


def test_a_daemon_whose_only_device_was_removed_says_so(second: Path) -> None:
    with LocalDaemon(both(second)) as daemon:
        with Client(daemon.url, strict=True, deadline_s=10) as client:
            remove(client)
            eventually(lambda: left(client), within_s=30)
            noted(daemon)
        daemon.stop()
        file = daemon.folder / "kvstore.toml"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if not line.startswith("devices")))
        with pytest.raises(UnavailableError) as refused:
            daemon.start()
        assert "no NVMe device can be used: nvme.path is left out: it was removed" in str(refused.value)
        assert "Traceback" not in str(refused.value)


def test_a_reload_removes_and_adds_the_first_device(second: Path) -> None:
    with LocalDaemon(both(second)) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        file = daemon.folder / "kvstore.toml"
        before = file.read_text()
        without_path(daemon)
        os.kill(daemon.pid, signal.SIGHUP)
        eventually(lambda: left(client), within_s=30)
        file.write_text(before)
        os.kill(daemon.pid, signal.SIGHUP)
        eventually(lambda: not left(client))
        store(client.namespace(new_layout()), names(N))
        eventually(lambda: used(client)["nvme"] > MIB)


def test_a_daemon_starts_with_additional_devices_alone(second: Path, tmp_path: Path) -> None:
    alone = both(second, daemon={"changes": tmp_path / "changes.json"})
    with LocalDaemon(alone) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        layout, keys = new_layout(), names(1000)
        without_path(daemon)
        daemon.restart()
        assert set(used(client)) == {"dram", "nvme1"}
        store(client.namespace(layout), keys)
        eventually(lambda: idle(client.status()))
        daemon.restart()
        assert stored(client.namespace(layout), keys) == 1000
        config = str(daemon.folder / "kvstore.toml")
        assert str(second) in cli("doctor", "-c", config, "--json").stdout
        added = client.control("change", patch={"nvme": {"path": str(tmp_path / "absent")}}, dry_run=True)
        assert added["changed"] == ("nvme.path is new",)
        with pytest.raises(DeniedError, match="mount the device"):
            client.control("change", patch={"nvme": {"path": str(tmp_path / "absent")}})


def test_what_is_sealed_stays_sealed_when_the_first_device_is_gone(second: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    tenants = {"me": {"uids": [os.getuid()], "role": "admin", "encrypt": True}}
    third = tmp_path / "third"
    third.mkdir()
    sealed = both(second, tenants=tenants, encryption={"key_file": key})
    sealed["daemon"] = {"changes": tmp_path / "changes.json"}
    with LocalDaemon(sealed) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        layout, keys = new_layout(), names(N)
        store(client.namespace(layout), keys)
        eventually(lambda: idle(client.status()))
        remove(client)
        eventually(lambda: left(client), within_s=30)
        device = {"path": str(third), "limit": 32 * MIB}
        client.control("change", patch={"nvme": {"devices": {"nvme2": device}}})
        eventually(lambda: "nvme2" in used(client))
        store(client.namespace(layout), keys)
        eventually(lambda: used(client)["nvme2"] > MIB and idle(client.status()))
        daemon.restart()
        assert stored(client.namespace(layout), keys) > N // 2
        daemon.stop()
        raw = b"".join(path.read_bytes() for path in (third / "slabs").iterdir())
        assert all(bytes(block) not in raw for block in payloads(keys[::40]))


def test_reuse_statistics_move_to_a_device_that_is_left(second: Path, tmp_path: Path) -> None:
    settings = both(second, daemon={"changes": tmp_path / "changes.json"}, policy={"eviction": "hazard"})
    with LocalDaemon(settings) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        store(client.namespace(new_layout()), names(400))
        daemon.restart()
        old, new = daemon.folder / "nvme" / "learned.npz", second / "learned.npz"
        assert old.exists()
        remove(client)
        eventually(lambda: left(client), within_s=30)
        eventually(lambda: not old.exists())
        daemon.stop()
        assert new.exists()
        daemon.start()
        assert "reuse statistics" not in log_of(daemon)
        client.control("change", patch={"nvme": {"path": str(old.parent)}})
        eventually(lambda: not left(client))
        daemon.stop()
        assert old.exists()
        assert not new.exists(), "only one, which the deletion of a tenant deletes"


# -- over REST, and by commands


def test_the_first_device_by_commands(second: Path) -> None:
    with LocalDaemon(both(second)) as daemon:
        socket = ("--socket", str(daemon.socket))
        listed = lambda: cli("device", "list", *socket, "--json").stdout  # noqa: E731
        names_of = lambda: [each["name"] for each in json.loads(listed())["devices"]]  # noqa: E731
        removed = cli("device", "remove", "nvme", *socket)
        assert "is now: nvme.path is gone" in removed.stdout
        assert "daemon.changes is not set" in removed.stdout
        eventually(lambda: names_of() == ["dram", "nvme1"], within_s=30)
        again = cli("device", "remove", "nvme", *socket)
        assert (again.returncode, "no device 'nvme' is configured" in again.stderr) == (2, True)
        added = cli("device", "add", "nvme", str(daemon.folder / "nvme"), "--limit", "32MiB", *socket)
        assert "is now: nvme.path is new" in added.stdout
        eventually(lambda: names_of() == ["dram", "nvme1", "nvme"], within_s=30)
        shown = json.loads(cli("tier", "list", *socket, "--json").stdout)["tiers"]
        assert [each["limit_bytes"] for each in shown if each["name"] == "nvme"] == [32 * MIB]


def test_the_first_device_over_rest(second: Path) -> None:
    with LocalDaemon({**both(second), "admin": settings()}) as daemon, ServedAdmin(daemon) as admin:
        path = "/v1/devices/nvme/settings"
        wanted = {"path": str(daemon.folder / "nvme"), "limit": 32 * MIB, "write_budget": 0}
        assert admin.get(path, OPERATE).json == wanted
        budget = change(admin, "PUT", path, {**wanted, "write_budget": "2x"})
        assert budget.json["changed"] == ["nvme.write_budget = 2x"]
        assert change(admin, "DELETE", path).json["changed"] == ["nvme.path is gone"]
        names_of = lambda: [d["name"] for d in admin.get("/v1/devices", OPERATE).json["devices"]]  # noqa: E731
        eventually(lambda: names_of() == ["dram", "nvme1"], within_s=30)
        assert problem(admin.get(path, OPERATE), 404)["hint"] == "PUT adds it"
        problem(change(admin, "DELETE", path), 404)
        assert change(admin, "PUT", path, wanted).json["changed"] == [
            "nvme.path is new",
            "nvme.write_budget = 0",
        ]
        eventually(lambda: names_of() == ["dram", "nvme1", "nvme"], within_s=30)
