"""refill: stores a chain of 32,768 blocks again over holes, in batches of 128.

All blocks of the chain but the last are invalidated, which leaves holes, and put again. Rows of the core: CPU
time compared with the first store of the chain, and the longest step. Row of a daemon: the longest empty
round trip of another client meanwhile, compared with an idle daemon.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Iterator

import numpy as np

from bench.harness import KIB, MIB, Bench, Result, Target, expect, quantile
from bench.node import NAMESPACE, Node, Steps
from bench.served import serve
from bench.tenant_load import Cue, running
from kvstore import Client, Layout
from kvstore.core.blocks.key_batch import Keys

SIZES, SMOKE = (32_768, 5), (1024, 1)
"""Blocks of the chain, and repetitions in the core."""

POLICY = "hazard"
INVALIDATED_AT_ONCE = 4096
LAYOUT = Layout(model="bench", block_bytes=4 * KIB)
STEP_MS, PING_MS = 1.0, 20.0
_STORED_AT_ONCE = 1024
_PING_EVERY_S = 0.0005


def run(bench: Bench) -> Iterator[Result]:
    """Yields two rows for the core and one for a daemon."""
    blocks, runs = bench.pick(SIZES, SMOKE)
    first, again, longest = [], [], []
    for number in range(runs):
        bench.doing("core", number / runs)
        before, after, invalidating = _in_core(blocks)
        first.append(_total(before))
        again.append(_total(after))
        longest.append([max(map(max, steps.values())) for steps in (after, before, invalidating)])
    middle, reference = statistics.median(again), statistics.median(first)
    ratio = statistics.median(a / b for a, b in zip(again, first, strict=True))
    yield Result("refill/core", middle, "ms", reference, ratio, runs, target=Target("<=", 2.0))
    step, first_step, invalidation = (statistics.median(column) for column in zip(*longest, strict=True))
    extra = {"worst_run": max(row[0] for row in longest), "invalidation_of_4096": invalidation}
    target = Target("<=", STEP_MS, "value")
    yield Result("refill/step", step, "ms", first_step, step / first_step, runs, target=target, extra=extra)
    yield _beside_pings(bench, blocks)


def _in_core(blocks: int) -> tuple[Steps, Steps, Steps]:
    """Returns the steps of the first store, of the second one, and of the invalidation between them."""
    node = Node(blocks, 2 * blocks, 4 * blocks, POLICY)
    keys = Keys(os.urandom(32 * blocks), 32)
    gc.collect()
    gc.freeze()  # as the daemon does
    node.steps = first = {}
    stored = node.put(keys, b"")
    node.steps = invalidating = {}
    gone = sum(node.invalidate(keys.take(a, b)) for a, b in _pieces(blocks - 1, INVALIDATED_AT_ONCE))
    holes = node.placement.residency.gaps.holes[NAMESPACE]
    node.steps = again = {}
    refilled = node.put(keys, b"")
    gc.unfreeze()
    found = node.placement.view.stored(NAMESPACE, keys)
    expect((stored, found), (blocks, blocks), "blocks stored, and found in the end")
    expect((gone, holes, refilled), (blocks - 1,) * 3, "blocks invalidated, holes, and blocks stored again")
    return first, again, invalidating


def _pieces(n: int, size: int) -> list[tuple[int, int]]:
    return [(first, min(first + size, n)) for first in range(0, n, size)]


def _total(steps: Steps) -> float:
    return sum(map(sum, steps.values()))


def _beside_pings(bench: Bench, blocks: int) -> Result:
    """Measures the longest round trip of a client while another invalidates and stores the chain."""
    keys = [os.urandom(32) for _ in range(blocks)]
    with serve(2 * blocks * LAYOUT.block_bytes + 64 * MIB) as (client, daemon):
        _store(client, keys, blocks)
        alone = _pings(bench, "pings alone", client, bench.seconds / 4)
        with running(_refill, daemon.url, keys) as end:
            beside = _pings(bench, "pings beside a refill", client, bench.seconds * 3 / 4)
            took_s = end()
    worst, reference = max(beside), max(alone)
    extra = {
        "p50": quantile(beside, 0.5),
        "p999": quantile(beside, 0.999),
        "refills": len(took_s),
        "refill_s": statistics.median(took_s),
    }
    target, n = Target("<=", PING_MS, "value"), len(beside)
    return Result("refill/ping", worst, "ms", reference, worst / reference, n, target=target, extra=extra)


def _pings(bench: Bench, what: str, client: Client, seconds: float) -> list[float]:
    """Returns the round trip times in ms."""
    took_ms: list[float] = []
    started = time.monotonic()
    while (passed := time.monotonic() - started) < seconds or not took_ms:
        bench.doing(what, passed / seconds)
        start = time.perf_counter()
        client.ping()
        took_ms.append(1000 * (time.perf_counter() - start))
        time.sleep(_PING_EVERY_S)
    return took_ms


def _refill(cue: Cue, url: str, keys: list[bytes]) -> list[float]:
    """Invalidates all blocks but the last and stores them again, until `stop`. Returns s per put."""
    took_s: list[float] = []
    with Client(url, deadline_s=30.0, strict=True) as client:
        space = client.namespace(LAYOUT)
        cue.begin()
        while not (cue.is_set() and took_s):
            for first, last in _pieces(len(keys) - 1, INVALIDATED_AT_ONCE):
                space.invalidate(keys[first:last])
            started = time.monotonic()
            _store(client, keys, len(keys) - 1)
            took_s.append(time.monotonic() - started)
    return took_s


def _store(client: Client, keys: list[bytes], missing: int) -> None:
    """Stores a chain with this number of missing blocks and looks all of it up."""
    space, stored = client.namespace(LAYOUT), 0
    data = np.zeros((_STORED_AT_ONCE, LAYOUT.block_bytes), np.uint8)
    for first, last in _pieces(len(keys), _STORED_AT_ONCE):
        parent = keys[first - 1] if first else None
        stored += space.put(keys[first:last], data[: last - first], parent).stored
    found = space.lookup(keys)
    expect((stored, found), (missing, len(keys)), "blocks stored, and found")
