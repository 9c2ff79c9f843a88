"""README.md's way from the installation to a hit, with the lines as they are written there.

Substituted are only places: the model, the port, and the folders of sockets and of the environment.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.admin.serving import free_port
from tests.daemons import eventually
from tests.engines.tokenizer import add_tokenizer
from tests.engines.vllm.models import make_model
from tests.engines.vllm.terminals import Terminals, blocks, columns, healthy, lines

pytestmark = pytest.mark.alone
ROOT = Path(__file__).parents[3]
SOURCES = ("LICENSE", "README.md", "pyproject.toml", "connectors", "kvstore")


def section() -> list[tuple[str, str]]:
    """Returns the fenced blocks of the section about vLLM."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [text] = re.findall(r"^## vLLM in one minute\n(.*?)^## ", readme, re.DOTALL | re.MULTILINE)
    return blocks(text)


def environment(folder: Path) -> Path:
    """Makes an environment with vLLM and without kvstore. Returns the folder of its programs."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "vllm.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_the_lines_of_the_readme_serve_the_second_request_from_the_store(tmp_path: Path) -> None:
    model, work, run = (tmp_path / name for name in ("model", "work", "run"))
    add_tokenizer(make_model(model, max_position_embeddings=2048))
    for source in SOURCES:
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        work.mkdir(exist_ok=True)
        copy(ROOT / source, work / source)
    run.mkdir()
    port, bin_folder = free_port(), environment(tmp_path / "environment")
    places = {
        "--model MODEL": f"--model {model} --port {port}",
        "MODEL": str(model),
        "localhost:8000": f"localhost:{port}",
        "/run/kvstore": str(run),
    }

    def placed(text: str) -> str:
        for place, here in places.items():
            text = text.replace(place, here)
        return text

    shell = [lines(placed(block)) for language, block in section() if language == ""]
    [expected] = [columns(text) for language, text in section() if language == "text"]
    first, second, third = shell
    # PYTHONPATH of these tests would hide what pip installs.
    env = {"PATH": f"{bin_folder}:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": ""}
    env["KVSTORE_SOCKET"] = f"unix://{run}/kvstore.sock"
    with Terminals(work, env) as terminals:
        *install, serve = first
        for line in install:
            terminals.run(line)
            for file in work.glob("*.toml"):
                if file.name != "pyproject.toml":
                    file.write_text(placed(file.read_text()))
        for name in ("kvstore", "connectors"):  # what is installed is used
            shutil.rmtree(work / name)
        if serve == "kvstore serve":  # without a configuration, the socket of root has one place
            (work / "socket.toml").write_text(f'[daemon]\nsocket = "{run}/kvstore.sock"\n')
            serve += " -c socket.toml"
        terminals.start(serve, (run / "kvstore.sock").exists)
        [server], [*requests, show] = second, third
        answers = []
        for _ in range(2):
            vllm = terminals.start(server, lambda: healthy(port))
            for request in requests:
                answers.append(json.loads(terminals.run(request))["choices"][0]["text"])
            # Blocks are stored in the background.
            eventually(lambda: columns(terminals.run(show))[0] == expected[0], 30)
            terminals.stop(vllm)
        assert columns(terminals.run(show)) == expected
        assert answers[0]
        assert len(answers) == 2
