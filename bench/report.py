"""python -m bench report: runs benches, or reads an earlier run, and rewrites the tables of RESULTS.md
and the pictures drawn from them.

All benches take about twelve minutes on two idle cores. GPU benches run if there is a GPU; benches with a
serving engine run only if named. Other rows are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench import chart
from bench.catalog import BENCHES, ENGINES
from bench.harness import Bench
from bench.provenance import DIRTY, RESULTS, commit, provenance
from bench.results import merge

SECONDS = 5.0
KEPT = RESULTS.with_name("last-run.jsonl")
"""The JSON lines of the last run."""

_WITHIN_S = 1800.0


class Refused(Exception):
    """The figures must not be written to RESULTS.md. The message has the reason and a remedy."""


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 all were measured, 1 some failed, 2 nothing was written."""
    options = _options(arguments)
    try:
        if options.source is None:
            check_commit(commit(), options.dirty)
            run = list(_run(options))
        else:
            run = list(read(options.source, options.dirty))
    except Refused as refused:
        print(f"bench report: {refused}", file=sys.stderr)
        return 2
    text = merge(RESULTS.read_text(encoding="utf-8"), run)
    RESULTS.write_text(text, encoding="utf-8")
    chart.write(text, chart.DOCS)
    failed = [line["bench"] for line in run if "failed" in line]
    missed = [line["name"] for line in run if line.get("met") is False]
    left = [name for name in BENCHES if name not in {line["bench"] for line in run}]
    for what, names in (("failed", failed), ("missed their targets", missed), ("not run", left)):
        if names:
            print(f"{what}: {', '.join(names)}", file=sys.stderr)
    return 1 if failed else 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench report", description=__doc__)
    names = [name for name in BENCHES if name not in ENGINES]
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"benches to run (default: {' '.join(names)})"
    )
    parser.add_argument("--from", dest="source", type=Path, help="read the JSON lines of a run instead")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="seconds per bench (default %(default)g)"
    )
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="folder for files of NVMe benches")
    parser.add_argument("--dirty", action="store_true", help="allow uncommitted changes")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in BENCHES]:
        parser.error(f"no such bench: {', '.join(unknown)} (there are {', '.join(BENCHES)})")
    options.names = options.names or names
    check_options(parser, options)
    return options


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exits with an error for invalid options."""
    if not 0 < options.seconds <= 3600:
        parser.error(f"--seconds {options.seconds:g}: more than 0, at most 3600")
    if not os.access(options.folder, os.W_OK | os.X_OK) or not options.folder.is_dir():
        parser.error(f"--folder {options.folder}: not a writable folder")


def check_commit(known: str, dirty_is_fine: bool) -> None:
    """Raises Refused if the commit of a figure is unknown or wrong."""
    if not known:
        raise Refused("no commit is known: run it in a git work tree")
    if known.endswith(DIRTY) and not dirty_is_fine:
        raise Refused(f"{known}: the code was changed since that commit: commit it, or say --dirty")


def read(source: Path, dirty_is_fine: bool) -> Iterator[dict[str, Any]]:
    """Returns the lines of an earlier run. Raises Refused if a line has no origin."""
    for number, text in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            name, made = line["bench"], line["commit"]
            line["command"], line["date"], line["machine"]
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(
                f"{source}, line {number} is none of `python -m bench NAME --json`: {error}"
            ) from None
        if name not in BENCHES:
            raise Refused(f"{source}, line {number}: there is no bench {name}")
        check_commit(made, dirty_is_fine)
        yield line


def _run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Runs each bench in a separate process, so that none affects the next one."""
    began = time.monotonic()
    with KEPT.open("w", encoding="utf-8") as kept:
        for number, name in enumerate(options.names, 1):
            start, rows = time.monotonic(), 0
            print(f"[{number}/{len(options.names)}] {name} ...", file=sys.stderr, flush=True)
            for line in _lines(name, options.seconds, options.folder.resolve()):
                print(json.dumps(line, ensure_ascii=False), file=kept, flush=True)
                rows += "name" in line
                if why := line.get("failed") or line.get("unable"):
                    print(f"    {why}", file=sys.stderr)
                yield line
            took, so_far = time.monotonic() - start, time.monotonic() - began
            print(f"    {rows} rows in {took:.0f} s, {so_far:.0f} s so far", file=sys.stderr, flush=True)


def _lines(name: str, seconds: float, folder: Path) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "bench", name, "--json"]
    command += ["--seconds", str(seconds), "--folder", str(folder)]
    ended = False
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            for text in _until(process, time.monotonic() + _WITHIN_S):
                line = json.loads(text)
                ended = ended or "name" not in line
                yield line
            code = process.wait()
        finally:
            process.terminate()
    if code and not ended:
        yield {**provenance(name, Bench(seconds, folder)), "failed": f"exit code {code}"}


def _until(process: subprocess.Popen[str], ends: float) -> Iterable[str]:
    """Yields the lines that a process prints. Kills it at the time limit."""
    assert process.stdout is not None
    timer = threading.Timer(max(0.0, ends - time.monotonic()), process.kill)
    timer.start()
    try:
        yield from process.stdout
    finally:
        timer.cancel()
