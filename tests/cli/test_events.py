"""`kvstore events`: past events, and new ones with --follow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import Client
from kvstore.cli import events as module
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import SMALL, cli, names, new_layout, payloads


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon({**SMALL, "policy": {"eviction": "lru"}}) as served:
        yield served


@pytest.fixture
def client(daemon: LocalDaemon) -> Iterator[Client]:
    with Client(daemon.url, deadline_s=10, strict=True) as made:
        yield made


def shown(daemon: LocalDaemon, *args: str) -> list[dict[str, Any]]:
    done = cli("events", *args, "--json", "--socket", str(daemon.socket))
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def invalidated(client: Client, n: int) -> list[str]:
    """Stores and invalidates n blocks. Returns their keys in hex."""
    ns, keys = client.namespace(new_layout()), names(n)
    ns.put(keys, payloads(keys))
    assert ns.invalidate(keys) == n
    return [key.hex() for key in keys]


@contextmanager
def following(daemon: LocalDaemon, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Runs `kvstore events --follow` during the block. Yields its lines as they are written."""
    command = [sys.executable, "-m", "kvstore", "events", "--follow", "--socket", str(daemon.socket), *args]
    # Tests in the background ignore Ctrl-C, and so would their child processes.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_latest_events_are_printed_newest_last(daemon: LocalDaemon, client: Client) -> None:
    keys = invalidated(client, 130)
    asked = client.control("events", after=-1)["next"]
    events = shown(daemon)
    assert [event["number"] for event in events] == list(range(asked - 99, asked + 1))
    assert events[-1] == {**client.control("events", after=-1)["events"][0], "at_s": events[-1]["at_s"]}
    assert [event["number"] for event in shown(daemon, "-n", "3")] == [asked - 2, asked - 1, asked]
    only = shown(daemon, "--what", "invalidated,quarantined", "-n", "130", "--tenant", "default")
    assert {event["key"] for event in only} == set(keys)
    assert shown(daemon, "--what", "quarantined") == []
    [started] = shown(daemon, "--what", "started")
    assert started["detail"] == f"pid {daemon.pid}"


def test_since_limits_events_to_a_time_span(daemon: LocalDaemon, client: Client) -> None:
    time.sleep(1.1)
    begin = time.time()
    keys = invalidated(client, 120)
    events = shown(daemon, "--since", f"{time.time() - begin + 0.9:.2f}")
    # A late start may show fewer events, but never earlier ones.
    assert {event["key"] for event in events if event["key"]} <= set(keys)
    assert min((event["at_s"] for event in events), default=begin) >= begin - 1
    assert len(shown(daemon, "--since", "1h")) > 100
    assert len(shown(daemon, "--since", "1h", "-n", "7")) == 7


def test_events_are_one_line_each(daemon: LocalDaemon, client: Client) -> None:
    [key] = invalidated(client, 1)
    done = cli("events", "--socket", str(daemon.socket), TZ="UTC")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    last = done.stdout.splitlines()[-1].split()
    assert (last[2], last[3], last[5]) == ("invalidated", "default", key)


def test_follow_prints_new_events_until_ctrl_c(daemon: LocalDaemon, client: Client) -> None:
    with following(daemon, "--what", "dropped,evicted,started", "--json") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["what"] == "started"
        ns, keys = client.namespace(new_layout()), names(1200, "many")
        for start in range(0, len(keys), 100):
            ns.put(keys[start : start + 100], payloads(keys[start : start + 100]))
        event = json.loads(process.stdout.readline())
        assert event["what"] == "dropped"
        assert event["namespace"] == ns.layout.fingerprint("default").hex()
        assert bytes.fromhex(event["key"]) in keys
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")


def test_follow_continues_after_a_restart() -> None:
    with LocalDaemon(SMALL) as daemon, following(daemon, "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = json.loads(process.stdout.readline())
        assert (first["what"], first["detail"]) == ("started", f"pid {daemon.pid}")
        daemon.stop()
        assert process.stderr.readline() == "the daemon does not answer: waiting for it\n"
        daemon.start()
        second = json.loads(process.stdout.readline())
        assert (second["what"], second["detail"]) == ("started", f"pid {daemon.pid}")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0
        assert errors.splitlines()[-1] == "the daemon has restarted"


def test_follow_reports_lost_events(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = iter([(0, 0), (5, 3), (5, 0)])

    def control(_: str, **asked: Any) -> dict[str, Any]:
        last, lost = next(told)
        event = {"number": last, "at_s": 1.0}
        return {"events": [event] if lost else [], "next": last, "lost": lost, "instance": "a"}

    monkeypatch.setattr(module, "_EVERY_S", 0.0)
    client: Any = SimpleNamespace(control=control)
    events = module._events(client, module.Filter("", (), 0.0), None, follow=True)
    assert next(events)["number"] == 5
    assert capsys.readouterr().err == "3 events were overwritten before they were read\n"
