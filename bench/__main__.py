"""python -m bench NAME: runs benches and prints a table, or JSON lines with --json.

python -m bench report      runs the benches of this machine; rewrites bench/RESULTS.md and its pictures
python -m bench check       checks that the rows of bench/RESULTS.md match the benches
python -m bench chart       draws the pictures again: docs/ttft*.svg and docs/bench-*.svg
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench import chart, report
from bench.catalog import BENCHES, ENGINES, EVERYWHERE, measure
from bench.harness import Bench, Result, Unable, progress_display
from bench.provenance import RESULTS, provenance
from bench.results import problems

COLUMNS = ("name", "value", "unit", "reference", "ratio", "target", "met", "runs", "discarded")
_WIDTH = 132


def main() -> int:
    """Runs the benches that the command line names. Returns the exit code."""
    # SIGTERM raises SystemExit, so that temporary folders and daemons are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    command, rest = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if command == "report":
        return report.main(rest)
    if command == "check":
        return _check()
    if command == "chart":
        return chart.main()
    return _measure(_options())


def _check() -> int:
    found = list(problems(RESULTS.read_text(encoding="utf-8"), RESULTS.parent))
    for problem in found:
        print(f"bench/RESULTS.md: {problem}", file=sys.stderr)
    return 1 if found else 0


def _measure(options: argparse.Namespace) -> int:
    names = {"all": EVERYWHERE, "engines": ENGINES}.get(options.name, (options.name,))
    results: list[Result] = []
    failed = unable = False
    for name in names:
        try:
            for result in _results(name, options):
                results.append(result)
        except BrokenPipeError:
            return 1
        except Unable as lack:
            unable = True
            _say(name, options, "unable", str(lack))
        except Exception as error:
            # One failed bench does not stop the others.
            failed = True
            traceback.print_exc()
            _say(name, options, "failed", f"{type(error).__name__}: {error}")
    if unable and not results and not failed:
        return 2
    if not options.json:
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(_table(results))
    return 1 if failed else 2 if unable else 0


def _results(name: str, options: argparse.Namespace) -> Iterator[Result]:
    with progress_display(name) as show:
        bench = Bench(options.seconds, options.folder.resolve(), show)
        made = provenance(name, bench)
        for result in measure(name, bench):
            if options.json:
                _print({**result.to_map(), **made})
            yield result


def _say(name: str, options: argparse.Namespace, how: str, why: str) -> None:
    """Reports a bench that ended without all of its figures."""
    print(f"{name} {how}: {why}", file=sys.stderr)
    if options.json:
        _print({**provenance(name, Bench(options.seconds, options.folder.resolve())), how: why})


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line, ensure_ascii=False), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choices = (*BENCHES, "all", "engines")
    names = f"{', '.join(BENCHES)}; all: benches of any machine; engines: benches with a serving engine"
    parser.add_argument("name", choices=choices, metavar="NAME", help=names)
    parser.add_argument("--json", action="store_true", help="print one JSON object per result")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="measuring time per bench in s, without set-up (default 8)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), help="folder for files of NVMe benches (default: here)"
    )
    options = parser.parse_args()
    report.check_options(parser, options)
    return options


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


if __name__ == "__main__":
    sys.exit(main())
