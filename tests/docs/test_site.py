"""The documentation site builds without a warning, and its generated pages have content."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import kvstore
from kvstore import config
from kvstore.cli import app
from kvstore.daemon.operator.event_log import KINDS
from kvstore.wire.messages import ALL

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


def text(page: Path) -> str:
    """Returns the text of a built page, without markup."""
    return re.sub(r"<[^>]+>", "", (page / "index.html").read_text(encoding="utf-8"))


def test_the_reference_names_every_command(site: Path) -> None:
    page = text(site / "reference/commands")
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        for inner in getattr(command, "commands", {"": command}):
            assert f"kvstore {name} {inner}".strip() in page


def test_the_reference_names_every_public_class_and_function(site: Path) -> None:
    page = text(site / "reference/python")
    for name in kvstore.__all__:
        assert name in page or name == "errors", name
    assert "Namespace.lookup" in page
    assert "AsyncNamespace.lookup" in page


def test_the_reference_names_every_key_at_an_anchor(site: Path) -> None:
    page = (site / "reference/configuration/index.html").read_text(encoding="utf-8")
    for table in config.tables():
        for key in table.keys:
            assert f'id="{".".join(table.path)}.{key.name}"' in page
    assert "Hard limit of shared memory" in page
    assert "at least 2MiB" in page


def test_the_reference_names_events_errors_messages_and_fields(site: Path) -> None:
    shown = {name: text(site / "reference" / name) for name in ("events", "errors", "wire", "formats")}
    for kind in KINDS:
        assert kind in shown["events"]
    for name in ("DeniedError", "worth less than what is stored", "412 Precondition Failed"):
        assert name in shown["errors"]
    for message in ALL:
        assert message.__name__ in shown["wire"]
    for name in ("stamp", "stored_at", "KVSLOT02", "kvstore-1/NAMESPACE"):
        assert name in shown["formats"]


def test_the_reference_names_paths_and_metrics(site: Path) -> None:
    rest, metrics = text(site / "reference/rest"), text(site / "reference/metrics")
    for path in ("GET /v1/tiers", "PATCH /v1/settings", "DELETE /v1/tokens/{name}"):
        assert path in rest
    for name in ("kvstore_up", "kvstore_hit_blocks_total", "kvstore_network_usable", "kvstore_call_seconds"):
        assert name in metrics


def test_the_pictures_of_the_start_page_exist(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    pictures = re.findall(r'(?:src|srcset)="([\w.-]+\.(?:svg|png))"', page)
    assert {"ttft-light.svg", "ttft-dark.svg"} <= set(pictures)
    assert all((site / picture).exists() for picture in pictures)


def test_a_broken_link_fails(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("[nowhere](nowhere.md)\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: test\nstrict: true\nplugins: []\n")
    command = [sys.executable, "-m", "mkdocs", "build"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert "nowhere.md" in ran.stderr
