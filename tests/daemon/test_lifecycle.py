"""Devices that hang, stops that must end, settings that change while the daemon runs."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.config import changes, parse
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import (
    SMALL,
    WITH_NVME,
    check_limits,
    eventually,
    got,
    idle,
    log_of,
    names,
    new_layout,
    payload,
    payloads,
    tier,
)

# Runs in the daemon before anything else: block I/O waits for as long as the file is there.
_HANGING_DEVICE = """
import os, time
from kvstore import native
from kvstore.native import portable_files

def hangs(call):
    def wait(*arguments):
        while os.path.exists({flag!r}):
            time.sleep(0.02)
        return call(*arguments)
    return wait

native.move_files, native.IOQueue = portable_files.move_files, native.PortableQueue
os.preadv, os.pwritev, os.fdatasync = map(hangs, (os.preadv, os.pwritev, os.fdatasync))
"""


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Path]:
    """A file that makes devices of daemons started within hang while it exists."""
    flag = folder / "hang"
    (folder / "sitecustomize.py").write_text(_HANGING_DEVICE.format(flag=str(flag)))
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{path}" if path else str(folder))
    try:
        yield flag
    finally:
        flag.unlink(missing_ok=True)


def test_a_device_that_hangs_is_fenced_and_requests_are_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (
        hanging(monkeypatch, tmp_path) as flag,
        LocalDaemon(WITH_NVME) as daemon,
        Client(daemon.url, deadline_s=0.5) as client,
    ):
        ns, below = client.namespace(new_layout()), names(20, "below")
        ns.put(below, payloads(below), deadline_s=5)
        eventually(lambda: idle(client.status()))
        for i in range(10):
            some = names(128, f"above {i}")
            ns.put(some, payloads(some), deadline_s=5)
        eventually(lambda: idle(client.status()))
        flag.touch()
        started = time.monotonic()
        while not tier(client.status(), "nvme")["fenced"]:
            before = time.monotonic()
            assert got(ns, below) == 0
            assert got(ns, some) == 128, "what is in DRAM is served"
            fresh = names(4, f"fresh {before}")
            assert ns.put(fresh, payloads(fresh)).stored == 4, "and there is room for more"
            assert time.monotonic() - before < 1.5, "every call ends by its deadline"
            assert time.monotonic() - started < 20
        assert ns.lookup(below) == 0
        before = time.monotonic()
        assert got(ns, below, deadline_s=30) == 0
        assert time.monotonic() - before < 1, "a miss at once, not at the deadline"
        for i in range(12):
            more = names(128, f"meanwhile {i}")
            # Slots that the device still reads from are out of use meanwhile.
            assert ns.put(more, payloads(more), deadline_s=5).stored > 100
            check_limits(client.status())
        assert client.status()["counters"]["tier_fences"] == 1
        flag.unlink()
        eventually(lambda: not tier(client.status(), "nvme")["fenced"])
        assert eventually(lambda: got(ns, below, deadline_s=5)) == 20
        assert "Traceback" not in log_of(daemon)


def test_a_stop_ends_though_the_device_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = {**WITH_NVME, "daemon": {"stop_timeout": "500ms"}}
    with hanging(monkeypatch, tmp_path) as flag, LocalDaemon(settings) as daemon:
        layout, keys = new_layout(), names(60)
        with Client(daemon.url, deadline_s=5) as client:
            ns = client.namespace(layout)
            ns.put(keys[:30], payloads(keys[:30]))
            eventually(lambda: idle(client.status()))
            flag.touch()
            ns.put(keys[30:], payloads(keys[30:]))
        started = time.monotonic()
        daemon.stop()
        assert time.monotonic() - started < 8
        assert "copies unfinished after 0.5 s" in log_of(daemon)
        assert "a device does not answer" in log_of(daemon)
        flag.unlink()
        daemon.start()
        with Client(daemon.url, deadline_s=5) as client:
            assert got(client.namespace(layout), keys) == 30, "what was on record is there, and nothing else"


def test_a_stop_keeps_a_socket_that_another_daemon_has_replaced() -> None:
    with LocalDaemon(SMALL) as daemon, socket.socket(socket.AF_UNIX) as other:
        daemon.socket.unlink()
        other.bind(str(daemon.socket))
        daemon.stop()
        assert daemon.socket.is_socket()


# -- SIGHUP


def hangup(daemon: LocalDaemon) -> str:
    """What the daemon says to a SIGHUP."""
    before = len(log_of(daemon))
    os.kill(daemon.pid, signal.SIGHUP)
    said: str = eventually(lambda: "reloaded" in (log := log_of(daemon)[before:]) and log)
    return said


def edit(daemon: LocalDaemon, text: str) -> None:
    (daemon.folder / "kvstore.toml").write_text(text)


def test_sighup_reloads_live_keys_and_names_keys_that_need_a_restart() -> None:
    settings = {**WITH_NVME, "limits": {"leases_per_connection": 4}, "scrub": {"rate": 0}}
    with LocalDaemon(settings) as daemon, Client(daemon.url, deadline_s=5) as client:
        ns, keys = client.namespace(new_layout()), names(8)
        ns.put(keys, payloads(keys))
        old = (daemon.folder / "kvstore.toml").read_text()
        assert "reloaded: nothing has changed" in hangup(daemon)
        new = old.replace("leases_per_connection = 4", "leases_per_connection = 1").replace(
            "huge_pages = false", "huge_pages = true"
        )
        edit(daemon, new.replace("rate = 0", 'rate = "64MiB"') + "[daemon.x]\ny = 1\n")
        assert "not reloaded" in hangup(daemon)
        edit(
            daemon,
            new.replace("rate = 0", 'rate = "64MiB"').replace("[nvme]", '[nvme]\nwrite_policy = "on_evict"'),
        )
        said = hangup(daemon)
        for change in ("leases_per_connection = 1", "scrub.rate = 67108864", "nvme.write_policy = on_evict"):
            assert change in said
        assert "needs a restart: dram.huge_pages" in said
        assert not client.status()["huge_pages"]
        with ns.acquire(keys[:1]) as one:
            assert len(one) == 1
        eventually(lambda: idle(client.status()))
        written = client.status()["counters"]["written_blocks"]
        other = names(8, "after")
        ns.put(other, payloads(other))
        assert idle(client.status())
        assert client.status()["counters"]["written_blocks"] == written, "on_evict holds from now on"
        eventually(lambda: tier(client.status(), "nvme")["scrub_passes"] > 1)
        assert client.status()["counters"].get("quarantined_blocks", 0) == 0
        edit(daemon, "this is no TOML")
        assert "not reloaded" in hangup(daemon)
        assert got(ns, keys) == 8


def test_eviction_and_write_policy_change_at_run_time() -> None:
    """And of a policy that there is not, nothing."""
    with LocalDaemon(WITH_NVME) as daemon, Client(daemon.url, deadline_s=5) as client:
        ns, keys = client.namespace(new_layout()), names(300)
        assert ns.put(keys, payloads(keys)).stored == 300
        eventually(lambda: idle(client.status()))
        old = (daemon.folder / "kvstore.toml").read_text()
        new = old.replace('eviction = "lru"', 'eviction = "hazard"')
        new = new.replace("[nvme]", '[nvme]\nadmission = "twice"\nwrite_budget = "1x"\nprefetch_blocks = 7')
        edit(daemon, new.replace("hazard", "best"))
        assert "no eviction policy 'best'" in hangup(daemon)
        said = client.control("policy")
        assert (said["name"], said["pools_left"]) == ("lru", 0)
        assert client.control("figures")["devices"][1]["admission"]["mode"] == "always"
        edit(daemon, new)
        said = hangup(daemon)
        for change in ("policy.eviction = hazard", "nvme.admission = twice", "nvme.write_budget = 1x"):
            assert change in said
        assert "nvme.prefetch_blocks = 7" in said
        assert "needs a restart" not in said
        eventually(lambda: client.control("policy")["pools_left"] == 0)
        policy = client.control("policy")
        assert policy["name"] == policy["wanted"] == "hazard"
        assert [(t["tier"], t["blocks"], t["weighs"]) for t in policy["tiers"]] == [
            ("dram", 300, True),
            ("nvme", 300, True),
        ]
        admission = client.control("figures")["devices"][1]["admission"]
        assert (admission["mode"], admission["bytes_a_day"]) == ("twice", 64 << 20)
        assert client.explain(keys[:1])[0]["copies"][0]["policy"] == "hazard"
        other = names(20, "after")
        assert ns.put(other, payloads(other)).stored == 20
        eventually(lambda: client.status()["counters"].get("refused_blocks") == 20)
        assert got(ns, keys) == 300


def test_every_setting_either_changes_or_is_named() -> None:
    old = parse("")
    new = parse(
        '[daemon]\nsocket = "/x"\nsocket_mode = 0o660\nstop_timeout = 1\nlog_level = "debug"\n'
        'log_format = "json"\nchanges = "/w"\noperator_socket = "/o"\n'
        '[dram]\nlimit = "2MiB"\nhuge_pages = false\n'
        '[nvme]\npath = "/y"\nlimit = "2MiB"\nwrite_policy = "on_evict"\nio_threads = 1\n'
        'prefetch_blocks = 8\nadmission = "twice"\nadmission_threshold = 0.5\nwrite_budget = "1x"\n'
        '[hbm]\nlimit = "2MiB"\ngpus = ["0"]\n[network]\nurl = "file:///x"\nlimit = 1\nuser = "u"\n'
        'password_file = "/v"\ncredentials = "instance"\ntimeout = 1\nthreads = 1\n'
        'hedge_after = 1\nadmission = "twice"\n'
        "admission_threshold = 0.5\n"
        '[events]\nlisten = "ipc:///e"\nreplay = "ipc:///r"\nnode = "n"\ntenants = ["t"]\n'
        '[tracing]\ncollector = "http://c"\n[policy]\neviction = "arc"\n[scrub]\nrate = 0\n'
        "[limits]\nframe_bytes = 1048576\nbatch_keys = 16\nconnections = 1\nleases_per_connection = 1\n"
        "namespaces = 1\nnamespaces_per_tenant = 1\nqueued_requests = 1\n[encryption]\nkey_file = '/z'\n"
        "[admin]\nrequests_per_s = 1\n"  # another process's
    )
    changed, fixed = changes(old, new)
    keys = {f"{s}.{n}" for s, f in old.model_dump().items() for n in f if s != "admin"} - {"nvme.devices"}
    assert {c.partition(" = ")[0] for c in changed} | set(fixed) == keys
    assert "nvme.write_policy = on_evict" in changed
    assert {"dram.huge_pages", "nvme.path"} <= set(fixed)
    assert "policy.eviction = arc" in changed


# -- memory


def test_threads_share_one_heap() -> None:
    with LocalDaemon(WITH_NVME) as daemon, Client(daemon.url, deadline_s=5) as client:
        ns, keys = client.namespace(new_layout()), names(100)
        assert ns.put(keys, payloads(keys)).stored == 100
        eventually(lambda: idle(client.status()))
        maps = Path(f"/proc/{daemon.pid}/maps").read_text().splitlines()
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    # glibc reserves 64 MiB for the heap of a thread, aligned to as much.
    heaps = [begin for begin, end in spans if begin % (64 << 20) == 0 and end - begin < 64 << 20]
    reserved = {end for line, (_, end) in zip(maps, spans, strict=True) if line.split()[1] == "---p"}
    assert not [begin for begin in heaps if begin + (64 << 20) in reserved]


# -- scrubbing, for real


def test_rot_on_disk_is_found_by_the_scrubber_before_anybody_asks() -> None:
    settings = {**WITH_NVME, "scrub": {"rate": "1GiB"}}
    with LocalDaemon(settings) as daemon, Client(daemon.url, deadline_s=5) as client:
        ns, keys = client.namespace(new_layout()), names(40)
        ns.put(keys, payloads(keys))
        eventually(lambda: idle(client.status()))
        for slab in (daemon.folder / "nvme" / "slabs").iterdir():
            if (at := slab.read_bytes().find(payload(keys[7]))) >= 0:
                with slab.open("r+b") as file:
                    file.seek(at + 5000)
                    file.write(b"rot")
        status = eventually(lambda: (s := client.status())["counters"].get("quarantined_blocks") and s)
        assert tier(status, "nvme")["retired_slots"] == 1
        assert tier(status, "nvme")["blocks"] == 39
        assert got(ns, keys) == 40, "DRAM has it still"
        check_limits(status)
