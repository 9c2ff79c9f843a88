"""The page's commands run as pasted, and its tables have every option, model and count."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path

from kvstore.lab.local_daemon import LocalDaemon
from kvstore_llamacpp.proxy import command, namespace
from kvstore_llamacpp.proxy.figures import Figures
from kvstore_llamacpp.proxy.llama_server import options as server_options
from kvstore_llamacpp.proxy.prompts import SLOT_PATHS
from tests.engines.llamaserver.build import program
from tests.engines.llamaserver.serving import pasted

PAGE = (Path(__file__).parents[3] / "docs/llama-cpp.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## llama-server\n")[2].partition("\n## ")[0]


def table(heading: str) -> str:
    return SECTION.partition(f"\n### {heading}\n")[2].partition("\n### ")[0]


def test_the_commands_run_as_pasted(models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon) -> None:
    [start] = re.findall(r"^(kvstore-llama-proxy .*)$", SECTION, re.MULTILINE)
    [curl] = re.findall(r"^(curl .*)$", SECTION, re.MULTILINE)
    (tmp_path / "model.gguf").symlink_to(models["llama"])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/llama-server").symlink_to(program())
    told = re.search(r"restores (\d+) tokens\. .*restores (\d+) of its (\d+)", SECTION, re.DOTALL)
    assert told is not None
    for expected in told.groups()[:2]:
        with pasted(shlex.split(start)[1:], tmp_path, own_daemon.url) as proxy:
            line = curl.replace("localhost:8080", f"127.0.0.1:{proxy.port}")
            ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True)
            assert f"x-kvstore-restored-tokens: {expected}\n" in ran.stdout.lower()
            assert f'"prompt_n":{int(told[3]) - int(expected)}' in ran.stdout
            proxy.settled()


def test_the_page_has_every_option_with_its_default() -> None:
    rows = dict(
        re.findall(r"^\| `(--[a-z-]+)[^`]*` \| (.*?) \|", table("Options of the proxy"), re.MULTILINE)
    )
    options = {
        action.option_strings[0]: action.default
        for action in command._parser()._actions
        if action.option_strings[0] != "-h"
    }
    assert set(rows) == set(options)
    for name, default in options.items():
        told = rows[name].strip("`")
        if isinstance(default, float):
            assert float(told) == default, name
        elif default is not None:
            assert told == str(default), name


def test_the_page_has_every_model_and_every_refused_argument() -> None:
    text = table("Models and arguments of llama-server")
    assert all(f"`{name}`" in text for name in (*namespace.SERVED_MODELS, *namespace._WINDOWS))
    for names, (reason, _) in server_options._REFUSED.items():
        assert any(f"`{name}`" in text for name in names), names
        assert reason
    for word in server_options._SET:
        assert not word.startswith("--") or f"`{word}" in SECTION, word


def test_the_page_has_every_path_and_the_counts_of_its_symptoms() -> None:
    assert all(f"`{path}`" in table("Requests") for path in SLOT_PATHS if path != "/responses")
    symptoms = re.findall(r"^\| `([a-z_]+)` grows", table("If something fails"), re.MULTILINE)
    assert {"slow_loads", "unsaved", "refused_restores"} == set(symptoms)
    assert set(symptoms) <= {field.name for field in fields(Figures)}
