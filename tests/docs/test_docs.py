"""Runs the commands in README and docs, and their blocks of Python; parses blocks of TOML, JSON and YAML."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from kvstore import config
from kvstore.cli import app
from tests.docs.blocks import CHECKED, HOW, SHELL, Block, blocks, uncovered
from tests.docs.commands import ROOT, Site, fenced, handbook, inline, is_ours
from tests.docs.hook import COPIES, PAGES

DOCS = ROOT / "docs"
DOCUMENTS = {"README.md": ROOT / "README.md"}
DOCUMENTS |= {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in DOCUMENTS.items()}
BLOCKS = [
    pytest.param(block, id=f"{name}:{block.line}")
    for name, text in TEXTS.items()
    for block in blocks(text)
    if not block.reason and block.language in CHECKED and block.language not in SHELL
]
FENCED = [(name, line) for name, text in TEXTS.items() for line in fenced(text)]
ENGINES = ("localhost:8000", "localhost:30000")
"""Lines that ask an engine are not run here: `tests/engines` has engines."""
RUN: dict[str, str] = {}
for _name, _line in FENCED:
    if is_ours(_line) and not _line.startswith("make") and not any(each in _line for each in ENGINES):
        RUN.setdefault(_line, _name)  # in the order of the first page with the line, whose files it needs
HANDBOOK = sorted(set(handbook(TEXTS["troubleshooting.md"])) - set(RUN))

NOT_RUN = {
    "systemd-sysusers": "changes the machine's users; test_systemd.py and test_packaging.py run it elsewhere",
    "usermod": "changes the machine's users",
    "systemctl": "no service manager is asked by tests; the names of units are checked",
    "pip": "changes an environment; test_wheel.py installs the wheel",
    "pipx": "changes an environment; test_packaging.py runs it",
    "apt": "changes the machine; test_packaging.py installs the package elsewhere",
    "podman": "there is no container engine; test_packaging.py runs what the recipe runs",
    "kubectl": "there is no cluster; test_packaging.py reads the manifest",
    "kvstore-llama-proxy": "it needs llama-server; tests/engines/llamaserver/test_page.py runs it",
    "ollama": "it needs Ollama's server and a model",
    "lmcache": "it needs LMCache; tests/engines/lmcache/test_server.py runs it",
    "trtllm-serve": "TensorRT-LLM needs a GPU; tests/engines/trtllm runs the connector with a fake of it",
    "vllm": "it needs a server; tests/engines/vllm/test_seen.py runs it",
    "python": "engines are run by tests/engines, benches by hand",
    "cp": "copies a folder of an installation",
    "(umask": "writes a key below /etc",
}
"""First words of lines that are not run, with reasons."""

ENDS_WITH = {"doctor": {0, 1}}
"""Commands with an exit code that depends on the machine."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("docs"))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(("line", "where"), [*RUN.items()])
def test_documented_commands_run(site: Site, line: str, where: str) -> None:
    ran = site.run(line)
    assert ran.returncode in ENDS_WITH.get(line.split()[1], {0}), f"{where}: {ran.stdout}{ran.stderr}"
    assert "Traceback" not in ran.stdout + ran.stderr


@pytest.mark.parametrize("line", HANDBOOK)
def test_commands_of_the_handbook_run(site: Site, line: str) -> None:
    ran = site.run(line)
    assert ran.returncode in ENDS_WITH.get(line.split()[1], {0}), ran.stdout + ran.stderr
    assert ran.stdout.strip()
    if line.startswith("curl"):
        assert '"type":"about:blank"' not in ran.stdout


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_run_or_parse(site: Site, block: Block) -> None:
    match block.language:
        case "toml":
            config.parse(block.text)
        case "json":
            json.loads(block.text)
        case "yaml":
            assert [*yaml.safe_load_all(block.text)]
        case "python":
            ran = site.run_python(block.text)
            assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}\n{HOW}"


def test_every_block_is_checked_or_says_why_not() -> None:
    for name, text in TEXTS.items():
        assert uncovered(text) == [], name
        for block in blocks(text):
            if block.reason:
                print(f"not run: {name}:{block.line}: {block.reason}")


def test_blocks_that_nothing_checks_are_detected() -> None:
    assert [block.text for block in blocks("```python\n1\n```\n\n- a\n\n  ```sh\n  ls\n  ```\n")] == [
        "1\n",
        "ls\n",
    ]
    [marked] = blocks("<!-- not run: needs a GPU -->\n```python\n1\n```\n")
    assert (marked.reason, marked.line) == ("needs a GPU", 2)
    assert uncovered("<!-- not run: needs a GPU -->\n\n```cobol\n1\n```\n```text\n2\n```") == []
    assert "language 'cobol'" in uncovered("```cobol\n1\n```")[0]
    assert "no reason" in uncovered("<!-- not run: -->\n```python\n1\n```")[0]
    assert "before a fence" in uncovered("<!-- not run: later -->\ntext\n\n```python\n1\n```")[0]
    assert fenced("<!-- not run: deletes everything -->\n```sh\nkvstore tenant delete a --yes\n```") == []


