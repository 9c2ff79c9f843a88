"""python -m bench NAME: measures, and prints a table, JSON lines or rows for RESULTS.md."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.harness import Bench, Result, Unable, progress_display

NAMES = (
    "memcpy-get",
    "memcpy-put",
    "zero-copy",
    "lookup",
    "nvme-read",
    "nvme-read-acquire",
    "nvme-write",
    "nvme-write-put",
    "core",
    "core-ram",
    "core-step",
    "evict",
    "tenants",
    "start",
    "seal",
    "qos",
    "admin",
    "network",
    "valkey",
    "objectstore",
)
ENGINES = ("vllm-miss", "vllm-ttft")
"""They need a serving engine's environment, gigabytes of it, which they make if it is not there."""
DEVICES = ("gpu",)
"""They need a GPU; without one they end with exit code 2."""
COLUMNS = ("name", "value", "unit", "reference", "ratio", "target", "met", "runs", "discarded")
_WIDTH = 132


def main() -> int:
    """Runs what the command line names."""
    options = _options()
    # Temporary folders and daemons are cleaned up on the way out, also when we are asked to go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = {"all": NAMES, "engines": ENGINES}.get(options.name, (options.name,))
    results, failed, unable = [], False, False
    with progress_display() as progress:
        for name in names:
            try:
                for result in _measure(name, options.seconds, options.folder.resolve(), progress):
                    results.append(result)
                    if options.json:
                        print(json.dumps(result.to_map(), ensure_ascii=False), flush=True)
            except BrokenPipeError:
                return 1
            except Unable as lack:
                unable = True
                print(f"{name}: {lack}", file=sys.stderr)
            except Exception:
                # The other benches' figures are worth having all the same.
                failed = True
                print(f"{name} failed:\n{traceback.format_exc()}", file=sys.stderr)
    if unable and not results:
        return 2
    if options.markdown:
        print("\n".join(_markdown(results, options.folder.resolve())))
    elif not options.json:
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(_table(results))
    return 1 if failed else 2 if unable else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    choices = (*NAMES, "all", *ENGINES, "engines", *DEVICES)
    parser.add_argument("name", choices=choices, metavar="NAME", help=", ".join(choices))
    parser.add_argument("--json", action="store_true", help="one JSON object a result, as it comes")
    parser.add_argument("--markdown", action="store_true", help="rows and machine for bench/RESULTS.md")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="time to measure a bench, set-up not counted (default 8)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), help="where NVMe benches put their files (default: here)"
    )
    options = parser.parse_args()
    if not 0 < options.seconds <= 3600:
        parser.error(f"--seconds {options.seconds:g}: more than 0, at most 3600")
    if not os.access(options.folder, os.W_OK | os.X_OK) or not options.folder.is_dir():
        parser.error(f"--folder {options.folder}: not a writable folder")
    return options


def _measure(name: str, seconds: float, folder: Path, progress: Progress) -> Iterator[Result]:
    module = importlib.import_module(f"bench.{name.replace('-', '_')}")
    task = progress.add_task(name, total=None, what="starting")
    try:
        yield from module.run(Bench(seconds, folder, progress, task))
    finally:
        progress.remove_task(task)


def _cells(result: Result) -> list[str]:
    values = result.to_map()
    marks = {True: "yes", False: "no", None: ""}
    cells = [values[name] for name in COLUMNS]
    cells[COLUMNS.index("met")] = marks[result.met] + (" (noisy)" if result.noisy else "")
    return ["" if cell is None else f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in cells]


def _table(results: list[Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in COLUMNS:
        table.add_column(name, no_wrap=True, justify="left" if name in ("name", "unit", "met") else "right")
    for result in results:
        style = {True: "green", False: "red", None: ""}[result.met]
        table.add_row(*_cells(result), style=style)
    return table


def _markdown(results: list[Result], folder: Path) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for result in results:
        yield f"| {' | '.join(_cells(result))} |"
    yield ""
    yield from (f"- {what}: {value}" for what, value in _machine(folder).items())


def _machine(folder: Path) -> dict[str, str]:
    """What the figures were measured on."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    mounts = (line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines())
    inside = [m for m in mounts if folder.is_relative_to(m[1])]
    mount = max(inside, key=lambda m: len(m[1]))
    return {
        "CPU": f"{cpu}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{memory:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "file system": f"{mount[2]} on {mount[0]}",
        "Python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
