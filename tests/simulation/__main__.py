"""`python -m tests.simulation --seeds N --first S --jobs J [--trace]`: exit code 1 if any property fails."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter

from tests.simulation.run import Outcome, simulate


def main() -> int:
    """Runs the seeds and says what came of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--trace", action="store_true", help="print what happened")
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.seeds)
    if args.trace:
        for seed in seeds:
            outcome = simulate(seed, print)
            print(outcome)
        return 0
    began = time.monotonic()
    failed: list[Outcome] = []
    totals = {"faults": Counter[str](), "operations": Counter[str](), "counts": Counter[str]()}
    steps = 0
    with multiprocessing.Pool(args.jobs) as pool:
        for i, outcome in enumerate(pool.imap_unordered(simulate, seeds, chunksize=4), 1):
            steps += outcome.steps
            for name, total in totals.items():
                total.update(getattr(outcome, name))
            if outcome.violation:
                failed.append(outcome)
                print(f"\nseed {outcome.seed}: {outcome.violation}")
                print(f"  python -m tests.simulation --first {outcome.seed} --seeds 1 --trace")
            took = time.monotonic() - began
            if i % 20 == 0 or i == len(seeds):
                line = f"\r{i}/{len(seeds)} seeds, {len(failed)} failed, {1e3 * took / i:.0f} ms a seed"
                print(f"{line}, {steps / took:.0f} events/s ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for name, total in totals.items():
        print(f"{name}: " + ", ".join(f"{what} {n}" for what, n in sorted(total.items())))
    print(f"{len(seeds)} seeds, {steps} events, {len(failed)} violations")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
