"""The start-up summary: tiers, tenants, sockets, and the flag that connects vLLM."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvstore.config import Config, Memory, format_size

_log = logging.getLogger("kvstore")

_SHOWN_TENANTS = 5

Row = tuple[str, str]


def rows(config: Config, status: Mapping[str, Any], file: Path | None, memory: Memory) -> Iterator[Row]:
    """Yields name and text of each row. `status` is the daemon's, `file` its configuration."""
    yield "kvstore", f"version {version('kvstore')}, pid {os.getpid()}"
    if file is not None:
        yield "config", str(file)
    else:
        yield "config", f"none, so DRAM gets a quarter of the memory, at most half of the free part: {memory}"
        yield "change", "kvstore config example > kvstore.toml; edit it; kvstore serve -c kvstore.toml"
    for tier in status["tiers"]:
        folder = config.nvme.paths.get(tier["name"])
        where = f" in {folder}" if folder else ""
        yield tier["name"], f"limit {format_size(tier['limit_bytes'])}{where}, holds {_held(tier)}"
    if not config.nvme.paths:
        yield "nvme", "none (nvme.path sets a folder)"
    if status["network"] is not None:
        yield "network", str(config.network.url)
    yield "eviction", str(status["policy"])
    yield "tenants", _tenants(config)
    yield "socket", f"{config.daemon.socket}, mode {config.daemon.socket_mode:04o}"
    if config.daemon.operator_socket is not None:
        yield "operators", str(config.daemon.operator_socket)
    if problems := status["problems"]:
        yield "problems", f"{len(problems)}, the log and `kvstore status` show them"
    option = f" -c {file}" if file else ""
    served = " and ".join(filter(None, (str(config.admin.socket), config.admin.listen)))
    yield "REST", f"`kvstore admin{option}` serves REST and the dashboard on {served}"
    yield "vLLM", f"vllm serve MODEL {vllm_flag(config.daemon.socket)}"


def vllm_flag(socket: Path) -> str:
    """Returns vLLM's flag for the daemon at `socket`, quoted for a shell."""
    settings = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore_vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": f"unix://{socket.absolute()}"},
    }
    quoted = json.dumps(settings, ensure_ascii=False).replace("'", "'\\''")
    return f"--kv-transfer-config '{quoted}'"


def show(found: Iterator[Row]) -> None:
    """Prints the rows to a terminal, or logs a line for each. Nothing if the log level is above `info`."""
    if not _log.isEnabledFor(logging.INFO):
        return
    if not sys.stderr.isatty():
        for name, text in found:
            _log.info("%s: %s", name, text)
        return
    print(*(f"{name:<9} {text}" for name, text in found), sep="\n", file=sys.stderr)


def _held(tier: Mapping[str, Any]) -> str:
    count = tier["blocks"]
    return f"{count} block{'' if count == 1 else 's'} ({format_size(tier['used_bytes'])})"


def _tenants(config: Config) -> str:
    names = list(config.tenants)
    if not names:
        return "none configured: all clients belong to the tenant default"
    more = len(names) - _SHOWN_TENANTS
    return ", ".join(names[:_SHOWN_TENANTS]) + (f" and {more} more" if more > 0 else "")
