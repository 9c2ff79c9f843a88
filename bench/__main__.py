"""python -m bench NAME: measures, and prints a table or JSON lines.

python -m bench report      runs what this machine can, and rewrites the tables of bench/RESULTS.md
python -m bench check       whether the rows of bench/RESULTS.md are those of the benches
python -m bench chart       draws docs/ttft-*.svg from bench/RESULTS.md
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
    """Runs what the command line names."""
    # Temporary folders and daemons are cleaned up on the way out, also when we are asked to go.
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
            # The other benches' figures are worth having all the same.
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
    """How a bench ended that has no figures, or not all of them."""
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
    names = f"{', '.join(BENCHES)}; all: those that run anywhere; engines: those that need a serving engine"
    parser.add_argument("name", choices=choices, metavar="NAME", help=names)
    parser.add_argument("--json", action="store_true", help="one JSON object a result, as it comes")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="time to measure a bench, set-up not counted (default 8)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), help="where NVMe benches put their files (default: here)"
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
