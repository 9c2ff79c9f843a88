"""`python -m tests.soak --hours H`: exits with 1 if a byte was wrong, a block was lost or something grew."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from kvstore.cli.shared.options import unwind_on_sigterm
from tests.soak.outcome import Plan
from tests.soak.run import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=1 / 6, help="how long it takes")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument(
        "--lives", type=int, default=3, help="of the daemon, which is killed or restarted between"
    )
    parser.add_argument("--rate", type=float, default=20.0, help="steps a second of each engine")
    parser.add_argument("--out", type=Path, help="a folder for samples.jsonl and soak.svg")
    options = parser.parse_args()
    unwind_on_sigterm()
    plan = Plan(options.hours * 3600, options.seed, options.lives, options.rate)
    outcome = run(plan, options.out, sys.stdout)
    print(outcome.text())
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
