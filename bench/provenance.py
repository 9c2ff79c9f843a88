"""The origin of a figure: command, date, commit and machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.harness import Bench

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "RESULTS.md"
DIRTY = "+"
"""Suffix of the commit if the work tree had uncommitted changes."""


def provenance(name: str, bench: Bench) -> dict[str, Any]:
    """Returns the origin of figures of this run. Raises ValueError for a smoke run, which has no figures."""
    if bench.smoke:
        raise ValueError("a smoke run has no figures")
    return {
        "bench": name,
        "command": f"{name} --seconds {bench.seconds:g}",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "machine": machine(bench.folder),
    }


def commit() -> str:
    """Returns the commit of the work tree, with a DIRTY suffix; empty outside a git work tree."""
    head = _git("rev-parse", "--short=7", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(ROOT)}")
    return head and head + (DIRTY if changed else "")


def _git(*arguments: str) -> str:
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if not done.returncode else ""


def machine(folder: Path) -> dict[str, str]:
    """Returns the properties of this machine. `folder`: the folder for files of NVMe benches."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    mounts = (line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines())
    inside = [m for m in mounts if folder.is_relative_to(m[1])]
    return {
        "CPU": f"{cpu}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{memory:.1f} GiB",
        "kernel": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "file system": max(inside, key=lambda m: len(m[1]))[2],
        "Python": platform.python_version(),
        "GPU": _gpu(),
    }


def _gpu() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none"
    ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False)
    return ", ".join(done.stdout.split("\n")).strip(", ") or "none"
