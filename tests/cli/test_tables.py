"""Tables of a daemon with long names: on a terminal of 100 columns, in a pipe, with NO_COLOR."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore import Client, Layout
from kvstore.lab.local_daemon import LocalDaemon
from tests.cli.terminal import on_terminal, terminal
from tests.daemons import BLOCK, WITH_NVME, cli, eventually, got, idle, names, payloads
from tests.lab.small import chats
from tests.tenants import TenantDaemon

COLUMNS = 100
TENANT = "research-and-development-of-assistants"
REVISION = "0123456789abcdef0123456789abcdef01234567"
MODEL = "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8"
TENANTS = f"""
[tenants.{TENANT}]
uids = [{os.getuid()}]
role = "admin"
[tenants.{TENANT}.dram]
floor = "4MiB"
limit = "12MiB"
[tenants.batch]
"""
TABLES = {
    "status": "status",
    "tenant list": "tenant list",
    "quota list": "quota list",
    "quota show": f"quota show {TENANT}",
    "ns list": "ns list",
    "ns show": "ns show ID",
    "tier list": "tier list",
    "tier show": "tier show nvme",
    "device list": "device list",
    "device show": "device show nvme",
    "policy show": "policy show",
    "why": "why KEY",
    "why of a file": "why FILE",
    "blocks show": "blocks show FILE",
    "events": "events -n 20",
}


@dataclass
class Store:
    daemon: LocalDaemon
    namespace: str
    key: str
    file: Path

    def line(self, command: str) -> list[str]:
        """Returns the words of a command with the names of this daemon."""
        there = {"ID": self.namespace, "KEY": self.key, "FILE": str(self.file)}
        return [*(there.get(word, word) for word in command.split()), "--socket", str(self.daemon.socket)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("tables")
    settings = {**WITH_NVME, "network": {"url": f"file://{folder}/network"}}
    with TenantDaemon(settings, TENANTS) as daemon, Client(daemon.url, deadline_s=30, strict=True) as client:
        layout = Layout(MODEL, BLOCK, revision=REVISION, shard="tp3of8.pp1of2")
        ns, keys = client.namespace(layout), names(900)
        ns.put(keys, payloads(keys))
        eventually(lambda: idle(client.status()), 30)
        got(ns, keys[:100])
        file = folder / "keys"
        file.write_text("\n".join(key.hex() for key in keys[:300:50]))
        [row] = client.control("namespaces")["namespaces"]
        client.control("publish", namespace=row["id"], tenants=["batch"], instead_of=None)
        yield Store(daemon, row["id"], keys[0].hex(), file)


@pytest.mark.parametrize("command", TABLES.values(), ids=TABLES)
def test_tables_fit_a_terminal(store: Store, command: str) -> None:
    shown = on_terminal(*store.line(command), columns=COLUMNS)
    lines = shown.text.splitlines()
    assert lines
    assert max(map(len, lines)) <= COLUMNS
    # Cells are continued on the next line, never cut.
    assert "…" not in shown.text


def test_ids_and_keys_are_whole_on_a_terminal(store: Store) -> None:
    assert store.namespace in on_terminal(*store.line("ns list"), columns=COLUMNS).text
    assert store.key[:16] in on_terminal(*store.line("why FILE"), columns=COLUMNS).text


def test_top_fits_a_terminal(store: Store) -> None:
    with terminal(*store.line("top --every 0.2s"), columns=COLUMNS) as shown:
        text = shown.read_until("decision")
        assert TENANT in text
        assert max(map(len, re.split(r"[\r\n]+", text))) <= COLUMNS


@pytest.mark.parametrize("command", TABLES.values(), ids=TABLES)
def test_output_in_a_pipe_has_neither_colours_nor_lines(store: Store, command: str) -> None:
    text = cli(*store.line(command)).stdout
    assert text.strip()
    assert "\x1b" not in text
    assert not re.search("[\u2500-\u257f]", text)
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_a_row_in_a_pipe_is_one_line_with_every_name(store: Store) -> None:
    head, *rows = cli(*store.line("ns list")).stdout.splitlines()
    assert head.split()[:4] == ["id", "tenant", "model", "revision"]
    assert [row.split()[:5] for row in rows] == [[store.namespace, TENANT, MODEL, REVISION, "tp3of8.pp1of2"]]
    for command in ("tenant list", "quota list"):
        rows = cli(*store.line(command)).stdout.splitlines()
        assert sorted(row.split()[2] for row in rows if row.startswith(f"{TENANT} ")) == ["dram", "nvme"]
    event = cli(*store.line("events -n 1 --what evicted")).stdout
    assert re.search(r"evicted +dram +\S+ [0-9a-f]{32} [0-9a-f]{64}", event)


@pytest.mark.parametrize("command", ["tier list", "quota list", "status"])
def test_no_color_turns_off_colours_on_a_terminal(store: Store, command: str) -> None:
    assert "\x1b[" in on_terminal(*store.line(command)).raw
    assert "\x1b" not in on_terminal(*store.line(command), NO_COLOR="1").raw


def test_reports_of_the_lab_fit_a_terminal(tmp_path: Path) -> None:
    trace = str(chats(tmp_path / "trace.jsonl", 60))
    few = ("--processes", "1", "--block-bytes", "64KiB")
    for args in (
        ("replay", trace, "--capacities", "5%,20%,5%+20%", "--policies", "hazard,lru,s3fifo", *few),
        ("recommend", trace, "--hit", "50%", "--processes", "1", "--token-bytes", "128", "--prefill", "100"),
    ):
        text = on_terminal("lab", *args, columns=COLUMNS).text
        # Progress rewrites its line.
        assert max(len(line.split("\r")[-1]) for line in text.splitlines()) <= COLUMNS
