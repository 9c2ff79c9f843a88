"""The manifests of packaging/kubernetes, read as files: they are what Kustomize adds names and a tag to."""

from __future__ import annotations

from typing import Any

import yaml

from kvstore import config
from tests.packaging.sources import ROOT

FOLDER = ROOT / "packaging" / "kubernetes"
SETTINGS = (FOLDER / "kvstore.toml").read_text(encoding="utf-8")


def manifest(name: str) -> dict[str, Any]:
    """Returns the document of a file."""
    return dict(yaml.safe_load((FOLDER / name).read_text(encoding="utf-8")))


POD = manifest("daemonset.yaml")["spec"]["template"]["spec"]
CONTAINERS = {each["name"]: each for each in POD["containers"] + POD["initContainers"]}


def in_cluster() -> config.Config:
    """Returns the configuration of the daemon in its pod."""
    return config.parse(SETTINGS)


def with_metrics(text: str) -> str:
    """Returns a file with the lines for Prometheus, which are commented out."""
    before, marker, lines = text.partition("# For Prometheus")
    first, *rest = lines.splitlines()
    return "\n".join([f"{before}{marker}{first}", *(line.removeprefix("# ") for line in rest), ""])