def test_every_documented_line_is_run_or_listed() -> None:
    for name, line in FENCED:
        first = line.split()[0]
        assert first in NOT_RUN or is_ours(line) or not re.fullmatch(r"[a-z][a-z-]+", first), (
            f"{name}: {line}"
        )
        if first in NOT_RUN and not is_ours(line):
            print(f"not run: {line}: {NOT_RUN[first]}")


def test_documented_make_targets_exist() -> None:
    shown = re.findall(r"(?:`|^)make ([a-z-]+)", "\n".join(TEXTS.values()), re.MULTILINE)
    assert {"demo", "test", "install", "deb"} <= set(shown)
    for target in sorted(set(shown)):
        command = ["make", "--dry-run", target]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
        assert ran.returncode == 0, ran.stderr


def test_documented_units_exist() -> None:
    verbs = "enable|disable|start|stop|restart|try-restart|reload|status|edit"
    lines = re.findall(rf"systemctl (?:{verbs}) ([^`&#\n]*)", "\n".join(TEXTS.values()))
    units = {
        word.removesuffix(".service") for line in lines for word in line.split() if word.startswith("kv")
    }
    assert {"kvstore", "kvstore-admin", "kvstore@one", "kvstore.socket"} <= units
    there = {
        file.name.removesuffix(".in").removesuffix(".service") for file in (ROOT / "systemd").glob("*.in")
    }
    assert {re.sub(r"@\w+", "", unit) for unit in units} <= there


def known(words: list[str]) -> str:
    """Returns the error of a kvstore command line; empty if the command and its options exist."""
    command: Any = get_command(app)
    while words and not words[0].startswith("-") and getattr(command, "commands", None):
        if words[0] not in command.commands:
            return f"there is no {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    options = {name for param in command.params for name in param.opts} | {"--help"}
    unknown = [word for word in words if re.match(r"--?[a-z]", word) and word.split("=")[0] not in options]
    return f"no such options: {unknown}" if unknown else ""


@pytest.mark.parametrize("name", TEXTS)
def test_commands_within_sentences_exist(name: str) -> None:
    for line in inline(TEXTS[name]):
        words = shlex.split(re.sub(r"\.\.\.|[<>()]", " ", line))
        if words[0] == "kvstore":
            assert known(words[1:]) == "", line


def test_an_unknown_command_is_detected() -> None:
    assert known(["lab", "guess"])
    assert known(["status", "--colour"])
    assert not known(["tenant", "delete", "NAME", "--yes"])


def test_links_have_targets() -> None:
    generated = {DOCS / page for page in (*COPIES, *(f"reference/{name}.md" for name in PAGES))}
    for name, path in DOCUMENTS.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]):
            if "://" in target:
                continue
            file, _, anchor = target.partition("#")
            linked: Path = (path.parent / file).resolve() if file else path
            if linked in generated:
                continue  # `make docs` verifies links to these
            assert linked.exists(), f"{name}: {target}"
            if anchor:
                heads = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
                slugs = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}
                assert anchor in slugs, f"{name}: {target}"


def test_the_handbook_has_every_readiness_reason() -> None:
    routes = (ROOT / "kvstore/admin/routers/queries.py").read_text()
    reasons = re.findall(r'reasons\.append\(f"\{.*?\}: (.*?)"\)', routes) + re.findall(
        r'reasons = \["(.*?)"\]', routes
    )
    assert len(reasons) >= 5
    rows = [line for line in TEXTS["troubleshooting.md"].splitlines() if line.startswith("| `/readyz`")]
    for reason in reasons:
        words = set(re.sub("reads are|writes are", "", reason).split())
        assert any(words <= set(re.findall(r"[\w']+", row)) for row in rows), reason


def test_every_promise_of_the_security_page_names_existing_tests() -> None:
    """Each row of the tables of promises names existing tests or files of tests."""
    there = {
        name
        for file in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8"))
    }
    rows = [row for row in TEXTS["security.md"].splitlines() if row.startswith("| ")]
    promises = [row for row in rows if re.search(r"`test", row)]
    assert len(promises) > 20
    for row in promises:
        named = re.findall(r"`(test[\w/.]+)`", row.split("|")[-2])
        assert named, row
        for name in named:
            assert name in there or (ROOT / name).is_file(), f"there is no {name}"
