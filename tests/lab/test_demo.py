"""The demo: its output, what makes it fail, and the dashboard that stays."""

from __future__ import annotations

import io
import re
import shlex
import signal
import socket
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from urllib.error import HTTPError

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvstore.cli import app
from kvstore.cli.lab import live
from kvstore.lab.demo import chats, local_admin
from kvstore.lab.demo.report import WIDTH, Findings, print_next, print_promises
from kvstore.lab.replay import Tally
from kvstore.types import Tier
from tests.cli.terminal import on_terminal, terminal
from tests.daemons import cli
from tests.docs.test_docs import known


@pytest.fixture(scope="module")
def shown() -> str:
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    assert chats.run(console, ".venv/bin/kvstore")
    return console.export_text()


def test_the_demo_shows_every_promise(shown: str) -> None:
    promises = [line.split(maxsplit=1)[1] for line in shown.splitlines() if line.startswith(" ok ")]
    patterns = (
        r"never wrong +0 of \d{3,} blocks wrong, every byte compared",
        r"never over the limit +DRAM [\d.]+MiB of 32MiB, NVMe [\d.]+MiB of 256MiB at most",
        r"never forgetting +after SIGKILL [1-9]\d* DRAM and \d+ NVMe hits, 0 lost",
        r"never slower +the dead daemon: a miss in \d+ ms",
        r"never mixing tenants +the same [1-9]\d* blocks for another tenant: 0 found",
    )
    assert len(promises) == len(patterns)
    for line, pattern in zip(promises, patterns, strict=True):
        assert re.fullmatch(pattern, line), line
    assert "FAIL" not in shown


def test_the_demo_fits_80_columns(shown: str) -> None:
    assert max(map(len, shown.splitlines())) <= 80
    assert "SIGKILL, then restart" in shown
    turns = [line.split() for line in shown.splitlines() if re.match(r" +\d +\d+ +\d", line)]
    assert [int(turn[0]) for turn in turns] == list(range(1, chats.TURNS + 1))


def test_the_demo_ends_with_three_commands_that_exist(shown: str) -> None:
    lines = shown.split("Next:\n")[1].splitlines()
    commands = [re.split(r"  +", line.strip())[0] for line in lines if line.strip()]
    assert len(commands) == 3
    for command in commands:
        program, *words = shlex.split(command)
        assert program == ".venv/bin/kvstore"
        assert known(words) == ""


def test_the_demo_in_a_pipe_and_on_a_terminal() -> None:
    piped = cli("demo")
    assert (piped.returncode, piped.stderr) == (0, "")
    assert "\x1b" not in piped.stdout
    assert max(map(len, piped.stdout.splitlines())) <= 80
    on = on_terminal("demo", columns=80)
    assert "turn 5 of 5" in on.text
    assert "\x1b[32m" in on.raw
    assert "kvstore demo --stay" in on.text


FINE = {
    "limits_bytes": {"dram": 10, "nvme": 10},
    "block_bytes": 1,
    "killed_before_turn": 2,
    "used_bytes": {"dram": 10, "nvme": 9},
    "other_asked": 2,
}


def kept(tally: Tally, **different: object) -> bool:
    """Returns whether findings with two equal turns count as a success."""
    values = {**FINE, "turns": [tally] * 2, **different}
    return print_promises(Console(quiet=True), Findings(**values))  # type: ignore[arg-type]


def test_the_demo_fails_for_each_broken_promise() -> None:
    tally = Tally(requests=1, asked=2, hits=Counter({Tier.DRAM: 2}))
    assert kept(tally)
    assert not kept(tally, forgotten=1)
    assert not kept(tally, used_bytes={"dram": 11})
    assert not kept(tally, dead_found=1)
    assert not kept(tally, other_found=1)
    assert not kept(tally, other_asked=0)
    assert not kept(Tally(requests=1, asked=2, hits=Counter({Tier.DRAM: 2}), wrong=1))
    assert not kept(Tally(requests=1, asked=2, hits=Counter({Tier.DRAM: 2}), denied=1))
    assert not kept(Tally(requests=1, asked=2, hits=Counter({Tier.NVME: 2}))), "DRAM was lost"


def test_a_failed_demo_has_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "run", lambda *_: False)
    assert CliRunner().invoke(app, ["demo"]).exit_code == 1


def test_the_dashboard_stays_until_ctrl_c() -> None:
    with terminal("demo", "--stay", columns=80) as shown:
        text = shown.read_until(".sock")
        url = re.findall(r"http://127\.0\.0\.1:\d+/", text)[0]
        token = re.findall(r"token +(kvs_\S+)", text)[0]
        daemon = Path(re.findall(r"--socket (\S+\.sock)", text)[0])
        with urllib.request.urlopen(url, timeout=10) as page:
            assert b"<html" in page.read().lower()
        with pytest.raises(HTTPError, match="401") as refused:
            urllib.request.urlopen(f"{url}v1/status", timeout=10)
        refused.value.close()
        asked = urllib.request.Request(f"{url}v1/status", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            assert answer.status == 200
        assert cli("top", "--count", "1", "--every", "0.1s", "--socket", str(daemon)).returncode == 0
        shown.process.send_signal(signal.SIGINT)
        assert "Stopping both." in shown.read_to_end()
        assert shown.process.wait(30) == 0
    assert not daemon.parent.exists()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=10)


def test_a_used_port_is_replaced() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        used = other.getsockname()[1]
        assert local_admin._free_port(used) not in (0, used)
    admin = local_admin.LocalAdmin()
    assert admin.section["listen"] == f"127.0.0.1:{admin.port}"
    assert admin.url == f"http://127.0.0.1:{admin.port}/"


@pytest.mark.parametrize("place", ["below the folder", "in PATH", "elsewhere"])
def test_commands_are_printed_as_they_can_be_typed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "env/bin/kvstore"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(program), "demo"])
    monkeypatch.setenv("PATH", str(program.parent) if place == "in PATH" else "/nowhere")
    monkeypatch.chdir(tmp_path if place == "below the folder" else "/")
    expected = {"below the folder": "env/bin/kvstore", "in PATH": "kvstore", "elsewhere": str(program)[1:]}
    assert live._program() == expected[place]


def test_python_is_printed_as_it_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "kvstore/__main__.py"), "demo"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "my env/bin/python"))
    monkeypatch.chdir(tmp_path)
    assert live._program() == "'my env/bin/python' -m kvstore"


@pytest.mark.parametrize("length", [20, 60])
def test_no_line_of_the_next_commands_is_too_long(length: int) -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    commands = [("x" * length, "the purpose of it"), ("y", "another")]
    print_next(console, commands)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) == 1 + len(commands) * (1 if length == 20 else 2)
