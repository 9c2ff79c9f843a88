from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvstore import config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs_as_pasted() -> None:
    # The others need an engine: they are run where it is, by tests/engines.
    example, *_ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    command = [sys.executable, "-c", example]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "PutResult(stored=62, present=0, denied=0, why='')",
        "62 62 True",
        "8 2097152",
    ]


def test_the_table_has_every_key_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \| `?([^`|]+?)`? \|", README, re.MULTILINE))
    keys = {
        f"{section}.{name}"
        for section, field in config.Config.model_fields.items()
        for name in field.annotation.model_fields  # type: ignore[union-attr]
    }
    assert set(rows) == keys
    sections: dict[str, list[str]] = {}
    for key, default in rows.items():
        section, name = key.split(".")
        quoted = default if re.fullmatch(r"[0-9]+|0o[0-7]+|true|false", default) else f'"{default}"'
        if default != "none":
            sections.setdefault(section, []).append(f"{name} = {quoted}")
    text = "\n".join("\n".join([f"[{section}]", *lines]) for section, lines in sections.items())
    assert config.parse(text) == config.Config()


def test_the_places_that_architecture_names_are_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for place in re.findall(r"`((?:core|wire|tiers|daemon|client|lab)/[a-z_/.]*)`", text):
        assert (ROOT / "kvstore" / place).exists(), place
    for place in re.findall(r"`((?:tests|bench)/[a-z_/.]*)`", text):
        assert (ROOT / place).exists(), place


def test_what_proves_a_promise_is_there() -> None:
    section = README.split("## What is promised")[1].split("\n## ")[0]
    named = re.findall(r"`(tests/[a-z_/.]+?)(?:::([a-z_]+))?`", section)
    assert len(named) > 10
    for place, test in named:
        assert (ROOT / place).exists(), place
        if test:
            assert f"def {test}(" in (ROOT / place).read_text(encoding="utf-8"), test
