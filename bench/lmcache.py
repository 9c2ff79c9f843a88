"""lmcache: the adapter of LMCache's server beside LMCache's own for files, by LMCache's bench of adapters.

`lmcache bench l2` stores, looks up and loads objects in batches of 32, and verifies the last batch. Every
run has a new namespace, or a new folder. `fs_native` reads and writes files by threads in C++, through the
page cache and without checksums. A figure is that of the median round of a run.

LMCache's `mooncake_store` is not among them. It cannot start, because the package of LMCache 0.5.6 lacks
`lmcache.lmcache_mooncake`: "Mooncake Store L2 adapter requires the C++ Mooncake extension. Build with:
MOONCAKE_INCLUDE_DIR=/path/to/mooncake-store/include pip install -e .". See `bench.peers`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import GIB, KIB, Bench, Result, Target, expect
from bench.served import serve
from tests.engines.environments import environment, interpreter

SIZES_KIB = {"256-KiB": 256, "4-MiB": 4096}
"""Sizes of objects: that of a small model's chunk of 16 tokens, and of one of 256 tokens."""

OPERATIONS = {"store": Target(">=", 1.0), "load": Target(">=", 1.0), "lookup": Target("<=", 1.0)}
CASES = tuple(f"{size}/{operation}" for size in SIZES_KIB for operation in OPERATIONS)
KEYS = 32
_ROUNDS = 20
_DAEMON_BYTES = 8 * GIB


def run(bench: Bench) -> Iterator[Result]:
    """Yields a row for each size and operation."""
    program = interpreter("lmcache").with_name("lmcache")
    rounds, dram = bench.pick(_ROUNDS, 1), bench.pick(_DAEMON_BYTES, GIB // 4)
    with bench.scratch() as folder, serve(dram) as (_, daemon):
        for name in CASES:
            size, operation = name.split("/")
            case = partial(_sample, program, operation, bench.pick(SIZES_KIB[size], 4), rounds)
            ours = partial(case, partial(_ours, daemon.url, name))
            files = partial(case, partial(_files, folder / name.replace("/", "-")))
            figures = bench.interleave(name, (ours, files), 1 / len(CASES))
            unit = "ms" if operation == "lookup" else "GiB/s"
            yield figures.result(f"lmcache/{name}", unit, OPERATIONS[operation])


def _ours(url: str, name: str, n: int) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": "kvstore_lmcache",
        "class_name": "KVStoreAdapter",
        "adapter_params": {"url": url, "revision": f"{name} {n}"},
    }


def _files(folder: Path, n: int) -> dict[str, Any]:
    return {"type": "fs_native", "base_path": f"{folder}-{n}"}


def _sample(program: Path, operation: str, kib: int, rounds: int, adapter: Any, n: int) -> float:
    """Runs LMCache's bench once. Returns GiB/s, or ms of a lookup. Raises NotDone if an object is missing."""
    spec = adapter(n)
    words = ["--num-keys", str(KEYS), "--data-size-kb", str(kib), "--rounds", str(rounds)]
    words += ["--lookup-max-hit-rate", "1", "--no-skip-verify", "--format", "json"]
    quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
    ran = subprocess.run(
        [str(program), "bench", "l2", "--l2-adapter", json.dumps(spec), *words],
        env={**environment(), **quiet},
        capture_output=True,
        text=True,
        check=True,
    )
    expect(f"All {KEYS} keys data verified OK" in ran.stdout, True, "verified")
    text = ran.stdout[ran.stdout.index("{\n") : ran.stdout.rindex("\n}") + 2]
    found = {
        each["operation"].lower(): each
        for each in json.loads(text)["metrics"].values()
        if "operation" in each
    }
    for each in found.values():
        expect(each["total_success"], each["total_keys"], f"objects of {each['operation']}")
    milliseconds = float(found[operation]["duration_p50_ms"])
    return milliseconds if operation == "lookup" else KEYS * kib * KIB / GIB / (milliseconds / 1000)
