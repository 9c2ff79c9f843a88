"""The pages of docs/ say what the code does: examples, keys, options, places."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvstore import Client, Layout, config
from kvstore.cli import app
from kvstore.daemon.tenancy.auth import hash_of, new_token
from kvstore.errors import UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from tests.lab.small import chats

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    """Returns the text of a page of docs/."""
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def test_the_example_runs_as_pasted() -> None:
    example, *_ = re.findall(r"```python\n(.*?)```", page("python"), re.DOTALL)
    command = [sys.executable, "-c", example]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "PutResult(stored=62, present=0, denied=0, why='')",
        "62 62 True",
        "8 2097152",
    ]


def test_the_configuration_for_many_tenants_works_as_pasted() -> None:
    [text] = re.findall(r"```toml\n(.*?)```", page("tenants"), re.DOTALL)
    assert list(config.parse(text).tenants) == ["chat", "batch"]
    token = new_token(bytes(32))
    text = re.sub(r"sha256:[0-9a-f]{64}", f"sha256:{hash_of(token).hex()}", text)
    settings = tomllib.loads(text)
    del settings["nvme"]["path"]  # the test uses a temporary folder
    layout, keys = Layout("m", 4096), [b"a", b"b"]
    with LocalDaemon(settings) as daemon, Client(daemon.url, token, strict=True) as chat:
        assert daemon.socket.stat().st_mode & 0o777 == 0o666
        ns = chat.namespace(layout)
        assert ns.put(keys, np.zeros((2, 4096), np.uint8)).stored == 2
        assert ns.publish(["batch"])
        assert [tenant["name"] for tenant in chat.status()["tenants"]] == ["chat"]
        with Client(daemon.url, "wrong", strict=True) as nobody, pytest.raises(UnavailableError):
            nobody.namespace(layout).lookup(keys)


def test_the_command_of_the_sizing_page_prints_the_columns_that_it_explains(tmp_path: Path) -> None:
    section = page("lab").split("## Size a cache")[1].split("\n## ")[0]
    command = re.findall(r"```\nkvstore (lab replay .*?)\n```", section)[0]
    trace = chats(tmp_path / "trace", 50)
    args = command.replace("mooncake_conversation_trace.jsonl.zst", str(trace)).split()
    assert args[-2] == "--plot", "which the tests of plots cover"
    ran = CliRunner().invoke(app, [*args[:-2], "--processes", "1"])
    assert ran.exit_code == 0, ran.output
    assert "5%+25%" in ran.output
    explained = re.findall(r"^\| ([a-z/, ]+) \|", section, re.MULTILINE)
    for name in ", ".join(explained).replace("column, ", "").split(", "):
        assert name.removeprefix("of ") in ran.output.replace("of NVMe", "NVMe"), name


def test_paths_in_architecture_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for place in re.findall(r"`((?:core|wire|tiers|daemon|client|lab)/[a-z_/.]*)`", text):
        assert (ROOT / "kvstore" / place).exists(), place
    for place in re.findall(r"`((?:tests|bench)/[a-z_/.]*)`", text):
        assert (ROOT / place).exists(), place


def test_tests_that_prove_a_guarantee_exist() -> None:
    section = page("promises")
    named = re.findall(r"`(tests/[a-z_/.]+?)(?:::([a-z_]+))?`", section)
    assert len(named) > 10
    for place, test in named:
        assert (ROOT / place).exists(), place
        if test:
            assert f"def {test}(" in (ROOT / place).read_text(encoding="utf-8"), test
