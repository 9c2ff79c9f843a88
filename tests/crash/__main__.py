"""`python -m tests.crash --runs N --seed S`: N crashes under load; exits with 1 if one broke a promise."""

from __future__ import annotations

import argparse
import random
import sys
import time

from rich import box
from rich.console import Console
from rich.table import Table

from kvstore.errors import KVStoreError
from tests.crash.load import Tally
from tests.crash.world import RUNS, World

PROMISES = {
    "wrong": "wrong blocks",
    "lost": "committed NVMe blocks lost",
    "quarantined": "records that did not prove their slots",
    "usage": "usage not exact",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="crashes with a full read-back")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31), help="of the first world")
    options = parser.parse_args()
    tally, failed, started_s = Tally(), [], time.monotonic()
    for first in range(0, options.runs, RUNS):
        seed = options.seed + first // RUNS
        before = len(tally.violations)
        try:
            with World(seed, tally) as world:
                for number in range(first, min(first + RUNS, options.runs)):
                    world.run()
                    _progress(number + 1, options.runs, tally, started_s)
        except (KVStoreError, AssertionError) as error:
            tally.violations.append(f"{type(error).__name__}: {error}")
        if len(tally.violations) > before:
            failed.append((seed, tally.violations[before:]))
    _report(options.runs, options.seed, tally, time.monotonic() - started_s)
    for seed, violations in failed:
        print(f"\nseed {seed}: repeat it with: make crash RUNS={RUNS} SEED={seed}")
        print("\n".join(f"  {text}" for text in violations[:10]))
    return 1 if failed else 0


def _progress(number: int, runs: int, tally: Tally, started_s: float) -> None:
    end = "\r" if sys.stderr.isatty() and number < runs else "\n"
    if end == "\r" or number % RUNS == 0 or number == runs:
        spent_s = time.monotonic() - started_s
        line = f"{number}/{runs} runs, {spent_s:.0f} s, {len(tally.violations)} violations"
        print(line, end=end, file=sys.stderr, flush=True)


def _report(runs: int, seed: int, tally: Tally, wall_s: float) -> None:
    counts = dict(tally.counts)
    table = Table(f"crashes, seed {seed}", "", box=box.SIMPLE_HEAD)
    table.add_row("runs", str(runs))
    for name in sorted(counts.keys() - PROMISES.keys()):
        table.add_row(name, f"{counts[name]:,}")
    for name, words in PROMISES.items():
        table.add_row(words, str(counts.get(name, 0)))
    table.add_row("wall", f"{wall_s:.0f} s")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
