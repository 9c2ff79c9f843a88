"""Reads the compose files of examples and compares them with the code: tests have no container engine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from kvstore import config
from kvstore.config import GIB
from tests.docs.commands import ROOT
from tests.docs.test_docs import known

SERVICE_KEYS = {
    "image", "build", "user", "entrypoint", "command", "depends_on", "environment", "stop_grace_period",
    "mem_limit", "healthcheck", "volumes", "tmpfs", "group_add", "shm_size", "ports", "deploy",
    "network_mode",
}  # fmt: skip
"""The keys of the compose specification that our files use."""

CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


class Compose:
    """A compose file, checked: its files exist, and its volumes and services are declared."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = (folder / "compose.yaml").read_text(encoding="utf-8")
        self.variables = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
        assert "$" not in re.sub(r"\$\{(\w+):-([^}]*)\}", "", text)
        made = yaml.safe_load(re.sub(r"\$\{(\w+):-([^}]*)\}", r"\2", text))
        self.services: dict[str, dict[str, Any]] = made["services"]
        self.volumes: set[str] = set(made["volumes"])
        for name in self.services:
            self._check(name)

    def _check(self, name: str) -> None:
        service = self.services[name]
        assert set(service) <= SERVICE_KEYS, name
        for other, how in service.get("depends_on", {}).items():
            assert other in self.services
            assert how["condition"] in CONDITIONS
            assert how["condition"] != "service_healthy" or "healthcheck" in self.services[other]
        if build := service.get("build"):
            assert (self.folder / build["context"]).resolve() == ROOT
            recipe = (ROOT / build["dockerfile"]).read_text(encoding="utf-8")
            for copied in re.findall(r"^COPY (?!--from)(.*) \S+$", recipe, re.MULTILINE):
                assert all((ROOT / source).exists() for source in copied.split()), copied
        for source, _ in self.mounts(name):
            assert source in self.volumes or (self.folder / source).exists(), source

    def mounts(self, name: str) -> list[tuple[str, str]]:
        """Returns volume or path, and path in the container, of each mount of a service."""
        return [
            (mount.split(":")[0], mount.split(":")[1]) for mount in self.services[name].get("volumes", [])
        ]

    def source(self, name: str, path: str) -> str:
        """Returns what a service has mounted at a path or above it."""
        found = [(len(at), source) for source, at in self.mounts(name) if f"{path}/".startswith(f"{at}/")]
        assert found, f"nothing is mounted at {path} of {name}"
        return max(found)[1]

    def runs_kvstore(self, name: str) -> list[str]:
        """Returns the command of a service that runs our image, whose options exist."""
        service = self.services[name]
        assert service["image"] == f"kvstore:{VERSION}"
        assert known(service["command"]) == ""
        if "healthcheck" in service:
            kind, program, *words = service["healthcheck"]["test"]
            assert (kind, program, known(words)) == ("CMD", "kvstore", "")
        return list(service["command"])

    def fits(self, name: str, loaded: config.Config) -> None:
        """Compares the mounts and limits of a daemon's service with its configuration."""
        service = self.services[name]
        own = {entry.split(":")[0] for entry in service.get("tmpfs", [])}
        for socket in (loaded.daemon.socket, loaded.daemon.for_operators):
            assert str(socket.parent) in own or self.source(name, str(socket.parent))
        assert loaded.nvme.path
        assert self.source(name, str(loaded.nvme.path)) in self.volumes
        url = service.get("environment", {}).get("KVSTORE_SOCKET", "unix:///run/kvstore/kvstore.sock")
        assert url == f"unix://{loaded.daemon.for_operators}"
        blocks = (loaded.dram.limit + loaded.nvme.limit) // (64 << 10)
        assert (
            config.parse_size(f"{service['mem_limit'].upper()}iB") >= loaded.dram.limit + 200 * blocks + GIB
        )
        assert int(service["stop_grace_period"].removesuffix("s")) >= loaded.daemon.stop_timeout + 10
