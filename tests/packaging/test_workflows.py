"""Workflows and issue forms of the forge: they parse, keep to least privilege, and call what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packaging.sources import MINORS, ROOT

FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def jobs(file: Path) -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load(file.read_text())["jobs"])


def commands() -> str:
    """Returns every shell line of all workflows."""
    steps = [step for file in FILES for job in jobs(file).values() for step in job["steps"]]
    return "\n".join(step["run"] for step in steps if "run" in step)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_jobs_may_only_read_and_end_in_time(file: Path) -> None:
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"].endswith("${{ github.ref }}")
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        assert "permissions" not in job
        actions = [step for step in job["steps"] if "uses" in step]
        for step in actions:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
            if step["uses"].startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_workflows_call_existing_targets_and_scripts() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = re.findall(r"^make ([a-z-]+)", commands(), re.MULTILINE)
    assert {"test", "test-wheel", "deb"} <= set(called) <= targets
    scripts = re.findall(r"^bash (\S+)", commands(), re.MULTILINE)
    assert scripts == [".ci/run"]
    assert [(ROOT / script).exists() for script in scripts] == [True]
    assert "--file packaging/Containerfile" in commands()


def test_every_supported_python_runs_the_tests() -> None:
    matrices = [job["strategy"]["matrix"]["python"] for job in jobs(FILES[0]).values() if "strategy" in job]
    assert matrices == [[f"3.{minor}" for minor in MINORS]]


def test_everything_published_runs_the_demo_first() -> None:
    for name, job in jobs(ROOT / ".github/workflows/packages.yml").items():
        steps = [step.get("uses") or step["run"] for step in job["steps"]]
        assert steps[-1].startswith("actions/upload-artifact@"), name
        assert any(re.search(r"kvstore demo$", step, re.MULTILINE) for step in steps[:-1]), name


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_issue_forms_have_a_name_and_distinct_fields(file: Path) -> None:
    form = yaml.safe_load(file.read_text())
    assert form["name"]
    assert form["description"]
    fields = [each for each in form["body"] if each["type"] != "markdown"]
    assert len({each["id"] for each in fields}) == len(fields)
    assert all(each["attributes"]["label"] for each in fields)
