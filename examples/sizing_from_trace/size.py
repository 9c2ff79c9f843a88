"""How much DRAM and NVMe does my traffic need? Records a trace of a daemon's requests, and replays it.

    python size.py            # a daemon and simulated chats for 4 seconds
    python size.py TRACE      # a trace that you recorded: kvstore lab record --out TRACE --for 10m

Replays run in virtual time, without bytes, on the daemon's own placement code.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvstore import Client, Layout, chain_keys
from kvstore.lab.local_daemon import LocalDaemon

HIT = "50%"
"""The part of all input tokens that the node should serve."""
NVME = "50%"
"""Size of the NVMe tier: half of all blocks of the trace. A size such as 1TiB is possible too."""
KVSTORE = [sys.executable, "-m", "kvstore"]
LAYOUT = Layout(model="llama-3-8b", block_tokens=16, block_bytes=4096)


def chats(url: str, until: Callable[[], bool]) -> None:
    """Stands for engines: 40 users whose chats share a system prompt and grow turn by turn."""
    rng, system = random.Random(1), list(range(64))
    users = [system + [user] * 32 for user in range(1000, 1040)]
    with Client(url) as client:
        ns = client.namespace(LAYOUT)
        while not until():
            prompt = users[min(int(rng.expovariate(0.1)), len(users) - 1)]
            if len(prompt) > 1000:
                del prompt[96:]  # a new chat
            prompt += [rng.randrange(1 << 16) for _ in range(48)]  # question and answer
            keys = chain_keys(prompt, LAYOUT.block_tokens)
            found = ns.lookup(keys)
            parent = keys[found - 1] if found else None
            ns.put(keys[found:], np.zeros((len(keys) - found, LAYOUT.block_bytes), np.uint8), parent=parent)
            time.sleep(0.01)


def record(trace: Path) -> None:
    """Records the requests to a daemon, as `kvstore lab record` does with yours."""
    with LocalDaemon({"dram": {"limit": "256MiB"}}) as daemon:
        command = [*KVSTORE, "lab", "record", "--out", str(trace), "--for", "4s"]
        with subprocess.Popen([*command, "--socket", daemon.url]) as recorder:
            chats(daemon.url, until=lambda: recorder.poll() is not None)
        if recorder.returncode:
            sys.exit(recorder.returncode)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = sys.argv[1] if len(sys.argv) > 1 else f"{folder}/trace.jsonl"
        if len(sys.argv) == 1:
            record(Path(trace))
        # KV of one token on one shard, and the speed of your engine: see docs/lab.md.
        options = ["--hit", HIT, "--nvme", NVME, "--token-bytes", "128KiB", "--prefill", "10000"]
        if len(sys.argv) == 1:
            options += ["--processes", "1"]  # more take longer to start than this trace to replay
        command = [*KVSTORE, "lab", "recommend", trace, *options, "--json"]
        page = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    sized = page["sizing"]
    best = sized["report"]["trace"]["best_hit_ratio"]
    print(f"# An unlimited cache serves {100 * best:.1f} % of the tokens; for {HIT}:")
    for tier, limit in sized["limits_bytes"].items():
        print(f'[{tier}]\nlimit = "{limit >> 20}MiB"')
    print(f'[policy]\neviction = "{sized["answer"]["policy"]}"')
    print(f"# {100 * sized['answer']['hit_ratio']:.1f} %; {sized['searched']}")
    print(f"# This saves {page['gpu_s_per_hour']:,.0f} GPU seconds an hour.")


if __name__ == "__main__":
    main()
