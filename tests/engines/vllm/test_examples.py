"""The examples with vLLM run as they are written, with a tiny model."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.admin.serving import free_port
from tests.daemons import eventually
from tests.engines.tokenizer import add_tokenizer
from tests.engines.vllm.engine import full_blocks
from tests.engines.vllm.models import make_model
from tests.engines.vllm.terminals import SMALL, Terminals, blocks, columns, healthy, lines

pytestmark = pytest.mark.alone
EXAMPLES = Path(__file__).parents[3] / "examples"
PAGE_TOKENS = 128
"""Block size of vLLM on CPUs."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer."""
    return add_tokenizer(make_model(tmp_path_factory.mktemp("texts")))


def run(example: str, model: Path) -> list[str]:
    """Runs an example. Returns the lines that it prints."""
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / example), str(model)],
        capture_output=True, text=True, timeout=600, check=False, env={**os.environ, **SMALL},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout.splitlines()


def test_vllm_offline_loads_what_it_has_stored(texts: Path) -> None:
    printed = run("vllm_offline.py", texts)
    [cold, warm] = [
        re.findall(r"^(\d+) of (\d+) prompt tokens", line) for line in printed if "prompt" in line
    ]
    [(none, size)], [(loaded, _)] = cold, warm
    assert (int(none), int(loaded)) == (0, full_blocks(int(size), PAGE_TOKENS))
    served = int(loaded) // PAGE_TOKENS
    assert f"daemon: {(int(size) + 15) // PAGE_TOKENS} blocks stored, {served} served" in printed
    assert "equal tokens: True" in printed


def test_prefill_decode_shares_blocks_and_computes_only_the_rest(texts: Path) -> None:
    printed = [line for line in run("prefill_decode/run.py", texts) if line.startswith("prefill")]
    assert len(printed) == 2
    for line in printed:
        size, loaded, computed, generated = map(int, re.findall(r"\d+", line))
        assert (loaded, computed) == (full_blocks(size, PAGE_TOKENS), size - full_blocks(size, PAGE_TOKENS))
        assert generated == 16
        assert line.endswith("same first token: True")


def test_prefill_decode_serves_the_readmes_lines(texts: Path, tmp_path: Path) -> None:
    """Three servers and a daemon with other ports, another model and less memory."""
    folder = EXAMPLES / "prefill_decode"
    [_, (_, started), (_, asked)] = blocks((folder / "README.md").read_text())
    ports = {str(n): str(free_port()) for n in (8000, 8100, 8200)}
    (tmp_path / "proxy.py").write_bytes((folder / "proxy.py").read_bytes())

    def placed(line: str) -> str:
        for shown, port in ports.items():
            line = line.replace(shown, port)
        line = line.replace("MODEL", str(texts)).replace("kvstore serve", "python -m kvstore serve")
        return re.sub(r"^python", sys.executable, line, flags=re.MULTILINE)

    env = {"KVSTORE_SOCKET": f"unix://{tmp_path}/kvstore.sock"}
    (tmp_path / "kvstore.toml").write_text(
        f'[daemon]\nsocket = "{tmp_path}/kvstore.sock"\n[dram]\nlimit = "128MiB"\nhuge_pages = false\n'
    )
    with Terminals(tmp_path, env) as terminals:
        daemon, prefill, decode, proxy = lines(placed(started))
        terminals.start(daemon, (tmp_path / "kvstore.sock").exists)
        # One after the other: each start takes a core.
        for server, port in ((prefill, "8100"), (decode, "8200")):
            terminals.start(f"{server} --enforce-eager", lambda port=port: healthy(int(ports[port])))
        terminals.start(proxy, lambda: listens(int(ports["8000"])))
        ask, count = lines(placed(asked))
        first = json.loads(terminals.run(ask))
        loaded = float(terminals.run(count).split()[-1])
        size = first["usage"]["prompt_tokens"]
        assert loaded == full_blocks(size, PAGE_TOKENS) > 0
        assert first["usage"]["completion_tokens"] == 16
        # The same from the decode server alone, whose own cache has the prompt.
        alone = json.loads(terminals.run(ask.replace(ports["8000"], ports["8200"])))
        assert alone["choices"][0]["text"] == first["choices"][0]["text"]
        # A streamed answer passes the proxy as well.
        streamed = terminals.run(ask.replace('"max_tokens"', '"stream": true, "max_tokens"'))
        assert streamed.count("data: {") >= 1
        assert "data: [DONE]" in streamed


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_vllm_server_serves_the_readmes_requests_without_containers(texts: Path, tmp_path: Path) -> None:
    """The containers' commands with other folders, another port and model, and less memory."""
    folder, port = EXAMPLES / "vllm_server", free_port()
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    for name in ("run", "operators", "blocks", "bin"):
        (tmp_path / name).mkdir()
    program = tmp_path / "bin/kvstore"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvstore "$@"\n')
    program.chmod(0o755)
    places = {
        "/etc/kvstore/kvstore.toml": f"{tmp_path}/kvstore.toml",
        "/run/kvstore": f"{tmp_path}/run",
        "/run/operators": f"{tmp_path}/operators",
        "/var/lib/kvstore": f"{tmp_path}/blocks",
        "Qwen/Qwen3-0.6B": str(texts),
        "${MODEL:-Qwen/Qwen3-0.6B}": str(texts),
        "localhost:8000": f"localhost:{port}",
        '"8GiB"': '"128MiB"',
        '"50GiB"': '"256MiB"',
    }

    def placed(text: str) -> str:
        for place in sorted(places, key=len, reverse=True):
            text = text.replace(place, places[place])
        return text

    def command(name: str) -> str:
        """The line that a service runs, with its environment."""
        service = services[name]
        variables = [f"{key}={value}" for key, value in service["environment"].items()]
        words = [*service.get("entrypoint", ["kvstore"]), *service["command"]]
        return " ".join(["env", *(f"'{placed(word)}'" for word in [*variables, *words])])

    (tmp_path / "kvstore.toml").write_text(placed((folder / "kvstore.toml").read_text()))
    [_, (_, shown)] = blocks((folder / "README.md").read_text())
    path = f"{program.parent}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    with Terminals(tmp_path, {"PATH": path}) as terminals:
        [kind, *check] = services["kvstore"]["healthcheck"]["test"]
        assert kind == "CMD"
        exec_in = f"env KVSTORE_SOCKET={placed(services['kvstore']['environment']['KVSTORE_SOCKET'])}"
        terminals.start(command("kvstore"), (tmp_path / "operators/kvstore.sock").exists)
        terminals.run(f"{exec_in} {' '.join(check)}")
        server = f"{command('vllm')} --port {port} --enforce-eager"
        vllm = terminals.start(server, lambda: healthy(port))
        found = []
        for line in lines(placed(shown)):
            if line == "docker compose restart vllm":
                terminals.stop(vllm)
                vllm = terminals.start(server, lambda: healthy(port))
            elif line.startswith("docker compose exec kvstore "):
                asked = line.replace("docker compose exec kvstore", exec_in)
                # Blocks are stored in the background.
                eventually(
                    lambda asked=asked: ["stored", "blocks", "14"] in columns(terminals.run(asked)), 30
                )
                found.append(["hit", "blocks", "dram", "14"] in columns(terminals.run(asked)))
            else:
                assert line.startswith("curl ")
                assert "choices" in terminals.run(line)
        assert found == [False, True]
