"""docs/runbooks.md has a section for each alert of docs/alerts.yml."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.docs.commands import ROOT, fenced

PAGE = (ROOT / "docs/runbooks.md").read_text(encoding="utf-8")
SECTIONS = {head: text for head, _, text in (part.partition("\n") for part in PAGE.split("\n## ")[1:])}
GROUPS = yaml.safe_load((ROOT / "docs/alerts.yml").read_text(encoding="utf-8"))["groups"]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}


def test_alerts_and_sections_are_in_the_same_order() -> None:
    assert list(SECTIONS) == list(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_a_section_confirms_its_alert_and_says_what_to_do(name: str) -> None:
    section, alert = SECTIONS[name], ALERTS[name]
    assert alert["annotations"]["runbook"] == f"docs/runbooks.md#{name.lower()}"
    meaning, *_ = section.strip().split("\n\n")
    measured = set(re.findall(r"\b(?:kvstore_\w+|up)\b", re.sub(r"\{.*?\}", "", alert["expr"])))
    assert measured <= set(re.findall(r"`(\w+)`", meaning))
    assert fenced(section), "test_docs.py runs these commands"
    assert "\n- **Do.** " in section
    assert "\n- **Do not.** " in section
