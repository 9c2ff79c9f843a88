"""Commands that change the running configuration, against a real daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import WITH_NVME, cli, names, new_layout, payloads

TENANTS = {"tenants": {"chat": {"share": 1.0}}}


@pytest.fixture
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon({**WITH_NVME, **TENANTS}) as served:
        yield served


def changed(daemon: LocalDaemon, *args: str) -> dict[str, Any]:
    done = cli(*args, "--socket", str(daemon.socket), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_quota_is_set_and_reset(daemon: LocalDaemon) -> None:
    with Client(daemon.url, deadline_s=10, strict=True) as client:
        asked = ("quota", "set", "chat", "--dram-limit", "4MiB", "--share", "2")
        assert changed(daemon, *asked, "--dry-run")["dry_run"] is True
        assert client.control("tenant", name="chat")["share"] == 1.0
        assert len(changed(daemon, *asked)["changed"]) == 2
        chat = client.control("tenant", name="chat")
        assert (chat["share"], chat["tiers"][0]["limit_bytes"]) == (2.0, 4 << 20)
        changed(daemon, "quota", "set", "chat", "--dram-limit", "none")
        assert client.control("tenant", name="chat")["tiers"][0]["limit_bytes"] is None


def test_policy_set_changes_the_policy(daemon: LocalDaemon) -> None:
    assert len(changed(daemon, "policy", "set", "arc")["changed"]) == 1
    done = cli("policy", "show", "--socket", str(daemon.socket), "--json")
    assert json.loads(done.stdout)["policy"] == "arc"


def test_quota_set_prints_the_consequences(daemon: LocalDaemon) -> None:
    with Client(daemon.url, deadline_s=10, strict=True) as client:
        ns, keys = client.namespace(new_layout()), names(300)
        for at in range(0, 300, 100):
            ns.put(keys[at : at + 100], payloads(keys[at : at + 100]))
    socket = ("--socket", str(daemon.socket))
    tried = cli("quota", "set", "default", "--dram-limit", "2MiB", "--dry-run", *socket).stdout
    assert "would be: tenants.default is new" in tried
    assert " of default would be evicted from dram" in tried
    assert "ends with the daemon" not in tried
    done = cli("quota", "set", "chat", "--dram-floor", "4MiB", *socket).stdout
    assert "is now: tenants.chat.dram.floor = 4194304" in done
    assert "4MiB of dram is now reserved for chat" in done
    assert "ends with the daemon" in done
    assert cli("quota", "set", "chat", "--dram-floor", "4MiB", *socket).stdout == "nothing changes\n"
