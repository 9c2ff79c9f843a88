"""The memory of this machine, and the configuration of a daemon that was given none."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvstore.config.file import Config, Source
from kvstore.config.units import MIB, format_size
from kvstore.errors import ConfigError
from kvstore.types import extent_bytes

_LEAST_BYTES = 2 * MIB
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that this process may use, in bytes. `in_group`: a control group limits it to less than RAM."""

    total_bytes: int
    available_bytes: int
    in_group: bool = False

    def __str__(self) -> str:
        owner = "the control group of this process" if self.in_group else "this machine"
        return f"{owner} has {format_size(self.total_bytes)} of memory"


def read_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Memory:
    """Returns the memory of this machine, or of the control group of this process if that is less."""
    try:
        meminfo = (proc / "meminfo").read_text(encoding="utf-8")
    except OSError:  # systemd hides it from the service
        pages = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_AVPHYS_PAGES")
        total, available = (n * os.sysconf("SC_PAGE_SIZE") for n in pages)
    else:
        sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", meminfo, re.MULTILINE))
        total, available = (int(sizes[name]) << 10 for name in ("MemTotal", "MemAvailable"))
    least = min([total, *group_limits(proc, cgroups)])
    return Memory(least, min(available, least), least < total)


def group_limits(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> list[int]:
    """Returns the memory limits in bytes of the control group of this process and of all groups above it."""
    try:
        text = (proc / "self" / "cgroup").read_text(encoding="utf-8")
    except OSError:
        return []
    limits: list[int] = []
    for controllers, path in re.findall(r"^\d+:([^:]*):/(.*)$", text, re.MULTILINE):
        if not controllers:
            limits += _limits(cgroups, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(cgroups / "memory", path, "memory.limit_in_bytes")
    return limits


def _limits(root: Path, path: str, name: str) -> Iterable[int]:
    group = root / path
    for each in (group, *group.parents):
        if each.is_relative_to(root):
            try:
                text = (each / name).read_text(encoding="utf-8").strip()
            except OSError:  # a container does not see all groups
                continue
            if text.isdecimal():
                yield int(text)


def choose(memory: Memory, kept_bytes: int = 0) -> Source:
    """Returns the configuration of a daemon without a file: DRAM by the memory of this machine, no NVMe.

    A quarter of all memory, at most half of the available memory. `kept_bytes`: size of the DRAM tier of an
    earlier daemon whose blocks this one takes over; the limit is not below it.
    """
    limit = min(memory.total_bytes // 4, (memory.available_bytes + kept_bytes) // 2)
    limit -= limit % extent_bytes(max(limit, _LEAST_BYTES))
    return Source("the defaults", {"dram": {"limit": max(limit, kept_bytes, _LEAST_BYTES)}})


def check_dram(config: Config, memory: Memory, file: Path | None) -> None:
    """Raises ConfigError if the limit of the DRAM tier exceeds all memory of this machine."""
    limit = config.dram.limit
    if limit <= memory.total_bytes:
        return
    option, where = (f" -c {file}", f" in {file}") if file else ("", "")
    fits = choose(memory).values["dram"]["limit"] // MIB
    raise ConfigError(
        f"dram.limit is {format_size(limit)}, and {memory}",
        f'set dram.limit{where} to less, such as "{fits}MiB", then: kvstore doctor{option}',
    )
