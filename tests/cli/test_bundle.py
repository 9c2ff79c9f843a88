"""`kvstore bundle`: what it collects, and what it must not."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import SMALL, cli

HASH = "sha256:" + "ab" * 32
CONFIG = f"""
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
    log.write_text("".join(f"line {i}\n" for i in range(6000)))
    with LocalDaemon(SMALL) as daemon:
        arguments = "bundle", str(file), "--socket", str(daemon.socket), "--log", str(log), "--json"
        done = cli(*arguments, folder=tmp_path, config=CONFIG)
    assert done.returncode == 0, done.stderr
    told, found = json.loads(done.stdout), texts(file)
    assert told["errors"] == {}
    assert told["parts"].keys() == found.keys()
    assert json.loads(found["status.json"])["tiers"][0]["name"] == "dram"
    assert json.loads(found["events.json"])["events"]
    assert json.loads(found["config.json"])["tenants"]["chat"]["tokens"] == "1 hidden"
    assert found["log.txt"].splitlines() == [f"line {i}" for i in range(1000, 6000)]
    assert not any(HASH[10:] in text for text in found.values())
    assert file.stat().st_mode & 0o777 == 0o600


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


def test_it_replaces_no_file(tmp_path: Path) -> None:
    file = tmp_path / "b.tar.gz"
    file.write_text("mine")
    done = cli("bundle", str(file))
    assert done.returncode == 2
    assert "exists" in done.stderr
    assert "another file" in done.stderr
    assert file.read_text() == "mine"
