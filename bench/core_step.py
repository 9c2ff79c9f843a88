"""core-step: the longest step of `Placement.handle` with 1 M blocks, by batch size.

Requests of every kind run on full tiers, so most steps evict. Steps are timed by the CPU clock of the thread;
time of other processes does not count. The reference is the bound.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Iterator

from bench.harness import Bench, Result, Target, expect, quantile
from bench.node import Node, Steps
from kvstore.core.blocks.key_batch import Keys

SIZES, SMOKE = (100_000, 1_000_000), (4096, 16_384)
"""Blocks of DRAM and of NVMe."""

CHAIN = 2048
BOUND_MS = 1.0
BATCHES = (1, 32, 256, 2048)
BOUND_UP_TO = 256


def run(bench: Bench) -> Iterator[Result]:
    """Yields one row for filling the node, while the index grows, and one row per batch size."""
    dram_blocks, nvme_blocks = bench.pick(SIZES, SMOKE)
    node = Node(dram_blocks, nvme_blocks, 2 * nvme_blocks)
    raw: list[bytes] = []
    gc.collect()
    gc.freeze()  # as the daemon does
    node.steps = {}
    for n in range(node.slots[1] // CHAIN):
        bench.doing("filling", n * CHAIN / node.slots[1])
        raw.append(_put_chain(node, 256))
    yield _result("core-step/filling-by-256", node.steps, node, Target("<=", BOUND_MS, "value"))
    for batch in BATCHES:
        node.steps = {}
        _load(bench, node, raw, batch)
        target = Target("<=", BOUND_MS, "value") if batch <= BOUND_UP_TO else None
        yield _result(f"core-step/{batch}", node.steps, node, target)
    gc.unfreeze()


def _put_chain(node: Node, batch: int) -> bytes:
    """Puts a chain in batches. Returns its keys."""
    keys = os.urandom(32 * CHAIN)
    for start in range(0, CHAIN, batch):
        parent = keys[32 * (start - 1) : 32 * start] if start else b""
        expect(node.put(Keys(keys[32 * start : 32 * (start + batch)], 32), parent), batch, "blocks stored")
    return keys


def _load(bench: Bench, node: Node, raw: list[bytes], batch: int) -> None:
    """Sends requests of all kinds with batches of one size for a quarter of the measuring time."""
    rng = random.Random(batch)
    started, found = time.monotonic(), 0
    while (passed := time.monotonic() - started) < bench.seconds / len(BATCHES) or not found:
        bench.doing(f"batches of {batch}", passed * len(BATCHES) / bench.seconds)
        for _ in range(max(1, 256 // batch)):
            keys = raw[rng.randrange(len(raw))]
            # The longest prefixes end with a full batch; shorter ones begin further up the chain.
            start = rng.randrange(0, CHAIN, batch)
            some = Keys(keys[32 * start : 32 * (start + batch)], 32)
            there = node.lookup(some)
            node.prefetch(some)
            lease, came = node.acquire(some)
            expect(came, there, "acquired blocks among found ones")
            found += came
            if lease:
                node.release(lease)
            cold = Keys(raw[rng.randrange(len(raw))][: 32 * batch], 32)
            lease, _ = node.acquire(cold)
            if lease:
                node.release(lease)
            fresh = Keys(os.urandom(32 * batch), 32)
            expect(node.put(fresh, b""), batch, "blocks stored")
            if rng.random() < 0.1:
                expect(node.invalidate(fresh), batch, "blocks invalidated")
            node.tick()


def _result(name: str, steps: Steps, node: Node, target: Target | None) -> Result:
    """Returns the longest step of all kinds, and the longest and 99.9 % quantile of each kind."""
    kind = max(steps, key=lambda name: max(steps[name]))
    longest = max(steps[kind])
    return Result(
        name,
        longest,
        "ms",
        BOUND_MS,
        longest / BOUND_MS,
        sum(map(len, steps.values())),
        target=target,
        extra={
            "longest": kind,
            "longest_ms": {name: max(times) for name, times in steps.items()},
            "p999_ms": {name: quantile(times, 0.999) for name, times in steps.items()},
            "blocks": node.placement.residency.blocks.used,
        },
    )
