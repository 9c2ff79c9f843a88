"""An eviction policy of your own: first in, first out. Compares its hit ratio with LRU on a small trace.

A daemon uses it with `policy.eviction = "custom_policy:FIFO"` and this folder in PYTHONPATH.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from kvstore.core.policy.lru import LRU


class FIFO(LRU):
    """Evicts blocks in the order in which they were stored: a use does not move them."""

    def touch(self, rows, now: float) -> None:
        """See kvstore.core.policy.Policy."""


def trace(path: Path) -> None:
    """Writes 2,000 requests in Mooncake's format, for 100 prompts of 8 blocks with a skewed popularity."""
    rng = random.Random(1)
    with path.open("w") as file:
        for i in range(2000):
            first = 8 * int(rng.paretovariate(1.0) % 100)
            request = {"timestamp": 100 * i, "input_length": 4096, "output_length": 1}
            file.write(json.dumps(request | {"hash_ids": list(range(first, first + 8))}) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trace(Path(folder) / "trace.jsonl")
        command = [sys.executable, "-m", "kvstore", "lab", "replay", f"{folder}/trace.jsonl"]
        options = ["--capacities", "10%", "--policies", "lru,custom_policy:FIFO", "--processes", "1"]
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        subprocess.run(command + options, check=True, env={**os.environ, "PYTHONPATH": path})
