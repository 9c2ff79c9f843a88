"""`kvstore bundle`: what it collects, and what it must not."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import SMALL, cli, names, new_layout, payloads

HASH = "sha256:" + "ab" * 32
SECRET = "nobody-may-see-this"
URL = f"s3://bucket?endpoint=http://{SECRET}:{SECRET}@host&secret_access_key={SECRET}"
CONFIG = f"""
[network]
url = "{URL}"
password_file = "password"
[dram]
limit = "64MiB"
huge_pages = false
[tenants.chat.dram]
limit = "32MiB"
[[tenants.chat.tokens]]
hash = "{HASH}"
role = "write"
"""


def texts(file: Path) -> dict[str, str]:
    """The files of an archive, by name."""
    with tarfile.open(file) as archive:
        return {
            each.name.removeprefix("kvstore-bundle/"): _text(archive, each) for each in archive.getmembers()
        }


def _text(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> str:
    file = archive.extractfile(entry)
    assert file is not None
    return file.read().decode()


def test_it_has_the_daemon_the_machine_and_no_secrets(tmp_path: Path) -> None:
    log, file = tmp_path / "log", tmp_path / "b.tar.gz"
    lines = [f"line {i}" for i in range(6000)]
    log.write_text("\n".join([*lines, f"no answer from redis://{SECRET}@host:6379", ""]))
    (tmp_path / "password").write_text(SECRET)
    member = {"tokens": [{"hash": HASH}]}
    with LocalDaemon({**SMALL, "tenants": {"chat": member}}) as daemon:
        arguments = "bundle", str(file), "--socket", str(daemon.socket), "--log", str(log), "--json"
        done = cli(*arguments, folder=tmp_path, config=CONFIG)
    assert done.returncode == 0, done.stderr
    told, found = json.loads(done.stdout), texts(file)
    assert told["errors"] == {}
    assert told["parts"].keys() == found.keys()
    assert json.loads(found["status.json"])["tiers"][0]["name"] == "dram"
    assert json.loads(found["settings.json"])["value"]["tenants"]["chat"]["tokens"] == "1 hidden"
    assert json.loads(found["config.json"])["tenants"]["chat"]["tokens"] == "1 hidden"
    assert "endpoint=http://hidden@host&secret_access_key=hidden" in found["config.json"]
    *others, last = found["log.txt"].splitlines()
    assert others == lines[-4999:]
    assert last == "no answer from redis://hidden@host:6379"
    assert not any(word in text for text in found.values() for word in (SECRET, HASH[10:]))
    assert file.stat().st_mode & 0o777 == 0o600


def test_it_has_the_latest_events(tmp_path: Path) -> None:
    """The daemon returns events in pages of 64, the oldest first."""
    file = tmp_path / "b.tar.gz"
    keys = names(3000)
    with LocalDaemon({**SMALL, "policy": {"eviction": "lru"}}) as daemon:
        with Client(daemon.url, strict=True, deadline_s=10) as client:
            ns = client.namespace(new_layout())
            for first in range(0, len(keys), 100):
                ns.put(keys[first : first + 100], payloads(keys[first : first + 100]))
            assert client.status()["counters"]["dropped_blocks"] > 1500
        assert cli("bundle", str(file), "--socket", str(daemon.socket)).returncode == 0
        with Client(daemon.url, strict=True, deadline_s=10) as client:
            [newest] = client.control("events", after=-1)["events"]
    events = json.loads(texts(file)["events.json"])["events"]
    assert len(events) > 1500
    assert events[-1]["number"] == newest["number"]
    assert {"dropped"} <= {event["what"] for event in events}


def test_without_a_daemon_it_has_the_rest_and_the_error(tmp_path: Path) -> None:
    file = tmp_path / "b.tar.gz"
    done = cli(
        "bundle", str(file), "--socket", str(tmp_path / "nobody"), "--log", str(tmp_path / "none"), "--json"
    )
    assert done.returncode == 0, done.stderr
    told, found = json.loads(done.stdout), texts(file)
    assert {"status.json", "log.txt"} <= told["errors"].keys()
    assert "no answer from the daemon" in found["status.json"]
    assert json.loads(found["versions.json"])["packages"]["numpy"]
    assert "MemTotal" in found["machine.txt"]


def test_the_log_can_come_from_a_pipe(tmp_path: Path) -> None:
    """In a pod there is no journal: docs/kubernetes.md pipes `kubectl logs`."""
    file = tmp_path / "b.tar.gz"
    command = [sys.executable, "-m", "kvstore", "bundle", str(file), "--log", "/dev/stdin"]
    subprocess.run(command, input=b"a line\n", check=True, capture_output=True, timeout=30)
    assert texts(file)["log.txt"] == "a line\n"


def test_it_replaces_no_file(tmp_path: Path) -> None:
    file = tmp_path / "b.tar.gz"
    file.write_text("mine")
    done = cli("bundle", str(file))
    assert done.returncode == 2
    assert "exists" in done.stderr
    assert "another file" in done.stderr
    assert file.read_text() == "mine"
